"""CUDA graphs of Megatron-Core: which ops of a block they hold, and what is copied into and out of them.

Read in megatron_core 0.16.1 (transformer/cuda_graphs.py, module.py, transformer_layer.py, moe/; full_cuda_graph.py) and
transformer_engine 2.20.2 (pytorch/graph.py). Of a layer in graphs:

- What a graph's ops write comes from the private pool that all graphs share (:data:`~mofa.blocks.op.GRAPH_POOL`).
- Transformer Engine's graphs read static inputs. The input of each layer is copied into one of its own, and so is on
  the way back its output's gradient, into one that all share. A layer whose attention is captured also takes a mask
  over sequence x sequence of a byte each, made anew by every pass and copied (``get_zero_attention_mask``).
- Megatron's ``local`` graphs hand their outputs on in place: what comes into the first and what goes out of the last
  is copied, once a chunk of layers (``can_skip_replay_copy``).
- Gradients of parameters are copied behind each backward (``Graphed.backward``, ``_CudagraphReplayNode.backward``): of
  a weight whose product adds to the main gradient the dummy that stands for it, two bytes a parameter.
- Of a layer of experts the router, with ``moe_preprocess`` all up to the rows in order, is captured; what waits for
  the host stays outside (``MoECudaGraphPartialCaptureSignal``). Nothing waits where experts' rows are padded to a
  capacity: such a layer is captured whole, its exchanges as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mofa.blocks.build import BlockTapes
from mofa.blocks.context import Context
from mofa.blocks.elementwise import FloatK
from mofa.blocks.op import GRAPH_POOL, GraphLaunch, Op, Tape, Tensor
from mofa.blocks.work import HostSync, MemoryBound
from mofa.specs.cuda_graphs import CudaGraphs

INPUT, MASK, PARAM_GRADS = "graph.input", "graph.mask", "graph.param_grads"
STAYS = ("layer", "fp8_context")
"""Modules whose Python runs around a layer's graphs."""
SHARED = "moe.shared"
"""The region of shared experts."""


def graph_captured_layer(layer: BlockTapes, ctx: Context, *, moe: bool) -> BlockTapes:
    """A layer with its ops in graphs, as the framework's option says."""
    graphs = ctx.framework.graphs
    if not graphs.captures_any:
        return layer
    if graphs.full_iteration:
        return _all_captured(layer)
    names = _captured_names(layer.forward.ops, graphs, ctx.framework.dispatcher, moe=moe)
    return _partly_captured(layer, ctx, names, graphs) if names else layer


def graph_captured_embedding_or_head(end: BlockTapes, ctx: Context) -> BlockTapes:
    """The embedding or the head, which the graph of a full iteration alone holds."""
    return _all_captured(end) if ctx.framework.graphs.full_iteration else end


def _all_captured(block: BlockTapes) -> BlockTapes:
    """A block of which nothing is issued: a step begins with the launch of its one graph, ahead of the embedding."""
    launch = GraphLaunch(is_function=False)
    forward, backward = (
        replace(tape, ops=tuple(_in_graph(op, launch) for op in tape.ops)) for tape in (block.forward, block.backward)
    )
    return replace(block, forward=forward, backward=backward)


def _in_graph(op: Op, launch: GraphLaunch) -> Op:
    return (
        op if isinstance(op.work, HostSync) else op._replace(graph=launch, pool=op.pool or GRAPH_POOL, module_call=None)
    )


def _stays_outside(op: Op) -> bool:
    call = op.module_call
    return isinstance(op.work, HostSync) or (op.work is None and call is not None and call.module in STAYS)


def _captured_names(ops: tuple[Op, ...], graphs: CudaGraphs, dispatcher: str, *, moe: bool) -> set[str]:
    """Names of the forward's ops that graphs hold: of attention up to its residual, of what is behind it."""
    middle = next(i for i, op in enumerate(ops) if "mid" in op.writes) + 1
    attention, rest = ops[:middle], ops[middle:]
    names: set[str] = set()
    if graphs.captures_part("attn"):
        names.update(op.name for op in attention)
    if not moe:
        if graphs.captures_part("mlp"):
            names.update(op.name for op in rest)
    elif graphs.captures_part("moe"):
        names.update(op.name for op in rest)
    elif graphs.captures_part("moe_router"):
        ends = max(i for i, op in enumerate(rest) if op.step in ("gate", "router")) + 1
        names.update(op.name for op in rest[:ends])
        names.update(op.name for op in rest[ends:] if op.region == SHARED)
        if graphs.captures_part("moe_preprocess") and dispatcher == "alltoall":
            names.update(op.name for op in rest[ends:] if op.step == "dispatch_preprocess")
    return names - {op.name for op in ops if _stays_outside(op)}


def _partly_captured(layer: BlockTapes, ctx: Context, names: set[str], graphs: CudaGraphs) -> BlockTapes:
    forward, backward = layer.forward, layer.backward
    captured_ops = [op for op in forward.ops if op.name in names]
    stream = "x" if graphs.captures_part("attn") else "mid"
    copies = graphs.implementation == "te"
    tensors = dict(forward.tensors)
    ahead: list[Op] = []
    static: list[str] = []
    if copies:
        ahead, static = _copies_ahead(ctx, tensors, stream, with_mask=graphs.captures_part("attn"))
    first = next(i for i, op in enumerate(forward.ops) if op.name in names)
    launch = GraphLaunch()
    ops = [*forward.ops[:first], *ahead]
    for op in forward.ops[first:]:
        ops.append(_in_graph(_reading(op, stream, static), launch) if op.name in names else op)
    new_forward = replace(forward, ops=tuple(_behind_graph(ops)), tensors=tensors)
    num_hooks = sum((_num_params(op) for op in captured_ops), 0.0)
    back = _captured_backward(backward, ctx, names, captured_ops, num_hooks, copies=copies)
    back = replace(back, ops=_reading_static(back.ops, names, stream, static), tensors={**tensors, **back.tensors})
    return replace(layer, forward=new_forward, backward=back)


def _copies_ahead(
    ctx: Context, tensors: dict[str, Tensor], stream: str, *, with_mask: bool
) -> tuple[list[Op], list[str]]:
    """The copies into static inputs ahead of a forward graph, and the static inputs."""
    nbytes = tensors[stream].bytes
    tensors[INPUT] = tensors[stream]._replace(name=INPUT)
    ops = [Op("graph.copy_input", "memory_bound", MemoryBound(2.0 * nbytes, "copy"), (stream,), (INPUT,))]
    static = [INPUT]
    if with_mask:
        mask = ctx.micro_batch * ctx.seq_len * ctx.seq_len / ctx.cp
        tensors[MASK] = Tensor(MASK, mask, "buffer", grad=False)
        ops.append(
            Op(
                "graph.make_mask",
                "memory_bound",
                MemoryBound(3.0 * mask, "copy"),
                (),
                (MASK,),
                scratch=mask,
                launches=2,
            )
        )
        static.append(MASK)
    return ops, static


def _reading(op: Op, stream: str, static: list[str]) -> Op:
    """An op that reads and keeps the static input in place of what was copied into it."""
    if not static or stream not in (*op.reads, *op.saves):
        return op
    return op._replace(
        reads=tuple(INPUT if name == stream else name for name in op.reads),
        saves=tuple(INPUT if name == stream else name for name in op.saves),
    )


def _reading_static(ops: tuple[Op, ...], names: set[str], stream: str, static: list[str]) -> tuple[Op, ...]:
    """A backward whose captured ops read the static input; up to its end the static inputs and the input itself stay:
    that is an output of the graph before."""
    if not static:
        return ops
    inside = tuple(_reading(op, stream, static) if op.graph is not None else op for op in ops)
    last_reader = Op("graph returns", "memory_bound", None, (*static, stream), (), launches=0)
    return (*inside, last_reader)


def _behind_graph(ops: list[Op]) -> list[Op]:
    """Ops in order, but what copies the counts to the host comes behind the graph that makes them."""
    last = max((i for i, op in enumerate(ops) if op.graph is not None), default=-1)
    inside, behind = ops[: last + 1], ops[last + 1 :]
    to_host = [op for op in inside if op.stream == "to_host" and op.graph is None]
    return [*(op for op in inside if op.stream != "to_host" or op.graph is not None), *to_host, *behind]


def _num_params(op: Op) -> FloatK:
    """Parameters of a forward's op. [-]"""
    if op.weight:
        return op.num_weights
    return 1.0 if op.purpose == "norm" else 0.0


def _captured_backward(
    backward: Tape, ctx: Context, names: set[str], captured_ops: Iterable[Op], num_hooks: FloatK, *, copies: bool
) -> Tape:
    """A backward with its ops in a graph, the copy of the gradient ahead and those of parameters' gradients behind."""
    ops = backward.ops
    inside = [op.origin in names and not _stays_outside(op) for op in ops]
    places = [i for i, there in enumerate(inside) if there]
    if not places:
        return backward
    first, last = places[0], places[-1]
    outside = {op.origin for op, there in zip(ops, inside, strict=True) if not there and op.origin}
    launch = GraphLaunch(num_hooks)
    out: list[Op] = []
    tensors = dict(backward.tensors)
    if copies:
        nbytes = ctx.shard_tokens * ctx.model.hidden * ctx.residual_element_bytes
        out.append(
            Op("graph.copy_gradient", "memory_bound", MemoryBound(2.0 * nbytes, "copy"), (), (), scratch=nbytes,
               role="backward", autograd_nodes=0.0)
        )  # fmt: skip
    for i, op in enumerate(ops):
        between = first <= i <= last and op.origin not in outside and not _stays_outside(op)
        out.append(_in_graph(op, launch) if inside[i] or between else op)
    params = sum((2.0 * op.weight_params for op in captured_ops), 0.0)
    out.append(
        Op("graph.copy_parameters_gradients", "memory_bound", MemoryBound(2.0 * params, "copy"), (), (),
           scratch=params, launches=num_hooks, role="backward", autograd_nodes=0.0)
    )  # fmt: skip
    return replace(backward, ops=tuple(out), tensors=tensors)
