"""A layer's forward of one micro-batch beside the backward of another, to hide exchanges of experts' tokens: transforms
of a layer's tapes.

Megatron-Core 0.16.1 with ``overlap_moe_expert_parallel_comm`` cuts a layer in callables: attention with router and
permutation, dispatch, experts, combine with what follows (models/gpt/fine_grained_callables.py,
``build_transformer_layer_callables``). Dispatch and combine are launched on a stream of their own, all else on the
computing one. Events of each micro-batch say what waits for what (pipeline_parallel/utils.py, ``ScheduleNode``). The
two passes take turns as models/common/model_chunk_schedule_plan.py, ``TransformerLayerSchedulePlan.run``, has it.
"""

from __future__ import annotations

from dataclasses import replace

from mofa.blocks.op import EXPERT_STREAM, Op, PairedPass, Tape
from mofa.blocks.roles import WEIGHT_ROLES, RoutingStep
from mofa.blocks.work import Gemm, HostSync

Parts = dict[str, tuple[Op, ...]]
FORWARD_PARTS = ("attention", "dispatch", "experts", "combine", "end")
"""Of a forward: up to the rows to be sent; their exchange; the experts; the exchange back; what adds them up."""
BACKWARD_PARTS = ("end", "combine", "experts", "dispatch", "experts' weights", "attention", "attention's weights")
"""The same of a backward, from its beginning, with the weights' gradients that come later than inputs'."""
PASSES: dict[str, PairedPass] = {"F": "forward", "B": "backward"}
PASS_ORDER = (
    ("B", "end"), ("B", "combine"), ("F", "attention"), ("B", "experts"), ("F", "dispatch"), ("B", "dispatch"),
    ("B", "experts' weights"), ("F", "experts"), ("F", "combine"), ("B", "attention"), ("B", "attention's weights"),
    ("F", "end"),
)  # fmt: skip
"""How the parts of a forward (F) and of a backward (B) take turns. What Megatron runs around an exchange on that
exchange's stream takes the whole device, and is put at the end of the computing that it runs beside."""
ISSUED = (*PASS_ORDER[:9], PASS_ORDER[11], *PASS_ORDER[9:11])
"""How the host issues the same: what adds rows up right behind their exchange."""
_EXCHANGES: tuple[RoutingStep, ...] = ("dispatch", "combine")


def with_token_exchange_stream(forward: Tape) -> Tape:
    """A layer's forward tape with its exchanges of tokens on a stream of their own, and its derived backward so too.

    What is made around them comes from that stream's memory. What is sent and received goes right behind its last
    reader: a callable frees its input (``should_free_input``), and no function of the layer holds it. A layer without
    exchanges stays as it is.

    Examples
    --------
    >>> with_token_exchange_stream(Tape((), {}, (), ())).ops
    ()
    """
    parts = forward_ops_by_part(forward)
    if not parts["dispatch"]:
        return forward
    at_end = {op.name for op in parts["end"]}
    ops = []
    for op in forward.ops:
        if op.frame == "moe":
            continue
        if op.routing in _EXCHANGES:
            op = op._replace(stream=EXPERT_STREAM)
        elif op.name in at_end:
            op = op._replace(pool=EXPERT_STREAM)
        ops.append(op)
    return replace(forward, ops=tuple(ops))


def with_delayed_weight_gradients(forward: Tape, backward: Tape) -> Tape:
    """A layer's backward tape with its linears' weight gradients behind their part.

    The experts' come beside the exchange of gradients back to their tokens, all others' at the end. The router's is not
    put off, whose product is PyTorch's own, in fp32, nor is a norm's.
    """
    parts = backward_ops_by_part(forward, backward, delays=True)
    return replace(backward, ops=tuple(op for name in BACKWARD_PARTS for op in parts[name]))


def with_schedule_nodes(forward: Tape, backward: Tape, *, delays: bool) -> Tape:
    """A layer's backward tape whose parts are backward passes of their own, as ``ScheduleNode`` runs them.

    What combines rows is one with what follows it, and weights' gradients that are put off need no engine.
    """
    parts = backward_ops_by_part(forward, backward, delays=delays)
    nodes = (parts["end"] + parts["combine"], parts["experts"], parts["dispatch"], parts["attention"])
    node_of = {op.name: number for number, ops in enumerate(nodes, 1) for op in ops}
    return replace(backward, ops=tuple(op._replace(schedule_node=node_of.get(op.name, 0)) for op in backward.ops))


def combined_tape(forward: Tape, of_backward: Tape, backward: Tape, *, delays: bool) -> Tape:
    """A layer's forward beside a layer's backward of another micro-batch, as one tape.

    Parameters
    ----------
    forward
        Of the layer that runs forward.
    of_backward
        The forward tape of the layer that runs backward.
    backward
        Its backward tape.
    delays
        Whether weights' gradients are put off.
    """
    passes = {"F": forward_ops_by_part(forward), "B": backward_ops_by_part(of_backward, backward, delays=delays)}
    ops = tuple(_in_pass(op, of) for of, part in PASS_ORDER for op in passes[of][part])
    tensors = {
        _name(name, of): tensor._replace(name=_name(name, of))
        for of, tape in (("F", forward), ("B", backward))
        for name, tensor in tape.tensors.items()
    }
    return Tape(ops, tensors, (), ())


def part_of_each_op(forward: Tape, backward: Tape, *, delays: bool) -> tuple[dict[str, str], dict[str, str]]:
    """The part of each op of a layer's forward, and of each of its backward, by the op's name."""
    passes = forward_ops_by_part(forward), backward_ops_by_part(forward, backward, delays=delays)
    of_forward, of_backward = ({op.name: name for name, ops in parts.items() for op in ops} for parts in passes)
    return of_forward, of_backward


def forward_ops_by_part(forward: Tape) -> Parts:
    """A forward tape's ops by :data:`FORWARD_PARTS`; a layer without exchanges has attention and ``experts`` alone."""
    ops = forward.ops
    sent = [i for i, op in enumerate(ops) if op.routing == "dispatch"]
    if not sent:
        behind = 1 + max((i for i, op in enumerate(ops) if op.purpose == "attention_output"), default=-1)
        parts: tuple[tuple[Op, ...], ...] = (ops[:behind], (), ops[behind:], (), ())
    else:
        begin, end = sent[0], sent[-1] + 1
        while begin and isinstance(ops[begin - 1].work, HostSync):
            begin -= 1
        back = next(i for i, op in enumerate(ops) if op.routing == "combine")
        parts = ops[:begin], ops[begin:end], ops[end:back], ops[back : back + 1], ops[back + 1 :]
    return dict(zip(FORWARD_PARTS, parts, strict=True))


def backward_ops_by_part(forward: Tape, backward: Tape, *, delays: bool) -> Parts:
    """A backward tape's ops by :data:`BACKWARD_PARTS`, whether its weight gradients are put off already or not."""
    of_experts = {op.name for op in forward_ops_by_part(forward)["experts"]}
    out: dict[str, list[Op]] = {name: [] for name in BACKWARD_PARTS}
    delayed = _delayed(backward) if delays else set()
    outputs = {op.name for op in forward.ops if op.purpose == "attention_output"}
    is_sent = any(op.routing == "dispatch" for op in backward.ops)
    part = "end" if is_sent else "experts"
    for op in backward.ops:
        if op.name in delayed:
            out["experts' weights" if op.origin in of_experts else "attention's weights"].append(op)
            continue
        if is_sent and op.routing in _EXCHANGES:
            part = op.routing
        elif part in _EXCHANGES:
            part = "experts" if part == "combine" else "attention"
        elif not is_sent and op.origin in outputs:
            part = "attention"
        out[part].append(op)
    return {name: tuple(ops) for name, ops in out.items()}


def _delayed(backward: Tape) -> set[str]:
    """The ops that make or add weights' gradients of Transformer Engine's linears (their ``backward_dw``), by name."""
    products = {op.origin: op for op in backward.ops if op.role == "wgrad"}
    own = {name for name, op in products.items() if isinstance(op.work, Gemm) and op.work.format == "fp32"}
    return {
        op.name for op in backward.ops if op.role in WEIGHT_ROLES and op.origin in products and op.origin not in own
    }


def _name(name: str, of: str) -> str:
    return f"{of}:{name}"


def _in_pass(op: Op, of: str) -> Op:
    """An op of a pass, whose tensors are not those of the other."""
    reads, writes, saves = (tuple([_name(name, of) for name in names]) for names in (op.reads, op.writes, op.saves))
    return op._replace(name=_name(op.name, of), reads=reads, writes=writes, saves=saves, paired_pass=PASSES[of])
