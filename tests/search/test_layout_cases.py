"""Pipeline layouts that people ran, with what they measured, and degrees that Megatron refuses without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mofa
from mofa.plan.result import Plan
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.run import RunSpec
from mofa.specs.run_files import resolve_run
from mofa.units import MIB

SHORT_DEEPSEEK: dict[str, Any] = {
    "id": "deepseek-v3-14l-64xh100", "model": {"base": "deepseek-v3", "num_layers": 14, "num_mtp_layers": 1},
    "framework": {"name": "megatron"}, "hardware": "h100-hgx", "gpus": 64,
    "strategy": {
        "tp": 1, "pp": 4, "vpp": 2, "ep": 16, "etp": 1, "schedule": "interleaved", "layout": "Ett|(tt|)*6mL",
    },
    "batch": {"seq_len": 2048, "micro": 1, "global": 256},
}  # fmt: skip
"""NVIDIA/Megatron-LM, pull request 6429: 14 layers of DeepSeek-V3 and a prediction."""
DEEPSEEK: dict[str, Any] = {
    "id": "deepseek-v3-1024xh100", "model": "deepseek-v3",
    "framework": {"name": "megatron", "dispatcher": "deepep", "allocator": "expandable"},
    "hardware": "h100-hgx", "gpus": 1024,
    "strategy": {"tp": 2, "sp": True, "pp": 8, "vpp": 4, "ep": 64, "etp": 1, "recompute": "selective:mla_up_proj+mlp"},
    "batch": {"seq_len": 4096, "micro": 1, "global": 16384},
}  # fmt: skip
"""NVIDIA-NeMo/Megatron-Bridge, its recipe for 1,024 H100 and its card of DeepSeek-V3."""
GPT: dict[str, Any] = {
    "name": "gpt-30l", "source": "a GPT-2 of 30 layers", "num_layers": 30, "hidden": 1024, "vocab": 50257,
    "tied_embeddings": True, "norm": "layernorm", "positions": "learned", "max_positions": 1024,
    "attention": {
        "kind": "gqa", "num_heads": 16, "num_kv_heads": 16, "head_dim": 64, "qkv_bias": True, "out_bias": True,
    },
    "mlp": {"activation": "gelu", "ffn_hidden": 4096, "bias": True},
}  # fmt: skip
GLM: dict[str, Any] = {
    "name": "glm-4.5-air", "source": "https://huggingface.co/zai-org/GLM-4.5-Air config.json", "num_layers": 46,
    "hidden": 4096, "vocab": 151552,
    "attention": {"kind": "gqa", "num_heads": 96, "num_kv_heads": 8, "head_dim": 128, "qkv_bias": True},
    "mlp": {"ffn_hidden": 10944},
    "moe": {
        "num_experts": 128, "top_k": 8, "expert_hidden": 1408, "shared_hidden": 1408, "first_k_dense": 1,
        "score": "sigmoid", "correction_bias": True,
    },
}  # fmt: skip


def _estimated(run: dict[str, Any], folder: Path, *, replay: bool, **strategy: Any) -> Plan:
    changed = {**run, "strategy": {**run["strategy"], **strategy}}
    workload, cluster, framework, complete = resolve_run(spec_from_mapping(RunSpec, changed, "case"), folder)
    return mofa.estimate(workload, cluster, complete, framework=framework, replay=replay)


def test_deepseek_of_14_layers_runs_with_its_layout_as_measured(tmp_path: Path) -> None:
    """3.044 s (2.1 % longer here), 185.2 TFLOP/s (3.1 % fewer), 60,154 MiB allocated, 62,570 reserved, 68,973 of the
    device; mofa's own split of these degrees, with a layer and the prediction in the last chunk, would not fit."""
    plan = _estimated(SHORT_DEEPSEEK, tmp_path, replay=True, recompute="full")
    assert plan.step_s / 3.044 - 1 == pytest.approx(0.021, abs=0.004)
    assert plan.tflops_per_gpu / 185.2 - 1 == pytest.approx(-0.031, abs=0.004)
    assert plan.memory.allocated_bytes == pytest.approx(60_154 * MIB, rel=0.02)
    assert plan.memory.reserved_bytes == pytest.approx(62_570 * MIB, rel=0.02)
    assert plan.memory.device_bytes == pytest.approx(68_973 * MIB, rel=0.01)
    assert plan.memory.fits
    assert not _estimated(SHORT_DEEPSEEK, tmp_path, replay=False, recompute="full", layout="").memory.fits


def test_deepseek_of_14_layers_without_recomputation_as_measured(tmp_path: Path) -> None:
    """225.1 TFLOP/s, 68,704 MiB allocated."""
    plan = _estimated(SHORT_DEEPSEEK, tmp_path, replay=True, recompute="none")
    assert plan.tflops_per_gpu == pytest.approx(225.1, rel=0.015)
    assert plan.memory.allocated_bytes == pytest.approx(68_704 * MIB, rel=0.01)


def test_deepseek_with_the_layout_of_its_recipe_as_measured(tmp_path: Path) -> None:
    """61.76 s (4.8 % more here); the split that makes the heaviest chunk lightest is a tenth slower: it puts
    layers beside the prediction and the loss."""
    recipe = _estimated(DEEPSEEK, tmp_path, replay=False, layout="Et|(tt|)*30mL")
    assert recipe.step_s / 61.76 - 1 == pytest.approx(0.048, abs=0.004)
    own = _estimated(DEEPSEEK, tmp_path, replay=False)
    assert own.step_s > 1.08 * recipe.step_s
    assert own.layout is not None
    assert own.layout.by == "mofa"


@pytest.mark.parametrize(
    ("model", "gpus", "strategy", "batch", "layers", "refused"),
    [
        (GPT, 8, {"pp": 4}, {"seq_len": 1024, "micro": 1, "global": 64}, 30, "30 layers over pp 4"),
        (
            GLM, 64, {"tp": 8, "sp": True, "pp": 4, "ep": 16, "etp": 1, "recompute": "full"},
            {"seq_len": 4096, "micro": 2, "global": 16}, 46, "46 layers over pp 4",
        ),
        (
            "llama3-70b", 64, {"tp": 4, "pp": 16, "vpp": 2, "recompute": "full"},
            {"seq_len": 4096, "micro": 1, "global": 64}, 80, "80 layers over pp 16 x vpp 2",
        ),
    ],
    ids=["gpt of 30 layers", "glm-4.5-air", "llama3-70b"],
)  # fmt: skip
def test_degrees_that_megatron_refuses_need_the_layout_that_is_printed(
    tmp_path: Path, model: Any, gpus: int, strategy: dict[str, Any], batch: dict[str, Any], layers: int, refused: str
) -> None:
    """By transformer_block.py, get_num_layers_to_build; the layout then gives the same step."""
    run = {
        "id": "case", "model": model, "framework": {"name": "megatron"}, "hardware": "h100-hgx", "gpus": gpus,
        "strategy": strategy, "batch": batch,
    }  # fmt: skip
    plan = _estimated(run, tmp_path, replay=False)
    assert plan.layout is not None
    assert plan.layout.by == "mofa"
    note = f"megatron refuses {refused} and needs a layout: --pipeline-model-parallel-layout '{plan.layout.text}'"
    assert note in plan.notes
    given = _estimated(run, tmp_path, replay=False, layout=plan.layout.text)
    assert (given.step_s, sum(given.layers_by_chunk)) == (plan.step_s, layers)
    assert given.layout is not None
    assert given.layout.by == "strategy"
