"""How far a host may be ahead of its device: the driver's queue takes so many launches, and then the host waits."""

from __future__ import annotations

from mofa.blocks.elementwise import FloatK
from mofa.blocks.op import Op
from mofa.blocks.work import GroupedGemm

QUEUE = 1024.0
"""Launches that the host may be ahead of its device: 1,017 to 1,038 in the middle of every step that the device bounds
(tt2-pp2-interleaved-llama-10l-traced, tt2-ddp2-qwen17b-28l-1k-traced), 985 with waits for events between kernels on
several streams, 1,021 in an optimizer (te1-qwen30b-4l-first-traced). [-]"""


def num_queued_kernels(op: Op) -> FloatK:
    """Kernels that an op puts into the device's queue: one for each expert of a product on several streams. [-]

    ``Op.launches`` are those that take the host as long as a small op each; what a module of Transformer Engine takes
    it goes by the call.
    """
    work = op.work
    if (
        isinstance(work, GroupedGemm)
        and not work.sequential
        and (work.kernel == "multi-stream" or op.module_call is not None)
    ):
        return work.groups
    return op.launches
