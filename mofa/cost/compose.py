"""From blocks to a step, for candidates of one pp x vpp: stages, micro-batches, data parallelism, the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import first_largest
from mofa.cost.blockcost import BlockCost, Costs, Mode, base_mode, candidate_groups, full_mode, unique_rows
from mofa.cost.breakdown import HIDDEN_COMPONENTS, TIME_COMPONENTS
from mofa.cost.collectives import collective_s
from mofa.cost.data_parallel import outside_blocks
from mofa.cost.optimizer import Shards, StaticBytes, optimizer_host_seconds, optimizer_seconds, static_bytes
from mofa.cost.pipeline import pipeline_s
from mofa.cost.scan import EXPOSED
from mofa.cost.stages import Stages, in_flight
from mofa.cost.topology import Group
from mofa.specs.framework import PYTORCH_MODULES, FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.params import embedding_params, head_params, layer_params, layer_tensors, mtp_params
from mofa.specs.strategy import RecomputeSpec, StrategyTable
from mofa.specs.workload import WorkloadSpec

ArrayN = NDArray[np.float64]
IntN = NDArray[np.int64]
_T = {name: i for i, name in enumerate(TIME_COMPONENTS)}
_H = {name: i for i, name in enumerate(HIDDEN_COMPONENTS)}


@dataclass(frozen=True)
class LayerArrays:
    """Block costs of all modes and kinds stacked for gathering: leading axes (modes, K), then kinds and parts."""

    exposed: ArrayN
    hidden: ArrayN
    forward_s: ArrayN
    backward_s: ArrayN
    issue_s: ArrayN
    flops: ArrayN
    saved: ArrayN
    saved_kinds: ArrayN
    slack: ArrayN
    forward_peak: ArrayN
    forward_kinds: ArrayN
    backward_peak: ArrayN
    backward_kinds: ArrayN
    pools: ArrayN
    cached: ArrayN

    @classmethod
    def stack(cls, modes: list[tuple[BlockCost, ...]]) -> LayerArrays:
        """Stack the costs of every mode's kinds."""

        def grid(pick: Callable[[BlockCost], ArrayN]) -> ArrayN:
            array = np.array([[pick(cost) for cost in kinds] for kinds in modes])  # modes, kinds, parts, K
            return np.ascontiguousarray(array.transpose(0, -1, *range(1, array.ndim - 1)))

        return cls(
            exposed=grid(lambda c: c.forward.exposed + c.backward.exposed),
            hidden=grid(lambda c: c.forward.hidden + c.backward.hidden),
            forward_s=grid(lambda c: c.forward.total),
            backward_s=grid(lambda c: c.backward.total),
            issue_s=grid(lambda c: c.forward.issue + c.backward.issue),
            flops=grid(lambda c: c.forward_flops + c.backward_flops),
            saved=grid(lambda c: c.memory.saved),
            saved_kinds=grid(lambda c: c.memory.saved_kinds),
            slack=grid(lambda c: c.memory.saved_slack),
            forward_peak=grid(lambda c: c.memory.forward_peak),
            forward_kinds=grid(lambda c: c.memory.forward_kinds),
            backward_peak=grid(lambda c: c.memory.backward_peak),
            backward_kinds=grid(lambda c: c.memory.backward_kinds),
            pools=grid(lambda c: c.memory.pool_slack),
            cached=grid(lambda c: c.cached),
        )


@dataclass(frozen=True)
class Layout:
    """Layer counts of the candidates of one pp x vpp, gathered per row: (n, kinds, pp) unless said."""

    stages: Stages
    plain: ArrayN
    """Layers that run in the base mode."""
    full: ArrayN
    """Layers that are recomputed whole."""
    plain_in_flight: ArrayN
    full_in_flight: ArrayN
    last_in_flight: ArrayN
    """Micro-batches of the last chunk in flight. (n, pp)"""
    after: ArrayN
    """Layers of each other kind behind the last layer of a kind in the last chunk. (kinds, kinds, pp)"""
    full_by_chunk: ArrayN
    """Layers that are recomputed whole under each choice of recomputation. (choices, kinds, pp, vpp)"""
    choice: NDArray[np.intp]
    """Each candidate's choice. (n,)"""

    @property
    def counts(self) -> ArrayN:
        return self.plain + self.full


def layout(table: StrategyTable, stages: Stages, schedule: str, num_micro_batches: IntN) -> Layout:
    """Gather the layer counts of each candidate: which layers it recomputes, how many micro-batches are in flight."""
    pp, vpp = stages.pp, stages.vpp
    first, which = unique_rows([table.recompute, table.recompute_layers])
    full = np.zeros((len(first), *stages.counts.shape))
    for u, layers in enumerate(table.recompute_layers[first]):
        spec = table.recompute_modes[int(table.recompute[first[u]])]
        if spec.kind == "full":
            full[u] = stages.counts if layers < 0 else stages.recomputed_first(int(layers))
        elif spec.kind == "every":
            full[u] = stages.recomputed_every(spec.layers or 1)
    cap = num_micro_batches if schedule == "gpipe" else np.minimum(num_micro_batches, 4 * pp)
    batches, batch_of = unique_rows([cap])
    flight = np.stack([in_flight(pp, vpp, schedule, int(b)) for b in cap[batches]])
    plain = stages.counts[None] - full
    plain_fl = np.einsum("ukrc,brc->ubkr", plain, flight)
    full_fl = np.einsum("ukrc,brc->ubkr", full, flight)
    kinds = len(stages.kinds)
    after = np.zeros((kinds, kinds, pp))
    for r in range(pp):
        chunk = stages.layers[r][-1]
        for kind in range(kinds):
            if kind in chunk:
                last = len(chunk) - 1 - chunk[::-1].index(kind)
                for other in chunk[last + 1 :]:
                    after[kind, other, r] += 1
    return Layout(
        stages, plain.sum(axis=3)[which], full.sum(axis=3)[which], plain_fl[which, batch_of],
        full_fl[which, batch_of], flight[batch_of][:, :, -1], after, full, which,
    )  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """The candidates of one pp x vpp and everything gathered for them; ``k`` (n,) indexes the unique combinations."""

    workload: WorkloadSpec
    cluster: ClusterSpec
    framework: FrameworkSpec
    table: StrategyTable
    costs: Costs
    mode: Mode
    schedule: str
    k: NDArray[np.intp]
    base: NDArray[np.intp]
    full: NDArray[np.intp]
    layers: LayerArrays
    mtp: LayerArrays | None
    layout: Layout
    num_micro_batches: IntN
    groups: dict[str, Group]
    shards: Shards
    static: StaticBytes

    def gather(self, grid: ArrayN) -> tuple[ArrayN, ArrayN]:
        """A stacked quantity of the base mode and of full recomputation. (n, kinds, ...)"""
        return grid[self.base, self.k], grid[self.full, self.k]

    def of_mtp(self, name: str) -> ArrayN | None:
        """A quantity of one multi-token-prediction layer, None without: (n, ...).

        Megatron recomputes it whole only under uniform full recomputation; the block method skips it
        (multi_token_prediction.py).
        """
        if self.mtp is None:
            return None
        uniform = (self.table.recompute_layers < 0) & np.array(
            [spec.kind == "full" for spec in self.table.recompute_modes]
        )[self.table.recompute]
        mode = np.where(uniform, self.full, self.base)
        return np.asarray(getattr(self.mtp, name)[mode, self.k, 0])

    def over_stages(self, grid: ArrayN) -> ArrayN:
        """A per-layer quantity summed over the layers of each stage. (n, pp)"""
        plain, full = self.gather(grid)
        per_stage = np.einsum("nkr,nk->nr", self.layout.plain, plain)
        return np.asarray(per_stage + np.einsum("nkr,nk->nr", self.layout.full, full))

    @cached_property
    def is_first(self) -> ArrayN:
        return np.asarray(np.eye(1, self.layout.stages.pp)[0])

    @cached_property
    def is_head(self) -> ArrayN:
        return np.asarray(np.eye(1, self.layout.stages.pp, self.layout.stages.head_stage)[0])

    def ends(self, first: ArrayN, head: ArrayN, mtp: ArrayN | None) -> ArrayN:
        """Something of the embedding, the heads and the multi-token-prediction layers, on their stages. (n, pp)"""
        depth = self.workload.model.num_mtp_layers
        tail = head[self.k] * (1 + depth)
        if mtp is not None:
            tail = tail + depth * mtp
        return first[self.k][:, None] * self.is_first + tail[:, None] * self.is_head


def make_rows(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, table: StrategyTable, costs: Costs,
    k: NDArray[np.intp], stages: Stages, schedule: str, mode: Mode, layers: LayerArrays, mtp: LayerArrays | None,
    modes: list[RecomputeSpec],
) -> Rows:  # fmt: skip
    """Gather everything that the candidates of one pp x vpp need."""
    m = np.maximum(workload.batch.global_batch // (table.dp * table.micro_batch), 1)
    where = np.array([modes.index(base) if (base := base_mode(s)) in modes else 0 for s in table.recompute_modes])
    whole = np.array([modes.index(full) if (full := full_mode(s)) in modes else 0 for s in table.recompute_modes])
    lay = layout(table, stages, schedule, m)
    if len(costs.index) == 1:
        groups = dict(costs.groups)
    elif framework.shards_params:
        groups = {
            name: Group(g.size[k], g.ranks_per_domain[k], g.ranks_per_node[k]) for name, g in costs.groups.items()
        }
    else:  # blocks don't depend on dp there: each candidate's own groups
        groups = candidate_groups(cluster, framework, table)
    shards = stage_shards(workload, framework, table, lay, groups)
    static = static_bytes(
        workload, framework, shards, mode.precision, mode.pipelined, table.zero[:, None], table.dp[:, None],
        table.ep[:, None],
    )  # fmt: skip
    return Rows(
        workload, cluster, framework, table, costs, mode, schedule, k, where[table.recompute],
        whole[table.recompute], layers, mtp, lay, m, groups, shards, static,
    )  # fmt: skip


def stage_shards(
    workload: WorkloadSpec, framework: FrameworkSpec, table: StrategyTable, lay: Layout, groups: dict[str, Group]
) -> Shards:
    """Parameters of every stage on one rank."""
    model = workload.model
    tp, spread = table.tp[:, None], (table.ep * table.etp)[:, None]
    dense = np.zeros((len(table), lay.stages.pp))
    expert = np.zeros_like(dense)
    first, head = np.eye(1, lay.stages.pp)[0], np.eye(1, lay.stages.pp, lay.stages.head_stage)[0]
    for i, kind in enumerate(lay.stages.kinds):
        p = layer_params(model, kind.moe)
        count = lay.counts[:, i]
        dense += count * ((p.matrices_tp + p.shared) / tp + p.replicated)
        expert += count * p.routed / spread
    unit = framework.vocab_divisor * tp
    padding = (np.ceil(model.vocab / unit) * unit - model.vocab) * model.hidden if framework.vocab_divisor > 1 else 0.0
    # Megatron's positions and the norm behind them are whole on every rank
    looked_up = model.vocab * model.hidden
    whole = embedding_params(model) - looked_up
    dense += first * ((looked_up + padding) / tp + whole / (tp if framework.shards_params else 1))
    output = head_params(model) or (model.vocab * model.hidden if lay.stages.head_stage != 0 else 0)
    dense += head * ((output + (padding if output else 0.0)) / tp + model.hidden)
    if model.num_mtp_layers:
        p = mtp_params(model)
        dense += head * model.num_mtp_layers * ((p.matrices_tp + p.shared) / tp + p.replicated)
        expert += head * model.num_mtp_layers * p.routed / spread
        if lay.stages.pp > 1:  # the prediction layers hold a copy of the embedding
            dense += head * model.vocab * model.hidden / tp
    ranks = ("fsdp", "efsdp") if framework.shards_params else ("dp_cp", "edp")
    return Shards(
        dense, expert, groups[ranks[0]].size[:, None].astype(float), groups[ranks[1]].size[:, None].astype(float)
    )


@dataclass(frozen=True)
class StepTime:
    """Time of a step: ``exposed`` (13, n) sums to it. [s]"""

    exposed: ArrayN
    hidden: ArrayN
    stage_s: ArrayN
    slowest: NDArray[np.intp]


def step_time(rows: Rows) -> StepTime:
    """Time of one optimizer step.

    ``m * max_r t_r + bubble``: the slowest stage runs all micro-batches, and the pipeline fills and drains through the
    others (:func:`mofa.cost.pipeline.pipeline_s`). Then what data parallelism (:mod:`mofa.cost.data_parallel`) and the
    optimizer leave exposed.
    """
    c, lay, table = rows.costs, rows.layout, rows.table
    n, pp = len(table), lay.stages.pp
    rowsel = np.arange(n)
    fwd, bwd = stage_seconds(rows)
    stage_s = fwd + bwd
    slowest = first_largest(stage_s, axis=1)
    exposed = np.zeros((len(TIME_COMPONENTS), n))
    hidden = np.zeros((len(HIDDEN_COMPONENTS), n))
    m = rows.num_micro_batches.astype(float)
    # the slowest stage's own micro-batches
    plain, full = rows.gather(rows.layers.exposed)
    share_plain, share_full = lay.plain[rowsel, :, slowest], lay.full[rowsel, :, slowest]
    per_batch = np.einsum("nk,nkf->fn", share_plain, plain) + np.einsum("nk,nkf->fn", share_full, full)
    per_batch_hidden = np.zeros((len(HIDDEN_COMPONENTS), n))
    hid_plain, hid_full = rows.gather(rows.layers.hidden)
    per_batch_hidden += np.einsum("nk,nkf->fn", share_plain, hid_plain) + np.einsum("nk,nkf->fn", share_full, hid_full)
    at_first, at_head = rows.is_first[slowest], rows.is_head[slowest]
    depth = rows.workload.model.num_mtp_layers
    for cost, weight in ((c.embedding, at_first), (c.head, at_head * (1 + depth))):
        per_batch += weight * (cost.forward.exposed + cost.backward.exposed)[:, rows.k]
        per_batch_hidden += weight * (cost.forward.hidden + cost.backward.hidden)[:, rows.k]
    mtp_exposed, mtp_hidden = rows.of_mtp("exposed"), rows.of_mtp("hidden")
    if mtp_exposed is not None and mtp_hidden is not None:
        per_batch += at_head * depth * mtp_exposed.T
        per_batch_hidden += at_head * depth * mtp_hidden.T
    for i, name in enumerate(EXPOSED):
        exposed[_T[name]] += m * per_batch[i]
    hidden += m * per_batch_hidden
    outside = outside_blocks(rows, fwd, bwd, m)
    exposed[_T["dp"]] += outside.exposed
    hidden[_H["dp"]] += outside.hidden
    _pipeline(rows, exposed, hidden, fwd, bwd, slowest, m, outside.before_forward)
    exposed[_T["optimizer"]] += step_end_seconds(rows).max(axis=1) + norm_seconds(rows)
    assert pp == stage_s.shape[1]
    return StepTime(exposed, hidden, stage_s, slowest)


def stage_seconds(rows: Rows) -> tuple[ArrayN, ArrayN]:
    """Forward and backward of one micro-batch on each stage. (n, pp) each [s]"""
    c = rows.costs
    fwd = rows.over_stages(rows.layers.forward_s) + rows.ends(
        c.embedding.forward.total, c.head.forward.total, rows.of_mtp("forward_s")
    )
    bwd = rows.over_stages(rows.layers.backward_s) + rows.ends(
        c.embedding.backward.total, c.head.backward.total, rows.of_mtp("backward_s")
    )
    return fwd, bwd


def step_end_seconds(rows: Rows) -> ArrayN:
    """The optimizer step of each stage and the host that it and the next step wait for, but for the norm. (n, pp) [s]

    torchtitan moves counts and tokens to the device at the start of a step, which waits for them (train.py,
    train_step); counts are summed over dp, tokens and positions dealt out over cp by indices made on the host
    (context_parallel.py).
    """
    c = rows.costs
    given = (rows.workload, rows.cluster, rows.framework, rows.shards, rows.mode.precision, rows.table.zero[:, None])
    issue = rows.over_stages(rows.layers.issue_s) + rows.ends(
        c.embedding.forward.issue + c.embedding.backward.issue, c.head.forward.issue + c.head.backward.issue,
        rows.of_mtp("issue_s"),
    )  # fmt: skip
    lead = np.maximum(sum(stage_seconds(rows)) - issue, 0.0)
    seconds = optimizer_seconds(*given) + optimizer_host_seconds(*given, _tensors(rows), lead)
    if rows.framework.name in PYTORCH_MODULES:
        starts = np.where(rows.table.cp > 1, 8.0, np.where(rows.table.dp > 1, 3.0, 1.0))
        seconds = seconds + (starts * rows.cluster.gpu.curves.host.step_start_s.value)[:, None]
    return np.asarray(seconds)


def _tensors(rows: Rows) -> ArrayN:
    """Parameter tensors of every stage on one rank. (n, pp)"""
    model, packed = rows.workload.model, rows.framework.name not in PYTORCH_MODULES
    total = np.zeros(rows.layout.counts[:, 0].shape)
    for i, kind in enumerate(rows.layout.stages.kinds):
        dense, expert = layer_tensors(model, kind.moe, packed=packed)
        local = model.moe.num_experts / rows.table.ep if model.moe else np.zeros(len(rows.table))
        total += rows.layout.counts[:, i] * (dense + expert * local)[:, None]
    norm = 2 if model.norm == "layernorm" else 1
    return np.asarray(total + rows.is_first + rows.is_head * (norm + (0 if model.tied_embeddings else 1)))


def norm_seconds(rows: Rows) -> ArrayN:
    """The gradient norm's all-reduce over all ranks and the host's wait for it. (n,) [s]"""
    if not rows.workload.optimizer.clip_grad_norm:
        return np.zeros(len(rows.table))
    reduce = collective_s("all_reduce", np.full(len(rows.table), 4.0), rows.groups["world"], rows.costs.machine.fabric)
    return np.asarray(reduce + rows.cluster.gpu.curves.host.sync_s.value)


def _pipeline(
    rows: Rows,
    exposed: ArrayN,
    hidden: ArrayN,
    fwd: ArrayN,
    bwd: ArrayN,
    slowest: NDArray[np.intp],
    m: ArrayN,
    before: ArrayN,
) -> None:
    """Bubble and the hand-over of activations between stages."""
    stages = rows.layout.stages
    if stages.pp == 1:
        exposed[_T["dp"]] += before[:, 0]
        return
    runtime = rows.framework.name in PYTORCH_MODULES
    again = rows.over_stages(rows.layers.exposed[..., EXPOSED.index("recompute")]).sum(axis=1)
    share = _chunk_shares(rows) if rows.schedule == "interleaved" else None
    alone = pipeline_s(rows.schedule, fwd, bwd, again, m, stages.vpp, one_stream=runtime, share=share)
    exposed[_T["bubble"]] += alone - m * (fwd + bwd)[np.arange(len(m)), slowest]
    if np.any(before):
        held = pipeline_s(rows.schedule, fwd, bwd, again, m, stages.vpp, one_stream=runtime, before_s=before)
        exposed[_T["dp"]] += held - alone
    hop = hop_seconds(rows)
    turns = 2.0 * m * stages.vpp
    # in the warm-up a micro-batch comes back to its rank for every further chunk, and in the cool-down
    fill = 2.0 * (stages.pp - 1 + (stages.vpp - 1) * (stages.pp - 1 if rows.schedule == "zbv" else stages.pp))
    if rows.schedule == "1f1b" and rows.framework.name not in PYTORCH_MODULES:
        # each exchange is followed by a device synchronisation (p2p_communication.py, batch_p2p_sync)
        exposed[_T["pp"]] += (turns + fill) * hop
        exposed[_T["host_idle"]] += turns * rows.cluster.gpu.curves.host.sync_s.value
    elif rows.schedule == "1f1b":
        exposed[_T["pp"]] += (turns + fill) * hop
    else:
        exposed[_T["pp"]] += fill * hop + rows.cluster.gpu.curves.overlap_slowdown.value * turns * hop
        hidden[_H["pp"]] += turns * hop


def _chunk_shares(rows: Rows) -> ArrayN | None:
    """Of each chunk in its stage's time, where chunks hold other layers than each other; else None. (n, pp, vpp)"""
    stages, c = rows.layout.stages, rows.costs
    if len(stages.kinds) == 1 and np.ptp(stages.counts) == 0:
        return None
    forward, backward = rows.gather(rows.layers.forward_s), rows.gather(rows.layers.backward_s)
    plain, full = forward[0] + backward[0], forward[1] + backward[1]
    weight = np.einsum("krc,nk->nrc", stages.counts, plain)
    for kind in range(len(stages.kinds)):
        whole = rows.layout.full_by_chunk[rows.layout.choice, kind]
        weight += whole * (full - plain)[:, kind, None, None]
    depth = rows.workload.model.num_mtp_layers
    weight[:, 0, 0] += (c.embedding.forward.total + c.embedding.backward.total)[rows.k]
    weight[:, stages.head_stage, -1] += (1 + depth) * (c.head.forward.total + c.head.backward.total)[rows.k]
    mtp_f, mtp_b = rows.of_mtp("forward_s"), rows.of_mtp("backward_s")
    if mtp_f is not None and mtp_b is not None:
        weight[:, stages.head_stage, -1] += depth * (mtp_f + mtp_b)
    return np.asarray(weight / weight.sum(axis=2, keepdims=True))


def hop_seconds(rows: Rows) -> ArrayN:
    """One hand-over between stages: the whole boundary, or a rank's part of it and its gathering over tp. (n,) [s]"""
    payload = rows.costs.boundary[rows.k]
    whole = collective_s("send_recv", payload, rows.groups["pp"], rows.costs.machine.fabric)
    if not rows.framework.scatters_pipeline_sends:
        return whole
    tp = rows.table.tp.astype(float)
    part = collective_s("send_recv", payload / tp, rows.groups["pp"], rows.costs.machine.fabric)
    part = part + collective_s("all_gather", payload, rows.groups["tp"], rows.costs.machine.fabric)
    return np.where(rows.table.sp | (tp == 1), whole, part)
