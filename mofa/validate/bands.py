"""Bands of steps: fitted on the halves that may be learned from, tested for coverage on the others.

A band is a pair of order statistics of the logarithms of measured over predicted steps, so that it assumes no
distribution. Of n exchangeable residuals the next one lies below the k-th smallest with probability k / (n + 1) (Vovk,
Gammerman and Shafer 2005, *Algorithmic Learning in a Random World*, section 2.2): a tenth lies below that of rank
0.1 (n + 1). The ends are asymmetric: a bias shifts the band, and the prediction not.

Runs of one source and model, a family, hang together. Of n runs of a family each counts as 1 / (1 + (n - 1) r) runs,
where r is the intraclass correlation (the design effect of Kish 1965, *Survey Sampling*, chapter 5).

A group of few runs borrows from the next wider one, as does the predictive distribution of a hierarchical Dirichlet
process (Teh, Jordan, Beal and Blei 2006, doi 10.1198/016214506000000302, section 3): its runs count beside
:data:`BORROWED` runs that are distributed as the wider group's.

Where the host is not known, a residual is that from the step on the fast host at the lower end and on the slow one at
the upper: conformalised quantile regression (Romano, Patterson and Candès 2019, arXiv 1905.03222), whose interval is
what hosts leave open.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import combinations
from math import log

import numpy as np
from numpy.typing import NDArray

from mofa.specs.base import Fact
from mofa.specs.residuals import (
    LEVELS,
    STEPS_FILE,
    Circumstances,
    MeasuredCoverage,
    Pace,
    RowsWithoutRecomputation,
    StepResidualGroup,
    StepResiduals,
    load_residuals,
    residual_group_text,
)
from mofa.validate.coverage import FEWEST_RUNS, BandCoverage
from mofa.validate.validation_report import RunScore

OUTSIDE = 0.1
"""Share of steps below a band, and above it. [-]"""
BORROWED = 13.0
"""Runs of the next wider group that count in a group. Learned on the fitting halves alone, each family left out of the
fit in turn: the fewest whose interval score (Gneiting and Raftery 2007, doi 10.1198/016214506000001437, section 6.2) is
within 1 % of the smallest, over runs whose configuration is whole. [-]"""
Values = NDArray[np.float64]
BoolN = NDArray[np.bool_]


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
    has_whole_configuration: bool = True
    """Whether its source gives all that its step depends on."""


def step_residual_of(run: RunScore) -> StepResidual | None:
    """The residual of a run; None where it says nothing of time."""
    if run.step_time is None or run.band is None or run.ran_under_profiler:
        return None
    off = -log(1.0 + run.step_time.error)
    fast, slow = (log(step_s / _predicted_s(run)) for step_s in run.band.hosts_s or (_predicted_s(run),) * 2)
    return StepResidual(
        run.id, run.source_name, run.source_and_model, run.framework_name, run.gpu, run.num_nodes,
        run.band.circumstances,
        round(off - fast, 5), round(off - slow, 5), run.has_whole_configuration,
    )  # fmt: skip


def _predicted_s(run: RunScore) -> float:
    """The step that the band is about. [s]"""
    return sum(run.exposed.values())


def family_correlation(residuals: Sequence[StepResidual]) -> float:
    """How alike runs of a family are beside those of others that are alike in all circumstances. [-]

    The intraclass correlation of a one-way analysis of variance (Fisher 1925; unequal families as in Donner 1986, doi
    10.2307/1403259), pooled over groups. Of ranks within each, which a few far residuals do not decide.

    Returns
    -------
    float
        From 0, where a family says nothing of its runs, to 1, where they are one; 1 where no family has two runs.
    """
    groups: dict[tuple[str, ...], list[StepResidual]] = {}
    for item in residuals:
        groups.setdefault(item.circumstances.levels_in_order, []).append(item)
    between = within = between_freedom = within_freedom = spare = 0.0
    for items in groups.values():
        ranks = _ranks(np.array([item.from_fast + item.from_slow for item in items]))
        _, of, runs = np.unique([item.family for item in items], return_inverse=True, return_counts=True)
        means = np.bincount(of, ranks) / runs
        between += float(runs @ (means - ranks.mean()) ** 2)
        within += float(((ranks - means[of]) ** 2).sum())
        between_freedom += len(runs) - 1
        within_freedom += len(items) - len(runs)
        spare += len(items) - float(runs @ runs) / len(items)
    if not between_freedom or not within_freedom or between + within == 0.0:
        return 1.0
    of_families, of_runs, size = between / between_freedom, within / within_freedom, spare / between_freedom
    total = of_families + (size - 1.0) * of_runs
    return min(max((of_families - of_runs) / total, 0.0), 1.0) if total > 0.0 else 0.0


def same_family_pair_difference(residuals: Sequence[StepResidual]) -> tuple[float, int]:
    """How far apart residuals of two runs are that are of one family, GPU and framework and alike in all circumstances.

    Such runs differ in their strategy or batch, as the plans of one search do.

    Returns
    -------
    tuple[float, int]
        The median over families of the median over their pairs, and the number of families that have any. [-]
    """
    groups: dict[tuple[object, ...], list[float]] = {}
    for item in residuals:
        alike = item.family, item.gpu, item.framework, *item.circumstances.levels_in_order
        groups.setdefault(alike, []).append((item.from_fast + item.from_slow) / 2.0)
    of_families: dict[object, list[float]] = {}
    for (family, *_), values in groups.items():
        of_families.setdefault(family, []).extend(abs(a - b) for a, b in combinations(values, 2))
    medians = [float(np.median(pairs)) for pairs in of_families.values() if pairs]
    return (float(np.median(medians)) if medians else 0.0), len(medians)


def _pair_differences(residuals: Sequence[StepResidual]) -> dict[Pace, Fact]:
    """The same by pace, where a family has two runs."""
    by_pace: dict[Pace, Fact] = {}
    for pace in sorted({item.circumstances.pace for item in residuals}):
        value, families = same_family_pair_difference([item for item in residuals if item.circumstances.pace == pace])
        if families:
            by_pace[pace] = _fact(value, f"median difference between two runs of a family, {families} families")
    return by_pace


def _ranks(values: Values) -> Values:
    """Ranks from 0 to 1, of equal ones the mean. [-]"""
    ordered = np.sort(values)
    sides = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
    ranks: Values = np.add(*sides) / (2.0 * len(values))
    return ranks


def run_weights(families: Sequence[str], correlation: float) -> Values:
    """Independent runs that each run counts as: 1 / (1 + (n - 1) r) in a family of n. [-]

    Examples
    --------
    >>> run_weights(("a", "b", "b"), 0.5).round(3).tolist()
    [1.0, 0.667, 0.667]
    """
    of = Counter(families)
    return np.array([1.0 / (1.0 + (of[family] - 1) * correlation) for family in families])


def lower_decile_of_new_value(values: Values, shares: Values, beyond: float) -> float:
    """The value below which a new one lies in one case of ten; of the negatives, above.

    Parameters
    ----------
    shares
        Probability of each value, half of it to either side. [-]
    beyond
        Probability that the new one lies outside of all, half below and half above. [-]

    Returns
    -------
    float
        Between neighbours in proportion; the smallest where more than a tenth lies below it.

    Examples
    --------
    >>> round(lower_decile_of_new_value(np.arange(19.0), np.full(19, 1 / 20), 1 / 20), 6)  # of rank 0.1 (19 + 1)
    1.0
    """
    order = np.argsort(values, kind="stable")
    below = beyond / 2.0 + np.cumsum(shares[order]) - shares[order] / 2.0
    return float(np.interp(OUTSIDE, below, values[order]))


def fit_step_residuals(residuals: Sequence[StepResidual]) -> StepResiduals:
    """The groups of residuals from all down to those alike in everything, and what they were measured on.

    A group that has the runs of the next wider one is left out. Of a row that leaves recomputation blank the residual
    is of the guess as much as of the model: it stands in where other rows of its nodes and layers are too few to have
    a tenth.

    Raises
    ------
    ValueError
        If every row leaves recomputation blank.
    """
    complete = [item for item in residuals if item.has_whole_configuration]
    if not complete:
        raise ValueError("no residual is of a run whose configuration is whole")
    of_complete = Counter(_nodes_and_layers(item) for item in complete)
    blank = [item for item in residuals if not item.has_whole_configuration]
    standing_in = [item for item in blank if _is_few(of_complete[_nodes_and_layers(item)])]
    residuals = sorted([*complete, *standing_in], key=lambda item: (item.source, item.id, item.family, item.from_fast))
    correlation, columns = family_correlation(residuals), _Columns.of(residuals)
    groups: dict[tuple[str, ...], _Fitted] = {(): _group((), columns, correlation)}
    for depth in range(1, len(LEVELS) + 1):
        counted = residuals if depth >= STAND_IN_DEPTH else complete
        for path in sorted({item.circumstances.levels_in_order[:depth] for item in counted}):
            wider = next(groups[path[:n]] for n in range(depth - 1, -1, -1) if path[:n] in groups)
            group = _group(path, columns, correlation, wider)
            if not np.array_equal(group.inside, wider.inside):
                groups[path] = group
    layers = sorted({item.circumstances.layers for item in complete})
    return StepResiduals(
        groups=tuple(groups[path].said for path in sorted(groups)),
        family_correlation=_fact(correlation, f"intraclass correlation of the ranks of {len(residuals)} residuals"),
        pair_difference=_pair_differences(residuals),
        unmeasured_low=_fact(min(item.from_fast for item in residuals), f"the smallest of {len(residuals)} residuals"),
        unmeasured_high=_fact(max(item.from_slow for item in residuals), f"the largest of {len(residuals)} residuals"),
        gpus=_gpus(complete),
        stand_ins=tuple(
            RowsWithoutRecomputation(path=path, gpus=_gpus(rows), seen=_seen(rows))
            for path in sorted({_nodes_and_layers(item) for item in standing_in})
            for rows in [[item for item in residuals if _nodes_and_layers(item) == path]]
        ),
        seen={name: _seen([item for item in complete if item.circumstances.layers == name]) for name in layers},
    )


def _is_few(runs: float) -> bool:
    """Whether so many runs are too few to have a tenth of their own; a family's count as fewer than they are."""
    return OUTSIDE * (runs + 1.0) < 1.0


STAND_IN_DEPTH = 2
"""Levels that runs have to share for rows with a blank to stand in: nodes and layers. Wider groups do without. [-]"""


def _nodes_and_layers(item: StepResidual) -> tuple[str, ...]:
    """The group that a run is in by its nodes and layers alone."""
    return item.circumstances.levels_in_order[:STAND_IN_DEPTH]


@dataclass(frozen=True)
class _Columns:
    """Residuals with what every group asks of all of them. (n,)"""

    items: Sequence[StepResidual]
    is_whole: BoolN
    """Whether a run's configuration is whole."""
    in_group: Mapping[tuple[str, ...], Sequence[int]]
    """Numbers of those in each group, by its path."""
    from_fast: Values
    from_slow: Values

    @classmethod
    def of(cls, items: Sequence[StepResidual]) -> _Columns:
        """Of all residuals, in their order."""
        in_group: dict[tuple[str, ...], list[int]] = {}
        for i, item in enumerate(items):
            path = item.circumstances.levels_in_order
            for depth in range(len(path) + 1):
                in_group.setdefault(path[:depth], []).append(i)
        columns = np.array([(item.from_fast, item.from_slow) for item in items]).T
        return cls(items, np.array([item.has_whole_configuration for item in items]), in_group, *columns)


@dataclass(frozen=True)
class _Fitted:
    """A group, and how its residuals are distributed."""

    said: StepResidualGroup
    inside: BoolN
    """Which of all residuals are its own."""
    shares: Values
    """Probability of each of all residuals. [-]"""
    beyond: float
    """That of a new one outside of all. [-]"""


def _group(
    path: tuple[str, ...], residuals: _Columns, correlation: float, wider: _Fitted | None = None
) -> _Fitted:  # fmt: skip
    """Of W independent runs of its own each has 1 / (W + 1), as has what lies beyond them; and what it borrows."""
    inside = np.zeros(len(residuals.items), dtype=bool)
    inside[residuals.in_group[path]] = True
    if len(path) < STAND_IN_DEPTH:
        inside &= residuals.is_whole
    items = [residuals.items[i] for i in np.flatnonzero(inside).tolist()]
    shares = np.zeros(len(inside))
    shares[inside] = run_weights([item.family for item in items], correlation)
    own_runs = float(shares.sum())
    shares, beyond = shares / (own_runs + 1.0), 1.0 / (own_runs + 1.0)
    families = len({item.family for item in items})
    of = f"of {len(items)} runs, {families} families ({residual_group_text(path)})"
    if wider is not None:
        borrowed = BORROWED / (own_runs + BORROWED)
        shares = (1.0 - borrowed) * shares + borrowed * wider.shares
        beyond = (1.0 - borrowed) * beyond + borrowed * wider.beyond
        of += f", with a weight of {borrowed:.0%} for: {residual_group_text(wider.said.path)}"
    low = lower_decile_of_new_value(residuals.from_fast, shares, beyond)
    high = -lower_decile_of_new_value(-residuals.from_slow, shares, beyond)
    said = StepResidualGroup(
        path=path, runs=len(items), families=families, few=_is_few(own_runs),
        sources=tuple(sorted({item.source for item in items})),
        low=_fact(min(low, high), f"a tenth below {of}"), high=_fact(max(low, high), f"a tenth above {of}"),
    )  # fmt: skip
    return _Fitted(said, inside, shares, beyond)


def _fact(value: float, what: str) -> Fact:
    source = f"{what}: log of measured over predicted step, fitting halves of reference_runs, {STEPS_FILE}"
    return Fact(value=round(value, 4), provenance="measured", source=source)


def _gpus(residuals: Sequence[StepResidual]) -> tuple[str, ...]:
    return tuple(sorted({item.gpu for item in residuals}))


def _seen(residuals: Sequence[StepResidual]) -> MeasuredCoverage:
    largest = max(residuals, key=lambda item: (item.num_nodes, item.id))
    return MeasuredCoverage(
        frameworks=tuple(sorted({item.framework for item in residuals})),
        most_nodes=Fact(value=largest.num_nodes, provenance="measured", source=f"{largest.id} of {STEPS_FILE}"),
        products=tuple(sorted({item.circumstances.products for item in residuals})),
        experts=tuple(sorted({item.circumstances.experts for item in residuals})),
    )


COLUMNS = (
    "id",
    "source",
    "family",
    "framework",
    "gpu",
    "num_nodes",
    *LEVELS,
    "from_fast",
    "from_slow",
    "configuration",
)


def residuals_csv(residuals: Iterable[StepResidual]) -> str:
    """Residuals as a table."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for item in residuals:
        first = (item.id, item.source, item.family, item.framework, item.gpu, item.num_nodes)
        configuration = "whole" if item.has_whole_configuration else "blank recomputation"
        writer.writerow((*first, *item.circumstances.levels_in_order, item.from_fast, item.from_slow, configuration))
    return out.getvalue()


def read_residuals(text: str) -> list[StepResidual]:
    """What :func:`residuals_csv` wrote."""
    return [
        StepResidual(
            row["id"], row["source"], row["family"], row["framework"], row["gpu"], int(row["num_nodes"]),
            Circumstances.model_validate({name: row[name] for name in LEVELS}),
            float(row["from_fast"]), float(row["from_slow"]), row["configuration"] == "whole",
        )
        for row in csv.DictReader(StringIO(text))
    ]  # fmt: skip


UNMEASURED = ("not measured",)
"""Where the bands are pooled of steps of which something was never measured."""
INCOMPLETE = ("recomputation not given",)
"""Where those are pooled of rows whose recomputation is blank and that no band was fitted on: others were measured."""
NOT_GROUPED = (UNMEASURED, INCOMPLETE)


def band_coverage(runs: Sequence[RunScore]) -> tuple[BandCoverage, ...]:
    """The bands of runs that nothing was learned from, by group; groups of too few runs go to the next wider one. Rows
    that a rule filled test none: their configuration is not known."""
    pools: dict[tuple[str, ...], list[RunScore]] = {}
    for run in (run for run in runs if not run.is_filled_by_rule):
        if run.split == "judging" and run.step_time is not None and run.band is not None and not run.ran_under_profiler:
            path = run.band.group if not run.band.unmeasured else UNMEASURED
            fitted = run.has_whole_configuration or load_residuals().step.stand_in_rows(
                run.band.circumstances.levels_in_order
            )
            pools.setdefault(path if fitted else INCOMPLETE, []).append(run)
    for depth in range(len(LEVELS), 0, -1):
        for path in [p for p in pools if len(p) == depth and p not in NOT_GROUPED and len(pools[p]) < FEWEST_RUNS]:
            pools.setdefault(path[:-1], []).extend(pools.pop(path))
    return tuple(_coverage(path, pools[path]) for path in sorted(pools, key=lambda p: (p in NOT_GROUPED, p)))


def _coverage(path: tuple[str, ...], runs: Sequence[RunScore]) -> BandCoverage:
    ends = np.array([_ends(run) for run in runs])
    measured = np.array([1.0 / (1.0 + run.step_time.error) for run in runs if run.step_time is not None])
    below, above = measured < ends[:, 0], measured > ends[:, 1]
    bands = {run.band.group for run in runs if run.band is not None}
    fitted = load_residuals().step.narrowest_group_of_path(() if path in NOT_GROUPED else path)
    low, high, width = np.median(np.column_stack([ends - 1.0, ends[:, 1] - ends[:, 0]]), axis=0)
    return BandCoverage(
        group=residual_group_text(path), bands=tuple(residual_group_text(group) for group in sorted(bands)),
        fitted_runs=fitted.runs,
        families=fitted.families, runs=len(runs), inside=int((~below & ~above).sum()), below=int(below.sum()),
        above=int(above.sum()), median_low=float(low), median_high=float(high), median_width=float(width),
        tested=len(runs) >= FEWEST_RUNS and path not in NOT_GROUPED,
    )  # fmt: skip


def _ends(run: RunScore) -> tuple[float, float]:
    """The ends of a run's band over its predicted step. [-]"""
    assert run.band is not None
    return run.band.low_s / _predicted_s(run), run.band.high_s / _predicted_s(run)
