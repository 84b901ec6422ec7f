"""What a GPU's power limit makes of a mix of kernels, and of waiting."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.specs.base import PositiveSecondsFact, SecondsFact, ShareFact, Spec

FloatArray = NDArray[np.float64]


class PowerLimit(Spec):
    """A GPU's power limit: what a device draws while it waits, and over how long a mean the limit holds."""

    idle_draw: ShareFact
    """Power of a device that waits, over the limit. [-]"""
    window_s: SecondsFact
    """Time over whose mean the limit holds. [s]"""
    settles_s: PositiveSecondsFact | None = None
    """Time constant by which the clock follows from one draw to another; where absent, optimizers relieve nothing.
    [s]"""
    full_clock_s: SecondsFact | None = None
    """How long passes keep the full clock behind an optimizer much longer than ``settles_s``. [s]"""
    clock_swing: ShareFact | None = None
    """Standard deviation over time of how long products take at the limit, over what the clock is below the full one.
    [-]"""

    def full_clock_behind_optimizer_s(self, optimizer_s: FloatArray) -> FloatArray:
        """How long passes keep the full clock behind an optimizer of so many seconds. (n,) [s]

        The limit acts late: behind kernels that draw less than it products run on at the full clock, and then all at
        once by a tenth slower (docs/evidence/calibration.md, how long the full clock lasts).
        ``full_clock * (1 - exp(-optimizer / settles))``.

        Examples
        --------
        >>> from mofa.specs.base import Fact
        >>> share, time = (Fact(value=value, provenance="assumed", source="an example") for value in (0.2, 0.025))
        >>> limit = PowerLimit(idle_draw=share, window_s=time, settles_s=time, full_clock_s=time)
        >>> limit.full_clock_behind_optimizer_s(np.array([0.0, 0.025, 10.0])).round(4)
        array([0.    , 0.0158, 0.025 ])
        """
        if self.settles_s is None or self.full_clock_s is None:
            return np.zeros_like(optimizer_s)
        kept_s: FloatArray = -np.expm1(-optimizer_s / self.settles_s.value) * self.full_clock_s.value
        return kept_s

    def mix_weight_beside_idle(self, idle_fraction: float) -> float:
        """What the shares of a mix count where the device is ``idle_fraction`` for a share of the time besides. [-]

        Draws at the clock f add up to the limit: ``(1 - idle) f^2 sum(share / c^2) + idle idle_draw = 1``, as
        :func:`clock_at_power_draw` has it without the wait.

        Examples
        --------
        >>> from mofa.specs.base import Fact
        >>> share, window = (Fact(value=value, provenance="assumed", source="an example") for value in (0.2, 0.3))
        >>> round(PowerLimit(idle_draw=share, window_s=window).mix_weight_beside_idle(0.25), 4)
        0.7895
        """
        return (1.0 - idle_fraction) / (1.0 - idle_fraction * self.idle_draw.value)


def clock_at_power_draw(drawn: FloatArray | float) -> FloatArray | float:
    """Clock that the power limit leaves a mix of kernels, over the full clock.

    Parameters
    ----------
    drawn
        What the mix would draw at full clock over the limit: the mean over its time. (K,) [-]

    Notes
    -----
    ``f = drawn^-1/2``, at most 1: power is taken to grow with the square of the clock (dynamic power grows with its
    cube, static power not at all). A kind of kernels that alone keeps the clock ``c`` at the limit draws ``c^-2`` at
    full clock. One clock holds for all kernels of the mix, because the limit is kept over milliseconds.

    Examples
    --------
    Half products that alone keep 0.75 of the clock, half kernels that just reach the limit:

    >>> clock_at_power_draw(np.array([0.5 * 0.75**-2 + 0.5])).round(3)
    array([0.849])
    """
    if isinstance(drawn, float):  # of one candidate: NumPy takes a microsecond a call
        return min(float(max(drawn, 1e-12) ** -0.5), 1.0)
    clock: FloatArray = np.minimum(np.maximum(drawn, 1e-12) ** -0.5, 1.0)
    return clock
