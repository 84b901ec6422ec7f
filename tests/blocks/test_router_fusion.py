"""A router whose choice is one kernel of Transformer Engine's, beside PyTorch's ops."""

from __future__ import annotations

from typing import Any

import pytest

import mofa
from tests.blocks.ops import moved, one
from tests.blocks.small import EXPERTS, build, context, framework, kept, llama

TOKENS, NUM_EXPERTS = 512, 8
GROUPED = {**EXPERTS, "score": "sigmoid", "num_groups": 2, "groups_per_token": 1}


def routed(moe: dict[str, Any] = EXPERTS, **options: Any) -> Any:
    return build(context(llama(moe=moe), framework("megatron", **options)), moe=True)


@pytest.mark.parametrize(("moe", "scores"), [(EXPERTS, "softmax"), (GROUPED, "grouped_sigmoid")])
def test_one_kernel_each_way_chooses(moe: dict[str, Any], scores: str) -> None:
    fused, eager = routed(moe, router_fusion=True), routed(moe)
    for name, tape, back in (("fwd", "forward", ""), ("bwd", "backward", ".backward")):
        ours, others = (one(getattr(of, tape), f"router.topk{back}") for of in (fused, eager))
        assert (ours.launches, moved(ours)) == (1, 13 * TOKENS * NUM_EXPERTS)
        assert others.launches > 5 and moved(others) > moved(ours)
        assert ours.work.like == f"te router_{scores}_{name}"
        assert others.work.like == f"megatron router_{scores}_{name}"


def test_the_kernel_is_called_as_a_module_of_its_own() -> None:
    call = one(routed(router_fusion=True).forward, "router.topk").module_call
    assert call is not None and call.module == "fused_router"


def test_a_number_for_each_expert_is_kept() -> None:
    fused, eager = kept(routed(router_fusion=True)), kept(routed())
    assert fused["router.chosen"] == 4 * TOKENS * NUM_EXPERTS
    assert eager["router.chosen"] == 12 * TOKENS * EXPERTS["top_k"]
    assert {n: b for n, b in fused.items() if n != "router.chosen"} == {
        n: b for n, b in eager.items() if n != "router.chosen"
    }


def test_a_step_that_waits_for_its_host_gets_shorter() -> None:
    job = mofa.load_workload("qwen3-30b-a3b", overrides={"model": {"num_layers": 4}, "batch": {"global_batch": 4}})
    machines = mofa.load_cluster("h200-hgx", 1)
    steps = [
        mofa.estimate(
            job, machines, "micro_batch=1", framework=mofa.load_framework("megatron", {"router_fusion": fuses})
        )
        for fuses in (False, True)
    ]
    assert steps[1].step_s < steps[0].step_s
