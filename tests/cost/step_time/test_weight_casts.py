"""What a host-bound step waits for the casts of its fp8 weights, which the host issues once a step."""

from __future__ import annotations

import pytest

import mofa
from mofa.specs.hardware import ClusterSpec
from mofa.specs.params import layer_linears
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
    """Of two linears and 128 experts' two a layer, less what the device casts meanwhile; nothing in bf16."""
    machines = mofa.load_cluster("h200-hgx", 1)
    host = machines.gpu.curves.host
    dense, routed = layer_linears(job(recipe).model, True)
    linear, grouped = (host.module_call_time(name, recipe) for name in ("linear", "grouped_linear"))
    assert linear is not None and linear.forward_cast_s is not None
    assert grouped is not None and grouped.forward_each_cast_s is not None
    issued = LAYERS * (dense * linear.forward_cast_s.value + routed * 128 * grouped.forward_each_cast_s.value)
    more = step_s(job(recipe), machines) - step_s(job(recipe), without_casts(machines))
    assert 0.2 * issued < more < issued
    assert step_s(job("bf16"), machines) == step_s(job("bf16"), without_casts(machines))


def test_parameters_that_are_fp8_are_cast_by_the_optimizer() -> None:
    framework = mofa.load_framework("megatron").model_copy(update={"fp8_params": True})
    machines = mofa.load_cluster("h200-hgx", 1)
    both = [step_s(job("fp8-blockwise"), some, framework) for some in (machines, without_casts(machines))]
    assert both[0] == both[1]
