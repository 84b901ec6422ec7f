"""Published goodput beside what the closed forms give, as the table of docs/faults.md.

``python scripts/published_goodput.py`` prints the table, ``--write`` puts it between the markers of docs/faults.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from mofa.faults.closed_forms.intervals import exact_interval_s
from mofa.faults.closed_forms.renewal import effective_restart_s, renewal_ettr
from mofa.faults.spares import waiting_share

MIN, HOUR, DAY = 60.0, 3600.0, 86400.0
PAGE = Path(__file__).resolve().parent.parent / "docs" / "faults.md"
BEGIN, END = "<!-- published -->\n", "<!-- /published -->"


@dataclass(frozen=True)
class Case:
    """A published run: what it gives, what had to be assumed, what was published and what comes out. [s]"""

    name: str
    published: str
    given: str
    assumed: str
    found: float


def _of(mtbf: float, block: float, restart: float, interval: float | None = None) -> float:
    tau = exact_interval_s(block, mtbf) if interval is None else interval
    return float(renewal_ettr(tau, block, mtbf, restart))


def cases() -> list[Case]:
    """The runs that give a rate of failures and a goodput, in the order of the page."""
    llama, megascale, byterobust = 54 * DAY / 419, 35 * DAY / 100, 90 * DAY / 175
    glm = DAY / (1536 * 0.0027)
    quick = float(effective_restart_s([10 * MIN, 13.5 * MIN], [0.75, 0.25], glm))
    rsc = DAY / (1500 * 6.5e-3)
    return [
        Case("Llama 3 405B, 16,384 H100", "> 0.90", "419 failures in 54 days; storage 2 TB/s",
             "blocking checkpoint of 14 B a parameter, 2.8 s; best interval; restart 5 min", _of(llama, 2.84, 5 * MIN)),
        Case("the same, slow", "> 0.90", "as above", "checkpoint 30 s, restart 10 min", _of(llama, 30.0, 10 * MIN)),
        Case("MegaScale, > 10,000 GPUs", "> 0.90", "> 100 restarts; detection < 10 min; checkpoints of seconds",
             "several weeks are five; blocking 5 s; best interval; 3 min to restart", _of(megascale, 5.0, 13 * MIN)),
        Case("ByteRobust dense, 9,600 GPUs", "up to 0.97", "175 incidents in 90 days; a checkpoint every step, 0.02 s",
             "a step of 30 s; detection 30 s, eviction 60 s, requeue 635 s (8192 GPUs)",
             _of(byterobust, 0.02, 725.0, 30.0)),
        Case("the same, at its bound", "up to 0.97", "at most 50 min unproductive each", "every incident takes it",
             _of(byterobust, 0.02, 50 * MIN, 30.0)),
        Case("GLM-65B, 1536 H800, before", "0.69", "2 min blocking every 90 min",
             "0.27 % a GPU and day of the company's fleet; time-out 30 min, job 10, pods 5, load 8",
             _of(glm, 2 * MIN, 53 * MIN, 90 * MIN)),
        Case("GLM-65B, flash checkpoints", "0.95", "0.2 s blocking every 216 s; 75 % process restarts",
             "the same rate; 10 min after software, 13.5 min after hardware faults (DLRover's table)",
             _of(glm, 0.2, quick, 216.0)),
        Case("AIReSim (a simulation)", "0.6228", "33.07 min between interruptions, 20 min recovery, nothing lost",
             "nothing", 1 - float(waiting_share(1 / (33.07 * MIN), 20 * MIN, 0))),
        Case("RSC-1, 12,000 GPUs (Meta's model)", "0.9", "6.5 per 1000 node-days, checkpoint 10 s, restart 5 min",
             "nothing; Meta's interval", _of(rsc, 10.0, 5 * MIN, 7.016 * MIN)),
        Case("RSC-1, 16,000 GPUs, hourly (Meta's model)", "0.7", "6.5 per 1000 node-days, restart 5 min",
             "checkpoints that block nobody", _of(DAY / (2000 * 6.5e-3), 0.0, 5 * MIN, 60 * MIN)),
        Case("the same, every 5 min", "0.93", "as above", "as above",
             _of(DAY / (2000 * 6.5e-3), 0.0, 5 * MIN, 5 * MIN)),
        Case("RSC-2-like, 100,000 GPUs (Meta's model)", "0.9", "2.34 per 1000 node-days, interval and restart 2 min",
             "checkpoints that block nobody, no queue", _of(DAY / (12_500 * 2.34e-3), 0.0, 2 * MIN, 2 * MIN)),
    ]  # fmt: skip


def table() -> str:
    """The table as Markdown."""
    lines = ["| run | published | ours | given | assumed |", "|---|---|---|---|---|"]
    lines += [f"| {c.name} | {c.published} | {c.found:.3f} | {c.given} | {c.assumed} |" for c in cases()]
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """A page with the table between its markers made anew."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())
