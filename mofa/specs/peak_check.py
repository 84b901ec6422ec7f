"""Whether a GPU's curves can be of that GPU: none passes its peaks, none stays far below them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mofa.specs.curves import AttentionCurve, GpuCurves
from mofa.specs.products import FALLBACK

DEPTH = 4096
"""Depth at which products are compared with their peak: a few overheads long. [elements]"""
LONG = 16384.0
"""Length of the sequences at which attention is compared with its peak, unless shorter ones were measured. [tokens]"""
HEADS = 32
"""Heads of those sequences."""
SLOW = 0.1
"""Share of its peak below which a curve is doubted. [-]"""
CACHED = 2.0
"""Share of the memory bandwidth that memory-bound ops may seem to reach, as the L2 serves some reads. [-]"""
COPIES = ("eager copy", "default")
"""Memory-bound ops that no cache helps."""


class ReachedShare(NamedTuple):
    """What a curve reaches at its best."""

    path: str
    """Of the curve within the GPU."""
    rate: float
    """[FLOP/s] or [B/s]"""
    peak: float
    peak_path: str
    unit: str
    allowed: float = 1.0
    """Share of the peak that it may reach. [-]"""

    def sentence(self, words: str) -> str:
        """What it reaches, and of which peak."""
        rate, peak = (f"{value / 1e12:.4g} T{self.unit}" for value in (self.rate, self.peak))
        return f"{self.path} reaches {rate}, {words} {self.peak_path} ({peak})"


def reached_shares(
    curves: GpuCurves, peaks: Mapping[str, float], bandwidth_bytes_per_s: float
) -> Iterator[ReachedShare]:
    """What each curve of a GPU reaches, beside its peak.

    Products are taken :data:`DEPTH` deep with their tiles full, attention over sequences of :data:`LONG` tokens,
    memory-bound ops by the bytes that their form counts. A curve whose format has no peak is left out.
    """
    for format_, gemm in curves.gemm.items():
        if (peak := peaks.get(FALLBACK.get(format_, format_))) is not None:
            rate = max(rate for _, _, rate in gemm.form.tiles) * DEPTH / (DEPTH + gemm.form.k_overhead)
            yield ReachedShare(f"curves.gemm.{format_}", rate, peak, _peak_path(format_), "FLOP/s")
    for format_, grouped in curves.grouped_gemm.items():
        if (peak := peaks.get(FALLBACK.get(format_, format_))) is not None:
            form = grouped.form
            rate = form.large_rate * DEPTH / (DEPTH + form.large_k_overhead)
            yield ReachedShare(f"curves.grouped_gemm.{format_}", rate, peak, _peak_path(format_), "FLOP/s")
    if "bf16" in peaks:
        for key, attention in curves.attention.items():
            rate = _attention_rate(key, attention)
            yield ReachedShare(f"curves.attention.{key}", rate, peaks["bf16"], _peak_path("bf16"), "FLOP/s")
    for key, stream in curves.stream.items():
        allowed = 1.0 if key in COPIES else CACHED
        path, rate = f"curves.stream.{key}", stream.form.bytes_per_s
        yield ReachedShare(path, rate, bandwidth_bytes_per_s, "memory_bandwidth_bytes_per_s", "B/s", allowed)


def passes_peak(shares: Iterator[ReachedShare]) -> str | None:
    """Why curves cannot be this GPU's, of the first that passes its peak; None where none does."""
    for share in shares:
        if share.rate > share.allowed * share.peak:
            return share.sentence("above" if share.allowed == 1.0 else f"over {share.allowed:g} times")
    return None


def slow_curves(shares: Iterator[ReachedShare]) -> tuple[ReachedShare, ...]:
    """Curves that reach less than a tenth of their peak.

    Of memory-bound ops copies alone count, as others issue more; the first FlashAttention is slow by its own paper.
    """
    return tuple(s for s in shares if s.rate < SLOW * s.peak and not _is_slow_by_nature(s.path))


def _is_slow_by_nature(path: str) -> bool:
    head, _, key = path.removeprefix("curves.").partition(".")
    return (head == "stream" and key not in COPIES) or (head == "attention" and key.startswith("flash1 "))


def _attention_rate(key: str, curve: AttentionCurve) -> float:
    """FLOP/s over the longest sequences that were measured, without a mask: a unit is ``block`` rows against 128 of the
    other side, in two products forward and five back (:func:`mofa.cost.kernels.fitted_forms.attention_s`)."""
    _, direction, sizes = key.split()
    d_qk, d_v = (float(size) for size in sizes.split("/"))
    widths = d_qk + d_v if direction == "fwd" else 3 * d_qk + 2 * d_v
    length, form = min(curve.ranges.get("q", (LONG, LONG))[1], LONG), curve.form
    units = HEADS * length / form.block
    seconds = form.floor_s + form.unit_s * max(units / form.slots, 1.0) * length / 128
    return 2.0 * units * form.block * length * widths / seconds


def _peak_path(format_: str) -> str:
    return f"peak_flops_per_s.{format_.split('_')[0]}"
