"""Time and memory of every kind of block, once per unique combination of the degrees that they depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mofa.blocks import build
from mofa.blocks.backward import NO_RECOMPUTE, Recompute
from mofa.blocks.build import BlockKind, BlockTapes
from mofa.blocks.context import Context
from mofa.blocks.elementwise import FloatK, where
from mofa.blocks.frameworks import persistent_buffers, primitives_of
from mofa.blocks.frameworks.recompute import modes as recompute_of
from mofa.blocks.op import Format
from mofa.cost.collectives import token_spread
from mofa.cost.durations import Machine, tape_flops
from mofa.cost.liveness import BlockMemory, block_memory
from mofa.cost.loads import RoutingLoads
from mofa.cost.scan import PhaseTime, scan
from mofa.cost.topology import Group, process_groups
from mofa.specs.framework import PYTORCH_MODULES, FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import RecomputeSpec, StrategyTable
from mofa.specs.workload import WorkloadSpec

ArrayK = NDArray[np.float64]
FULL = RecomputeSpec(kind="full")


@dataclass(frozen=True)
class BlockCost:
    """One block under one recomputation; arrays over K."""

    forward: PhaseTime
    backward: PhaseTime
    memory: BlockMemory
    forward_flops: ArrayK
    backward_flops: ArrayK
    cached: ArrayK
    """Weight copies that autocast's cache holds until the loss is there although the graph does not keep them. [B]"""

    def then(self, block: BlockCost) -> BlockCost:
        """This block and one behind it as one: what this one keeps stays while the other runs."""

        def both(one: PhaseTime, other: PhaseTime) -> PhaseTime:
            return PhaseTime(one.exposed + other.exposed, one.hidden + other.hidden, one.issue + other.issue)

        return BlockCost(
            both(self.forward, block.forward), both(self.backward, block.backward), self.memory.then(block.memory),
            self.forward_flops + block.forward_flops, self.backward_flops + block.backward_flops,
            self.cached + block.cached,
        )  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """Everything that the composition needs, over the K unique combinations; ``index`` (n,) maps candidates to them.

    ``blocks[mode]`` lists the kinds of layer in the order of :func:`mofa.blocks.build.block_kinds`.
    """

    context: Context
    groups: Mapping[str, Group]
    index: NDArray[np.intp]
    blocks: Mapping[RecomputeSpec, tuple[BlockCost, ...]]
    embedding: BlockCost
    head: BlockCost
    mtp: Mapping[RecomputeSpec, BlockCost] | None
    persistent: ArrayK
    """Buffers that stay allocated from the first use on, outside the tapes; without the head's. (K,) [B]"""
    persistent_head: ArrayK
    """The same on the stage with the head. (K,) [B]"""
    boundary: ArrayK
    """The residual stream of a micro-batch on one rank: what one stage hands to the next. (K,) [B]"""
    tapes: Mapping[str, BlockTapes]
    machine: Machine


@dataclass(frozen=True)
class Mode:
    """What is the same for all candidates costed together."""

    precision: str = "mixed"
    pipelined: bool = False
    accumulating: bool = True


def unique_rows(columns: list[NDArray[np.int64]]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """First row of each unique combination, and each row's combination."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, inverse = np.unique(column, return_inverse=True)
        code = code * len(values) + inverse
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return first, inverse


def block_context(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, table: StrategyTable, loads: RoutingLoads,
    mode: Mode,
) -> tuple[Context, dict[str, Group]]:  # fmt: skip
    """The context of the blocks and their process groups, one entry per row of the table."""
    model = workload.model
    f = {name: _plain(getattr(table, name).astype(float)) for name in ("tp", "cp", "ep", "etp", "micro_batch")}
    replicate = np.minimum(framework.dp_replicate, table.dp)
    shard = table.dp // np.maximum(replicate, 1)
    groups = process_groups(table.tp, table.cp, table.pp, table.dp, table.ep, table.etp, cluster.node, shard)
    groups = {**groups, "fsdp": groups["dp_shard_cp"], "efsdp": groups["edp_shard"]}
    tokens = f["micro_batch"] * workload.batch.seq_len / f["cp"]
    sp = _plain(table.sp & (table.tp > 1))
    local = where(sp, tokens / f["tp"], tokens)
    top_k = model.moe.top_k if model.moe else 0
    time_ratio, memory_ratio = (_plain(ratio) for ratio in loads.ratios(table.ep))
    element: int = 2
    gemm_format: Format = workload.precision.gemm
    if mode.precision == "uniform" and workload.precision.params == "fp32":
        element, gemm_format = 4, "fp32"
    # torchtitan's training never sets the rotate method: it always gathers keys and values
    ring = (table.cp_kind == 0) & (framework.name not in PYTORCH_MODULES)
    return Context(
        model=model, framework=framework, gemm_format=gemm_format, seq_len=workload.batch.seq_len,
        tp=f["tp"], sp=sp, cp=f["cp"], cp_ring=_plain(ring), ep=f["ep"], etp=f["etp"],
        micro_batch=f["micro_batch"], fsdp=_plain(groups["fsdp"].size.astype(float)),
        efsdp=_plain(groups["efsdp"].size.astype(float)),
        rows_time=local * top_k * time_ratio, rows_memory=local * top_k * memory_ratio, imbalance=time_ratio,
        accumulating=mode.accumulating, pipelined=mode.pipelined, element=element,
        residual=4 if mode.precision == "autocast" else element, weight_element=element,
        precision_mode=mode.precision,  # type: ignore[arg-type]
    ), groups  # fmt: skip


def _plain(column: NDArray[Any]) -> Any:
    """A column of the context: where there is one combination, the number itself (see mofa.blocks.elementwise)."""
    return column.item() if column.shape == (1,) else column


def block_costs(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, table: StrategyTable, loads: RoutingLoads,
    mode: Mode, drop: frozenset[str] = frozenset(),
) -> Costs:  # fmt: skip
    """Cost every kind of block that the table's candidates have.

    ``drop`` leaves out the ops of these families, to show what they weigh.
    """
    columns = [table.tp, table.sp.astype(np.int64), table.cp, table.cp_kind, table.ep, table.etp, table.micro_batch]
    if framework.shards_params:
        columns += [table.dp, table.pp]
    first, index = unique_rows(columns)
    unique = table.take(first)
    ctx, groups = block_context(workload, cluster, framework, unique, loads, mode)
    spread = None
    moe = workload.model.moe
    if moe is not None:
        spread = token_spread(
            groups["ep"], num_experts=moe.num_experts, top_k=moe.top_k, num_groups=moe.num_groups,
            top_groups=moe.groups_per_token,
        )  # fmt: skip
    machine = Machine(cluster, groups, framework, len(first), spread)
    p = primitives_of(framework)
    kinds = build.block_kinds(workload.model)
    tapes: dict[str, BlockTapes] = {}

    def cost(make: Callable[[], BlockTapes], label: str) -> BlockCost:
        block = make()
        if drop:
            block = BlockTapes(block.name, block.forward.without(drop), block.backward.without(drop))
        tapes[label] = block
        forward, backward = scan(block.forward, machine), scan(block.backward, machine)
        return BlockCost(
            forward, backward, block_memory(block, len(first)), tape_flops(block.forward, len(first)),
            tape_flops(block.backward, len(first)), cached_bytes(block, len(first)),
        )  # fmt: skip

    def layer(kind: BlockKind, spec: RecomputeSpec) -> BlockCost:
        recompute: Recompute = NO_RECOMPUTE
        if spec.kind != "none":
            forward = build.block(ctx, p, kind).forward if spec.kind == "ops" else None
            recompute = recompute_of(framework, spec, forward, workload.model)
        return cost(lambda: build.block(ctx, p, kind, recompute), f"{kind.name} recompute={spec}")

    used = {table.recompute_modes[i] for i in np.unique(table.recompute)}
    wanted = {base_mode(spec) for spec in used} | ({FULL} if any(needs_full(s) for s in used) else set())
    if used == {FULL} and np.all(table.recompute_layers == -1):  # no layer is left to another mode
        wanted = {FULL}
    blocks = {spec: tuple(layer(kind, spec) for kind in kinds) for spec in sorted(wanted, key=str)}
    mtp = None
    if workload.model.num_mtp_layers:
        last = kinds.index(build.layer_kind(workload.model, workload.model.num_layers - 1))
        entry = cost(lambda: build.mtp_entry(ctx, p), "mtp")
        mtp = {spec: entry.then(blocks[spec][last]) for spec in blocks}
    some = str(next(iter(blocks)))
    ops = [op for kind in kinds for op in tapes[f"{kind.name} recompute={some}"].forward.ops]
    body, with_head = persistent_buffers(framework, ctx, ops)
    return Costs(
        ctx, groups, index, blocks, cost(lambda: build.embedding(ctx, p), "embedding"),
        cost(lambda: build.head(ctx, p), "head"), mtp, per_combination(body, len(first)),
        per_combination(with_head, len(first)),
        per_combination(ctx.shard * float(workload.model.hidden) * ctx.residual, len(first)), tapes, machine,
    )  # fmt: skip


def per_combination(x: FloatK, num_k: int) -> ArrayK:
    """A number or an array of the tapes as an array. (K,)"""
    return np.full(num_k, x) if isinstance(x, float) else np.asarray(np.broadcast_to(x, (num_k,)))


def cached_bytes(block: BlockTapes, num_k: int) -> ArrayK:
    """Bytes of weight copies that autocast makes in the forward and the backward does not read. (K,) [B]"""
    read = {name for op in block.backward.ops for name in op.reads}
    total = np.zeros(num_k)
    for op in block.forward.ops:
        for name in op.writes:
            # experts are cast outright, not by autocast
            if op.name.endswith(".weight_cast") and name not in read and not op.name.startswith("experts."):
                total = total + block.forward.tensors[name].bytes
    return total


def base_mode(spec: RecomputeSpec) -> RecomputeSpec:
    """The mode of the layers that are not recomputed whole."""
    return RecomputeSpec() if spec.kind in ("full", "every", "none") else spec


def needs_full(spec: RecomputeSpec) -> bool:
    """Whether some layers are recomputed whole."""
    return spec.kind in ("full", "every")
