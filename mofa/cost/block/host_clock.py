"""Two clocks, the device's and the host's: what a tape does to both, as a 2 x 2 matrix over (max, +).

An op starts when the device is free and the host has issued it, and the host waits for the device where it
synchronises. Both only ever take the later of two times and add to it. So a whole tape is four numbers, and tapes one
after the other are a product. In the long run a repetition takes the largest mean of a cycle
(Baccelli et al. 1992, "Synchronization and Linearity", chapter 3).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.cost.kernels.launch_queue import QUEUE

ArrayN = NDArray[np.float64]
NEVER = -1e4
"""Later than this no host is behind its device: stands for minus infinity, and keeps sums exact to 1e-12. [s]"""


class ClockAdvance(NamedTuple):
    """From the times at which the device and the host begin to those at which they end. [s]

    The device ends at ``max(device + device_s, host + held_s)``, the host at ``max(device + woken_s, host + host_s)``.
    """

    device_s: ArrayN
    """What the device takes with the host far ahead."""
    device_behind_host_s: ArrayN
    """From the host's beginning to the device's end, where the device waits for it."""
    host_behind_device_s: ArrayN
    """From the device's beginning to the host's end, where the host waits: :data:`NEVER` without synchronisation."""
    host_s: ArrayN
    kernels: ArrayN | float = 0.0
    """Kernels that are launched, of which the host may be no more than :data:`QUEUE` ahead of its device. [-]"""

    def with_device_sooner(self, spared_s: ArrayN) -> ClockAdvance:
        """The advance where the device waits so much less for communication. [s]"""
        return self._replace(
            device_s=self.device_s - spared_s, device_behind_host_s=self.device_behind_host_s - spared_s
        )

    def followed_by(self, behind: ClockAdvance) -> ClockAdvance:
        """This and what comes behind it as one.

        Examples
        --------
        Two ops of 3 ms on the device and 1 ms on the host, one of 1 ms and 5 ms behind them:

        >>> first, second = (ClockAdvance(*(np.array([x]) for x in of)) for of in ((3, 3, NEVER, 1), (1, 5, NEVER, 5)))
        >>> [float(x[0]) for x in first.followed_by(second)[:4]]
        [4.0, 6.0, -9995.0, 6.0]
        """
        return ClockAdvance(
            np.maximum(behind.device_s + self.device_s, behind.device_behind_host_s + self.host_behind_device_s),
            np.maximum(behind.device_s + self.device_behind_host_s, behind.device_behind_host_s + self.host_s),
            np.maximum(behind.host_behind_device_s + self.device_s, behind.host_s + self.host_behind_device_s),
            np.maximum(behind.host_behind_device_s + self.device_behind_host_s, behind.host_s + self.host_s),
            self.kernels + behind.kernels,
        )

    def repeated(self, count: ArrayN) -> ClockAdvance:
        """As many of it one after the other; where there are none, nothing happens.

        Assumes that where the host waits at all, both clocks end at fixed times behind the last wait.
        """
        more, slower = count - 1.0, np.maximum(self.device_s, self.host_s)
        waits = self.host_behind_device_s > NEVER / 2
        some = count > 0
        return ClockAdvance(
            np.where(some, self.device_s + more * np.where(waits, slower, self.device_s), 0.0),
            np.where(some, self.device_behind_host_s + more * slower, NEVER),
            np.where(some, self.host_behind_device_s + more * slower, NEVER),
            np.where(some, self.host_s + more * np.where(waits, slower, self.host_s), 0.0),
            count * self.kernels,
        )

    def with_chunk_axes(self) -> ClockAdvance:
        """The advance for every chunk of every stage: two axes behind. (rows,) -> (rows, 1, 1)"""
        return ClockAdvance(*(np.asarray(each)[:, None, None] for each in self))

    def limited_by_launch_queue(self) -> ClockAdvance:
        """The advance with no more launches ahead of the device than its queue takes: the rest is issued once the
        device has begun. Launches are taken to be spread evenly over the issue, ``(1 - QUEUE / kernels) host_s``. Where
        the host waits for the device on the way, it is never so far ahead.

        Examples
        --------
        2,048 kernels, issued in 40 s and computed in 24: half of them wait for the device's beginning.

        >>> many = ClockAdvance(*(np.array([x]) for x in (24.0, 40.0, NEVER, 40.0, 2048.0)))
        >>> [float(x[0]) for x in many.limited_by_launch_queue()]
        [24.0, 40.0, 20.0, 40.0, 2048.0]
        """
        over = (self.host_behind_device_s <= NEVER / 2) & (self.kernels > QUEUE)
        if not np.any(over):
            return self
        rest_s = (1.0 - QUEUE / np.maximum(self.kernels, QUEUE)) * self.host_s
        return self._replace(
            device_s=np.where(over, np.maximum(self.device_s, rest_s), self.device_s),
            host_behind_device_s=np.where(over, rest_s, self.host_behind_device_s),
        )

    @property
    def both_ended_s(self) -> ArrayN:
        """When both clocks have ended that began together. [s]"""
        return np.maximum(
            np.maximum(self.device_s, self.device_behind_host_s), np.maximum(self.host_behind_device_s, self.host_s)
        )

    @property
    def repetition_s(self) -> ArrayN:
        """What a repetition takes in the long run. [s]

        Examples
        --------
        A host that issues for 2 ms, waits for 3 ms of device work and then issues for 2 ms more what takes none:

        >>> ClockAdvance(*(np.array([x]) for x in (3.0, 5.0, 5.0, 7.0))).repetition_s
        array([7.])
        """
        either = np.maximum(self.device_s, self.host_s)
        return np.asarray(np.maximum(either, (self.device_behind_host_s + self.host_behind_device_s) / 2.0))
