"""How fast a host issues work right now, by work that every measurement can repeat beside its own.

A run and a calibration time the same calls: small ops of PyTorch, and a whole layer of Transformer Engine, forward and
back. Small ops stay in the processor's nearest caches, a layer's Python does not. Between two machines whose small ops
were equally fast it took 1.2 to 1.5 times as long (docs/calibration.md, "The host under Transformer Engine").
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

BURSTS, WARM_UP = 7, 2
"""Bursts of calls, and how many of the first are left out; the rest's median counts."""
HIDDEN, HEADS, TOKENS, LAYERS = 256, 4, 64, 2
"""Sizes of the layer that is timed, at which a device is done before the host; and how often it is called."""


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


def small_back_s(num_ops: int = 100) -> float:
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


class EngineLayer:
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

    def seconds(self, bursts: int = BURSTS) -> tuple[float, float]:
        """A layer's forward, and its backward on autograd's thread: medians of bursts. [s]"""
        ahead, behind = [], []
        for _ in range(bursts):
            for parameter in (self._source, *self._layer.parameters()):
                parameter.grad = None
            torch.cuda.synchronize()
            before = time.perf_counter()
            out = self._source
            for _ in range(LAYERS):
                out = self._layer(out)
            ahead.append((time.perf_counter() - before) / LAYERS)
            torch.cuda.synchronize()
            before = time.perf_counter()
            torch.autograd.backward(out, self._grad)
            behind.append((time.perf_counter() - before) / LAYERS)
        torch.cuda.synchronize()
        return _middle(ahead), _middle(behind)
