"""How often the band of a step held what was measured: the type that reports show."""

from __future__ import annotations

from pydantic import Field

from mofa.specs.base import Spec

COVERED = (0.7, 0.9)
"""Between which the share of tested steps inside their bands should lie. [-]"""


class Coverage(Spec):
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
    def coverage(self) -> float:
        """Share of the steps inside. [-]"""
        return self.inside / self.runs

    @property
    def kept(self) -> bool:
        """Whether the coverage is as it should be, or too few runs say."""
        return not self.tested or COVERED[0] <= self.coverage <= COVERED[1]
