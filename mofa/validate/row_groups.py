"""Groups that published rows are judged in: their source, and apart what differs by a rule or a switch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mofa.validate import recipes
from mofa.validate.architecture import Row, source_of_row
from mofa.validate.reference import ReferenceRun
from mofa.validate.row_gaps import BY_RULE
from mofa.validate.validation_report import BY_RULE_SUFFIX, DEFAULT_RECOMPUTE


def group_of_row(row: Row) -> str:
    """Group of a row: its source, apart where a rule filled what it leaves open, where it uses a switch that the others
    do not, and where recomputation is left to the framework's default."""
    source = f"published-{source_of_row(row)}"
    if recipes.hides_expert_exchanges(row):
        return f"{source}-expert-overlap"
    source += "".join(suffix for suffix, is_of in GROUPS_OF_THEIR_OWN.items() if is_of(row))
    return source if row["recompute"] else source + DEFAULT_RECOMPUTE


GROUPS_OF_THEIR_OWN: dict[str, Callable[[Row], bool]] = {
    BY_RULE_SUFFIX: lambda row: bool(row.get(BY_RULE)),
    "-mxfp8": lambda row: row["precision"].startswith("mxfp8"),
    "-float8": lambda row: source_of_row(row) in ("titan", "foundry") and row["precision"].startswith("fp8"),
    "-cuda-graphs": lambda row: recipes.cuda_graphs_of_row(row) not in ("", None),
}
"""By the end of a group's name which rows it holds. No constant and no band is learned from them, whatever half their
family is in."""


def is_group_of_its_own(group: str) -> bool:
    """Whether nothing is learned from a group's rows.

    Examples
    --------
    >>> [is_group_of_its_own(f"published-{name}") for name in ("mlperf-by-rule-default-recompute", "bridge")]
    [True, False]
    """
    return group.removesuffix(DEFAULT_RECOMPUTE).endswith(tuple(GROUPS_OF_THEIR_OWN))


def runs_to_learn_from(references: Iterable[ReferenceRun]) -> list[ReferenceRun]:
    """The fitting half without groups of their own: what bands and margins may be learned from."""
    return [run for run in references if run.split == "fitting" and not is_group_of_its_own(run.group)]
