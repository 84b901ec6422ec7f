"""Dispatch by index alone: experts gather their rows from the layer's own tokens and add theirs to its output, without
routed copies; a transform of a layer's forward tape (MoEBlaze, arXiv 2601.05296), and the paper's accounting."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from mofa.blocks.context import Context
from mofa.blocks.elementwise import BoolK, all_true, any_true, logical_not, where
from mofa.blocks.op import FloatK, Op, OpBackward, Tape
from mofa.blocks.roles import RoutingStep
from mofa.blocks.work import MemoryBound

INDEX_BYTES = 4.0
INDEX = "moe.index_lists"
LEFT_OUT: tuple[RoutingStep, ...] = ("sort", "unsort", "unpermute")
"""Copies of rows that are not made."""
Policy = Literal["moeblaze", "conventional"]


def with_dispatch_by_index(forward: Tape, ctx: Context) -> Tape:
    """The forward tape of a layer without routed copies where a rank holds all experts; one without experts stays.

    Notes
    -----
    The permutation becomes three lists of ``L k`` indices and ``E + 1`` offsets, made through a dense map of ``L E``.
    The first product gathers its rows while it reads, so that the layer's input, which is kept anyway, is all it keeps
    of them; the second adds its rows to the ``L`` rows of the output, so that there are none to combine. Backward the
    same holds for the gradients: the token's rows are added up as they come. Between the products all stays: their
    gate and up outputs and the activation's output are kept, as Megatron keeps them and as the paper's algorithm 1
    does. Products are timed as on contiguous rows: what is saved in time are the bytes of the copies, a model and no
    measurement. Only ep 1: expert parallelism is the paper's future work.

    References
    ----------
    MoEBlaze, arXiv 2601.05296, sections 3 to 5 (algorithm 1 for what is kept; section 5.2 says otherwise).

    Examples
    --------
    >>> from mofa.blocks.op import TapeBuilder
    >>> TapeBuilder().tape((), ()).ops
    ()
    """
    moe = ctx.model.moe
    by_index = _where_index(ctx)
    if moe is None or not any_true(by_index) or all(op.routing != "permute" for op in forward.ops):
        return forward
    tokens, tensors = ctx.shard_tokens, dict(forward.tensors)
    own = tokens * float(ctx.model.hidden) * ctx.activation_element_bytes
    index = INDEX_BYTES * (3.0 * tokens * moe.top_k + moe.num_experts + 1.0)
    dense = INDEX_BYTES * tokens * float(moe.num_experts)
    for name in ("moe.sent", "experts.out"):
        copies = tensors[name]
        tensors[name] = copies._replace(
            bytes=where(by_index, own, copies.bytes), grad_bytes=where(by_index, own, copies.bytes)
        )
    ids = tensors["moe.row_ids"]
    tensors["moe.row_ids"] = ids._replace(bytes=where(by_index, 0.0, ids.bytes))
    tensors[INDEX] = ids._replace(name=INDEX, bytes=where(by_index, index, 0.0))
    ops: list[Op] = []
    for op in forward.ops:
        if op.routing == "permute":
            # the map is written and read, the lists are written
            made = MemoryBound(2.0 * dense + index)
            ops.append(
                Op(op.name, "memory_bound", made, (op.reads[1],), (INDEX,), scratch=where(by_index, dense, 0.0),
                   launches=4, present=by_index, region=op.region, back=OpBackward(0.0, 0), routing="permute")
            )  # fmt: skip
            ops.append(_left_out(op._replace(name="moe.gather"), by_index))
        elif op.routing in LEFT_OUT:
            rest = op.writes[1:]  # a map of the rows is no view of them: it is not made
            for name in rest:
                tensors[name] = tensors[name]._replace(bytes=where(by_index, 0.0, tensors[name].bytes))
            if rest and by_index is not True:
                maps = Op(f"{op.name}.maps", "memory_bound", None, (), rest, launches=0, present=op.present)
                ops.append(maps._replace(region=op.region))
            ops.append(_left_out(op._replace(writes=op.writes[:1], reads=(*op.reads, *rest)), by_index))
        elif op.routing == "row_map":
            ops.append(op._replace(present=logical_not(by_index)))
        elif op.routing == "first_product":
            ops.append(op._replace(saves=(*op.saves, INDEX)))
        else:
            assert by_index is not True or op.routing not in ("dispatch", "gather", "scatter", "combine")
            ops.append(op)
    return replace(forward, ops=tuple(ops), tensors=tensors)


def _where_index(ctx: Context) -> BoolK:
    """Where experts gather by index: everywhere, or on ranks that hold all of the experts. (K,)"""
    if ctx.framework.routed_copies == "index":
        return True
    alone = (ctx.ep == 1) & (ctx.etp == 1)
    return True if all_true(alone) else alone


def _left_out(op: Op, by_index: BoolK) -> Op:
    """A copy of rows that is a view here, each way."""
    assert isinstance(op.work, MemoryBound) and op.back is not None
    back, none = op.back, 0.0
    if any_true(back.launches):
        again = back.memory_bound_work()._replace(bytes=where(by_index, none, back.bytes))
        back = back._replace(
            work=again, launches=where(by_index, none, back.launches), view=by_index, family=op.family,
            present=op.present, stream=op.stream,
        )  # fmt: skip
    return op._replace(
        work=op.work._replace(bytes=where(by_index, none, op.work.bytes)), view=by_index,
        launches=where(by_index, none, op.launches), saves=() if by_index is True else op.saves, back=back,
    )  # fmt: skip


def routed_copies_bytes(tokens: FloatK, top_k: float, hidden: float, element_bytes: float = 2.0) -> FloatK:
    """Routed copies of one layer's tokens, ``L k d``: what materialising them takes. [B]

    The paper's "DeepSeek" example, about 2 million tokens, top 4, 6144 wide: "94 GB".

    >>> round(routed_copies_bytes(2e6, 4, 6144) / 1e9, 1)
    98.3
    """
    return tokens * top_k * hidden * element_bytes


def moeblaze_saved_bytes(
    tokens: float, top_k: float, hidden: float, ffn_hidden: float, num_experts: float, policy: Policy,
    element_bytes: float = 2.0,
) -> float:  # fmt: skip
    """What a layer with SwiGLU experts keeps for its backward pass, as the paper counts it. [B]

    Parameters
    ----------
    tokens, top_k, hidden, ffn_hidden, num_experts
        ``L``, ``k``, ``d``, ``h`` and ``E``.
    policy
        ``moeblaze``: the input, gate, up and the activation's output, and the indices. ``conventional``: the input,
        routed copies in and out, and the five tensors gate, up, its sigmoid, its SiLU and the product.

    Examples
    --------
    Its third configuration (section 6): 4.2 GiB x 1.5 against 11.1 GiB.

    >>> l, k, d, h, e = 32 * 2048, 4, 1024, 4096, 16
    >>> [round(moeblaze_saved_bytes(l, k, d, h, e, p) / 2**30, 2) for p in ("moeblaze", "conventional")]
    [6.13, 11.12]
    """
    rows = tokens * top_k
    if policy == "moeblaze":
        return element_bytes * (tokens * hidden + 3 * rows * ffn_hidden) + INDEX_BYTES * (3 * rows + num_experts + 1)
    return element_bytes * (tokens * hidden + 2 * rows * hidden + 5 * rows * ffn_hidden)
