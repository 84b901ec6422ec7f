"""Clocks of the host around the parts of a framework's layers, in steps as they are.

Modules are timed by their class, autograd's functions by theirs, checkpoints both ways. What the host waits for the
device within a part is told apart. A clock takes less than a microsecond; parts that call others hold theirs too.
"""

from __future__ import annotations

import csv
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from mofa import host_pace

STEPS = 8
"""Steps that are timed. [-]"""
COLUMNS = ("host_issue_s", "part", "autograd", "micro_batch", "calls", "seconds", "own_s", "waited_s")
"""Columns of the table: a small op between the steps [s]; the part; what autograd does in a forward; which micro-batch;
calls a step [-]; what they take a step, of it what no part within takes, and the wait for the device [s]."""
Replace = Callable[[Any, str, Any], None]
"""Puts something in place of an attribute of an object, for as long as clocks are on."""
Key = tuple[str, str, str]
"""Part, what autograd does, micro-batch."""


@dataclass(frozen=True)
class LayerParts:
    """What of a framework's layers is timed.

    Parameters
    ----------
    modules
        Part of a module, by its class.
    methods
        Methods of a part's module that are timed too, as parts called as they are; those that it has.
    backwards
        Part of an autograd function's way back, by its class; others are ``bk.`` and their class.
    checkpoints
        Autograd functions whose forward is timed too.
    put
        Puts clocks around what else there is: functions, passes, schedules.
    """

    modules: Mapping[str, str]
    methods: Mapping[str, tuple[str, ...]]
    backwards: Mapping[str, str]
    checkpoints: tuple[str, ...]
    put: Callable[[HostPartTimers, Replace], None]


@dataclass
class PartTime:
    """What the calls of a part took the host."""

    calls: int = 0
    seconds: float = 0.0
    own_s: float = 0.0
    waited_s: float = 0.0

    def calls_and_seconds(self) -> tuple[float, ...]:
        """Calls [-], seconds, of these its own, and of these the wait. [s]"""
        return self.calls, self.seconds, self.own_s, self.waited_s


class HostPartTimers:
    """What parts of a step take the host, since :meth:`begin_step`.

    A backward pass runs on a thread of autograd's, for which the one that started it waits: one stack serves both.
    """

    def __init__(self) -> None:
        self.parts: dict[Key, PartTime] = defaultdict(PartTime)
        self._waited_s = 0.0
        self._within: list[float] = [0.0]
        self._passes = {"forward": 0, "backward": 0}
        self._micro_batch = "first"

    def begin_step(self) -> None:
        """Forget what was timed."""
        self.parts.clear()
        self._passes = {"forward": 0, "backward": 0}

    def begin_pass(self, name: str) -> None:
        """The next micro-batch's ``forward`` or ``backward`` begins."""
        self._micro_batch = "later" if self._passes[name] else "first"
        self._passes[name] += 1

    @contextmanager
    def time_part(self, name: str, autograd: str = "") -> Iterator[None]:
        """Time what runs within, as a part."""
        key = (name, autograd, self._micro_batch)
        self._within.append(0.0)
        waited, began = self._waited_s, time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            within = self._within.pop()
            self._within[-1] += seconds
            self.add_call(key, seconds, seconds - within, self._waited_s - waited)

    def add_call(self, key: Key, seconds: float, own_s: float, waited_s: float) -> None:
        """One call more. [s], [s], [s]"""
        part = self.parts[key]
        part.calls += 1
        part.seconds += seconds
        part.own_s += own_s
        part.waited_s += waited_s

    @contextmanager
    def time_wait(self) -> Iterator[None]:
        """Time what runs within as a wait for the device."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - began

    def with_part_timed(
        self, name: str, function: Callable[..., Any], *, is_forward: bool, of_kind: Callable[..., str] | None = None
    ) -> Callable[..., Any]:
        """A function that is timed as a part, with what ``of_kind`` says of its arguments behind the part's name."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            autograd = "" if not is_forward else "records" if torch.is_grad_enabled() else "does not"
            kind = f" {of_kind(*args)}" if of_kind is not None else ""
            with self.time_part(f"{name}{kind}", autograd):
                return function(*args, **kwargs)

        return timed

    def with_pass_timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is a micro-batch's ``forward`` or ``backward``."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.begin_pass(name)
            with self.time_part(name):
                return function(*args, **kwargs)

        return timed

    def with_wait_timed(self, function: Callable[..., Any], waits: Callable[..., bool]) -> Callable[..., Any]:
        """A function that waits for the device where ``waits`` says so of its arguments."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not waits(*args, **kwargs):
                return function(*args, **kwargs)
            with self.time_wait():
                return function(*args, **kwargs)

        return timed

    def with_layer_timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's forward, whose way back is timed too: from its output's gradient to its input's."""
        timed = self.with_part_timed("layer", function, is_forward=True)

        @functools.wraps(function)
        def layer(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            result = timed(hidden_states, *args, **kwargs)
            output = result[0] if isinstance(result, tuple) else result
            if output.requires_grad and hidden_states.requires_grad:
                began: list[float] = []
                output.register_hook(lambda _: began.append(time.perf_counter()))
                hidden_states.register_hook(
                    lambda _: self._add_way_back(time.perf_counter() - began.pop()) if began else None
                )
            return result

        return layer

    def _add_way_back(self, seconds: float) -> None:
        self.add_call(("back", "", self._micro_batch), seconds, 0.0, 0.0)


def _is_on_device(tensor: Any, *_: Any, **__: Any) -> bool:
    return bool(tensor.is_cuda)


def _leaves_device(tensor: Any, *args: Any, **kwargs: Any) -> bool:
    target = args[0] if args else kwargs.get("device")
    return bool(tensor.is_cuda) and str(target) == "cpu" and not kwargs.get("non_blocking", False)


def _autograd_functions() -> list[Any]:
    classes, todo = [], [torch.autograd.Function]
    while todo:
        some = todo.pop().__subclasses__()
        classes += some
        todo += some
    return [cls for cls in classes if "backward" in vars(cls)]


@contextmanager
def _clocks_on(clocks: HostPartTimers, chunks: Sequence[Any], parts: LayerParts) -> Iterator[None]:
    with ExitStack() as patches:

        def replace(owner: Any, name: str, function: Any) -> None:
            patches.enter_context(patch.object(owner, name, function))

        for module in (module for chunk in chunks for module in chunk.modules()):
            part = parts.modules.get(type(module).__name__.removeprefix("FSDP"))
            if part is None:
                continue
            for method in parts.methods.get(part, ()):
                if hasattr(module, method):
                    replace(module, method, clocks.with_part_timed(method, getattr(module, method), is_forward=True))
            forward = module.forward
            timed = (
                clocks.with_layer_timed(forward)
                if part == "layer"
                else clocks.with_part_timed(part, forward, is_forward=True)
            )
            replace(module, "forward", timed)
        for chunk in chunks:
            replace(chunk, "forward", clocks.with_pass_timed("forward", chunk.forward))
        for cls in _autograd_functions():
            name = cls.__name__
            back = clocks.with_part_timed(parts.backwards.get(name, f"bk.{name}"), cls.backward, is_forward=False)
            replace(cls, "backward", staticmethod(back))
            if name in parts.checkpoints:
                replace(
                    cls, "forward", staticmethod(clocks.with_part_timed("checkpoint", cls.forward, is_forward=False))
                )
        parts.put(clocks, replace)
        for name in ("item", "tolist", "cpu"):
            replace(torch.Tensor, name, clocks.with_wait_timed(getattr(torch.Tensor, name), _is_on_device))
        replace(torch.Tensor, "to", clocks.with_wait_timed(torch.Tensor.to, _leaves_device))
        for owner in (torch.cuda.Stream, torch.cuda.Event):
            replace(owner, "synchronize", clocks.with_wait_timed(owner.synchronize, lambda *_: True))
        replace(torch.cuda, "synchronize", clocks.with_wait_timed(torch.cuda.synchronize, lambda *_: True))
        yield


def layer_segment_rows(step: Callable[[], None], chunks: Sequence[Any], parts: LayerParts) -> list[dict[str, Any]]:
    """Rows of a table of parts (:data:`COLUMNS`): medians over steps, a small op timed before and behind each.

    Parameters
    ----------
    step
        One optimizer step.
    chunks
        The model chunks that it steps.
    parts
        Of their layers.
    """
    clocks = HostPartTimers()
    tables: list[dict[Key, tuple[float, ...]]] = []
    with _clocks_on(clocks, chunks, parts):
        step()
        small_ops = [host_pace.small_op_s()]
        for _ in range(STEPS):
            clocks.begin_step()
            with clocks.time_part("step"):
                step()
            tables.append({key: part.calls_and_seconds() for key, part in clocks.parts.items()})
            small_ops.append(host_pace.small_op_s())
    rows = []
    for key in sorted({key for table in tables for key in table}):
        of_steps = zip(*(table.get(key, PartTime().calls_and_seconds()) for table in tables), strict=True)
        values = median(small_ops), *key, *(f"{median(column):.6g}" for column in of_steps)
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def write_layer_segments(step: Callable[[], None], chunks: Sequence[Any], parts: LayerParts, path: Path) -> None:
    """Time parts of layers and write their table."""
    rows = layer_segment_rows(step, chunks, parts)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
