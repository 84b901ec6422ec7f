"""What PyTorch's checkpoint makes of a block's ops: tensors that autograd saves go through hooks of Python.

``torch.utils.checkpoint`` (not its reentrant form) puts a holder where a tensor would have been saved. It saves the
tensor anew where it is made again, compares both and hands it out to autograd (``_checkpoint_hook``,
``_recomputation_hook``, ``check_recomputed_tensors_match``). A compiled block has its checkpoint inside and none of
this.
"""

from __future__ import annotations

from dataclasses import replace

from mofa.blocks.op import Op, Tape
from mofa.blocks.recomputation import OUTSIDE
from mofa.blocks.work import Attention, Gemm, GroupedGemm, MemoryBound

ATTENTION_SAVES = 7
"""Tensors that autograd saves of a fused attention: query, key, value, output, logsumexp and two of its random numbers
(tools/autograd/derivatives.yaml, ``_scaled_dot_product_cudnn_attention``). [-]"""
NORM_SAVES = 3
"""Input, weight and the inverse of the root of the mean square. [-]"""
ROTATION_SAVES = 4
"""Of q and k, turned by cosines and by sines: a table each. [-]"""


def num_saved_tensors(op: Op) -> int:
    """Tensors that autograd saves at an op, weights and tables among them, whoever else keeps them. [-]

    Examples
    --------
    >>> product, addition = Op("wq", "gemm", Gemm(1.0, 1.0, 1.0)), Op("mid.add", "memory_bound", MemoryBound(1.0))
    >>> num_saved_tensors(product), num_saved_tensors(addition)
    (2, 0)
    """
    work = op.work
    if isinstance(work, Attention):
        return ATTENTION_SAVES
    if isinstance(work, Gemm):
        return 2
    if isinstance(work, GroupedGemm):
        return 3  # the ends of the groups too
    if op.purpose == "norm":
        return NORM_SAVES
    if isinstance(work, MemoryBound) and work.like == "rope_heads_fwd":
        return ROTATION_SAVES
    if isinstance(work, MemoryBound) and work.like == "rope_complex":
        return len(op.writes)  # a table for each that is turned
    return len(op.saves)


def mark_saved_tensor_hooks(forward: Tape, *, mode: bool) -> Tape:
    """A block's forward tape with its ops marked as inside a checkpoint of PyTorch's; what is repeated stays marked.

    Parameters
    ----------
    forward
        Of a block that is not one compiled graph.
    mode
        Whether the checkpoint is an op-level one, whose mode of Python every eager op passes.
    """
    return replace(forward, ops=tuple(op if op.region == OUTSIDE else _marked(op, mode) for op in forward.ops))


def _marked(op: Op, mode: bool) -> Op:
    return op._replace(hooked_tensors=float(num_saved_tensors(op)), selective=mode and not op.compiled)
