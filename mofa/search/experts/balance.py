"""Token scheduling over replicas of experts: the simulation behind ``mofa balance``, and its result types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from mofa.errors import SpecError
from mofa.routing.counts import CountedModel, read_counts
from mofa.routing.presets import memfine_iteration_7_shares
from mofa.routing.rank_load import draw_expert_shares
from mofa.specs.base import Spec
from mofa.specs.routing import RoutingSpec

if TYPE_CHECKING:
    import pandas as pd

    from mofa.routing.balance.setup import BalanceSetup
    from mofa.routing.balance.token_scheduling import PlayedMicroBatches

FloatA = NDArray[np.float64]
IntA = NDArray[np.int64]
Progress = Callable[[int, int], None]
PRESET_LAYERS = 12


class TimeDistribution(Spec):
    """A distribution of times."""

    median: float = Field(ge=0, description="Median. [s]")
    p99: float = Field(ge=0, description="99th percentile. [s]")
    first: float = Field(ge=0, description="Mean of the layers' first solves, which start cold. [s]")


class BalancedGroupSummary(Spec):
    """The group of experts that was balanced."""

    name: str = Field(description="The workload, or 'experts' where there is none.")
    experts: int = Field(gt=0, description="Experts of a layer. [-]")
    gpus: int = Field(gt=0, description="GPUs of the merged group. [-]")
    ep: int = Field(gt=0, description="Expert-parallel degree. [ranks]")
    merged: int = Field(gt=1, description="Expert-parallel groups that are merged: replicas of an expert. [-]")
    experts_per_gpu: int = Field(gt=0, description="Replicas that a GPU holds. [-]")
    layers: int = Field(gt=0, description="Layers that were played. [-]")
    micro_batches: int = Field(gt=0, description="Micro-batches that were played. [-]")
    assignments: float = Field(gt=0, description="Token copies of a micro-batch in the group, on average. [tokens]")
    routing: str = Field(description="How tokens fall on experts.")
    seed: int = Field(ge=0, description="Of draws and placements.")
    placement: Literal["symmetric", "given"] = Field(description="Where replicas are scheduled.")
    solver: Literal["lp", "flow", "communication"] = Field(description="Which program scheduled the replicas.")


class TokenMovement(Spec):
    """Tokens that leave their GPU or node, over the mean tokens of a GPU: of the busiest, sent or received. [-]"""

    plain: float = Field(ge=0, description="Plain expert parallelism. [-]")
    micro_moe: float = Field(ge=0, description="Scheduled replicas. [-]")
    micro_moe_adaptive: float = Field(ge=0, description="Scheduled replicas on adaptive placements. [-]")


class AdaptivePlacement(Spec):
    """Replica placements that are changed as the loads change."""

    new_placements: int = Field(ge=0, description="Over all layers and micro-batches. [-]")
    settled_max_over_mean: float | None = Field(
        default=None, description="Mean after the last new placement of each layer; null where none followed. [-]"
    )
    migration_s: float | None = Field(
        default=None,
        ge=0,
        description="Mean time of one new placement of a stage's layers; null without a cluster. [s]",
    )


class LayerBalance(Spec):
    """How balanced experts of one layer are under each scheme, averaged over micro-batches. [-]"""

    layer: int = Field(ge=0, description="Index among the layers with experts, from 0. [-]")
    max_over_mean: dict[str, float] = Field(description="Fullest GPU over the mean, by scheme. [-]")


class BalancedStepComparison(Spec):
    """One training step without and with scheduled replicas."""

    strategy: str = Field(description="The strategy, without balancing.")
    before_s: float = Field(gt=0, description="Plain expert parallelism. [s]")
    after_s: float = Field(gt=0, description="Scheduled replicas, with their overhead. [s]")
    gain_fraction: float = Field(description="Throughput gained: before / after - 1. [-]")
    adaptive_s: float = Field(gt=0, description="Scheduled replicas on adaptive placements; migration apart. [s]")
    payback_steps: float | None = Field(
        default=None,
        ge=0,
        description="Steps after which one new placement of all layers has gained what it cost; null where none was "
        "made or none gains. [-]",
    )
    eplb_s: float = Field(gt=0, description="Replicas by past loads with equal parts; migration apart. [s]")
    capacity_s: float = Field(gt=0, description="Plain, tokens beyond the capacity dropped. [s]")
    balanced_s: float = Field(gt=0, description="Were the routing balanced, without scheduling. [s]")
    overhead_s: float = Field(ge=0, description="Of it, host time of scheduling one layer and micro-batch. [s]")
    before_bytes: float = Field(gt=0, description="Memory of the fullest rank before. [B]")
    after_bytes: float = Field(gt=0, description="Memory of the fullest rank after. [B]")
    adaptive_bytes: float = Field(gt=0, description="Memory of the fullest rank on adaptive placements. [B]")
    limit_bytes: float = Field(gt=0, description="What a plan may fill of a GPU: the capacity less the margin. [B]")
    fits_before: bool = Field(description="Whether the fullest rank fits before.")
    fits_after: bool = Field(description="Whether the fullest rank fits after.")
    fits_adaptive: bool = Field(description="Whether the fullest rank fits on adaptive placements.")


class BalanceReport(Spec):
    """What ``mofa balance --json`` prints."""

    schema_version: Literal["2.0"] = Field(default="2.0", description="Version of this contract.")
    group: BalancedGroupSummary
    max_over_mean: dict[str, float] = Field(
        description="Tokens of the fullest GPU over the mean, averaged over layers and micro-batches: plain, "
        "micro_moe, micro_moe_adaptive, micro_moe_random (placement), eplb, capacity (over the mean before dropping) "
        "and lower_bound, the maximum induced density of micro_moe's placement (eplb and micro_moe_adaptive have "
        "others and may lie below it); eplb and micro_moe_adaptive follow past loads and count from "
        "the second micro-batch on. [-]"
    )
    worst_max_over_mean: dict[str, float] = Field(description="The same, the largest that occurred. [-]")
    gap_tokens: float = Field(description="Largest excess of micro_moe's fullest GPU over the density. [tokens]")
    dropped_fraction: float = Field(ge=0, le=1, description="Copies that the capacity baseline drops. [-]")
    sent_over_mean: TokenMovement
    crossing_over_mean: TokenMovement
    adaptive: AdaptivePlacement
    solve_s: TimeDistribution
    layers: tuple[LayerBalance, ...]
    step: BalancedStepComparison | None = Field(default=None, description="Null without a cluster.")
    notes: tuple[str, ...] = ()

    def to_frame(self) -> pd.DataFrame:
        """One row per layer: layer and max over mean by scheme."""
        import pandas as pd

        return pd.DataFrame([{"layer": row.layer, **row.max_over_mean} for row in self.layers])


def expert_shares_by_popularity(routing: RoutingSpec, num_experts: int) -> FloatA:
    """Experts' shares of the tokens, the most popular first; twelve layers of a preset. (L, E)

    >>> expert_shares_by_popularity(RoutingSpec(kind="zipf", s=1), 4).round(2).tolist()
    [[0.48, 0.24, 0.16, 0.12]]
    """
    if routing.kind == "preset":
        return memfine_iteration_7_shares(PRESET_LAYERS, num_experts)
    return np.sort(draw_expert_shares(routing, (1, num_experts)), axis=-1)[:, ::-1]


def balance_experts(
    setup: BalanceSetup, routing: RoutingSpec, *, assignments: int = 65_536, micro_batches: int = 100,
    trace: str | Path | None = None, progress: Progress | None = None,
) -> BalanceReport:  # fmt: skip
    """Balance a group of experts without a workload.

    Parameters
    ----------
    setup
        The group.
    routing
        How tokens fall on experts, the most popular first, the same for every micro-batch.
    assignments
        Token copies of a micro-batch in the group; they are drawn from the distribution. [tokens]
    micro_batches
        How many. [-]
    trace
        Recorded counts to use instead of draws. Where they name source ranks, GPUs get these ranks' tokens.
    progress
        Told layers done and in all.

    Raises
    ------
    SpecError
        If assignments do not divide over the GPUs, or the trace is of other experts or of other GPUs.
    """
    from mofa.routing.balance.inputs import deal_tokens_to_gpus, draw_tokens_per_gpu, tokens_per_gpu_of_source_counts
    from mofa.routing.balance.token_scheduling import play_micro_batches

    notes: tuple[str, ...] = ()
    if trace is not None:
        counts = read_counts(trace, CountedModel("the group", setup.num_experts), sources=True)
        if counts.by_source is None:
            inputs = deal_tokens_to_gpus(counts.tokens.astype(np.int64), setup.num_gpus, setup.seed)
            notes = ("the trace has no source_rank: tokens are dealt out to GPUs at random",)
        else:
            inputs = tokens_per_gpu_of_source_counts(counts.by_source.astype(np.int64), setup.num_gpus, setup.seed)
            notes = (f"tokens of each GPU by source rank, of which the trace has {counts.by_source.shape[3]}",)
    else:
        if micro_batches < 1:
            raise SpecError(f"micro-batches ({micro_batches}) must be at least 1")
        if assignments < 1 or assignments % setup.num_gpus:
            raise SpecError(f"assignments ({assignments}) must be a multiple of gpus ({setup.num_gpus}); change one")
        shares = expert_shares_by_popularity(routing, setup.num_experts)
        every = np.broadcast_to(shares, (micro_batches, *shares.shape))
        inputs = draw_tokens_per_gpu(every, assignments // setup.num_gpus, setup.num_gpus, setup.seed)
    text = str(routing) if trace is None else f"counts of {trace}"
    return balance_report_of_played(
        "experts", setup, text, inputs, play_micro_batches(inputs, setup, progress), notes=notes
    )


def balance_report_of_played(
    name: str,
    setup: BalanceSetup,
    routing: str,
    inputs: IntA,
    played: PlayedMicroBatches,
    *,
    notes: tuple[str, ...] = (),
) -> BalanceReport:
    """The report of a simulation."""
    warm, ratio = played.warm_solve_s, played.values_without_first_micro_batch(played.max_over_mean)
    if inputs.shape[0] == 1:
        notes = (*notes, "one micro-batch has no past: replicas by past loads are plain, no placement follows loads")

    def mean(values: Mapping[str, FloatA]) -> dict[str, float]:
        return {key: float(value.mean()) for key, value in values.items()}

    return BalanceReport(
        group=BalancedGroupSummary(
            name=name, experts=setup.num_experts, gpus=setup.num_gpus, ep=setup.ep, merged=setup.num_merged_ep_groups,
            experts_per_gpu=setup.experts_per_gpu, layers=inputs.shape[1], micro_batches=inputs.shape[0],
            assignments=float(inputs.sum()) / (inputs.shape[0] * inputs.shape[1]), routing=routing, seed=setup.seed,
            solver=setup.resolved_solver, placement="symmetric" if setup.placement is None else "given",
        ),
        max_over_mean=mean(ratio),
        worst_max_over_mean={key: float(value.max()) for key, value in ratio.items()},
        gap_tokens=float(played.gap_tokens.max()),
        dropped_fraction=max(played.dropped_fraction, 0.0),
        sent_over_mean=TokenMovement(**mean(played.values_without_first_micro_batch(played.sent))),
        crossing_over_mean=TokenMovement(**mean(played.values_without_first_micro_batch(played.crossing))),
        adaptive=AdaptivePlacement(new_placements=len(played.moved), settled_max_over_mean=played.settled),
        solve_s=TimeDistribution(
            median=float(np.median(warm)), p99=float(np.quantile(warm, 0.99)), first=float(played.solve_s[0].mean())
        ),
        layers=tuple(
            LayerBalance(
                layer=i, max_over_mean={key: float(value[:, i].mean()) for key, value in ratio.items()}
            )
            for i in range(inputs.shape[1])
        ),
        notes=notes,
    )  # fmt: skip
