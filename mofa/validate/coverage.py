"""How often the band of a step held what was measured: the type that reports show."""

from __future__ import annotations

from collections.abc import Iterable
from math import comb

from pydantic import Field

from mofa.specs.base import Spec

COVERED = (0.7, 0.9)
"""Between which the share of tested steps inside their bands should lie. [-]"""
NOMINAL_COVERAGE = 0.8
"""Share of steps that a band is to hold. [-]"""
FEWEST_RUNS = 20
"""Runs that a group has to have for a coverage of its own. [-]"""
CHANCE = 0.025
"""Probability of fewer inside than chance leaves open, and of more. [-]"""


def chance_interval_of_coverage(runs: int) -> tuple[float, float]:
    """Between which shares of so many steps lie inside bands that hold 8 in 10, in 95 of 100 cases. [-]

    The central interval of a binomial distribution: steps are taken as independent. Those of one family hang together,
    so that chance leaves more open.

    Examples
    --------
    >>> chance_interval_of_coverage(20), chance_interval_of_coverage(100)
    ((0.6, 0.95), (0.72, 0.88))
    """
    likely = [
        comb(runs, inside) * NOMINAL_COVERAGE**inside * (1.0 - NOMINAL_COVERAGE) ** (runs - inside)
        for inside in range(runs + 1)
    ]
    return _passed(likely) / runs, (runs - _passed(reversed(likely))) / runs


def _passed(likely: Iterable[float]) -> int:
    """Outcomes from the first on that are less likely together than chance leaves open. [-]"""
    passed, sum_of = 0, 0.0
    for likelihood in likely:
        sum_of += likelihood
        if sum_of > CHANCE:
            break
        passed += 1
    return passed


class BandCoverage(Spec):
    """The bands of one group of runs, tested on those that nothing was learned from."""

    group: str = Field(description="What its runs share; with others that are too few to be tested alone.")
    bands: tuple[str, ...] = Field(description="The groups of residuals that their bands are of.")
    fitted_runs: int = Field(ge=1, description="Runs behind the bands. [-]")
    families: int = Field(ge=1, description="Sources and models that those are of. [-]")
    runs: int = Field(ge=1, description="Runs tested. [-]")
    inside: int = Field(ge=0, description="Of these, with their step inside the band. [-]")
    below: int = Field(ge=0, description="Of these, faster than the band. [-]")
    above: int = Field(ge=0, description="Of these, slower. [-]")
    median_low: float = Field(description="Lower end over the predicted step - 1, the median. [-]")
    median_high: float = Field(description="Upper end, likewise. [-]")
    median_width: float = Field(ge=0, description="From end to end over the predicted step, the median. [-]")
    tested: bool = Field(description="Whether the runs are enough for a coverage to be asked of.")

    @property
    def share_inside_bands(self) -> float:
        """Share of the steps inside. [-]"""
        return self.inside / self.runs

    @property
    def chance_interval_of_share(self) -> tuple[float, float]:
        """Between which the coverage of so many steps lies where bands hold 8 in 10. [-]"""
        return chance_interval_of_coverage(self.runs)

    @property
    def holds_share_claimed(self) -> bool:
        """Whether the coverage is as it should be, or too few runs say."""
        return not self.tested or COVERED[0] <= self.share_inside_bands <= COVERED[1]

    @property
    def verdict_text(self) -> str:
        """Whether the coverage is as it should be, in a word, or why nothing is asked."""
        if self.tested:
            return "yes" if self.holds_share_claimed else "NO"
        return "too few to say" if self.runs < FEWEST_RUNS else "not claimed"
