"""Timing on a CUDA device: pools of random inputs, a prefilled queue, events, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mofa.calibrate.cases import Sample

Call = Callable[[], Any]
L2_ROTATION_BYTES = 256e6
CYCLES_PER_S = 2.0e9
REST = 2.5
"""Idle time before a sample, over the sample's own: keeps the power limit, and so the clock, out of short timings."""


class RandomInputs:
    """Random numbers on the device, handed out as views, so that a case neither allocates nor fills its inputs.

    Every view starts where the last one ended; with a pool of several times the L2, inputs come from device memory.
    """

    def __init__(self, device: str, gib: float) -> None:
        self.device, self.elements = device, int(gib * 2**30) // 2
        self._data: dict[torch.dtype, torch.Tensor] = {}
        self._cursor: dict[torch.dtype, int] = {}

    def random_tensor(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """A contiguous tensor of standard normal numbers (of fp8: their nearest)."""
        if dtype not in self._data:
            self._data[dtype] = self._fill(dtype)
            self._cursor[dtype] = 0
        size = 1
        for length in shape:
            size *= length
        data = self._data[dtype]
        if size > data.numel():
            return torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype)
        start = self._cursor[dtype]
        if start + size > data.numel():
            start = 0
        self._cursor[dtype] = start + -(-size // 512) * 512
        return data[start : start + size].view(shape)

    def _fill(self, dtype: torch.dtype) -> torch.Tensor:
        data = torch.empty(self.elements, device=self.device, dtype=dtype)
        step = 2**26
        for start in range(0, self.elements, step):
            part = data[start : start + step]
            part.copy_(torch.randn(part.shape, device=self.device, dtype=torch.float32).to(dtype))
        return data


class GpuMonitor:
    """Reads the SM clock and power of a GPU through NVML, where it answers."""

    def __init__(self, device: str) -> None:
        self._handle: Any = None
        if device == "cuda":
            try:
                import pynvml

                pynvml.nvmlInit()
                self._nvml = pynvml
                properties = torch.cuda.get_device_properties(torch.cuda.current_device())
                # by its own identity: NVML also numbers the GPUs that this process does not see
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
            except Exception:
                self._handle = None

    def sm_clock_and_power(self) -> tuple[float | None, float | None]:
        """SM clock in MHz and power in W."""
        if self._handle is None:
            return None, None
        try:
            mhz = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)
            return float(mhz), self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
        except self._nvml.NVMLError:
            return None, None


def num_input_sets(bytes_per_call: float) -> int:
    """How many sets of inputs to rotate among so that none is still in the L2."""
    return int(min(48, max(2, -(-L2_ROTATION_BYTES // max(bytes_per_call, 1)))))


def time_calls(
    calls: Sequence[Call], device: str, clock: GpuMonitor, *, samples: int = 7, budget_s: float = 0.012, most: int = 40
) -> Sample:
    """Device time of one call, cycling through ``calls``: the median over samples of several calls each.

    Before each sample the device is kept busy while the host fills the queue, so that the host's issue time does
    not show in short kernels; what shows is what a queue that is ahead of the device gives. The device rests before
    each sample: these are times at full clock. What the power limit takes in long runs is the family ``sustained``.
    ``most`` calls are queued at once; of calls of many kernels fewer than a queue takes.
    """
    if device != "cuda":
        return _time_host(calls, samples)
    calls[0]()
    torch.cuda.synchronize()
    before = time.perf_counter()
    calls[-1]()
    torch.cuda.synchronize()
    tries = 1 if time.perf_counter() - before > 0.01 else 3  # of long calls one says enough
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before = time.perf_counter()
    start.record()
    for i in range(tries):
        calls[i % len(calls)]()
    end.record()
    host_s = (time.perf_counter() - before) / tries
    torch.cuda.synchronize()
    estimate_s = start.elapsed_time(end) / 1e3 / tries
    per_sample = int(min(most, max(1, budget_s / samples / max(estimate_s, 1e-6))))
    if estimate_s > 0.004:
        samples = 5 if estimate_s < 0.02 else 3
    times, position = [], 0
    for _ in range(samples):
        time.sleep(min(0.04, REST * estimate_s * per_sample))
        torch.cuda._sleep(int((host_s * per_sample * 1.3 + 30e-6) * CYCLES_PER_S))
        start.record()
        for _ in range(per_sample):
            calls[position % len(calls)]()
            position += 1
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / per_sample)
    return median_and_percentiles(times, *clock.sm_clock_and_power())


def _time_host(calls: Sequence[Call], samples: int) -> Sample:
    times = []
    for i in range(min(samples, 3)):
        before = time.perf_counter()
        calls[i % len(calls)]()
        times.append(time.perf_counter() - before)
    return median_and_percentiles(times)


def median_and_percentiles(
    times_s: Sequence[float], sm_mhz: float | None = None, power_w: float | None = None
) -> Sample:
    """Median, 10th and 90th percentile."""
    ordered = sorted(max(t, 1e-9) for t in times_s)
    low = ordered[len(ordered) // 10]
    high = ordered[len(ordered) - 1 - len(ordered) // 10]
    return Sample(statistics.median(ordered), low, high, len(ordered), sm_mhz, power_w)
