"""What kernels that the library chooses anew cost a step of Transformer Engine's uneven experts."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import mofa
from mofa.cost.estimate import TableEstimator
from mofa.replay.replayer import replay_step_time
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.one_strategy import checked_strategy_row
from mofa.specs.host import ModuleCallTime
from mofa.specs.routing import RoutingSpec
from tests.cost.toy import with_facts

STRATEGY = "tp=1 pp=1 ep=2 dp=2 micro_batch=2"
FACT = {"provenance": "assumed", "source": "an example"}


@cache
def estimator(
    sigma: float = 0.6, choice_us: float = 100.0, gemm: str = "bf16", recompute: str = "none", steps: int | None = 3
) -> TableEstimator:
    """Six layers of 64 experts over two GPUs, on a host that takes this long to choose a kernel."""
    shape = {"model.num_layers": 6, "precision.gemm": gemm}
    workload = mofa.load_workload("qwen3-30b-a3b", seq_len=4096, global_batch=8, overrides=shape)
    routing: dict[str, Any] = {"kind": "lognormal", "sigma": sigma, "steps_before": steps}
    workload = workload.model_copy(update={"routing": RoutingSpec.model_validate(routing)})
    cluster = mofa.load_cluster("h100-hgx", 2)
    curves = cluster.gpu.curves
    choice = ModuleCallTime.model_validate(
        {way: {"value": f"{choice_us} us", **FACT} for way in ("forward_s", "backward_s")}
    )
    modules = {name: call for name, call in curves.host.modules.items() if not name.startswith("kernel_choice")}
    host = with_facts(curves.host, kernel_load_s=0.0)
    host = host.model_copy(update={"modules": {**modules, "kernel_choice": choice}})
    gpu = cluster.gpu.model_copy(update={"curves": curves.model_copy(update={"host": host})})
    cluster = cluster.model_copy(update={"gpu": gpu})
    framework = mofa.load_framework("megatron")
    row = checked_strategy_row(workload, cluster, framework, f"{STRATEGY} recompute={recompute}")
    return TableEstimator(workload, cluster, framework, row, routing_loads_by_ep(workload, row))


def step_s(**given: Any) -> float:
    return float(estimator(**given).breakdown().step_s[0])


def unseen(**given: Any) -> float:
    """Share of numbers of rows that need a choice. [-]"""
    (part,) = estimator(**given).parts
    return float(part.costs.context.unseen_rows_share)


def longer_s(**given: Any) -> float:
    """What a choice that takes 2 ms instead of 1 adds, where the host is late either way. [s]"""
    return step_s(choice_us=2000.0, **given) - step_s(choice_us=1000.0, **given)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_waits_for_every_choice(recompute: str) -> None:
    """Two micro-batches of six layers with 64 experts on a rank, each with two products forward and four back, on a
    host as fast as two ranks' are; what is computed again was chosen for."""
    (part,) = estimator().parts
    numbers = 2 * 6 * 64 * unseen()
    assert unseen() > 0.2
    expected_s = 6 * numbers * 1e-3 * part.costs.machine.slowest_host_factor
    assert longer_s(recompute=recompute) == pytest.approx(expected_s, rel=0.02)


def test_even_experts_need_hardly_any() -> None:
    """Their numbers of tokens are alike, but for what chance makes of them, and soon remembered."""
    assert step_s() > 1.03 * step_s(choice_us=0.0)
    assert unseen(sigma=0.0, steps=8) < 0.02
    assert step_s(sigma=0.0, steps=8) == pytest.approx(step_s(sigma=0.0, steps=8, choice_us=0.0), rel=0.005)


def test_padded_numbers_are_fewer() -> None:
    """Sixteen numbers become one in fp8."""
    assert 0.0 < unseen(gemm="fp8-tensorwise") < unseen() / 4.0


@pytest.mark.parametrize("choice_us", [100.0, 1000.0])
def test_the_replay_waits_as_long(choice_us: float) -> None:
    """In fp8 a backward launches 5,000 kernels, issued evenly in the closed form where the device's queue is full."""
    for gemm, apart in (("bf16", 0.01), ("fp8-tensorwise", 0.02)):
        closed, played = step_s(choice_us=choice_us, gemm=gemm), replay_step_time(
            estimator(choice_us=choice_us, gemm=gemm), detail=False
        ).step_s  # fmt: skip
        assert closed == pytest.approx(played, rel=apart)


def test_one_kernel_for_all_experts_is_chosen_once() -> None:
    """As torchtitan's grouped product, whatever its rows."""
    job = estimator()
    framework = mofa.load_framework("torchtitan")
    row = checked_strategy_row(job.workload, job.cluster, framework, STRATEGY)
    (part,) = TableEstimator(job.workload, job.cluster, framework, row, job.loads).parts
    assert float(part.costs.context.unseen_rows_share) == 0.0
