"""How much more the replay reserves than closed forms say, written to hardware_profiles/closed_form_residuals.yaml.

python scripts/closed_form_residuals.py SEED... [--num JOBS] [--jobs PROCESSES]

The random jobs of ``benchmarks/replay_agreement.py``. Seeds that judge the agreement are not to be among them.

A closed form that leaves a share ``m`` of its reserved memory free says "fits" wrongly of a job whose replay reserves a
share ``x`` more, if the limit is between ``1 + m`` and ``1 + x`` times what it needs. Of jobs spread evenly around
their limit so many are between as is ``x - m``, times the density there. So the mean of ``x - m``, where above 0, times
the density is the share of false fits: ``m`` is the least with no more than :data:`MOST_FALSE_FITS`. Each group has
:data:`POOLED_JOBS` jobs more, which are like those of all groups together: few jobs do not show how far tails go.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from mofa.report.save import write_file_atomically
from mofa.specs.framework import FRAMEWORK_NAMES
from mofa.specs.residuals import CLOSED_FORM_FILE

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from random_agreement import RandomAgreement, compare_all  # noqa: E402

HEAD = "# Made by python scripts/closed_form_residuals.py; what a closed form may fill of a GPU rests on it.\n"
MOST_FALSE_FITS = 1e-4
"""Share of random jobs of a group that may fit in closed form and not by replay. [-]"""
POOLED_JOBS = 20
"""Jobs like those of all groups together that count as ones of each group. [-]"""
NEAR = 0.2
"""Share of their limit within which jobs below it tell the density there. [-]"""
ROUNDS = 40
"""Halvings of the range in which a share is looked for. [-]"""


def density_at_limit(filled: NDArray[np.float64]) -> float:
    """Share of jobs per share of their limit, just below it; ``filled`` is closed form over limit of each. [-]

    Examples
    --------
    >>> density_at_limit(np.array([0.1, 0.5, 0.9, 1.0, 3.0]))
    2.0
    """
    return float(np.mean((filled > 1.0 - NEAR) & (filled <= 1.0)) / NEAR)


def share_to_leave_free(more: NDArray[np.float64], pooled: NDArray[np.float64], density: float) -> float:
    """The least share of reserved memory with which no more than :data:`MOST_FALSE_FITS` of jobs fit wrongly. [-]

    Parameters
    ----------
    more
        Replayed over reserved memory in closed form - 1, of a group's jobs. (n,)
    pooled
        The same of all groups' jobs. (m,)
    density
        :func:`density_at_limit` of all jobs.

    Examples
    --------
    Of 1,000 jobs that are like all others, one of which reserves half as much again:

    >>> jobs = np.append(np.zeros(999), 0.5)
    >>> share_to_leave_free(jobs, jobs, 0.5), share_to_leave_free(jobs, jobs, 0.25)
    (0.3, 0.1)
    """
    least, most = 0.0, max(0.0, float(pooled.max()))
    for _ in range(ROUNDS):
        middle = (least + most) / 2.0
        beyond = np.maximum(more - middle, 0.0).sum() + POOLED_JOBS * np.maximum(pooled - middle, 0.0).mean()
        if density * beyond / (len(more) + POOLED_JOBS) > MOST_FALSE_FITS:
            least = middle
        else:
            most = middle
    return round(most, 4)


def reserved_memory(
    results: Sequence[RandomAgreement], seeds: Sequence[int], *, pipelines: bool
) -> dict[str, dict[str, object]]:
    """What to leave free of reserved memory in closed form, for each framework, on one stage or in pipelines. [-]"""
    facts: dict[str, dict[str, object]] = {}
    played = [r for r in results if not r.refused]
    pooled = np.array([1.0 / (1.0 + r.reserved) - 1.0 for r in played])
    density = density_at_limit(np.array([r.filled for r in played]))
    for name in sorted(FRAMEWORK_NAMES):
        own = [r.framework == name and ("pp > 1" in r.kinds) == pipelines for r in played]
        if not any(own):  # a framework without pipelines
            continue
        source = (
            f"with it {MOST_FALSE_FITS:.2%} of jobs fit in closed form and not by replay; {sum(own)} random jobs of "
            f"seeds {', '.join(map(str, seeds))} and {POOLED_JOBS} like all {len(played)}; "
            "python scripts/closed_form_residuals.py"
        )
        value = share_to_leave_free(pooled[own], pooled, density)
        facts[name] = {"value": value, "provenance": "measured", "source": source}
    return facts


def write(results: Sequence[RandomAgreement], seeds: Sequence[int]) -> str:
    """Write the file, and return its text."""
    facts = {name: reserved_memory(results, seeds, pipelines=name == "pipelines")
             for name in ("single_stage", "pipelines")}  # fmt: skip
    text = HEAD + yaml.safe_dump(facts, sort_keys=False, allow_unicode=True, width=116)
    write_file_atomically(ROOT / "hardware_profiles" / CLOSED_FORM_FILE, text.encode())
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--num", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    results = [r for seed in given.seeds for r in compare_all(given.num, seed, given.jobs, memory=True)]
    print(write(results, given.seeds), end="")
