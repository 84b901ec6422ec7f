"""How a host's seconds of modules are timed: chains of them, a recorder of rows, and the host's pace beside each.

The cases are in :mod:`mofa.calibrate.bench.te_modules`, :mod:`~mofa.calibrate.bench.te_experts` and
:mod:`~mofa.calibrate.bench.te_models`, the command in :mod:`mofa.calibrate.bench.te_host`.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mofa import host_pace
from mofa.calibrate.bench.torch_timing import median_and_percentiles
from mofa.calibrate.cases import Case, Sample, Shape
from mofa.calibrate.measurements import append_row

FAMILY = "te_host"
REPETITIONS, DROPPED = 13, 3
FEWEST = 5
"""Bursts, how many of the first are left out, and the fewest that count: the others are left out where a core's
neighbour was busy (:class:`mofa.host_pace.QuietCorePinner`)."""


@dataclass
class LayerChain:
    """One layer after the other, from ``source`` on; or ``separate``, each from a source of its own."""

    steps: Sequence[Callable[[Any], Any]]
    sources: Sequence[torch.Tensor]
    parameters: Sequence[torch.Tensor] = ()
    around: Callable[[], Any] = contextlib.nullcontext
    separate: bool = False
    before: Callable[[], None] | None = None
    """Called ahead of each burst, untimed."""
    sizes: Shape = field(default_factory=dict)
    dtype: str = "bf16"
    per: int = 1
    """Modules in each step."""

    def forward(self) -> list[torch.Tensor]:
        """The roots of the graph."""
        with self.around():
            if self.separate:
                return [step(x) for step, x in zip(self.steps, self.sources, strict=True)]
            x = self.sources[0]
            for step in self.steps:
                x = step(x)
            return [x]

    def clear_gradients(self) -> None:
        """No gradient anywhere, as Megatron's hooks leave it."""
        for x in (*self.sources, *self.parameters):
            x.grad = None
        if self.before is not None:
            self.before()


class DeviceWaitTimer:
    """Seconds that the host spends waiting for the device in calls that say so; counted apart."""

    def __init__(self) -> None:
        self.seconds, self._inside = 0.0, False
        for owner, name in (
            (torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.Tensor, "item"),
            (torch.Tensor, "tolist"), (torch.Tensor, "cpu"), (torch.Tensor, "nonzero"),
        ):  # fmt: skip
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside, began = True, time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - began

        return counted


class HostPaceSample(NamedTuple):
    """A host's pace at one moment: of a small op, and of a layer each way."""

    small_op_s: float
    layer_fwd_s: float
    """A layer of Transformer Engine, forward. [s]"""
    layer_bwd_s: float
    """Its way back, on autograd's thread. [s]"""

    def layer_times_over_given(self, layer_s: tuple[float, float]) -> tuple[float, float]:
        """A layer's time at this pace over the time given, each way: above 1 on a slower host. [-]"""
        return self.layer_fwd_s / layer_s[0], self.layer_bwd_s / layer_s[1]


@dataclass
class RowRecorder:
    """Writes rows; knows what is left of the time; keeps what the profiler looks at later."""

    out: Path
    gpu: str
    host: str
    writes: bool
    waits: DeviceWaitTimer
    deadline: float
    pace: HostPaceSample
    """The host's at the beginning, for which all times are told."""
    cores: host_pace.QuietCorePinner
    later: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    nodes: dict[str, dict[str, int]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def seconds_to_deadline(self) -> float:
        """Seconds until the deadline. [s]"""
        return self.deadline - time.monotonic()

    def write_row(self, op: str, variant: str, dtype: str, sizes: Shape, times_s: Sequence[float]) -> Sample:
        """Append one row, on the first rank."""
        sample = median_and_percentiles(times_s)
        if self.writes:
            append_row(self.out, Case(FAMILY, op, variant, dtype, "grid", sizes), sample, self.gpu, self.host)
        return sample

    def write_pace_rows(self, op: str, dtype: str, sizes: Shape) -> None:
        """The pace that a case's times are told for, beside them."""
        for name, seconds in self.pace._asdict().items():
            self.write_row(op, name.removesuffix("_s"), dtype, sizes, [seconds])


def time_layer_chain(op: str, chain: LayerChain, recorder: RowRecorder) -> None:
    """Rows of a chain: forward with its graph kept, backward, at the host's pace at the beginning."""
    layer = host_pace.TransformerEngineLayer()
    forward, backward, quiet = [], [], []
    num = len(chain.steps) * chain.per
    for _ in range(REPETITIONS):
        chain.clear_gradients()
        settled = recorder.cores.stay_or_move_to_quiet()
        ahead_scale, behind_scale = recorder.pace.layer_times_over_given(layer.forward_and_backward_s(5))
        began = time.perf_counter()
        roots = chain.forward()
        forward.append(ahead_scale * (time.perf_counter() - began) / num)
        grads = [torch.ones_like(root) for root in roots]
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.autograd.backward(roots, grads)
        backward.append(behind_scale * (time.perf_counter() - began) / num)
        torch.cuda.synchronize()
        quiet.append(settled and recorder.cores.is_still_quiet())
    recorder.cores.release()
    forward, backward = ([times[i] for i in quiet_sample_indices(times, quiet)] for times in (forward, backward))
    sizes: Shape = {"ops": num, **chain.sizes}
    ahead = recorder.write_row(op, "fwd", chain.dtype, sizes, forward)
    behind = recorder.write_row(op, "bwd", chain.dtype, sizes, backward)
    recorder.write_pace_rows(op, chain.dtype, sizes)
    label = case_label(op, chain.dtype, sizes)
    recorder.nodes[label] = count_autograd_nodes(chain.forward())
    recorder.later += [(f"{label}|fwd", lambda: _again(chain, None)), (f"{label}|bwd", lambda: _again(chain, "bwd"))]
    if recorder.writes:
        print(f"{label:58s} {ahead.median_s * 1e6:8.1f} {behind.median_s * 1e6:8.1f} us each", flush=True)


def quiet_sample_indices(times: Sequence[float], quiet: Sequence[bool], dropped: int = DROPPED) -> list[int]:
    """Indices of the samples behind the first ``dropped`` whose cores stayed quiet; if too few, of the fastest."""
    behind_dropped = range(dropped, len(times))
    alone = [i for i in behind_dropped if quiet[i]]
    return alone if len(alone) >= FEWEST else sorted(behind_dropped, key=times.__getitem__)[:FEWEST]


def case_label(op: str, dtype: str, sizes: Shape) -> str:
    """A case in one word."""
    return " ".join([op, dtype, *(f"{name}={value}" for name, value in sizes.items())])


_ROOTS: list[list[torch.Tensor]] = []


def _again(chain: LayerChain, variant: str | None) -> None:
    """Forward, keeping its roots for the backward that comes next."""
    if variant is None:
        chain.clear_gradients()
        _ROOTS[:] = [chain.forward()]
    else:
        (roots,) = _ROOTS
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def count_autograd_nodes(roots: Sequence[torch.Tensor]) -> dict[str, int]:
    """Nodes of the graph behind tensors, by name."""
    counts: collections.Counter[str] = collections.Counter()
    seen, todo = set(), [root.grad_fn for root in roots]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        counts[node.name()] += 1
        todo += [after for after, _ in node.next_functions]
    return dict(counts)
