"""Allocation trace of a block: what its tapes allocate and free, op by op, for one combination.

Lifetimes are those of :mod:`mofa.cost.block.liveness`. The replay plays it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mofa.blocks.build import BlockTapes
from mofa.blocks.elementwise import value_of_combination
from mofa.blocks.frameworks.megatron.persistent import NODE, FirstUse, PersistentBuffer
from mofa.blocks.op import KINDS, OWN_POOLS, READS, WRITES, Op, Tape, Tensor
from mofa.blocks.roles import WEIGHT_ROLES, TensorUse
from mofa.blocks.work import Attention, Collective
from mofa.cost.allocations.block_trace import BlockTrace, NewTensor, OpTrace
from mofa.cost.allocations.parameter_tensors import BlockWeight, block_weights
from mofa.cost.kernels.launch_queue import num_queued_kernels

STREAMS = {name: n for n, name in enumerate(("compute", *OWN_POOLS))}
"""Streams that allocate from pools of their own; what other collectives write is allocated by the computing one."""


def block_allocation_trace(
    block: BlockTapes, combination: int = 0, *, autocast: bool = False, weight_first: bool = False,
    sums_out_of_place: bool = False, pipelined: bool = False, split_backward: bool = False, replicated: bool = False,
    persistent: Mapping[FirstUse, tuple[PersistentBuffer, ...]] | None = None,
) -> BlockTrace:  # fmt: skip
    """The allocation trace of a block, for one combination of those that its tapes have.

    ``pipelined``: under PyTorch's schedules.

    ``sums_out_of_place``: nothing is added to a gradient in place. Either weights' gradients are deferred and keep
    those that they read, or PyTorch of then made a third tensor of two.

    ``split_backward``: the schedule runs backwards by inputs and by weights.

    ``replicated``: FSDP's shard groups are, and their sums added up over replicas.

    ``weight_first``: autograd's product (``MmBackward0``) makes the second factor's gradient, the weight's, before the
    input's; Megatron's own function the other way round.

    ``persistent``: what ops take and keep at a rank's first use, where layers are a library's and only the
    head's products PyTorch's.
    """
    trace = _trace_block(
        block, combination, autocast, weight_first, sums_out_of_place, pipelined, persistent=persistent or {}
    )
    trace = replace(trace, torch_products=persistent is None or block.name == "head")
    if replicated:
        reduced = (tensor.name for tensor in block.backward.tensors.values() if tensor.use == "reduced")
        trace = replace(trace, freed_at_end=frozenset(reduced))
    if not split_backward:
        return trace
    halves, both = block.split_backward, []
    for weights in (halves.by_weights, halves.by_weights_of_last_block):
        tape = replace(halves.by_inputs, ops=(*halves.by_inputs.ops, *weights.ops), tensors=weights.tensors)
        behind = len(halves.by_inputs.ops)
        halves_of = replace(block, backward=tape)
        both.append(
            _trace_block(
                halves_of,
                combination,
                autocast,
                weight_first,
                sums_out_of_place,
                pipelined,
                persistent=persistent or {},
                by_weights_from=behind,
            )
        )
    of_inner, last = both
    return replace(
        trace, split_backward=of_inner.backward, split_backward_of_last=last.backward, launches=of_inner.launches
    )


def _trace_block(
    block: BlockTapes, combination: int, autocast: bool, weight_first: bool, sums_out_of_place: bool, pipelined: bool,
    *,
    persistent: Mapping[FirstUse, tuple[PersistentBuffer, ...]], by_weights_from: int | None = None,
) -> BlockTrace:  # fmt: skip
    """Of the two tapes as they are; ops of the backward from ``by_weights_from`` on are those by weights, else those so
    named."""
    backward = _weights_first(block.backward.ops) if weight_first else block.backward.ops
    ops = [*block.forward.ops, *backward]
    boundary = len(block.forward.ops)
    tensors = {**block.forward.tensors, **block.backward.tensors}
    present = [bool(value_of_combination(op.present, combination)) for op in ops]
    root: dict[str, str] = {}

    def of(name: str) -> str:
        return root.get(name, name)

    birth: dict[str, int] = {}
    death: dict[str, int] = {}
    for i, op in enumerate(ops):
        shared = _shared(op, combination, present[i] and not (sums_out_of_place and op.role == "sum"), present[i])
        for name in op.reads if present[i] else ():
            death[of(name)] = i
        for name in op.writes:
            if name in shared:
                root[name] = of(op.reads[0])
                death[of(name)] = max(i, death.get(of(name), i)) if present[i] else death.get(of(name), i)
            elif present[i] or not op.reads:
                birth.setdefault(name, i)
                death[name] = i
    out = of(block.forward.outputs[0]) if block.forward.outputs else ""
    back = of(block.backward.outputs[0]) if block.backward.outputs else ""
    given = block.backward.inputs[0] if block.backward.inputs else ""
    lingers = {
        of(name): int(value_of_combination(tensors[name].bytes, combination))
        for name in block.backward.retained_by_dispatcher
    }
    for name in (out, back, *lingers):
        death.pop(name, None)
    # a node of autograd's lets what comes in go at its end, and then what it had saved (engine.cpp, evaluate_function)
    frees: dict[int, list[str]] = {}
    for name, i in death.items():
        frees.setdefault(i, []).append(name)
    for i in range(boundary, len(ops)):
        frees.get(i, []).sort(key=lambda name: birth.get(name, -1) < boundary)
        if weight_first and i + 1 < len(ops) and present[i + 1] and _one_node(ops[i], ops[i + 1]):
            frees[i + 1] = sorted(
                [*frees.get(i + 1, []), *frees.pop(i, [])], key=lambda name: birth.get(name, -1) < boundary
            )
    read_later = {of(name) for op in block.backward.ops for name in op.reads}
    cached = frozenset(
        w for op in block.forward.ops for w in op.writes
        if autocast and op.casts_weight and w not in read_later
        and not (op.compiled or op.part == "experts")
    )  # fmt: skip
    weights = block_weights(block.forward.ops, combination)
    places = {weight.name: n for n, weight in enumerate(weights)}
    node_starts = _node_starts(ops, boundary, present, persistent)
    op_traces = [
        _op_trace(op, combination, tensors, [n for n in op.writes if birth.get(n) == i], frees.get(i, []), present[i],
              of, op.role in WEIGHT_ROLES if by_weights_from is None else i >= boundary + by_weights_from,
              bool(given) and present[i] and op.role == "sum" and of(op.writes[0]) == given,
              places, bool(lingers) and op.renews_dispatcher,
              (*node_starts.get(i, ()), *persistent.get((op.origin if op.role and op.origin else op.name, op.role), ()))
              if present[i] else ())
        for i, op in enumerate(ops)
    ]  # fmt: skip
    pieces = _pieces(op_traces, weights)
    op_traces = [_cut(op_trace, pieces) if op_trace else None for op_trace in op_traces]
    launches = [
        value_of_combination(num_queued_kernels(op), combination) if runs else 0.0
        for op, runs in zip(ops, present, strict=True)
    ]
    by_weights = sum(n for n, op_trace in zip(launches, op_traces, strict=True) if op_trace and op_trace.weight)
    reduced = frozenset(
        of(op.reads[0])
        for op, runs in zip(ops, present, strict=True)
        if runs
        and op.reads
        and isinstance(op.work, Collective)
        and op.work.kind == "all_reduce"
        and op.work.group == "tp"
    )
    sent = frozenset(
        of(name)
        for name, tensor in tensors.items()
        if value_of_combination(tensor.recorded_on_nccl_stream, combination)
    )
    first = next((op for op in block.forward.ops if op.part == "loss" and op.reads), None)
    logits = of(first.reads[0]) if pipelined and block.name == "head" and first is not None else ""
    return BlockTrace(
        block.name, tuple(d for d in op_traces[:boundary] if d), tuple(d for d in op_traces[boundary:] if d), out, back,
        given,
        cached, weights, logits, (sum(launches[:boundary]), sum(launches[boundary:]) - by_weights, by_weights),
        _dry(block, combination) if pipelined else (), reduced, sent,
        frozenset(of(name) for name, tensor in tensors.items() if value_of_combination(tensor.held_by_watchdog,
        combination)),
        retained_by_dispatcher=tuple(lingers.items()),
        input=of(block.forward.inputs[0]) if block.forward.inputs else "",
    )  # fmt: skip


def with_head_gradient_for_embedding(head: BlockTrace) -> BlockTrace:
    """A head whose weight gradient stays until the embedding's of the same weight is added to it."""
    made = frozenset(name for op_trace in head.backward if op_trace.role == "accumulate" for name in op_trace.grads)
    return replace(head, freed_at_end=head.freed_at_end | made)


def with_embedding_gathered_ahead(layer: BlockTrace, embedding: BlockTrace) -> BlockTrace:
    """The first layer, whose backward gathers ahead what comes behind it: the embedding, not a layer like itself."""
    gathered: dict[TensorUse, int] = {
        item.use: item.bytes
        for op_trace in embedding.forward for item in op_trace.new if item.use in ("gathered", "gathered_shard")
    }  # fmt: skip
    if not gathered:
        return layer

    def with_its_bytes(op_trace: OpTrace) -> OpTrace:
        if not any(item.use in gathered for item in op_trace.new):
            return op_trace
        return op_trace._replace(
            new=tuple(item._replace(bytes=gathered.get(item.use, item.bytes)) for item in op_trace.new)
        )

    return replace(layer, backward=tuple(with_its_bytes(op_trace) for op_trace in layer.backward))


def _pieces(op_traces: list[OpTrace | None], weights: tuple[BlockWeight, ...]) -> dict[str, tuple[NewTensor, ...]]:
    """FSDP copies what it gathered into a tensor for each weight."""
    out: dict[str, tuple[NewTensor, ...]] = {}
    for op_trace in op_traces:
        if op_trace is None or not op_trace.frees_carried:
            continue
        for item in op_trace.new:
            fits = _fitting(item, weights, experts=op_trace.purpose == "experts_copy_out")
            if fits:
                out[item.name] = fits
    return out


def _fitting(item: NewTensor, weights: tuple[BlockWeight, ...], *, experts: bool) -> tuple[NewTensor, ...]:
    """The weights that a gathered buffer holds, in 2 bytes a parameter, and one tensor for what no op names."""
    chosen = [weight.params for weight in weights if weight.of_experts == experts]
    if not experts and 2 * sum(chosen) < item.bytes / 2:  # the experts are in the block's own group
        chosen = [weight.params for weight in weights]
    rest = item.bytes - sum(int(2 * n) for n in chosen)
    if rest < 0:
        return ()
    sizes = [*(int(2 * n) for n in chosen), *([rest] if rest else [])]
    return tuple(NewTensor(f"{item.name}#{i}", size, item.stream, item.kind) for i, size in enumerate(sizes))


def _cut(op_trace: OpTrace, pieces: dict[str, tuple[NewTensor, ...]]) -> OpTrace:
    def names(group: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(n for name in group for n in ([p.name for p in pieces[name]] if name in pieces else [name]))

    if not any(name in pieces for name in (*op_trace.free, *op_trace.hold, *(item.name for item in op_trace.new))):
        return op_trace
    new = tuple(n for item in op_trace.new for n in pieces.get(item.name, (item,)))
    renamed = op_trace._replace(new=new, free=names(op_trace.free), hold=names(op_trace.hold))
    largest = max((item.bytes for item in new), default=0)
    if op_trace.purpose != "experts_copy_out" or not 0 < sum(item.bytes for item in op_trace.scratch) <= 1.01 * largest:
        return renamed
    # each of the experts' matrices is put together apart and copied, the next while the last one's parts are there
    steps: list[int | str] = []
    for i, item in enumerate(new):
        steps += [i, *([~(i - 1)] if i else []), item.name]
    scratch = tuple(item._replace(name="scratch") for item in new)
    return renamed._replace(scratch=scratch, order=(*steps, ~(len(new) - 1)))


def _dry(block: BlockTapes, combination: int) -> tuple[OpTrace, ...]:
    """A forward of which nothing is kept but its input, by the frames of Python around it, and its output."""
    forward = block.forward
    ops = tuple(op for op in forward.ops if op.part != "loss")
    loss = next((op for op in forward.ops if op.part == "loss" and op.reads), None)
    given = forward.outputs if loss is None else loss.reads[:1]
    alone = BlockTapes(block.name, replace(forward, ops=ops, outputs=given), Tape((), {}, (), ()))
    trace = block_allocation_trace(alone, combination)
    if block.name == "head":
        return trace.forward
    return tuple(
        op_trace._replace(free=tuple(name for name in op_trace.free if name != trace.input))
        for op_trace in trace.forward
    )


def _one_node(op: Op, behind: Op) -> bool:
    """Whether the two are the weight's and the input's product of one linear."""
    return op.role == "wgrad" and behind.role == "dgrad" and op.origin == behind.origin


def _weights_first(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    out = list(ops)
    for i in range(len(out) - 1):
        if _one_node(out[i + 1], out[i]):
            out[i], out[i + 1] = out[i + 1], out[i]
    return tuple(out)


def _scratch(total: int, new: tuple[NewTensor, ...], stream: int) -> tuple[NewTensor, ...]:
    """Scratch as tensors: several as large as the output where it is a multiple of it, copies of each output in twice
    its width where there are several, else one."""
    kind = KINDS.index("scratch")
    if len(new) == 1 and total >= 2 * new[0].bytes and total % new[0].bytes < 4096:
        return (NewTensor("scratch", new[0].bytes, stream, kind),) * (total // new[0].bytes)
    if len(new) < 2 or not total:
        return (NewTensor("scratch", total, stream, kind),) if total else ()
    made = sum(item.bytes for item in new)
    sets = max(1, round(total / (2 * made)))
    return tuple(
        NewTensor("scratch", size, stream, kind)
        for _ in range(sets) for item in new
        if (size := total * item.bytes // (made * sets))
    )  # fmt: skip


def _shared(op: Op, combination: int, in_place: bool, present: bool) -> tuple[str, ...]:
    """The outputs that are the first input's memory."""
    if not op.reads:
        return ()
    if not present:
        return op.writes[:1]
    if not in_place:
        return ()
    return op.writes if bool(value_of_combination(op.view, combination)) else ()


def _node_starts(
    ops: Sequence[Op], boundary: int, present: Sequence[bool],
    persistent: Mapping[FirstUse, tuple[PersistentBuffer, ...]],
) -> dict[int, tuple[PersistentBuffer, ...]]:  # fmt: skip
    """What nodes of autograd's take when they begin, by the first op of the backward that reads what the product for
    the weight reads: its output's gradient."""
    waiting = {
        name: persistent[op.origin, NODE]
        for op in ops[boundary:] if op.role == "wgrad" and (op.origin, NODE) in persistent
        for name in op.reads
    }  # fmt: skip
    starts: dict[int, tuple[PersistentBuffer, ...]] = {}
    begun: set[PersistentBuffer] = set()
    for i in range(boundary, len(ops)) if waiting else ():
        for name in ops[i].reads if present[i] else ():
            new = tuple(buffer for buffer in waiting.get(name, ()) if buffer not in begun)
            begun.update(new)
            if new:
                starts[i] = (*starts.get(i, ()), *new)
    return starts


def _step(op: Op, n: int, of: object) -> int | str:
    """A step of an op's order: a temporary, the name of an output, or that of an input behind a minus."""
    assert callable(of)
    if n < WRITES:
        return n
    return op.writes[n - WRITES] if n < READS else f"-{of(op.reads[n - READS])}"


def _op_trace(
    op: Op, combination: int, tensors: dict[str, Tensor], born: list[str], dead: list[str], present: bool, of: object,
    by_weights: bool, sums: bool, places: Mapping[str, int], renews: bool, persistent: tuple[PersistentBuffer, ...],
) -> OpTrace | None:  # fmt: skip
    assert callable(of)
    stream = STREAMS.get(op.pool or op.stream, 0)
    mark = op.work is None and value_of_combination(op.launches, combination) == 0
    claim = op.claims if mark else ""
    if claim and tensors[claim].use == "reduce_input":
        stream = 0
    new = tuple(
        NewTensor(name, nbytes, stream, KINDS.index(tensors[name].kind), use=tensors[name].use)
        for name in born
        if (nbytes := int(value_of_combination(tensors[name].bytes, combination))) > 0
    )
    scratch = int(value_of_combination(op.scratch, combination)) if present else 0
    pieces: tuple[NewTensor, ...] = ()
    order: tuple[int | str, ...] = ()
    if op.order is not None and present and (scratch or not op.order.sizes):
        sizes = [int(value_of_combination(size, combination)) for size in op.order.sizes]
        pieces = tuple(NewTensor("scratch", size, stream, KINDS.index("scratch")) for size in sizes)
        order = tuple(_step(op, n, of) for n in op.order.steps)
    holds = mark and op.holds_for_next_block
    grads = tuple(of(r) for r in op.reads) if op.role == "accumulate" and present else ()
    if op.role == "accumulate" and op.part == "fsdp":
        # as the modules lie (_fsdp_param_group.py, ``post_backward``)
        grads = tuple(sorted(grads, key=lambda name: places.get(tensors[name].weight, -1)))
    attention = isinstance(op.work, Attention)
    op_trace = OpTrace(
        op.name, new, pieces or _scratch(scratch, () if attention else new, stream),
        attention or op.is_embedding_gradient,
        order, () if holds else tuple(dead), tuple(dead) if holds else (), claim, grads, op.copies_out_gathered_weights,
        by_weights, tuple(of(r) for r in op.reads) if by_weights else (), sums,
        int(value_of_combination(op.expert_loops, combination)), renews, persistent, op.role, op.repeated, op.part,
        op.origin,
        op.purpose,
        op.role in ("regather", "wgrad", "dgrad") or (not op.role and value_of_combination(op.weight_params,
        combination) > 0),
    )  # fmt: skip
    plain = not (new or scratch or dead or claim or grads or sums or renews or persistent or op_trace.frees_carried)
    return None if plain else op_trace
