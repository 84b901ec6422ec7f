"""Key factors of a job as text, a table and figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mofa.plan.factor_results import COMPUTING, ChangedMachines, FactorPlan, KeyFactors, KeyResource, StageBottleneck
from mofa.report.phrases import component_words, count_and_noun, strategy_text
from mofa.report.search_text import divisible_batch_line, has_experts, print_planned_job
from mofa.report.tables import Columns, print_paragraph, print_table
from mofa.specs.strategy import FrameworkOptions
from mofa.units import GIB, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from mofa.plan.summaries import FrameworkSummary
    from mofa.specs.strategy import StrategySpec

NOTHING_FITS = "nothing fits"
CHANGES = "what changes in the plan"
SHOWN = 0.0005
"""The least difference of two changes that a table shows. [-]"""


def print_factors(factors: KeyFactors, console: Console, *, quiet: bool = False) -> None:
    """Print the best plan, what resources buy, what optimisations bring, and what stages wait for.

    Parameters
    ----------
    factors
        The study.
    console
        Where to.
    quiet
        Only the tables of resources and optimisations.
    """
    if not quiet:
        print_planned_job(console, factors.workload, factors.cluster, factors.framework)
        for line in _best_lines(factors):
            print_paragraph(console, line)
        console.print()
    _print(
        console, f"What a tenth of each resource does to the {factors.objective}", resource_columns_and_rows(factors)
    )
    if factors.ablation:
        _print(console, f"What each optimisation brings to the {factors.objective}", ablation_columns_and_rows(factors))
    if quiet:
        return
    columns, rows = stage_columns_and_rows(factors)
    print_table(
        console, f"What stages wait for, of a played step of {format_seconds(factors.played_step_s)}", columns, rows
    )
    print_paragraph(console, _how_costed(factors))


def _print(console: Console, title: str, table: tuple[Columns, list[list[str]]]) -> None:
    """Print a table whose plans may go under their rows; columns without any entry are not there."""
    columns, rows = table
    headings = [heading for heading, _ in columns]
    leaves = tuple(name for name in ("dollars", "days") if name in headings)
    under = next((name for name in ("plan", CHANGES) if name in headings), "")
    print_table(console, title, columns, rows, leaves=leaves, under=under)


def _best_lines(factors: KeyFactors) -> list[str]:
    best = factors.best
    lines = [f"Best plan: {strategy_text(best.strategy, moe=has_experts(factors.workload))}"]
    numbers = [f"{format_seconds(best.step_s)} a step"]
    if best.ettr is not None:
        numbers.append(f"productive {best.ettr:.1%} of the time with failures of {factors.faults}")
    if best.days is not None:
        numbers.append(f"{best.days:,.1f} days")
    if best.usd is not None:
        numbers.append(f"{best.usd:,.0f} dollars")
    lines.append(f"{', '.join(numbers)}.")
    if factors.spare_nodes:
        gpus, computing = factors.cluster.num_gpus, factors.computing_gpus
        idle = f", {factors.idle_gpus:,} idle" if factors.idle_gpus else ""
        spares = count_and_noun(factors.spare_nodes, "node")
        lines.append(f"Of {gpus:,} GPUs {computing:,} compute{idle}; standing by: {spares}.")
    if factors.idle_gpus:
        lines.append(f"The best plan {factors.idle_note}.")
        which, gpus = "the best plan", factors.computing_gpus + factors.idle_gpus
        if line := divisible_batch_line(best.strategy, factors.idle_gpus, gpus, factors.workload.global_batch, which):
            lines.append(line)
    return lines


def _how_costed(factors: KeyFactors) -> str:
    if factors.costed_by == "replay":
        text = "Plans are played out. Stages are of the best plan."
    else:
        text = "Plans are in closed form, stages of the best plan played out; --replay plays out all plans."
    if backward := [resource.resource for resource in factors.resources if _seems_backward(factors, resource)]:
        text += f" Seems slower with more of it, by an error of closed forms (docs/factors.md): {', '.join(backward)}."
    return text


def _seems_backward(factors: KeyFactors, resource: KeyResource) -> bool:
    """Whether less of a resource is shown as a shorter step than more of it; energy may grow with what there is."""
    less, more = (factors.change_from_best_plan(side.planned_again) for side in (resource.less, resource.more))
    return factors.value_unit == "s" and less is not None and more is not None and more > less + SHOWN


def resource_columns_and_rows(factors: KeyFactors) -> tuple[Columns, list[list[str]]]:
    """Two rows for each resource.

    Parameters
    ----------
    factors
        The study.

    Returns
    -------
    Columns, list of list of str
        Columns without any entry are left out.
    """
    columns: Columns = (
        ("resource", "left"), ("", "left"), ("same plan", "right"), ("planned again", "right"), ("step", "right"),
        ("days", "right"), ("dollars", "right"), (CHANGES, "left"),
    )  # fmt: skip
    rows = [
        _resource_row(factors, resource, words, side)
        for resource in factors.resources
        for words, side in (("10 % less", resource.less), ("10 % more", resource.more))
    ]
    return _without_empty_columns(columns, rows)


def _resource_row(factors: KeyFactors, resource: KeyResource, words: str, side: ChangedMachines) -> list[str]:
    planned = side.planned_again
    name = resource.resource if side is resource.less else ""
    same = percent_text(factors.change_from_best_plan(side.same_plan)) if side.same_plan_fits else "does not fit"
    if planned is None:
        return [name, words, same, NOTHING_FITS, "", "", "", ""]
    return [
        name, words, same, percent_text(factors.change_from_best_plan(planned)), *_figures(planned),
        strategy_changes_text(factors.best.strategy, planned.strategy, factors.framework),
    ]  # fmt: skip


def ablation_columns_and_rows(factors: KeyFactors) -> tuple[Columns, list[list[str]]]:
    """A row for no optimisation, and one for each.

    Parameters
    ----------
    factors
        The study, with an ablation.

    Returns
    -------
    Columns, list of list of str
        Steps alone over that with none, added up over the row before.
    """
    columns: Columns = (
        ("optimisation", "left"), ("alone", "right"), ("brings", "right"), ("added up", "right"),
        ("brings more", "right"), ("days", "right"), ("dollars", "right"), ("plan", "left"),
    )  # fmt: skip
    none, moe = factors.without_optimisations, has_experts(factors.workload)
    rows = [["none", _value(factors, none), "", _value(factors, none), "", *_figures(none)[1:], _plan_text(none, moe)]]
    before = none
    for row in factors.ablation:
        name = row.optimisation
        if row.changes_numerics:  # by which of several words it comes in is a choice
            words = "".join(f"--with {word}, " for word in row.with_words)
            name += f" ({words}other numerics)"
        if row.note:
            rows.append([name, "", "", _value(factors, row.added_up), "", "", "", row.note])
        else:
            changes = "the same" if row.added_up == before and before is not None else _plan_text(row.added_up, moe)
            rows.append([
                name, _value(factors, row.alone), _gain(row.alone, none), _value(factors, row.added_up),
                _gain(row.added_up, before), *_figures(row.added_up)[1:], changes,
            ])  # fmt: skip
        before = row.added_up
    return _without_empty_columns(columns, rows)


def stage_columns_and_rows(factors: KeyFactors) -> tuple[Columns, list[list[str]]]:
    """A row for each stage of the pipeline.

    Parameters
    ----------
    factors
        The study.

    Returns
    -------
    Columns, list of list of str
        What computes, and the two largest parts that do not.
    """
    columns: Columns = (
        ("stage", "right"), ("computing", "right"), ("bottleneck", "left"), ("of the step", "right"), ("next", "left"),
        ("of the step", "right"), ("peak GiB", "right"),
    )  # fmt: skip
    return _without_empty_columns(columns, [_stage_row(stage) for stage in factors.stages])


def _stage_row(stage: StageBottleneck) -> list[str]:
    step_s = sum(stage.exposed.values())
    computing_s = sum(stage.exposed[name] for name in COMPUTING)
    first, second = sorted((name for name in stage.exposed if name not in COMPUTING), key=lambda n: -stage.exposed[n])[
        :2
    ]
    shares = [f"{stage.exposed[name] / step_s:.1%}" for name in (first, second)]
    size = "" if stage.device_bytes is None else f"{stage.device_bytes / GIB:.2f}"
    return [
        str(stage.stage), f"{computing_s / step_s:.1%}", component_words(first), shares[0], component_words(second),
        shares[1], size,
    ]  # fmt: skip


def strategy_changes_text(before: StrategySpec, after: StrategySpec, framework: FrameworkSummary) -> str:
    """The fields in which a strategy differs from another, as ``--strategy`` reads the new one's.

    Parameters
    ----------
    before, after
        Two strategies.
    framework
        Has the value of an option that a strategy does not choose. Switches are searched the other way than it has
        them, so that one of two that differ is the other's opposite.

    Returns
    -------
    str
        Empty where they are the same.

    Examples
    --------
    >>> import mofa
    >>> from mofa.plan.summaries import FrameworkSummary
    >>> from mofa.specs.strategy import StrategySpec
    >>> megatron = FrameworkSummary.from_spec(mofa.load_framework("megatron"))
    >>> strategy_changes_text(StrategySpec(tp=4, dp=8), StrategySpec(tp=2, dp=16, recompute="full"), megatron)
    'tp=2 not 4, dp=16 not 8, recompute=full not none'
    >>> strategy_changes_text(StrategySpec(tp=4, tp_overlap=True), StrategySpec(tp=4, dispatcher="deepep"), megatron)
    'tp_overlap=false not true, dispatcher=deepep not alltoall'
    """
    old, new = before.model_dump(), after.model_dump()
    if after.cp == 1:  # then there is no kind of it
        new["cp_kind"] = old["cp_kind"]
    for name in FrameworkOptions._fields:
        for one_side, other in ((old, new[name]), (new, old[name])):
            if one_side[name] is None and other is not None:
                one_side[name] = not other if isinstance(other, bool) else getattr(framework, name)
    return ", ".join(f"{name}={_said(new[name])} not {_said(old[name])}" for name in new if new[name] != old[name])


def _said(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or "none"


def percent_text(change: float | None) -> str:
    """A change as signed percent; nothing fits where there is none.

    Parameters
    ----------
    change
        [-]

    Returns
    -------
    str
        Such as ``-7.7%``.

    Examples
    --------
    >>> percent_text(-0.0766), percent_text(0.00001), percent_text(None)
    ('-7.7%', '0.0%', 'nothing fits')
    """
    if change is None:
        return NOTHING_FITS
    text = f"{change:+.1%}"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def _value(factors: KeyFactors, plan: FactorPlan | None) -> str:
    if plan is None:
        return NOTHING_FITS
    return format_seconds(plan.value) if factors.value_unit == "s" else f"{plan.value:,.4g} J"


def _gain(plan: FactorPlan | None, before: FactorPlan | None) -> str:
    if plan is None:
        return ""
    return "fits" if before is None else percent_text(plan.value / before.value - 1.0)


def _figures(plan: FactorPlan | None) -> list[str]:
    if plan is None:
        return ["", "", ""]
    return [
        format_seconds(plan.step_s), "" if plan.days is None else f"{plan.days:,.1f}",
        "" if plan.usd is None else f"{plan.usd:,.0f}",
    ]  # fmt: skip


def _plan_text(plan: FactorPlan | None, moe: bool) -> str:
    return "" if plan is None else strategy_text(plan.strategy, moe=moe)


def _without_empty_columns(columns: Columns, rows: list[list[str]]) -> tuple[Columns, list[list[str]]]:
    shown = [c for c in range(len(columns)) if any(row[c] for row in rows)]
    return tuple(columns[c] for c in shown), [[row[c] for c in shown] for row in rows]


def save_factors(factors: KeyFactors, directory: Path) -> list[Path]:
    """Write a tornado of the resources, a waterfall of the optimisations, the table and the JSON.

    Parameters
    ----------
    factors
        The study.
    directory
        Where to; made if absent.

    Returns
    -------
    list of Path
        The files.
    """
    from mofa.report.figures.key_resources import plot_ablation, plot_key_resources
    from mofa.report.save import csv_bytes, figure_files, write_files

    files = {
        "factors.json": (factors.model_dump_json(indent=2) + "\n").encode(),
        "factors.csv": csv_bytes(factors.to_frame()),
    }
    files |= figure_files("resources", plot_key_resources(factors))
    if any(row.added_up is not None for row in factors.ablation):
        files |= figure_files("optimisations", plot_ablation(factors))
    return write_files(directory, files)
