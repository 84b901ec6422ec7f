"""What a report that people forward is about, as the command line makes it: the search, and how to launch its plan."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from mofa.plan.result import Estimate
    from mofa.report.page.facts import ReportFacts
    from mofa.search.search_result import Search


def report_facts_of_search(
    search: Search,
    table: pd.DataFrame,
    *,
    own: Estimate | None = None,
    own_name: str = "yours",
    target: str | None = None,
    given: frozenset[str] = frozenset(),
    jobs: int = 1,
) -> ReportFacts:
    """The facts of a report about a search that found a plan.

    ``table`` has the strategies that were costed, ``own`` is what the user runs today, ``target`` the framework that
    the plan is written for: the first that runs it where absent; ``given`` names the settings that options gave.
    """
    from mofa.export.launch_files import launch_files
    from mofa.report.page.gather import report_facts

    launch, note = launch_files(search.report, target)
    return report_facts(
        search,
        table,
        own=own,
        own_name=own_name,
        launch=launch,
        launch_note=note,
        command=typed_command_line(),
        given=given,
        made_on=date.today().isoformat(),
        jobs=jobs,
    )


SETTINGS = {
    "framework": ("framework",), "job_of": ("framework", "routing", "gemm_format"), "objective": ("objective",),
    "flops_convention": ("flops_convention",), "faults": ("fault profile",), "log": ("fault profile",),
    "checkpoint_mode": ("checkpoints",), "spares": ("spare nodes",), "storage": ("storage",),
}  # fmt: skip
"""Settings that each option gives, as the search's ``defaults`` name them."""


def given_settings(options: Mapping[str, object], changes: Sequence[str], words: Sequence[str]) -> frozenset[str]:
    """Settings that options gave: those that are not None, what ``--set`` changed, and number formats of ``--with``.

    Examples
    --------
    >>> sorted(given_settings({"framework": "megatron", "spares": None}, ["workload.routing.kind=uniform"], []))
    ['framework', 'routing']
    """
    names = {setting for name, value in options.items() if value is not None for setting in SETTINGS[name]}
    names |= {"routing"} if any("routing" in text for text in changes) else set()
    names |= (
        {"gemm_format"} if any("gemm" in text for text in changes) or any("fp" in word for word in words) else set()
    )
    return frozenset(names)


def typed_command_line() -> str:
    """The command line of this process; empty where mofa was called from another program."""
    return shlex.join(["mofa", *sys.argv[1:]]) if Path(sys.argv[0]).name in ("mofa", "__main__.py") else ""
