"""Reports behind the answers at once: searched over all strategies and played, in a process of their own."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mofa.errors import MofaError
from mofa.search.workers import exit_when_parent_exits
from mofa.serve.question import Question
from mofa.serve.served_job import ServedJob

MOST_STORED = 4
"""Finished reports that stay to be opened again, of some 3 MB each. [-]"""
TELL_EVERY_S = 0.2
"""Between two messages of how far a search is. [s]"""
NICENESS = 5
"""By how much its process gives way to answers at once. [-]"""


@dataclass
class ReplayedReport:
    """One report: how far it is, and its files once it is there."""

    question: Question
    started: float
    state: dict[str, Any] = field(default_factory=lambda: {"phase": "starting", "done": 0, "total": 0})
    """``phase`` goes over starting, costing, playing, searching layouts, writing to finished, refused, stopped or
    failed; ``best`` is the best plan so far in a line, ``best_degrees`` its degrees, ``message`` why there is none."""
    page: bytes | None = None
    elapsed_s: float | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be said of it."""
        return self.state["phase"] in ("finished", "refused", "stopped", "failed")


class ReplayedReports:
    """The report that is being made and those that were: one process at a time, ended by the next question."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reports: dict[int, ReplayedReport] = {}
        self._number = 0
        self._process: BaseProcess | None = None
        self._lock = threading.RLock()

    def begin(self, job: ServedJob, question: Question) -> int:
        """The number of the report about a question: one that is there already, else one that begins now."""
        question = question.without_anchor()
        with self._lock:
            for number, report in self._reports.items():
                if report.question == question and report.state["phase"] not in ("stopped", "failed"):
                    self._keep(number)
                    return number
            self.stop()
            self._number += 1
            number = self._number
            report = self._reports[number] = ReplayedReport(question, time.monotonic())
            for old in list(self._reports)[:-MOST_STORED]:
                del self._reports[old]
            receiver, sender = multiprocessing.Pipe(duplex=False)
            file = self._folder / f"report-{number}.html"
            context = multiprocessing.get_context("spawn")
            process = context.Process(
                target=make_report, args=(job, question, file, sender), name=f"mofa-report-{number}"
            )
            process.start()
            sender.close()
            self._process = process
            threading.Thread(target=self._follow, args=(report, receiver, process, file), daemon=True).start()
            return number

    def _keep(self, number: int) -> None:
        """Make a report the newest, so that it is forgotten last; one that is made for another question stops."""
        self._reports[number] = report = self._reports.pop(number)
        if report.is_finished:
            self.stop()

    def _follow(self, report: ReplayedReport, receiver: Connection, process: BaseProcess, file: Path) -> None:
        """Read what the process says until it ends."""
        try:
            while True:
                message = json.loads(receiver.recv_bytes())
                with self._lock:
                    if not report.is_finished:
                        report.state = {**report.state, **message}
                        if report.is_finished:
                            report.elapsed_s = time.monotonic() - report.started
                            report.page = file.read_bytes() if report.state["phase"] == "finished" else None
                            file.unlink(missing_ok=True)
        except (EOFError, OSError):
            pass
        receiver.close()
        process.join()
        with self._lock:
            if not report.is_finished:
                words = "its process was killed, perhaps for want of memory; give --jobs fewer processes"
                report.state = {**report.state, "phase": "failed", "message": words}

    def stop_others(self, question: Question) -> None:
        """End the report that is being made, unless it is about this question: an answer at once needs its cores."""
        with self._lock:
            running = [report for report in self._reports.values() if not report.is_finished]
            if any(report.question != question.without_anchor() for report in running):
                self.stop()

    def stop(self) -> None:
        """End the process of the report that is being made, if there is one, and those that it started."""
        with self._lock:
            process, self._process = self._process, None
            for report in self._reports.values():
                if not report.is_finished:
                    report.state = {**report.state, "phase": "stopped"}
        if process is not None and process.is_alive():
            process.terminate()
            process.join()

    def report_state(self, number: int) -> Mapping[str, Any] | None:
        """How far a report is; None of one that is not known any more."""
        with self._lock:
            report = self._reports.get(number)
            if report is None:
                return None
            elapsed_s = report.elapsed_s
            return {**report.state, "elapsed_s": time.monotonic() - report.started if elapsed_s is None else elapsed_s}

    def page_html(self, number: int) -> bytes | None:
        """A finished report as one HTML page."""
        with self._lock:
            report = self._reports.get(number)
            return None if report is None else report.page


def make_report(job: ServedJob, question: Question, file: Path, sender: Connection) -> None:
    """In a process of its own: search all strategies, play the best, write the page; say how far that is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the server ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    exit_when_parent_exits()
    os.nice(NICENESS)

    def tell(**message: Any) -> None:
        sender.send_bytes(json.dumps(message).encode())

    try:
        file.write_bytes(report_page_bytes(job, question, tell))
        tell(phase="finished")
    except MofaError as error:
        tell(phase="refused", message=str(error))
    except Exception as error:  # a bug: the page says so, and the server goes on
        tell(phase="failed", message=f"{type(error).__name__}: {error}; this is a bug of mofa")


def report_page_bytes(job: ServedJob, question: Question, tell: Callable[..., None]) -> bytes:
    """The page that ``mofa report`` writes of the same job.

    Parameters
    ----------
    job, question
        What is searched.
    tell
        Called with ``phase``, ``done``, ``total``, and ``best`` and ``best_degrees`` of the best plan so far; last
        with ``summary``, the replayed plan's figures.

    Raises
    ------
    NothingFits, SpecError
        If there is no plan.
    """
    import mofa
    from mofa.errors import NothingFits
    from mofa.export.launch_files import launch_files
    from mofa.report.page.gather import report_facts
    from mofa.report.page.html import sections_html
    from mofa.report.page.question_section import answer_section
    from mofa.report.page.write import HTML, report_files
    from mofa.report.phrases import best_so_far_text
    from mofa.serve.answer import degrees_and_anchors_of_plan

    cluster = job.cluster_of_question(question)
    moe = job.workload.model.moe is not None
    last_message_s = [0.0]

    def tell_progress(phase: str, done: int, total: int, **best: Any) -> None:
        if time.monotonic() - last_message_s[0] >= TELL_EVERY_S or best:
            last_message_s[0] = time.monotonic()
            tell(phase=phase, done=done, total=total, **best)

    def show(step: mofa.SearchProgress) -> None:
        best: dict[str, Any] = {}
        if step.best is not None and not step.done:
            best = {
                "best": best_so_far_text(step.best, moe=moe),
                "best_degrees": degrees_and_anchors_of_plan(step.best),
            }
        tell_progress(step.phase, step.done, step.total, **best)

    search = mofa.find_plans(
        job.workload, cluster, jobs=job.jobs, on_progress=show, **job.search_options(question.without_anchor())
    )
    if not search.report.plans:
        needed = search.report.min_gpus
        raise NothingFits(f"nothing fits; {f'{needed:,} GPUs would do' if needed else search.report.min_gpus_note}")
    if job.refine_seconds:
        search = mofa.refine_layouts(
            search, job.refine_seconds, progress=lambda done, of: tell_progress("searching layouts", done, of)
        )
    tell(phase="writing", done=0, total=0)
    launch, note = launch_files(search.report, None)
    facts = report_facts(
        search, launch=launch, launch_note=note, command=job.report_command(question), given=job.given,
        made_on=date.today().isoformat(), jobs=job.jobs,
    )  # fmt: skip
    plan = search.report.plans[0]
    summary = {
        "degrees": degrees_and_anchors_of_plan(plan), "step_s": plan.step_s, "device_bytes": plan.memory.device_bytes,
        "html": sections_html([answer_section(facts)]),
    }  # fmt: skip
    tell(summary=summary)
    return report_files(facts)[HTML]
