"""The half of the reference runs that may be learned from, as estimators."""

from __future__ import annotations

import atexit
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from mofa.cost.estimate import TableEstimator
from mofa.measure.expand import current_configuration_hash
from mofa.search.job_setup import routing_loads_by_ep, with_numerics
from mofa.search.one_strategy import checked_strategy_row
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.run_files import resolve_run
from mofa.specs.strategy import StrategyTable
from mofa.specs.workload import WorkloadSpec
from mofa.validate.routing_counts import with_routing_counts
from tests.committed import MEASURED, measured_record


def fitting_runs() -> list[str]:
    """Names of the runs whose split is fitting; the others are never parsed."""
    return sorted(p.stem for p in MEASURED.glob("*.yaml") if "\nsplit: fitting" in "\n" + p.read_text())


@cache
def fitting_configurations() -> tuple[str, ...]:
    """The first of each configuration and kind of machine: its repeats are other hosts' or tokens, not other plans."""
    first: dict[tuple[str, str], str] = {}
    for name in sorted(fitting_runs(), key=lambda name: (len(name), name)):
        run = measured_record(name).run
        first.setdefault((current_configuration_hash(run), run.hardware), name)
    return tuple(sorted(first.values()))


@dataclass(frozen=True)
class Run:
    """A measured run, whose blocks are costed once somebody asks for its estimator."""

    name: str
    workload: WorkloadSpec
    cluster: ClusterSpec
    framework: FrameworkSpec
    table: StrategyTable
    allocated: int
    reserved: int
    ready: int
    between: int
    settled: bool
    """Whether it ran to the end without giving memory back."""
    expandable: bool

    @property
    def estimator(self) -> TableEstimator:
        """What costs it."""
        return _estimator(self.name)


@lru_cache
def _estimator(name: str) -> TableEstimator:
    run = load(name)
    return TableEstimator(
        run.workload, run.cluster, run.framework, run.table, routing_loads_by_ep(run.workload, run.table)
    )


@cache
def _scratch() -> Path:
    """Where the counts of routed tokens are written for as long as the tests run."""
    folder = TemporaryDirectory(prefix="mofa-tests-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@cache
def load(name: str) -> Run:
    """A run's job and the largest of its ranks' memory. [B]"""
    record = measured_record(name)
    assert record.split == "fitting"
    measured = record.measured
    run = with_routing_counts(record, _scratch())
    narrow = "torch.bfloat16" in measured.facts.get("param_dtypes", [])
    if narrow and run.framework["name"] == "torchtitan":
        run = run.model_copy(update={"precision": run.precision.model_copy(update={"params": "bf16"})})
    workload, cluster, framework, strategy = resolve_run(run, MEASURED)
    workload, cluster, framework = with_numerics(workload, cluster, framework, ())
    row = checked_strategy_row(workload, cluster, framework, strategy)

    def largest(field: str) -> int:
        return max(int(getattr(rank, field) or 0) for rank in measured.ranks)

    return Run(
        name, workload, cluster, framework, row,
        largest("peak_allocated_bytes"),
        largest("peak_reserved_bytes"), largest("ready_allocated_bytes"), largest("between_steps_bytes"),
        measured.outcome == "ok" and not largest("alloc_retries"), framework.allocator == "expandable",
    )  # fmt: skip
