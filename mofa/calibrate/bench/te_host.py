"""The host under Transformer Engine and Megatron-Core: ``python -m mofa.calibrate.bench.te_host OUT [--gpus 2]``.

Host seconds of each module's forward and backward, of chains that the queue takes, at widths at which the device keeps
up; of whole models by their parts; beside each what a small op takes. A second pass, under a profiler, lists the
kernels that each case launches. Transformer Engine and Megatron-Core must be importable. A case that fails is reported
and skipped.

``te_host.csv`` has rows as :mod:`mofa.calibrate.measurements` reads them: ``op`` is the case, ``variant`` the way
(``fwd``, ``bwd``, a part of a step, the pace). Work is issued on cores whose neighbours are quiet, and what they were
not all the while does not count (:class:`mofa.host_pace.Cores`). Beside that every time is divided by what
a layer of Transformer Engine takes right before it, each way by its own, and told for the pace that the host had at the
beginning: every case's ``layer_fwd`` and ``layer_bwd``, with the ``small_op`` of the same moments. ``kernels.json`` has
each case's kernels by name, ``nodes.json`` the nodes of its graph.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mofa import host_pace
from mofa.calibrate.bench.torch_bench import environment
from mofa.calibrate.bench.torch_timing import summarise
from mofa.calibrate.cases import Case, Sample, Shape
from mofa.calibrate.measurements import append_row
from mofa.calibrate.run import host_id

FAMILY = "te_host"
ROUNDS, DROPPED = 13, 3
FEWEST = 5
"""Bursts, how many of the first are left out, and the fewest that count: the others are left out where a core's
neighbour was busy (:class:`mofa.host_pace.Cores`)."""


@dataclass
class Chain:
    """One layer after the other, from ``source`` on; or ``apart``, each from a source of its own."""

    steps: Sequence[Callable[[Any], Any]]
    sources: Sequence[torch.Tensor]
    parameters: Sequence[torch.Tensor] = ()
    around: Callable[[], Any] = contextlib.nullcontext
    apart: bool = False
    before: Callable[[], None] | None = None
    """Called ahead of each burst, untimed."""
    sizes: Shape = field(default_factory=dict)
    dtype: str = "bf16"
    per: int = 1
    """Modules in each step."""

    def forward(self) -> list[torch.Tensor]:
        """The roots of the graph."""
        with self.around():
            if self.apart:
                return [step(x) for step, x in zip(self.steps, self.sources, strict=True)]
            x = self.sources[0]
            for step in self.steps:
                x = step(x)
            return [x]

    def clear(self) -> None:
        """No gradient anywhere, as Megatron's hooks leave it."""
        for x in (*self.sources, *self.parameters):
            x.grad = None
        if self.before is not None:
            self.before()


class Waits:
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


class Paces(NamedTuple):
    """A host's pace at one moment."""

    small_op_s: float
    layer_fwd_s: float
    """A layer of Transformer Engine, forward. [s]"""
    layer_bwd_s: float
    """Its way back, on autograd's thread. [s]"""

    def over(self, layer_s: tuple[float, float]) -> tuple[float, float]:
        """How much faster a host at this pace is than one on which a layer takes so long each way. [-]"""
        return self.layer_fwd_s / layer_s[0], self.layer_bwd_s / layer_s[1]


@dataclass
class Recorder:
    """Writes rows; knows what is left of the time; keeps what the profiler looks at later."""

    out: Path
    gpu: str
    host: str
    writes: bool
    waits: Waits
    deadline: float
    pace: Paces
    """The host's at the beginning, for which all times are told."""
    cores: host_pace.Cores
    later: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    nodes: dict[str, dict[str, int]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def left_s(self) -> float:
        """Seconds until the deadline. [s]"""
        return self.deadline - time.monotonic()

    def row(self, op: str, variant: str, dtype: str, sizes: Shape, times_s: Sequence[float]) -> Sample:
        """Append one row, on the first rank."""
        sample = summarise(times_s)
        if self.writes:
            append_row(self.out, Case(FAMILY, op, variant, dtype, "grid", sizes), sample, self.gpu, self.host)
        return sample

    def pace_rows(self, op: str, dtype: str, sizes: Shape) -> None:
        """The pace that a case's times are told for, beside them."""
        for name, seconds in self.pace._asdict().items():
            self.row(op, name.removesuffix("_s"), dtype, sizes, [seconds])


def time_chain(op: str, chain: Chain, recorder: Recorder) -> None:
    """Rows of a chain: forward with its graph kept, backward, at the host's pace at the beginning."""
    layer = host_pace.EngineLayer()
    forward, backward, quiet = [], [], []
    num = len(chain.steps) * chain.per
    for _ in range(ROUNDS):
        chain.clear()
        settled = recorder.cores.settle()
        ahead_scale, behind_scale = recorder.pace.over(layer.seconds(5))
        began = time.perf_counter()
        roots = chain.forward()
        forward.append(ahead_scale * (time.perf_counter() - began) / num)
        grads = [torch.ones_like(root) for root in roots]
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.autograd.backward(roots, grads)
        backward.append(behind_scale * (time.perf_counter() - began) / num)
        torch.cuda.synchronize()
        quiet.append(settled and recorder.cores.still_quiet())
    recorder.cores.release()
    forward, backward = ([times[i] for i in that_count(times, quiet)] for times in (forward, backward))
    sizes: Shape = {"ops": num, **chain.sizes}
    ahead = recorder.row(op, "fwd", chain.dtype, sizes, forward)
    behind = recorder.row(op, "bwd", chain.dtype, sizes, backward)
    recorder.pace_rows(op, chain.dtype, sizes)
    label = label_of(op, chain.dtype, sizes)
    recorder.nodes[label] = nodes(chain.forward())
    recorder.later += [(f"{label}|fwd", lambda: _again(chain, None)), (f"{label}|bwd", lambda: _again(chain, "bwd"))]
    if recorder.writes:
        print(f"{label:58s} {ahead.median_s * 1e6:8.1f} {behind.median_s * 1e6:8.1f} us each", flush=True)


def that_count(times: Sequence[float], quiet: Sequence[bool], dropped: int = DROPPED) -> list[int]:
    """Numbers of those behind the first few whose cores were quiet all the while; of the lowest, if too few were."""
    late = range(dropped, len(times))
    alone = [i for i in late if quiet[i]]
    return alone if len(alone) >= FEWEST else sorted(late, key=times.__getitem__)[:FEWEST]


def label_of(op: str, dtype: str, sizes: Shape) -> str:
    """A case in one word."""
    return " ".join([op, dtype, *(f"{name}={value}" for name, value in sizes.items())])


_KEPT: list[list[torch.Tensor]] = []


def _again(chain: Chain, way: str | None) -> None:
    """Forward, keeping its roots for the backward that comes next."""
    if way is None:
        chain.clear()
        _KEPT[:] = [chain.forward()]
    else:
        (roots,) = _KEPT
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def nodes(roots: Sequence[torch.Tensor]) -> dict[str, int]:
    """Nodes of the graph behind tensors, by name."""
    found: collections.Counter[str] = collections.Counter()
    seen, todo = set(), [root.grad_fn for root in roots]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found[node.name()] += 1
        todo += [after for after, _ in node.next_functions]
    return dict(found)


def kernels(recorder: Recorder) -> None:
    """Every case once more under a profiler: ``kernels.json``, kernels of each case by name, count and time [us]."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for i, (label, call) in enumerate(recorder.later):
            if recorder.left_s() < -25:
                break
            try:
                with torch.profiler.record_function(f"{FAMILY}:{i}"):
                    call()
                    torch.cuda.synchronize()
            except Exception as error:
                recorder.failed.append(f"kernels of {label}: {error}")
    if not recorder.writes:
        return
    on_device, ranges = [], []
    cuda = torch.autograd.DeviceType.CUDA
    for event in profile.profiler.kineto_results.events():
        name, start, took = event.name(), event.start_ns(), event.duration_ns()
        if name.startswith(f"{FAMILY}:"):
            if event.device_type() != cuda:
                ranges.append((start, start + took, int(name.split(":")[1])))
        elif event.device_type() == cuda:
            on_device.append((start, name, took))
    ranges.sort()
    on_device.sort()
    told: dict[str, list[tuple[str, int, float]]] = {}
    position = 0
    for start, end, i in ranges:
        found: dict[str, list[int]] = collections.defaultdict(list)
        while position < len(on_device) and on_device[position][0] < end:
            if on_device[position][0] >= start:
                found[on_device[position][1][:120]].append(on_device[position][2])
            position += 1
        told[recorder.later[i][0]] = [
            (name, len(times), round(sum(times) / len(times) / 1e3, 3)) for name, times in found.items()
        ]
    (recorder.out / "kernels.json").write_text(json.dumps(told, indent=0) + "\n", encoding="utf-8")


def cases(recorder: Recorder, todo: Sequence[tuple[str, Callable[[], None]]]) -> None:
    """Run what the time allows; a failure is a line of ``failed.txt``."""
    for name, call in todo:
        if recorder.left_s() < 0:
            recorder.failed.append(f"{name}: no time left")
            continue
        try:
            call()
        except Exception as error:
            torch.cuda.synchronize()
            text = str(error).splitlines()[0][:300] if str(error) else ""
            recorder.failed.append(f"{name}: {type(error).__name__}: {text}\n{traceback.format_exc()[-1500:]}")
            print(f"{name}: {type(error).__name__}: {text}", flush=True)


def _fast_pace(cores: host_pace.Cores, readings: int = 25) -> Paces:
    """Low quartiles of the beginning on quiet cores."""
    layer = host_pace.EngineLayer()
    read = []
    for _ in range(readings):
        cores.settle()
        read.append((host_pace.small_op_s(), *layer.seconds()))
    cores.release()
    return Paces(*(sorted(column)[readings // 4] for column in zip(*read, strict=True)))


def one_rank(rank: int, gpus: int, port: int, out: str, limit_s: float, wanted: list[str]) -> None:
    """All cases of one process."""
    started = time.monotonic()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(gpus), LOCAL_RANK=str(rank)
    )
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch.cuda.set_device(rank)
    from mofa.calibrate.bench import te_models, te_modules

    waits, cores = Waits(), host_pace.Cores(rank, torch.cuda.device_count())
    described = environment("cuda")
    recorder = Recorder(
        Path(out), torch.cuda.get_device_name(), host_id(str(described.get("gpu_ids", ""))), rank == 0, waits,
        started + limit_s, _fast_pace(cores), cores,
    )  # fmt: skip
    if rank == 0:
        recorder.out.mkdir(parents=True, exist_ok=True)
        described |= {"host": recorder.host, "gpus_used": gpus, **te_modules.versions()}
        (recorder.out / "environment.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    te_modules.start(gpus, {})
    todo = te_modules.alone(recorder) + te_models.alone(recorder) if gpus == 1 else []
    if gpus == 2:
        todo = te_modules.pairs(recorder) + te_models.pairs(recorder)
    todo = [(name, call) for name, call in todo if not wanted or any(name.startswith(word) for word in wanted)]
    cases(recorder, todo)
    if gpus == 1:
        kernels(recorder)
    if rank == 0:
        (recorder.out / "nodes.json").write_text(json.dumps(recorder.nodes, indent=1) + "\n", encoding="utf-8")
        (recorder.out / "failed.txt").write_text("\n".join(recorder.failed) + "\n", encoding="utf-8")
        print(f"{len(recorder.failed)} failed, {time.monotonic() - started:.0f} s", flush=True)
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("only", nargs="*", help="beginnings of names of cases")
    parser.add_argument("--gpus", type=int, default=1, choices=(1, 2))
    parser.add_argument("--limit", type=float, default=130.0, help="seconds after which no case begins")
    given = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = given.gpus, port, str(given.out), given.limit, given.only
    ranks = torch.multiprocessing.spawn(one_rank, arguments, nprocs=given.gpus, join=False)
    ended = time.monotonic() + given.limit + 90
    try:
        while not ranks.join(timeout=0.5) and time.monotonic() < ended:
            pass
    finally:
        for process in ranks.processes:
            if process.is_alive():
                process.terminate()


if __name__ == "__main__":
    main()
