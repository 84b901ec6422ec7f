"""A command line over results built by hand, and the real commands: in this process, or in one of their own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mofa
from mofa.cli.main import main
from tests.report.fake import make_plan, make_report, make_table

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


class FakeApi:
    """Stands in for the Python API; remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.num_plans = 3
        self.device_gib = 60.0

    def load_workload(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["load_workload"] = args, kwargs
        return SimpleNamespace(name="toy-moe", framework=None)

    def load_cluster(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["load_cluster"] = args, kwargs
        return SimpleNamespace(gpu=SimpleNamespace(name="toy"))

    def load_framework(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["load_framework"] = args, kwargs
        return SimpleNamespace()

    def find_plans(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["find_plans"] = args, kwargs
        kwargs["progress"](1, 2)
        report = make_report(self.num_plans)
        return SimpleNamespace(report=report, costed_table=lambda: make_table(report))

    def refine_layouts(self, search: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls["refine_layouts"] = (search, *args), kwargs
        return search

    def estimate(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["estimate"] = args, kwargs
        return make_plan(device_gib=self.device_gib)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    """The Python API, replaced; summaries too, because there are no real specs to summarise."""
    from mofa.plan import job_facts, result
    from tests.report import fake as results

    api = FakeApi()
    for name in ("load_workload", "load_cluster", "load_framework", "find_plans", "refine_layouts", "estimate"):
        monkeypatch.setattr(mofa, name, getattr(api, name), raising=False)
    for cls, summary in (
        (result.WorkloadSummary, results.WORKLOAD),
        (result.ClusterSummary, results.CLUSTER),
        (result.FrameworkSummary, results.FRAMEWORK),
    ):
        monkeypatch.setattr(cls, "from_spec", classmethod(lambda cls, spec, summary=summary: summary))
    facts = job_facts.JobFacts(workload={}, framework={}, nvls=False)
    monkeypatch.setattr(job_facts.JobFacts, "from_specs", classmethod(lambda cls, *specs: facts))
    monkeypatch.setattr(
        "mofa.cli.report_page.report_facts_of_search", lambda *args, **kwargs: None
    )  # there is no real search
    return api


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run ``mofa`` in this process, which has its modules already, in an empty directory; a warning is an error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    # the tests have a process per core already
    monkeypatch.setattr("mofa.search.workers.usable_cores", lambda most=1: 1)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        out, error = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            status = main(arguments)
        return subprocess.CompletedProcess(arguments, status, out.getvalue(), error.getvalue())

    return run


@pytest.fixture
def process(tmp_path: Path) -> Cli:
    """Run ``mofa`` in a process of its own, in an empty directory, as a shell does."""
    root = Path(mofa.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONWARNINGS": "default"}
    environment.pop("COLUMNS", None)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mofa.cli.main", *arguments],
            capture_output=True, text=True, timeout=300.0, cwd=tmp_path, env=environment, check=False,
        )  # fmt: skip

    return run


def one_line_of(error: str) -> str:
    """The one line that a failed command says."""
    lines = error.splitlines()
    assert len(lines) == 1, error
    assert lines[0].startswith("mofa: ")
    return lines[0]
