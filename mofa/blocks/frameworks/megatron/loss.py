"""Megatron's cross entropy over a vocabulary that tensor parallelism splits: eager, fused by torch.compile, or
Transformer Engine's.

Logits are ``elements`` of one micro-batch on one rank, in bf16. No variant copies them to another layout: targets are
transposed instead (megatron_core 0.16.1, models/common/language_module/language_module.py).
"""

from __future__ import annotations

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import where
from mofa.blocks.op import WRITES, Op, OpBackward, ScratchSequence, TapeBuilder
from mofa.blocks.work import Collective, MemoryBound


def cross_entropy(b: TapeBuilder, ctx: Context, logits: str, elements: ArrayK) -> str:
    """The loss of every token, as ``cross_entropy_fusion`` says."""
    fusion = ctx.framework.cross_entropy_fusion
    if fusion == "te":
        return _transformer_engine(b, ctx, logits, elements)
    return _compiled(b, ctx, logits, elements) if fusion == "native" else _eager(b, ctx, logits, elements)


def _eager(b: TapeBuilder, ctx: Context, logits: str, elements: ArrayK) -> str:
    """In place on one fp32 copy, which is kept as the softmax (tensor_parallel/cross_entropy.py).

    Forward reads 2 and writes 4 bytes an element for the copy, then max (4), subtract, exp (8 each), sum (4) and divide
    (8) in place: 38. Backward scales in place (8) and casts (6).
    """
    back = OpBackward(14.0 * elements, 4, like="megatron loss_bwd")
    loss = _softmax(b, ctx, logits, elements, 38.0, "megatron loss_fwd", 12, back)
    return _all_reduced(b, ctx, loss, 3)


def _compiled(b: TapeBuilder, ctx: Context, logits: str, elements: ArrayK) -> str:
    """The same functions compiled one by one, and their small sums in one collective (fusions/fused_cross_entropy.py).

    As PyTorch 2.11's Inductor compiles them. Forward ends in the fp32 copy: the copy with its maximum (6 bytes an
    element), exp with its sum (8), the division (8). Exp passes through a tensor of its own beside the logits, as the
    recorded beginning of h200-te1-falcon3-10b-4l-nativeloss shows. Backward puts the targets' terms into a copy of the
    softmax (8) and multiplies that into the softmax and the bf16 gradient (10). All three are there at once.
    """
    back = OpBackward(18.0 * elements, 3, 4.0 * elements, like="megatron compiled_loss_bwd")
    exp = ScratchSequence((4.0 * elements,), (WRITES + 1, WRITES + 2, 0, ~0, WRITES))
    loss = _softmax(b, ctx, logits, elements, 22.0, "megatron compiled_loss_fwd", 6, back, exp)
    return _all_reduced(b, ctx, loss, 2)


def _softmax(
    b: TapeBuilder,
    ctx: Context,
    logits: str,
    elements: ArrayK,
    per_element: float,
    like: str,
    launches: int,
    back: OpBackward,
    temporaries: ScratchSequence | None = None,
) -> str:
    soft = b.tensor("loss.softmax", 4.0 * elements, grad=False)
    loss = b.tensor("loss", 4.0 * ctx.tokens)
    statistics = b.tensor("loss.statistics", 12.0 * ctx.tokens, grad=False)
    return b.add(
        Op("loss.cross_entropy", "memory_bound", MemoryBound(per_element * elements, like), (logits,),
        (loss, soft, statistics),
           (soft,), launches=launches, back=back, order=temporaries,
           scratch=temporaries.sizes[0] if temporaries is not None else 0.0)
    )  # fmt: skip


def _transformer_engine(b: TapeBuilder, ctx: Context, logits: str, elements: ArrayK) -> str:
    """Transformer Engine's kernels, which add up in fp32 registers alone (te/pytorch/cross_entropy.py).

    In 2.20.2 one kernel reads the bf16 logits and copies them (4 bytes an element); backward reads the copy and writes
    the gradient over it (4). Up to 2.19 (``loss_copies_logits: false``) forward reads the logits twice and writes their
    gradient over them (6), which backward scales (4). A token's maximum and sum are kept beside it. Split by tp,
    four numbers a token are gathered from all ranks and joined by a small kernel.
    """
    copies = ctx.framework.loss_copies_logits
    loss = b.tensor("loss", 4.0 * ctx.tokens)
    statistics = b.tensor("loss.statistics", 8.0 * ctx.tokens, grad=False)
    row = 16.0 * ctx.tokens
    local = b.tensor("loss.local", where(ctx.tp > 1, row, 0.0), grad=False)
    saved_logits = logits
    writes: tuple[str, ...] = (loss, statistics, local)
    if copies:
        saved_logits = b.tensor("loss.logits", 2.0 * elements, grad=False)
        writes = (*writes, saved_logits)
    back = OpBackward(
        work=MemoryBound(4.0 * elements), family="memory_bound", launches=1, view=True, overwrites_saved=True
    )
    b.add(
        Op("loss.cross_entropy", "memory_bound", MemoryBound((4.0 if copies else 6.0) * elements), (logits,), writes,
           (saved_logits, statistics), launches=1 if copies else 2, back=back)
    )  # fmt: skip
    gathered = b.tensor("loss.gathered", row * ctx.tp, grad=False)
    b.add(Op("loss.all_gather", "tp", Collective("all_gather", "tp", row * ctx.tp), (local,), (gathered,),
             present=ctx.tp > 1, stream="tp"))  # fmt: skip
    joined = b.tensor("loss.joined", 4.0 * ctx.tokens)
    return b.add(
        Op("loss.post", "memory_bound", MemoryBound(row * ctx.tp), (loss, gathered), (joined,), present=ctx.tp > 1,
           view=True, back=OpBackward(0.0, 0))
    )  # fmt: skip


def _all_reduced(b: TapeBuilder, ctx: Context, loss: str, collectives: int) -> str:
    """Three numbers a token are summed over tensor parallelism: maximum, the target's logit, the sum of powers."""
    reduced = b.tensor("loss.reduced", 4.0 * ctx.tokens)
    return b.add(
        Op("loss.all_reduce", "tp", Collective("all_reduce", "tp", 12.0 * ctx.tokens), (loss,), (reduced,),
           present=ctx.tp > 1, view=True, stream="tp", launches=collectives)
    )  # fmt: skip
