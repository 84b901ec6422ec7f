"""Bands of steps: fitted on the halves that may be learned from, tested for coverage on the others.

A band is a pair of order statistics of the logarithms of measured over predicted steps, so that it assumes no
distribution. Of n exchangeable residuals the next one lies below the k-th smallest with probability k / (n + 1) (Vovk,
Gammerman and Shafer 2005, *Algorithmic Learning in a Random World*, section 2.2): a tenth lies below that of rank
0.1 (n + 1). Runs of one source and model, a family, hang together: at worst all residuals of a family are one, and as
many are independent as there are families. So :func:`outer_fraction` leaves out what is right for so many families; the
more runs of a family differ, the more than 8 in 10 such a band holds. The ends are asymmetric: a bias shifts the band,
and the prediction not.

Where the host is not known, a residual is that from the step on the fast host at the lower end and on the slow one at
the upper: conformalised quantile regression (Romano, Patterson and Candès 2019, arXiv 1905.03222), whose interval is
what hosts leave open.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from math import log

import numpy as np

from mofa.specs.base import Fact
from mofa.specs.residuals import (
    LEVELS,
    STEPS_FILE,
    Circumstances,
    Seen,
    StepGroup,
    StepResiduals,
    load_residuals,
    path_text,
)
from mofa.validate.coverage import Coverage
from mofa.validate.score import RunScore

OUTSIDE = 0.1
"""Share of steps below a band, and above it. [-]"""
FEWEST_FAMILIES = 6
"""Families between whose extremes 7 in 10 new ones lie, (K - 1) / (K + 1): the least that a band should hold. From nine
on a tenth lies outside either. [-]"""
FEWEST_RUNS = 20
"""Runs that a group has to have for a band, or a coverage, of its own. [-]"""


@dataclass(frozen=True)
class StepResidual:
    """One configuration that may be learned from: logarithms of measured over predicted step."""

    id: str
    source: str
    family: str
    framework: str
    gpu: str
    num_nodes: int
    circumstances: Circumstances
    from_fast: float
    """From the step on a fast host; on a known host from the predicted one. [-]"""
    from_slow: float
    """From that on a slow host. [-]"""


def residual_of(run: RunScore) -> StepResidual | None:
    """The residual of a run; None where it says nothing of time."""
    if run.step_time is None or run.band is None or run.traced:
        return None
    off = -log(1.0 + run.step_time.error)
    fast, slow = (log(step_s / _predicted_s(run)) for step_s in run.band.hosts_s or (_predicted_s(run),) * 2)
    return StepResidual(
        run.id, run.source_name, run.family, run.framework_name, run.gpu, run.num_nodes, run.band.circumstances,
        round(off - fast, 5), round(off - slow, 5),
    )  # fmt: skip


def _predicted_s(run: RunScore) -> float:
    """The step that the band is about. [s]"""
    return sum(run.exposed.values())


def outer_fraction(families: int) -> float:
    """Share of a group's runs to leave outside at either end. [-]

    Of the gaps between K sorted families the first ``0.1 (K + 1) - 1``, at least none: with one run a family it is the
    order statistic of rank 0.1 (K + 1).

    Examples
    --------
    >>> outer_fraction(9), outer_fraction(19) == 1 / 18
    (0.0, True)
    """
    return max(OUTSIDE * (families + 1) - 1.0, 0.0) / max(families - 1, 1)


def fit(residuals: Sequence[StepResidual]) -> StepResiduals:
    """The groups of residuals from all down to those alike in everything, and what they were measured on.

    Groups of too few runs or families have their smallest and largest residual, or the ends of the next wider group
    where those lie further out. A group that has the runs or the ends of the next wider one is left out.
    """
    groups: dict[tuple[str, ...], StepGroup] = {(): _group((), residuals)}
    for depth in range(1, len(LEVELS) + 1):
        for path in sorted({item.circumstances.path[:depth] for item in residuals}):
            inside = [item for item in residuals if item.circumstances.path[:depth] == path]
            wider = next(groups[path[:n]] for n in range(depth - 1, -1, -1) if path[:n] in groups)
            group = _group(path, inside, wider)
            if (group.low.value, group.high.value) != (wider.low.value, wider.high.value):
                groups[path] = group
    layers = sorted({item.circumstances.layers for item in residuals})
    return StepResiduals(
        groups=tuple(groups[path] for path in sorted(groups)),
        unmeasured_low=_fact(min(item.from_fast for item in residuals), f"the smallest of {len(residuals)} residuals"),
        unmeasured_high=_fact(max(item.from_slow for item in residuals), f"the largest of {len(residuals)} residuals"),
        gpus=tuple(sorted({item.gpu for item in residuals})),
        seen={name: _seen([item for item in residuals if item.circumstances.layers == name]) for name in layers},
    )


def _group(path: tuple[str, ...], residuals: Sequence[StepResidual], wider: StepGroup | None = None) -> StepGroup:
    families = len({item.family for item in residuals})
    few = wider is not None and (len(residuals) < FEWEST_RUNS or families < FEWEST_FAMILIES)
    outer = 0.0 if few else outer_fraction(families)
    low = float(np.quantile([item.from_fast for item in residuals], outer))
    high = float(np.quantile([item.from_slow for item in residuals], 1.0 - outer))
    said = [f"{share:.1%} quantile" for share in (outer, 1.0 - outer)]
    if few and wider is not None:
        low, high = min(low, wider.low.value), max(high, wider.high.value)
        said = [f"the {end}, or the end of: {path_text(wider.path)}," for end in ("smallest", "largest")]
    of = f"of {len(residuals)} runs, {families} families ({path_text(path)})"
    return StepGroup(
        path=path, runs=len(residuals), families=families, few=few,
        sources=tuple(sorted({item.source for item in residuals})),
        low=_fact(min(low, high), f"{said[0]} {of}"), high=_fact(max(low, high), f"{said[1]} {of}"),
    )  # fmt: skip


def _fact(value: float, what: str) -> Fact:
    source = f"{what}: log of measured over predicted step, fitting halves of reference_runs, {STEPS_FILE}"
    return Fact(value=round(value, 4), provenance="measured", source=source)


def _seen(residuals: Sequence[StepResidual]) -> Seen:
    largest = max(residuals, key=lambda item: (item.num_nodes, item.id))
    return Seen(
        frameworks=tuple(sorted({item.framework for item in residuals})),
        most_nodes=Fact(value=largest.num_nodes, provenance="measured", source=f"{largest.id} of {STEPS_FILE}"),
        products=tuple(sorted({item.circumstances.products for item in residuals})),
        experts=tuple(sorted({item.circumstances.experts for item in residuals})),
    )


COLUMNS = ("id", "source", "family", "framework", "gpu", "num_nodes", *LEVELS, "from_fast", "from_slow")


def residuals_csv(residuals: Iterable[StepResidual]) -> str:
    """Residuals as a table."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for item in residuals:
        first = (item.id, item.source, item.family, item.framework, item.gpu, item.num_nodes)
        writer.writerow((*first, *item.circumstances.path, item.from_fast, item.from_slow))
    return out.getvalue()


def read_residuals(text: str) -> list[StepResidual]:
    """What :func:`residuals_csv` wrote."""
    return [
        StepResidual(
            row["id"], row["source"], row["family"], row["framework"], row["gpu"], int(row["num_nodes"]),
            Circumstances.model_validate({name: row[name] for name in LEVELS}),
            float(row["from_fast"]), float(row["from_slow"]),
        )
        for row in csv.DictReader(StringIO(text))
    ]  # fmt: skip


UNMEASURED = ("not measured",)
"""Where the bands are pooled of steps of which something was never measured."""


def coverage(runs: Sequence[RunScore]) -> tuple[Coverage, ...]:
    """The bands of runs that nothing was learned from, by group; groups of too few runs go to the next wider one."""
    pools: dict[tuple[str, ...], list[RunScore]] = {}
    for run in runs:
        if run.split == "judging" and run.step_time is not None and run.band is not None and not run.traced:
            pools.setdefault(UNMEASURED if run.band.unmeasured else run.band.group, []).append(run)
    for depth in range(len(LEVELS), 0, -1):
        for path in [p for p in pools if len(p) == depth and p != UNMEASURED and len(pools[p]) < FEWEST_RUNS]:
            pools.setdefault(path[:-1], []).extend(pools.pop(path))
    return tuple(_coverage(path, pools[path]) for path in sorted(pools, key=lambda p: (p == UNMEASURED, p)))


def _coverage(path: tuple[str, ...], runs: Sequence[RunScore]) -> Coverage:
    ends = np.array([_ends(run) for run in runs])
    measured = np.array([1.0 / (1.0 + run.step_time.error) for run in runs if run.step_time is not None])
    below, above = measured < ends[:, 0], measured > ends[:, 1]
    bands = {run.band.group for run in runs if run.band is not None}
    fitted = load_residuals().step.nearest(() if path == UNMEASURED else path)
    low, high, width = np.median(np.column_stack([ends - 1.0, ends[:, 1] - ends[:, 0]]), axis=0)
    return Coverage(
        group=path_text(path), bands=tuple(path_text(group) for group in sorted(bands)), fitted_runs=fitted.runs,
        families=fitted.families, runs=len(runs), inside=int((~below & ~above).sum()), below=int(below.sum()),
        above=int(above.sum()), median_low=float(low), median_high=float(high), median_width=float(width),
        tested=len(runs) >= FEWEST_RUNS,
    )  # fmt: skip


def _ends(run: RunScore) -> tuple[float, float]:
    """The ends of a run's band over its predicted step. [-]"""
    assert run.band is not None
    return run.band.low_s / _predicted_s(run), run.band.high_s / _predicted_s(run)
