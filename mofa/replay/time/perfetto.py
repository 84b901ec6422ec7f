"""A played step in the trace-event format that Perfetto and Chrome open: a process per rank, a track per stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mofa.replay.time.time_replayed import Computation, ReplayedTime, Transfer
from mofa.schedules.order import ANSWERS, RECEIVES, SENDS

Event = dict[str, Any]
Counter = Callable[[int], Sequence[tuple[float, int, int]]]
"""A rank's memory: seconds, allocated and reserved bytes at instants of the step."""
TRACKS = ("computations", "compute", "tp", "cp", "ep", "dp", "dp_replicate", "fsdp_gather", "fsdp_reduce", "copy")
_TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
_TRANSFER_TRACK = dict(
    zip(_TRANSFERS, ("send forward", "receive forward", "send backward", "receive backward"), strict=True)
)
_WORDS = {
    "F": "forward", "B": "backward", "I": "backward by inputs", "W": "backward by weights", "O": "optimizer",
}  # fmt: skip


def trace_events(played: ReplayedTime, ranks: Sequence[int], counter: Counter | None = None) -> list[Event]:
    """Events of some pipeline ranks of a played step.

    Parameters
    ----------
    played
        The step; ops are shown of the micro-batches that were watched.
    ranks
        Which pipeline ranks are shown.
    counter
        Gives a rank's memory over the step; without it there are no counters.

    Returns
    -------
    list[Event]
        Metadata, complete events (``X``), counters (``C``) and flows (``s`` to ``f``), each track in order of time.

    Notes
    -----
    Times are in microseconds from the first rank's beginning. A flow goes from a send to its receive where both ranks
    are shown. Format: "Trace Event Format", Google, 2016 (docs.google.com/document/d/
    1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
    """
    out: list[Event] = []
    tracks: dict[int, dict[str, int]] = {}
    for rank in ranks:
        tracks[rank] = _tracks(played, rank)
        out += _names(rank, tracks[rank])
    for rank in ranks:
        out += sorted(_slices(played, rank, tracks[rank]), key=lambda event: (event["tid"], event["ts"]))
        if counter is not None:
            out += _counters(rank, counter(rank))
    out += _flows(played, tracks)
    return out


def _tracks(played: ReplayedTime, rank: int) -> dict[str, int]:
    """The numbers of a rank's tracks, by name: computations first, then streams, then sends and receives."""
    streams = {"compute" if op.stream == "wait" else op.stream for op in (played.ops[rank] if played.ops else ())}
    kinds = {t.kind for t in (played.transfers[rank] if played.transfers else ())}
    known = [name for name in TRACKS if name == "computations" or name in streams]
    rest = sorted(streams - set(TRACKS))
    names = [*known, *rest, *(_TRANSFER_TRACK[kind] for kind in _TRANSFERS if kind in kinds)]
    return {name: i for i, name in enumerate(names)}


def _names(rank: int, tracks: Mapping[str, int]) -> Iterator[Event]:
    yield _meta("process_name", rank, 0, {"name": f"pipeline rank {rank}"})
    yield _meta("process_sort_index", rank, 0, {"sort_index": rank})
    for name, number in tracks.items():
        yield _meta("thread_name", rank, number, {"name": name})
        yield _meta("thread_sort_index", rank, number, {"sort_index": number})


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _slices(played: ReplayedTime, rank: int, tracks: Mapping[str, int]) -> Iterator[Event]:
    for span in played.spans[rank]:
        yield _slice(_title(span), span.kind, rank, tracks["computations"], span.start_s, span.end_s,
                     {"chunk": span.chunk, "micro-batch": span.micro_batch})  # fmt: skip
    for op in played.ops[rank] if played.ops else ():
        track = tracks["compute" if op.stream == "wait" else op.stream]
        yield _slice(op.name, op.family, rank, track, op.start_s, op.end_s, {"family": op.family})
    for t in played.transfers[rank] if played.transfers else ():
        yield _slice(_transfer_title(t), "pp", rank, tracks[_TRANSFER_TRACK[t.kind]], t.start_s, t.end_s,
                     {"stage": t.stage, "micro-batch": t.micro_batch})  # fmt: skip


def _title(span: Computation) -> str:
    if span.kind == "O":
        return "optimizer"
    return f"{span.kind} {span.micro_batch}" + (f" chunk {span.chunk}" if span.chunk else "")


def _transfer_title(transfer: Transfer) -> str:
    return f"{_TRANSFER_TRACK[transfer.kind]} {transfer.micro_batch}"


def _slice(name: str, cat: str, pid: int, tid: int, start_s: float, end_s: float, args: dict[str, Any]) -> Event:
    ts = _us(start_s)
    return {
        "ph": "X", "name": name, "cat": _WORDS.get(cat, cat), "pid": pid, "tid": tid, "ts": ts,
        "dur": round(max(_us(end_s) - ts, 0.0), 3), "args": args,
    }  # fmt: skip


def _us(seconds: float) -> float:
    """Microseconds to the nanosecond."""
    return round(seconds * 1e6, 3)


def _counters(rank: int, memory: Sequence[tuple[float, int, int]]) -> Iterator[Event]:
    for time_s, allocated, reserved in memory:
        base = {"ph": "C", "pid": rank, "tid": 0, "ts": _us(time_s)}
        yield {**base, "name": "allocated", "args": {"bytes": allocated}}
        yield {**base, "name": "reserved", "args": {"bytes": reserved}}


def _flows(played: ReplayedTime, tracks: Mapping[int, Mapping[str, int]]) -> Iterator[Event]:
    """An arrow for every send whose receive is shown too."""
    if not played.transfers:
        return
    receives = {
        (t.kind, t.stage, t.micro_batch): (rank, t)
        for rank in tracks for t in played.transfers[rank] if t.kind in RECEIVES
    }  # fmt: skip
    number = 0
    for rank in tracks:
        for t in played.transfers[rank]:
            if t.kind not in SENDS:
                continue
            kind, step = ANSWERS[t.kind]
            received = receives.get((kind, t.stage + step, t.micro_batch))
            if received is None:
                continue
            to, receive = received
            number += 1
            base = {"name": "hand-over", "cat": "pp", "id": number}
            yield {**base, "ph": "s", "pid": rank, "tid": tracks[rank][_TRANSFER_TRACK[t.kind]], "ts": _us(t.start_s)}
            yield {**base, "ph": "f", "bp": "e", "pid": to, "tid": tracks[to][_TRANSFER_TRACK[receive.kind]],
                   "ts": max(_us(receive.start_s), _us(t.start_s))}  # fmt: skip


def evenly_spread_indices(count: int, at_most: int) -> list[int]:
    """``at_most`` numbers below ``count``, the first and the last among them.

    Examples
    --------
    >>> evenly_spread_indices(16, 4), evenly_spread_indices(3, 8)
    ([0, 5, 10, 15], [0, 1, 2])
    """
    if count <= at_most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (at_most - 1)) for i in range(at_most)}) if at_most > 1 else [0]
