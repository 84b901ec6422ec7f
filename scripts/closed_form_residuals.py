"""How much more the replay reserves than closed forms say, written to hardware_profiles/closed_form_residuals.yaml.

python scripts/closed_form_residuals.py SEED... [--num JOBS] [--jobs PROCESSES]

The random jobs of ``benchmarks/replay_agreement.py``. Seeds that judge the agreement are not to be among them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from mofa.report.save import write_file_atomically
from mofa.specs.framework import FRAMEWORK_NAMES
from mofa.specs.residuals import CLOSED_FORM_FILE

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from random_agreement import RandomAgreement, compare_all  # noqa: E402

HEAD = "# Made by python scripts/closed_form_residuals.py; what a closed form may fill of a GPU rests on it.\n"


def reserved_memory(
    results: Sequence[RandomAgreement], seeds: Sequence[int], *, pipelines: bool
) -> dict[str, dict[str, object]]:
    """The most of replayed over reserved memory in closed form - 1, of each framework, on one stage or in pipelines."""
    facts: dict[str, dict[str, object]] = {}
    some = [r for r in results if not r.refused and ("pp > 1" in r.kinds) == pipelines]
    for name in sorted(FRAMEWORK_NAMES):
        more = [1.0 / (1.0 + r.reserved) - 1.0 for r in some if r.framework == name]
        if not more:  # a framework without pipelines
            continue
        source = (
            f"largest of replayed over reserved memory in closed form - 1, {len(more)} random jobs of seeds "
            f"{', '.join(map(str, seeds))}; python scripts/closed_form_residuals.py"
        )
        facts[name] = {"value": round(max(0.0, *more), 4), "provenance": "measured", "source": source}
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
