"""The band of a step, as a plan carries it."""

from __future__ import annotations

from pydantic import Field

from mofa.specs.base import Spec
from mofa.specs.residuals import Circumstances


class Band(Spec):
    """Where 8 in 10 measured steps would lie, and what says so."""

    low_s: float = Field(gt=0, description="Lower end. [s]")
    high_s: float = Field(gt=0, description="Upper end. [s]")
    circumstances: Circumstances = Field(description="What the step's residual goes by.")
    group: tuple[str, ...] = Field(
        description="The first of these circumstances that the runs behind the band share; empty: all runs."
    )
    runs: int = Field(ge=1, description="Configurations behind it. [-]")
    families: int = Field(ge=1, description="Sources and models that they are of. [-]")
    few: bool = Field(description="Whether they are too few for tenths: wider groups say much of it.")
    unmeasured: tuple[str, ...] = Field(
        description="What none of the runs had, in words: the band is then as wide as all residuals together."
    )
    tie_margin: float | None = Field(
        default=None,
        ge=0,
        description="Two steps of one job that differ by no more than this share of the shorter are tied: by so much "
        "the errors of two runs of one model differ, in the median over models; null where none was measured. [-]",
    )
    hosts_s: tuple[float, float] | None = Field(
        description="The step on a fast and on a slow host of the kind, within 8 in 10; null on a known host. [s]"
    )
