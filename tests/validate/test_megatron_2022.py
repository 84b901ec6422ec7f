"""The Megatron-LM of 2022 as a profile over Megatron's own layers: what Korthikanti et al. count, and what it lacks."""

from __future__ import annotations

import pytest

import mofa
from mofa.errors import SpecError, StrategyError
from mofa.specs.framework import LOCAL_LAYERS

GPT3 = "gpt3-175b"
PAPER = {"tp": 8, "pp": 8, "vpp": 3, "sp": True, "recompute": "selective", "micro_batch": 1}


def test_profile_and_names() -> None:
    spec = mofa.load_framework("megatron-2022")
    assert spec.fused_softmax
    assert spec.attention == "unfused"
    assert spec.fuses_wgrad_accumulation
    assert LOCAL_LAYERS == ("megatron-2022", "megatron-local")


def test_selective_recomputation_is_faster_than_full_and_takes_more_memory() -> None:
    """Table 5 of arXiv 2205.05198: 18.13 s with full recomputation, 13.75 s with sp and selective."""
    job = mofa.load_workload(GPT3, seq_len=2048, global_batch=64)
    machines = mofa.load_cluster("a100-hgx", 64)
    spec = mofa.load_framework("megatron-2022")
    full = mofa.estimate(job, machines, {**PAPER, "sp": False, "recompute": "full"}, framework=spec)
    selective = mofa.estimate(job, machines, PAPER, framework=spec)
    assert 1.2 < full.step_s / selective.step_s < 1.5
    assert full.memory.allocated_bytes < selective.memory.allocated_bytes


@pytest.mark.parametrize(
    ("strategy", "error"),
    [({"tp": 4, "cp": 2}, "Transformer Engine"), ({"tp": 8, "recompute": "selective:layernorm"}, "megatron-2022")],
)
def test_what_it_lacks(strategy: dict[str, object], error: str) -> None:
    job = mofa.load_workload(GPT3, seq_len=2048, global_batch=8)
    spec = mofa.load_framework("megatron-2022")
    with pytest.raises(StrategyError, match=error):
        mofa.estimate(job, mofa.load_cluster("a100-hgx", 8), strategy, framework=spec)


def test_it_has_no_fused_attention() -> None:
    with pytest.raises(SpecError, match="not offered by megatron-2022"):
        mofa.load_framework("megatron-2022", overrides={"attention": "fused"})
