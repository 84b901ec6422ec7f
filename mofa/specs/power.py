"""What a GPU's power limit makes of a mix of kernels, and of waiting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mofa.specs.base import SecondsFact, ShareFact, Spec

FloatArray = NDArray[np.float64]


class PowerLimit(Spec):
    """What the power limit makes of a device's waits."""

    idle_draw: ShareFact
    """Power of a device that waits, over the limit. [-]"""
    window_s: SecondsFact
    """Time over whose mean the limit holds. [s]"""

    def mix_weight_beside_idle(self, idle_fraction: float) -> float:
        """What the shares of a mix count where the device is ``idle_fraction`` for a share of the time besides. [-]

        Draws at the clock f add up to the limit: ``(1 - idle) f^2 sum(share / c^2) + idle idle_draw = 1``, as
        :func:`mixed_clock` has it without the wait.

        Examples
        --------
        >>> from mofa.specs.base import Fact
        >>> share, window = (Fact(value=value, provenance="assumed", source="an example") for value in (0.2, 0.3))
        >>> round(PowerLimit(idle_draw=share, window_s=window).mix_weight_beside_idle(0.25), 4)
        0.7895
        """
        return (1.0 - idle_fraction) / (1.0 - idle_fraction * self.idle_draw.value)


def mixed_clock(shares: Sequence[FloatArray | float], clocks: Sequence[float]) -> FloatArray | float:
    """Clock that the power limit leaves a mix of kernels, over the full clock.

    Parameters
    ----------
    shares
        Of the time, one for each kind of kernel; the rest is idle and draws nothing. (K,) each [-]
    clocks
        That each kind keeps alone, over the full clock. [-]

    Notes
    -----
    A kind that alone keeps the clock ``c`` at the limit draws ``(f / c)^2`` of it at the clock f; what is drawn on
    average over the mix is the limit: ``f = (sum of share / c^2)^-1/2``, at most 1. Power that grows with the square
    of the clock is assumed (dynamic power grows with its cube, static power not at all); one clock holds for all
    kernels of the mix, because the limit is kept over milliseconds.

    Examples
    --------
    Half products, half kernels that never reach the limit:

    >>> mixed_clock([np.array([0.5]), np.array([0.5])], [0.75, 1.0]).round(3)
    array([0.849])
    """
    drawn = sum((share / clock**2 for share, clock in zip(shares, clocks, strict=True)), 0.0)
    if isinstance(drawn, float):  # of one candidate: NumPy takes a microsecond a call
        return min(float(max(drawn, 1e-12) ** -0.5), 1.0)
    clock: FloatArray = np.minimum(np.maximum(drawn, 1e-12) ** -0.5, 1.0)
    return clock
