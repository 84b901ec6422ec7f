"""What every fitted curve says of itself, and what the power limit leaves of the rates of kernels that reach it."""

from __future__ import annotations

import math
from functools import cache
from math import sqrt
from statistics import NormalDist
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from mofa.specs.base import Count, Library, Provenance, Spec
from mofa.specs.ranges import LEAST_SHARE, RelativeError, Size
from mofa.specs.shared_facts import load_shared_facts

FloatArray = NDArray[np.float64]


class FittedCurve(Spec):
    """A fitted form: where its numbers come from, how well it meets what was measured, and where that was."""

    provenance: Provenance
    source: str = Field(min_length=3)
    points: Count = 0
    """Measured shapes that the form was fitted on."""
    median_abs_error: RelativeError | None = None
    """Of the fit, relative. [-]"""
    p90_abs_error: RelativeError | None = None
    ranges: dict[str, tuple[Size, Size]] = {}
    """Smallest and largest of each size that was measured; beyond, a prediction is extrapolated."""
    library: Library | None = None
    """Whose modules launched the kernels that were measured; absent where they were PyTorch's own, or none."""


Share = Annotated[float, Field(ge=LEAST_SHARE, le=1)]
LEAST_BETWEEN = 0.9
"""Rate between memory-bound kernels over the rate alone, at least. Physics says 1, the rest is for noise; at
``products_share_between`` the line through the two states would reach a rate of zero. [-]"""


class PowerLimitedCurve(FittedCurve):
    """Of kernels that the power limit slows down: products and attention."""

    sustained: Share = 1.0
    """Rate in long runs between memory-bound kernels over the rate at full clock. [-]"""
    alone: Share = 1.0
    """Rate in long runs of nothing else over the rate at full clock. [-]"""
    clock: Share = 1.0
    """Clock in long runs of nothing else over the full clock; 1 where it was not read. [-]"""
    clock_power: Annotated[float, Field(ge=0, le=1.5)] | None = None
    """Power of the clock that the rate grows with, over all states that were measured; absent where the two states
    above say it. [-]"""

    full_load_flops: Annotated[float, Field(gt=0, le=1e18)] | None = None
    """Rate at full clock of the products whose :attr:`clock` was read; absent where every product is taken to draw as
    much. [FLOP/s]"""

    @model_validator(mode="after")
    def _check_states(self) -> Self:
        if self.sustained < LEAST_BETWEEN * self.alone:
            raise ValueError(
                f"sustained ({self.sustained:g}) must be at least {LEAST_BETWEEN} of alone ({self.alone:g}): kernels "
                "between memory-bound ones keep at least the clock that they have alone"
            )
        return self

    def relative_rate_at_clock(self, clock: FloatArray | float) -> FloatArray | float:
        """Rate at a part of the full clock over the rate at full clock: a power of the clock.

        Examples
        --------
        >>> curve = PowerLimitedCurve(provenance="assumed", source="an example", alone=0.85, clock=0.75)
        >>> curve.relative_rate_at_clock(np.array([0.75, 0.9, 1.0])).round(3)
        array([0.85 , 0.942, 1.   ])
        """
        power = self.clock_power
        if power is None:
            power = math.log(self.alone) / math.log(self.clock) if self.clock < 1.0 else 0.0
        rate: FloatArray | float = clock**power
        return rate

    def fraction_of_full_load(self, flops: FloatArray | float, seconds: FloatArray | float) -> FloatArray | float:
        """Rate of products at full clock over that of those whose clock was read, at most 1. [-]

        ``seconds`` are theirs between memory-bound kernels. 1 where no rate is known.
        """
        if self.full_load_flops is None:
            return 1.0
        rate = flops / np.maximum(seconds, 1e-12) / (self.sustained * self.full_load_flops)
        return np.minimum(rate, 1.0) if isinstance(rate, np.ndarray) else min(float(rate), 1.0)

    def draw_over_power_limit(self, load: FloatArray | float, least: float) -> FloatArray | float:
        """Power at full clock over the limit: from ``least``, that of memory-bound kernels, to ``clock^-2`` at full
        load, in proportion to the load. [-]

        Weight gradients of 256, 1024 and 4096 rows that add to fp32 run at 0.18, 0.53 and 0.92 of full load on an
        H200, and draw 0.77, 1.29 and 1.86 of the limit (measurements/h200-1gpu-draws): less at low loads than said.

        Examples
        --------
        >>> curve = PowerLimitedCurve(provenance="assumed", source="an example", clock=0.75, full_load_flops=8e14)
        >>> round(curve.draw_over_power_limit(curve.fraction_of_full_load(4e11, 1e-3), 0.9), 3)
        1.339
        """
        return least + (self.clock**-2 - least) * load

    def rate_over_full_clock(self, share: FloatArray) -> FloatArray:
        """Rate over the rate at full clock where such kernels take ``share`` of the time: on the line through the two
        measured states, never above full clock.

        Examples
        --------
        >>> curve = PowerLimitedCurve(provenance="assumed", source="an example", sustained=0.9, alone=0.85)
        >>> curve.rate_over_full_clock(np.array([0.0, 0.61, 1.0])).round(3)
        array([0.978, 0.9  , 0.85 ])
        """
        slope = (self.sustained - self.alone) / (1.0 - load_shared_facts().libraries.products_share_between.value)
        return np.minimum(self.alone + slope * (1.0 - share), 1.0)


@cache
def expected_max_normal(num: int) -> float:
    """Expected largest of ``num`` draws from a standard normal distribution, by Blom's approximation. [-]

    References
    ----------
    Blom 1958, "Statistical Estimates and Transformed Beta-Variables": the quantile of ``(num - 3/8) / (num + 1/4)``.

    Examples
    --------
    Exactly 0, 0.564 and 1.029:

    >>> [round(expected_max_normal(num), 2) for num in (1, 2, 4)]
    [0.0, 0.59, 1.05]
    """
    return NormalDist().inv_cdf((num - 0.375) / (num + 0.25))


@cache
def expected_max_uniform(num: int) -> float:
    """Expected largest of ``num`` draws from a uniform distribution of mean 0 and standard deviation 1. [-]

    References
    ----------
    David and Nagaraja 2003, "Order Statistics": the largest of ``num`` between 0 and 1 is at ``num / (num + 1)``.

    Examples
    --------
    However many there are, none is further than the distribution's end, ``sqrt(3)``:

    >>> [round(expected_max_uniform(num), 2) for num in (1, 2, 4, 1024)]
    [0.0, 0.58, 1.04, 1.73]
    """
    return sqrt(3.0) * (num - 1.0) / (num + 1.0)
