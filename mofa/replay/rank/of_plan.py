"""From a costed plan to what each of its ranks holds and does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from mofa.blocks.build import layer_kind
from mofa.blocks.elementwise import value
from mofa.blocks.frameworks.megatron.persistent import lasting
from mofa.cost.allocations.allocation_trace import BlockTrace, awaiting_embedding, gathering, life
from mofa.cost.allocations.host_lead import beside_peers, device_per_host, paces
from mofa.cost.allocations.initialization import rotations
from mofa.cost.allocations.parameter_tensors import Module, params_of
from mofa.cost.allocations.sequential_experts import one_by_one
from mofa.cost.allocations.weight_buffers import (
    built_beside,
    ddp_buckets,
    flat_buffers,
    held_in_fp8,
    rotation_tables,
    weights_of,
)
from mofa.cost.block.block_cost import BlockCost, base_mode, full_mode
from mofa.cost.estimate import Estimator
from mofa.cost.memory.communicators import communicators_of
from mofa.cost.memory.fsdp_gathered import by_chunk
from mofa.cost.memory.fsdp_root import waits_for_embedding
from mofa.cost.memory.stage_inputs import held_beside
from mofa.cost.rows import Rows
from mofa.cost.step_time.data_parallel import ddp_width
from mofa.replay.rank.description import Rank, RankBlock
from mofa.replay.rank.routing_drift import Moving, RoutingDrift
from mofa.replay.rank.uneven_layers import UnevenLayers, rows_by_layer
from mofa.schedules import SCHEDULE_NAMES, SCHEDULES, Order, order_of


def rows_of(estimator: Estimator) -> Rows:
    """The composed row of an estimator of one strategy."""
    assert len(estimator.table) == 1
    return estimator.row


def ranks_of(estimator: Estimator, data_rank: int = 0) -> tuple[Rank, ...]:
    """Every pipeline rank of an estimator of one strategy."""
    rank = rank_maker(estimator, data_rank=data_rank)
    return tuple(rank(r) for r in range(int(estimator.table.pp[0])))


def rank_maker(estimator: Estimator, *, emptiest: bool = False, data_rank: int = 0) -> Callable[[int], Rank]:
    """What makes any pipeline rank of an estimator of one strategy: of those that differ by the tokens that their
    experts get the fullest, or the ``emptiest``; of those that hold the same parameters the ``data_rank``-th."""
    return partial(_makes(estimator), emptiest, data_rank)


def makers_of_ends(estimator: Estimator) -> tuple[Callable[[int], Rank], ...]:
    """What makes a pipeline rank of each of :func:`ends_of_shards`."""
    return makers_of_extremes(estimator)[0]


def makers_of_extremes(estimator: Estimator) -> tuple[tuple[Callable[[int], Rank], ...], Callable[[int], Rank]]:
    """The same, and what makes the one with the fewest tokens of the first of them; they share their lives."""
    make = _makes(estimator)
    return tuple(partial(make, False, data_rank) for data_rank in ends_of_shards(estimator)), partial(make, True, 0)


def tokens_over_mean(estimator: Estimator, r: int) -> tuple[float, ...]:
    """Tokens of the experts of every rank of an expert-parallel group over their mean, in the mean of a stage's layers;
    empty where the counts of its layers are not known, or it has none with experts. [-]"""
    rows = rows_of(estimator)
    known, model = rows_by_layer(estimator), rows.workload.model
    if known is None:
        return ()
    stages = rows.layout.stages
    order = order_of(
        rows.schedule, rows.framework.traits.runtime, stages.pp, stages.vpp, int(rows.num_micro_batches[0])
    )
    routed = [layer for layer in range(model.num_layers) if model.is_moe_layer(layer)]
    places = [routed.index(layer) for layer in _layers(rows, order, r) if model.is_moe_layer(layer)]
    return tuple(known[places].mean(axis=0).tolist()) if places else ()


def _layers(rows: Rows, order: Order, r: int) -> list[int]:
    """The layers of a pipeline rank, chunk by chunk."""
    stages, starts = rows.layout.stages, _first_layers(rows)
    own_stages = [
        next(s for s in range(c * stages.pp, (c + 1) * stages.pp) if order.rank_of(s) == r) for c in range(stages.vpp)
    ]
    return [starts[stage] + j for c, stage in enumerate(own_stages) for j in range(len(stages.layers[r][c]))]


def _makes(estimator: Estimator) -> Callable[[bool, int, int], Rank]:
    rows = rows_of(estimator)
    fw, stages = rows.framework, rows.layout.stages
    traces = _block_traces(estimator)
    routed = UnevenLayers(estimator, traces, _block_traces)
    traces = {label: one_by_one(trace) for label, trace in traces.items()}
    order = order_of(rows.schedule, fw.traits.runtime, stages.pp, stages.vpp, int(rows.num_micro_batches[0]))
    return partial(_rank, rows, traces, routed, order)


def ends_of_shards(estimator: Estimator) -> tuple[int, ...]:
    """The first and the last of the data-parallel ranks, where Megatron's distributed optimizer makes them differ."""
    fw, table = estimator.framework, estimator.table
    if fw.shards_params or fw.deepspeed or int(table.zero[0]) < 1:
        return (0,)
    return tuple(sorted({0, int(table.dp[0] * table.cp[0]) - 1}))


def _block_traces(estimator: Estimator) -> dict[str, BlockTrace]:
    """The lives of all kinds of blocks."""
    fw, part = estimator.framework, estimator.parts[0]
    defers = SCHEDULES[SCHEDULE_NAMES[int(estimator.table.schedule[0])]].defers_weight_gradients
    no_sums_in_place = defers or not fw.traits.adds_gradients_in_place
    pipelined = fw.traits.has_pytorch_pipelines and int(estimator.table.pp[0]) > 1
    by_autograd = (
        fw.traits.makes_weight_gradients_first or not fw.overlap_input_grads
    )  # and not by Megatron's own function
    ctx = part.costs.context
    return {
        label: life(
            block,
            autocast=part.mode.precision == "autocast",
            weight_first=by_autograd,
            sums_apart=no_sums_in_place,
            pipelined=pipelined,
            puts_off=defers,
            replicated=fw.shards_params and fw.dp_replicate > 1,
            lasting=lasting(ctx, block.name, block.forward.ops) if fw.library else None,
        )
        for label, block in part.costs.tapes.items()
    }


def outside_of(estimator: Estimator) -> tuple[float, tuple[float, ...]]:
    """What the device holds beside the allocator: the CUDA context, and the communicators of every rank. [B]"""
    rows = rows_of(estimator)
    return float(rows.cluster.gpu.context_bytes.value), tuple(communicators_of(rows)[0].tolist())


def room_of(estimator: Estimator, r: int = 0) -> int:
    """What the capacity leaves the allocator of a pipeline rank, beside context and communicators. [B]"""
    context, communicators = outside_of(estimator)
    return int(estimator.cluster.gpu.capacity_bytes.value - context - communicators[r])


def _rank(
    rows: Rows, traces: dict[str, BlockTrace], routed: UnevenLayers, order: Order, emptiest: bool, data_rank: int,
    r: int,
) -> Rank:  # fmt: skip
    stages, mode, fw = rows.layout.stages, rows.mode, rows.framework
    pp, vpp = stages.pp, stages.vpp
    table = rows.table
    spec = table.recompute_modes[int(table.recompute[0])]
    base = base_mode(spec)
    chunks: list[tuple[RankBlock, ...]] = []
    costs: list[BlockCost] = []
    seen = 0
    starts = _first_layers(rows)
    own_stages = [next(s for s in range(c * pp, (c + 1) * pp) if order.rank_of(s) == r) for c in range(vpp)]
    layers = _layers(rows, order, r)
    life_of, routers = routed.of_rank(layers, emptiest), routed.routers(layers, emptiest)
    of_rank: list[dict[int, Moving | None]] = []
    for c, stage in enumerate(own_stages):
        pieces: list[RankBlock] = []
        of_rank.append({})
        if stage == 0:
            pieces.append(RankBlock("the embedding", traces["embedding"], paces(rows.costs.embedding)))
            costs.append(rows.costs.embedding)
        for j, kind in enumerate(stages.layers[r][c]):
            seen += 1
            full = spec.kind == "full" and (table.recompute_layers[0] < 0 or j < table.recompute_layers[0])
            full = full or (spec.kind == "every" and seen % (spec.layers or 1) == 0)
            label = f"{stages.kinds[kind].name} recompute={full_mode(spec) if full else base}"
            costs.append(rows.costs.blocks[full_mode(spec) if full else base][kind])
            layer = starts[stage] + j
            trace = life_of(label, layer)
            trace = gathering(trace, traces["embedding"]) if layer == 0 else trace
            moves = routed.moving(label, layer)
            if moves is not None and layer == 0:
                ends = (gathering(end, traces["embedding"]) for end in (moves.some, moves.more))
                moves = replace(moves, some=next(ends), more=next(ends))
            of_rank[-1][len(pieces)] = moves
            pieces.append(RankBlock(f"block {layer}", trace, paces(costs[-1]), is_layer=True))
        if stage == pp * vpp - 1:
            for n in range(rows.workload.model.num_mtp_layers):
                # its entry, a layer like the last and a pass through the head; recomputed only with all layers
                again = full_mode(spec) if spec.kind == "full" and table.recompute_layers[0] < 0 else base
                last = layer_kind(rows.workload.model, rows.workload.model.num_layers - 1)
                pieces.append(RankBlock(f"prediction {n}", traces["mtp"]))
                pieces.append(RankBlock(f"the layer of prediction {n}", traces[f"{last.name} recompute={again}"]))
                pieces.append(RankBlock(f"the head of prediction {n}", traces["head"]))
            waits = waits_for_embedding(rows)
            head = awaiting_embedding(traces["head"]) if waits else traces["head"]
            pieces.append(RankBlock("the head", head, paces(rows.costs.head)))
            costs.append(rows.costs.head)
        chunks.append(tuple(pieces))
    computations = tuple((a.kind, a.stage // pp, a.micro_batch) for a in order.ranks[r])
    local = [s for s in range(pp * vpp) if order.rank_of(s) == r]
    receives = tuple(s > 0 and order.rank_of(s - 1) != r for s in local)
    sends = tuple(s < pp * vpp - 1 and order.rank_of(s + 1) != r for s in local)
    ctx = rows.costs.context
    boundary = int(value(ctx.shard) * rows.workload.model.hidden * ctx.residual)
    dense_ranks, expert_ranks = float(rows.shards.dense_ranks[0, 0]), float(rows.shards.expert_ranks[0, 0])
    groups = tuple(
        tuple(
            tuple(
                (weight.params, weight.params / (expert_ranks if weight.of_experts else dense_ranks))
                for weight in p.trace.weights
            )
            for p in c
        )
        for c in chunks
    )
    pipelined = mode.precision == "mixed" and mode.pipelined and fw.shards_params
    tp, ds = int(table.tp[0]), fw.deepspeed
    if any(p.trace.sent for c in chunks for p in c):
        peers = int(table.tp[0] * table.cp[0])
        chunks = [tuple(replace(p, paces=beside_peers(p.paces, rows.cluster, peers)) for p in c) for c in chunks]
    on_head = r == stages.head_stage
    persistent_bytes = int(value(rows.costs.persistent_head if on_head else rows.costs.persistent))
    persistent = (persistent_bytes,) if persistent_bytes and not fw.library else rotation_tables(rows, len(layers))
    beside = held_beside(fw, rows.schedule_record, pp, sum(receives))
    keeps_received = beside.throughout > 0 and vpp == 1
    held_throughout = 0 if keeps_received else beside.throughout
    tied = _tied(rows, r)
    modules = [[Module(p.name, p.trace.name, p.trace.weights, p.is_layer) for p in c] for c in chunks]
    params = params_of(rows, r, modules, tied=tied)
    in_fp8 = {p.name for c in chunks for p in c if _in_fp8(p, traces)}
    weights = held_in_fp8(rows, weights_of(rows, params, r, data_rank), in_fp8)
    moving = tuple(tuple(of.get(n) for n in range(len(c))) for of, c in zip(of_rank, chunks, strict=True))
    # where weights' gradients are put off, or collectives' memory comes back late, two steps are played
    defers = rows.schedule_record.defers_weight_gradients
    drift = RoutingDrift(routers, moving) if routers is not None and not (defers or ds) else None
    return Rank(
        weights=weights, chunks=tuple(chunks), computations=computations,
        num_micro_batches=int(rows.num_micro_batches[0]), receives=receives, sends=sends,
        feeds_own_chunk=tuple(s < pp * vpp - 1 and pp > 1 and order.rank_of(s + 1) == r for s in local),
        first_chunks=frozenset(s // pp for s in local if s == 0), boundary_bytes=boundary,
        rotations=rotations(rows),
        lazy_buffers=(*persistent, *(boundary,) * held_throughout), built=built_beside(rows, weights, len(layers)),
        keeps_received=keeps_received, inputs_at_end=beside.at_end,
        grads_always=rows.static.grads_always and not ds, flat_buffers=flat_buffers(rows, params, r, weights),
        preallocated=fw.traits.has_pytorch_pipelines, defers_weight_gradients=defers, round_length=pp * vpp, tied=tied,
        stored_bytes=rows.costs.context.stored,
        gathered_params=groups if pipelined else None, unshards=by_chunk(rows),
        moments=rows.workload.optimizer.traits.moments,
        deepspeed=ds, optimizer_ranks=dense_ranks if int(table.zero[0]) >= 1 else 1.0,
        norms_gradients=tp == 1 or fw.norms_gradients, optimizer_rank=min(fw.optimizer_rank, int(dense_ranks) - 1),
        output_stays=rows.schedule_record.joins_exchanges and pp > 1 and fw.traits.has_pytorch_pipelines,
        device_per_host=device_per_host(costs),
        buckets=ddp_buckets(
            [[p.trace for p in c] for c in chunks], int(rows.static.buffers[0, r]), ddp_width(rows), tied=tied
        ) if fw.shards_params else (),
        sent_bytes=boundary // tp if ds and tp > 1 else 0, launch_blocking=fw.launch_blocking,
        casts_to_reduce=fw.casts_to_reduce, routing_drift=drift,
    )  # fmt: skip


def _in_fp8(piece: RankBlock, traces: dict[str, BlockTrace]) -> bool:
    """Whether Transformer Engine's linears are in a piece: all but the embedding, the head and a prediction's entry."""
    return not any(piece.trace is traces.get(name) for name in ("embedding", "head", "mtp"))


def _tied(rows: Rows, r: int) -> bool:
    """Whether a rank has the embedding and a head that is the same weight."""
    return rows.workload.model.tied_embeddings and r == 0 and rows.layout.stages.head_stage == 0


def _first_layers(rows: Rows) -> list[int]:
    """The first layer of every stage."""
    stages = rows.layout.stages
    sizes = [0] * (stages.pp * stages.vpp)
    for s in range(len(sizes)):
        turn, position = divmod(s, stages.pp)
        r = stages.pp - 1 - position if rows.schedule_record.placement == "v" and turn % 2 else position
        sizes[s] = len(stages.layers[r][turn])
    return [int(x) for x in np.concatenate([[0], np.cumsum(sizes)[:-1]])]
