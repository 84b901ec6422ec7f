"""What Perfetto's importer does with a JSON trace, rule by rule, and what it would have to drop.

After the trace processor's own source: ``json_trace_tokenizer.cc`` and ``json_trace_parser.cc`` (phases, times, names,
counters), ``slice_tracker.cc`` (what nests) and ``flow_tracker.cc`` (what an arrow is bound to). It reads microseconds
as whole nanoseconds, sorts events by time and keeps a stack of open slices per track; each thing that it drops counts
in one of its ``stats``.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Imported:
    """What came out: slices per track in order, values per counter, arrows from slice to slice, names, and drops."""

    slices: dict[tuple[int, int], list[tuple[int, int, str]]] = field(default_factory=lambda: defaultdict(list))
    counters: dict[tuple[int, str], list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    flows: list[tuple[str, str]] = field(default_factory=list)
    processes: dict[int, str] = field(default_factory=dict)
    threads: dict[tuple[int, int], str] = field(default_factory=dict)
    stats: Counter[str] = field(default_factory=Counter)


def imported(text: str) -> Imported:
    """Read a trace's text."""
    trace = json.loads(text, parse_constant=_no_number)
    out = Imported()
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    timed = []
    for event in events:
        if not (isinstance(event.get("ph"), str) and isinstance(event.get("name"), str) and event["name"]):
            out.stats["json_tokenizer_failure"] += 1
        elif type(event.get("pid")) is not int or type(event.get("tid")) is not int:
            out.stats["json_parser_failure"] += 1
        elif event["ph"] == "M":
            _name(out, event)
        elif event["ph"] not in "XCsf" or _ns(event.get("ts")) < 0:
            out.stats["json_parser_failure"] += 1
        else:
            timed.append((_ns(event["ts"]), event))
    open_slices: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    begun: dict[object, str] = {}
    for ts, event in sorted(timed, key=lambda item: item[0]):  # stable: of equal times the first in the file
        if event["ph"] == "X":
            _slice(out, open_slices[event["pid"], event["tid"]], ts, event)
        elif event["ph"] == "C":
            _count(out, ts, event)
        else:
            _arrow(out, open_slices[event["pid"], event["tid"]], begun, event, ts)
    out.stats["flow_without_end"] = len(begun)
    return out


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _ns(us: object) -> int:
    return round(us * 1000) if isinstance(us, (int, float)) and not isinstance(us, bool) else -1


def _name(out: Imported, event: dict[str, Any]) -> None:
    if event["name"] == "process_name":
        out.processes[event["pid"]] = event["args"]["name"]
    elif event["name"] == "thread_name":
        out.threads[event["pid"], event["tid"]] = event["args"]["name"]
    elif (
        event["name"] not in ("process_sort_index", "thread_sort_index") or type(event["args"]["sort_index"]) is not int
    ):
        out.stats["json_parser_failure"] += 1


def _slice(out: Imported, stack: list[tuple[int, int, str]], ts: int, event: dict[str, Any]) -> None:
    dur = _ns(event.get("dur", -1))
    if dur < 0:
        out.stats["slice_negative_duration"] += 1
        return
    while stack and (stack[-1][1] < ts or (stack[-1][1] == ts and not (stack[-1][0] == stack[-1][1] and dur == 0))):
        stack.pop()
    if stack and ts < stack[-1][1] < ts + dur:
        out.stats["slice_drop_overlapping_complete_event"] += 1
        return
    one = (ts, ts + dur, event["name"])
    stack.append(one)
    out.slices[event["pid"], event["tid"]].append(one)


def _count(out: Imported, ts: int, event: dict[str, Any]) -> None:
    values = event.get("args", {})
    if not values or any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in values.values()):
        out.stats["json_parser_failure"] += 1
    for key, value in values.items():
        out.counters[event["pid"], f"{event['name']} {key}"].append((ts, value))


def _arrow(
    out: Imported, stack: list[tuple[int, int, str]], begun: dict[object, str], event: dict[str, Any], ts: int
) -> None:  # fmt: skip
    key = event.get("cat"), event["name"], event.get("id")
    if type(event.get("id")) is not int:
        out.stats["flow_invalid_id"] += 1
    elif not stack or not (stack[-1][0] <= ts <= stack[-1][1]):
        out.stats["flow_no_enclosing_slice"] += 1
    elif event["ph"] == "s":
        out.stats["flow_duplicate_id"] += key in begun
        begun[key] = stack[-1][2]
    elif key not in begun:
        out.stats["flow_end_without_start"] += 1
    elif event.get("bp") != "e":  # it would be bound to the next slice of the track instead
        out.stats["flow_without_direction"] += 1
    else:
        out.flows.append((begun.pop(key), stack[-1][2]))
