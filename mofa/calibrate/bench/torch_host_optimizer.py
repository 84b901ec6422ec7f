"""What an optimizer on the host takes: Adam's fused step on the processor, and its copies to and from the device."""

from __future__ import annotations

import os
import time

import torch

from mofa.calibrate.bench.torch_timing import GpuMonitor, median_and_percentiles, time_calls
from mofa.calibrate.cases import Case, Sample, UnsupportedCase

STEPS = 4
"""Timed steps of the processor's Adam, behind one that makes its states. [-]"""


def host_optimizer_sample(case: Case, device: str, clock: GpuMonitor) -> Sample:
    """One step, or one copy, of ``params`` parameters in fp32. [s]

    Raises
    ------
    UnsupportedCase
        Copies without a device; more threads than the machine has cores.
    """
    params = case.shape_size("params")
    if case.op == "adam_step":
        return _adam_step(params, case.shape_size("threads"))
    if device != "cuda":
        raise UnsupportedCase("no device to copy to")
    if case.op == "params_to_device":  # Megatron's hybrid optimizer: fp32 of pageable memory over bf16 of the device
        source, target = torch.ones(params), torch.empty(params, dtype=torch.bfloat16, device=device)
        return time_calls([lambda: target.copy_(source, non_blocking=True)], device, clock, samples=3)
    pinned, gradient = torch.empty(params, pin_memory=True), torch.ones(params, device=device)
    return time_calls([lambda: pinned.copy_(gradient, non_blocking=True)], device, clock, samples=3)


def _adam_step(params: int, threads: int) -> Sample:
    if threads > (os.cpu_count() or 1):
        raise UnsupportedCase(f"{threads} threads on {os.cpu_count()} cores")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weight = torch.nn.Parameter(torch.zeros(params))
        weight.grad = torch.ones(params)
        optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0.1, fused=True)
        optimizer.step()
        times = []
        for _ in range(STEPS):
            start = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - start)
        return median_and_percentiles(times)
    finally:
        torch.set_num_threads(before)
