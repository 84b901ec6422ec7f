"""From a costed plan to what each of its ranks holds and does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from mofa.blocks.combined_passes import part_of_each_op
from mofa.blocks.frameworks.megatron.persistent import buffers_at_first_use
from mofa.cost.allocations.allocation_trace import (
    block_allocation_trace,
    with_embedding_gathered_ahead,
    with_head_gradient_for_embedding,
)
from mofa.cost.allocations.block_trace import BlockTrace
from mofa.cost.allocations.host_lead import (
    device_over_host_time,
    forward_and_backward_pass_times,
    pass_times_of_fastest_peer,
)
from mofa.cost.allocations.initialization import rotary_table_bytes_of_model_part
from mofa.cost.allocations.parameter_tensors import RankModule, parameter_tensors_of_rank
from mofa.cost.allocations.sequential_experts import unroll_sequential_experts
from mofa.cost.allocations.watchdog import BlockPassTime
from mofa.cost.allocations.weight_buffers import (
    ddp_bucket_tensors_by_chunk,
    flat_buffers,
    te_buffers_taken_at_build,
    weight_bytes_of_rank,
    with_fp8_weight_bytes,
    without_states_on_hosts,
)
from mofa.cost.estimate import TableEstimator
from mofa.cost.memory.communicators import communicator_bytes_of_stages
from mofa.cost.memory.late_gradient_copies import bytes_free_beside_waiting_copies, late_gradient_copies_bytes
from mofa.cost.rank_spec import BlockSpec, PersistentBuffers, RankSpec, cost_of_block_spec
from mofa.cost.rows import GatheredRows
from mofa.replay.rank.description import Rank, RankBlock
from mofa.replay.rank.routing_drift import DriftingLayerTraces, RoutingDrift
from mofa.replay.rank.uneven_layers import UnevenLayerTraces, rows_over_mean_by_layer
from mofa.schedules import SCHEDULE_NAMES, SCHEDULES


def gathered_row_of_strategy(estimator: TableEstimator) -> GatheredRows:
    """The composed row of an estimator of one strategy."""
    assert len(estimator.table) == 1
    return estimator.row_with_every_stage


def describe_ranks(estimator: TableEstimator, data_rank: int = 0) -> tuple[Rank, ...]:
    """Every pipeline rank of an estimator of one strategy."""
    rank = describer_of_rank(estimator, data_rank=data_rank)
    return tuple(rank(r) for r in range(int(estimator.table.pp[0])))


def describer_of_rank(
    estimator: TableEstimator, *, emptiest: bool = False, data_rank: int = 0
) -> Callable[[int], Rank]:
    """What makes any pipeline rank of an estimator of one strategy: of those that differ by the tokens that their
    experts get the fullest, or the ``emptiest``; of those that hold the same parameters the ``data_rank``-th."""
    return partial(_makes(estimator), emptiest, data_rank)


def describers_of_end_data_ranks(estimator: TableEstimator) -> tuple[Callable[[int], Rank], ...]:
    """What makes a pipeline rank of each of :func:`first_and_last_data_ranks`."""
    return describers_of_fullest_and_emptiest(estimator)[0]


def describers_of_fullest_and_emptiest(
    estimator: TableEstimator,
) -> tuple[tuple[Callable[[int], Rank], ...], Callable[[int], Rank]]:
    """What makes the pipeline ranks of the first and the last data-parallel rank, and of the one with the fewest
    tokens; they share their traces."""
    make = _makes(estimator)
    return tuple(partial(make, False, data_rank) for data_rank in first_and_last_data_ranks(estimator)), partial(
        make, True, 0
    )


def tokens_over_mean_by_rank(estimator: TableEstimator, pipeline_rank: int) -> tuple[float, ...]:
    """Tokens of the experts of every rank of an expert-parallel group over their mean, in the mean of a stage's layers;
    empty where the counts of its layers are not known, or it has none with experts. [-]"""
    known, model = rows_over_mean_by_layer(estimator), estimator.workload.model
    if known is None:
        return ()
    routed = [layer for layer in range(model.num_layers) if model.is_moe_layer(layer)]
    places = [
        routed.index(layer) for layer in estimator.rank_specs[pipeline_rank].layer_numbers if model.is_moe_layer(layer)
    ]
    return tuple(known[places].mean(axis=0).tolist()) if places else ()


def _makes(estimator: TableEstimator) -> Callable[[bool, int, int], Rank]:
    traces = _block_traces(estimator)
    routed = UnevenLayerTraces(estimator, traces, _block_traces)
    traces = {label: unroll_sequential_experts(trace) for label, trace in traces.items()}
    return partial(_rank, gathered_row_of_strategy(estimator), estimator.rank_specs, traces, routed)


def first_and_last_data_ranks(estimator: TableEstimator) -> tuple[int, ...]:
    """The first and the last of the data-parallel ranks, where Megatron's distributed optimizer makes them differ."""
    spec = estimator.rank_specs[0]
    if not (spec.gradients.has_flat_buffers and spec.gradients.shards_states):
        return (0,)
    return tuple(sorted({0, spec.place.dense_ranks - 1}))


def _block_traces(estimator: TableEstimator) -> dict[str, BlockTrace]:
    """The allocation traces of all kinds of blocks."""
    fw, part = estimator.framework, estimator.parts[0]
    defers = SCHEDULES[SCHEDULE_NAMES[int(estimator.table.schedule[0])]].defers_weight_gradients
    no_sums_in_place = defers or not fw.traits.adds_gradients_in_place
    pipelined = fw.traits.has_pytorch_pipelines and int(estimator.table.pp[0]) > 1
    by_autograd = (
        fw.traits.makes_weight_gradients_first or not fw.overlap_input_grads
    )  # and not by Megatron's own function
    ctx = part.costs.context
    return {
        label: block_allocation_trace(
            block,
            autocast=part.mode.precision == "autocast",
            weight_first=by_autograd,
            sums_out_of_place=no_sums_in_place,
            pipelined=pipelined,
            split_backward=defers,
            replicated=fw.shards_params and fw.dp_replicate > 1,
            persistent=buffers_at_first_use(ctx, block.name, block.forward.ops, block.recomputed_op_names)
            if fw.library
            else None,
        )
        for label, block in part.costs.tapes.items()
    }


def outside_allocator_bytes(estimator: TableEstimator) -> tuple[float, tuple[float, ...]]:
    """What the device holds beside the allocator: the CUDA context, and the communicators of every rank. [B]"""
    rows = gathered_row_of_strategy(estimator)
    return float(rows.cluster.gpu.context_bytes.value), tuple(communicator_bytes_of_stages(rows)[0].tolist())


def allocator_capacity_bytes(estimator: TableEstimator, pipeline_rank: int = 0) -> int:
    """What the capacity leaves the allocator of a pipeline rank, beside context and communicators. [B]"""
    context, communicators = outside_allocator_bytes(estimator)
    return int(estimator.cluster.gpu.capacity_bytes.value - context - communicators[pipeline_rank])


def _rank(
    rows: GatheredRows, specs: Sequence[RankSpec], traces: dict[str, BlockTrace], routed: UnevenLayerTraces,
    emptiest: bool, data_rank: int, pipeline_rank: int,
) -> Rank:  # fmt: skip
    """A rank as it is described, with the traces of its blocks."""
    spec, fw, workload = specs[pipeline_rank], rows.framework, rows.workload
    place, gradients, inputs = spec.place, spec.gradients, spec.buffers.held_inputs
    chunks, moving = _chunks(rows, spec, traces, routed, emptiest)
    modules = [
        [RankModule(p.name, block.role, p.trace.weights) for p, block in zip(pieces, chunk.blocks, strict=True)]
        for pieces, chunk in zip(chunks, spec.chunks, strict=True)
    ]
    params = parameter_tensors_of_rank(workload, fw, spec, modules)
    in_fp8 = {block.name_with_article for chunk in spec.chunks for block in chunk.blocks if block.is_layer}
    weights = with_fp8_weight_bytes(rows, weight_bytes_of_rank(workload, fw, spec, params, data_rank), in_fp8)
    buffers = flat_buffers(fw, spec, params, weights, rows.workload.precision.fp8_recipe)
    weights = without_states_on_hosts(fw, weights, buffers)
    costs = [cost_of_block_spec(rows, block) for chunk in spec.chunks for block in chunk.blocks]
    boundary, ds = int(spec.buffers.stage_boundary_bytes), fw.deepspeed
    keeps_received = inputs.throughout > 0 and place.vpp == 1
    held_throughout = 0 if keeps_received else inputs.throughout
    # where weights' gradients are put off, or collectives' memory comes back late, two steps are played
    defers, routers = spec.schedule.defers_weight_gradients, routed.drifting_routers(spec.layer_numbers, emptiest)
    drift = RoutingDrift(routers, moving) if routers is not None and not (defers or ds) else None
    return Rank(
        weights=weights, chunks=chunks, computations=spec.computations,
        num_micro_batches=spec.schedule.num_micro_batches, receives=tuple(c.receives for c in spec.chunks),
        sends=tuple(c.sends for c in spec.chunks), feeds_own_chunk=tuple(c.feeds_own_chunk for c in spec.chunks),
        first_chunks=frozenset(c for c, chunk in enumerate(spec.chunks) if chunk.position == 0),
        stage_boundary_bytes=boundary, rotary_table_bytes=rotary_table_bytes_of_model_part(rows),
        first_forward_buffers=(*_lazy_buffers(spec.buffers, fw.library), *(boundary,) * held_throughout),
        allocated_at_build=te_buffers_taken_at_build(fw, spec, weights), keeps_received_inputs=keeps_received,
        inputs_at_end=inputs.at_end, grads_always=gradients.has_flat_buffers,
        flat_buffers=buffers, overlaps_host_copies=fw.overlap_optimizer_copies,
        preallocated=fw.traits.has_pytorch_pipelines, defers_weight_gradients=defers,
        round_length=place.pp * place.vpp, tied=gradients.ties_ends,
        stored_bytes_per_param=rows.costs.context.stored_bytes_per_param,
        gathered_params=_gathered_params(spec, chunks) if gradients.keeps_params_gathered else None,
        reduces_by_chunk=gradients.reduces_by_chunk, moments=workload.optimizer.traits.moments,
        deepspeed=ds, optimizer_ranks=float(place.dense_ranks) if gradients.shards_states else 1.0,
        norms_gradients=place.tensor_ranks == 1 or fw.norms_gradients,
        optimizer_rank=min(fw.optimizer_rank, place.dense_ranks - 1),
        keeps_last_output=spec.schedule.keeps_last_output,
        device_over_host_time=device_over_host_time([cost for cost in costs if cost is not None]),
        buckets=ddp_bucket_tensors_by_chunk(
            [[p.trace for p in c] for c in chunks], int(spec.buffers.ddp_bucket_or_fp8_copy_bytes),
            gradients.bytes_in_bucket,
            tied=gradients.ties_ends,
        ) if fw.shards_params else (),
        sent_bytes=boundary // place.tensor_ranks if ds and place.tensor_ranks > 1 else 0,
        pairs_passes=rows.schedule_record.pairs_passes,
        launch_blocking=fw.launch_blocking, casts_to_reduce=fw.casts_to_reduce, routing_drift=drift,
        late_copies_bytes=int(late_gradient_copies_bytes(rows)[0, pipeline_rank]),
        margin_bytes=bytes_free_beside_waiting_copies(rows),
    )  # fmt: skip


_Moves = tuple[tuple[DriftingLayerTraces | None, ...], ...]
"""Of each block of each chunk what moves from step to step, if anything."""


def _chunks(
    rows: GatheredRows, spec: RankSpec, traces: dict[str, BlockTrace], routed: UnevenLayerTraces, emptiest: bool
) -> tuple[tuple[tuple[RankBlock, ...], ...], _Moves]:  # fmt: skip
    """The blocks of a rank's chunks with their traces, and what moves of them."""
    trace_of = routed.allocation_trace_getter(spec.layer_numbers, emptiest)

    def trace(block: BlockSpec) -> BlockTrace:
        if block.role == "layer":
            of_layer = trace_of(block.tapes, block.number)
            return with_embedding_gathered_ahead(of_layer, traces["embedding"]) if block.number == 0 else of_layer
        waits = block.role == "head" and spec.gradients.head_gradient_waits_for_embedding
        return with_head_gradient_for_embedding(traces["head"]) if waits else traces[block.tapes]

    def moves(block: BlockSpec) -> DriftingLayerTraces | None:
        of_layer = routed.drifting_layer(block.tapes, block.number) if block.role == "layer" else None
        if of_layer is None or block.number > 0:
            return of_layer
        some, more = (
            with_embedding_gathered_ahead(end, traces["embedding"])
            for end in (of_layer.trace, of_layer.trace_with_more_rows)
        )
        return replace(of_layer, trace=some, trace_with_more_rows=more)

    chunks = tuple(
        tuple(
            RankBlock(
                block.name_with_article, trace(block), _forward_and_backward_times(rows, block), _parts(rows, block)
            )
            for block in chunk.blocks
        )
        for chunk in spec.chunks
    )
    if any(piece.trace.recorded_on_nccl_stream for chunk in chunks for piece in chunk):
        peers = spec.place.tensor_ranks * spec.place.context_ranks
        chunks = tuple(
            tuple(
                replace(
                    piece,
                    forward_and_backward_times=pass_times_of_fastest_peer(
                        piece.forward_and_backward_times, rows.cluster, peers
                    ),
                )
                for piece in chunk
            )
            for chunk in chunks
        )
    return chunks, tuple(tuple(map(moves, chunk.blocks)) for chunk in spec.chunks)


def _parts(rows: GatheredRows, block: BlockSpec) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """The parts of a layer's ops, where its passes run in pairs."""
    if not rows.schedule_record.pairs_passes or not block.is_layer:
        return {}, {}
    tapes = rows.costs.tapes[block.tapes]
    return part_of_each_op(tapes.forward, tapes.backward, delays=rows.framework.delay_wgrad)


def _forward_and_backward_times(rows: GatheredRows, block: BlockSpec) -> tuple[BlockPassTime, BlockPassTime]:
    cost = cost_of_block_spec(rows, block)
    return forward_and_backward_pass_times(cost) if cost is not None else (BlockPassTime(), BlockPassTime())


def _lazy_buffers(buffers: PersistentBuffers, library: str | None) -> tuple[int, ...]:
    """What the first forward takes for good: a library's tables of rotations, else the framework's own. [B]"""
    number, nbytes = (
        (buffers.num_rotary_tables, buffers.rotary_table_bytes) if library else (1, buffers.framework_buffer_bytes)
    )
    return (int(nbytes),) * number if int(nbytes) else ()


def _gathered_params(
    spec: RankSpec, chunks: tuple[tuple[RankBlock, ...], ...]
) -> tuple[tuple[tuple[tuple[float, float], ...], ...], ...]:  # fmt: skip
    """The weights of FSDP's groups per chunk, and the rank's share of each. [params]"""
    dense, expert = spec.place.dense_ranks, spec.place.expert_ranks
    return tuple(
        tuple(
            tuple((w.params, w.params / (expert if w.of_experts else dense)) for w in piece.trace.weights)
            for piece in chunk
        )
        for chunk in chunks
    )
