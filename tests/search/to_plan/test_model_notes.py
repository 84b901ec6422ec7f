"""Notes on what a model has and a framework's layers lack."""

from __future__ import annotations

import pytest

import mofa
from mofa.search.to_plan.notes import unmeasured_model_notes


@pytest.mark.parametrize(
    ("framework", "says"), [("torchtitan", True), ("fsdp1", True), ("megatron", False), ("megatron-local", False)]
)
def test_a_gate_of_shared_experts_is_never_left_out_in_silence(framework: str, says: bool) -> None:
    workload = mofa.load_workload("qwen3-30b-a3b", overrides={"model.moe.shared_hidden": 512})
    assert workload.model.moe is not None
    facts = mofa.load_framework(framework)
    assert not any("gate of shared experts" in note for note in unmeasured_model_notes(workload.model, facts))
    gated = workload.model.model_copy(update={"moe": workload.model.moe.model_copy(update={"shared_gate": True})})
    assert any("gate of shared experts" in note for note in unmeasured_model_notes(gated, facts)) is says
