"""The memory of a plan: of its fullest rank, of every pipeline stage, and what was alive at the peak."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from mofa.specs.base import Spec

if TYPE_CHECKING:
    import pandas as pd

CostedBy = Literal["closed_form", "replay"]
REL_TOL = 1e-6
"""What float rounding may do to a sum. [-]"""


def refuse_wrong_sum(what: str, parts: Iterable[float], total: float, unit: str) -> None:
    """Refuse parts that do not sum to their total within float rounding.

    Parameters
    ----------
    what
        What is summed, for the message.
    parts
        The parts. [unit]
    total
        What they must sum to. [unit]
    unit
        Of the message.

    Raises
    ------
    ValueError
        If they do not.

    Examples
    --------
    >>> refuse_wrong_sum("parts", [1.0, 2.0], 3.0, "s")
    >>> refuse_wrong_sum("parts", [1.0, 2.0], 4.0, "s")
    Traceback (most recent call last):
    ValueError: parts sum to 3 s, not to 4 s
    """
    parts_sum = math.fsum(parts)
    if not math.isclose(parts_sum, total, rel_tol=REL_TOL, abs_tol=1e-12):
        raise ValueError(f"{what} sum to {parts_sum:.9g} {unit}, not to {total:.9g} {unit}")


def refuse_negative_parts(what: str, parts: Mapping[Any, float]) -> None:
    """Refuse parts below zero.

    Parameters
    ----------
    what
        What the parts are of, for the message.
    parts
        By name; of any unit. [unit]

    Raises
    ------
    ValueError
        If one is, with the lowest.

    Examples
    --------
    >>> refuse_negative_parts("exposed", {"tp": -0.5, "pp": 1.0})
    Traceback (most recent call last):
    ValueError: exposed.tp (-0.5) must not be negative
    """
    if min(parts.values(), default=0.0) < 0:
        name, value = min(parts.items(), key=itemgetter(1))
        raise ValueError(f"{what}.{name} ({value:.6g}) must not be negative")


class LiveTensors(Spec):
    """One row of the list of live tensors: all of one name and kind at an instant, with their number and bytes."""

    name: str = Field(description="What they are, as the block that makes them calls them.")
    kind: str = Field(description="One of the keys of by_component.")
    count: int = Field(ge=0, description="How many: over layers and micro-batches in flight. [-]")
    bytes: float = Field(ge=0, description="All of them together, as the allocator rounds them. [B]")


class OutOfMemory(Spec):
    """The first request that found no room on the device, although free segments were given back."""

    step: int = Field(ge=0, description="Training step, from 1; 0 is before the first. [-]")
    where: str = Field(description="What ran.")
    missing_bytes: float = Field(ge=0, description="What the request wanted beyond what the device has. [B]")
    allocated_bytes: float = Field(ge=0, description="Live tensors then. [B]")
    reserved_bytes: float = Field(ge=0, description="What the caching allocator held then. [B]")
    tensors: tuple[LiveTensors, ...] = Field(description="What was alive then, largest first.")


class MemoryCurve(Spec):
    """Memory of one rank over a step: of every stretch of time its highest and its lowest instant."""

    time_s: tuple[float, ...] = Field(description="Since the step began, rising. [s]")
    reserved_bytes: tuple[float, ...] = Field(description="What the caching allocator held. [B]")
    kinds: dict[str, tuple[float, ...]] = Field(description="Live tensors by kind; they sum to what is allocated. [B]")
    peak: int = Field(ge=0, description="Index of the instant at which most is allocated. [-]")

    @model_validator(mode="after")
    def _check(self) -> Self:
        n = len(self.time_s)
        if len(self.reserved_bytes) != n or any(len(values) != n for values in self.kinds.values()) or self.peak >= n:
            raise ValueError(f"a memory curve's arrays must all have its number of instants ({n})")
        return self


class RankMemory(Spec):
    """Memory of one of the ranks of a stage, which differ by the tokens that their experts get."""

    tokens_over_mean: float = Field(
        ge=0, description="Tokens that its experts get over the mean of all ranks: mean over the stage's layers. [-]"
    )
    allocated_bytes: float = Field(ge=0, description="Peak of the live tensors. [B]")
    reserved_bytes: float = Field(ge=0, description="Peak of what the caching allocator holds. [B]")
    device_bytes: float = Field(ge=0, description="Reserved plus CUDA context plus communicators. [B]")


class StageRanks(Spec):
    """The ranks of a stage whose experts get the fewest and the most tokens under uneven routing."""

    emptiest: RankMemory = Field(description="The one with the fewest; its torn blocks may reserve more.")
    fullest: RankMemory = Field(description="The one with the most.")
    tokens_over_mean: tuple[float, ...] = Field(
        default=(),
        description="Of every rank of an expert-parallel group, where each layer's counts are known; else empty. [-]",
    )

    def allocated_bytes_of_ep_rank(self, ep_rank: int) -> float:
        """Peak of the live tensors of a rank of the group, between those of the two ends by its tokens. [B]

        Activations are linear in tokens; what else a peak holds is the same. Needs counts of every rank.

        Parameters
        ----------
        ep_rank
            Its place in the expert-parallel group, from 0. [-]

        Returns
        -------
        float
            [B]
        """
        low, high = self.emptiest, self.fullest
        span = high.tokens_over_mean - low.tokens_over_mean
        share = (self.tokens_over_mean[ep_rank] - low.tokens_over_mean) / span if span else 1.0
        return low.allocated_bytes + share * (high.allocated_bytes - low.allocated_bytes)


class StageMemory(Spec):
    """Memory of the rank of one pipeline stage that reserves most."""

    stage: int = Field(ge=0, description="Index of the pipeline stage, from 0. [-]")
    num_layers: int = Field(ge=0, description="Transformer layers of the stage, over all its chunks. [-]")
    layers_by_chunk: tuple[int, ...] = Field(
        default=(), description="Transformer layers of each chunk of the stage, in forward order. [-]"
    )
    recomputed_layers: int = Field(default=0, ge=0, description="Layers of the stage that are recomputed whole. [-]")
    in_flight_micro_batches: float | None = Field(
        default=None, ge=0, description="Micro-batches whose activations the stage holds at the peak. [-]"
    )
    instant: str | None = Field(default=None, description="The instant at which the allocated memory peaks.")
    allocated_bytes: float = Field(ge=0, description="Peak of the live tensors. [B]")
    reserved_bytes: float = Field(ge=0, description="Peak of what the caching allocator holds. [B]")
    device_bytes: float = Field(ge=0, description="Reserved plus CUDA context plus communicators. [B]")
    by_component: dict[str, float] = Field(
        description="Live tensors by kind at the allocated peak, allocator slack, context, communicators; "
        "sums to device_bytes. [B]"
    )

    ranks: StageRanks | None = Field(
        default=None, description="What its ranks differ by under uneven routing; null where they are alike."
    )
    costed_by: CostedBy = Field(default="closed_form", description="What predicted this stage's numbers.")
    tensors: tuple[LiveTensors, ...] = Field(
        default=(), description="What is alive at the allocated peak, largest first; of the replay."
    )
    out_of_memory: OutOfMemory | None = Field(
        default=None, description="Where the device is full first; null where it never is. Of the replay."
    )
    curve: MemoryCurve | None = Field(default=None, description="Memory over a step, of the replay; null where absent.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.layers_by_chunk and sum(self.layers_by_chunk) != self.num_layers:
            raise ValueError(
                f"by_stage[{self.stage}].layers_by_chunk sum to {sum(self.layers_by_chunk)} layers, not to "
                f"num_layers ({self.num_layers})"
            )
        what, parts = f"by_stage[{self.stage}].by_component", self.by_component
        refuse_negative_parts(what, parts)
        refuse_wrong_sum(what, parts.values(), self.device_bytes, "B")
        return self


class Memory(Spec):
    """Memory of the rank with the most device memory, against what it offers; others may have allocated more."""

    allocated_bytes: float = Field(ge=0, description="Peak of that rank's live tensors. [B]")
    reserved_bytes: float = Field(ge=0, description="Peak of what the caching allocator holds. [B]")
    device_bytes: float = Field(ge=0, description="Reserved plus CUDA context plus communicators. [B]")
    margin_bytes: float = Field(ge=0, description="What a plan must not fill of the capacity. [B]")
    peak_bytes: float = Field(ge=0, description="Equal to device_bytes. [B]")
    capacity_bytes: float = Field(gt=0, description="Memory that CUDA reports for the device. [B]")
    fits: bool = Field(description="Whether device_bytes + margin_bytes <= capacity_bytes.")
    by_component: dict[str, float] = Field(
        description="Live tensors by kind at the allocated peak, allocator slack, context, communicators; "
        "sums to peak_bytes. [B]"
    )
    by_stage: tuple[StageMemory, ...] = Field(default=(), description="One entry per pipeline stage, in order.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse_negative_parts("memory.by_component", self.by_component)
        refuse_wrong_sum("memory.by_component", self.by_component.values(), self.peak_bytes, "B")
        if not math.isclose(self.peak_bytes, self.device_bytes, rel_tol=REL_TOL):
            raise ValueError(
                f"peak_bytes ({self.peak_bytes:.9g} B) must equal device_bytes ({self.device_bytes:.9g} B)"
            )
        slack = 1 + REL_TOL
        if self.allocated_bytes > self.reserved_bytes * slack or self.reserved_bytes > self.device_bytes * slack:
            raise ValueError(
                f"allocated_bytes ({self.allocated_bytes:.9g}) <= reserved_bytes ({self.reserved_bytes:.9g}) "
                f"<= device_bytes ({self.device_bytes:.9g}) must hold"
            )
        if self.fits != (self.device_bytes + self.margin_bytes <= self.capacity_bytes):
            raise ValueError("fits must say whether device_bytes + margin_bytes <= capacity_bytes")
        if self.by_stage:
            fullest = max(stage.device_bytes for stage in self.by_stage)
            if not math.isclose(fullest, self.device_bytes, rel_tol=REL_TOL):
                raise ValueError(
                    f"the fullest stage ({fullest:.9g} B) must equal device_bytes ({self.device_bytes:.9g} B)"
                )
        return self

    @property
    def limit_bytes(self) -> float:
        """What a plan may fill: the capacity less the margin. [B]"""
        return self.capacity_bytes - self.margin_bytes

    @property
    def free_bytes(self) -> float:
        """What the rank leaves of the limit; negative where the plan does not fit. [B]"""
        return self.capacity_bytes - self.device_bytes - self.margin_bytes

    def to_frame(self) -> pd.DataFrame:
        """One row per component of the fullest rank's memory: component, bytes, fraction of the peak."""
        import pandas as pd

        rows = [(name, value, value / self.peak_bytes) for name, value in self.by_component.items()]
        return pd.DataFrame(rows, columns=["component", "bytes", "fraction"])

    def stages_to_frame(self) -> pd.DataFrame:
        """One row per pipeline stage; the components are columns ``<name>_bytes``."""
        import pandas as pd

        rows = []
        for stage in self.by_stage:
            row = stage.model_dump(exclude={"by_component", "tensors", "out_of_memory", "curve", "ranks"})
            row["layers_by_chunk"] = " ".join(map(str, stage.layers_by_chunk))
            row.update({f"{name}_bytes": value for name, value in stage.by_component.items()})
            rows.append(row)
        return pd.DataFrame(rows).fillna({f"{n}_bytes": 0.0 for s in self.by_stage for n in s.by_component})
