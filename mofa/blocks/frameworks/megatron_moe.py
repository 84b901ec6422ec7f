"""Megatron's layer of experts with Transformer Engine: router, dispatch, grouped products, combine.

Read in megatron_core 0.16.1 (transformer/moe/: moe_layer.py, router.py, token_dispatcher.py, experts.py) and
transformer_engine 2.20.
"""

from __future__ import annotations

from collections.abc import Callable

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import anywhere
from mofa.blocks.frameworks import megatron_fp8 as fp8
from mofa.blocks.frameworks.megatron_linear import weight_grad
from mofa.blocks.frameworks.megatron_mlp import activation, mlp
from mofa.blocks.frameworks.micro_moe import schedule
from mofa.blocks.op import Back, Collective, FloatK, Grouped, HostSync, Op, Stream, TapeBuilder
from mofa.blocks.parts import linear, renew, stream

Activation = Callable[[TapeBuilder, Context, str, str, ArrayK, ArrayK, str, FloatK], str]


def router(b: TapeBuilder, ctx: Context, h: str) -> str:
    """Gating product, scores in fp32, top-k, and the map of tokens to experts."""
    moe = ctx.model.moe
    assert moe is not None
    s, experts = ctx.shard, float(moe.num_experts)
    logits = linear(
        b, ctx, h, "router.gate", m=s, n=experts, k=ctx.model.hidden, saves=(h,), format_="bf16",
        grad_bytes_per_param=2.0, accumulate_bytes_per_param=ctx.framework.accumulation_bytes_per_param,
    )  # fmt: skip
    scores = b.tensor("router.scores", s * experts * 4.0)
    chosen = b.tensor("router.chosen", s * (experts * 1.0 + moe.top_k * 8.0), grad=False)
    launches = 10 if moe.score == "sigmoid" else 8
    if moe.num_groups > 1:
        launches += 7
    b.add(
        Op("router.topk", "memory_bound", Stream(launches * s * experts * 4.0, "router_topk", s * experts, experts),
           (logits,), (scores, chosen),
           (scores, chosen), launches=launches, back=Back(4 * s * experts * 4.0, 6))
    )  # fmt: skip
    return scores


def moe(b: TapeBuilder, ctx: Context, h: str) -> str:
    """Router, dispatch, experts, combine and shared experts (moe_layer.py, token_dispatcher.py, experts.py)."""
    spec = ctx.model.moe
    assert spec is not None
    fw, e, hidden = ctx.framework, ctx.element, float(ctx.model.hidden)
    b.region = "moe"
    shared = ""
    if spec.shared_hidden:
        b.region = "moe.shared"
        shared = mlp(b, ctx, h, "shared", float(spec.shared_hidden))
        b.region = "moe"
    scores = router(b, ctx, h)
    copies = ctx.shard * spec.top_k
    row = hidden * e
    sent = b.tensor("moe.sent", copies * row)
    row_ids = b.tensor("moe.row_ids", ctx.shard * (2 * spec.num_experts + 1) * 4.0, grad=False)
    if fw.dispatcher == "alltoall":  # its own probabilities are the router's, the others' those that were exchanged
        renew(b)
    b.add(
        Op("moe.permute", "memory_bound", Stream(2 * copies * row, "permute"), (h, scores), (sent, row_ids), (row_ids,),
           launches=3, back=Back((copies + ctx.shard) * row, 3))
    )  # fmt: skip
    schedule(b, ctx, scores)
    for i in range(fw.dispatch_syncs):  # the counts reach the host before the all-to-all needs its splits
        b.add(Op(f"moe.sync{i}", "host", HostSync()))
    received = exchange(b, ctx, sent, "moe.dispatch", ctx.rows_memory * row)
    if fw.dispatcher != "alltoall":
        renew(b)
    rows, kept = ctx.rows_time * ctx.etp, ctx.rows_memory * ctx.etp
    if anywhere(ctx.etp > 1):
        gathered = b.tensor("moe.gathered", kept * row)
        received = b.add(
            Op("moe.etp_gather", "ep", Collective("all_gather", "etp", rows * row), (received,), (gathered,),
               present=ctx.etp > 1, stream="ep")
        )  # fmt: skip
    several = ctx.local_experts * ctx.ep > ctx.local_experts
    sorted_ = b.tensor("moe.sorted", kept * row)
    received = b.add(
        Op("moe.sort", "memory_bound", Stream(2 * rows * row, "copy"), (received,), (sorted_,), launches=2,
           present=several & (ctx.local_experts > 1), back=Back(2 * rows * row, 2, like="copy"))
    )  # fmt: skip
    y = experts(b, ctx, received, rows, kept)
    unsorted = b.tensor("moe.unsorted", kept * row)
    y = b.add(
        Op("moe.unsort", "memory_bound", Stream(2 * rows * row, "copy"), (y,), (unsorted,), launches=2,
           present=several & (ctx.local_experts > 1), back=Back(2 * rows * row, 2, like="copy"))
    )  # fmt: skip
    if anywhere(ctx.etp > 1):
        scattered = b.tensor("moe.scattered", ctx.rows_memory * row)
        y = b.add(
            Op("moe.etp_scatter", "ep", Collective("reduce_scatter", "etp", rows * row), (y,), (scattered,),
               present=ctx.etp > 1, stream="ep")
        )  # fmt: skip
    y = exchange(b, ctx, y, "moe.combine", copies * row)
    out = b.tensor("moe.out", ctx.shard * row)
    b.add(
        Op("moe.unpermute", "memory_bound", Stream((copies + ctx.shard) * row), (y,), (out,), (row_ids,), launches=2,
           back=Back(2 * copies * row, 1, like="permute"))
    )  # fmt: skip
    if shared:
        total = b.tensor("moe.total", ctx.shard * row)
        out = stream(
            b, "moe.add_shared", (out, shared), total, bytes_=3 * ctx.shard * row, back_launches=0, like="residual_add"
        )
    b.region = ""
    assert fw.dispatcher in ("alltoall", "allgather", "deepep")
    return out


def exchange(b: TapeBuilder, ctx: Context, x: str, name: str, out_bytes: ArrayK) -> str:
    """Send token rows to the ranks that hold their experts, or back."""
    spec = ctx.model.moe
    assert spec is not None
    row = float(ctx.model.hidden) * ctx.element
    out = b.tensor(f"{name}.out", out_bytes)
    dispatcher = ctx.framework.dispatcher
    if dispatcher == "allgather":
        forward = name.endswith("dispatch")
        work = Collective("all_gather" if forward else "reduce_scatter", "ep", ctx.shard * row * ctx.ep, ctx.imbalance)
    elif dispatcher == "deepep":
        work = Collective("deepep", "ep", ctx.shard * row, ctx.imbalance)
    else:
        work = Collective("all_to_all", "ep", ctx.shard * spec.top_k * row, ctx.imbalance)
    return b.add(Op(name, "ep", work, (x,), (out,), present=ctx.ep > 1, stream="ep", launches=2))


def experts(b: TapeBuilder, ctx: Context, x: str, rows: ArrayK, kept: ArrayK, activate: Activation = activation) -> str:
    """The routed experts: a grouped product each for gate-and-up and for down, the probability in the activation."""
    spec = ctx.model.moe
    assert spec is not None
    e, hidden, local = ctx.element, float(ctx.model.hidden), ctx.local_experts
    f = spec.expert_hidden / ctx.etp
    gated = ctx.model.mlp.activation == "swiglu"
    n = 2 * f if gated else f
    sequential = ctx.framework.experts == "sequential"
    launches = local if sequential else 1
    actual = rows, kept
    if ctx.fp8 is not None:
        x = fp8.pad(b, ctx, x, rows, kept)
        rows, kept = fp8.padded(ctx, rows), fp8.padded(ctx, kept)
    x, saves, ready = fp8.expert_operands(b, ctx, x, "experts.fc1", (rows, kept), hidden, n)
    grads = weight_grad(ctx)
    per_param, moved = grads.get("grad_bytes_per_param", 0.0), grads.get("accumulate_bytes_per_param", 0.0)
    fc1 = b.tensor("experts.fc1", kept * n * e)
    b.add(
        Op("experts.fc1", "grouped_gemm", Grouped(rows, local, n, hidden, ctx.gemm_format, sequential=sequential),
           (x,), (fc1,), saves, launches=launches, prepared=ready, weight="experts.fc1",
           weight_params=local * n * hidden,
           weight_bytes=local * n * hidden * per_param / (local if sequential else 1.0),
           accumulate_bytes_per_param=moved, num_weights=local)
    )  # fmt: skip
    act = activate(b, ctx, fc1, "experts", kept * f, rows * f, "moe.moe_act", launches)
    if not gated or not ctx.framework.fused_swiglu:
        act = _by_probability(b, act, kept * f * e, rows * f * e, launches)
    act, saves, ready = fp8.expert_operands(b, ctx, act, "experts.fc2", (rows, kept), f, hidden)
    out = b.tensor("experts.out", kept * hidden * e)
    b.add(
        Op("experts.fc2", "grouped_gemm", Grouped(rows, local, hidden, f, ctx.gemm_format,
           sequential=sequential), (act,), (out,), saves, launches=launches, prepared=ready, weight="experts.fc2",
           weight_params=local * f * hidden,
           weight_bytes=local * f * hidden * per_param / (local if sequential else 1.0),
           accumulate_bytes_per_param=moved, num_weights=local)
    )  # fmt: skip
    out = expert_bias(b, ctx, out, rows, kept) if spec.expert_bias and not sequential else out
    return out if ctx.fp8 is None else fp8.unpad(b, ctx, out, *actual)


def _by_probability(b: TapeBuilder, act: str, kept: ArrayK, moved: ArrayK, launches: FloatK) -> str:
    """The activation times its tokens' 16-bit probabilities, where no fused function does that as SwiGLU's does.

    mlp.py:174-229 (``per_token_scale``), moe/experts.py. The activation is kept for the probabilities' gradient;
    backward multiplies twice, and sums the rows of the one product beside the other.
    """
    out = b.tensor("experts.weighted", kept)
    back = Back(6.0 * moved, 3 * launches, kept, like="mul")
    work = Stream(2.0 * moved, "mul")
    return b.add(
        Op("experts.weight", "memory_bound", work, (act,), (out,), (act,), region="moe.moe_act", launches=launches,
           back=back)
    )  # fmt: skip


def expert_bias(b: TapeBuilder, ctx: Context, x: str, rows: ArrayK, kept: ArrayK) -> str:
    """The second products' biases times the probabilities, expert by expert in eager ops, and their concatenation.

    moe/experts.py, ``TEGroupedMLP._apply_bias``; the first products add theirs themselves. An expert's rows are
    multiplied (2 bytes an element) and added (6), then all are copied (4); backward multiplies and sums twice (12) and
    concatenates (4).
    """
    local, element = ctx.local_experts, ctx.element
    elements = rows * float(ctx.model.hidden)
    out = b.tensor("experts.biased", kept * float(ctx.model.hidden) * element)
    back = Back(8 * elements * element, 5 * local + 1, like="mul")
    return b.add(
        Op("experts.bias", "memory_bound", Stream(6 * elements * element, "residual_add"), (x,), (out,),
           scratch=2 * kept * float(ctx.model.hidden) * element, launches=3 * local + 1, back=back)
    )  # fmt: skip
