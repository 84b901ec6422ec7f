"""All ops that a rank's streams run, in the order in which they are launched, each with those that it waits for."""

from __future__ import annotations

from collections.abc import Iterable

from mofa.blocks.work import Work
from mofa.cost.block.tape_clock import EXPOSED
from mofa.replay.time.kernel_runs import FAMILY, NOW, SideStreamOp
from mofa.replay.time.time_replayed import StreamOp

COMPUTE = "compute"


class OpRecorder:
    """Told by a rank's clocks of everything that runs.

    Attributes
    ----------
    ops
        In the order of their launches. ``after`` of each has the positions of ops that must end before it begins.
    place
        The block whose ops come next; behind their names.
    ops_of_computations
        The first op of each computation, and the one behind its last; two equal ones where its ops are not recorded.
    """

    def __init__(self) -> None:
        self.ops: list[StreamOp] = []
        self.place = ""
        self.ops_of_computations: list[tuple[int, int]] = []
        self._makers: dict[str, tuple[int, ...]] = {}
        """Of a tensor that streams share: the ops after which it is there."""
        self._last: dict[str, int] = {}
        """The last op of a stream, or of a communicator, whose names begin with @."""
        self._awaited: tuple[int, ...] = ()
        """What the computing stream has waited for since its last op."""
        self._host_after: tuple[int, ...] = ()
        """What the host waited for last: it launches nothing before."""

    def await_tensors(self, names: Iterable[str]) -> None:
        """The computing stream waits for tensors of other streams, which may be there."""
        self._awaited += tuple(maker for name in names for maker in self._makers.get(name, ()))

    def await_streams(self) -> None:
        """The computing stream waits for all others."""
        self._awaited += tuple(self._last.values())

    def add_wait(self, name: str, family: int, start_s: float, end_s: float) -> None:
        """The computing stream stands still for a tensor."""
        self.ops.append(StreamOp("wait", self._named(f"waits for {name}"), EXPOSED[family], start_s, end_s))

    def add_computation(
        self, name: str, family: int, start_s: float, end_s: float, works: tuple[Work, ...] = ()
    ) -> None:
        """An op of the computing stream."""
        after = (*self._awaited, *self._host_after, *self._ends(COMPUTE))
        self._awaited = ()
        self._add(StreamOp(COMPUTE, self._named(name), EXPOSED[family], start_s, end_s, works, _sorted(after)))

    def mark_tensors_ready(self, names: Iterable[str]) -> None:
        """Tensors are there once the computing stream has come so far."""
        self._makers |= dict.fromkeys(names, self._now)

    def add_side_op(self, step: SideStreamOp, start_s: float, end_s: float) -> None:
        """An op of another stream; one that takes no time only hands on what it reads."""
        communicator = "@" + step.communicator if step.communicator else step.stream
        after = [*self._ends(step.stream), *self._ends(communicator), *self._host_after]
        for name in step.reads:
            after += self._now if name == NOW else self._makers.get(name, ())
        if end_s > start_s:
            named = self._named(step.name)
            self._add(
                StreamOp(step.stream, named, EXPOSED[step.family], start_s, end_s, step.works, _sorted(after)),
                communicator,
            )
            after = [len(self.ops) - 1]
        self._makers |= dict.fromkeys(step.writes, _sorted(after))

    def alias_tensor(self, name: str, source: str) -> None:
        """A tensor is there when another is."""
        self._makers[name] = self._makers.get(source, ())

    def synchronise(self, reads: Iterable[str]) -> None:
        """The host waits for the computing stream, or for tensors of others."""
        awaited = [maker for name in reads for maker in self._makers.get(name, ())]
        self._host_after = _sorted(awaited) if awaited else self._now

    def end_computation(self, first: int) -> None:
        """A computation is over whose ops begin at ``first``."""
        self.ops_of_computations.append((first, len(self.ops)))
        if first == len(self.ops):  # nothing is known of what it launched
            self._makers, self._last, self._awaited, self._host_after = {}, {}, (), ()

    def add_end_of_step(self, begin_s: float, parts: Iterable[tuple[str, str, float, tuple[Work, ...]]]) -> None:
        """What follows when all ranks have met: name, family, seconds and works, one part after the other."""
        self.place = ""
        for name, family, seconds, works in parts:
            if seconds > 0.0:
                self.add_computation(name, FAMILY[family], begin_s, begin_s + seconds, works)
                begin_s += seconds

    @property
    def _now(self) -> tuple[int, ...]:
        """What must be over where the computing stream is."""
        return _sorted((*self._awaited, *self._ends(COMPUTE)))

    def _ends(self, stream: str) -> tuple[int, ...]:
        return (self._last[stream],) if stream in self._last else ()

    def _add(self, op: StreamOp, communicator: str = "") -> None:
        self._last[op.stream] = len(self.ops)
        if communicator:
            self._last[communicator] = len(self.ops)
        self.ops.append(op)

    def _named(self, name: str) -> str:
        return f"{name} · {self.place}" if self.place else name


def _sorted(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))
