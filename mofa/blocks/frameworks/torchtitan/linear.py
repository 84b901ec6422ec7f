"""torchtitan's linears in its three precision modes, and what tensor parallelism does around them.

FSDP2's mixed precision: bf16 throughout, weights gathered by data parallelism. Autocast (one GPU, DDP): fp32 between
linears, a bf16 copy of the input for every call and of the weight for every linear; of bf16 parameters nothing is left
to cast. Without either (TP or PP alone): everything in the training dtype.
"""

from __future__ import annotations

from collections.abc import Callable

from mofa.blocks import parts
from mofa.blocks.context import Context
from mofa.blocks.elementwise import any_true, logical_not, where
from mofa.blocks.frameworks.torchtitan import float8
from mofa.blocks.frameworks.torchtitan.te_linear import te_linear
from mofa.blocks.op import BoolK, FloatK, Op, OpBackward, TapeBuilder
from mofa.blocks.roles import BlockRole, LayerStep, Purpose, TensorUse
from mofa.blocks.work import Collective, Gemm, MemoryBound

CAST = 6.0
"""Bytes an element that a cast between bf16 and fp32 moves. [B]"""


DDP_BUCKET = 100.0 * 2**20
"""Bytes of gradients in one of DDP's buckets (torchtitan's bucket_cap_mb). [B]"""


def casts_linear_inputs(ctx: Context) -> bool:
    """Whether torch.autocast casts what fp32 linears read."""
    return ctx.precision_mode == "autocast"


def runs_autocast(ctx: Context) -> bool:
    """Whether torch.autocast runs, though linears may have nothing to cast."""
    return casts_linear_inputs(ctx) or ctx.has_amp_casts


def is_in_compiled_block(b: TapeBuilder, ctx: Context) -> bool:
    """Whether the block is compiled as one: blocks with experts are compiled in pieces."""
    return ctx.framework.compile and b.block == "dense"


def compiles_modules_separately(b: TapeBuilder, ctx: Context) -> bool:
    """Whether a module of the block is compiled by itself: attention, router and shared experts beside experts.

    A block with experts is cut at the hooks around them (llama4/infra/parallelize.py, apply_compile).
    """
    return ctx.framework.compile and b.block == "experts"


def is_compiled_block_split_by_ddp(b: TapeBuilder, ctx: Context) -> bool:
    """Whether a compiled dense block is cut between the products of its feed-forward layer.

    Under DDP, torchtitan has Dynamo compile a block in one graph for each bucket of gradients (apply_ddp:
    ddp_optimizer; a bucket of 100 MiB). So a product whose weight fills a bucket is a graph with the elementwise ops
    behind it (torch/_dynamo/backends/distributed.py). Nothing is fused over a cut, and what crosses it is kept.
    """
    each = 4.0 if casts_linear_inputs(ctx) else float(ctx.activation_element_bytes)
    weight_bytes = each * ctx.model.hidden * float(ctx.model.mlp.ffn_hidden or 0)
    ddp = ctx.framework.data_parallel == "ddp" and runs_autocast(ctx)
    return is_in_compiled_block(b, ctx) and ddp and weight_bytes >= DDP_BUCKET


def has_local_qkv(ctx: Context) -> bool:
    """Whether q, k and v leave their linears as local tensors, as in its llama3.

    qwen3, which runs head norms and experts alike, and deepseek_v3 leave distributed ones.
    """
    model = ctx.model
    return model.attention_kind.torchtitan.has_local_heads and not (model.attention.qk_norm or model.moe is not None)


def compile_and_dtensor_marker(ctx: Context, block: BlockRole) -> Callable[[Op], Op]:
    """A function that marks an op of this block: whether it is compiled, and where it works on distributed tensors."""
    compile_, grouped = ctx.framework.compile, ctx.framework.experts != "sequential"
    distributed: BoolK = ctx.has_tp
    any_tp = bool(any_true(ctx.has_tp))

    def mark(op: Op) -> Op:
        if op.part == "fsdp" or op.family in ("dp", "host"):
            return op
        if block == "embedding":
            compiled = False
        elif block == "head":
            compiled = compile_ and op.part == "loss"
        elif block == "experts":
            compiled = compile_ and not _is_eager(op, grouped)
        else:
            compiled = compile_
        dispatched: BoolK = False if _is_local(op, ctx) or not any_tp else distributed
        if any_tp and op.role == "sum" and op.sum_of not in _LOCAL_TENSORS:
            op = op._replace(view=logical_not(dispatched))
        if not compiled and op.adds_to_view:
            op = op._replace(view=False)
        return op._replace(compiled=compiled, dtensor=dispatched, view_calls=_views(op, ctx))

    return mark


_LOCAL_TENSORS: frozenset[TensorUse] = frozenset({"residual", "experts_input"})
"""Tensors whose gradients are local, and summed in place. Sums of gradients of distributed tensors are new ones
(torch/csrc/autograd/input_buffer.cpp; tt4-tp2-ep4-dsv2lite-8l-traced)."""
_LOCAL_STEPS: frozenset[LayerStep] = frozenset(
    {"rope", "core", "core_beside", "kv_exchange", "join", "activation", "residual"}
)
"""Steps on plain tensors in layers like Llama's."""


def _is_eager(op: Op, grouped: bool) -> bool:
    """Whether an op of a block with experts runs outside what is compiled: dispatch, sums, experts one by one."""
    in_loop = op.part == "experts" and not grouped and not op.frame
    return op.role == "sum" or op.step in ("routed", "relayout", "residual") or in_loop


def _is_local(op: Op, ctx: Context) -> bool:
    """Whether an op works on plain tensors under tensor parallelism too.

    In a layer of experts all are but changes of layout, the gate's and the shared experts' products
    (``use_local_input``, ``use_local_output``: llama4/infra/parallelize.py).
    """
    if op.role == "sum":
        return False
    if op.step in ("routed", "router", "shared_activation") or (op.part == "experts" and not op.frame):
        return True
    return has_local_qkv(ctx) and op.step in _LOCAL_STEPS


_VIEWS = {
    "linear": 5.0, "dgrad": 5.0, "wgrad": 5.0, "norm": 1.0, "collective": 1.0, "join": 6.0, "core": 6.0, "split": 2.0,
}  # fmt: skip
"""Ops without a kernel, as counted on torchtitan's models under tensor parallelism by a mode that sees every op: a
linear transposes its weight and folds and unfolds its input, three views, and has a turn to and from a distributed
tensor; its two gradients share seven views and three turns; a norm and a change of layout have one turn. Rotations of
halves (Qwen3) slice, of pairs (DeepSeek) view as complex numbers; heads are split off, transposed, joined."""


def _views(op: Op, ctx: Context) -> float:
    """Ops without a kernel around an op, where tensors are distributed or a mode sees every op. [-]"""
    if isinstance(op.work, Gemm):
        return _VIEWS[op.role if op.role in ("dgrad", "wgrad") else "linear"]
    if isinstance(op.work, Collective):
        return _VIEWS["collective"]
    if op.step == "norm":
        return _VIEWS["norm"]
    if has_local_qkv(ctx) or op.role == "sum":
        return 0.0
    if op.step == "rope":
        return ctx.model.attention_kind.torchtitan.views_of_rotation
    return _VIEWS.get(op.step, 0.0)


def weight_gradient_bytes_per_param(ctx: Context) -> float:
    """Bytes of a linear's gradient before it is reduced or added; 0 where it is the lasting one itself. [B/param]"""
    if ctx.precision_mode == "uniform":
        return float(ctx.activation_element_bytes) if ctx.accumulating else 0.0
    return 2.0


def weight_copy(b: TapeBuilder, name: str, params: FloatK, like: str = "cast_down") -> str:
    """The bf16 copy of an fp32 weight, which the graph keeps for the input gradient."""
    copy = b.tensor(f"{name}.weight16", 2.0 * params, "weight_copy", grad=False)
    return b.add(
        Op(f"{name}.weight_cast", "memory_bound", MemoryBound(CAST * params, like), (), (copy,), purpose="weight_cast")
    )


def cast(
    b: TapeBuilder, x: str, name: str, elements: FloatK, element: float = 2.0, back_like: str | None = None,
    use: TensorUse = "",
) -> str:  # fmt: skip
    """A cast between bf16 and fp32 to ``element`` bytes, and back in the backward pass, there as ``back_like``.

    ``name`` is the linear that reads it, where one does; ``use`` what the result is used for.
    """
    out = b.tensor(f"{name}.{'bf16' if element == 2 else 'fp32'}", element * elements, use=use)
    like, opposite_like = ("cast_down", "cast_up") if element == 2 else ("cast_up", "cast_down")
    back_like = back_like or opposite_like
    moved = CAST * elements
    return parts.memory_bound_op(
        b, f"{name}.cast", (x,), out, bytes_=moved, back_bytes=moved, like=like, back_like=back_like, casts_for=name
    )


def cast_shared_input(b: TapeBuilder, ctx: Context, x: str, name: str, elements: FloatK) -> tuple[str, bool]:
    """The input of several linears, and whether each casts it for itself under autocast.

    A module compiled by itself is handed the norm's fp32 output and casts it once for all of its linears.
    """
    if not casts_linear_inputs(ctx) or not compiles_modules_separately(b, ctx):
        return x, True
    return cast(b, x, name, elements, use="cast_once"), False


def linear(
    b: TapeBuilder, ctx: Context, x: str, name: str, *, m: FloatK, n: FloatK, k: FloatK, wide_input: bool = False,
    reads: tuple[str, ...] = (), purpose: Purpose = "", registered_at: int = 0, step: LayerStep = "",
    behind_cut: bool = False,
) -> str:  # fmt: skip
    """A product in the compute dtype that keeps its input; ``wide_input`` where autocast finds an fp32 input.

    ``behind_cut``: DDP may cut a compiled block in front of it (:func:`is_compiled_block_split_by_ddp`).
    """
    if float8.is_converted(ctx, name):
        return float8.linear(
            b, ctx, x, name, m=m, n=n, k=k, grad_bytes_per_param=weight_gradient_bytes_per_param(ctx), purpose=purpose,
            registered_at=registered_at, step=step,
        )  # fmt: skip
    if ctx.fp8 is not None and purpose != "output":
        return te_linear(
            b, ctx, x, name, m=m, n=n, k=k, grad_bytes_per_param=weight_gradient_bytes_per_param(ctx), purpose=purpose,
            registered_at=registered_at, step=step,
        )  # fmt: skip
    if casts_linear_inputs(ctx):
        reads = (*reads, weight_copy(b, name, n * k))
        if wide_input and (not is_in_compiled_block(b, ctx) or (behind_cut and is_compiled_block_split_by_ddp(b, ctx))):
            x = cast(b, x, name, m * k)
    return parts.linear(
        b,
        ctx,
        x,
        name,
        m=m,
        n=n,
        k=k,
        saves=(x,),
        reads=reads,
        grad_bytes_per_param=weight_gradient_bytes_per_param(ctx),
        purpose=purpose,
        registered_at=registered_at,
        step=step,
    )


def gather_sequence(b: TapeBuilder, ctx: Context, x: str, name: str, width: float) -> str:
    """All-gather of the sequence before a sublayer, one for all of its linears, which keep its output.

    Gathering along the second dimension copies chunks together unless the micro-batch has one sequence; the backward
    reduce-scatter always copies its input together first (_functional_collectives.py).
    """
    if not any_true(ctx.has_tp):
        return x
    full = parts.sp_gather(b, ctx, parts.tp_copy(b, ctx, x, name, width), name, width)
    full = _chunks(b, ctx, full, f"{name}.gather_copy", width, forward=ctx.micro_batch > 1, backward=True)
    if not is_in_compiled_block(b, ctx):  # the argument of the sublayer's forward
        parts.hold_in_module(b, "attention" if name == "attn" else name, full)
    return full


def gather_sequence_as_local_tensor(b: TapeBuilder, ctx: Context, x: str, name: str, width: float) -> str:
    """As :func:`gather_sequence` before a sublayer on plain tensors (``use_local_input``), whose gradient is taken to
    be the same on every rank: each cuts out its shard, and nothing is reduced."""
    if not any_true(ctx.has_tp):
        return x
    full = parts.tp_copy(b, ctx, x, name, width)
    out = b.tensor(f"{name}.full", ctx.tokens * width * ctx.activation_element_bytes)
    shard_bytes = ctx.tokens / ctx.tp * width * ctx.activation_element_bytes
    full = b.add(
        Op(f"{name}.all_gather", "tp",
        Collective("all_gather", "tp", ctx.tokens * width * ctx.activation_element_bytes), (full,),
           (out,), present=ctx.gathers_sequence, stream="tp",
           back=OpBackward(work=MemoryBound(2.0 * shard_bytes, "copy"), family="memory_bound",
           present=ctx.gathers_sequence))
    )  # fmt: skip
    return _chunks(b, ctx, full, f"{name}.gather_copy", width, forward=ctx.micro_batch > 1, backward=None,
                   use="experts_input")  # fmt: skip


def sum_gradients_over_tp(b: TapeBuilder, x: str, name: str, nbytes: FloatK, present: BoolK) -> str:
    """``x``, whose gradient is a partial sum on every rank of tp and is all-reduced, a copy of it.

    A layout that says so at once (``redistribute`` of a ``Partial``: tensor/_api.py, placement_types.py), behind both
    products that it comes from; ``_c10d_functional.all_reduce`` leaves its input as it is.
    """
    if not any_true(present):
        return x
    summed, copied = b.tensor(f"{name}.sum_gradients", nbytes), b.tensor(f"{name}.gradient_copy", nbytes)
    reduce = OpBackward(
        work=Collective("all_reduce", "tp", nbytes), family="tp", present=present, view=True, stream="tp"
    )
    copy = OpBackward(work=MemoryBound(2.0 * nbytes, "copy"), family="memory_bound", present=present)
    b.add(Op(f"{name}.sum_gradients", "memory_bound", None, (x,), (summed,), view=True, launches=0, back=reduce))
    return b.add(
        Op(f"{name}.gradient_copy", "memory_bound", None, (summed,), (copied,), view=True, launches=0, back=copy)
    )  # fmt: skip


def scatter_sequence(b: TapeBuilder, ctx: Context, x: str, name: str, width: float) -> str:
    """Reduce-scatter of a row-parallel linear's partial sums along the sequence, after a copy of its chunks."""
    if not any_true(ctx.has_tp):
        return x
    hold_until_tp_scatter(b, ctx, x, name)
    x = _chunks(b, ctx, x, f"{name}.scatter_copy", width, forward=True, backward=ctx.micro_batch > 1)
    out = parts.tp_reduce(b, ctx, x, name, width)
    parts.release_module_locals(b, f"{name} call")
    return out


def hold_until_tp_scatter(b: TapeBuilder, ctx: Context, x: str, name: str) -> None:
    """Input or output of a linear whose sums are scattered by a hook behind it: its call has both until then."""
    if any_true(ctx.has_tp) and not is_in_compiled_block(b, ctx):
        parts.hold_in_module(b, f"{name} call", x)


def _chunks(
    b: TapeBuilder, ctx: Context, x: str, name: str, width: float, *, forward: BoolK, backward: BoolK | None,
    use: TensorUse = "",
) -> str:  # fmt: skip
    """A copy of chunks on the ways where there is one; ``backward`` None: the gradient passes as it is."""
    moved = 2.0 * ctx.tokens * width * ctx.activation_element_bytes
    out = b.tensor(name, ctx.tokens * width * ctx.activation_element_bytes, use=use)
    back = OpBackward(0.0, 0)
    if backward is not None:
        work = MemoryBound(where(backward, moved, 0.0), "copy")
        back = OpBackward(work=work, family="memory_bound", present=ctx.gathers_sequence, view=logical_not(backward))
    return b.add(
        Op(name, "memory_bound", MemoryBound(where(forward, moved, 0.0), "copy"), (x,), (out,),
        present=ctx.gathers_sequence,
           view=logical_not(forward), back=back)
    )  # fmt: skip


def partial_weight_gradient_all_reduces(ctx: Context) -> list[Op]:
    """Gradients of the two norms are partial under sequence parallelism: a small all-reduce each.

    So is that of a product whose output all heads share, as the latent and the one rotated key of latent attention."""
    if not any_true(ctx.gathers_sequence):
        return []
    hidden = float(ctx.model.hidden)
    payloads = [2.0 * hidden, 2.0 * hidden]
    if shared := ctx.model.attention_kind.shared_columns(ctx.model.attention):
        payloads.append(2.0 * hidden * shared)
    works = [Collective("all_reduce", "tp", payload) for payload in payloads]
    return [
        Op(f"fsdp.partial_gradient.{i}", "tp", work, present=ctx.gathers_sequence, stream="tp", part="fsdp")
        for i, work in enumerate(works)
    ]
