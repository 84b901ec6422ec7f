"""Replicas that go on without the one that failed: limits, the ledger, and a simulation of replicas beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mofa
from mofa.errors import SpecError
from mofa.faults.ledger import PARTS
from mofa.faults.outlook import LongRunOutlook, long_run_outlook
from mofa.faults.replicas import ReplicaAbsence, mean_missing_nodes
from mofa.search.goodput import LongRunObjective
from mofa.search.long_run.goodput_by_scale import GOES_ON, goodput_by_scale
from mofa.specs.faults import FaultSpec
from mofa.specs.load import load_faults
from tests.faults.test_outlook import times_of

JOB = mofa.load_workload("llama3-8b", tokens="1T")
NODES = mofa.load_cluster("h100-hgx", 64)
HSDP = mofa.load_framework("torchtitan", overrides={"data_parallel": "hsdp", "dp_replicate": 8})


def facts(**changes: Any) -> FaultSpec:
    return load_faults("llama3", {"recovery": "replica", **{k.replace("__", "."): v for k, v in changes.items()}})


def course(spec: FaultSpec, num_replicas: Any, nodes: int = 64, **options: Any) -> LongRunOutlook:
    return long_run_outlook(
        spec, times_of(spec), 10.0, 8 * nodes, nodes, 8, work_s=1e7, num_replicas=num_replicas, **options
    )


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_one_replica_restarts_from_a_checkpoint(mode: str) -> None:
    alone = course(facts(checkpoint__mode=mode), 1)
    usual = course(facts(checkpoint__mode=mode, recovery="checkpoint"), 1)
    for part in PARTS:
        assert alone.parts[part] == pytest.approx(usual.parts[part], abs=1e-12)
    assert float(alone.interval_s[0]) == float(usual.interval_s[0])


def test_replicas_that_share_a_node_fail_together() -> None:
    found = course(facts(), np.array([64, 128, 512]))
    assert found.ettr[1:] == pytest.approx(float(found.ettr[0]), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-4, 50.0), st.integers(1, 64), st.sampled_from([None, 1, 4]))
def test_the_ledger_closes(rate: float, num_replicas: int, spares: int | None) -> None:
    found = course(facts(reliability__failures_per_node_day=rate), num_replicas, spares=spares)
    parts = [float(found.parts[part][0]) for part in PARTS]
    assert sum(parts) == pytest.approx(1.0, abs=1e-9)
    assert min(parts) >= 0


def test_more_replicas_lose_less() -> None:
    found = course(facts(reliability__failures_per_node_day=0.5), np.array([2, 4, 8, 16, 32, 64]))
    assert np.all(np.diff(found.ettr) > 0)
    usual = course(facts(reliability__failures_per_node_day=0.5, recovery="checkpoint"), 1)
    assert float(found.ettr[-1]) > float(usual.ettr[0])


def test_all_down_is_as_rare_as_the_binomial_says() -> None:
    """At any moment q^D: so often, for T / D each time."""
    from scipy import stats  # half a second to load, which collecting need not take

    down, mtbf = 600.0, np.array([1800.0])
    absence = ReplicaAbsence(np.array([30.0]), np.array([down]), np.array([5.0]), np.array([4.0]))
    q = down / (4 * 1800.0 + down)
    assert float(absence.all_down_mtbf_s(mtbf)[0]) == pytest.approx(down / 4 / stats.binom.pmf(4, 4, q))


def test_what_replicas_do_is_simulated() -> None:
    """Replicas up and down by themselves, played event by event: shares of the throughput that is there."""
    replicas, rng = 8, np.random.default_rng(4)
    spec = facts(reliability__failures_per_node_day=2.0)
    found = course(spec, replicas)
    absence = found.absence
    assert absence is not None
    mtbf, away, stall = float(found.mtbf_s[0]), float(absence.return_s[0]), float(absence.stall_s[0])
    now = done = wall = 0.0
    back = np.zeros(replicas)
    work = 4e7
    while done < work:
        up = int((back <= now).sum())
        fails = rng.exponential(replicas * mtbf / up) if up else np.inf
        comes = float(back[back > now].min()) if up < replicas else np.inf
        until = min(now + fails, comes)
        done += (until - now) * up / replicas
        wall += until - now
        now = until
        if until < comes:
            back[rng.choice(np.flatnonzero(back <= now))] = now + away
            wall += stall + 5.0  # all stand still, clocks too; half of a step of 10 s is lost
    assert float(found.ettr[0]) == pytest.approx(done / wall, abs=2e-3)


@pytest.mark.parametrize(("mean", "spares"), [(0.5, 0), (2.0, 1), (7.0, 9), (40.0, 30)])
def test_nodes_short_is_the_sum(mean: float, spares: int) -> None:
    from scipy import stats  # half a second to load, which collecting need not take

    number = np.arange(1000)
    by_sum = float((np.maximum(number - spares, 0) * stats.poisson.pmf(number, mean)).sum())
    assert float(mean_missing_nodes(mean, spares)) == pytest.approx(by_sum, rel=1e-9)


def test_what_the_framework_cannot_do_is_null_with_the_reason() -> None:
    megatron = mofa.load_framework("megatron")
    plan = mofa.estimate_long_run(JOB, NODES, "tp=2", facts(), framework=megatron, replay=False)
    assert plan.ettr is None and "megatron restarts all replicas" in plan.unknown["ettr"]
    fsdp = mofa.load_framework("torchtitan")
    assert "dp_replicate" in LongRunObjective(JOB, NODES, fsdp, facts()).unknown_figures()["ettr"]
    with pytest.raises(SpecError, match="megatron restarts all replicas"):
        goodput_by_scale(JOB, NODES, facts(), [64], megatron)
    with pytest.raises(SpecError, match="recovery: replica reads"):
        facts(checkpoint__mode="peer")


def test_plans_and_scales_carry_it() -> None:
    often = facts(reliability__failures_per_node_day=0.5, spares=0)
    plan = mofa.find_long_runs(JOB, NODES, often, framework=HSDP, top=1, replay=False).report.plans[0]
    assert plan.long_run is not None and plan.long_run.num_replicas == 8 and plan.days is not None
    assert plan.days.p10 < plan.days.p50 < plan.days.p90
    point = goodput_by_scale(JOB, NODES, often, [64], HSDP, strategy="tp=1").points[0]
    goes_on, blocking = point.variants[GOES_ON], point.variants["blocking"]
    assert (goes_on.recovery, blocking.recovery) == ("replica", "checkpoint")
    assert goes_on.ettr > blocking.ettr
    assert goes_on.global_batch == blocking.global_batch
