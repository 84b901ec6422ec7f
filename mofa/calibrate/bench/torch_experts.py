"""The host's issue of experts that run one after the other, as Megatron-Core's local layers have them.

Their numbers of rows are the same for all (``same``), differ but come back in every pass (``seen``), or are new in
every pass (``new``), for which the library of products chooses a kernel each time. Products of small and of large
widths, few and many experts, behind enough work of the device (``AHEAD_S``) that it never waits for the host where the
queue takes it: what is timed is the host alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mofa.calibrate.cases import Case, UnsupportedCase

REPETITIONS = 9
AHEAD_S = 0.05
"""What the device has to do before a pass that is issued behind it. [s]"""


class _Product(torch.autograd.Function):
    """A linear with its backward written out; the weight's gradient goes through autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return torch.matmul(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad.matmul(weight), grad.t().matmul(x)


def _gated(x: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return (F.silu(left) * right * score).to(x.dtype)


class _Linear(nn.Module):
    def __init__(self, out: int, inner: int, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(out, inner, device=device, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


class _Expert(nn.Module):
    """Two products and a compiled function between them."""

    def __init__(self, width: int, inner: int, device: str, gated: Any) -> None:
        super().__init__()
        self.up, self.down = _Linear(2 * inner, width, device), _Linear(width, inner, device)
        self.gated = gated
        self.main = [torch.zeros_like(p) for p in self.parameters()]
        self.nodes = []
        for parameter, main in zip(self.parameters(), self.main, strict=True):
            node: Any = parameter.expand_as(parameter).grad_fn
            node = node.next_functions[0][0]

            def add(*_: Any, parameter: nn.Parameter = parameter, main: torch.Tensor = main) -> None:
                if parameter.grad is not None:
                    main.add_(parameter.grad.data)
                parameter.grad = None

            node.register_hook(add)
            self.nodes.append(node)

    def forward(self, x: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.gated(self.up(x), score))
        return out


def _numbers(rng: random.Random, num: int, mean: int, how: str) -> list[int]:
    """Rows of each expert: within a third of the mean, as many in all as there are."""
    if how == "same":
        return [mean] * num
    drawn = [rng.randint(mean * 2 // 3, mean * 4 // 3) for _ in range(num)]
    while sum(drawn) > num * mean:
        drawn[rng.randrange(num)] -= 1
    drawn[0] += num * mean - sum(drawn)
    return drawn


def expert_host_times(case: Case, device: str) -> list[float]:
    """Host time of one expert's pass, forward (``experts``), without gradients, or backward, by the mean. [s]"""
    num, mean, width, inner = (case.shape_size(name) for name in ("experts", "rows", "width", "inner"))
    direction, how = case.op.removeprefix("experts"), case.variant
    if how not in ("same", "seen", "new"):
        raise UnsupportedCase(f"no way to draw rows called {how}")
    gated = torch.compile(_gated, dynamic=True)
    experts = [_Expert(width, inner, device, gated) for _ in range(num)]
    x = torch.zeros(num * mean, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    scores = torch.ones(num * mean, 1, device=device)
    known = _numbers(random.Random(1), num, mean, how)
    times = []
    for i in range(REPETITIONS):
        numbers = _numbers(random.Random(100 + i), num, mean, how) if how == "new" else known
        x.grad = None
        took = _pass(experts, x, scores, numbers, device, direction)
        times.append(took / num)
    return times


def _pass(
    experts: Sequence[_Expert], x: torch.Tensor, scores: torch.Tensor, numbers: list[int], device: str, direction: str
) -> float:
    rows, given = x.split(numbers), scores.split(numbers)
    with torch.no_grad() if direction == "_no_grad" else torch.enable_grad():
        _settle(device)
        before = time.perf_counter()
        outs = [expert(row, score) for expert, row, score in zip(experts, rows, given, strict=True)]
        took = time.perf_counter() - before
        if direction == "_bwd":
            joined = torch.cat(outs)
            _settle(device)
            before = time.perf_counter()
            joined.backward(joined.detach())  # type: ignore[no-untyped-call]
            took = time.perf_counter() - before
    if device == "cuda":
        torch.cuda.synchronize()
    return took


def _settle(device: str) -> None:
    """Nothing is under way but what the device is kept busy with."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda._sleep(int(AHEAD_S * 2.0e9))
