"""The smallest number of GPUs that would do, against trying every number of nodes."""

from __future__ import annotations

from functools import partial
from itertools import count

import numpy as np
import pytest

import mofa
from mofa.cost.estimate import TableEstimator
from mofa.search.entry_points import find_plans
from mofa.search.fewest_gpus import MOST_GPUS, fewest_fitting_gpus_and_note
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.legality.masks import JobAndMachines, check_strategies
from mofa.search.space import (
    SOLVED,
    StrategySpace,
    combinations_table,
    constrain_space,
    default_space,
    with_first_option_set,
)
from mofa.search.to_plan.builder import CandidatePlan, margin_bytes
from mofa.specs.model import ModelSpec
from tests.cost.toy import cluster, framework, llama, moe_llama, workload

HEADS = {"kind": "gqa", "num_heads": 16, "num_kv_heads": 16, "head_dim": 128}
DENSE = llama(num_layers=12, hidden=2048, vocab=32768, attention=HEADS, mlp={"ffn_hidden": 8192})
MOE = moe_llama(
    num_layers=4, hidden=2048, vocab=32768, attention=HEADS, moe={"num_experts": 8, "top_k": 2, "expert_hidden": 4096}
)


FEW = {"cp": 2, "vpp": 1, "micro_batch": 1}
"""A space of each kind of strategy that takes less memory, and few besides."""


def job_of(model: ModelSpec, name: str, memory_gib: float, batch: int, gpus: int = 8) -> JobAndMachines:
    return JobAndMachines(
        workload(model, seq_len=4096, global_batch=batch), cluster(gpus, memory_gib=memory_gib), framework(name)
    )


def fits_on(job: JobAndMachines, num_gpus: int, maximum: dict[str, int]) -> bool:
    """Whether any strategy of the whole space of this number of GPUs fits."""
    here = JobAndMachines(job.workload, job.cluster.model_copy(update={"num_gpus": num_gpus}), job.framework)
    space = default_space(here.workload, here.cluster, here.framework)
    space = constrain_space(space, fix={}, maximum=maximum, with_=(), without=())
    table = combinations_table(with_first_option_set(space), here.cluster, here.framework)
    table = table.select_rows((check_strategies(here, table).reason < 0) & (table.recompute_layers != SOLVED))
    if len(table) == 0:
        return False
    estimator = TableEstimator(
        here.workload, here.cluster, here.framework, table, routing_loads_by_ep(here.workload, table)
    )
    device = estimator.device_bytes_of_rows(np.arange(len(table)), table.recompute_layers)
    return bool(np.any(device <= here.cluster.gpu.capacity_bytes.value - margin_bytes(here.cluster, here.framework)))


def unconstrained(maximum: dict[str, int] | None = None) -> partial[StrategySpace]:
    return partial(constrain_space, fix={}, maximum=maximum or {}, with_=(), without=())


@pytest.mark.parametrize(
    ("model", "name", "memory_gib", "batch", "maximum"),
    [
        (DENSE, "megatron", 6.0, 96, {}),
        (DENSE, "megatron", 5.0, 96, FEW),
        (DENSE, "megatron", 7.0, 48, FEW),
        (DENSE, "torchtitan", 3.3, 96, FEW),
        (MOE, "megatron", 7.0, 96, FEW),
        (DENSE, "megatron-local", 6.0, 96, FEW),
        # dp 1, tp up to 8: of all numbers of nodes 5 and 6 alone fit, which no doubling meets
        (DENSE, "megatron", 4.2, 1, {"pp": 6, "cp": 1}),
        (DENSE, "megatron", 6.0, 96, {"pp": 3}),
    ],
)
def test_brute_force(model: ModelSpec, name: str, memory_gib: float, batch: int, maximum: dict[str, int]) -> None:
    """Every number of nodes below it is tried in the whole space: none fits, and it does."""
    job = job_of(model, name, memory_gib, batch)
    found, note = fewest_fitting_gpus_and_note(job, unconstrained(maximum))
    first = next(8 * n for n in count(1) if n > 24 or fits_on(job, 8 * n, maximum))
    assert found == first if first <= 8 * 24 else found is None or found > 8 * 24
    assert note


@pytest.mark.parametrize("memory_gib", [8.0, 10.0, 12.0])
def test_part_of_a_node_may_do(memory_gib: float) -> None:
    """Below a node every number of GPUs is a cluster: none below the one found fits, and it does."""
    job = job_of(DENSE, "megatron", memory_gib, 96, gpus=1)
    found, note = fewest_fitting_gpus_and_note(job, unconstrained())
    assert found == next(n for n in count(1) if fits_on(job, n, {}))
    assert 1 < found < 8 and "of the 8 GPUs of a node" in note


@pytest.mark.parametrize(("memory_gib", "batch"), [(5.0, 96)])
def test_a_search_on_that_many_finds_a_plan(memory_gib: float, batch: int) -> None:
    """Nothing fits on a node; the number that the report names does, and the whole space on one node fewer does not."""
    job = job_of(DENSE, "megatron", memory_gib, batch)
    report = find_plans(job.workload, job.cluster, framework=job.framework, banded=False).report
    assert not report.plans
    assert report.min_gpus is not None and report.min_gpus > 8 and report.min_gpus % 8 == 0
    enough = cluster(report.min_gpus, memory_gib=memory_gib)
    assert find_plans(job.workload, enough, framework=job.framework, top=1, banded=False).report.plans
    fewer = cluster(report.min_gpus - 8, memory_gib=memory_gib)
    assert not find_plans(job.workload, fewer, framework=job.framework, top=1, banded=False).report.plans


def test_none_would_do() -> None:
    """Less memory than the context and the communicators take."""
    job = job_of(DENSE, "megatron", 0.6, 96)
    report = find_plans(job.workload, job.cluster, framework=job.framework, banded=False).report
    assert report.min_gpus is None and not report.plans
    assert f"{MOST_GPUS:,}" in (report.min_gpus_note or "")


def test_what_only_the_closed_form_fits_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Played out, nothing fits on fewer than 16 GPUs."""
    job = JobAndMachines(workload(DENSE, seq_len=4096, global_batch=32), cluster(8), framework("megatron"))
    assert fewest_fitting_gpus_and_note(job, unconstrained())[0] == 1
    assert fewest_fitting_gpus_and_note(job, unconstrained(), replay=True)[0] == 1
    monkeypatch.setattr(
        CandidatePlan,
        "replayed_device_bytes",
        lambda self, capacity_bytes: capacity_bytes + (1.0 if self.job[1].num_gpus < 16 else -1.0),
    )
    assert fewest_fitting_gpus_and_note(job, unconstrained(), replay=True)[0] == 16


def test_what_no_number_of_gpus_cures_is_said() -> None:
    job, machines = mofa.load_workload("deepseek-v3"), cluster(64)
    report = find_plans(job, machines, framework=framework("torchtitan"), replay=False, banded=False).report
    assert report.min_gpus is None
    assert "set workload.model.num_mtp_layers=0" in str(report.min_gpus_note)
