"""How many runs of the next wider group a band borrows, by the fitting halves alone.

python scripts/band_borrowing.py [MOST]

Each family whose configuration is whole is left out of the fit in turn and predicted, with each whole number of
borrowed runs up to MOST (40; minutes). The interval score is a band's width in logarithms and ten times what a
residual lies outside (Gneiting and Raftery 2007, doi 10.1198/016214506000001437, section 6.2). Printed are the shares
inside, the score, and the fewest whose score is within 1 % of the smallest: :data:`mofa.validate.bands.BORROWED`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

from mofa.specs.residuals import STEPS_FILE
from mofa.validate import bands
from mofa.validate.bands import StepResidual, fit_step_residuals, read_residuals

RESIDUALS = Path(__file__).resolve().parent.parent / "hardware_profiles" / STEPS_FILE
NEAR = 1.01
"""A score over the smallest one that is as good. [-]"""


def scores(residuals: list[StepResidual], borrowed: int) -> tuple[float, float, float]:
    """Share of runs inside, its mean over families, and the mean interval score. [-]"""
    bands.BORROWED = float(borrowed)
    inside: dict[str, list[bool]] = {}
    penalties: list[float] = []
    for family in sorted({item.family for item in residuals if item.has_whole_configuration}):
        fitted = fit_step_residuals([item for item in residuals if item.family != family])
        for item in (item for item in residuals if item.family == family and item.has_whole_configuration):
            group = fitted.narrowest_group_of_circumstances(item.circumstances)
            low, high = group.low.value, group.high.value
            outside = max(low - item.from_fast, 0.0) + max(item.from_slow - high, 0.0)
            inside.setdefault(family, []).append(outside == 0.0)
            penalties.append(high - low + outside / bands.OUTSIDE)
    runs = [is_inside for of_family in inside.values() for is_inside in of_family]
    return fmean(runs), fmean(map(fmean, inside.values())), fmean(penalties)


def main(most: int) -> None:
    """Print a row for each number of borrowed runs, and the number that the rule takes."""
    residuals = read_residuals(RESIDUALS.read_text(encoding="utf-8"))
    score_of: dict[int, float] = {}
    print("borrowed  inside  families   score")
    for borrowed in range(1, most + 1):
        runs, families, score_of[borrowed] = scores(residuals, borrowed)
        print(f"{borrowed:8d}  {runs:6.1%}  {families:8.1%}  {score_of[borrowed]:.4f}", flush=True)
    limit = NEAR * min(score_of.values())
    print(f"fewest within 1 % of the smallest: {min(b for b, score in score_of.items() if score <= limit)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
