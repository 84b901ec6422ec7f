"""mofa: predicts the time, memory and cost of training large language models and finds the best parallel plan.

>>> import mofa
>>> job = mofa.load_workload("llama3-8b")
>>> machines = mofa.load_cluster("h100-hgx", 8)
>>> mofa.estimate(job, machines, "tp=2 recompute=full").memory.fits
True

Load facts: ``load_workload`` (the job), ``load_cluster`` (the machines), ``load_framework`` (how it is trained),
``load_faults`` (what fails), ``load_runs`` and ``resolve_run`` (runs that a file describes).

Predict one strategy: ``estimate`` its step and memory; ``estimate_long_run`` with failures, checkpoints and cost.

Search all strategies: ``find_plans`` by the step; ``find_long_runs`` by the whole run with its failures.

Search the layout of a pipeline: ``find_layout`` of one strategy, ``refine_layouts`` of the best plans of a search.

Ask what would help: ``key_factors`` plans anew with a tenth less and more of each resource, and adds up optimisations.

Compare results: ``compare`` says where their seconds and bytes differ.

Plan many jobs: ``sweep`` over every combination of models, clusters, GPUs, batches, failures and prices.

Run a plan: ``export`` it as the job of a framework.

Results: ``Search`` (a report, and the table behind it), ``PlanReport`` (what was found and what was rejected), ``Plan``
(one strategy, costed), ``StrategySpec`` (the strategy).

Errors: ``MofaError``, of which are ``SpecError`` (what was written is wrong), ``StrategyError`` (the framework cannot
run it) and ``NothingFits``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mofa.errors import MofaError, NothingFits, SpecError, StrategyError
    from mofa.export.entry import export
    from mofa.plan.comparison import compare
    from mofa.plan.result import Plan, PlanReport
    from mofa.search.entry_points import find_plans
    from mofa.search.key_factors.study import key_factors
    from mofa.search.layout_search.refine import find_layout, refine_layouts
    from mofa.search.long_run.spare_nodes import estimate_long_run, find_long_runs
    from mofa.search.one_plan import estimate
    from mofa.search.search_result import Search
    from mofa.search.sweeps.run_sweep import sweep
    from mofa.specs.load import load_cluster, load_faults, load_framework, load_workload
    from mofa.specs.run_files import load_runs, resolve_run
    from mofa.specs.strategy import StrategySpec

__version__ = "0.1.0"
__all__ = [
    "MofaError", "NothingFits", "Plan", "PlanReport", "Search", "SpecError", "StrategyError", "StrategySpec",
    "compare", "estimate", "estimate_long_run", "export", "find_layout", "find_long_runs", "find_plans", "key_factors",
    "load_cluster", "load_faults", "load_framework", "load_runs", "load_workload", "refine_layouts", "resolve_run",
    "sweep",
]  # fmt: skip

_HOME = {
    **dict.fromkeys(("MofaError", "NothingFits", "SpecError", "StrategyError"), "mofa.errors"),
    "estimate": "mofa.search.one_plan",
    "find_plans": "mofa.search.entry_points",
    **dict.fromkeys(("find_layout", "refine_layouts"), "mofa.search.layout_search.refine"),
    "compare": "mofa.plan.comparison",
    "key_factors": "mofa.search.key_factors.study",
    "Search": "mofa.search.search_result",
    **dict.fromkeys(("Plan", "PlanReport"), "mofa.plan.result"),
    **dict.fromkeys(("estimate_long_run", "find_long_runs"), "mofa.search.long_run.spare_nodes"),
    **dict.fromkeys(("load_cluster", "load_faults", "load_framework", "load_workload"), "mofa.specs.load"),
    **dict.fromkeys(("load_runs", "resolve_run"), "mofa.specs.run_files"),
    "StrategySpec": "mofa.specs.strategy",
    "sweep": "mofa.search.sweeps.run_sweep",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``mofa --help`` stays quick."""
    import importlib

    if name == "export":  # the package itself, which can be called: importing it sets this name anyway
        return importlib.import_module("mofa.export")
    if name not in _HOME:
        raise AttributeError(f"module mofa has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """The public names alone, so that ``dir(mofa)`` and ``help(mofa)`` show what people use."""
    return sorted({*__all__, "__version__", "__doc__", "__all__", "__file__", "__name__", "__path__"})
