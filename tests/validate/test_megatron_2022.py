"""The Megatron-LM of 2022 as a profile over Megatron's own layers: what Korthikanti et al. count, and what it lacks."""

from __future__ import annotations

import pytest

import mofa
from mofa.errors import SpecError, StrategyError
from mofa.specs.framework_offers import LOCAL_LAYERS
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.workload import WorkloadSpec

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


MODEL_22B = {
    "name": "gpt-22b", "source": "Korthikanti et al. 2022, Table 3", "num_layers": 48, "hidden": 6144, "vocab": 51200,
    "attention": {
        "kind": "gqa", "num_heads": 64, "num_kv_heads": 64, "head_dim": 96, "qkv_bias": True, "out_bias": True,
    },
    "mlp": {"activation": "gelu", "ffn_hidden": 24576, "bias": True}, "norm": "layernorm", "dropout": 0.1,
    "positions": "learned", "max_positions": 2048, "tied_embeddings": True,
}  # fmt: skip
LAYER_PARTS = ("gemm", "attention", "memory_bound", "tp", "recompute", "host_idle")


@pytest.mark.parametrize(
    ("recompute", "sp", "measured_ms"),
    [("none", False, 19.6), ("none", True, 19.0), ("full", False, 27.2), ("selective", False, 20.9),
     ("selective", True, 20.3)],
)  # fmt: skip
def test_the_layer_that_calibrates_the_a100(recompute: str, sp: bool, measured_ms: float) -> None:
    """Table 4 of arXiv 2205.05198: forward and backward of one layer of 22B, tp 8, micro-batch 4, in milliseconds."""
    machines = mofa.load_cluster("a100-hgx", 8)
    spec = mofa.load_framework("megatron-2022", overrides={"data_parallel": "ddp"})
    strategy = {"tp": 8, "sp": sp, "recompute": recompute, "micro_batch": 4}

    def seconds(layers: int) -> float:
        batch = {"seq_len": 2048, "global_batch": 4}
        raw = {"name": "layer", "source": "Table 4", "model": {**MODEL_22B, "num_layers": layers}, "batch": batch}
        job = spec_from_mapping(WorkloadSpec, raw, "the test")
        exposed = mofa.estimate(job, machines, strategy, framework=spec, replay=False).time.exposed
        return sum(exposed[name] for name in LAYER_PARTS)

    layer_ms = (seconds(48) - seconds(24)) / 24 * 1e3
    assert layer_ms == pytest.approx(measured_ms, rel=0.02)


def test_stages_exchange_parts_of_what_every_rank_of_tp_holds() -> None:
    """Narayanan et al. 2021, section 4.1: without sp a rank sends a part and gathers; which is faster."""
    job = mofa.load_workload(GPT3, seq_len=2048, global_batch=64)
    machines = mofa.load_cluster("a100-hgx", 64)
    times = []
    for scatters in (False, True):
        spec = mofa.load_framework("megatron-2022", overrides={"scatters_pipeline_sends": scatters})
        plan = mofa.estimate(job, machines, {**PAPER, "sp": False, "recompute": "full"}, framework=spec, replay=False)
        times.append(plan.time.exposed["pp"] + plan.time.hidden["pp"])
    assert times[1] < times[0]
