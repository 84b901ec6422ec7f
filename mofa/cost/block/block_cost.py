"""Time and memory of every kind of block, once per unique combination of the degrees that they depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mofa.blocks import build
from mofa.blocks.build import BlockTapes
from mofa.blocks.capacity_rows import padded_rows_over_copies
from mofa.blocks.context import Context
from mofa.blocks.elementwise import FloatK, any_true, broadcast_to_combinations, maximum, stack_rows, where
from mofa.blocks.float8 import float8_linears
from mofa.blocks.fp8 import FP8_RECIPES, fp8_recipe_of_layers
from mofa.blocks.tapes import layer_label, model_tapes
from mofa.blocks.work import Format
from mofa.cost.block.costs import BlockCost, BlockCosts, BlockMemories, BlockTimer, EqualWeightsOfOp, WeightsByBlock
from mofa.cost.block.durations import OpTimingMachine, tape_flops
from mofa.cost.block.routing_loads import RoutingLoads
from mofa.cost.kernels.token_spread import token_spread
from mofa.cost.kernels.topology import ProcessGroup, process_groups
from mofa.cost.optimizer import torchtitan_optimizer_element_bytes
from mofa.cost.option_sets import dp_replicate_of_rows
from mofa.specs.framework import FrameworkSpec
from mofa.specs.gpu_facts import KernelSelectionFacts
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import CP_KINDS, MERGED_GROUPS, RecomputeSpec, StrategyTable
from mofa.specs.workload import WorkloadSpec

ArrayK = NDArray[np.float64]


@dataclass(frozen=True)
class PrecisionMode:
    """How precision, pipelining and accumulation are, where all candidates that are costed together have them alike."""

    precision: str = "mixed"
    pipelined: bool = False
    accumulating: bool = True
    amp: bool = False
    """torchtitan: whether torch.autocast runs (one GPU, DDP), whatever it finds to cast."""


def unique_rows(columns: list[NDArray[np.int64]]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """First row of each unique combination, and each row's combination.

    Examples
    --------
    >>> unique_rows([np.array([4, 2, 4]), np.array([1, 1, 1])])
    (array([1, 0]), array([1, 0, 1]))
    """
    if len(columns[0]) == 1:
        return np.zeros(1, dtype=np.intp), np.zeros(1, dtype=np.intp)
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        code, many = _numbered(code * (int(column.max()) + 1 - (low := int(column.min()))) + (column - low))
    first = np.empty(many, dtype=np.intp)
    first[code[::-1]] = np.arange(len(code) - 1, -1, -1)
    return first, code


def _numbered(code: NDArray[np.int64]) -> tuple[NDArray[np.intp], int]:
    """Codes from 0 by their order, and how many there are; by a table where they are dense enough, else sorted."""
    if code.max() > 4 * len(code) + 4096:
        values, place = np.unique(code, return_inverse=True)
        return place, len(values)
    seen = np.zeros(int(code.max()) + 1, dtype=np.intp)
    seen[code] = 1
    place = np.cumsum(seen) - 1
    return place[code], int(place[-1]) + 1


def process_groups_of_rows(
    cluster: ClusterSpec, framework: FrameworkSpec, table: StrategyTable
) -> dict[str, ProcessGroup]:
    """The process groups of every row; those of ``fsdp`` and ``efsdp`` share a dense and an expert parameter."""
    shard = table.dp // np.maximum(np.minimum(dp_replicate_of_rows(framework, table), table.dp), 1)
    given = (table.etp, cluster.node, shard, framework.rank_order)
    groups = process_groups(table.tp, table.cp, table.pp, table.dp, table.ep, *given)
    if np.any(table.balancing > 0):  # two expert-parallel groups exchange tokens as one
        merged = table.ep * np.where(table.balancing > 0, MERGED_GROUPS, 1)
        wide = process_groups(table.tp, table.cp, table.pp, table.dp, merged, *given)
        groups = {**groups, "ep": wide["ep"]}
    return {**groups, "fsdp": groups["dp_shard_cp"], "efsdp": groups["edp_shard"]}


def num_gpus_meeting_in_layers(
    framework: FrameworkSpec, mode: PrecisionMode, groups: Mapping[str, ProcessGroup]
) -> NDArray[np.int64]:
    """GPUs that wait for each other within every layer: under tensor, context and expert parallelism, and those of
    FSDP that gathers each block's parameters. (K,) [-]"""
    meeting = np.maximum(groups["tp_cp"].size, groups["etp_ep"].size)
    if framework.shards_params and mode.precision == "mixed" and not mode.pipelined:
        meeting = np.maximum(meeting, groups["tp"].size * groups["fsdp"].size)
    return np.asarray(meeting, dtype=np.int64)


def num_ranks_with_meeting_hosts(
    workload: WorkloadSpec, groups: Mapping[str, ProcessGroup]
) -> NDArray[np.int64] | None:
    """Ranks whose hosts wait for each other within every layer: each reads how many tokens experts get, which others
    send it. Nobody reads where all experts are padded to a capacity. (K,) [-]"""
    if workload.model.moe is None or workload.routing.pad_to_capacity:
        return None
    return np.asarray(groups["etp_ep"].size, dtype=np.int64)


def block_context_and_process_groups(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, table: StrategyTable, loads: RoutingLoads,
    mode: PrecisionMode,
) -> tuple[Context, dict[str, ProcessGroup]]:  # fmt: skip
    """The context of the blocks and their process groups, one entry per row of the table."""
    model = workload.model
    f = {name: _plain(getattr(table, name).astype(float)) for name in ("tp", "cp", "ep", "etp", "micro_batch")}
    groups = process_groups_of_rows(cluster, framework, table)
    tokens = f["micro_batch"] * workload.batch.seq_len / f["cp"]
    sp = _plain(table.sp & (table.tp > 1))
    local = where(sp, tokens / f["tp"], tokens)
    top_k = model.moe.top_k if model.moe else 0
    load = loads.load_columns(table.ep, table.balancing)
    time_ratio, memory_ratio = _plain(load.slowest_rows_over_mean), _plain(load.quantile_rows_over_mean)
    if model.moe is not None and workload.routing.pad_to_capacity:
        assert workload.routing.capacity_factor is not None
        padded = padded_rows_over_copies(local * top_k, model.moe.num_experts, workload.routing.capacity_factor)
        time_ratio = memory_ratio = padded
    element: int = 2
    recipe = FP8_RECIPES.get(fp8_recipe_of_layers(workload, framework))
    gemm_format: Format = recipe.product if recipe and framework.library else "bf16"
    if mode.precision == "uniform" and workload.precision.params == "fp32":
        element, gemm_format = 4, "fp32"
    # torchtitan's first micro-batch makes the gradients; Megatron adds to zeroed buffers from the first on
    once = 1.0 / np.maximum(workload.batch.global_batch // (table.dp * table.micro_batch), 1)
    accumulates = 1.0 - once if framework.shards_params else np.ones(len(table))
    # Megatron's blocks are the same however its optimizer's states are shared out
    shards: dict[str, FloatK] = {"fsdp": 1.0, "efsdp": 1.0}
    if framework.traits.has_pytorch_modules:
        shards = {name: _plain(groups[name].size.astype(float)) for name in shards}
    # torchtitan's training never sets the rotate method: it always gathers keys and values
    exchanges = table.cp_kind == CP_KINDS.index("a2a")
    ring = (table.cp_kind == CP_KINDS.index("ring")) & (not framework.traits.has_pytorch_modules)
    multiple = recipe.aligned_rows if recipe else 1.0
    copies, selection = local * top_k * f["ep"] * f["etp"], cluster.gpu.curves.kernel_selection
    unseen, kernels = _unseen(workload, framework, table, loads, copies, selection, multiple)
    return Context(
        model=model, framework=framework, gemm_format=gemm_format, seq_len=workload.batch.seq_len,
        tp=f["tp"], sp=sp, cp=f["cp"], cp_ring=_plain(ring), cp_a2a=_plain(exchanges), ep=f["ep"], etp=f["etp"],
        micro_batch=f["micro_batch"], fsdp=shards["fsdp"], efsdp=shards["efsdp"],
        rows_time=local * top_k * time_ratio, rows_memory=local * top_k * memory_ratio,
        imbalance=_plain(load.sent_bytes_over_mean),
        expert_rows_deviation=_plain(load.expert_rows_deviation), fixed_rows=workload.routing.pad_to_capacity,
        capacity_factor=workload.routing.capacity_factor,
        unseen_rows_share=_plain(unseen), expected_first_use_kernels=_plain(kernels),
        has_all_layers=_plain(table.pp == 1),
        mean_loops_before=_plain((np.maximum(model.num_moe_layers / (table.pp * table.vpp), 1.0) + 1.0) / 2.0),
        schedules_replicas=_plain(table.balancing > 0), schedule_s=_plain(load.host_s),
        accumulates=_plain(accumulates), accumulating=mode.accumulating, pipelined=mode.pipelined,
        activation_element_bytes=element,
        residual_element_bytes=4 if mode.precision == "autocast" else element, weight_element_bytes=element,
        precision_mode=mode.precision,  # type: ignore[arg-type]
        has_amp_casts=mode.amp, stored_bytes_per_param=torchtitan_optimizer_element_bytes(workload, mode.precision),
        fp8=recipe, float8=float8_linears(model, framework, workload.precision),
        fp8_transposes=cluster.gpu.fp8_transposes, kernels=cluster.gpu.curves.layer_kernels,
    ), groups  # fmt: skip


def _unseen(
    workload: WorkloadSpec, framework: FrameworkSpec, table: StrategyTable, loads: RoutingLoads, copies: FloatK,
    selection: KernelSelectionFacts, multiple: float,
) -> tuple[ArrayK, ArrayK]:  # fmt: skip
    """Share of experts' numbers of tokens that need another kernel, and kernels loaded for a number. (n,), (n,) [-]

    Both are 0 where experts have no products of their own.
    """
    if not framework.has_kernel_per_expert:
        return np.zeros(len(table)), np.zeros(len(table))
    chunks = workload.batch.global_batch / (table.dp * table.micro_batch * table.pp)
    moe = workload.model.moe
    inner = (moe.expert_hidden if moe else 0) / table.etp
    ends = float(workload.model.hidden), 2.0 if workload.model.mlp.gated else 1.0
    copies = np.broadcast_to(copies, (len(table),))
    return loads.unremembered_share_and_first_use_kernels(
        table.ep.astype(float), copies, chunks, inner, ends, selection, multiple
    )


def _plain(column: NDArray[Any]) -> Any:
    """A column of the context: where there is one combination, the number itself (see mofa.blocks.elementwise)."""
    return column.item() if column.shape == (1,) else column


def columns_that_blocks_read(
    workload: WorkloadSpec, framework: FrameworkSpec, table: StrategyTable
) -> list[NDArray[np.int64]]:  # fmt: skip
    """What blocks depend on, of rows that share a :class:`PrecisionMode`. (n,) each"""
    columns = [table.tp, table.sp.astype(np.int64), table.cp, table.cp_kind, table.ep, table.etp, table.micro_batch]
    columns.append(table.balancing)
    if framework.shards_params:
        columns += [table.dp, table.pp, dp_replicate_of_rows(framework, table)]
    elif workload.model.gates_in_two_widths or workload.model.tied_embeddings:
        columns.append((table.pp > 1).astype(np.int64))
    return columns


def block_costs(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, table: StrategyTable, loads: RoutingLoads,
    mode: PrecisionMode, drop: frozenset[str] = frozenset(), *, counts_gpus_by_row: bool = False,
) -> BlockCosts:  # fmt: skip
    """Cost every kind of block that the table's candidates have.

    ``drop`` leaves out the ops of these families, to show what they weigh. ``counts_gpus_by_row`` is as in
    :class:`mofa.cost.estimate.TableEstimator`.
    """
    columns, num_gpus = columns_that_blocks_read(workload, framework, table), None
    if counts_gpus_by_row:
        columns.append(table.tp * table.cp * table.pp * table.dp)
    first, index = unique_rows(columns)
    unique = table.select_rows(first)
    if counts_gpus_by_row:
        num_gpus = unique.tp * unique.cp * unique.pp * unique.dp
    ctx, groups = block_context_and_process_groups(workload, cluster, framework, unique, loads, mode)
    spread, moe = None, workload.model.moe
    if moe is not None and framework.dispatcher == "deepep":
        spread = token_spread(
            groups["ep"], num_experts=moe.num_experts, top_k=moe.top_k, num_groups=moe.num_groups,
            top_groups=moe.groups_per_token,
        )  # fmt: skip
    num_k, kinds = len(first), build.distinct_layer_kinds(workload.model)
    modes = layer_recompute_modes(table)
    known = model_tapes(ctx, modes)
    tapes = known.blocks
    if drop:
        tapes = {
            name: BlockTapes(b.name, b.forward.without_families(drop), b.backward.without_families(drop))
            for name, b in tapes.items()
        }
    meeting = num_gpus_meeting_in_layers(framework, mode, groups)
    machine = OpTimingMachine(
        cluster, groups, framework, num_k, spread, num_gpus=num_gpus, meeting_gpus=meeting,
        meeting_hosts=num_ranks_with_meeting_hosts(workload, groups),
    )  # fmt: skip
    weights = WeightsByBlock(
        tuple(_weights(tapes[layer_label(kind, modes[0])]) for kind in kinds), _weights(tapes["embedding"]),
        _weights(tapes["head"]), num_k,
    )  # fmt: skip

    def large() -> ArrayK:
        """The sizes of weights, and the largest activation of a layer: the ends of the model have larger ones."""
        sizes = np.zeros((0, num_k)) if framework.shards_params else 2.0 * weights.largest_and_commonest_weight_params
        return np.concatenate([sizes, broadcast_to_combinations(known.largest_activation, num_k)[None]])

    phases = BlockTimer(tapes, machine, None if drop else known.known_times)
    costed = _costed(tapes, phases, BlockMemories(tapes, num_k, large))
    blocks = {spec: tuple(costed[layer_label(kind, spec)] for kind in kinds) for spec in modes}
    mtp = None
    if workload.model.num_mtp_layers:
        last = kinds.index(build.layer_kind(workload.model, workload.model.num_layers - 1))
        mtp = {spec: costed["mtp"].followed_by(blocks[spec][last]) for spec in modes}
    return BlockCosts(
        ctx, groups, index, blocks, costed["embedding"], costed["head"], mtp, known.layer_ops,
        broadcast_to_combinations(ctx.shard_tokens * float(workload.model.hidden) * ctx.residual_element_bytes, num_k),
        tapes,
        machine, weights,
    )  # fmt: skip


def layer_recompute_modes(table: StrategyTable) -> tuple[RecomputeSpec, ...]:
    """The modes in which layers run: each strategy's base, and full where some recompute layers whole."""
    used = {table.recompute_modes[i] for i in set(table.recompute.tolist())}
    wanted = {full_recompute_mode(spec) for spec in used if recomputes_layers_whole(spec)}
    if used != wanted or np.any(table.recompute_layers != -1):  # some layer is left to another mode
        wanted |= {base_recompute_mode(spec) for spec in used}
    return tuple(sorted(wanted, key=str))


def _weights(block: BlockTapes) -> tuple[EqualWeightsOfOp, ...]:
    out, seen = [], set()
    for op in block.forward.ops:
        if any_true(op.weight_params > 0) and (op.weight or op.name) not in seen:
            seen.add(op.weight or op.name)  # token chunks read the same weight
            number = maximum(op.num_weights, 1.0)
            out.append(EqualWeightsOfOp(op.weight_params / number, number, op.part == "experts"))
    return tuple(out)


def _costed(tapes: Mapping[str, BlockTapes], phases: BlockTimer, memories: BlockMemories) -> dict[str, BlockCost]:
    """Time and memory of every block."""
    num_k = phases.machine.num_k
    forwards: dict[int, ArrayK] = {}
    out = {}
    for name, block in tapes.items():
        forward = forwards.get(id(block.forward))
        if forward is None:
            forward = forwards[id(block.forward)] = tape_flops(block.forward, num_k)
        backward = tape_flops(block.backward, num_k)
        out[name] = BlockCost((block,), phases, memories, forward, backward, autocast_cached_bytes(block, num_k))
    return out


def autocast_cached_bytes(block: BlockTapes, num_k: int) -> ArrayK:
    """Bytes of weight copies that autocast makes in the forward and the backward does not read. (K,) [B]"""
    # experts are cast outright, not by autocast, and what is compiled casts outside of its cache
    casts = [op for op in block.forward.ops if op.casts_weight and op.part != "experts"
             and not op.compiled]  # fmt: skip
    if not casts:
        return np.zeros(num_k)
    read = {name for op in block.backward.ops for name in op.reads}
    copies = [block.forward.tensors[name].bytes for op in casts for name in op.writes if name not in read]
    return np.asarray(stack_rows(copies, num_k).sum(axis=0))


def base_recompute_mode(spec: RecomputeSpec) -> RecomputeSpec:
    """The mode of the layers that are not recomputed whole."""
    return RecomputeSpec(token_chunks=spec.token_chunks) if spec.kind in ("full", "every", "none") else spec


def full_recompute_mode(spec: RecomputeSpec) -> RecomputeSpec:
    """The mode of the layers that are recomputed whole."""
    return RecomputeSpec(kind="full", token_chunks=spec.token_chunks)


def recomputes_layers_whole(spec: RecomputeSpec) -> bool:
    """Whether some layers are recomputed whole."""
    return spec.kind in ("full", "every")
