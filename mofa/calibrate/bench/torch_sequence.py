"""The host's issue of many different ops one after the other, as a model has them, beside the same ops in loops alone.

Ops of one kind in a loop find their code, their dispatch and the driver's in the processor's caches; between the ops of
a model hundreds of others come. What is timed is the host: shapes are small, or the device has so much to do before
that the queue is never empty (``queued``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mofa.calibrate.bench.torch_experts import expert_host_times
from mofa.calibrate.bench.torch_timing import CYCLES_PER_S, Call, median_and_percentiles
from mofa.calibrate.cases import Case, Sample, UnsupportedCase

REPETITIONS, DROPPED = 9, 2
"""Bursts, and how many of the first are left out."""
LAYERS = 6
"""Layers of a model, each with weights of its own: few enough that the queue takes all their kernels."""
HEAD = 64
"""Width of an attention head. [-]"""
AHEAD_S = 0.05
"""What the device has to do before a burst that is issued behind it. [s]"""


def op_sequence_host_sample(case: Case, device: str) -> Sample:
    """Host time of one op, layer or call; see the table at the end. [s]

    Raises
    ------
    UnsupportedCase
        If there is no such op, or not on this device.
    """
    if case.op not in _OPS:
        raise UnsupportedCase(f"no op {case.op}")
    if case.op.startswith("experts"):
        return median_and_percentiles(expert_host_times(case, device)[DROPPED:])
    if case.variant != "python" and device != "cuda":
        raise UnsupportedCase(f"{case.variant} needs a GPU")
    return median_and_percentiles(_OPS[case.op](case, device)[DROPPED:])


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _around(variant: str, device: str) -> Iterator[None]:
    """What a burst runs in: behind work of the device, or under the profiler that traces of runs are made with."""
    profiler: AbstractContextManager[Any] = nullcontext()
    if variant == "profiled":
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    with profiler:
        _synchronize(device)
        if variant == "queued":
            torch.cuda._sleep(int(AHEAD_S * CYCLES_PER_S))
        yield
    _synchronize(device)


def _kinds(device: str, rows: int, width: int) -> list[Call]:
    """Calls of different kinds, of one kernel each or nearly."""
    make = partial(torch.ones, device=device, dtype=torch.bfloat16)
    x, y, square, row = make(rows, width), make(rows, width), make(width, width), make(width)
    wide, full = make(rows, 2 * width), torch.ones(rows, width, device=device)
    places = torch.arange(rows, device=device)
    heads, flags = make(1, 4, rows, width // 4), places > 3
    column = torch.ones(rows, 1, device=device)
    return [
        lambda: x + y, lambda: torch.mm(x, square), lambda: F.silu(x), lambda: x.float(), lambda: full.to(x.dtype),
        lambda: F.linear(x, square), lambda: x * 0.5, lambda: torch.cat((x, y)), lambda: F.rms_norm(x, (width,), row),
        lambda: full.pow(2), lambda: full.mean(-1, keepdim=True), lambda: torch.rsqrt(column), lambda: full * column,
        lambda: heads.transpose(1, 2).contiguous(), lambda: F.embedding(places, x), lambda: x.index_select(0, places),
        lambda: torch.softmax(full, -1), lambda: wide.chunk(2, -1)[0] * y, lambda: torch.cumsum(places, 0),
        lambda: torch.gather(places, 0, places), lambda: torch.zeros_like(x), lambda: x.clone(), lambda: x.neg(),
        lambda: full.sum(), lambda: torch.sigmoid(x), lambda: F.gelu(x), lambda: full.masked_fill(flags[:, None], 0.0),
        lambda: x.sub(y), lambda: full.exp(), lambda: torch.argmax(full, -1), lambda: x.t().contiguous(),
        lambda: torch.where(flags, places, 0),
    ]  # fmt: skip


def _alone(case: Case, device: str) -> list[float]:
    """Every kind in a loop of its own: their mean."""
    calls, num = _kinds(device, case.shape_size("rows"), case.shape_size("width")), case.shape_size("ops")
    samples = []
    for _ in range(REPETITIONS):
        total = 0.0
        for call in calls:
            with _around(case.variant, device):
                before = time.perf_counter()
                for _ in range(num):
                    call()
                total += time.perf_counter() - before
        samples.append(total / num / len(calls))
    return samples


def _in_turn(case: Case, device: str, *, walked: int = 0) -> list[float]:
    """All kinds one after the other; before each the host may read so many bytes, which are not timed."""
    calls, num = _kinds(device, case.shape_size("rows"), case.shape_size("width")), case.shape_size("ops")
    memory = torch.ones(max(walked // 4, 1), dtype=torch.int32)
    calls = (calls * (num // len(calls) + 1))[:num]
    samples = []
    for _ in range(REPETITIONS):
        with _around(case.variant, device):
            took = 0.0
            if walked:
                for call in calls:
                    memory.sum()
                    before = time.perf_counter()
                    call()
                    took += time.perf_counter() - before
            else:
                before = time.perf_counter()
                for call in calls:
                    call()
                took = time.perf_counter() - before
        samples.append(took / num)
    return samples


class _Norm(nn.Module):
    """A norm of single ops, in fp32."""

    def __init__(self, width: int, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class _Layer(nn.Module):
    """A decoder layer in plain PyTorch, of some fifty kernels forward (``layer_launches`` counts them)."""

    def __init__(self, width: int, device: str, *, hooked: bool = False) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False, device=device, dtype=torch.bfloat16)
        self.norms = nn.ModuleList([_Norm(width, device) for _ in range(2)])
        self.joined, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(2 * width, width)
        self.heads = width // HEAD
        if hooked:
            self._hook()

    def _hook(self) -> None:
        """Gradients added to a buffer in a hook of the node that makes them, as Megatron-Core does."""
        self.main = [torch.zeros_like(p, dtype=torch.float32) for p in self.parameters()]
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

    def _turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        return (x * cos) + (torch.cat((-right, left), -1) * sin)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        joined = self.joined(self.norms[0](x)).view(rows, 3, self.heads, width // self.heads)
        q, k, v = joined.unbind(1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q, k = self._turned(q, cos, sin), self._turned(k, cos, sin)
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.squeeze(0).transpose(0, 1).reshape(rows, width))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def _layer(case: Case, device: str, *, variant: str) -> list[float]:
    """One of a few layers: forward with the graph kept, without gradients, or backward (``hooked`` as Megatron)."""
    width, rows = case.shape_size("width"), case.shape_size("rows")
    layers = [_Layer(width, device, hooked=variant == "hooked") for _ in range(LAYERS)]
    leaf = torch.ones(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.ones(rows, 1, HEAD, device=device)
    back = variant in ("bwd", "hooked")
    samples = []
    for _ in range(REPETITIONS):
        for layer in layers:
            layer.zero_grad(set_to_none=True)
        leaf.grad = None

        def forward() -> torch.Tensor:
            x = leaf
            with torch.no_grad() if variant == "no_grad" else torch.enable_grad():
                for layer in layers:
                    x = layer(x, angles)
            return x

        total = forward().float().sum() if back else None
        with _around(case.variant, device):
            before = time.perf_counter()
            if total is None:
                forward()
            else:
                total.backward()
            took = time.perf_counter() - before
        samples.append(took / LAYERS)
    return samples


def _launches(case: Case, device: str) -> list[float]:
    """Not a time: kernels that a layer's forward launches, by the profiler, as if in seconds."""
    if device != "cuda":
        raise UnsupportedCase("counts kernels")
    layer = _Layer(case.shape_size("width"), device)
    x = torch.ones(
        case.shape_size("rows"), case.shape_size("width"), device=device, dtype=torch.bfloat16, requires_grad=True
    )
    angles = torch.ones(case.shape_size("rows"), 1, HEAD, device=device)
    layer(x, angles)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        layer(x, angles)
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    events: list[Any] = profile.profiler.kineto_results.events()
    return [1e-6 * sum(e.device_type() == on_device for e in events)] * REPETITIONS


def _copies(case: Case, device: str, *, direction: str) -> list[float]:
    """FSDP2's copies: bf16 gradients into one fp32 buffer before a reduction, a gathered buffer into parameters."""
    params, numel, ranks = case.shape_size("params"), case.shape_size("numel"), case.shape_size("ranks")
    tensors = [torch.zeros(ranks, numel // ranks, device=device, dtype=torch.bfloat16) for _ in range(params)]
    if direction == "in":
        buffer = torch.zeros(ranks, params * numel // ranks, device=device)
        call: Callable[[], Any] = partial(torch._chunk_cat, tensors, dim=0, num_chunks=ranks, out=buffer)
    else:
        buffer = torch.zeros(ranks, params * numel // ranks, device=device, dtype=torch.bfloat16)
        sizes = [numel // ranks] * params
        call = partial(torch.split_with_sizes_copy, buffer, sizes, dim=1, out=tensors)
    samples = []
    for _ in range(REPETITIONS):
        times = []
        for _ in range(5):
            _synchronize(device)
            before = time.perf_counter()
            call()
            times.append(time.perf_counter() - before)
        samples.append(statistics.median(times))
    _synchronize(device)
    return samples


_OPS: dict[str, Callable[[Case, str], list[float]]] = {  # of one op of the mean kind, one layer, one call
    "alone": _alone,
    "in_turn": _in_turn,
    "in_turn_walked_4m": partial(_in_turn, walked=4 * 2**20),
    "in_turn_walked_64m": partial(_in_turn, walked=64 * 2**20),
    "layer": partial(_layer, variant="fwd"),
    "layer_no_grad": partial(_layer, variant="no_grad"),
    "layer_bwd": partial(_layer, variant="bwd"),
    "layer_hooked": partial(_layer, variant="hooked"),
    "layer_launches": _launches,
    "experts": expert_host_times,
    "experts_no_grad": expert_host_times,
    "experts_bwd": expert_host_times,
    "chunk_cat": partial(_copies, direction="in"),
    "split_copy": partial(_copies, direction="out"),
}
