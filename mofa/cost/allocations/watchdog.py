"""What PyTorch's watchdog lets go: tensors of coalesced collectives whose own handle nobody waits for.

A collective keeps references to its tensors until it is waited for, or until the watchdog has found it finished and the
process launches another collective (PyTorch 2.11, ProcessGroupNCCL.cpp, ``shelvesToUnstash_``). The watchdog looks
every tenth of a second by the wall clock (``kWatchdogThreadSleepMillis``), at a phase that differs from step to step:
what counts is the worst, a whole tenth of a second behind the collective's end.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, NamedTuple, TypeVar

from mofa.cost.kernels.launch_queue import QUEUE

T = TypeVar("T")

WATCHDOG_S = 0.1
"""Between two looks (ProcessGroupNCCL.cpp, ``kWatchdogThreadSleepMillis``). [s]"""


class BlockPassTime(NamedTuple):
    """What the device and the host take for a pass through a block. [s]"""

    device_s: float = 0.0
    host_s: float = 0.0
    waits: bool = False
    """Whether the host waits for the device on the way: it has no lead behind such a pass."""
    to_host_s: float = 0.0
    """Of its copies of activations to the host, beside all that."""


class Shelf(Generic[T]):
    """Items of passes that were given up, and when each may be let go: ``held_s`` behind their block's end.

    A block's collectives end with it. In a first step, whose host compiles and loads, all is let go at once.

    Examples
    --------
    A block of 60 ms on the device, issued in 50 ms: the third one is issued before the first one's is let go.

    >>> shelf = Shelf()
    >>> for name in "abcde":
    ...     shelf.shelve(name)
    ...     print(shelf.issue_block_and_pop_due(BlockPassTime(0.06, 0.05), 40))
    []
    []
    []
    ['a']
    ['b']
    """

    def __init__(self, held_s: float = WATCHDOG_S) -> None:
        self.held_s = held_s
        self.host_s = self.device_s = self.launched = self.copied_s = 0.0
        self.queued: deque[tuple[float, float]] = deque()
        self.fresh: list[T] = []
        self.waiting: deque[tuple[float, T]] = deque()

    def shelve(self, item: T) -> None:
        """Something that the block under way gives up."""
        self.fresh.append(item)

    def issue_block_and_pop_due(self, block_time: BlockPassTime, launches: float) -> list[T]:
        """A block of so many launches is issued, as far as the device's queue takes them: what can be let go."""
        host_s, queued = self.host_s, self.queued
        device_s = max(self.device_s, host_s) + block_time.device_s
        host_s += block_time.host_s
        launched = self.launched = self.launched + launches
        queued.append((launched, device_s))
        while queued[0][0] <= launched - QUEUE:
            host_s = max(host_s, queued.popleft()[1])
        self.host_s, self.device_s = host_s, max(device_s, host_s)
        passed_s = self.device_s
        if block_time.to_host_s:  # copies of a block begin with it at the earliest, one after the other
            self.copied_s = max(self.copied_s, self.device_s - block_time.device_s) + block_time.to_host_s
            passed_s = max(passed_s, self.copied_s)
        if self.fresh:
            self.waiting.extend([(passed_s + self.held_s, item) for item in self.fresh])
            self.fresh.clear()
        if block_time.waits:
            self.synchronize()
        return self.pop_due() if self.waiting else []

    def pop_due(self) -> list[T]:
        """What can be let go by now."""
        gone = []
        while self.waiting and self.waiting[0][0] <= self.host_s:
            gone.append(self.waiting.popleft()[1])
        return gone

    def waiting_items(self) -> list[tuple[float, T]]:
        """What waits, and for how long from now. [s]"""
        return [(round(at_s - self.host_s, 6), item) for at_s, item in self.waiting]

    def clock_state_key(self) -> tuple[object, ...]:
        """Equal for two instants from which both clocks run alike."""
        queued = ((self.launched - launched, round(at_s - self.host_s, 6)) for launched, at_s in self.queued)
        return round(self.device_s - self.host_s, 6), round(max(self.copied_s - self.host_s, 0.0), 6), *queued

    def synchronize(self) -> None:
        """The host waits for the device."""
        self.host_s = self.device_s = max(self.host_s, self.device_s)
        self.queued.clear()
