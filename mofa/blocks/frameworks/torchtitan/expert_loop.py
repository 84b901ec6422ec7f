"""torchtitan's experts one after the other (models/moe/moe.py, ``_run_experts_for_loop``; ``use_grouped_mm: false``).

The host waits for the experts' numbers of tokens and splits the rows. It runs each expert's three products by
themselves, of slices of weights that hold all experts. Back, each slice's gradient is written into zeros as large as
all experts' weight (``select_backward``), and these are added up: an expert's three matrices move what all experts' do.
"""

from __future__ import annotations

from mofa.blocks import parts
from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import where
from mofa.blocks.frameworks.torchtitan.ffn import gated_activation
from mofa.blocks.frameworks.torchtitan.linear import CAST, cast, casts_linear_inputs, weight_copy
from mofa.blocks.frameworks.torchtitan.registration import EXPERTS, MATRIX
from mofa.blocks.op import FloatK, Op, OpBackward, TapeBuilder, Tensor
from mofa.blocks.work import GroupedGemm, HostSync, MemoryBound

NODES = 3.0
"""Nodes of autograd's graph from a slice's product to its weight: a cast (a view without autocast), a transposition, a
selection. [-]"""
SLICES = 2.0
"""Views of a weight in front of each product: one expert's, transposed. [-]"""


def expert_output_element_bytes(ctx: Context) -> int:
    """Bytes of an element of the experts' output, which is cast to no other format. [B]"""
    return 2 if casts_linear_inputs(ctx) else ctx.activation_element_bytes


def loop_over_experts(
    b: TapeBuilder, ctx: Context, x: str, rows: ArrayK, memory_rows: ArrayK, weights: tuple[str, ...]
) -> str:  # fmt: skip
    """The loop over experts, and the two copies that put their outputs together.

    Under autocast each product casts its slice of the weight and the rows that it is given: neither is a parameter, so
    that the cache of casts knows none of them. Of shapes that the library of products does not remember the first and
    the second matrix up share one.

    ``rows`` are multiplied, ``memory_rows`` are allocated.
    """
    spec = ctx.model.moe
    assert spec is not None
    hidden, local, e = float(ctx.model.hidden), ctx.local_experts, expert_output_element_bytes(ctx)
    f = spec.expert_hidden / ctx.etp
    casts = casts_linear_inputs(ctx)
    given = ctx.residual_element_bytes * hidden
    # the counts are copied to the host; back, the slice without padding is copied into zeros
    b.part = "experts"
    b.add(Op("experts.counts", "memory_bound", MemoryBound(0.0), launches=1, back=OpBackward(0.0, 0)))
    b.add(Op("moe.sync.experts", "host", HostSync()))
    sliced, split = b.tensor("experts.rows", memory_rows * given), b.tensor("experts.split", memory_rows * given)
    b.add(Op("experts.slice", "memory_bound", None, (x,), (sliced,), view=True, launches=0,
             back=OpBackward(3.0 * rows * given, 2, like="copy")))  # fmt: skip
    x = b.add(Op("experts.split", "memory_bound", None, (sliced,), (split,), view=True, launches=0, step="split",
                 back=OpBackward(2.0 * rows * given, 1, like="copy")))  # fmt: skip
    since = len(b.ops)

    def product(which: str, source: str, n: FloatK, k: FloatK, reads: tuple[str, ...] = ()) -> str:
        name = f"experts.{which}"
        params = local * n * k
        if casts:
            if which != "w2":
                source = cast(b, source, name, memory_rows * k)
            reads = (*reads, weight_copy(b, name, params))
        out = b.tensor(f"{name}.out", memory_rows * n * e)
        work = GroupedGemm(rows, local, n, k, ctx.gemm_format, sequential=True, uneven=ctx.expert_rows_deviation)
        new = 0.0 if which == "w3" else local
        return b.add(
            Op(name, "grouped_gemm", work, (source, *reads), (out,), (source,), weight=name, weight_params=params,
               weight_bytes=n * k * e, num_weights=1, split_views=SLICES * local,
               kernel_choices=new * ctx.unseen_rows_share,
               kernel_loads=new * ctx.expected_first_use_kernels / 4.0, mean_loops_before=ctx.mean_loops_before,
               registered_at=EXPERTS + MATRIX[which])
        )  # fmt: skip

    act = gated_activation(
        b, ctx, "experts", lambda w: product(w, x, f, hidden), memory_rows * f, rows * f, e, fused=False
    )
    y = product("w2", act, hidden, f, weights)
    for i, op in enumerate(b.ops[since:], since):
        back = op.back and op.back._replace(launches=local * op.back.launches)
        b.ops[i] = op._replace(expert_loops=local, launches=local * op.launches, back=back)
    parts.hold_in_module(b, "experts loop", y)
    moved = 2.0 * rows * hidden * e
    joined, out = (
        b.tensor("experts.joined", memory_rows * hidden * e),
        b.tensor("experts.padded", memory_rows * hidden * e),
    )
    b.add(
        Op(
            "experts.cat",
            "memory_bound",
            MemoryBound(moved, "copy"),
            (y,),
            (joined,),
            split_views=local,
            back=OpBackward(0.0, 0),
        )
    )
    b.add(Op("experts.vstack", "memory_bound", MemoryBound(moved, "copy"), (joined,), (out,), back=OpBackward(0.0, 0)))
    parts.release_module_locals(b, "experts loop")
    b.part = ""
    return out


def with_full_size_expert_gradients(ops: list[Op], tensors: dict[str, Tensor], ctx: Context) -> list[Op]:
    """A backward tape whose experts' weight gradients are written into zeros as large as all experts', and added up.

    The first expert's become the sum, those of later ones are added in place and let go. What is made of an input's
    gradient comes before what is made of the weight's.
    """
    out: list[Op] = []
    pending: list[Op] = []
    local = ctx.local_experts
    wide = 4.0 if casts_linear_inputs(ctx) else float(expert_output_element_bytes(ctx))
    lasting = ctx.precision_mode == "mixed" or ctx.accumulating  # else it is the parameter's own from the beginning
    for op in ops:
        if pending and not (op.casts_for and op.role in ("backward", "sum")):
            out, pending = [*out, *pending], []
        if op.role != "wgrad" or op.part != "experts":
            out.append(op)
            continue
        name = op.origin
        grad, last = f"gW:{name}", f"gW:{name}"
        (made,) = op.writes
        expert_bytes = tensors[made].bytes
        params = expert_bytes / expert_output_element_bytes(ctx)
        tensors[grad] = Tensor(grad, expert_bytes, "grad", grad=False)
        out.append(op._replace(writes=(grad,)))
        if casts_linear_inputs(ctx):
            last = f"{grad}.fp32"
            tensors[last] = Tensor(last, 4.0 * params, "grad", grad=False)
            pending.append(Op(f"{name}.grad_cast", "memory_bound", MemoryBound(CAST * params * local, "cast_up"),
            (grad,),
                           (last,), launches=local, expert_loops=local, role="grad_cast", origin=name,
                           part=op.part))  # fmt: skip
        summed_bytes = wide * params * local
        tensors[made] = Tensor(made, summed_bytes if lasting else 0.0, "grad", grad=False, weight=name)
        pending += [
            Op(f"{name}.zeros.whole", "memory_bound", MemoryBound(summed_bytes * local, "zero"), launches=local,
               expert_loops=local, autograd_nodes=0.0, role="whole", part=op.part),
            Op(f"{name}.copy.whole", "memory_bound", MemoryBound(2.0 * summed_bytes, "copy"), launches=local,
               expert_loops=local, autograd_nodes=0.0, role="whole", part=op.part),
            Op(f"{name}.whole", "memory_bound", MemoryBound(3.0 * summed_bytes * (local - 1.0), "residual_add"),
            (last,),
               (made,), scratch=where(local > 1, summed_bytes, 0.0), launches=local - 1.0, expert_loops=local,
               autograd_nodes=NODES, role="whole", origin=name, part=op.part),
        ]  # fmt: skip
    return [*out, *pending]


def with_parameter_nodes_behind_loop(ops: list[Op]) -> list[Op]:
    """The backward tape with what the parameters' own nodes do behind the loop, in which it would end it."""
    own = [i for i, op in enumerate(ops) if op.role == "accumulate" and op.part == "experts"]
    if not own:
        return ops
    end = max(i for i, op in enumerate(ops) if op.role == "whole") + 1
    moved = [ops[i] for i in own if i < end]
    left = [op for i, op in enumerate(ops[:end]) if i not in own]
    return [*left, *moved, *ops[end:]]
