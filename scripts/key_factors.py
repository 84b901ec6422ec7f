"""Write the tables of docs/factors.md: key factors of a dense 70B and of DeepSeek-V3 on 512, 4,096 and 32,768 GPUs.

python scripts/key_factors.py [FOLDER]

Each case is ``mofa factors WORKLOAD h100-hgx --gpus N``, without failures and with those of ``FAULTS``: some 20 minutes
of one core in all. Results of cases are kept in FOLDER, where that is given, and read from it again. The figure
shows ``FIGURE_CASE``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import mofa
from mofa.plan.factor_results import FactorPlan, KeyFactors
from mofa.report.factors_text import percent_text
from mofa.report.figures.key_resources import plot_ablation, plot_key_resources
from mofa.report.phrases import component_words, strategy_short
from mofa.report.tables import Columns, markdown_table
from mofa.units import format_seconds

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, FIGURE = DOCS / "factors.md", DOCS / "figures" / "factors.png"
FIGURE_CASE = ("deepseek-v3", (4096, False))
CLUSTER, NUM_GPUS = "h100-hgx", (512, 4096, 32768)
WORKLOADS = ("llama3-70b", "deepseek-v3")
FAULTS = "llama3"
"""The profile of failures; nodes that fail are replaced by the scheduler, none stands by."""
Case = tuple[int, bool]
"""GPUs, and whether failures are counted."""
CASES: tuple[Case, ...] = tuple((num_gpus, fails) for num_gpus in NUM_GPUS for fails in (False, True))


def key_factors(workload: str, case: Case, folder: Path | None) -> KeyFactors:
    """The factors of one case, read where they are there."""
    num_gpus, fails = case
    place = None if folder is None else folder / f"{workload}-{num_gpus}{'-failures' if fails else ''}.json"
    if place is not None and place.exists():
        return KeyFactors.model_validate_json(place.read_bytes())
    faults = mofa.load_faults(FAULTS, {"spares": 0}) if fails else None
    factors = mofa.key_factors(mofa.load_workload(workload), mofa.load_cluster(CLUSTER, num_gpus), faults=faults)
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(factors.model_dump_json(indent=2), encoding="utf-8")
    print(
        f"{workload} on {num_gpus:,} GPUs{', with failures' if fails else ''}: {factors.best.value:.4g} s", flush=True
    )
    return factors


def title(case: Case) -> str:
    """A case as the heading of a column."""
    return f"{case[0]:,}{', failures' if case[1] else ''}"


def plans_table(studies: Mapping[Case, KeyFactors]) -> str:
    """The best plan of each case, its days, and what its stages wait for most."""
    columns: Columns = (
        ("GPUs", "right"), ("best plan", "left"), ("step", "right"), ("productive", "right"), ("days", "right"),
        ("bottlenecks of stages", "left"),
    )  # fmt: skip
    rows = []
    for case, study in studies.items():
        best = study.best
        rows.append([
            title(case), strategy_short(best.strategy), format_seconds(best.step_s),
            "" if best.ettr is None else f"{best.ettr:.1%}", "" if best.days is None else f"{best.days:,.1f}",
            bottlenecks_text(study),
        ])  # fmt: skip
    return markdown_table(columns, rows)


def bottlenecks_text(study: KeyFactors) -> str:
    """The bottleneck of each stage, with the stages that share it and its largest share of the step."""
    stages: dict[str, list[int]] = {}
    for stage in study.stages:
        stages.setdefault(stage.bottleneck, []).append(stage.stage)
    parts = []
    for name, numbers in stages.items():
        most = max(study.stages[number].exposed[name] for number in numbers)  # type: ignore[index]
        parts.append(f"{component_words(name)} {most / study.played_step_s:.0%} ({ranges_text(numbers)})")
    return ", ".join(parts)


def ranges_text(numbers: Sequence[int]) -> str:
    """Rising numbers, those that follow one another as a range.

    >>> ranges_text([0, 2, 3, 4, 7])
    '0, 2–4, 7'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def resources_table(studies: Mapping[Case, KeyFactors]) -> str:
    """Changes with a tenth more and a tenth less of each resource, planned again; a star where the plan is another."""
    columns: Columns = (("resource", "left"), *((title(case), "right") for case in studies))
    names = [resource.resource for resource in next(iter(studies.values())).resources]
    rows = []
    for name in names:
        row = [name]
        for study in studies.values():
            resource = next(each for each in study.resources if each.resource == name)
            sides = (resource.more, resource.less)
            row.append(
                ", ".join(
                    percent_text(study.change_from_best_plan(side.planned_again)) + "*" * side.is_other_plan
                    for side in sides
                )
            )
        rows.append(row)
    return markdown_table(columns, rows)


def optimisations_table(studies: Mapping[Case, KeyFactors], chosen: Callable[[KeyFactors], list[str]]) -> str:
    """Values of plans with none of the optimisations and with each, and what each brings."""
    columns: Columns = (("optimisation", "left"), *((title(case), "right") for case in studies))
    first = next(iter(studies.values()))
    names = ["none", *(row.optimisation for row in first.ablation)]
    cells = {case: chosen(study) for case, study in studies.items()}
    return markdown_table(columns, [[name, *(cells[case][i] for case in studies)] for i, name in enumerate(names)])


def value_text(plan: FactorPlan | None) -> str:
    """What a plan is ranked by; nothing fits where there is none."""
    return "nothing fits" if plan is None else format_seconds(plan.value)


def added_up(study: KeyFactors) -> list[str]:
    """Plans with none, and with all up to each."""
    return [value_text(study.without_optimisations), *(value_text(row.added_up) for row in study.ablation)]


def alone(study: KeyFactors) -> list[str]:
    """Plans with none, and with each alone; a dash where it is not to be had."""
    rows = ["–" if row.note else value_text(row.alone) for row in study.ablation]
    return [value_text(study.without_optimisations), *rows]


def draw(study: KeyFactors, path: Path) -> None:
    """The resources and the optimisations of a case beside each other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15.0, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    plot_key_resources(study, ax=left)
    left.legend(loc="lower right", frameon=False, fontsize=8)
    plot_ablation(study, ax=right)
    figure.savefig(path, dpi=90, metadata={"Software": None})


def main() -> None:
    """Rewrite what is between each workload's markers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="results of cases")
    folder: Path | None = parser.parse_args().folder
    text = PAGE.read_text(encoding="utf-8")
    for workload in WORKLOADS:
        studies = {case: key_factors(workload, case, folder) for case in CASES}
        if workload == FIGURE_CASE[0]:
            draw(studies[FIGURE_CASE[1]], FIGURE)
        tables = {
            "plans": plans_table(studies), "resources": resources_table(studies),
            "optimisations alone": optimisations_table(studies, alone),
            "optimisations added up": optimisations_table(studies, added_up),
        }  # fmt: skip
        for name, table in tables.items():
            begin, end = f"<!-- {name} of {workload} -->\n", f"<!-- /{name} of {workload} -->"
            before, marker, rest = text.partition(begin)
            if not marker:
                raise SystemExit(f"{PAGE}: has no {begin.strip()}")
            text = f"{before}{begin}{table}\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
