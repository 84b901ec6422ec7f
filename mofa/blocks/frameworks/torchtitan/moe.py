"""torchtitan's mixture of experts (models/moe/moe.py, utils.py; distributed/expert_parallel.py).

Every routed row is indexed, sent, padded, computed, sent back and put in order as a tensor of its own; the weighted
sum of a token's experts is a product in fp32, whose operand is kept.
"""

from __future__ import annotations

from typing import Literal

from mofa.blocks import parts
from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import any_true, where
from mofa.blocks.frameworks.torchtitan.expert_loop import expert_output_element_bytes, loop_over_experts
from mofa.blocks.frameworks.torchtitan.ffn import feed_forward, gated_activation
from mofa.blocks.frameworks.torchtitan.fsdp import copy_out_expert_weights, python_function_counts_of_profile
from mofa.blocks.frameworks.torchtitan.linear import (
    CAST,
    cast,
    casts_linear_inputs,
    gather_sequence_as_local_tensor,
    linear,
    runs_autocast,
    scatter_sequence,
    sum_gradients_over_tp,
    weight_copy,
    weight_gradient_bytes_per_param,
)
from mofa.blocks.frameworks.torchtitan.registration import EXPERTS, MATRIX, ROUTER, SHARED_EXPERTS
from mofa.blocks.op import WRITES, BoolK, FloatK, Op, OpBackward, ScratchSequence, TapeBuilder
from mofa.blocks.work import Collective, GroupedGemm, HostSync, MemoryBound


def moe(b: TapeBuilder, ctx: Context, h: str) -> str:
    """Router, dispatch, experts, combine, shared experts, weighted sum.

    Of the rows: every tp rank routes all tokens where the experts are split by tp or not at all by ep, else its share
    of them; the buffer that puts rows in order holds all tokens' either way.
    """
    with b.in_layer_step("routed"):
        out = _moe(b, ctx, h)
    with b.in_layer_step("relayout"):
        return scatter_sequence(b, ctx, out, "moe", float(ctx.model.hidden))


def _moe(b: TapeBuilder, ctx: Context, h: str) -> str:
    """All of it up to the sum over ranks."""
    spec = ctx.model.moe
    assert spec is not None
    t, hidden = ctx.tokens, float(ctx.model.hidden)
    element = ctx.residual_element_bytes  # of the routed rows: fp32 under autocast
    row = hidden * element
    sent, everyone = ctx.shard_tokens * spec.top_k * ctx.etp, t * spec.top_k
    put = PUT[element]
    deepep = ctx.framework.dispatcher == "deepep"
    with b.in_layer_step("relayout"):
        full = gather_sequence_as_local_tensor(b, ctx, h, "moe", hidden)
    with b.in_layer_step("router"):
        scores, order = router(b, ctx, full, sent)
    routed = b.tensor("moe.routed", sent * row)
    index = b.tensor("moe.index", 8.0 * sent, grad=False)
    work = MemoryBound(2 * sent * row + 16 * sent, "gather_copies", source=t * row)
    # backward sorts the indices and adds each token's rows, so many elements a second whatever their width
    b.add(Op("moe.gather", "memory_bound", work, (full, order),
             (routed, index), (index,), launches=2,
             back=OpBackward(2 * sent * hidden, 6, like="index_backward")))  # fmt: skip
    routed_view = b.tensor("moe.routed_held", sent * row, grad=False)
    split = (ctx.tp > 1) & (ctx.etp > 1)  # the experts' weights: each rank has a part of the rows' gradients
    with b.in_layer_step("relayout"):
        sent_rows = sum_gradients_over_tp(b, routed, "moe.routed", sent * row, split)
    b.add(Op("moe.hold", "memory_bound", None, (routed,), (routed_view,), view=True, launches=0))
    weights = copy_out_expert_weights(b, ctx)  # FSDP's hook comes before that of expert parallelism
    received = _exchange(b, ctx, sent_rows, "dispatch", sent, ctx.rows_memory * ctx.etp, element)
    rows, memory_rows = ctx.rows_time * ctx.etp, ctx.rows_memory * ctx.etp
    in_turn = ctx.framework.experts == "sequential"
    # experts in turn need no padding: only what dispatches rows to other ranks' experts puts them in order
    permutes: BoolK = ctx.ep > 1 if in_turn else True
    padding = where(permutes, ctx.framework.grouped_alignment * ctx.local_experts, 0.0)
    padded_time, padded = rows + padding, memory_rows + padding
    x = b.tensor("moe.permuted", padded * row, use="experts_input")
    fill = b.tensor("moe.permutation", where(permutes, 4.0 * padded, 0.0), grad=False)
    # the order of rows by expert, padded, from the counts alone: small kernels, which the device waits for
    python = where(ctx.ep > 1, python_function_counts_of_profile(ctx).rows_in_order.value, 0)
    if any_true(permutes):
        b.add(Op("moe.plan", "memory_bound", MemoryBound(4.0 * padded_time), (), (fill,), launches=18,
        autograd_functions=python,
                 present=permutes))  # fmt: skip
    # a row of zeros behind the others, which every padded place takes: backward adds theirs up one after the other
    extended = b.tensor("moe.extended", 0.0, grad_bytes=(memory_rows + 1.0) * row)
    b.add(Op("moe.extend", "memory_bound", MemoryBound(2 * rows * row, "copy"), (received,), (extended,), view=True,
             launches=2, present=permutes,
             back=OpBackward(work=MemoryBound(padding * row, "index_backward_row", padding * hidden, hidden),
                       family="memory_bound", view=True, present=permutes)))  # fmt: skip
    b.add(Op("moe.permute", "memory_bound", MemoryBound(2 * padded_time * row, "permute"), (extended, fill), (x,),
             (fill,), scratch=(memory_rows + 1.0) * row, launches=2, present=permutes,
             back=_added_to_rows(padded_time * hidden, element), routing="permute"))  # fmt: skip
    with b.in_layer_step(""):
        if in_turn:
            y = loop_over_experts(b, ctx, x, rows, padded, weights)
        else:
            y = experts(b, ctx, x, rows, padded_time, padded, element, weights)
    if in_turn:
        element = expert_output_element_bytes(ctx)
        row, put = hidden * element, PUT[element]
    for local in (*weights, y):  # FSDP lets the weights go behind expert parallelism's hook, which sends its input on
        parts.hold_in_module(b, "experts", local)
    back_in_place = b.tensor("moe.unpermuted", (memory_rows + 1.0) * row)
    b.add(Op("moe.unpermute", "memory_bound", MemoryBound(2 * padded_time * row, put), (y, fill),
             (back_in_place,), (fill,), launches=2, present=permutes,
             back=OpBackward(5 * padded_time * row, 4, like="permute"), routing="unpermute"))  # fmt: skip
    sliced = b.tensor("moe.sliced", memory_rows * row)  # without that row; its gradient has it again
    back_in_place = b.add(
        Op("moe.slice", "memory_bound", None, (back_in_place,), (sliced,), view=True, launches=0, present=permutes,
           back=OpBackward(work=MemoryBound(0.0), family="memory_bound", launches=0, present=permutes))
    )  # fmt: skip
    y = _exchange(b, ctx, back_in_place, "combine", sent, sent, element)
    parts.release_module_locals(b, "experts")
    parts.hold_in_module(b, "moe", y)
    shared = ""
    if spec.shared_hidden:
        width = spec.shared_hidden / ctx.tp
        with b.in_layer_step(""):
            shared = feed_forward(b, ctx, full, "shared", width, registered_at=SHARED_EXPERTS, partial=ctx.has_tp,
                                  fused=ctx.framework.compile, activation="shared_activation")  # fmt: skip
    ordered = b.tensor("moe.ordered", everyone * row)
    calls = python_function_counts_of_profile(ctx)  # of the exchange, and of FSDP behind the experts
    python = where(ctx.ep > 1, calls.experts_return.value + calls.module_call.value, 0)
    b.add(Op("moe.zeros", "memory_bound", MemoryBound(everyone * row, "zero"), autograd_functions=python))
    b.add(Op("moe.unsort", "memory_bound", MemoryBound(2 * sent * row, put), (y, order), (ordered,), (order,),
             launches=1, back=OpBackward(2 * sent * row, 2, like="permute")))  # fmt: skip
    parts.hold_in_module(b, "moe", ordered)
    out = _weighted_sum(b, ctx, ordered, scores, routed_view, everyone * hidden, deepep=deepep)
    if shared:
        total = b.tensor("moe.total", t * row)
        narrow = 2 if casts_linear_inputs(ctx) else element
        if narrow != element:
            promoted = b.tensor("moe.shared_promoted", t * row)
            b.add(Op("moe.promote", "memory_bound", None, (shared,), (promoted,), view=True, launches=0,
                     back=OpBackward(work=MemoryBound(CAST * t * hidden, "cast_down"),
                     family="memory_bound")))  # fmt: skip
            shared = promoted
        out = parts.memory_bound_op(b, "moe.add_shared", (out, shared), total,
        bytes_=(2 * element + narrow) * t * hidden,
                           back_launches=0, like="residual_add")  # fmt: skip
    parts.release_module_locals(b, "moe")  # its local variables: routed_output, and that in the order of tokens
    return out


PUT = {2: "index_put", 4: "index_put_fp32"}
"""The measured op that rows put in order are like, by the bytes of an element."""


def router(b: TapeBuilder, ctx: Context, x: str, sent: FloatK) -> tuple[str, str]:
    """Scores of the chosen experts in fp32 and the order of rows by expert."""
    spec = ctx.model.moe
    assert spec is not None
    t, count = ctx.tokens, float(spec.num_experts)
    with b.in_layer_step("gate"):
        logits = linear(b, ctx, x, "router.gate", m=t, n=count, k=float(ctx.model.hidden), wide_input=True,
                        registered_at=ROUTER)  # fmt: skip
    scores = b.tensor("router.scores", 4.0 * t * count)
    parts.memory_bound_op(b, "router.score", (logits,), scores, bytes_=(CAST + 8.0) * t * count, saves=(scores,),
                          back_bytes=(CAST + 12.0) * t * count, launches=2, back_launches=2)  # fmt: skip
    chosen = b.tensor("router.top_scores", 4.0 * t * spec.top_k)
    experts = b.tensor("router.top_experts", 8.0 * t * spec.top_k, grad=False)
    sums = b.tensor("router.sums", 8.0 * t * spec.top_k, grad=False)
    grouping = 7 if spec.num_groups > 1 else 0
    moved = 4.0 * t * count * (5 + 2 * bool(grouping)) + 40.0 * t * spec.top_k
    b.add(Op("router.topk", "memory_bound", MemoryBound(moved, "router_topk", t * count, count), (scores,),
             (chosen, experts, sums), (experts, sums), scratch=4.0 * t * count, launches=10 + grouping,
             back=OpBackward(12.0 * t * count, 8)))  # fmt: skip
    order = b.tensor("router.order", 8.0 * sent, grad=False)
    b.add(Op("router.sort", "memory_bound", MemoryBound(96.0 * sent), (experts,), (order,), scratch=16.0 * sent,
             launches=9))  # fmt: skip
    return chosen, order


def _exchange(
    b: TapeBuilder, ctx: Context, x: str, routing: Literal["dispatch", "combine"], sent: FloatK, received: FloatK,
    element: int,
) -> str:  # fmt: skip
    """All-to-all of rows; in front of the first the counts travel, and the host waits for them."""
    if not any_true(ctx.ep > 1):
        return x
    assert ctx.model.moe is not None
    row, exchanges = float(ctx.model.hidden) * element, ctx.ep > 1
    deepep = ctx.framework.dispatcher == "deepep"
    if routing == "dispatch":
        if not deepep:
            all_counts = b.tensor("moe.counts", 8.0 * ctx.model.moe.num_experts, grad=False)
            own = b.tensor("moe.own_counts", 0.0, grad=False)
            b.add(Op("moe.count", "memory_bound", MemoryBound(16.0 * ctx.model.moe.num_experts), (),
                     (own,), launches=5, present=exchanges, routing="count"))  # fmt: skip
            calls = python_function_counts_of_profile(ctx)
            python = calls.expert_counts.value + (calls.module_call.value // 2 if ctx.pipelined else 0)
            b.add(Op("moe.counts", "ep", Collective("all_to_all", "ep", 8.0 * ctx.model.moe.num_experts),
                     (own,), (all_counts,), present=exchanges, stream="ep", autograd_functions=python))  # fmt: skip
        for i in range(ctx.framework.dispatch_syncs):
            b.add(Op(f"moe.sync.{i}", "host", HostSync(), present=exchanges))
    out = b.tensor(f"moe.{routing}.out", received * row)
    if deepep:
        work = Collective("deepep", "ep", ctx.shard_tokens * row * ctx.etp, ctx.imbalance)
    else:
        work = Collective("all_to_all", "ep", sent * row, ctx.imbalance)
    return b.add(Op(f"moe.{routing}", "ep", work, (x,), (out,), present=exchanges, stream="ep", routing=routing))


TURNED_CAST = "transposed_cast"
"""Inductor's cast of an operand of a grouped product, which it writes transposed."""


def experts(
    b: TapeBuilder, ctx: Context, x: str, rows: ArrayK, moved: ArrayK, memory_rows: ArrayK, element: int,
    weights: tuple[str, ...],
) -> str:  # fmt: skip
    """Grouped products always in bf16: fp32 inputs are cast, fp32 weights too; the output is cast back.

    An input is cast for each product, once where they are compiled. Compiled casts of weights and of the output's
    gradient transpose what they write, for the products that read it.

    ``rows`` are multiplied, ``moved`` pass through the activation with their padding, ``memory_rows`` are allocated.
    """
    spec = ctx.model.moe
    assert spec is not None
    hidden, local = float(ctx.model.hidden), ctx.local_experts
    f = spec.expert_hidden / ctx.etp
    casts = element == 4
    fused = ctx.framework.compile
    turned = TURNED_CAST if fused else "cast_down"
    b.part = "experts"
    if casts and fused:
        x = cast(b, x, "experts.in", memory_rows * hidden, use="cast_once")

    def product(which: str, source: str, n: FloatK, k: FloatK, reads: tuple[str, ...] = ()) -> str:
        name = f"experts.{which}"
        params = local * n * k
        if casts:
            if which != "w2" and not fused:
                source = cast(b, source, name, memory_rows * k)
            reads = (*reads, weight_copy(b, name, params, turned))
        out = b.tensor(f"{name}.out", memory_rows * n * 2.0)
        work = GroupedGemm(rows, local, n, k, ctx.gemm_format, uneven=ctx.expert_rows_deviation)
        grad = weight_gradient_bytes_per_param(ctx)
        return b.add(
            Op(name, "grouped_gemm", work, (source, *reads), (out,), (source,), weight=name,
               weight_params=params, weight_bytes=params * grad, num_weights=1, registered_at=EXPERTS + MATRIX[which])
        )  # fmt: skip

    act = gated_activation(
        b, ctx, "experts", lambda w: product(w, x, f, hidden), memory_rows * f, moved * f, 2, fused=fused
    )
    y = product("w2", act, hidden, f, weights)
    y = cast(b, y, "experts.out", memory_rows * hidden, 4, turned) if casts else y
    b.part = ""
    return y


def _added_to_rows(elements: FloatK, element: int) -> OpBackward:
    """Gradients of rows that an index takes once each, sorted and added onto zeros (indexing_backward_kernel).

    16-bit ones so many elements a second, as those of repeated rows; of fp32 ones, whose gradients are read and whose
    zeros are read and written, the memory has the longer: 12 bytes against the 2.5 ps of an element's instructions.
    """
    if element == 2:
        return OpBackward(2 * elements, 7, like="index_backward")
    return OpBackward(3 * element * elements, 7, like="row_backward_fp32")


TIMED_TOPS = (2, 4, 6, 8)
"""Experts of a token whose products with their scores were timed by themselves (measurements/h200-1gpu-routed)."""


def _weighted_sum(
    b: TapeBuilder, ctx: Context, ordered: str, scores: str, routed_view: str, elements: ArrayK, *, deepep: bool
) -> str:  # fmt: skip
    """Product of a token's scores with its experts' outputs: operands in fp32, in bf16 under autocast.

    A batch of one row each: the kernel walks over four experts at a time and takes as long for six as for eight, in
    fp32 as in bf16. Back, outer products fill tiles of 32 rows with a token's few and the scores' gradients are read
    off the experts' outputs. bf16 operands of a multiple of 8 experts go to other kernels back (16 bytes aligned).
    For the numbers of experts that were timed (``TIMED_TOPS``) both ways take their own curves. Its last reader also
    ends the life of the routed rows, a local variable of the module.
    """
    spec = ctx.model.moe
    assert spec is not None
    hidden, element = float(ctx.model.hidden), ctx.residual_element_bytes
    out = b.tensor("moe.out", ctx.tokens * hidden * element)
    token = ctx.tokens * hidden
    work = MemoryBound(4.0 * token * -(-spec.top_k // 4), "score_product")
    back = OpBackward(0.0, 3, like="score_product_bwd", elements=elements, width=float(spec.top_k))
    narrow, size = not deepep, 2.0 if runs_autocast(ctx) else 4.0
    if spec.top_k in TIMED_TOPS:
        name, moved = f"top{spec.top_k}{'' if runs_autocast(ctx) else '_fp32'}", size * (elements + token)
        work = MemoryBound(moved, f"score_product_{name}")
        back = OpBackward(2.0 * moved, 3, like=f"score_product_bwd_{name}")
    if casts_linear_inputs(ctx):
        if ctx.framework.experts == "sequential":  # whose output is bf16: to fp32 by the model, back by autocast
            ordered = cast(b, ordered, "moe.operand32", elements, 4)
        operand = cast(b, ordered, "moe.operand", elements)
    elif deepep:
        operand, work = ordered, MemoryBound(element * elements + 4.0 * token)
        back = OpBackward(2.0 * element * elements + 4.0 * token, 3)
    elif element == 4:
        operand, narrow = ordered, False
    else:
        operand = cast(b, ordered, "moe.operand", elements, 4)
        if (
            ctx.has_amp_casts
        ):  # to fp32 by the model, back to bf16 by autocast, whose product is what the residual stream takes
            operand, narrow = cast(b, operand, "moe.operand16", elements), False
    scratch_order = ScratchSequence((4.0 * token,), (0, WRITES, ~0))
    b.add(Op("moe.sum", "memory_bound", work, (operand, scores, routed_view), (out,), (operand, scores),
             scratch=4.0 * token, launches=1 if narrow else 2, order=scratch_order,
             back=back._replace(scratch=4.0 * token, order=scratch_order)))  # fmt: skip
    if narrow:  # the sum to the residual's format
        b.add(
            Op(
                "moe.sum.cast",
                "memory_bound",
                MemoryBound(CAST * token, "cast_up" if casts_linear_inputs(ctx) else "cast_down"),
            )
        )
    return out
