"""Build plans from costed rows: the numbers of one strategy in the form of the JSON contract."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mofa.cost.block.routing_loads import RoutingLoads
from mofa.cost.breakdown import HIDDEN_COMPONENTS, MEMORY_COMPONENTS, TIME_COMPONENTS, Breakdown
from mofa.cost.estimate import TableEstimator
from mofa.cost.libraries import step_fractions_on_layer_library
from mofa.cost.memory.row_memory import RowMemory
from mofa.cost.model_flops import FlopsConvention, model_flops_per_token
from mofa.cost.provenance import (
    Seen,
    memory_bound_op_names,
    op_size_ranges_by_family,
    unaligned_product_ops,
)
from mofa.cost.stages import Stages
from mofa.plan.memory import Memory, StageMemory
from mofa.plan.result import Plan
from mofa.plan.step_parts import Time
from mofa.search.recomputed_layers import fewest_recomputed_layers, more_recomputed_layers
from mofa.search.to_plan.borrowed_facts import borrowed_fact_notes
from mofa.search.to_plan.layout_notes import launch_layout, layout_notes
from mofa.search.to_plan.notes import (
    alignment_note,
    closed_form_margin_note,
    dispatch_by_index_note,
    host_notes,
    notes_of_every_plan,
    token_scheduling_note,
    unmeasured_model_notes,
    untested_option_notes,
)
from mofa.search.to_plan.replayed_memory import (
    ExpertRankRange,
    emptiest_and_fullest_expert_rank,
    expert_ranks_of_stage,
    memory_with_replayed_stages,
    stage_memory_of_replay,
)
from mofa.search.to_plan.replayed_time import DUST, exposed_times_by_stage
from mofa.search.to_plan.step_band import step_band
from mofa.search.to_plan.step_provenance import provenance_of_exposed
from mofa.search.workers import WorkerProcesses
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.residuals import load_closed_form_residuals, load_residuals
from mofa.specs.shared_facts import load_shared_facts
from mofa.specs.strategy import StrategyTable
from mofa.specs.workload import WorkloadSpec
from mofa.units import SECONDS_PER_DAY

if TYPE_CHECKING:
    from mofa.replay.replayer import Replayer
    from mofa.replay.time.time_replayed import Computation, ReplayedTime

SMALL = 40_000
"""Passes of layers and chunks up to which a replay takes no more processes: four seconds or less of one, where each
process that is started takes one to begin, and describes again what others have. [-]"""


def margin_bytes(cluster: ClusterSpec, framework: FrameworkSpec) -> float:
    """Memory that a plan leaves free for errors of the prediction: the 99 % quantile of measured residuals, or the most
    of those of its CUDA graphs. [B]"""
    return load_residuals().memory_margin(framework.graphs).value * cluster.gpu.capacity_bytes.value


def memory_limit_bytes(cluster: ClusterSpec, framework: FrameworkSpec) -> float:
    """What a plan may fill of a GPU: the capacity less the margin. [B]"""
    return cluster.gpu.capacity_bytes.value - margin_bytes(cluster, framework)


def closed_form_margin_bytes(framework: FrameworkSpec, pp: int, reserved_bytes: float) -> float:
    """What the replay may reserve beyond a closed form: the most that it did of random jobs. [B]

    A closed form knows sizes and numbers of tensors, not which hole each is cut from.
    """
    return load_closed_form_residuals().reserved_memory_residual(framework.name, pp).value * reserved_bytes


def device_bytes_to_fit(
    framework: FrameworkSpec, pp: NDArray[np.int64], weighed: RowMemory, *, in_closed_form: bool
) -> NDArray[np.float64]:
    """What must fit :func:`memory_limit_bytes`: each row's device bytes; if verdicts rest on closed forms
    alone also what a replay may reserve beyond them, which :func:`mofa.estimate` leaves free then too. (n,) [B]"""
    if not in_closed_form:
        return weighed.device_bytes
    more = [closed_form_margin_bytes(framework, stages, 1.0) for stages in (1, 2)] if (pp > 1).any() else None
    fraction = closed_form_margin_bytes(framework, 1, 1.0) if more is None else np.where(pp > 1, more[1], more[0])
    return np.asarray(weighed.device_bytes + fraction * weighed.reserved_bytes)


_numbers = count()


class CandidatePlan:
    """One strategy, a table of one row, that can be costed in detail by closed forms or by replay.

    Sent to another process, it takes its facts along, and the step's time where known; no replayed results.
    """

    def __init__(
        self, workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, row: StrategyTable,
        loads: RoutingLoads, convention: FlopsConvention, *, solved: bool = False,
    ) -> None:  # fmt: skip
        self.number = next(_numbers)
        framework = framework.with_options(row.common_options)
        self.job = (workload, cluster, framework, row)
        self.loads = loads
        self.convention: FlopsConvention = convention
        self.solved = solved
        """Whether the search chose how many layers it recomputes whole, as the fewest that fit in closed form."""
        self.steps_on_hosts_s: dict[float, float] = {}
        """Its step in closed form by the seconds of a host's op, of hosts where it is known. [s]"""

    def __getstate__(self) -> dict[str, object]:
        sent = ("number", "job", "loads", "convention", "solved", "replayed_time", "steps_on_hosts_s")
        return {name: value for name, value in self.__dict__.items() if name in sent}

    @property
    def num_layer_forwards(self) -> int:
        """Forwards of a step: of every layer and every chunk, of each micro-batch. [-]"""
        _, pp, vpp, num_micro_batches = self.order_key
        return num_micro_batches * (self.job[0].model.num_layers + pp * vpp)

    @property
    def order_key(self) -> tuple[int, int, int, int]:
        """Equal for candidates whose computations have one order: schedule, pp, vpp, micro-batches."""
        workload, _, _, row = self.job
        num_micro_batches = workload.batch.global_batch // int(row.dp[0] * row.micro_batch[0])
        return int(row.schedule[0]), int(row.pp[0]), int(row.vpp[0]), num_micro_batches

    @property
    def options_key(self) -> Hashable:
        """Equal for candidates that one estimator costs: they choose the same options, in tables that go together."""
        row = self.job[3]
        return row.common_options, row.recompute_modes, row.layouts, row.option_sets

    @cached_property
    def estimator(self) -> TableEstimator:
        """The estimator of its costs."""
        workload, cluster, framework, row = self.job
        return TableEstimator(workload, cluster, framework, row, self.loads)

    @cached_property
    def _with_other_layers(self) -> CandidatePlan | None:
        """The candidate with another number of recomputed layers that was asked for last."""
        return None

    @cached_property
    def closed_form_breakdown(self) -> Breakdown:
        """Its row, in closed form."""
        return self.estimator.breakdown(detail=True)

    @cached_property
    def closed_form_breakdown_without_time(self) -> Breakdown:
        """Its row in closed form without time, which a replay gives."""
        known = self.__dict__.get("closed_form_breakdown")
        return known if isinstance(known, Breakdown) else self.estimator.only_row_without_time()

    @cached_property
    def replayer(self) -> Replayer:
        """The replayer of its ranks."""
        from mofa.replay.replayer import Replayer

        return Replayer(self.estimator)

    @cached_property
    def replayed_time(self) -> ReplayedTime:
        """Its replayed step without the spans of single computations.

        Spans are asked for of the best plan only. Those of 30 plans are a quarter of a million objects for Python's
        cycle collector to visit.
        """
        return self.replayer.replayed_time_without_spans()

    def forget_played_ranks(self) -> None:
        """Drop what was played of its ranks, up to hundreds of MiB in long steps; the step's time stays."""
        self.__dict__.pop("replayer", None)

    def replayed_lacking_bytes(self) -> float:
        """Bytes that the fullest rank lacks by replay; negative: free. [B]"""
        limit_bytes = memory_limit_bytes(*self.job[1:3])
        return self.replayer.fullest_rank_device_bytes(limit_bytes) - limit_bytes

    def replayed_device_bytes(self, limit: float = inf) -> float:
        """Device memory of the fullest rank by replay, or a lower bound as soon as that exceeds ``limit``. [B]"""
        return self.replayer.fullest_rank_device_bytes(limit, exact=False)

    def fewest_recomputed_layers(self) -> int | None:
        """Fewest recomputed layers of a chunk that fit by replay, below the search's choice; None if there are none."""
        own, limit_bytes = int(self.job[3].recompute_layers[0]), memory_limit_bytes(*self.job[1:3])
        if not self.solved or own < 2:
            return None
        device = self.replayed_device_bytes(limit_bytes)
        if device > limit_bytes:
            return None
        tolerance = load_shared_facts().tolerances.unrecomputed_layer.value
        first = fewest_recomputed_layers(self.estimator, (1.0 + tolerance) * (limit_bytes - device))
        tried = range(first, min(first + 2, own))
        return next(
            (
                number
                for number in tried
                if self.with_recompute_layers(number).replayed_device_bytes(limit_bytes) <= limit_bytes
            ),
            None,
        )

    def with_more_recomputed_layers(self, lacking_bytes: float) -> CandidatePlan | None:
        """The candidate with more recomputed layers to try if a replay lacks so much memory; None where none is
        left."""
        workload, _, framework, _ = self.job
        number = more_recomputed_layers(workload, framework, self.estimator, lacking_bytes) if self.solved else None
        if number is None:
            return None
        return self.with_recompute_layers(number)

    def with_recompute_layers(self, layers: int) -> CandidatePlan:
        """The candidate with another number of recomputed layers, some in both; the same one as last time if the number
        is, with what was played of it."""
        last = self._with_other_layers
        if last is None or int(last.job[3].recompute_layers[0]) != layers:
            workload, cluster, framework, row = self.job
            row = replace(row, recompute_layers=np.array([layers]))
            last = CandidatePlan(workload, cluster, framework, row, self.loads, self.convention, solved=True)
            if self.solved and "estimator" in self.__dict__:
                last.estimator = self.estimator.with_recompute_layers(layers)
            self._with_other_layers = last
        return last

    def with_layout(self, layout: str, layers: int) -> CandidatePlan:
        """The candidate with a layout, and a number of recomputed layers."""
        workload, cluster, framework, row = self.job
        row = replace(row, layouts=(layout,), layout=np.zeros(1, np.int64), recompute_layers=np.array([layers]))
        other = CandidatePlan(workload, cluster, framework, row, self.loads, self.convention)
        other.__dict__["estimator"] = self.estimator.with_layout(layout, layers)  # the same blocks
        return other

    def replay_stage_memory(self, r: int, spans: Sequence[Computation] = ()) -> StageMemory:
        """Play a pipeline rank; its memory, also over the time of a step where computations' ``spans`` are given."""
        from mofa.replay.memory_curve import memory_over_last_step

        journal = self.replayer.rank_memory(r).journal
        curve = memory_over_last_step(journal, spans) if spans else None
        stage = stage_memory_of_replay(self.closed_form_memory.by_stage[r], self.replayer, curve)
        journal.drop_event_arrays()  # those of all ranks of a long step are a GiB
        return stage

    @cached_property
    def closed_form_memory(self) -> Memory:
        """Its memory in closed form."""
        return _memory(
            *self.job[1:3],
            self.closed_form_breakdown_without_time,
            self.estimator.stages_of_row(),
            emptiest_and_fullest_expert_rank(self.estimator),
        )

    def plan_with_replayed_time(self) -> Plan:
        """The plan with replayed time and memory in closed form, without a band."""
        return self._plan(self.replayed_time, self.closed_form_memory, banded=False)

    def plan_in_closed_form(self, *, banded: bool = True, doubted: bool = False) -> Plan:
        """The plan without any replay; its band costs two more estimates.

        ``doubted``: it leaves free as well what the replay may reserve beyond the closed form, for no replay follows.
        """
        pp, more_bytes = int(self.job[3].pp[0]), 0.0
        if doubted:
            more_bytes = closed_form_margin_bytes(self.job[2], pp, float(self.closed_form_breakdown.reserved_bytes[0]))
        rank_range = emptiest_and_fullest_expert_rank(self.estimator)
        memory = _memory(
            *self.job[1:3], self.closed_form_breakdown, self.estimator.stages_of_row(), rank_range, more_bytes
        )
        return self._plan(None, memory, banded=banded, doubted=doubted)

    def replayed_plan(
        self, *, replay: bool, explain: bool = True, over_time: bool = True, workers: WorkerProcesses | None = None,
        ranks: Sequence[int] | None = None,
    ) -> Plan:  # fmt: skip
        """The plan by replay of the fullest rank; with ``explain`` of every rank, or of ``ranks``, and with memory
        ``over_time``."""
        if not replay:
            return self.plan_in_closed_form(doubted=True)
        closed = self.closed_form_memory
        if not explain:
            self.replayed_lacking_bytes()
            return self._plan(
                self.replayed_time,
                memory_with_replayed_stages(closed, map(self.replay_stage_memory, self.replayer.played_ranks)),
            )
        spans = self.replayer.replayed_time.spans
        self.replayed_time = replace(self.replayer.replayed_time, spans=())
        workers = replay_workers([self], workers)
        # others begin with the first rank, this process with the last, where it has played some already
        every = range(len(spans)) if ranks is None else ranks
        ranks = sorted(every, key=lambda r: (r in self.replayer.played_ranks, r))
        tasks = [(self, r, spans[r] if over_time else ()) for r in ranks]
        stages = workers.map(_stage, tasks, local=lambda task: self.replay_stage_memory(*task[1:]))
        return self._plan(self.replayed_time, memory_with_replayed_stages(closed, stages))

    def plan_with_certain_verdict(self, workers: WorkerProcesses | None = None) -> Plan:
        """The plan by replay of the ranks that may be the fullest, with memory over time, and of all others that may
        not fit, whatever is known of them in closed form."""
        self.replayed_lacking_bytes()
        certain = {
            *self.replayer.played_ranks,
            *self.replayer.ranks_that_may_exceed(memory_limit_bytes(*self.job[1:3])),
        }
        return self.replayed_plan(replay=True, ranks=sorted(certain), workers=workers)

    def _closed_step_s(self, cluster: ClusterSpec) -> float:
        """The step in closed form on a cluster with another host. [s]"""
        known_s = self.steps_on_hosts_s.get(cluster.gpu.curves.host.eager_op_s.value)
        if known_s is not None:
            return known_s
        if cluster is not self.job[1]:
            exposed, _ = self.estimator.on_hosts_of(cluster).exposed_and_hidden_seconds()
        elif "closed_form_breakdown" in self.__dict__:
            return float(self.closed_form_breakdown.step_s[0])
        else:
            exposed, _ = self.estimator.exposed_and_hidden_seconds(every_stage=True)
        return float(exposed.sum(axis=0)[0])

    def _plan(self, time: ReplayedTime | None, memory: Memory, *, banded: bool = True, doubted: bool = False) -> Plan:
        blocks = [block for part in self.estimator.parts for block in part.costs.tapes.values()]
        tapes = [tape for block in blocks for tape in (block.forward, block.backward)]
        seen = op_size_ranges_by_family(tapes), memory_bound_op_names(tapes)
        costed = self.closed_form_breakdown if time is None else self.closed_form_breakdown_without_time
        on_host = self._closed_step_s if banded else None
        plan = _plan(*self.job, costed, self.convention, seen, time, memory, on_host)
        notes = alignment_note(unaligned_product_ops(block.forward for block in blocks))
        notes += borrowed_fact_notes(*self.job[:3], tapes, self.estimator.parts[0].mode.precision)
        stages, framework = self.estimator.stages_of_row(), self.job[2]
        notes += layout_notes(stages, self.job[0].model, framework)
        notes += closed_form_margin_note(framework, stages.pp) if doubted else ()
        under, layout = self._library_fraction(plan) if banded else None, launch_layout(stages, framework)
        return plan.model_copy(update={"notes": plan.notes + notes, "library_fraction": under, "layout": layout})

    def _library_fraction(self, plan: Plan) -> dict[str, float] | None:
        """Fraction of the step that rests on facts measured under the framework's library, by component. [-]"""
        library = self.job[2].library
        if library is None:
            return None
        exposed = {str(name): seconds for name, seconds in plan.time.exposed.items()}
        return step_fractions_on_layer_library(self.estimator.parts[0].costs, self.job[0].model, exposed, library)


def replay_workers(candidates: Sequence[CandidatePlan], workers: WorkerProcesses | None) -> WorkerProcesses:
    """The workers, or this process alone where there is little to replay."""
    return (
        workers
        if workers is not None and sum(candidate.num_layer_forwards for candidate in candidates) > SMALL
        else WorkerProcesses()
    )


def _stage(task: tuple[CandidatePlan, int, Sequence[Computation]]) -> StageMemory:
    """Memory of a rank of a candidate, for a process that gets one rank after the other."""
    candidate, r, spans = task
    if _last.get("number") != candidate.number:
        _last.update(number=candidate.number, candidate=candidate)
    known = _last["candidate"]
    assert isinstance(known, CandidatePlan)
    return known.replay_stage_memory(r, spans)


_last: dict[str, object] = {}
"""The last candidate asked for, kept so that it is costed once."""


def _plan(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, row: StrategyTable, costed: Breakdown,
    convention: FlopsConvention, seen: Seen, played: ReplayedTime | None, memory: Memory,
    on_host: Callable[[ClusterSpec], float] | None,
) -> Plan:  # fmt: skip
    exposed = {name: max(float(costed.exposed_s[i, 0]), 0.0) for i, name in enumerate(TIME_COMPONENTS)}
    hidden = {name: float(costed.hidden_s[i, 0]) for i, name in enumerate(HIDDEN_COMPONENTS)}
    if played is not None:
        exposed, hidden = {name: played.exposed[name] for name in TIME_COMPONENTS}, dict(played.hidden)
    exposed, hidden = (_without_dust(parts, sum(exposed.values())) for parts in (exposed, hidden))
    step_s = sum(exposed.values())
    band = None if on_host is None else step_band(workload, cluster, framework, step_s, exposed["host_idle"], on_host)
    tokens = workload.batch.seq_len * workload.batch.global_batch
    gpus = cluster.num_gpus
    peak = cluster.gpu.peak_flops_per_s[workload.precision.peak_format].value
    per_token = model_flops_per_token(workload.model, workload.batch.seq_len, convention)
    model_rate = per_token * tokens / step_s / gpus
    extra = model_flops_per_token(workload.model, workload.batch.seq_len, "causal") * tokens
    again = max(float(costed.hardware_flops[0]) - extra, 0.0) / step_s / gpus if _recomputes(row) else 0.0
    return Plan(
        strategy=row.row(0, framework.name),
        step_s=step_s,
        step_s_band=None if band is None else (band.low_s, band.high_s),
        band=band,
        tokens_per_s_per_gpu=tokens / step_s / gpus,
        tflops_per_gpu=model_rate / 1e12,
        mfu=model_rate / peak,
        hfu=(model_rate + again) / peak,
        days_without_failures=(
            None if workload.tokens is None else workload.tokens / tokens * step_s / SECONDS_PER_DAY
        ),
        checkpoint_bytes=float(costed.checkpoint_bytes[0]),
        memory=memory,
        time=Time(exposed=exposed, hidden=hidden, by_stage=exposed_times_by_stage(played)),
        provenance=provenance_of_exposed(workload, cluster, framework, row, exposed, seen),
        costed_by="closed_form" if played is None else "replay",
        flops_convention=convention,
        notes=notes_of_every_plan(workload, cluster, framework, played is not None)
        + host_notes(cluster, step_s, exposed["host_idle"])
        + unmeasured_model_notes(workload.model, framework)
        + untested_option_notes(workload, cluster, framework, row)
        + dispatch_by_index_note(workload, framework, row)
        + token_scheduling_note(workload, row),
    )


def _without_dust(parts: dict[str, float], step_s: float) -> dict[str, float]:
    """Set parts to zero that are rounding errors of sums."""
    return {name: seconds if seconds > DUST * step_s else 0.0 for name, seconds in parts.items()}


def _recomputes(row: StrategyTable) -> bool:
    return row.recompute_modes[int(row.recompute[0])].kind != "none"


def _memory(
    cluster: ClusterSpec, framework: FrameworkSpec, costed: Breakdown, split: Stages,
    rank_range: ExpertRankRange | None, extra_margin_bytes: float = 0.0,
) -> Memory:  # fmt: skip
    capacity, margin = cluster.gpu.capacity_bytes.value, margin_bytes(cluster, framework) + extra_margin_bytes
    detail = costed.detail
    assert detail is not None
    of_stages = zip(
        *(
            getattr(detail, name)[0].tolist()
            for name in (
                "layers", "recomputed_layers", "in_flight", "instant", "allocated_bytes", "reserved_bytes",
                "device_bytes",
            )
        ),
        detail.components_bytes[:, 0].T.tolist(), strict=True,
    )  # fmt: skip
    stages = [
        StageMemory(
            stage=r, num_layers=layers, layers_by_chunk=tuple(map(len, split.layers[r])), recomputed_layers=recomputed,
            in_flight_micro_batches=in_flight, instant=costed.instant_names[instant], allocated_bytes=allocated,
            reserved_bytes=reserved, device_bytes=device,
            by_component=dict(zip(MEMORY_COMPONENTS, parts, strict=True)),
            ranks=None if rank_range is None else expert_ranks_of_stage(r, detail, rank_range),
        )
        for r, (layers, recomputed, in_flight, instant, allocated, reserved, device, parts) in enumerate(of_stages)
    ]  # fmt: skip
    device = float(costed.device_bytes[0])
    return Memory(
        allocated_bytes=float(costed.allocated_bytes[0]),
        reserved_bytes=float(costed.reserved_bytes[0]),
        device_bytes=device,
        margin_bytes=margin,
        peak_bytes=device,
        capacity_bytes=capacity,
        fits=device + margin <= capacity,
        by_component={name: float(costed.memory_bytes[i, 0]) for i, name in enumerate(MEMORY_COMPONENTS)},
        by_stage=tuple(stages),
    )
