"""How far a host may be ahead of its device: the driver's queue takes so many launches, and then the host waits."""

from __future__ import annotations

from mofa.blocks.elementwise import FloatK, where
from mofa.blocks.op import Op
from mofa.blocks.work import Gemm, GroupedGemm
from mofa.specs.shared_facts import load_shared_facts

QUEUE = 1024.0
"""Launches that the host may be ahead of its device: 1,017 to 1,038 in the middle of every step that the device bounds
(tt2-pp2-interleaved-llama-10l-traced, tt2-ddp2-qwen17b-28l-1k-traced), 985 with waits for events between kernels on
several streams, 1,021 in an optimizer (te1-qwen30b-4l-first-traced). [-]"""


def num_queued_kernels(op: Op) -> FloatK:
    """Kernels that an op puts into the device's queue: one for each expert of a product on several streams, and the
    memset ahead of a large product. [-]

    ``Op.launches`` are those that take the host as long as a small op each; what a module of Transformer Engine takes
    it goes by the call. A graph's kernels take no places of their own.
    """
    work = op.work
    if op.graph is not None:
        return 0.0
    if (
        isinstance(work, GroupedGemm)
        and not work.sequential
        and (work.kernel == "multi-stream" or op.module_call is not None)
    ):
        return work.groups
    if isinstance(work, Gemm) and work.format == "bf16":
        most = load_shared_facts().libraries.product_outputs_without_counter.value
        return op.launches + where(work.m * work.n * work.count > most, 1.0, 0.0)
    return op.launches
