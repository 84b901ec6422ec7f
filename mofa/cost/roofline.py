"""The kernels of a strategy against what its GPU can do: FLOPs, bytes and seconds by kind."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from mofa.blocks.build import layer_kind
from mofa.blocks.tapes import kept_layer_label, layer_label
from mofa.blocks.work import Attention, Format, Gemm, GroupedGemm, MemoryBound
from mofa.cost.block.costs import BlockCosts
from mofa.cost.block.durations import device_seconds
from mofa.specs.model import ModelSpec
from mofa.specs.products import ELEMENT_BYTES, FALLBACK

RESULT_BYTES = ELEMENT_BYTES["bf16"]
"""Of an element of a result, whatever the format of its operands. [B]"""
KINDS = {Gemm: "gemm", GroupedGemm: "grouped_gemm", Attention: "attention", MemoryBound: "memory_bound"}


@dataclass
class KernelTotals:
    """Sums over kernels of one kind."""

    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    peak_flops_per_s: float = 0.0
    """The highest of their formats. [FLOP/s]"""


def kernel_totals_by_kind(costs: BlockCosts, model: ModelSpec) -> dict[str, KernelTotals]:
    """FLOPs, least bytes and seconds of the kernels of one GPU, by kind: a micro-batch forth and back.

    Of every layer, the embedding and the head, as if one pipeline stage had them all; copies that recomputation makes
    are counted where the backward has them.

    Parameters
    ----------
    costs, model
        Of one candidate, with its tapes and what times them; its model.

    Notes
    -----
    Bytes are those of every operand and every result once, as a roofline counts them (Williams, Waterman and Patterson
    2009, doi 10.1145/1498765.1498785); memory-bound kernels have theirs of the tape.
    """
    totals: dict[str, KernelTotals] = defaultdict(KernelTotals)
    peaks = costs.machine.cluster.gpu.peak_flops_per_s
    counts = Counter(layer_kind(model, i) for i in range(model.num_layers))
    layers = {layer_label(kind, spec): number for kind, number in counts.items() for spec in costs.blocks}
    of_keeping_layers = {kept_layer_label(name) for name in layers}  # which are counted under their plain labels
    for name, block in costs.tapes.items():
        if name in of_keeping_layers:
            continue
        times = layers.get(name, 1)
        for tape in (block.forward, block.backward):
            for op, seconds in zip(tape.ops, device_seconds(tape.ops, costs.machine), strict=True):
                work = op.work
                kind = KINDS.get(type(work))
                if kind is None or not np.all(op.present):
                    continue
                total = totals[kind]
                total.seconds += times * float(seconds)
                total.bytes += times * float(least_bytes_of_work(work))
                total.flops += times * float(getattr(work, "flops", 0.0))
                format_: Format = getattr(work, "format", "bf16")
                peak = peaks.get(FALLBACK.get(format_, format_), peaks["bf16"])
                total.peak_flops_per_s = max(total.peak_flops_per_s, peak.value)
    return {kind: totals[kind] for kind in KINDS.values() if totals[kind].seconds > 0.0}


def least_bytes_of_work(work: object) -> float:
    """What a kernel moves at least: every operand and result once. [B]

    Examples
    --------
    >>> least_bytes_of_work(Gemm(m=2.0, n=3.0, k=4.0))  # (8 + 12) elements read, 6 written
    52.0
    """
    if isinstance(work, Gemm):
        m, n, k, count = (_plain(value) for value in (work.m, work.n, work.k, work.count))
        return count * (ELEMENT_BYTES[work.format] * (m + n) * k + RESULT_BYTES * m * n)
    if isinstance(work, GroupedGemm):
        rows, groups, n, k = (_plain(value) for value in (work.rows, work.groups, work.n, work.k))
        element = ELEMENT_BYTES[work.format]
        if work.wgrad:
            return element * rows * (n + k) + RESULT_BYTES * groups * n * k
        return element * (rows * k + groups * n * k) + RESULT_BYTES * rows * n
    if isinstance(work, Attention):
        queries = _plain(work.batch) * _plain(work.q_len)
        of_queries, of_keys = queries * _plain(work.heads), queries * _plain(work.groups)
        forth = RESULT_BYTES * (work.d_qk + work.d_v) * (of_queries + of_keys)
        return 2.0 * forth if work.backward else forth  # gradients of all four beside them
    return _plain(work.bytes) if isinstance(work, MemoryBound) else 0.0


def _plain(value: object) -> float:
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])
