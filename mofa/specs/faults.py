"""Facts of a long run: how often things fail, what a restart takes, how checkpoints are kept, what GPUs cost."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mofa.specs.base import (
    BytesPerSFact,
    Fact,
    NotNegativeFact,
    SecondsFact,
    ShareFact,
    ShareOrNoneFact,
    Spec,
    UsdFact,
)
from mofa.specs.ranges import LEAST_FACTOR, LEAST_SECONDS, MOST_PUE, MOST_SECONDS, Degree, SpareNodes
from mofa.units import Seconds

RecoveryPath = Literal["process", "node", "network"]
CheckpointMode = Literal["blocking", "async", "memory", "peer", "two-level", "three-level"]
CHECKPOINT_MODES: tuple[CheckpointMode, ...] = ("blocking", "async", "memory", "peer", "two-level", "three-level")
Recovery = Literal["checkpoint", "replica"]
Place = Literal["host", "peers", "storage"]
LEVELS: dict[CheckpointMode, tuple[Place, ...]] = {
    "blocking": ("storage",),
    "async": ("storage",),
    "memory": ("host", "storage"),
    "peer": ("peers", "storage"),
    "two-level": ("host", "storage"),
    "three-level": ("host", "peers", "storage"),
}
"""Where each mode keeps checkpoints, the most frequent first; peers have the node's own copy besides."""


class FailureKind(Spec):
    """One kind of failure and the way back from it.

    ``process``: processes restart on the same nodes, whose host memory survives; ``node``: a node is replaced;
    ``network``: a link or switch is routed around, the nodes stay.
    """

    name: str = Field(min_length=1, max_length=60)
    path: RecoveryPath
    share: ShareOrNoneFact
    """Share of all failures; the kinds' shares sum to 1. [-]"""
    detect_s: SecondsFact
    """From the failure until it is noticed: a hang waits for a time-out. [s]"""
    isolate_s: SecondsFact
    """From the alarm until it is known what to replace. [s]"""


class ComponentSpec(Spec):
    """A part of a node that fails at a constant rate."""

    name: str = Field(min_length=1, max_length=60)
    num_per_node: Degree
    mttf_s: SecondsFact
    """Mean time to failure of one. [s]"""


class ReliabilitySpec(Spec):
    """How often nodes fail, and in which ways."""

    failures_per_node_day: NotNegativeFact | None = None
    """Failures that interrupt a job, per node-day, lemons included. [1/(node day)]"""
    counted_failures: NotNegativeFact | None = None
    """Failures behind that rate: how well it is known, for the band of days; taken as known where absent. [-]"""
    components: tuple[ComponentSpec, ...] = ()
    """In place of a rate: parts whose rates add up."""
    gpus_per_node: Degree = 8
    """GPUs of the nodes that the rate is of; a cluster of other nodes has the same rate per GPU."""
    kinds: Annotated[tuple[FailureKind, ...], Field(min_length=1)]
    shape: Fact | None = None
    """Weibull shape of a node's time between failures; exponential where absent. [-]"""
    lemon_fraction: ShareOrNoneFact | None = None
    """Share of nodes that fail more often. [-]"""
    lemon_multiple: NotNegativeFact | None = None
    """How many times as often they fail as the others. [-]"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.failures_per_node_day is None) == (not self.components):
            raise ValueError("failures_per_node_day and components: give one of the two")
        if self.failures_per_node_day is not None and self.failures_per_node_day.value < LEAST_FACTOR:
            raise ValueError(
                f"failures_per_node_day ({self.failures_per_node_day.value:g}) must be at least {LEAST_FACTOR:g} / "
                "(node day); leave reliability out where nothing fails"
            )
        if self.counted_failures is not None and (self.components or self.counted_failures.value < 1):
            raise ValueError(f"counted_failures ({self.counted_failures.value:g}) must be at least 1 and belong to "
                             "failures_per_node_day; leave it out where the rate was not counted")  # fmt: skip
        total = math.fsum(kind.share.value for kind in self.kinds)
        if not math.isclose(total, 1.0, abs_tol=1e-6):
            raise ValueError(f"kinds: their shares sum to {total:.6g}; make them sum to 1")
        if self.shape is not None and not 0.1 <= self.shape.value <= 10:
            raise ValueError(f"shape ({self.shape.value:g}) must be from 0.1 to 10; 1 is exponential")
        if (self.lemon_fraction is None) != (self.lemon_multiple is None):
            raise ValueError("lemon_fraction and lemon_multiple: give both or none")
        if self.lemon_multiple is not None and self.lemon_multiple.value <= 0:
            raise ValueError(f"lemon_multiple ({self.lemon_multiple.value:g}) must be above 0; 1 is no lemon")
        if any(part.mttf_s.value <= 0 for part in self.components):
            raise ValueError("components: mttf_s must be above 0 s; leave out what never fails")
        return self


class RestartSpec(Spec):
    """What a restart is made of, besides noticing the failure and loading the states. [s]"""

    process_s: SecondsFact
    """Processes start again on the same nodes."""
    reroute_s: SecondsFact
    """The network comes back or is routed around."""
    hot_spare_s: SecondsFact
    """A node that stands by takes over."""
    reschedule_s: SecondsFact
    """The scheduler finds another node: what a job without spares of its own goes through."""
    repair_s: SecondsFact
    """Mean time until a failed node is back among the spares."""
    initialise_s: SecondsFact
    """Communicators and set-up, besides what grows with the ranks."""
    initialise_per_rank_s: SecondsFact
    """Per rank of the job."""
    warm_up_s: SecondsFact
    """Compilation, warm-up steps."""


class CheckpointSpec(Spec):
    """How checkpoints are kept.

    ``blocking``: every rank writes to storage and waits. ``async``: it copies to host memory and goes on, the rest is
    written behind. ``memory``: as async, and after a failure that leaves the node the copy in its host memory is read,
    which is taken more often than storage can follow. ``peer``: as memory, with copies in other nodes' host memory, so
    that a lost node's states are there too. ``two-level`` (host memory, storage) and ``three-level`` (peers between)
    have no writer in the background: computing waits for every copy, and the slower ones are as rare as pays.
    """

    mode: CheckpointMode = "blocking"
    copies: Annotated[int, Field(ge=2, le=16, strict=True)] = 2
    """Copies of ``peer``, the node's own included. [-]"""
    interval_s: Annotated[Seconds, Field(ge=LEAST_SECONDS, le=MOST_SECONDS)] | None = None
    """Compute time between checkpoints; the best one where absent. [s]"""
    in_flight: Annotated[int, Field(ge=1, le=16, strict=True)] = 1
    """Checkpoints that may be under way to storage at once. [-]"""

    @property
    def waits_for_copies(self) -> bool:
        """Whether computing waits until each copy is where it belongs."""
        return self.mode in ("blocking", "two-level", "three-level")

    @property
    def least_nodes_for_copies(self) -> int:
        """Nodes that the copies need. [-]"""
        return self.copies if "peers" in LEVELS[self.mode] else 1


class StorageSpec(Spec):
    """Storage that all nodes share."""

    write_bytes_per_s: BytesPerSFact
    read_bytes_per_s: BytesPerSFact
    node_bytes_per_s: BytesPerSFact | None = None
    """What one node can move to it; its NICs where absent."""


class PriceSpec(Spec):
    """What GPUs cost."""

    usd_per_gpu_hour: UsdFact


def _power(value: float, source: str, provenance: Literal["measured", "datasheet", "assumed"]) -> Fact:
    return Fact(value=value, provenance=provenance, source=source)


_H200 = "power that NVML reported beside the rows of measurements/h200-1gpu and h200-4gpu, over 700 W"


class PowerDrawSpec(Spec):
    """A model of power: a GPU draws a share of its TDP by what it does; the node and the building add theirs."""

    matrix_fraction: ShareFact = _power(0.99, f"{_H200}: sustained matrix products, median 690.6 W", "measured")
    """Matrix products and attention. [-]"""
    memory_fraction: ShareFact = _power(0.65, f"{_H200}: memory-bound kernels, 90th percentile 451.7 W", "measured")
    """Kernels limited by memory, the optimizer. [-]"""
    communication_fraction: ShareFact = _power(0.27, f"{_H200}: collectives, median 191.4 W", "measured")
    """Waiting for exposed communication, checkpoints, loading. [-]"""
    idle_fraction: ShareFact = _power(0.19, f"{_H200}: idle at full clocks beside long copies, 131 W", "measured")
    """Waiting: bubbles, the host, restarts, standing by. [-]"""
    node_overhead_w_per_gpu: NotNegativeFact = _power(
        575.0, "NVIDIA DGX H100 datasheet: at most 10.2 kW with eight GPUs of 700 W; (10.2 - 5.6) kW / 8", "datasheet"
    )
    """Processors, memory, NICs, fans and switches, per GPU. [W]"""
    pue: NotNegativeFact = _power(1.1, "a hyperscale hall, as large operators report; many are higher", "assumed")
    """Power of the building over that of its machines. [-]"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 1 <= self.pue.value <= MOST_PUE:
            raise ValueError(
                f"pue ({self.pue.value:g}) must be from 1 to {MOST_PUE:g}; it is a building's power over its machines'"
            )
        return self


class FaultSpec(Spec):
    """Everything about a long run besides its steps. What is absent leaves what needs it unknown."""

    name: str = Field(min_length=1, max_length=200)
    source: str = Field(min_length=3)
    reliability: ReliabilitySpec | None = None
    restart: RestartSpec | None = None
    checkpoint: CheckpointSpec = CheckpointSpec()
    recovery: Recovery = "checkpoint"
    """``checkpoint``: after a failure all go back to one. ``replica``: the other data-parallel replicas go on, and the
    one that failed comes back with their states; checkpoints are for when all fail."""
    storage: StorageSpec | None = None
    price: PriceSpec | None = None
    power: PowerDrawSpec = PowerDrawSpec()
    spares: SpareNodes | None = None
    """Nodes that stand by, out of the GPUs of the cluster; the search chooses where absent. [nodes]"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.recovery == "replica" and len(LEVELS[self.checkpoint.mode]) > 1:
            raise ValueError(
                f"recovery: replica reads the states of other replicas, so that checkpoint.mode {self.checkpoint.mode} "
                "has nothing to add; use blocking or async"
            )
        return self
