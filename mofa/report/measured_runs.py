"""The table of measured runs that docs/measure.md shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mofa.units import GIB

if TYPE_CHECKING:
    from mofa.measure import Record

BEGIN, END = "<!-- runs -->", "<!-- /runs -->"
_HEAD = (
    "| run | GPUs | strategy | sequence × micro, global | step | spread | allocated | reserved | device | split |\n"
    "|---|---:|---|---|---:|---:|---:|---:|---:|---|\n"
)
_DATA_PARALLEL = {"distributed-optimizer": "dp"}


def strategy_of(record: Record) -> str:
    """What sets a run apart, in a few words: degrees above one, and what differs from the plain run."""
    run = record.run
    s, framework, routing = run.strategy, run.framework, run.routing
    dp = run.gpus // (s["tp"] * s["pp"] * s["cp"])
    words = [f"{name}{s[name]}" for name in ("tp", "pp", "vpp", "cp", "ep") if s[name] > 1]
    if dp > 1:
        kind = str(framework["data_parallel"])
        words.append(f"{_DATA_PARALLEL.get(kind, kind)}{dp}")
    if s["schedule"] not in ("1f1b", "interleaved"):
        words.append(s["schedule"])
    if s["recompute"] != "none":
        words.append(s["recompute"])
    titan = framework["name"] == "torchtitan"
    flags = {
        "compile": framework.get("compile"),
        "expandable": framework.get("allocator") == "expandable",
        "unfused": framework.get("attention") == "unfused",
        "foreach": titan and framework.get("optimizer") == "foreach",
        "overlapped": not titan and framework.get("overlap_grad_reduce"),
    }
    words += [word for word, on in flags.items() if on]
    if routing.kind != "balanced":
        words.append(f"{routing.kind} {routing.s or routing.sigma}")
    return " ".join(words)


def runs_table(records: Iterable[Record]) -> str:
    """A Markdown table with one line a run; memory is the largest of the ranks, in GiB."""
    return _HEAD + "".join(_line(record) for record in records)


def with_table(text: str, records: Iterable[Record]) -> str:
    """A document with the table between its markers brought up to date.

    Examples
    --------
    >>> with_table("a\\n<!-- runs -->\\nold\\n<!-- /runs -->\\nb", []).splitlines()[::4]
    ['a', '<!-- /runs -->']
    """
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{runs_table(records)}{END}{after}"


def _line(record: Record) -> str:
    measured, batch = record.measured, record.run.batch
    allocated = max(rank.peak_allocated_bytes for rank in measured.ranks) / GIB
    reserved = max(rank.peak_reserved_bytes for rank in measured.ranks) / GIB
    device = [rank.peak_device_bytes for rank in measured.ranks]
    known = [value for value in device if value is not None]
    cells = [
        record.run.id,
        str(record.run.gpus),
        strategy_of(record),
        f"{batch.seq_len} × {batch.micro}, {batch.global_}",
        *_times(record),
        f"{allocated:.1f}",
        f"{reserved:.1f}",
        f"{max(known) / GIB:.1f}" if len(known) == len(device) else "–",
        record.split,
    ]
    return f"| {' | '.join(cells)} |\n"


def _times(record: Record) -> tuple[str, str]:
    step_s, spread_s = record.measured.step_time_s, record.measured.step_time_spread_s
    if step_s is None:
        return "out of memory", "–"
    return f"{step_s * 1e3:.1f} ms", f"{(spread_s or 0.0) / step_s:.1%}".replace("%", " %")
