"""What a host-bound step waits for the casts of its fp8 weights, which the host issues once a step."""

from __future__ import annotations

import pytest

import mofa
from mofa.specs.hardware import ClusterSpec
from mofa.specs.workload import WorkloadSpec

LAYERS = 2


def job(format_: str) -> WorkloadSpec:
    """Two layers of experts that a host can hardly issue as fast as they run."""
    one = mofa.load_workload("qwen3-30b-a3b")
    return one.model_copy(
        update={
            "model": one.model.model_copy(update={"num_layers": LAYERS}),
            "batch": one.batch.model_copy(update={"seq_len": 1024, "global_": 4}),
            "precision": one.precision.model_copy(update={"gemm": format_}),
        }
    )


def without_casts(machines: ClusterSpec) -> ClusterSpec:
    host = machines.gpu.curves.host
    none = {"forward_cast_s": None, "forward_each_cast_s": None}
    modules = {name: call.model_copy(update=none) for name, call in host.modules.items()}
    curves = machines.gpu.curves.model_copy(update={"host": host.model_copy(update={"modules": modules})})
    return machines.model_copy(update={"gpu": machines.gpu.model_copy(update={"curves": curves})})


def step_s(workload: WorkloadSpec, machines: ClusterSpec, framework: mofa.FrameworkSpec | None = None) -> float:
    return mofa.estimate(workload, machines, "micro_batch=1", framework=framework, replay=False).step_s


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-tensorwise", "fp8-blockwise"])
def test_a_host_bound_step_waits_for_the_casts_of_its_weights(recipe: str) -> None:
    """Of a linear with a norm, one without and 128 experts' two a layer, less what the device casts meanwhile; nothing
    in bf16."""
    machines = mofa.load_cluster("h200-hgx", 1)
    host = machines.gpu.curves.host
    with_norm, linear, grouped = (
        host.module_call_time(name, recipe) for name in ("norm_linear", "linear", "grouped_linear")
    )
    assert with_norm is not None and with_norm.forward_cast_s is not None
    assert linear is not None and linear.forward_cast_s is not None
    assert grouped is not None and grouped.forward_each_cast_s is not None
    dense = with_norm.forward_cast_s.value + linear.forward_cast_s.value
    issued = LAYERS * (dense + 2 * 128 * grouped.forward_each_cast_s.value)
    more = step_s(job(recipe), machines) - step_s(job(recipe), without_casts(machines))
    assert 0.2 * issued < more < issued
    assert step_s(job("bf16"), machines) == step_s(job("bf16"), without_casts(machines))


def test_parameters_that_are_fp8_are_cast_by_the_optimizer() -> None:
    framework = mofa.load_framework("megatron").model_copy(update={"fp8_params": True})
    machines = mofa.load_cluster("h200-hgx", 1)
    both = [step_s(job("fp8-blockwise"), some, framework) for some in (machines, without_casts(machines))]
    assert both[0] == both[1]


@pytest.mark.parametrize("graphs", ["te", "local", "local:full_iteration"])
def test_casts_in_graphs_are_not_issued(graphs: str) -> None:
    workload = mofa.load_workload("llama3-8b")
    workload = workload.model_copy(
        update={
            "batch": workload.batch.model_copy(update={"seq_len": 256, "global_": 8}),
            "precision": workload.precision.model_copy(update={"gemm": "fp8-blockwise"}),
        }
    )
    machines = mofa.load_cluster("h100-hgx", 4)
    captured = mofa.load_framework("megatron").model_copy(update={"cuda_graphs": graphs})

    def seconds(some: ClusterSpec, framework: mofa.FrameworkSpec | None) -> float:
        return mofa.estimate(workload, some, "tp=4", framework=framework, replay=False).step_s

    assert seconds(machines, captured) == seconds(without_casts(machines), captured)
    assert seconds(machines, None) > seconds(without_casts(machines), None)


@pytest.mark.parametrize("chunks", [2, 4])
def test_token_chunks_behind_the_first_find_weights_cast(chunks: int) -> None:
    """As many casts as without chunks, though each chunk calls its experts."""
    machines = mofa.load_cluster("h200-hgx", 1)

    def casts_s(strategy: str) -> float:
        both = (
            mofa.estimate(job("fp8-tensorwise"), some, strategy, replay=False).step_s
            for some in (machines, without_casts(machines))
        )
        return next(both) - next(both)

    plain = casts_s("micro_batch=1 recompute=selective:moe")
    assert casts_s(f"micro_batch=1 recompute=selective:moe token_chunks={chunks}") == pytest.approx(plain, rel=0.3)
