"""Facts of how fast a GPU runs each kind of kernel: fitted forms with their residual, measured range and provenance.

The forms themselves, pure functions of a shape and these parameters, are in :mod:`mofa.cost.kernels.fitted_forms`.
Rates are SI and at full clock; ``sustained`` and ``alone`` are what the power limit leaves of them in long runs.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from mofa.specs.base import ClockFact, ShareOrNoneFact, Spec
from mofa.specs.fitted import FittedCurve as FittedCurve
from mofa.specs.fitted import PowerLimitedCurve as PowerLimitedCurve
from mofa.specs.fitted import expected_max_normal as expected_max_normal
from mofa.specs.fitted import expected_max_uniform as expected_max_uniform
from mofa.specs.gpu_facts import (
    KernelSelectionFacts,
    LayerKernelRatios,
    Optimizer16BitRates,
    UnalignedProductRates,
    load_unmeasured_gpu_facts,
)
from mofa.specs.host import HostIssueTimes, HostSpeedQuantiles
from mofa.specs.multi_stream import MultiStreamCurve, MultiStreamForm
from mofa.specs.power import PowerLimit
from mofa.specs.products import STREAM_FALLBACK, known_or_stand_in_format
from mofa.specs.products import GemmFormat as GemmFormat
from mofa.specs.ranges import (
    BytesPerElement,
    Degree,
    Elements,
    ExtraBytesPerElement,
    KernelSeconds,
    LengthSeconds,
    Multiple,
    PositiveMultiple,
    Rate,
    RateOrNone,
    RowsOrNone,
    ShareOrNone,
    Sharpness,
    Slots,
    Splits,
    TileSize,
    UnitSeconds,
)

Backend = Literal["cudnn", "flash", "flash1"]
FloatArray = NDArray[np.float64]
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, config=_STRICT)
class GemmForm:
    """Parameters of :func:`mofa.cost.kernels.fitted_forms.gemm_s`."""

    tiles: Annotated[tuple[tuple[TileSize, TileSize, Rate], ...], Field(min_length=1, max_length=64)]
    """Rows and columns of each output tile that the library may choose, and the rate it reaches. [-, -, FLOP/s]"""
    k_overhead: Elements
    """Prologue and epilogue of a tile, as a length in k. [elements]"""
    floor_s: KernelSeconds
    bytes_per_s: Rate
    sharpness: Sharpness
    """Exponent that joins computing and moving: 1 adds them, infinity takes the larger."""
    split_s: KernelSeconds = 1.5e-6
    """Launch of the reduction over split k."""
    split_bytes: ExtraBytesPerElement = 4.0
    """Bytes moved per output element and split."""
    splits: Annotated[tuple[Splits, ...], Field(min_length=1, max_length=64)] = (1, 2, 3, 4, 6, 8, 16)
    partial_round_saving: ShareOrNone = 0.0
    """Share of a round's time that is saved per multiprocessor that a last round leaves idle, over all. [-]"""
    slowdown: ShareOrNone = 0.0
    """Time that a product gains by its length, as a share: of one much longer than ``slowdown_after_s``. [-]"""
    slowdown_after_s: LengthSeconds = 1e-3
    """Length of a product that gains half of it. [s]"""


@dataclass(frozen=True, config=_STRICT)
class GroupedGemmForm:
    """Parameters of :func:`mofa.cost.kernels.fitted_forms.grouped_gemm_s`."""

    small_tile: tuple[TileSize, TileSize] = (64, 128)
    large_tile: tuple[TileSize, TileSize] = (128, 256)
    small_rate: Rate = 6e14
    large_rate: Rate = 8e14
    small_k_overhead: Elements = 200.0
    large_k_overhead: Elements = 200.0
    small_limit: RowsOrNone = 128
    """Products with at most so many rows or columns per group take the small tile."""
    cluster: TileSize = 2
    """Tiles along the rows that run together."""
    floor_s: KernelSeconds = 8e-6
    per_group_s: KernelSeconds = 1e-7
    bytes_per_s: Rate = 4e12
    sharpness: Sharpness = 2.7


@dataclass(frozen=True, config=_STRICT)
class AttentionForm:
    """Parameters of :func:`mofa.cost.kernels.fitted_forms.attention_s`: one kernel, by backend, way and head sizes."""

    block: TileSize
    """Rows that one unit of work holds. [tokens]"""
    slots: Slots
    """Units that run at the same time."""
    unit_s: UnitSeconds
    """Time of one unit against 128 tokens of the other side."""
    floor_s: KernelSeconds
    tail: Multiple
    """Share of a causal kernel's longest unit that runs alone at the end."""
    wave: Multiple
    """How much of the last, partly filled wave of a full kernel counts as a whole one."""
    causal: PositiveMultiple
    """Time of a causal kernel's blocks over a full one's."""
    bytes_per_s: Rate


@dataclass(frozen=True, config=_STRICT)
class MemoryBoundForm:
    """Parameters of :func:`mofa.cost.kernels.fitted_forms.memory_bound_s`: one memory-bound op as a framework runs
    it."""

    launch_s: KernelSeconds
    bytes_per_element: BytesPerElement
    """What its kernels read and write per element. [B]"""
    bytes_per_s: Rate
    per_row_s: KernelSeconds = 0.0
    per_column_s: KernelSeconds = 0.0
    missed_bytes_per_s: RateOrNone = 0.0
    """What a row that is read again and no longer in the L2 costs on top
    (`mofa.cost.kernels.fitted_forms.l2_miss_bytes`); 0 where no row is read again. [B/s]"""


@dataclass(frozen=True, config=_STRICT)
class CollectiveForm:
    """Parameters of :func:`mofa.cost.kernels.fitted_forms.collective_s`: one collective over one group size."""

    protocols: Annotated[tuple[tuple[KernelSeconds, Rate], ...], Field(min_length=1, max_length=64)]
    """Start and bus bandwidth of each. [s, B/s]"""
    group: Degree


class GemmCurve(PowerLimitedCurve):
    """Dense products of one format, in all three layouts (forward, input gradient, weight gradient)."""

    form: GemmForm


class GroupedGemmCurve(PowerLimitedCurve):
    """Products of one expert each in one kernel."""

    form: GroupedGemmForm


class AttentionCurve(PowerLimitedCurve):
    """Fused attention of one backend, way and pair of head sizes."""

    form: AttentionForm


class MemoryBoundCurve(FittedCurve):
    """One memory-bound op, eager or compiled."""

    form: MemoryBoundForm
    clock_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of its time at full clock that grows as the clock falls: what multiprocessors issue, and not the memory,
    takes so long. Absent where it was not measured; then no time grows. [-]"""
    draw: Annotated[float, Field(gt=0, le=3)] | None = None
    """Power at full clock over the limit; where absent, ``stream_clock`` says it of all. [-]"""


class CollectiveCurve(FittedCurve):
    """One collective inside a fast domain, over one group size."""

    form: CollectiveForm


HeldMultiprocessors = Annotated[int, Field(ge=1, le=1024)]
"""Multiprocessors that computing has to do without. [-]"""
StreamKey = Annotated[str, Field(pattern=r"^(default|(eager|compiled|te|megatron) [a-z0-9_]+)$")]


class PytorchReleaseCurves(Spec):
    """What another release of PyTorch, with the cuBLAS that it brings, runs in place of a GPU's own curves."""

    gemm: dict[GemmFormat, GemmCurve] = {}
    stream: dict[StreamKey, MemoryBoundCurve] = {}


AttentionKey = tuple[str, str, float, float]
DEFAULT_STREAM = "default"
TIMED_EMBEDDING_ROWS, TIMED_EMBEDDING_BYTES = 32000, 2
"""Rows of the embedding whose gradient ``embedding_bwd`` was timed with, and bytes of an element. [-], [B]"""
ELSE = {
    "wgrad_add": "copy", "sort_fwd": "copy", "sort_bwd": "copy", "permute_fwd": "permute", "permute_bwd": "permute",
    "unpermute_fwd": "permute", "unpermute_bwd": "permute", "weighted_swiglu_fwd": "swiglu_fwd",
    "weighted_swiglu_bwd": "swiglu_bwd", "geglu_fwd": "swiglu_fwd", "geglu_bwd": "swiglu_bwd",
    "squared_relu_fwd": "gelu_fwd", "squared_relu_bwd": "gelu_bwd", "bias_gelu_fwd": "gelu_fwd",
    "bias_gelu_bwd": "gelu_bwd", "zero_buffer": "zero",
}  # fmt: skip
"""Of ops of Transformer Engine that were not measured, the op whose rate they take."""


def _on_streams(single: GemmCurve, known: MultiStreamCurve | None) -> MultiStreamCurve:
    """Products on several streams of a format that was not measured: bf16's starts and gaps around its own tiles."""
    if known is not None:
        form, source = known.form, known.source
    else:
        starts, rate = load_unmeasured_gpu_facts().multi_stream_starts, single.form.bytes_per_s
        adding = starts.adding_rate.value * rate
        form = MultiStreamForm(starts.floor_s.value, starts.start_s.value, 1.0, rate, adding, starts.sharpness.value)
        source = "an H100's starts"
    return MultiStreamCurve(
        provenance="assumed", source=f"{source}, around single products: {single.source}", form=form,
        sustained=single.sustained, alone=single.alone, clock=single.clock,
    )  # fmt: skip


class GpuCurves(Spec):
    """All curves of a GPU.

    ``attention`` is keyed ``"BACKEND fwd|bwd D_QK/D_V"``, ``stream`` by ``"eager|compiled|te|megatron OP"`` with
    ``default`` for ops that are like none of them: ``te`` is Transformer Engine's kernel, ``megatron`` a function of
    Megatron-Core's in eager kernels.
    """

    gemm: dict[GemmFormat, GemmCurve]
    grouped_gemm: dict[GemmFormat, GroupedGemmCurve]
    multi_stream: dict[GemmFormat, MultiStreamCurve] = {}
    """Experts' products as Transformer Engine runs them; of formats that were not measured see
    :attr:`multi_stream_curves`."""
    attention: dict[Annotated[str, Field(pattern=r"^(cudnn|flash1?) (fwd|bwd) \d+/\d+$")], AttentionCurve]
    stream: dict[StreamKey, MemoryBoundCurve]
    releases: dict[Annotated[str, Field(pattern=r"^\d+\.\d+$")], PytorchReleaseCurves] = {}
    """Kernels of other releases of PyTorch, by their number, where they differ and were measured."""
    host: HostIssueTimes
    hosts: HostSpeedQuantiles | None = None
    """How far hosts of this kind are apart, where ``host`` is that of a typical machine; None where it is the one that
    runs."""
    stream_clock: ClockFact | None = None
    """Clock at which memory-bound kernels alone draw the power limit, over the full clock; above 1 where they never do.
    [-]"""
    power_limit: PowerLimit | None = None
    """What waits give back of the clock; None where that is not known, and then nothing."""
    chip_spread: ShareOrNoneFact | None = None
    """Standard deviation, over GPUs of one kind, of the time of kernels that the power limit slows down. [-]"""
    step_jitter: ShareOrNoneFact | None = None
    """Standard deviation, from one step to the next, of the time of the same kernels on one GPU, besides what
    :attr:`chip_spread` has of it: that was measured within single steps. None where nothing is known besides. [-]"""
    host_spread: ShareOrNoneFact | None = None
    """Standard deviation, over the ranks of a run, of what their hosts take for the same work, over its mean. [-]"""
    host_swing: ShareOrNoneFact | None = None
    """How much more the slowest of several hosts takes between the reads at which they wait for each other, over what
    it takes in all, for each standard deviation that the largest of so many draws lies above the mean. [-]"""
    overlap_slowdown: ShareOrNoneFact
    """Seconds that computing loses per second of communication that runs at the same time. [-]"""
    slowdown_by_held_multiprocessors: dict[HeldMultiprocessors, ShareOrNoneFact] = {}
    """The same per second that so many multiprocessors are held by something that moves little, as NCCL's channels hold
    them between nodes; empty where that was not measured, and then it is :attr:`overlap_slowdown`. [-]"""
    unaligned_products: UnalignedProductRates = Field(
        default_factory=lambda: load_unmeasured_gpu_facts().unaligned_products
    )
    """Products of widths that 16 bytes do not divide; the assumed ones where they were not measured."""
    optimizer_16_bit: Optimizer16BitRates = Field(default_factory=lambda: load_unmeasured_gpu_facts().optimizer_16_bit)
    """The optimizer's kernels on 16-bit tensors, likewise."""
    kernel_selection: KernelSelectionFacts = Field(default_factory=lambda: load_unmeasured_gpu_facts().kernel_selection)
    """How the library of products chooses kernels, likewise."""
    layer_kernels: LayerKernelRatios = Field(default_factory=lambda: load_unmeasured_gpu_facts().layer_kernels)
    """Norms and activations over those that were measured, likewise."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if DEFAULT_STREAM not in self.stream:
            raise ValueError("curves.stream needs an entry default, for ops that are like none that was measured")
        for direction in ("fwd", "bwd"):
            if not any(direction in key.split() for key in self.attention):
                raise ValueError(
                    f"curves.attention has no {direction} entry; give one such as 'cudnn {direction} 128/128'"
                )
        return self

    def gemm_curve(self, kind: GemmFormat) -> GemmCurve:
        """The curve of dense products, or of those that stand in (:data:`mofa.specs.products.FALLBACK`)."""
        return self.gemm[known_or_stand_in_format(kind, self.gemm)]

    def grouped_gemm_curve(self, kind: GemmFormat) -> GroupedGemmCurve:
        """The curve of experts' products in one kernel, likewise; no profile has Transformer Engine's kinds of it."""
        return self.grouped_gemm[known_or_stand_in_format(kind, self.grouped_gemm)]

    def multi_stream_curve(self, kind: GemmFormat) -> MultiStreamCurve:
        """The curve of experts' products on several streams, likewise."""
        curves = self.multi_stream_curves
        return curves[known_or_stand_in_format(kind, curves)]

    def with_pytorch_release_kernels(self, release: str) -> Self:
        """The curves with those kernels that a release of PyTorch has of its own; themselves where none is known."""
        own = self.releases.get(release)
        if own is None:
            return self
        made = self.model_copy(update={"gemm": self.gemm | own.gemm, "stream": self.stream | own.stream})
        for name, value in vars(type(self)).items():  # a copy takes along what was derived from the fields before
            if isinstance(value, cached_property):
                made.__dict__.pop(name, None)
        return made

    @cached_property
    def multi_stream_curves(self) -> dict[GemmFormat, MultiStreamCurve]:
        """Products on several streams by format: as measured, else assumed."""
        known = self.multi_stream.get("bf16")
        return {f: self.multi_stream.get(f) or _on_streams(single, known) for f, single in self.gemm.items()}

    @cached_property
    def attention_kernels(self) -> dict[AttentionKey, AttentionCurve]:
        """The attention curves by backend, way and head sizes."""
        kernels: dict[AttentionKey, AttentionCurve] = {}
        for key, curve in self.attention.items():
            backend, direction, sizes = key.split()
            d_qk, d_v = sizes.split("/")
            kernels[backend, direction, float(d_qk), float(d_v)] = curve
        return kernels

    @cached_property
    def _nearest(self) -> dict[AttentionKey, tuple[AttentionKey, AttentionCurve]]:
        return {}

    def nearest_attention_curve(self, key: AttentionKey) -> tuple[AttentionKey, AttentionCurve]:
        """The curve of a kernel, or of the one that is nearest in head sizes, of the same backend where it has any."""
        nearest = self._nearest.get(key)
        if nearest is None:
            backend, direction, d_qk, d_v = key
            kernels = [k for k in self.attention_kernels if k[1] == direction]
            best = min(kernels, key=lambda k: (k[0] != backend, abs(k[2] - d_qk) + abs(k[3] - d_v)))
            nearest = self._nearest[key] = best, self.attention_kernels[best]
        return nearest

    def memory_bound_curve_like(self, like: str, compiled: bool) -> MemoryBoundCurve:
        """The curve of a memory-bound op: compiled where it was measured compiled, else eager, else the default."""
        if " " in like:
            op = like.split()[1]
            return self.stream.get(like) or self.memory_bound_curve_like(ELSE.get(op, op), compiled)
        if like in STREAM_FALLBACK and not any(f"{v} {like}" in self.stream for v in ("eager", "compiled")):
            like = STREAM_FALLBACK[like]
        if like:
            for variant in ("compiled", "eager") if compiled else ("eager", "compiled"):
                if (curve := self.stream.get(f"{variant} {like}")) is not None:
                    return curve
        return self.stream[DEFAULT_STREAM]
