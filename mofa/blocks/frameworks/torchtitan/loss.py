"""torchtitan's cross entropy: eager in fp32 over all logits or over those split by tp, or compiled."""

from __future__ import annotations

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import all_true, any_true, logical_not, where
from mofa.blocks.frameworks.torchtitan.linear import cast
from mofa.blocks.op import WRITES, Op, OpBackward, ScratchSequence, TapeBuilder
from mofa.blocks.work import Collective, MemoryBound


def cross_entropy(b: TapeBuilder, ctx: Context, logits: str, elements: ArrayK) -> str:
    """Loss of logits with ``elements`` on this rank.

    Eager: an fp32 copy, its log-softmax, which alone is kept; backward the gradient of the negative log-likelihood,
    that of the log-softmax, a cast. Split by tp there is one more temporary each way (tensor/parallel/loss.py) and
    three small all-reduces.
    """
    loss = b.tensor("loss", 4.0 * ctx.tokens)
    width = float(ctx.model.vocab)
    if ctx.framework.compile and ctx.framework.compile_loss:
        return _compiled(b, ctx, logits, elements, loss)
    if ctx.framework.cross_entropy_fusion == "native":
        return _fused(b, ctx, logits, elements, loss)
    split = ctx.has_tp & ctx.framework.loss_parallel
    # the caller holds the logits until the loss is there, the last stage of a pipeline until its backward
    logits_view = b.tensor("logits.held", b.tensors[logits].bytes, grad=False)
    b.add(Op("loss.hold", "memory_bound", None, (logits,), (logits_view,), view=True, launches=0))
    wide = cast(b, logits, "loss", elements, 4) if ctx.activation_element_bytes == 2 else logits
    log_soft = b.tensor("loss.log_softmax", 4.0 * elements, grad=False)
    # measured with its casts, 6 of 14 bytes forward and of 18 backward, which are ops of their own here
    # split: the logits less the largest, their powers, the result; backward the gradient, and products with the result
    each = 4.0 * elements
    both = all_true(split)
    order = ScratchSequence((each, each), (0, 1, ~1, WRITES + 1, ~0)) if both else None
    back_order = ScratchSequence((each, each, each), (0, 1, 2, ~1, WRITES, ~2, ~0)) if both else None
    back = OpBackward(where(split, 32.0, 20.0) * elements, 3, where(split, 8.0, 4.0) * elements,
                like="cross_entropy_bwd", elements=where(split, 32.0 / 20.0, 1.0) * elements * 12.0 / 18.0,
                width=width, order=back_order)  # fmt: skip
    work = MemoryBound(where(split, 32.0, 12.0) * elements, "cross_entropy_fwd",
                  where(split, 32.0 / 12.0, 1.0) * elements * 8.0 / 14.0, width)  # fmt: skip
    b.add(
        Op("loss.cross_entropy", "memory_bound", work, (wide, logits_view),
           (loss, log_soft), (log_soft, *((logits_view,) if ctx.pipelined else ())),
           scratch=where(split, 4.0, 0.0) * elements, launches=where(split, 8.0, 3.0), back=back,
           order=order)
    )  # fmt: skip
    return _reduced(b, ctx, loss)


def _compiled(b: TapeBuilder, ctx: Context, logits: str, elements: ArrayK, loss: str) -> str:
    """Loss compiled by itself: logits and two numbers a row are kept, the gradient is written from them.

    Split by tp, its backward puts -1 at each row's target into fp32 zeros (tensor/parallel/loss.py). Neither depends on
    the gradient that comes in, and the partitioner makes the whole forward: zeros, which no kernel fuses, the sum of
    them and the probabilities, in fp32, which alone is kept. The caller holds the logits until the loss is there.
    """
    width, e = float(ctx.model.vocab), float(ctx.activation_element_bytes)
    split = ctx.has_tp & ctx.framework.loss_parallel
    saved = logits
    reads: tuple[str, ...] = (logits,)
    if any_true(split):
        logits_view = b.tensor("logits.held", b.tensors[logits].bytes, grad=False)
        b.add(Op("loss.hold", "memory_bound", None, (logits,), (logits_view,), view=True, launches=0))
        saved = b.tensor("loss.difference", where(split, 4.0, e) * elements, grad_bytes=e * elements)
        b.add(Op("loss.difference", "memory_bound", MemoryBound(where(split, 12.0 + e, 0.0) * elements), (logits,),
        (saved,),
                 scratch=where(split, 4.0, 0.0) * elements, launches=where(split, 2.0, 0.0), view=logical_not(split),
                 back=OpBackward(0.0, 0)))  # fmt: skip
        reads = (saved, logits_view)
    total = b.tensor("loss.log_sum", 4.0 * ctx.tokens, grad=False)
    moved, back_moved = 2.0 * e * elements, where(split, 4.0 + e, 2.0 * e) * elements
    b.add(Op("loss.compiled", "memory_bound", MemoryBound(moved, "cross_entropy_fwd", elements, width), reads,
             (loss, total), (saved, total), launches=2,
             back=OpBackward(back_moved, 1, like="cross_entropy_bwd", elements=back_moved / (2.0 * e),
                       width=width)))  # fmt: skip
    return _reduced(b, ctx, loss)


def _fused(b: TapeBuilder, ctx: Context, logits: str, elements: ArrayK, loss: str) -> str:
    """FlashAttention's kernel on 16-bit logits: read once, the gradient written beside them, a sum a row kept.

    Metrics of their own (composer's LanguageCrossEntropy and LanguagePerplexity) run PyTorch's eager one on the same
    logits, in fp32, once the backward pass is through; nothing of them is left.
    """
    moved, width = ctx.activation_element_bytes * elements, float(ctx.model.vocab)
    total = b.tensor("loss.log_sum", 4.0 * ctx.tokens, grad=False)
    b.add(Op("loss.fused", "memory_bound", MemoryBound(moved), (logits,), (loss, total), (logits, total),
             back=OpBackward(2.0 * moved, 1)))  # fmt: skip
    again = float(ctx.framework.loss_metrics)
    if again:
        work = MemoryBound(14.0 * again * elements, "cross_entropy_fwd", again * elements, width)
        b.add(Op("loss.metrics", "memory_bound", work, (), (), launches=4 * again))
    return loss


def _reduced(b: TapeBuilder, ctx: Context, loss: str) -> str:
    if not any_true(ctx.has_tp):
        return loss
    reduced = b.tensor("loss.reduced", 4.0 * ctx.tokens)
    split = ctx.has_tp & ctx.framework.loss_parallel
    return b.add(
        Op("loss.all_reduce", "tp", Collective("all_reduce", "tp", 12.0 * ctx.tokens), (loss,), (reduced,),
           present=split, view=True, stream="tp", launches=3)
    )  # fmt: skip
