"""Megatron's layer of experts with Transformer Engine: router, dispatch, grouped products, combine.

Read in megatron_core 0.16.1 (transformer/moe/: moe_layer.py, router.py, token_dispatcher.py, experts.py) and
transformer_engine 2.20.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import BoolK, any_true, logical_not
from mofa.blocks.frameworks.megatron import fp8
from mofa.blocks.frameworks.megatron.calls import add_op_of_module_python, mark_ops_issued_by_call, timed_module_call
from mofa.blocks.frameworks.megatron.expert_capacity import drop_tokens_beyond_capacity
from mofa.blocks.frameworks.megatron.linear import weight_gradient_bytes_per_param
from mofa.blocks.frameworks.megatron.micro_moe import schedule_tokens_over_replicas
from mofa.blocks.frameworks.megatron.mlp import activation, fuses_activation, mlp, multiply_by_shared_gate
from mofa.blocks.frameworks.megatron.permute import (
    WEIGHT,
    context_with_padded_rows,
    expert_rows_sent_by_rank,
    pad_routing_map,
    pads_routing_map,
    permute,
    sort_by_expert,
    sort_by_source_rank,
    unpermute,
)
from mofa.blocks.op import BackwardPreparation, FloatK, Op, OpBackward, TapeBuilder, TimedModuleCall
from mofa.blocks.parts import (
    hold_in_module,
    linear,
    mark_dispatcher_renewal,
    mark_recomputed_output,
    memory_bound_op,
    release_module_locals,
)
from mofa.blocks.roles import RoutingStep
from mofa.blocks.work import Collective, CollectiveKind, GroupedGemm, GroupedKernel, HostSync, MemoryBound
from mofa.specs.model import MoeSpec

Activation = Callable[[TapeBuilder, Context, str, str, ArrayK, ArrayK, str, FloatK], str]


ROUTER_KERNELS = {"softmax": 11, "sigmoid": 17}
"""Kernels of top-k routing by its scores: the choice (2), its softmax, or sigmoid, bias, gather and normalisation, and
the scores and the map scattered over all experts from zeros (8): moe_utils.py, ``topk_routing_with_score_function``."""
GROUP_KERNELS = 12
"""Kernels more where the choice is among groups of experts (``group_limited_topk``)."""


def router(b: TapeBuilder, ctx: Context, h: str) -> tuple[str, str]:
    """Logits in fp32, the choice, and scores and map over all experts: (scores, map).

    The product and both of its gradients run in fp32: the weight, which is small, and the input are cast each time,
    and the input's gradient back (moe_utils.py, ``RouterGatingLinearFunction``; its use of Transformer Engine's product
    asks for a workspace that 2.20 no longer has, so that PyTorch's runs). Kept are the choice's indices and scores; of
    scores over all experts these as well. The dispatcher holds the scattered scores and the map until the layer's next
    micro-batch.
    """
    moe = ctx.model.moe
    assert moe is not None
    s, experts, hidden, since = ctx.shard_tokens, float(moe.num_experts), float(ctx.model.hidden), len(b.ops)
    wide = b.tensor("router.input", s * hidden * 4.0)
    back = OpBackward(12.0 * s * hidden, 2, 4.0 * s * hidden, like="cast_up")
    b.add(Op("router.cast", "memory_bound", MemoryBound(6.0 * s * hidden, "cast_up"), (h,), (wide,), back=back,
             step="router"))  # fmt: skip
    logits = linear(
        b, ctx, wide, "router.gate", m=s, n=experts, k=hidden, saves=(h,), format_="fp32", out_element=4,
        grad_bytes_per_param=2.0, accumulate_bytes_per_param=ctx.framework.accumulation_bytes_per_param, functions=1.0,
        step="gate",
    )  # fmt: skip
    scores = b.tensor("router.scores", s * experts * 4.0)
    choice, table = _choice_of_experts(ctx, moe), s * experts
    chosen = b.tensor("router.chosen", s * choice.saved_bytes_per_token, grad=False)
    mapped = b.tensor("router.map", table, grad=False)
    kind = f"{choice.library} router_{'grouped_' if moe.num_groups > 1 else ''}{moe.score}"
    back = OpBackward(
        choice.backward_moved_bytes * table, choice.backward_launches, like=f"{kind}_bwd", elements=table, width=experts
    )
    b.add(
        Op("router.topk", "memory_bound", MemoryBound(choice.moved_bytes * table, f"{kind}_fwd", table, experts),
           (logits,), (scores, chosen, mapped), (scores, chosen, mapped), launches=choice.launches, back=back,
           step="router")
    )  # fmt: skip
    by = timed_module_call(ctx, "fused_router" if ctx.framework.router_fusion else "router")
    mark_ops_issued_by_call(b, since, by)
    return scores, mapped


class _ChoiceOfExperts(NamedTuple):
    """Kernels that choose a token's experts by its logits, and what of the choice is kept for the way back."""

    library: str
    """As kernels' curves are named."""
    launches: int
    moved_bytes: float
    """For each token and expert, like ``backward_moved_bytes``. [B]"""
    saved_bytes_per_token: float
    """Beside the scores and the map. [B]"""
    backward_launches: int
    backward_moved_bytes: float


def _choice_of_experts(ctx: Context, moe: MoeSpec) -> _ChoiceOfExperts:
    """By PyTorch's ops, which keep indices and scores, of sigmoids those over all experts as well; or by one kernel,
    which keeps an fp32 number for each expert (transformer_engine 2.20.2, pytorch/router.py)."""
    if ctx.framework.router_fusion:
        return _ChoiceOfExperts("te", 1, 13.0, 4.0 * moe.num_experts, 1, 13.0)
    launches = ROUTER_KERNELS[moe.score] + (GROUP_KERNELS if moe.num_groups > 1 else 0)
    over_all = 4.0 * moe.num_experts if moe.score == "sigmoid" else 0.0
    return _ChoiceOfExperts("megatron", launches, 4.0 * launches, moe.top_k * 12.0 + over_all, 6, 24.0)


def moe(b: TapeBuilder, ctx: Context, h: str) -> str:
    """Router, dispatch, experts, combine and shared experts (moe_layer.py, token_dispatcher.py, experts.py)."""
    spec = ctx.model.moe
    assert spec is not None
    row = float(ctx.model.hidden) * ctx.activation_element_bytes
    b.region = "moe"
    add_op_of_module_python(b, "moe.layer", timed_module_call(ctx, "moe_layer"))
    shared = ""
    if spec.shared_hidden:
        b.region = "moe.shared"
        shared = multiply_by_shared_gate(b, ctx, h, mlp(b, ctx, h, "shared", float(spec.shared_hidden)))
        b.region = "moe"
    scores, mapped = drop_tokens_beyond_capacity(b, ctx, *router(b, ctx, h))
    y = _by_rows(b, ctx, h, scores, mapped)
    if shared:
        total = b.tensor("moe.total", ctx.shard_tokens * row)
        y = memory_bound_op(
            b,
            "moe.add_shared",
            (y, shared),
            total,
            bytes_=3 * ctx.shard_tokens * row,
            back_launches=0,
            like="residual_add",
        )
    release_module_locals(b, "moe")
    b.region = ""
    y = mark_recomputed_output(b, "moe", y, h)
    assert ctx.framework.dispatcher in ("alltoall", "allgather", "deepep")
    return y


def _by_rows(b: TapeBuilder, ctx: Context, h: str, scores: str, mapped: str) -> str:
    """Tokens' rows to the experts and back, with their probabilities (``MoEAlltoAllTokenDispatcher``).

    Rows are sorted by expert on every rank that holds several, also where no other rank sends any: the fused sort
    copies them all (``dispatch_postprocess``, ``combine_preprocess``). The permuted and the received rows are local
    variables of ``custom_forward``, held until the layer returns, the sorted ones of ``routed_experts_compute``, until
    the results are in the order in which they are sent. A padded map makes the number of rows the device's to
    say: the host waits for it before they are copied (``preprocess``, ``before_permutation_1``).
    """
    ctx = context_with_padded_rows(ctx)
    fw, row = ctx.framework, float(ctx.model.hidden) * ctx.activation_element_bytes
    all_to_all = fw.dispatcher == "alltoall"
    if all_to_all:  # its own probabilities are the router's, the others' those that were exchanged
        mark_dispatcher_renewal(b)
    mapped = pad_routing_map(b, ctx, mapped)
    since = len(b.ops)
    on_host = "" if ctx.fixed_rows else count_expert_rows(b, ctx, mapped)
    mark_ops_issued_by_call(b, since, timed_module_call(ctx, "dispatch"))
    if pads_routing_map(ctx):
        _synchronise(b, ctx, on_host, "moe.sync", True)
    since = len(b.ops)
    sent, weights = permute(b, ctx, h, scores, mapped)
    mark_ops_issued_by_call(b, since, timed_module_call(ctx, "permute") if fw.permute_fusion else None)
    schedule_tokens_over_replicas(b, ctx, scores)
    split = ctx.ep * ctx.etp > 1
    if not pads_routing_map(ctx):
        _synchronise(b, ctx, on_host, "moe.sync", split)
    received = exchange_tokens(b, ctx, sent, "dispatch", ctx.rows_memory * row)
    weights = exchange_probabilities(b, ctx, weights)
    hold_in_module(b, "moe", sent)
    hold_in_module(b, "moe", received)
    if not all_to_all:
        mark_dispatcher_renewal(b)
    rows, memory_rows = ctx.rows_time * ctx.etp, ctx.rows_memory * ctx.etp
    if any_true(ctx.etp > 1):
        received = gather_rows_over_expert_tp(b, ctx, received, "moe.etp_gather", rows * row, memory_rows * row)
        weights = gather_rows_over_expert_tp(
            b, ctx, weights, "moe.etp_gather_weights", rows * WEIGHT, memory_rows * WEIGHT
        )
    received, weights = sort_by_expert(b, ctx, received, weights, rows, memory_rows)
    hold_in_module(b, "routed experts", received)
    if not pads_routing_map(ctx):
        _synchronise(b, ctx, on_host, "moe.end_sync", logical_not(split))
    y = experts(b, ctx, received, rows, memory_rows, weights=(weights,))
    y = sort_by_source_rank(b, ctx, y, rows, memory_rows)
    if any_true(ctx.etp > 1):
        y = reduce_scatter_over_expert_tp(b, ctx, y, rows * row, ctx.rows_memory * row)
    release_module_locals(b, "routed experts")
    y = exchange_tokens(b, ctx, y, "combine", expert_rows_sent_by_rank(ctx) * row)
    return unpermute(b, ctx, y)


def count_expert_rows(b: TapeBuilder, ctx: Context, mapped: str) -> str:
    """Rows of each expert: counted, gathered where experts are split, summed, and copied to the host on a stream of
    their own (``preprocess``, ``_maybe_dtoh_and_synchronize``)."""
    spec = ctx.model.moe
    assert spec is not None
    ranks, own = ctx.ep * ctx.etp, 8.0 * spec.num_experts
    counted = b.tensor("moe.count", own, grad=False)
    b.add(
        Op("moe.count", "memory_bound", MemoryBound(ctx.shard_tokens * float(spec.num_experts)), (mapped,), (counted,),
           back=OpBackward(0.0, 0), routing="count", step="dispatch_preprocess")
    )  # fmt: skip
    if any_true(ranks > 1):
        gathered = b.tensor("moe.counts", own * ranks, grad=False)
        counted = b.add(
            Op("moe.counts", "ep", Collective("all_gather", "ep", own * ranks), (counted,), (gathered,),
               present=ranks > 1, stream="ep", back=OpBackward(0.0, 0), step="dispatch_preprocess")
        )  # fmt: skip
        summed = b.tensor("moe.count_sums", own, grad=False)
        counted = b.add(
            Op("moe.count_sums", "memory_bound", MemoryBound(own * ranks), (counted,), (summed,), launches=5,
               present=ranks > 1, back=OpBackward(0.0, 0), step="dispatch_preprocess")
        )  # fmt: skip
    on_host = b.tensor("moe.counts_on_host", 0.0, grad=False)
    return b.add(
        Op("moe.counts_to_host", "memory_bound", MemoryBound(own), (counted,), (on_host,), stream="to_host",
           back=OpBackward(0.0, 0))
    )  # fmt: skip


def _synchronise(b: TapeBuilder, ctx: Context, on_host: str, name: str, present: BoolK) -> None:
    """The host waits for the counts: before the exchange needs its splits, else before the experts need theirs.

    Of rows that are dropped and padded to a capacity it knows them (``drop_and_pad``).
    """
    for i in range(0 if ctx.fixed_rows else ctx.framework.dispatch_syncs):
        b.add(Op(f"{name}{i}", "host", HostSync(), (on_host,), present=present))


def gather_rows_over_expert_tp(b: TapeBuilder, ctx: Context, x: str, name: str, moved: ArrayK, nbytes: ArrayK) -> str:
    """What tensor-parallel ranks of an expert received, all of it on each of them."""
    out = b.tensor(f"{name}ed", nbytes)
    work = Collective("all_gather", "etp", moved)
    by = timed_module_call(ctx, "collective")
    return b.add(Op(name, "ep", work, (x,), (out,), present=ctx.etp > 1, stream="ep", module_call=by, routing="gather"))


def reduce_scatter_over_expert_tp(b: TapeBuilder, ctx: Context, y: str, moved: ArrayK, nbytes: ArrayK) -> str:
    """The sum of what these ranks computed, to each its own rows."""
    out = b.tensor("moe.scattered", nbytes)
    work = Collective("reduce_scatter", "etp", moved)
    by, sums = timed_module_call(ctx, "collective"), ctx.etp > 1
    return b.add(
        Op("moe.etp_scatter", "ep", work, (y,), (out,), present=sums, stream="ep", module_call=by, routing="scatter")
    )


def exchange_probabilities(b: TapeBuilder, ctx: Context, weights: str) -> str:
    """The rows' probabilities, an exchange of their own."""
    if ctx.framework.dispatcher != "alltoall" or not any_true(ctx.ep > 1):
        return weights
    out = b.tensor("moe.dispatch_weights", ctx.rows_memory * WEIGHT)
    work = Collective("all_to_all", "ep", expert_rows_sent_by_rank(ctx) * WEIGHT, ctx.imbalance)
    by = timed_module_call(ctx, "collective")
    return b.add(
        Op("moe.dispatch_weights", "ep", work, (weights,), (out,), present=ctx.ep > 1, stream="ep", module_call=by,
           routing="dispatch")
    )  # fmt: skip


def exchange_tokens(
    b: TapeBuilder, ctx: Context, x: str, routing: Literal["dispatch", "combine"], out_bytes: ArrayK
) -> str:  # fmt: skip
    """Send token rows to the ranks that hold their experts, or back."""
    name = f"moe.{routing}"
    row = float(ctx.model.hidden) * ctx.activation_element_bytes
    out = b.tensor(f"{name}.out", out_bytes)
    dispatcher = ctx.framework.dispatcher
    if dispatcher == "allgather":
        kind: CollectiveKind = "all_gather" if routing == "dispatch" else "reduce_scatter"
        work = Collective(kind, "ep", ctx.shard_tokens * row * ctx.ep, ctx.imbalance)
    elif dispatcher == "deepep":
        work = Collective("deepep", "ep", ctx.shard_tokens * row, ctx.imbalance)
    else:
        work = Collective("all_to_all", "ep", expert_rows_sent_by_rank(ctx) * row, ctx.imbalance)
    by = timed_module_call(ctx, "collective")
    return b.add(
        Op(name, "ep", work, (x,), (out,), present=ctx.ep > 1, stream="ep", launches=2, module_call=by, routing=routing)
    )


def experts(
    b: TapeBuilder, ctx: Context, x: str, rows: ArrayK, memory_rows: ArrayK, activate: Activation = activation,
    weights: tuple[str, ...] = (),
) -> str:  # fmt: skip
    """The routed experts: a grouped product each for gate-and-up and for down, the probability in the activation.

    ``weights`` are the rows' probabilities, where they are a tensor of their own that the activation keeps. Padded
    rows, the first product and the activation are local variables of ``TEGroupedMLP.forward``, held until it returns.
    """
    spec = ctx.model.moe
    assert spec is not None
    e, hidden, local = ctx.activation_element_bytes, float(ctx.model.hidden), ctx.local_experts
    f = spec.expert_hidden / ctx.etp
    n = 2 * f if ctx.model.mlp.gated else f
    sequential = ctx.framework.experts == "sequential"
    launches = local if sequential else 1
    actual, pads = (rows, memory_rows), ctx.fp8 is not None and not pads_routing_map(ctx)
    b.part = "experts"
    if pads:
        x = fp8.pad_expert_rows(b, ctx, x, rows, memory_rows)
        hold_in_module(b, "experts", x)
        rows, memory_rows = fp8.padded_expert_rows(ctx, rows), fp8.padded_expert_rows(ctx, memory_rows)
    add_op_of_module_python(b, "experts", timed_module_call(ctx, "experts"))
    since = len(b.ops)
    operand = fp8.grouped_product_input(b, ctx, x, "experts.fc1", (rows, memory_rows), hidden, n)
    fc1 = _products(
        b, ctx, operand, "experts.fc1", b.tensor("experts.fc1", memory_rows * n * e), (rows, n, hidden), "first_product"
    )
    mark_ops_issued_by_call(b, since, grouped_linear_call(ctx))
    hold_in_module(b, "experts", fc1)
    act = activate(b, ctx, fc1, "experts", memory_rows * f, rows * f, "moe.moe_act", launches)
    fused = fuses_activation(ctx, "experts")
    if not fused:
        act = _by_probability(b, act, memory_rows * f * e, rows * f * e, launches)
    if weights:
        b.ops[-1] = _weighted(b.ops[-1], weights, rows * f if fused else 0.0, float(spec.expert_hidden))
    hold_in_module(b, "experts", act)
    since = len(b.ops)
    operand = fp8.grouped_product_input(b, ctx, act, "experts.fc2", (rows, memory_rows), f, hidden)
    out = _products(
        b, ctx, operand, "experts.fc2", b.tensor("experts.out", memory_rows * hidden * e), (rows, hidden, f)
    )
    mark_ops_issued_by_call(b, since, grouped_linear_call(ctx))
    out = add_expert_biases(b, ctx, out, rows, memory_rows) if spec.expert_bias and not sequential else out
    out = fp8.unpad_expert_rows(b, ctx, out, *actual) if pads else out
    release_module_locals(b, "experts")
    b.part = ""
    return out


def grouped_linear_call(ctx: Context) -> TimedModuleCall | None:
    """The call of a linear of all experts; experts one after the other have a linear each (experts.py,
    ``SequentialMLP``)."""
    if ctx.framework.experts == "sequential":
        return timed_module_call(ctx, "linear", times=ctx.local_experts)
    return timed_module_call(ctx, "grouped_linear", ctx.local_experts)


def _products(
    b: TapeBuilder, ctx: Context, operand: tuple[str, tuple[str, ...], BackwardPreparation | None], name: str, out: str,
    shape: tuple[ArrayK, ArrayK, ArrayK], routing: RoutingStep = "",
) -> str:  # fmt: skip
    """A product of each expert with its rows: ``shape`` is (rows, features out, features in).

    Products on several streams were measured with what they add to main gradients. Kernels that are loaded are the
    forward product's and the input gradient's alike, hardly ever the weight gradient's.
    """
    x, saves, ready = operand
    rows, n, k = shape
    local, sequential = ctx.local_experts, ctx.framework.experts == "sequential"
    grads, params = weight_gradient_bytes_per_param(ctx), local * n * k
    grad_bytes, added = grads.get("grad_bytes_per_param", 0.0), grads.get("accumulate_bytes_per_param", 0.0)
    kernel: GroupedKernel = ctx.framework.grouped_kernel
    within = added if kernel == "multi-stream" and not sequential and not grad_bytes else 0.0
    work = GroupedGemm(rows, local, n, k, ctx.gemm_format, sequential=sequential, kernel=kernel, added_bytes=within)
    return b.add(
        Op(name, "grouped_gemm", work, (x,), (out,), saves, launches=local if sequential else 1,
        backward_preparation=ready,
           weight=name, weight_params=params, weight_bytes=params * grad_bytes / (local if sequential else 1.0),
           accumulate_bytes_per_param=added - within, num_weights=local, kernel_choices=local * ctx.unseen_rows_share,
           kernel_loads=local * ctx.expected_first_use_kernels / 4.0, mean_loops_before=ctx.mean_loops_before,
           routing=routing)
    )  # fmt: skip


def _weighted(op: Op, weights: tuple[str, ...], elements: FloatK, width: float) -> Op:
    """An activation that reads and keeps the rows' probabilities; a fused one of so many elements, as it was measured
    (fused_bias_swiglu.py, ``weighted_swiglu``)."""
    op = op._replace(reads=(*op.reads, *weights), saves=(*op.saves, *weights))
    if not any_true(elements > 0.0) or not isinstance(op.work, MemoryBound) or op.back is None:
        return op
    return op._replace(
        work=op.work._replace(like="te weighted_swiglu_fwd", elements=elements, width=width),
        back=op.back._replace(like="te weighted_swiglu_bwd", elements=elements, width=width),
    )


def _by_probability(b: TapeBuilder, act: str, kept_bytes: ArrayK, moved: ArrayK, launches: FloatK) -> str:
    """The activation times its tokens' 16-bit probabilities, where no fused function does that as SwiGLU's does.

    mlp.py:174-229 (``per_token_scale``), moe/experts.py. The activation is kept for the probabilities' gradient;
    backward multiplies twice, and sums the rows of the one product beside the other.
    """
    out = b.tensor("experts.weighted", kept_bytes)
    back = OpBackward(6.0 * moved, 3 * launches, kept_bytes, like="mul")
    work = MemoryBound(2.0 * moved, "mul")
    return b.add(
        Op("experts.weight", "memory_bound", work, (act,), (out,), (act,), region="moe.moe_act", launches=launches,
           back=back)
    )  # fmt: skip


def add_expert_biases(b: TapeBuilder, ctx: Context, x: str, rows: ArrayK, memory_rows: ArrayK) -> str:
    """The second products' biases times the probabilities, expert by expert in eager ops, and their concatenation.

    moe/experts.py, ``TEGroupedMLP._apply_bias``; the first products add theirs themselves. An expert's rows are
    multiplied (2 bytes an element) and added (6), then all are copied (4); backward multiplies and sums twice (12) and
    concatenates (4).
    """
    local, element = ctx.local_experts, ctx.activation_element_bytes
    elements = rows * float(ctx.model.hidden)
    out = b.tensor("experts.biased", memory_rows * float(ctx.model.hidden) * element)
    back = OpBackward(8 * elements * element, 5 * local + 1, like="mul")
    return b.add(
        Op("experts.bias", "memory_bound", MemoryBound(6 * elements * element, "residual_add"), (x,), (out,),
           scratch=2 * memory_rows * float(ctx.model.hidden) * element, launches=3 * local + 1, back=back)
    )  # fmt: skip
