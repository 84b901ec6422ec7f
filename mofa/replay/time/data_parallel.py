"""What data parallelism adds to a rank's computations: gathered parameters, reduced gradients, when the framework does.

Inside the tapes are FSDP's gathers and reductions of every micro-batch; here is what happens once a step, and what DDP
and replicas add. Megatron-Core 0.16.1: ``distributed/distributed_data_parallel.py``, ``param_and_grad_buffer.py`` and
``pipeline_parallel/schedules.py``; PyTorch 2.11: ``distributed/pipelining/stage.py`` and ``fsdp/_fully_shard``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mofa.blocks.work import Collective, CollectiveKind
from mofa.cost.kernels.collectives import collective_s
from mofa.cost.kernels.compute import memory_bound_bytes_per_s
from mofa.cost.kernels.computing_slowdown import collective_slowdown
from mofa.cost.rank_rules import DDP_BUCKET_BYTES
from mofa.cost.rank_spec import RankSpec
from mofa.cost.rows import GatheredRows
from mofa.cost.step_time.data_parallel import num_gathers_after_optimizer
from mofa.replay.time.computation_tapes import PlanTapes
from mofa.replay.time.kernel_runs import FAMILY, NOW, SideStreamOp, Step, one_kernel_step, waiting_step
from mofa.schedules import Action, Order


@dataclass
class DataParallelStepsOfComputation:
    """What data parallelism adds to one computation: steps before it, behind lines of its pieces (by position in
    it), and after it."""

    before: list[Step] = field(default_factory=list)
    after_line: dict[int, dict[int, list[Step]]] = field(default_factory=dict)
    after: list[Step] = field(default_factory=list)

    def add_after_line(self, piece: int, line: int, step: Step) -> None:
        """Put a step behind a line of a piece."""
        self.after_line.setdefault(piece, {}).setdefault(line, []).append(step)


@dataclass
class DataParallelSteps:
    """Data parallelism's steps of one rank: what single computations get, what all backwards of a chunk get, what comes
    at the step's end."""

    by_computation: dict[Action, DataParallelStepsOfComputation] = field(default_factory=dict)
    by_chunk_backward: dict[int, DataParallelStepsOfComputation] = field(default_factory=dict)
    at_step_end: list[Step] = field(default_factory=list)
    after_optimizer_s: float = 0.0
    """Gathering that nothing hides. [s]"""
    after_optimizer: list[Collective] = field(default_factory=list)
    """What that gathers."""

    def steps_of_computation(self, action: Action) -> DataParallelStepsOfComputation:
        """What is added to a computation; made where it is not there yet."""
        return self.by_computation.setdefault(action, DataParallelStepsOfComputation())


class _Weight(NamedTuple):
    """Where in a chunk's pass a weight is first needed, or its gradient made: piece, line, parameters."""

    piece: int
    line: int
    params: float
    expert: bool


class _Bucket(NamedTuple):
    """Parameters that are gathered or reduced together, and where the last of them is in the backward."""

    piece: int
    line: int
    dense: float
    expert: float


Collectives = tuple[Collective, ...]
"""Of one launch, one after the other: of dense parameters, and of experts'."""


def collectives_of_params(kind: CollectiveKind, bytes_per_param: float, dense: float, expert: float) -> Collectives:
    """What reduces or gathers so many dense parameters and expert ones.

    Examples
    --------
    >>> collectives_of_params("all_gather", 2.0, 3.0, 0.0)
    (Collective(kind='all_gather', group='fsdp', payload=6.0, imbalance=1.0),)
    """
    shares = ((dense, "fsdp"), (expert, "efsdp"))
    return tuple([Collective(kind, group, params * bytes_per_param) for params, group in shares if params])


@dataclass
class DataParallelSharedByRanks:
    """What the data parallelism of a plan's ranks has in common, worked out once: many hold the same."""

    seconds: dict[tuple[str, float, str], float] = field(default_factory=dict)
    """Of collectives, by what they do, their bytes and their group."""
    weights: dict[tuple[tuple[str, ...], bool], list[_Weight]] = field(default_factory=dict)
    """Of chunks, by the labels of their pieces: in the order of the forward or of the backward."""
    buckets: dict[tuple[tuple[str, ...], tuple[float, float], float], list[_Bucket]] = field(default_factory=dict)
    """Of chunks, by the same, the scales of their weights and the buckets' size."""


@dataclass(frozen=True)
class _Rank:
    """A rank as data parallelism sees it."""

    rows: GatheredRows
    tapes: PlanTapes
    spec: RankSpec
    order: Order
    """Of what is played: the spec's, another of as many micro-batches, or one with fewer."""
    shared: DataParallelSharedByRanks

    @property
    def rank(self) -> int:
        """Of the pipeline."""
        return self.spec.place.pipeline_rank

    def seconds(self, collectives: Collectives) -> float:
        """Of collectives one after the other. [s]"""
        total = 0.0
        for kind, group, payload, _ in collectives:
            total += self.collective_s(kind, float(payload), group)
        return total

    def collective_s(self, kind: CollectiveKind, payload: float, group: str) -> float:
        """Of one collective of so many bytes. [s]"""
        known = self.shared.seconds.get((kind, payload, group))
        if known is None:
            rows = self.rows
            took = collective_s(kind, np.array([payload]), rows.groups[group], rows.costs.machine.network_fabric)
            known = self.shared.seconds[kind, payload, group] = float(took[0])
        return known

    @cached_property
    def issue_s(self) -> float:
        return self.rows.cluster.slowest_host_factor * self.rows.cluster.gpu.curves.host.eager_op_s.value

    def listing_s(self, dense: float, expert: float) -> float:
        """What the host takes to write down where gradients lie ahead of FSDP's reduction. [s]"""
        host = self.rows.cluster.slowest_host_factor * self.rows.cluster.gpu.curves.host.listing_s.value
        params_by_group = ((dense, "fsdp"), (expert, "efsdp"))
        return host * sum(params / float(self.rows.groups[group].size[0]) for params, group in params_by_group) / 2**20

    def beside(
        self, name: str, seconds: float, stream: str, reads: tuple[str, ...], writes: str, works: Collectives
    ) -> SideStreamOp:
        curves, groups, fabric = self.rows.cluster.gpu.curves, self.rows.groups, self.rows.costs.machine.network_fabric
        each_s = np.array([self.collective_s(work.kind, float(work.payload), work.group) for work in works])
        each_slows = [float(collective_slowdown(curves, groups[work.group], fabric)[0]) for work in works]
        slows = float(each_s @ each_slows / max(each_s.sum(), 1e-12))
        return SideStreamOp(name, seconds, self.issue_s, FAMILY["dp"], stream, reads, (writes,), slows, works=works)

    def weights(self, chunk: int, backward: bool) -> list[_Weight]:
        """A chunk's weights in the order of its pass; together they are the rank's share, what no op names included."""
        scales = self._scales
        return [_Weight(i, line, params * scales[expert], expert)
                for i, line, params, expert in self._named(chunk, backward)]  # fmt: skip

    @cached_property
    def _scales(self) -> tuple[float, float]:
        return self._scale(False), self._scale(True)

    def _scale(self, expert: bool) -> float:
        named = sum(w.params for c in range(len(self.spec.chunks)) for w in self._named(c, False) if w.expert == expert)
        own_params = self.spec.parameters.expert if expert else self.spec.parameters.dense
        return own_params / named if named else 0.0

    def _named(self, chunk: int, backward: bool) -> list[_Weight]:
        labels = self.labels[chunk]
        known = self.shared.weights.get((labels, backward))
        if known is None:
            known = self.shared.weights[labels, backward] = []
            for i, label in enumerate(labels[::-1] if backward else labels):
                placed = self.tapes.weight_op_lines(label)
                for w in placed[::-1] if backward else placed:
                    known.append(_Weight(i, w.backward if backward else w.forward, w.params, w.expert))
        return known

    @cached_property
    def labels(self) -> list[tuple[str, ...]]:
        """Of the pieces of every chunk."""
        return [tuple([block.tapes for block in chunk.blocks]) for chunk in self.spec.chunks]

    def buckets(self, chunk: int, size: float) -> list[_Bucket]:
        """A chunk's parameters from the last to the first, a bucket closed once it has ``size`` parameters; dense and
        expert ones apart."""
        key = self.labels[chunk], self._scales, size
        known = self.shared.buckets.get(key)
        if known is None:
            known = self.shared.buckets[key] = _buckets(self.weights(chunk, backward=True), size)
        return known

    def of_piece(self, chunk: int) -> list[tuple[float, float]]:
        """Dense and expert parameters of each piece of a chunk, in forward order."""
        out = [[0.0, 0.0] for _ in self.spec.chunks[chunk].blocks]
        for w in self.weights(chunk, backward=False):
            out[w.piece][w.expert] += w.params
        return [(dense, expert) for dense, expert in out]

    def last(self, chunk: int) -> Action:
        """The last computation of a chunk that makes gradients."""
        computations, stages = reversed(self.order.ranks[self.rank]), self._stages(chunk)
        return next(a for a in computations if a.kind in ("B", "W") and a.stage in stages)

    def first(self, chunk: int) -> Action:
        """The first forward of a chunk."""
        stages = self._stages(chunk)
        return next(a for a in self.order.ranks[self.rank] if a.kind == "F" and a.stage in stages)

    def _stages(self, chunk: int) -> range:
        """The stages that are this chunk of their rank."""
        return range(chunk * self.order.pp, (chunk + 1) * self.order.pp)


def data_parallel_steps(
    rows: GatheredRows, tapes: PlanTapes, spec: RankSpec, order: Order, shared: DataParallelSharedByRanks | None = None
) -> DataParallelSteps:  # fmt: skip
    """What data parallelism adds on one pipeline rank; ``shared`` has what was worked out for the others."""
    me, out = _Rank(rows, tapes, spec, order, shared or DataParallelSharedByRanks()), DataParallelSteps()
    sharing = spec.gradients.sharing
    if sharing == "Megatron":
        _megatron_gradients(me, out)
        _megatron_parameters(me, out)
    elif sharing == "DDP":
        _ddp(me, out)
    elif sharing == "FSDP by step":
        _fsdp_pipelined(me, out)
    elif sharing == "FSDP by block" and rows.framework.dp_replicate > 1:
        for c in range(len(spec.chunks)):
            _replicas(me, c, out.by_chunk_backward.setdefault(c, DataParallelStepsOfComputation()))
    return out


# -- Megatron's buffers and buckets


def _buckets(weights: list[_Weight], size: float) -> list[_Bucket]:
    """As :meth:`_Rank.buckets`, of weights in the order of the backward."""
    out: list[_Bucket] = []
    for expert in (False, True):
        filled, made_at = 0.0, (0, 0)
        for w in weights:
            if w.expert != expert:
                continue
            filled, made_at = filled + w.params, max(made_at, (w.piece, w.line))
            if filled >= size:
                out.append(_Bucket(*made_at, 0.0 if expert else filled, filled if expert else 0.0))
                filled = 0.0
        if filled:
            out.append(_Bucket(*made_at, 0.0 if expert else filled, filled if expert else 0.0))
    return sorted(out)


def _bucket_size(me: _Rank, chunk: int) -> float:
    """Parameters of a bucket: only the first chunk of the first rank is cut (distributed_data_parallel.py:95)."""
    if me.rank or chunk:
        return np.inf
    return me.spec.gradients.bucket_params


def _megatron_gradients(me: _Rank, out: DataParallelSteps) -> None:
    kind: CollectiveKind = "reduce_scatter" if me.spec.gradients.scatters_gradients else "all_reduce"
    computations = me.order.ranks[me.rank]
    backwards = [a for a in computations if a.kind in ("B", "W")]
    for c in range(len(me.spec.chunks)):
        last = me.last(c)
        for bucket in me.buckets(c, _bucket_size(me, c)):
            width = me.spec.gradients.reduced_bytes_per_param
            works = collectives_of_params(kind, width, bucket.dense, bucket.expert)
            if not (seconds := me.seconds(works)):
                continue
            step = me.beside("reduction of gradients", seconds, "dp", (NOW,), "dp.reduced", works)
            if not me.rows.framework.overlap_grad_reduce:
                out.at_step_end.append(step)
            elif (
                len(me.spec.chunks) > 1
            ):  # as many backwards later as the rank counts, at once on all ranks (grad_sync_func)
                later = min(backwards.index(last) + me.rank, len(backwards) - 1)
                out.steps_of_computation(backwards[later]).after.append(step)
            else:
                out.steps_of_computation(last).add_after_line(bucket.piece, bucket.line, step)
    out.at_step_end.append(waiting_step(("dp.reduced",)))


def _megatron_parameters(me: _Rank, out: DataParallelSteps) -> None:
    if not me.spec.gradients.shards_states:
        return
    each = me.spec.gradients.gathered_bytes_per_param
    if not me.rows.framework.overlap_param_gather:
        times = float(num_gathers_after_optimizer(me.rows)[0, me.rank])
        for c in range(len(me.spec.chunks)):
            for bucket in me.buckets(c, _bucket_size(me, c)):
                works = collectives_of_params("all_gather", each, bucket.dense, bucket.expert)
                out.after_optimizer_s += times * me.seconds(works)
                out.after_optimizer += works * round(times)
        return
    forwards = [a for a in me.order.ranks[me.rank] if a.kind == "F"]
    for c in range(len(me.spec.chunks)):
        first, aligned = me.first(c), len(me.spec.chunks) > 1
        gathers = []
        for n, bucket in enumerate(reversed(me.buckets(c, _bucket_size(me, c)))):
            works = collectives_of_params("all_gather", each, bucket.dense, bucket.expert)
            if seconds := me.seconds(works):
                name = f"dp.gathered {c}.{n}"
                where = len(me.spec.chunks[c].blocks) - 1 - bucket.piece
                gathers.append((where, me.beside("gathering of parameters", seconds, "dp", (), name, works), name))
        if aligned:  # chunks 0 and 1 at the start, the others a chunk ahead, at once on all ranks (param_sync_func)
            ahead = max(forwards.index(me.first(c - 1)) - me.rank, 0) if c > 1 else 0
            out.steps_of_computation(forwards[ahead]).before += [step for _, step, _ in gathers]
        for n, (where, step, name) in enumerate(gathers):
            extra = out.steps_of_computation(first)
            if not aligned and not n:
                extra.before.append(step)
            extra.add_after_line(where, -1, waiting_step((name,)))
            if not aligned and n + 1 < len(gathers):
                extra.add_after_line(where, -1, gathers[n + 1][1])


# -- PyTorch


def _ddp(me: _Rank, out: DataParallelSteps) -> None:
    """DDP reduces buckets of whole gradients in every backward, which ends with the last of them."""
    width = me.spec.gradients.bytes_in_bucket
    for c in range(len(me.spec.chunks)):
        extra = out.by_chunk_backward.setdefault(c, DataParallelStepsOfComputation())
        filled = 0.0
        weights = me.weights(c, backward=True)
        for n, w in enumerate(weights):
            filled += w.params
            if width * filled >= DDP_BUCKET_BYTES or n == len(weights) - 1:
                works = (Collective("all_reduce", "dp", width * filled),)
                if seconds := me.seconds(works):
                    step = me.beside("reduction of gradients", seconds, "dp", (NOW,), "dp.reduced", works)
                    extra.add_after_line(w.piece, w.line, step)
                filled = 0.0
        # every gradient is copied into its bucket and back (reducer.cpp): 16 bytes an fp32 parameter, played in one
        copied = 4.0 * width * sum(w.params for w in weights) / memory_bound_bytes_per_s(me.rows.cluster.gpu, "copy")
        seconds = copied if int(me.rows.groups["dp"].size[0]) > 1 else 0.0
        extra.after.append(one_kernel_step("copies of gradients", seconds, 0.0, "dp", ("dp.reduced",)))


def _replicas(me: _Rank, chunk: int, extra: DataParallelStepsOfComputation, after: bool = False) -> None:
    """All-reduce of each piece's sharded gradients over the replicas, behind its reduction."""
    if me.rows.framework.dp_replicate <= 1:
        return
    place = me.spec.place
    pieces = me.of_piece(chunk)
    for i, (dense, expert) in enumerate(reversed(pieces)):
        own_params = dense / place.dense_ranks + expert / place.expert_ranks
        works = (Collective("all_reduce", "dp_replicate", me.rows.framework.reduced_bytes_per_param * own_params),)
        reads = (NOW, "fsdp.reduced")
        step = me.beside("reduction over replicas", me.seconds(works), "dp_replicate", reads, "dp.replicated", works)
        if after:
            extra.after.append(step)
        else:
            last = len(me.tapes.resolved[me.spec.chunks[chunk].blocks[len(pieces) - 1 - i].tapes, "B"].lines) - 1
            extra.add_after_line(i, last, step)
    if not after:  # the end of every backward waits for all sums (_fsdp_param_group.py, finalize_backward)
        extra.after.append(waiting_step(("dp.replicated",)))


def _fsdp_pipelined(me: _Rank, out: DataParallelSteps) -> None:
    """Under pipelines FSDP gathers once a step and reduces behind a stage's last backward, group by group."""
    runtime = len(me.spec.chunks) > 1
    for c in range(len(me.spec.chunks)):
        first, last = out.steps_of_computation(me.first(c)), out.steps_of_computation(me.last(c))
        # the runtime gathers the next three stages ahead, a single stage's pieces are gathered as the host gets there
        ahead = out.steps_of_computation(me.first(max(c - 2, 0)))
        for i, (dense, expert) in enumerate(me.of_piece(c)):
            works = collectives_of_params("all_gather", me.spec.gradients.gathered_bytes_per_param, dense, expert)
            if seconds := me.seconds(works):
                name = f"fsdp.gathered {c}.{i}"
                step = me.beside("gathering of parameters", seconds, "fsdp_gather", (), name, works)
                if runtime:
                    ahead.before.append(step)
                else:
                    first.add_after_line(i, -1, step)
                first.add_after_line(i, -1, waiting_step((name,)))
        for dense, expert in reversed(me.of_piece(c)):
            width = me.spec.gradients.reduced_bytes_per_param
            works = collectives_of_params("reduce_scatter", width, dense, expert)
            seconds = max(me.seconds(works), me.listing_s(dense, expert))
            if seconds:
                step = me.beside("reduction of gradients", seconds, "fsdp_reduce", (NOW,), "fsdp.reduced", works)
                last.after.append(step)
        _replicas(me, c, last, after=True)
