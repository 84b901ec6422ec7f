"""The memory of a replay in the form of the JSON contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mofa.cost.breakdown import LIVE_COMPONENTS, StageDetail
from mofa.plan.memory import LiveTensors, Memory, MemoryCurve, OutOfMemory, RankMemory, StageMemory, StageRanks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mofa.cost.estimate import TableEstimator
    from mofa.replay.allocator.timeline import LiveTensor
    from mofa.replay.memory.rank_memory import ReplayedRankMemory
    from mofa.replay.memory_curve import MemoryOverTime
    from mofa.replay.replayer import Replayer

NAMED = 15
"""Most names in a list of live tensors; the rest is summed up by kind. [-]"""


class ExpertRankRange(NamedTuple):
    """The range over expert-parallel ranks under uneven routing: tokens at both ends, memory at the emptiest."""

    fewest: float
    """Tokens of the emptiest rank over the mean. [-]"""
    most: float
    """Tokens of the fullest rank over the mean. [-]"""
    emptiest: StageDetail
    """Memory of the emptiest rank, by stage."""


def stage_memory_of_replay(closed: StageMemory, replayer: Replayer, curve: MemoryOverTime | None = None) -> StageMemory:
    """The memory of a pipeline rank that was played, as plans hold it; with its curve over time where given."""
    rank = replayer.rank_memory(closed.stage)
    parts = {name: float(rank.peak_instant.alive[name]) for name in LIVE_COMPONENTS}
    parts["allocator_slack"] = float(rank.peak_reserved - rank.allocated)
    parts["cuda_context"] = replayer.context_bytes
    parts["communicators"] = replayer.communicator_bytes[closed.stage]
    return StageMemory(
        stage=closed.stage,
        num_layers=closed.num_layers,
        layers_by_chunk=closed.layers_by_chunk,
        recomputed_layers=closed.recomputed_layers,
        in_flight_micro_batches=closed.in_flight_micro_batches,
        instant=rank.peak_instant.where,
        allocated_bytes=float(rank.allocated),
        reserved_bytes=float(rank.peak_reserved),
        device_bytes=replayer.device_bytes(closed.stage),
        by_component=parts,
        ranks=_ranks(closed.stage, replayer),
        costed_by="replay",
        tensors=_tensors(rank.peak_instant.tensors),
        out_of_memory=_out_of_memory(rank),
        curve=_curve(curve),
    )


def _ranks(stage: int, replayer: Replayer) -> StageRanks | None:
    """How the ranks of a stage differ in memory, by replay; None where they are alike."""
    ends = replayer.peaks_of_fewest_and_most_tokens(stage)
    if ends is None:
        return None
    outside = replayer.context_bytes + replayer.communicator_bytes[stage]
    few, many = (
        RankMemory(
            tokens_over_mean=memory.tokens_over_mean, allocated_bytes=memory.allocated, reserved_bytes=memory.reserved,
            device_bytes=memory.reserved + outside,
        )
        for memory in ends
    )  # fmt: skip
    return StageRanks(emptiest=few, fullest=many, tokens_over_mean=replayer.tokens_over_mean_by_rank(stage))


def emptiest_and_fullest_expert_rank(estimator: TableEstimator) -> ExpertRankRange | None:
    """The emptiest and the fullest expert-parallel rank of one strategy, in closed form; None where all are alike."""
    ep = int(estimator.table.ep[0])
    least = estimator.loads.with_memory_of_emptiest_rank(ep) if int(estimator.table.balancing[0]) == 0 else None
    if least is None:
        return None
    emptier = type(estimator)(estimator.workload, estimator.cluster, estimator.framework, estimator.table, least)
    detail = emptier.only_row_without_time().detail
    assert detail is not None
    return ExpertRankRange(least.quantile_rows_over_mean[ep], estimator.loads.quantile_rows_over_mean[ep], detail)


def expert_ranks_of_stage(stage: int, detail: StageDetail, span: ExpertRankRange) -> StageRanks | None:
    """How the ranks of a stage differ in memory, in closed form; None where the stage has no experts."""

    def rank(tokens: float, of: StageDetail) -> RankMemory:
        names = ("allocated_bytes", "reserved_bytes", "device_bytes")
        return RankMemory(tokens_over_mean=tokens, **{name: float(getattr(of, name)[0, stage]) for name in names})

    few, many = rank(span.fewest, span.emptiest), rank(span.most, detail)
    return None if few.allocated_bytes == many.allocated_bytes else StageRanks(emptiest=few, fullest=many)


def memory_with_replayed_stages(closed: Memory, played: Iterable[StageMemory]) -> Memory:
    """The memory of a plan, with replayed ranks in place of their closed form."""
    known = {stage.stage: stage for stage in played}
    stages = [known.get(stage.stage, stage) for stage in closed.by_stage]
    fullest = max(stages, key=lambda stage: (stage.device_bytes, -stage.stage))
    return Memory(
        allocated_bytes=fullest.allocated_bytes,
        reserved_bytes=fullest.reserved_bytes,
        device_bytes=fullest.device_bytes,
        margin_bytes=closed.margin_bytes,
        peak_bytes=fullest.device_bytes,
        capacity_bytes=closed.capacity_bytes,
        fits=fullest.device_bytes + closed.margin_bytes <= closed.capacity_bytes,
        by_component=fullest.by_component,
        by_stage=tuple(stages),
    )


def _tensors(live: Sequence[LiveTensor]) -> tuple[LiveTensors, ...]:
    """The largest tensors by name, the others summed by kind; all sum to the allocated bytes."""
    named = [LiveTensors(name=t.name, kind=t.group, count=t.count, bytes=float(t.bytes)) for t in live[:NAMED]]
    rest: dict[str, list[int]] = {}
    for t in live[NAMED:]:
        sums = rest.setdefault(t.group, [0, 0])
        sums[0] += t.count
        sums[1] += t.bytes
    others = [LiveTensors(name="others", kind=kind, count=n, bytes=float(size)) for kind, (n, size) in rest.items()]
    return (*named, *sorted(others, key=lambda t: -t.bytes))


def _out_of_memory(rank: ReplayedRankMemory) -> OutOfMemory | None:
    full = rank.out_of_memory_instant
    if full is None:
        return None
    return OutOfMemory(
        step=full.step, where=full.where, missing_bytes=float(rank.missing_bytes),
        allocated_bytes=float(full.allocated), reserved_bytes=float(full.reserved), tensors=_tensors(full.tensors),
    )  # fmt: skip


def _curve(curve: MemoryOverTime | None) -> MemoryCurve | None:
    if curve is None:
        return None
    from mofa.replay.allocator.timeline import GROUPS

    return MemoryCurve(
        time_s=tuple(curve.time_s.tolist()),
        reserved_bytes=tuple(map(float, curve.reserved.tolist())),
        kinds={name: tuple(map(float, curve.alive[:, i].tolist())) for i, name in enumerate(GROUPS)},
        peak=curve.peak,
    )
