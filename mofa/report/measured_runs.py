"""The table of measured runs that docs/measure.md shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mofa.schedules import default_schedule
from mofa.specs.framework_traits import TRAITS
from mofa.units import GIB

if TYPE_CHECKING:
    from mofa.measure import RunRecord

BEGIN, END = "<!-- runs -->", "<!-- /runs -->"
HOST_BEGIN, HOST_END = "<!-- host-bound -->", "<!-- /host-bound -->"
_HOST_HEAD = "| configuration | device idle | measured | steps |\n|---|---:|---:|---|\n"
_HEAD = (
    "| run | GPUs | strategy | sequence × micro, global | step | spread | allocated | reserved | device | split |\n"
    "|---|---:|---|---|---:|---:|---:|---:|---:|---|\n"
)
_DATA_PARALLEL = {"distributed-optimizer": "dp"}


def strategy_text_of_record(record: RunRecord) -> str:
    """What sets a run apart, in a few words: degrees above one, and what differs from the plain run."""
    run = record.run
    s, framework, routing = run.strategy, run.framework, run.routing
    dp = run.gpus // (s["tp"] * s["pp"] * s["cp"])
    words = [f"{name}{s[name]}" for name in ("tp", "pp", "vpp", "cp", "ep") if s[name] > 1]
    if dp > 1:
        kind = str(framework["data_parallel"])
        words.append(f"{_DATA_PARALLEL.get(kind, kind)}{dp}")
    if s["schedule"] != default_schedule(s["vpp"]):
        words.append(s["schedule"])
    if s["recompute"] != "none":
        words.append(s["recompute"])
    always_overlaps = TRAITS[str(framework["name"])].has_pytorch_modules
    flags = {
        "compile": framework.get("compile"),
        "expandable": framework.get("allocator") == "expandable",
        "unfused": framework.get("attention") == "unfused",
        "foreach": always_overlaps and framework.get("optimizer") == "foreach",
        "overlapped": not always_overlaps and framework.get("overlap_grad_reduce"),
    }
    words += [word for word, on in flags.items() if on]
    if routing.kind != "balanced":
        words.append(f"{routing.kind} {routing.s or routing.sigma or routing.alpha}")
    return " ".join(words)


def runs_table(records: Iterable[RunRecord]) -> str:
    """A Markdown table with one line a run; memory is the largest of the ranks, in GiB."""
    return _HEAD + "".join(_line(record) for record in records)


def runs_summary(records: Sequence[RunRecord]) -> str:
    """How many records there are, of how many configurations, by framework, GPUs and split."""
    one_of_each = [of_it[0] for of_it in _repeats(records)]

    def counts(values: Iterable[object]) -> str:
        return ", ".join(f"{n} {value}" for value, n in sorted(Counter(map(str, values)).items()))

    return (
        f"{len(records)} records of {len(one_of_each)} configurations: "
        f"{counts(r.run.framework['name'] for r in one_of_each)}; "
        f"{counts(f'on {r.run.gpus} GPU' + 's' * (r.run.gpus > 1) for r in one_of_each)}; "
        f"{counts(r.fitting_or_judging_half for r in one_of_each)}.\n\n"
    )


def _repeats(records: Iterable[RunRecord]) -> list[list[RunRecord]]:
    """The records of each configuration on each GPU."""
    from mofa.measure.expand import current_configuration_hash

    same: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        same.setdefault((current_configuration_hash(record.run), record.environment.gpu), []).append(record)
    return list(same.values())


def host_bound_table(records: Iterable[RunRecord]) -> str:
    """A Markdown table with one line a configuration whose device waits for its host, by how often it was measured;
    below it those whose repeats are due."""
    from mofa.measure.records import REPEATS

    lines, due = [], []
    for of_it in _repeats(records):
        if not any(record.measured.is_host_bound for record in of_it):
            continue
        idle = [record.measured.idle_share for record in of_it]
        name = min((record.run.id for record in of_it), key=lambda id: (len(id), id))
        steps = sorted(r.measured.step_time_s for r in of_it if r.measured.step_time_s is not None)
        shares = sorted(share for share in idle if share is not None)
        span = " to ".join(dict.fromkeys((f"{shares[0]:.0%}", f"{shares[-1]:.0%}"))).replace("%", " %")
        ends = dict.fromkeys((f"{steps[0] * 1e3:.1f}", f"{steps[-1] * 1e3:.1f}"))
        times = f"{' to '.join(ends)} ms"
        lines.append(f"| {name} | {span} | {len(of_it)} | {times} |\n")
        if len(of_it) < len(REPEATS):
            due.append(f"`{name}`")
    missing = f"\nMeasured less than three times, repeats still due: {', '.join(sorted(due))} ({len(due)}).\n"
    return _HOST_HEAD + "".join(sorted(lines)) + (missing if due else "")


def with_renewed_tables(text: str, records: Sequence[RunRecord]) -> str:
    """A document with the tables between their markers brought up to date.

    Examples
    --------
    >>> "old" in with_renewed_tables("a\\n<!-- runs -->\\nold\\n<!-- /runs -->\\nb", [])
    False
    """
    text = _between(text, BEGIN, END, runs_summary(records) + runs_table(records))
    return _between(text, HOST_BEGIN, HOST_END, host_bound_table(records)) if HOST_BEGIN in text else text


def _between(text: str, begin: str, end: str, table: str) -> str:
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{table}{end}{after}"


def _line(record: RunRecord) -> str:
    measured, batch = record.measured, record.run.batch
    allocated = max(rank.peak_allocated_bytes for rank in measured.ranks) / GIB
    reserved = max(rank.peak_reserved_bytes for rank in measured.ranks) / GIB
    device = [rank.peak_device_bytes for rank in measured.ranks]
    known = [value for value in device if value is not None]
    cells = [
        record.run.id,
        str(record.run.gpus),
        strategy_text_of_record(record),
        f"{batch.seq_len} × {batch.micro}, {batch.global_}",
        *_times(record),
        f"{allocated:.1f}",
        f"{reserved:.1f}",
        f"{max(known) / GIB:.1f}" if len(known) == len(device) else "–",
        record.fitting_or_judging_half,
    ]
    return f"| {' | '.join(cells)} |\n"


def _times(record: RunRecord) -> tuple[str, str]:
    step_s, spread_s = record.measured.step_time_s, record.measured.step_time_spread_s
    if step_s is None:
        return "out of memory", "–"
    return f"{step_s * 1e3:.1f} ms", f"{(spread_s or 0.0) / step_s:.1%}".replace("%", " %")
