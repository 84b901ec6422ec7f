"""Layers of several kinds have as many parameters as transformers' own, layer by layer."""

from __future__ import annotations

import csv
from itertools import groupby
from pathlib import Path

import pytest

from mofa.specs.files import load_json
from mofa.specs.huggingface import model_from_config
from mofa.specs.layer_kind_params import params_of_layer_kind
from mofa.specs.load import load_workload
from mofa.specs.model import ModelSpec
from mofa.specs.params import layer_params, num_active_params, num_mtp_params, num_params

HERE = Path(__file__).parent
ROWS = {
    config: list(rows)
    for config, rows in groupby(
        csv.DictReader((HERE / "layer_counts.csv").read_text(encoding="utf-8").splitlines()), lambda row: row["config"]
    )
}
"""Of ``scripts/layer_counts.py``, by configuration."""


def _model(config: str) -> ModelSpec:
    return model_from_config(load_json(HERE / "configs" / f"{config}.json"), config)


@pytest.mark.parametrize("config", ROWS)
def test_each_layer_has_the_parameters_of_transformers_own(config: str) -> None:
    """Without experts that have no weights, and with the biases that routers keep as buffers."""
    model = _model(config)
    assert model.layers is not None
    counted = {}
    for row in ROWS[config]:
        total = int(row["parameters"]) + int(row["correction_biases"]) - int(row["without_weights"])
        for span in row["layers"].split():
            first, last = map(int, span.split("-"))
            counted |= dict.fromkeys(range(first, last + 1), total)
    own = {i: params_of_layer_kind(model, model.layers.kind_of(i)).total_params for i in range(model.num_layers)}
    assert own == counted


PUBLISHED = [
    # Hugging Face, stepfun-ai/step3, model card: 316B of the language model, 38B a token
    ("stepfun-ai--step3", 316e9, 0.5e9, 38e9, 1e9),
    # MiniMax-M1, arXiv 2506.13585, abstract: 456 billion parameters, 45.9 billion a token without the embeddings
    ("MiniMaxAI--MiniMax-M1-80k", 456e9, 0.5e9, 45.9e9, 2.6e9),
    # LongCat-Flash, arXiv 2509.01322, abstract: 560B, at most 31.3B a token without the embedding
    ("meituan-longcat--LongCat-Flash-Chat", 560e9, 1e9, 31.3e9, 1e9),
    # DeepSeek-V4-Flash, model card: 284B parameters, 13B a token
    ("deepseek-ai--DeepSeek-V4-Flash", 284e9, 0.5e9, 13e9, 1e9),
]


@pytest.mark.parametrize(("config", "total", "within", "active", "active_within"), PUBLISHED)
def test_counts_are_the_published_ones(
    config: str, total: float, within: float, active: float, active_within: float
) -> None:
    model = _model(config)
    assert num_params(model) == pytest.approx(total, abs=within)
    assert num_active_params(model) == pytest.approx(active, abs=active_within)


def test_decilm_layers_are_those_of_the_llama_that_was_searched() -> None:
    """Llama-3.3-Nemotron-Super: a block with the multiple 5.25 is Llama 3's layer, one without attention lacks it."""
    model, llama = _model("nvidia--Llama-3_3-Nemotron-Super-49B-v1"), load_workload("llama3-70b").model
    assert model.layers is not None
    layer = layer_params(llama, moe=False).total_params
    assert params_of_layer_kind(model, model.layers.kind_named("attention-28672")).total_params == layer
    attention = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 8192
    assert params_of_layer_kind(model, model.layers.kind_named("none-28672")).total_params == layer - attention
    widths = {name: int(name.rpartition("-")[2]) for name in model.layers.num_layers_by_kind(80)}
    assert sorted(widths.values()) == [2816, 5632, 7168, 14336, 14336, 17920, 28672, 28672]


def test_predictions_are_counted_apart() -> None:
    """DeepSeek-V3.2's entry is its last layer, a projection and three norms; Qwen3.5's layer has full attention."""
    sparse, qwen = _model("deepseek-ai--DeepSeek-V3.2"), _model("Qwen--Qwen3.5-397B-A17B")
    for model, kind in ((sparse, "indexed-moe"), (qwen, "full")):
        assert model.layers is not None
        own = params_of_layer_kind(model, model.layers.kind_named(kind)).total_params
        assert num_mtp_params(model) == own + 2 * model.hidden**2 + 3 * model.hidden
