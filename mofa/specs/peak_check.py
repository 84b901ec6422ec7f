"""Whether curves can be of the GPU or the node that they are of: none passes its peaks, none stays far below them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from mofa.specs.curves import AttentionForm, CollectiveCurve, GemmCurve, GpuCurves, MemoryBoundCurve
from mofa.specs.products import GemmFormat, known_or_stand_in_format

SLOW = 0.1
"""Share of its peak below which a curve is doubted. [-]"""
ROUNDING = 1.001
"""Share of its peak that a curve may reach, as files leave digits out. [-]"""
LARGER_GROUPED = 4.0
"""The same of the larger of a grouped form's two rates: the tile that few measured products took has a rate that is
hardly known (2.55 in the profiles here). [-]"""
CAUSAL = 2.0
"""The same of a causal kernel's blocks, whose half-empty blocks count as whole ones (1.1 here). [-]"""
CACHED = 2.0
"""The same of memory-bound ops, as the L2 serves some reads (1.43 here). [-]"""
HIDDEN_BY_STREAMS = 8.0
"""The same of what products on several streams move: mostly beside other products, so that a fit hardly sees it (4.4
here)."""
HIDDEN_BY_ATTENTION = 32.0
"""The same of what fused attention moves, beside which it computes (25 here)."""
IN_SWITCH = 2.0
"""The same of a collective's bus bandwidth, which reduction in the switch may pass (0.87 here). [-]"""
MEMORY = "memory_bandwidth_bytes_per_s"
COPIES = ("eager copy", "default")
"""Memory-bound ops that no cache helps."""


class CurveAgainstPeak(NamedTuple):
    """What a curve reaches at its best, beside its peak."""

    path: str
    """Of the curve within its file."""
    rate: float
    """[FLOP/s] or [B/s]"""
    peak: float
    peak_path: str
    unit: str
    allowed_share: float = ROUNDING
    """Share of the peak that it may reach. [-]"""

    def reached_peak_text(self, words: str) -> str:
        """What it reaches, and of which peak."""
        rate, peak = (f"{value / 1e12:.4g} T{self.unit}" for value in (self.rate, self.peak))
        return f"{self.path} reaches {rate}, {words} {self.peak_path} ({peak})"


def gpu_curves_against_peak(
    curves: GpuCurves, peaks: Mapping[str, float], bandwidth_bytes_per_s: float
) -> Iterator[CurveAgainstPeak]:
    """What each curve of a GPU reaches, beside its peak: products of endless depth, attention with its slots full, and
    what they move beside the memory's bandwidth.

    A curve whose format has no peak is left out.
    """
    yield from _products("curves.gemm", curves.gemm, peaks)
    yield from _multi_stream_products(curves, peaks)
    yield from _moving(curves, bandwidth_bytes_per_s)
    yield from _streams("curves.stream", curves.stream, bandwidth_bytes_per_s)
    for release, own in curves.releases.items():
        yield from _products(f"curves.releases.{release}.gemm", own.gemm, peaks)
        yield from _bytes(f"curves.releases.{release}.gemm", own.gemm, bandwidth_bytes_per_s, CACHED)
        yield from _streams(f"curves.releases.{release}.stream", own.stream, bandwidth_bytes_per_s)
    for format_, grouped in curves.grouped_gemm.items():
        if (peak := peaks.get(known_or_stand_in_format(format_, peaks))) is not None:
            rates = sorted((grouped.form.small_rate, grouped.form.large_rate))
            for rate, allowed in zip(rates, (ROUNDING, LARGER_GROUPED), strict=True):
                path = f"curves.grouped_gemm.{format_}"
                yield CurveAgainstPeak(path, rate, peak, _peak_path(format_), "FLOP/s", allowed)
    if (peak := peaks.get("bf16")) is not None:
        for key, attention in curves.attention.items():
            path, rate = f"curves.attention.{key}", attention_flops_per_s(key, attention.form)
            yield CurveAgainstPeak(path, rate, peak, _peak_path("bf16"), "FLOP/s")
            yield CurveAgainstPeak(path, rate / attention.form.causal, peak, _peak_path("bf16"), "FLOP/s", CAUSAL)


def collectives_against_link(curves: Mapping[str, CollectiveCurve], bytes_per_s: float) -> Iterator[CurveAgainstPeak]:
    """What each measured collective of a node reaches, beside its link's bandwidth. [B/s]"""
    for key, curve in curves.items():
        rate = max(bus for _, bus in curve.form.protocols)
        yield CurveAgainstPeak(
            f"collectives.{key}", rate, bytes_per_s, "intra.bandwidth_bytes_per_s", "B/s", IN_SWITCH
        )  # fmt: skip


def why_above_peak(shares: Iterable[CurveAgainstPeak]) -> str | None:
    """Why curves cannot be of this hardware, of the first that passes its peak; None where none does."""
    for share in shares:
        if share.rate > share.allowed_share * share.peak:
            return share.reached_peak_text(
                "above" if share.allowed_share == ROUNDING else f"over {share.allowed_share:g} times"
            )
    return None


def curves_far_below_peak(shares: Iterable[CurveAgainstPeak]) -> tuple[CurveAgainstPeak, ...]:
    """Curves that reach less than a tenth of their peak.

    Of memory-bound ops copies alone count, as others issue more; the first FlashAttention is slow by its own paper.
    """
    compared = (share for share in shares if share.allowed_share == ROUNDING)
    return tuple(s for s in compared if s.rate < SLOW * s.peak and not s.path.startswith("curves.attention.flash1 "))


def attention_flops_per_s(key: str, form: AttentionForm) -> float:
    """Rate at which a fused attention's full slots compute. [FLOP/s]

    A unit is ``block`` by 128 tokens: two products forward, five backward, three of them over queries' heads
    (:func:`mofa.cost.kernels.fitted_forms.attention_s`).

    Examples
    --------
    >>> from mofa.specs.curves import AttentionForm
    >>> form = AttentionForm(128, 100, 1e-6, 0.0, 1.0, 1.0, 1.0, 1e12)
    >>> attention_flops_per_s("cudnn fwd 128/128", form) / 1e12
    838.8608
    """
    _, direction, sizes = key.split()
    d_qk, d_v = (float(size) for size in sizes.split("/"))
    width = d_qk + d_v if direction == "fwd" else 3.0 * d_qk + 2.0 * d_v
    return 2.0 * form.block * 128.0 * width * form.slots / form.unit_s


def _products(
    place: str, curves: Mapping[GemmFormat, GemmCurve], peaks: Mapping[str, float]
) -> Iterator[CurveAgainstPeak]:
    for format_, curve in curves.items():
        if (peak := peaks.get(known_or_stand_in_format(format_, peaks))) is not None:
            rate = max(rate for _, _, rate in curve.form.tiles)
            yield CurveAgainstPeak(f"{place}.{format_}", rate, peak, _peak_path(format_), "FLOP/s")


def _multi_stream_products(curves: GpuCurves, peaks: Mapping[str, float]) -> Iterator[CurveAgainstPeak]:
    """Tiles of single products, each as much slower as on several streams."""
    for format_, curve in curves.multi_stream.items():
        peak = peaks.get(known_or_stand_in_format(format_, peaks))
        single = curves.gemm.get(known_or_stand_in_format(format_, curves.gemm))
        if peak is not None and single is not None:
            rate = max(rate for _, _, rate in single.form.tiles) / curve.form.slower
            yield CurveAgainstPeak(f"curves.multi_stream.{format_}", rate, peak, _peak_path(format_), "FLOP/s")


def _moving(curves: GpuCurves, bytes_per_s: float) -> Iterator[CurveAgainstPeak]:
    """What products and attention move."""
    yield from _bytes("curves.gemm", curves.gemm, bytes_per_s, CACHED)
    yield from _bytes("curves.grouped_gemm", curves.grouped_gemm, bytes_per_s, CACHED)
    yield from _bytes("curves.multi_stream", curves.multi_stream, bytes_per_s, HIDDEN_BY_STREAMS)
    yield from _bytes("curves.multi_stream", curves.multi_stream, bytes_per_s, CACHED, "added_bytes_per_s")
    yield from _bytes("curves.attention", curves.attention, bytes_per_s, HIDDEN_BY_ATTENTION)


def _bytes(
    place: str, curves: Mapping[Any, Any], bytes_per_s: float, allowed: float, name: str = "bytes_per_s"
) -> Iterator[CurveAgainstPeak]:
    """A rate of moving bytes that the forms of curves have."""
    for key, curve in curves.items():
        rate = getattr(curve.form, name)
        yield CurveAgainstPeak(f"{place}.{key}.form.{name}", rate, bytes_per_s, MEMORY, "B/s", allowed)


def _streams(place: str, curves: Mapping[str, MemoryBoundCurve], bytes_per_s: float) -> Iterator[CurveAgainstPeak]:
    for key, curve in curves.items():
        allowed = ROUNDING if key in COPIES else CACHED
        yield CurveAgainstPeak(f"{place}.{key}", curve.form.bytes_per_s, bytes_per_s, MEMORY, "B/s", allowed)
    yield from _bytes(place, curves, bytes_per_s, CACHED, "missed_bytes_per_s")


def _peak_path(format_: str) -> str:
    return f"peak_flops_per_s.{format_.split('_')[0]}"
