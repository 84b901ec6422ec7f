"""Plans with CUDA graphs: closed form and replay agree, and graphs save and cost what they must."""

from __future__ import annotations

from typing import Any

import pytest

import mofa
from mofa.plan.result import Plan

CASES: list[dict[str, Any]] = [
    {"graphs": "local", "gpus": 1},
    {"graphs": "te", "gpus": 1},
    {"graphs": "local:full_iteration", "gpus": 1},
    {"graphs": "te:attn", "gpus": 2, "tp": 2, "sp": True},
    {"graphs": "te", "gpus": 4, "pp": 2},
    {"graphs": "te:attn+moe_router+moe_preprocess", "gpus": 2, "model": "qwen3-30b-a3b", "layers": 4, "ep": 2},
]


def estimated(
    graphs: str, *, gpus: int, model: str = "llama3-8b", layers: int = 8, seq_len: int = 4096, replay: bool = True,
    **strategy: Any,
) -> Plan:  # fmt: skip
    """A plan of a shallow model on H200s."""
    job = mofa.load_workload(
        model, global_batch=8, overrides={"model.num_layers": layers, "batch.seq_len": seq_len}
    )  # fmt: skip
    framework = mofa.load_framework({"name": "megatron", "cuda_graphs": graphs})
    machines = mofa.load_cluster("h200-hgx", gpus)
    return mofa.estimate(job, machines, strategy, framework=framework, replay=replay, explain=False, over_time=False)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_closed_form_and_replay_agree(case: dict[str, Any]) -> None:
    closed, played = (estimated(**case, replay=replay) for replay in (False, True))
    assert closed.step_s == pytest.approx(played.step_s, rel=0.01)
    assert closed.memory.allocated_bytes == pytest.approx(played.memory.allocated_bytes, rel=0.01)
    without = [estimated(**{**case, "graphs": "none"}, replay=replay).memory for replay in (False, True)]
    off = closed.memory.reserved_bytes / played.memory.reserved_bytes
    assert off == pytest.approx(without[0].reserved_bytes / without[1].reserved_bytes, abs=0.045)


def test_a_device_bound_step_gets_longer_by_what_is_copied() -> None:
    """Eight micro-batches of eight layers; everything is copied at the rate of memory."""
    plain, local, engine = (estimated(graphs, gpus=1) for graphs in ("none", "local", "te"))
    layer = 218_112_000  # parameters of a layer of Llama 3 8B
    gradients, stream, mask = 4.0 * layer, 4.0 * 4096 * 4096, 3.0 * 4096**2
    rate = 4.8e12  # of an H200's memory, which copies do not quite reach [B/s]

    def copying_s(plan: Plan) -> float:
        return plan.step_s - plan.time.exposed["host_idle"] - plain.step_s + plain.time.exposed["host_idle"]

    assert 1.0 < copying_s(local) * rate / (8 * 8 * gradients) < 1.5
    assert 1.0 < copying_s(engine) * rate / (8 * 8 * (gradients + 2 * stream + mask)) < 1.5


def test_a_host_bound_step_gets_shorter_and_a_full_iteration_waits_least() -> None:
    steps = {
        graphs: estimated(graphs, gpus=8, tp=8, sp=True, seq_len=256)  # the optimizer's lead does not last a step
        for graphs in ("none", "te:mlp", "te", "local", "local:full_iteration")
    }
    assert steps["none"].time.exposed["host_idle"] > 0.4 * steps["none"].step_s
    waits = {graphs: plan.time.exposed["host_idle"] for graphs, plan in steps.items()}
    assert waits["none"] > waits["te:mlp"] > waits["te"] > waits["local:full_iteration"]
    assert steps["local:full_iteration"].step_s < min(steps["te"].step_s, steps["local"].step_s)


def test_pools_are_reserved_beside_all_else() -> None:
    plain, local, engine = (estimated(graphs, gpus=1).memory for graphs in ("none", "local", "te"))
    assert local.reserved_bytes > plain.reserved_bytes
    statics = 8 * (2.0 * 4096 * 4096 + 4096**2)
    assert engine.allocated_bytes - plain.allocated_bytes == pytest.approx(statics, rel=0.01)
    copies = 2.0 * 218_112_000 * 8 * 8  # of all layers and micro-batches, but for those that the device has got to
    for memory in (local, engine):
        assert 0.8 * copies < memory.reserved_bytes - plain.reserved_bytes < 1.1 * copies


def test_a_full_iteration_keeps_the_embedding_s_gradients_to_its_end() -> None:
    plain, whole = (estimated(graphs, gpus=1).memory for graphs in ("none", "local:full_iteration"))
    gradients = 8 * 2.0 * 128_256 * 4096
    assert gradients < whole.reserved_bytes - plain.reserved_bytes < 1.5 * gradients
