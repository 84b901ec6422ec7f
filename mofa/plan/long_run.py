"""The figures of a long run that a plan carries: the part of the JSON contract that failures and money decide."""

from __future__ import annotations

import math
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from mofa.faults.ledger import Ledger
from mofa.specs.base import Spec
from mofa.specs.faults import CheckpointMode, Place, Recovery

Figure = Literal[
    "ettr", "checkpoint_interval_s", "effective_tokens_per_s_per_gpu", "days", "gpu_hours", "usd", "kwh"
]  # fmt: skip
FIGURES: tuple[Figure, ...] = get_args(Figure)
Objective = Literal["tokens", "days", "usd", "kwh"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
NO_FAULTS = "no reliability given; name a fault profile"


class Days(Spec):
    """Wall-clock time of the whole run. [d]"""

    p10: float = Field(gt=0, description="One run in ten is over by then. [d]")
    p50: float = Field(gt=0, description="Half of the runs are over by then. [d]")
    p90: float = Field(gt=0, description="Nine runs in ten are over by then. [d]")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.p10 <= self.p50 <= self.p90:
            raise ValueError(f"days: p10 ({self.p10:g}) <= p50 ({self.p50:g}) <= p90 ({self.p90:g}) must hold")
        return self


class CheckpointLevel(Spec):
    """A level of checkpoints: a failure reads the most frequent one that survives it."""

    where: Place = Field(description="host: the node's own memory; peers: other nodes' too; storage.")
    every: int = Field(ge=1, description="Every so manieth checkpoint is of this level or a rarer one. [-]")
    block_s: float = Field(ge=0, description="Time for which it blocks computing. [s]")
    persist_s: float = Field(ge=0, description="From then until it can be restored. [s]")


class LongRunDetail(Spec):
    """What the figures of a long run are made of."""

    faults: str = Field(description="Name of the fault profile.")
    mode: CheckpointMode = Field(description="How checkpoints are kept.")
    recovery: Recovery = Field(description="From a checkpoint, or from the other replicas, which go on meanwhile.")
    num_replicas: int = Field(ge=1, description="Replicas that go on without one another; 1: all restart. [-]")
    mtbf_s: float | None = Field(gt=0, description="Mean time between failures of the job; null where none fails. [s]")
    spares: int = Field(ge=0, description="Nodes that stand by; 0: the scheduler replaces nodes. [nodes]")
    whole_checkpoint_bytes: float = Field(ge=0, description="One checkpoint of all ranks. [B]")
    levels: tuple[CheckpointLevel, ...] = Field(
        min_length=1, description="Where checkpoints are kept, the most frequent first; storage is the last."
    )
    block_s: float = Field(ge=0, description="Time for which one of the most frequent level blocks computing. [s]")
    persist_s: float = Field(ge=0, description="From its end until storage has one that goes there. [s]")
    safe_every: int = Field(ge=1, description="Every so manieth checkpoint goes to storage. [-]")
    restart_s: float = Field(ge=0, description="From a failure to computing again, as one number for all kinds. [s]")
    host_bytes_per_node: float = Field(ge=0, description="Host memory that checkpoints take on a node. [B]")
    watts_per_gpu: float = Field(
        ge=0, description="Average power per GPU of the cluster, spares, nodes and building included: a model. [W]"
    )
    ledger: Ledger = Field(description="Shares of the wall-clock time; they sum to 1.")


class LongRunFields(Spec):
    """Fields of a plan about the whole run; a figure that is null has its reason in ``unknown``."""

    ettr: float | None = Field(default=None, ge=0, le=1, description="Productive over wall-clock time. [-]")
    checkpoint_interval_s: float | None = Field(default=None, gt=0, description="Compute time between checkpoints. [s]")
    effective_tokens_per_s_per_gpu: float | None = Field(
        default=None, ge=0, description="tokens_per_s_per_gpu times ettr, over all GPUs, spares included. [tokens/s]"
    )
    days: Days | None = Field(default=None, description="Wall-clock time of the workload's tokens. [d]")
    gpu_hours: float | None = Field(default=None, gt=0, description="Expected, of all GPUs, spares included. [h]")
    usd: float | None = Field(default=None, ge=0, description="gpu_hours at the price given. [USD]")
    kwh: float | None = Field(default=None, gt=0, description="Energy of the run by the power model. [kWh]")
    unknown: dict[Figure, str] = Field(
        default_factory=lambda: dict.fromkeys(FIGURES, NO_FAULTS), description="Why a figure above is null."
    )
    days_without_failures: float | None = Field(
        default=None, gt=0, description="The workload's tokens at the step's speed; null without tokens. [d]"
    )
    spare_gpus: int = Field(default=0, ge=0, description="GPUs of the cluster that stand by. [-]")
    checkpoint_bytes: float | None = Field(
        default=None, ge=0, description="What a rank of the heaviest stage saves in a checkpoint. [B]"
    )
    long_run: LongRunDetail | None = Field(default=None, description="What the figures rest on; null without ettr.")

    @model_validator(mode="after")
    def _check_long_run(self) -> Self:
        null = {name for name in FIGURES if getattr(self, name) is None}
        if null != set(self.unknown):
            odd = sorted(null ^ set(self.unknown))[0]
            raise ValueError(f"unknown: {odd} must be there exactly if it is null; give its reason or its value")
        if (self.ettr is None) != (self.long_run is None):
            raise ValueError("long_run: must be there exactly if ettr is known")
        if self.ettr is not None and self.long_run is not None:
            productive = self.long_run.ledger.productive
            if not math.isclose(self.ettr, productive, abs_tol=1e-9):
                raise ValueError(f"ettr ({self.ettr:.9g}) must be the ledger's productive share ({productive:.9g})")
        return self

    def long_run_columns(self) -> dict[str, Any]:
        """The figures as flat columns."""
        days = self.days
        return {
            "days_without_failures": self.days_without_failures,
            **{name: getattr(self, name) for name in FIGURES if name != "days"},
            **{f"days_{p}": None if days is None else getattr(days, p) for p in ("p10", "p50", "p90")},
            "spare_gpus": self.spare_gpus,
            "checkpoint_bytes": self.checkpoint_bytes,
        }
