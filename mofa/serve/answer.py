"""An answer at once: closed forms, with the degrees that are searched held at those of the plan on the page."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

from mofa.errors import MofaError, SpecError
from mofa.plan.result import Plan
from mofa.report.page.gather import closed_form_report_facts
from mofa.report.page.html import charts_of, sections_html
from mofa.report.page.write import closed_form_sections, nothing_fits_sections
from mofa.search.entry_points import find_plans
from mofa.search.search_result import Search
from mofa.search.space import StrategySpace
from mofa.serve.coarse_space import coarse_space
from mofa.serve.question import DEGREES, Anchor, Question
from mofa.serve.served_job import ServedJob
from mofa.specs.hardware import ClusterSpec

ANCHORED = ("tp", "pp", "cp", "cp_kind", "ep", "micro_batch")
"""What an answer at once holds: chunks of a stage and etp follow from these, and are searched each time."""


def import_ahead() -> None:
    """Import what every answer needs and nothing before it does, so that the first takes no longer for it."""
    importlib.import_module("pandas")
    sections_html(())


def answer_at_once(job: ServedJob, question: Question) -> dict[str, Any]:
    """The best plan under what sliders say, by closed forms.

    Parameters
    ----------
    job
        What the server is about.
    question
        What is asked. Where all of :data:`ANCHORED` have values, some hundred strategies differ: in recomputation,
        chunks of stages, ZeRO, options. Where one has none, the best of a coarse search says them, or of all strategies
        if nothing in that fits, which takes longer.

    Returns
    -------
    dict
        ``html`` and ``charts`` of sections of the report, ``result`` as ``mofa plan --json`` prints it, degrees of the
        plan, those that were held, the values that each may take, seconds that it took; ``is_coarse`` is whether a
        coarse search said what is held, ``refused`` why no strategy can run, or None.

    Raises
    ------
    SpecError
        If the GPUs or the memory cannot be.
    """
    started = time.perf_counter()
    cluster = job.cluster_of_question(question)
    answer: dict[str, Any] = {
        "refused": None, "html": "", "charts": {}, "result": None, "degrees": None, "anchor": {},
        "is_coarse": False, "choices": job.degree_choices(cluster),
        "command": job.report_command(question.without_anchor()),
    }  # fmt: skip
    try:
        question, answer["is_coarse"] = _with_anchor(job, question, cluster)
        search = _search(job, question, cluster, 10)
    except SpecError as error:
        return {**answer, "refused": str(error), "elapsed_s": time.perf_counter() - started}
    report = search.report
    if report.plans:
        facts = closed_form_report_facts(search)
        sections, result = closed_form_sections(facts), facts.page_json["result"]
        answer["degrees"] = degrees_and_anchors_of_plan(report.plans[0])
    else:
        sections, result = nothing_fits_sections(report), report.model_dump(mode="json")
    answer |= {"html": sections_html(sections), "charts": charts_of(sections), "result": result}
    return {**answer, "anchor": question.anchor.given_degrees(), "elapsed_s": time.perf_counter() - started}


def _with_anchor(job: ServedJob, question: Question, cluster: ClusterSpec) -> tuple[Question, bool]:
    """The question with a value for each of :data:`ANCHORED`, if one has none; whether a coarse search said them."""
    known = {**question.anchor.given_degrees(), **question.degrees.given_degrees()}
    if all(name in known for name in ANCHORED):
        return question, False
    coarse = _coarse_plans(job, question, cluster)
    plans = coarse or _search(job, question, cluster, 1).report.plans
    if not plans:
        return question, False
    degrees = degrees_and_anchors_of_plan(plans[0])
    anchor = {name: degrees[name] for name in ANCHORED if name not in question.degrees.given_degrees()}
    return question.model_copy(update={"anchor": Anchor(**anchor)}), bool(coarse)


def _coarse_plans(job: ServedJob, question: Question, cluster: ClusterSpec) -> Sequence[Plan]:
    """The best of a coarse space; none where that has none, and the search of all says why."""
    try:
        return _search(job, question, cluster, 1, space=coarse_space(job, cluster)).report.plans
    except MofaError:
        return ()


def _search(
    job: ServedJob, question: Question, cluster: ClusterSpec, top: int, space: StrategySpace | None = None
) -> Search:
    return find_plans(
        job.workload, cluster, top=top, replay=False, banded=False, space=space, **job.search_options(question)
    )


def degrees_and_anchors_of_plan(plan: Plan) -> dict[str, Any]:
    """The degrees of a plan that have a slider, and what else is held."""
    return {name: getattr(plan.strategy, name) for name in dict.fromkeys((*DEGREES, *ANCHORED))}
