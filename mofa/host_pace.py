"""How fast a host issues work right now, by work that every measurement can repeat beside its own.

A run and a calibration time the same calls: small ops of PyTorch, and a whole layer of Transformer Engine, forward and
back. Small ops stay in the processor's nearest caches, a layer's Python does not. Between two machines whose small ops
were equally fast it took 1.2 to 1.5 times as long (docs/calibration.md, "The host under Transformer Engine").
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

BURSTS, WARM_UP = 7, 2
"""Bursts of calls, and how many of the first are left out; the rest's median counts."""
HIDDEN, HEADS, TOKENS, LAYERS = 256, 4, 64, 2
"""Sizes of the layer that is timed, at which a device is done before the host; and how often it is called."""


QUIET = 1.25
"""A core is quiet on which a small op takes at most so many times what it took on the best core so far. [-]

Of a machine that is shared, a core's other hardware thread may be somebody else's: a small op then takes 1.9 times as
long, for seconds at a time (docs/calibration.md, "The host under Transformer Engine")."""
AUTOGRAD = "pt_autograd"
"""How the names of the threads begin that issue the way back."""


class QuietCorePinner:
    """Keeps a process's two issuing threads, its own and autograd's, on cores whose neighbours are quiet.

    Of several processes on a machine each has its own ``part`` of the ``parts`` of the cores.
    """

    def __init__(self, part: int = 0, parts: int = 1) -> None:
        self._all = sorted(os.sched_getaffinity(0))
        self._own = self._all[part::parts] if len(self._all) >= 2 * parts else self._all
        self._best_s = float("inf")
        self._autograd: list[int] = []
        self._by_speed = self._own[:2] if len(self._own) > 1 else self._own * 2

    def stay_or_move_to_quiet(self) -> bool:
        """Stay where it is quiet, else move to the two quietest cores; whether these are quiet."""
        if self._best_s < float("inf") and self.is_still_quiet():
            return True
        return self.move_to_quietest()

    def move_to_quietest(self) -> bool:
        """Move to the two quietest cores; whether these are quiet."""
        ops_s = {core: self._op_s(core) for core in self._own}
        self._by_speed = sorted(self._own, key=ops_s.__getitem__)
        self._pin(self._by_speed[:2])
        return ops_s[self._by_speed[1 % len(self._by_speed)]] <= QUIET * self._best_s

    def move_to_loudest(self) -> None:
        """Move to the two loudest cores of the last choice, to see what the neighbours cost."""
        self._pin(self._by_speed[-2:])

    def is_still_quiet(self) -> bool:
        """Whether both cores are quiet now; the threads stay."""
        quiet = self._quiet(self._by_speed[:2])
        self._pin(self._by_speed[:2])
        return quiet

    def release(self) -> None:
        """Let all threads run on any core again."""
        self._pin(None)

    def _quiet(self, cores: Iterable[int]) -> bool:
        return all(self._op_s(core) <= QUIET * self._best_s for core in cores)

    def _op_s(self, core: int) -> float:
        os.sched_setaffinity(0, {core})
        processor_op_s(10)
        seconds = processor_op_s(60)
        self._best_s = min(self._best_s, seconds)
        return seconds

    def _pin(self, cores: list[int] | None) -> None:
        own, autograd = (set(self._all),) * 2 if cores is None else ({cores[0]}, {cores[-1]})
        os.sched_setaffinity(0, own)
        if not self._autograd:
            self._autograd = _threads(AUTOGRAD)
        for thread in self._autograd:
            os.sched_setaffinity(thread, autograd)


def _threads(name: str) -> list[int]:
    """Numbers of this process's threads whose names begin so."""
    thread_ids = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (task / "comm").read_text().startswith(name):
                thread_ids.append(int(task.name))
    return thread_ids


def small_op_s(num_ops: int = 100) -> float:
    """Seconds in which this host issues one small eager op: what machines of one kind differ by.

    The median of an addition, SiLU and a norm, in bursts that the queue takes, as `mofa calibrate` has it of a profile.
    Not behind a profiler, whose instruments stay attached and slow every later launch.
    """
    x, weight = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16), torch.ones(256, device="cuda").bfloat16()
    calls = (lambda: x + x, lambda: functional.silu(x), lambda: functional.rms_norm(x, (256,), weight))
    return sorted(_burst_s(call, num_ops) for call in calls)[1]


def _burst_s(call: Callable[[], Any], num_ops: int) -> float:
    times = []
    for _ in range(BURSTS):
        torch.cuda.synchronize()
        before = time.perf_counter()
        for _ in range(num_ops):
            call()
        times.append((time.perf_counter() - before) / num_ops)
    torch.cuda.synchronize()
    return _middle(times)


def small_op_backward_s(num_ops: int = 100) -> float:
    """Seconds of one small op's way back, which autograd's engine issues on a thread of its own.

    That thread runs on another core than the one which issues the forward pass, and may be as much slower or faster
    as hosts are apart. The median of five chains of SiLU, each of which the queue takes.
    """
    source = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    times = []
    for _ in range(BURSTS):
        out = source
        for _ in range(num_ops):
            out = functional.silu(out)
        grad = torch.ones_like(out)
        torch.cuda.synchronize()
        before = time.perf_counter()
        torch.autograd.grad(out, source, grad)
        times.append((time.perf_counter() - before) / num_ops)
    torch.cuda.synchronize()
    return _middle(times)


def processor_op_s(num: int = 40) -> float:
    """Seconds of one small addition on the processor, which no device and no driver has a part in."""
    x = torch.ones(16)
    before = time.perf_counter()
    for _ in range(num):
        x + x
    return (time.perf_counter() - before) / num


def _middle(times: list[float]) -> float:
    counted = sorted(times[WARM_UP:])
    return counted[len(counted) // 2]


def processor_op_s_in_work() -> float:
    """One small addition on the processor as it is timed in the midst of other work."""
    return processor_op_s(16)


class TransformerEngineLayer:
    """A small layer of Transformer Engine: how long the host takes to issue it, forward and back.

    Its modules are those of a dense transformer: norms with linears, attention, SwiGLU, in bf16 without dropout. The
    device keeps up, so that a call takes what the host does.
    """

    def __init__(self) -> None:
        import transformer_engine.pytorch as engine

        self._layer = engine.TransformerLayer(
            HIDDEN, HIDDEN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, bias=False, normalization="RMSNorm",
            activation="swiglu", fuse_qkv_params=True, params_dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        self._source = torch.ones(TOKENS, 1, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self._grad = torch.ones_like(self._source)
        self._ops_back: list[float] = []
        self._sampled_s = 0.0

    def forward_and_backward_s(self, bursts: int = BURSTS) -> tuple[float, float]:
        """A layer's forward, and its backward on autograd's thread: medians of bursts. [s]"""
        ahead, behind, _, _ = self.layer_and_small_op_seconds(bursts)
        return ahead, behind

    def layer_and_small_op_seconds(self, bursts: int = BURSTS) -> tuple[float, float, float, float]:
        """As :meth:`forward_and_backward_s`, then medians of a small addition on the processor amid each, by the same
        thread. [s]"""
        ahead, behind, ops = [], [], []
        self._ops_back = []
        for _ in range(bursts):
            for parameter in (self._source, *self._layer.parameters()):
                parameter.grad = None
            torch.cuda.synchronize()
            before = time.perf_counter()
            out = self._layer(self._source)
            middle = time.perf_counter()
            ops.append(processor_op_s_in_work())
            between = time.perf_counter()
            out.register_hook(self._sample)
            for _ in range(LAYERS - 1):
                out = self._layer(out)
            ahead.append((time.perf_counter() - before - (between - middle)) / LAYERS)
            torch.cuda.synchronize()
            self._sampled_s = 0.0
            before = time.perf_counter()
            torch.autograd.backward(out, self._grad)
            behind.append((time.perf_counter() - before - self._sampled_s) / LAYERS)
        torch.cuda.synchronize()
        return _middle(ahead), _middle(behind), _middle(ops), _middle(self._ops_back)

    def _sample(self, _: torch.Tensor) -> None:
        before = time.perf_counter()
        self._ops_back.append(processor_op_s_in_work())
        self._sampled_s = time.perf_counter() - before


class StepPaceSampler:
    """How fast the two issuing threads are within training steps: a small addition where each layer begins.

    It costs about 30 us a layer and way, a hundredth of what issuing a layer does.
    """

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        self._ahead: list[float] = []
        self._behind: list[float] = []
        self._hooks = [layer.register_forward_hook(self._look) for layer in layers]

    def _look(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        recomputed = threading.current_thread() is not threading.main_thread()
        (self._behind if recomputed else self._ahead).append(processor_op_s_in_work())
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor) and first.requires_grad:
            first.register_hook(self._look_back)

    def _look_back(self, _: torch.Tensor) -> None:
        self._behind.append(processor_op_s_in_work())

    def mean_small_op_s_since_last(self) -> tuple[float, float]:
        """Means of the ways forward and back since it was last asked; nan of none. [s]"""
        means = tuple(statistics.fmean(times) if times else float("nan") for times in (self._ahead, self._behind))
        self._ahead.clear()
        self._behind.clear()
        return means[0], means[1]

    def stop(self) -> None:
        """Sample no more."""
        for hook in self._hooks:
            hook.remove()
