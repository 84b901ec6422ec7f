"""An answer at once: closed forms, with the degrees that are searched held at those of the plan on the page."""

from __future__ import annotations

import time
from typing import Any

import mofa
from mofa.errors import SpecError
from mofa.plan.result import Plan
from mofa.report.page.gather import closed_form_facts
from mofa.report.page.html import charts_of, sections_html
from mofa.report.page.write import closed_form_sections, nothing_fits_sections
from mofa.search.search_result import Search
from mofa.serve.question import DEGREES, Anchor, Question
from mofa.serve.served_job import ServedJob
from mofa.specs.hardware import ClusterSpec

ANCHORED = ("tp", "pp", "cp", "cp_kind", "ep", "micro_batch")
"""What an answer at once holds: chunks of a stage and etp follow from these, and are searched each time."""


def answer_at_once(job: ServedJob, question: Question) -> dict[str, Any]:
    """The best plan under what sliders say, by closed forms.

    Parameters
    ----------
    job
        What the server is about.
    question
        What is asked. Where all of :data:`ANCHORED` have values, some hundred strategies differ: in recomputation,
        chunks of stages, ZeRO, options. Where one has none, the best of all strategies says them, which takes longer.

    Returns
    -------
    dict
        ``html`` and ``charts`` of sections of the report, ``result`` as ``mofa plan --json`` prints it, degrees of the
        plan, those that were held, the values that each may take, seconds that it took; ``refused`` is why no strategy
        can run, or None.

    Raises
    ------
    SpecError
        If the GPUs or the memory cannot be.
    """
    started = time.perf_counter()
    cluster = job.machines(question)
    answer: dict[str, Any] = {
        "refused": None, "html": "", "charts": {}, "result": None, "degrees": None, "anchor": {},
        "choices": job.choices(cluster), "command": job.command(question.without_anchor()),
    }  # fmt: skip
    try:
        question = _with_anchor(job, question, cluster)
        search = _search(job, question, cluster, 10)
    except SpecError as error:
        return {**answer, "refused": str(error), "elapsed_s": time.perf_counter() - started}
    report = search.report
    if report.plans:
        facts = closed_form_facts(search)
        sections, result = closed_form_sections(facts), facts.document["result"]
        answer["degrees"] = degrees_of_plan(report.plans[0])
    else:
        sections, result = nothing_fits_sections(report), report.model_dump(mode="json")
    answer |= {"html": sections_html(sections), "charts": charts_of(sections), "result": result}
    return {**answer, "anchor": question.anchor.given(), "elapsed_s": time.perf_counter() - started}


def _with_anchor(job: ServedJob, question: Question, cluster: ClusterSpec) -> Question:
    """The question with a value for each of :data:`ANCHORED`, if one has none, of the best of all strategies."""
    known = {**question.anchor.given(), **question.degrees.given()}
    if all(name in known for name in ANCHORED):
        return question
    plans = _search(job, question, cluster, 1).report.plans
    if not plans:
        return question
    degrees = degrees_of_plan(plans[0])
    anchor = {name: degrees[name] for name in ANCHORED if name not in question.degrees.given()}
    return question.model_copy(update={"anchor": Anchor(**anchor)})


def _search(job: ServedJob, question: Question, cluster: ClusterSpec, top: int) -> Search:
    return mofa.find_plans(job.workload, cluster, top=top, replay=False, banded=False, **job.search_options(question))


def degrees_of_plan(plan: Plan) -> dict[str, Any]:
    """The degrees of a plan that have a slider, and what else is held."""
    return {name: getattr(plan.strategy, name) for name in dict.fromkeys((*DEGREES, *ANCHORED))}
