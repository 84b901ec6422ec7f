"""Timing under load: calls between others that keep the device busy until its power limit acts."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from mofa.calibrate.bench.torch_timing import Call, GpuMonitor, median_and_percentiles
from mofa.calibrate.cases import Sample

GROUPS = 10
"""Timed groups of calls that are queued at once. [-]"""


def loaded_call_sample(
    calls: Sequence[Call],
    clock: GpuMonitor,
    *,
    seconds: float,
    before: Sequence[Call] = (),
    after: Call | None = None,
    each: int = 1,
) -> Sample:
    """Device time of one call in the second half of a load; clock and power are the means of that half.

    The next groups are queued before the last ones end, so that the device never waits for the host.

    Parameters
    ----------
    calls
        Timed in turn, ``each`` in one group between two events.
    seconds
        How long the load lasts. [s]
    before
        Run in turn ahead of every group, untimed.
    after
        Run behind every group, untimed.
    """
    times: list[float] = []
    readings: list[tuple[float | None, float | None]] = []
    started, position = time.perf_counter(), 0
    waiting: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    while (elapsed := time.perf_counter() - started) < seconds:
        events = []
        for _ in range(GROUPS):
            if before:
                before[position % len(before)]()
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            for _ in range(each):
                calls[position % len(calls)]()
                position += 1
            pair[1].record()
            if after is not None:
                after()
            events.append(pair)
        readings.append(clock.sm_clock_and_power())
        if waiting:
            waiting[-1][1].synchronize()
            if elapsed > seconds / 2:
                times += [start.elapsed_time(end) / 1e3 / each for start, end in waiting]
        waiting = events
    torch.cuda.synchronize()
    steady = readings[len(readings) // 2 :]
    mhz, watts = ([value for reading in steady if (value := reading[i]) is not None] for i in (0, 1))
    return median_and_percentiles(times, *(sum(values) / len(values) if values else None for values in (mhz, watts)))
