"""The clocks of a tape by ``native_clock.c``, where that is compiled: of several candidates at once."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import BoolK, FloatK, stack_rows
from mofa.blocks.op import Op
from mofa.blocks.work import Collective, HostSync
from mofa.compiled_parts import Signature, load_compiled_part
from mofa.cost.block.durations import OpTimingMachine
from mofa.cost.block.streams import MOVES, OWN_ORDER

ArrayK = NDArray[np.float64]

SOURCE = Path(__file__).with_name("native_clock.c")
LIBRARY = SOURCE.with_suffix(".so")
COMPUTE, SEND, SYNC = range(3)
MAY_PASS, WATCHED, OWN, VIEW = 1, 2, 4, 8
ABSENT, EVERYWHERE = -1, -1
MOST = 16
"""Families of which a tensor may have been made at most. [-]"""
IN_WORK = 5
"""Rows of what is worked with beside what is made. [-]"""


class _Tape(ctypes.Structure):
    """As ``Tape`` in the compiled part."""

    _fields_ = (
        ("steps", c_void_p), ("names", c_void_p), ("watched", c_void_p), ("took", c_void_p), ("issue", c_void_p),
        ("masks", c_void_p), ("num_steps", c_int64), ("num_k", c_int64), ("num_families", c_int64),
        ("num_streams", c_int64), ("num_groups", c_int64), ("num_names", c_int64), ("most", c_int64),
        ("slowdown", c_void_p), ("communicates", c_int64), ("host_idle", c_int64), ("world", c_int64),
    )  # fmt: skip


class _State(ctypes.Structure):
    """As ``State`` in the compiled part."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            "host", "compute", "loss", "late", "exposed", "regained", "streams", "communicators",
            "ready", "since", "work", "num", "families",
        )
    )  # fmt: skip


SIGNATURES: dict[str, Signature] = {
    "source": (c_char_p, []),
    "pass_once": (None, [POINTER(_Tape), POINTER(_State), c_int32]),
}


@lru_cache(maxsize=1)
def c_library() -> ctypes.PyDLL | None:
    """The compiled part in C; None where there is none of this source, for this machine."""
    return load_compiled_part(SOURCE, LIBRARY, SIGNATURES)


class CompiledTape:
    """A tape's ops with what the compiled part reads of them.

    Parameters
    ----------
    families
        What is exposed, in order.
    watched
        Tensors of which other streams ask.
    slowdown
        What computing loses by what other streams do beside it. (K,) or of all [-]
    """

    def __init__(
        self, ops: Sequence[Op], seconds: Sequence[FloatK], issue: Sequence[FloatK], machine: OpTimingMachine,
        families: Sequence[str], watched: set[str], communicates: bool, slowdown: FloatK,
    ) -> None:  # fmt: skip
        self.families, self.num_k = families, machine.num_k
        self.masks = _Masks(self.num_k)
        self.names: dict[str, int] = {}
        self.streams: dict[str, int] = {}
        self.groups: dict[str, int] = {"world": 0}
        self._family_of = {name: n for n, name in enumerate(families, 1)}
        name_list: list[int] = []
        steps = [_step(self, op, machine, watched, name_list) for op in ops]
        took = [
            machine.cluster.sync_s + op.work.host_s if isinstance(op.work, HostSync) else op_s
            for op, op_s in zip(ops, seconds, strict=True)
        ]
        senders = {op.family for op in ops if op.stream != "compute"}
        self.most = len(senders) + 1
        self.arrays = (
            np.array(steps, dtype=np.int32), np.array(name_list, dtype=np.int32),
            np.array([name in watched for name in self.names], dtype=np.uint8), stack_rows(took, self.num_k),
            stack_rows(issue, self.num_k), self.masks.stacked(), stack_rows([slowdown], self.num_k),
        )  # fmt: skip
        *arrays, slowdowns = [array.ctypes.data for array in self.arrays]
        self.struct = _Tape(
            *arrays, len(steps), self.num_k, len(families) + 2,
            len(self.streams), len(self.groups), len(self.names), self.most,
            slowdowns, communicates, families.index("host_idle") + 1, 0,
        )  # fmt: skip

    def number_of_family(self, name: str) -> int:
        """Its number: 0 is the compute stream itself, the last what is never exposed."""
        return self._family_of.get(name, len(self.families) + 1)


def _step(
    tape: CompiledTape, op: Op, machine: OpTimingMachine, watched: set[str], name_list: list[int]
) -> tuple[int, ...]:  # fmt: skip
    """As ``Step`` in the compiled part."""
    names = tape.names
    begin = len(name_list)
    name_list += [names.setdefault(name, len(names)) for name in (*op.reads, *op.writes)]
    may_pass = bool(op.reads) and (op.work is None or op.present is not True)
    flags = MAY_PASS * may_pass + VIEW * (op.work is None)
    kind, stream, group, on_world = COMPUTE, 0, ABSENT, 0
    if type(op.work) is HostSync:
        kind = SYNC
    elif op.stream != "compute":
        kind, stream = SEND, tape.streams.setdefault(op.stream, len(tape.streams))
        flags += OWN * (op.stream in OWN_ORDER)
        if type(op.work) is Collective:
            group = tape.groups.setdefault(op.work.group, len(tape.groups))
            on_world = tape.masks.row_of(machine.uses_world_communicator(op.work.group))
    elif watched and not watched.isdisjoint(op.writes):
        flags += WATCHED
    present = EVERYWHERE if op.present is True else tape.masks.row_of(op.present)
    num_reads = len(op.reads)
    return (
        kind, flags, tape.number_of_family(op.family), stream, group, present, on_world, begin, num_reads,
        begin + num_reads, len(op.writes),
    )  # fmt: skip


class _Masks:
    """Masks over the candidates, each once; the first is nowhere."""

    def __init__(self, num_k: int) -> None:
        self.masks: list[BoolK] = [False]
        self.rows: dict[int, int] = {id(False): 0}
        self.num_k = num_k

    def row_of(self, mask: BoolK) -> int:
        """The row of one."""
        row = self.rows.get(id(mask))
        if row is None:
            row = self.rows[id(mask)] = len(self.masks)
            self.masks.append(mask)
        return row

    def stacked(self) -> NDArray[np.uint8]:
        """All of them. (masks, K)"""
        out = np.empty((len(self.masks), self.num_k), dtype=np.uint8)
        for row, mask in zip(out, self.masks, strict=True):
            row[:] = mask
        return out


class CompiledStreamClocks:
    """Clocks of one tape's streams in the compiled part, as :class:`mofa.cost.block.streams.TapeStreamClocks`; the host
    begins ``host_s``, ahead of all or not. [s]"""

    def __init__(self, compiled: ctypes.PyDLL, tape: CompiledTape, host_s: float, *, is_ahead: bool) -> None:
        num_families, num_names = len(tape.families) + 2, len(tape.names)
        sizes = {
            "host": 1, "compute": 1, "loss": 1, "late": 1, "exposed": num_families, "regained": num_families,
            "streams": 2 * len(tape.streams), "communicators": 2 * len(tape.groups),
            "ready": num_names * tape.most, "since": num_names, "work": IN_WORK + tape.most,
        }  # fmt: skip
        ends = np.cumsum([*sizes.values()]).tolist()
        self.places = {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}
        self.compiled, self.tape, self.is_ahead = compiled, tape, is_ahead
        self._hold(np.zeros((ends[-1], tape.num_k)), np.full((1 + tape.most, num_names), ABSENT, dtype=np.int32))
        self._rows("host")[:] = host_s
        self._rows("since")[:] = MOVES

    def _hold(self, rows: ArrayK, counts: NDArray[np.int32]) -> None:
        """Have clocks in rows, and how many families make each tensor, and which."""
        self.rows, self.counts = rows, counts
        first = rows.ctypes.data
        pointers = [first + place.start * rows.strides[0] for place in self.places.values()]
        num = counts.ctypes.data
        self.struct = _State(*pointers, num, num + counts.strides[0])

    def _rows(self, name: str) -> ArrayK:
        return self.rows[self.places[name]]

    @property
    def host(self) -> ArrayK:
        """The host's clock. (K,) [s]"""
        clock: ArrayK = self._rows("host")[0].copy()
        return clock

    @property
    def compute(self) -> ArrayK:
        """The compute stream's. (K,) [s]"""
        clock: ArrayK = self._rows("compute")[0].copy()
        return clock

    @property
    def issue_delay_s(self) -> ArrayK:
        """How much later anything is issued than computed. (K,) [s]"""
        clock: ArrayK = self._rows("late")[0].copy()
        return clock

    @property
    def regained(self) -> dict[str, FloatK]:
        """What waits gave back of computing's loss in this repetition, by family. (K,) each [s]"""
        return dict(zip(self.tape.families, self._rows("regained")[1:-1].copy(), strict=True))

    def with_host_ahead(self, ahead_s: float) -> CompiledStreamClocks:
        """The clocks with the host so far ahead of the device (negative). [s]"""
        other = copy.copy(self)
        other._hold(self.rows.copy(), self.counts.copy())
        other._rows("host")[:] = self.compute + ahead_s
        other.is_ahead = False
        return other

    def play_tape(self) -> dict[str, FloatK]:
        """Pass the tape once; what the compute stream did and waited for. (K,) each [s]"""
        self.compiled.pass_once(self.tape.struct, self.struct, self.is_ahead)
        return dict(zip(self.tape.families, self._rows("exposed")[1:-1].copy(), strict=True))
