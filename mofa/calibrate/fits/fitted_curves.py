"""The curves of a measured device, each with how well it meets the rows that it was fitted on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from mofa.specs.curves import GemmForm


@dataclass(frozen=True)
class CurveFit:
    """One fitted curve: its form, how well it meets the rows it was fitted on, and where it was measured."""

    form: Any
    points: int
    median_abs_error: float
    p90_abs_error: float
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As nested dictionaries."""
        return asdict(self)


@dataclass(frozen=True)
class DeviceCurveFits:
    """All curves of a device: a dictionary of `CurveFit` a family, keyed by what selects a kernel, never by a shape."""

    gpu: str
    num_sms: int
    l2_bytes: float = 0.0
    """Size of the L2, 0 where no measurement says it. [B]"""
    gemm: dict[str, CurveFit] = field(default_factory=dict)
    grouped_gemm: dict[str, CurveFit] = field(default_factory=dict)
    multi_stream: dict[str, CurveFit] = field(default_factory=dict)
    single: GemmForm | None = None
    """bf16 products that those on several streams are built on."""
    attention: dict[str, CurveFit] = field(default_factory=dict)
    memory_bound: dict[str, CurveFit] = field(default_factory=dict)
    collective: dict[str, CurveFit] = field(default_factory=dict)
    sustained: dict[str, float] = field(default_factory=dict)
    """Rate after seconds of load over the rate at full clock: of products and attention. [-]"""
    clocks: dict[str, float] = field(default_factory=dict)
    """Clock after seconds of load over the full clock: of products and attention. [-]"""
    full_load_flops: dict[str, float] = field(default_factory=dict)
    """Of :func:`mofa.calibrate.fits.loaded_clocks.full_clock_product_rates`. [FLOP/s]"""
    memory_clock: float | None = None
    """Of :func:`mofa.calibrate.fits.loaded_clocks.memory_bound_clock_ratio`. [-]"""
    clock_powers: dict[str, float] = field(default_factory=dict)
    """Power of the clock that the rate of products and attention grows with. [-]"""
    clock_shares: dict[str, float] = field(default_factory=dict)
    """Share of memory-bound ops' time that grows as the clock falls. [-]"""
    host_s: dict[str, float] = field(default_factory=dict)
    modules: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of :func:`mofa.calibrate.fits.te_host_facts.module_times_over_small_layer`. [-]"""
    layer_in_small_ops: tuple[float, float] | None = None
    """Of :func:`mofa.calibrate.fits.te_host_facts.layer_time_over_small_op`. [-]"""
    copy_bytes_per_s: dict[str, float] = field(default_factory=dict)
    host_optimizer: dict[str, float] = field(default_factory=dict)
    """Of :func:`mofa.calibrate.fits.host_optimizer.host_optimizer_rates`. [B/s]"""
    overlap: dict[str, float] = field(default_factory=dict)
    """Time beside the other over the time alone, of computing and of collectives. [-]"""
    overlap_slowdown: float = 0.0
    """Seconds that computing loses per second that a collective beside it takes alone; 0 if not measured. [-]"""
    slowdown_by_held_multiprocessors: dict[int, float] = field(default_factory=dict)
    """Of :func:`mofa.calibrate.fits.ratios.slowdown_by_held_multiprocessors`. [-]"""

    def as_dict(self) -> dict[str, Any]:
        """As nested dictionaries."""
        return asdict(self)
