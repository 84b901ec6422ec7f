"""Whether curves stay within the peaks of the GPU and the node that they are of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mofa.specs.products import FALLBACK, GemmFormat

if TYPE_CHECKING:
    from mofa.specs.curves import AttentionForm, CollectiveCurve, GemmCurve, GpuCurves, StreamCurve

ROUNDING = 1.001
"""Digits that a file leaves out. [-]"""
MOST_OF_FREE_RATE = 4.0
"""The larger of a grouped form's two rates over the peak: the tile that few measured products took has a rate that is
hardly known (2.55 in the profiles here). [-]"""
MOST_OF_CAUSAL = 2.0
"""Rate of a causal kernel's blocks over the peak, whose half-empty blocks count as whole ones (1.1 here). [-]"""
MOST_OF_MEMORY = 4.0
"""Rate of a memory-bound kernel over the memory's, as some read out of the L2 (1.43 here). [-]"""
MOST_OF_LINK = 2.0
"""Bus bandwidth over the link's, which reduction in the switch may pass (0.87 here). [-]"""


def curves_beyond_peaks(curves: GpuCurves, peaks: Mapping[GemmFormat, float], memory_bytes_per_s: float) -> str | None:
    """The first curve of a GPU that is faster than the GPU, in words; None where all are slower.

    Parameters
    ----------
    curves
        Of the GPU.
    peaks
        Its dense peak rates by format. [FLOP/s]
    memory_bytes_per_s
        Its memory's bandwidth. [B/s]
    """
    return next(_beyond(curves, peaks, memory_bytes_per_s), None)


def _beyond(curves: GpuCurves, peaks: Mapping[GemmFormat, float], memory_bytes_per_s: float) -> Iterator[str]:
    yield from _products("curves.gemm", curves.gemm, peaks)
    yield from _streams("curves.stream", curves.stream, memory_bytes_per_s)
    for release, own in curves.releases.items():
        yield from _products(f"curves.releases.{release}.gemm", own.gemm, peaks)
        yield from _streams(f"curves.releases.{release}.stream", own.stream, memory_bytes_per_s)
    for kind, grouped in curves.grouped_gemm.items():
        rates, peak = sorted((grouped.form.small_rate, grouped.form.large_rate)), _peak(peaks, kind)
        if rates[0] > ROUNDING * peak or rates[1] > MOST_OF_FREE_RATE * peak:
            yield _sentence(f"curves.grouped_gemm.{kind}", rates[0] if rates[0] > peak else rates[1], peak, "FLOP/s")
    for key, attention in curves.attention.items():
        peak = _peak(peaks, "bf16")
        rate = attention_flops_per_s(key, attention.form)
        if rate > ROUNDING * peak or rate / attention.form.causal > MOST_OF_CAUSAL * peak:
            yield _sentence(f"curves.attention.{key}", rate / min(attention.form.causal, 1.0), peak, "FLOP/s")


def _peak(peaks: Mapping[GemmFormat, float], kind: GemmFormat) -> float:
    return peaks.get(kind) or peaks.get(FALLBACK.get(kind, kind)) or float("inf")


def _products(place: str, curves: Mapping[GemmFormat, GemmCurve], peaks: Mapping[GemmFormat, float]) -> Iterator[str]:
    for kind, curve in curves.items():
        rate, peak = max(rate for _, _, rate in curve.form.tiles), _peak(peaks, kind)
        if rate > ROUNDING * peak:
            yield _sentence(f"{place}.{kind}", rate, peak, "FLOP/s")


def _streams(place: str, curves: Mapping[str, StreamCurve], bytes_per_s: float) -> Iterator[str]:
    for key, curve in curves.items():
        if curve.form.bytes_per_s > MOST_OF_MEMORY * bytes_per_s:
            yield _sentence(f"{place}.{key}", curve.form.bytes_per_s, bytes_per_s, "B/s", MOST_OF_MEMORY)


def attention_flops_per_s(key: str, form: AttentionForm) -> float:
    """Rate at which a fused attention's full slots compute. [FLOP/s]

    A unit is ``block`` by 128 tokens: two products forward, five backward, three of them over queries' heads.

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


def collectives_beyond_link(curves: Mapping[str, CollectiveCurve], link_bytes_per_s: float) -> str | None:
    """The first measured collective that is faster than its link, in words; None where all are slower."""
    for key, curve in curves.items():
        rate = max(bytes_per_s for _, bytes_per_s in curve.form.protocols)
        if rate > MOST_OF_LINK * link_bytes_per_s:
            return _sentence(f"collectives.{key}", rate, link_bytes_per_s, "B/s", MOST_OF_LINK)
    return None


def _sentence(place: str, rate: float, peak: float, unit: str, times: float = 1.0) -> str:
    most = f"{times:g} times the {peak:.4g} {unit}" if times != 1.0 else f"the {peak:.4g} {unit}"
    return f"{place}: its rate ({rate:.4g} {unit}) passes {most} that the hardware has; correct one of them"
