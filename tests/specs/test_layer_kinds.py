"""Layers of several kinds: what a file may write, what they hold, and how their steps are refused."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from mofa.errors import SpecError
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.layer_kind_params import params_of_layer_kind, refuse_unmodelled_layer_kinds
from mofa.specs.load import load_workload
from mofa.specs.model import ModelSpec
from mofa.specs.model_states import model_states
from mofa.specs.params import layer_params, num_active_params, num_params
from mofa.specs.workload import WorkloadSpec

LINEAR = {
    "name": "linear",
    "mixers": [{"kind": "lightning", "num_heads": 2, "head_dim": 16}],
    "ffns": [{"kind": "moe"}],
}
FULL = {"name": "full", "mixers": [{"kind": "attention"}], "ffns": [{"kind": "mlp"}]}


def _raw(**more: Any) -> dict[str, Any]:
    return {
        "name": "toy", "source": "by hand", "num_layers": 4, "hidden": 64, "vocab": 100,
        "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
        "mlp": {"ffn_hidden": 128}, "moe": {"num_experts": 4, "top_k": 1, "expert_hidden": 32},
        "layers": {"kinds": [LINEAR, FULL], "pattern": ["linear", "full"]}, **more,
    }  # fmt: skip


def _model(**more: Any) -> ModelSpec:
    return spec_from_mapping(ModelSpec, _raw(**more), "toy")


def _with_layers(**more: Any) -> dict[str, Any]:
    return {"layers": {"kinds": [LINEAR, FULL], "pattern": ["linear", "full"], **more}}


def test_a_plain_model_is_written_as_before() -> None:
    """No field tells of kinds of layers, in Python, JSON and YAML."""
    model = load_workload("llama3-8b").model
    assert "layers" not in model.model_dump()
    assert '"layers"' not in model.model_dump_json()
    assert spec_from_mapping(ModelSpec, model.model_dump(), "again") == model


def test_a_model_of_several_kinds_survives_its_file() -> None:
    model = _model()
    assert spec_from_mapping(ModelSpec, yaml.safe_load(yaml.safe_dump(model.model_dump(mode="json"))), "again") == model


def test_parameters_by_hand() -> None:
    model = _model()
    assert model.layers is not None
    linear, full = (params_of_layer_kind(model, kind) for kind in model.layers.kinds)
    assert (linear.mixers, linear.norms, linear.ffns) == (5 * 64 * 32 + 32, 2 * 64, 4 * 64)
    assert linear.routed == 4 * 3 * 64 * 32
    assert full.mixers == 64 * (64 + 32 + 32) + 64 * 64
    assert full.ffns == 3 * 64 * 128
    assert num_params(model) == 2 * (linear.total_params + full.total_params) + 2 * 100 * 64 + 64
    assert num_active_params(model) == num_params(model) - 2 * linear.routed * 3 // 4
    assert (model.num_moe_layers, [model.is_moe_layer(i) for i in range(4)]) == (2, [True, False, True, False])


def test_parts_add_up_to_the_model() -> None:
    """But for predictions, which are counted apart; bytes follow from parameters."""
    raw = {"name": "toy", "source": "by hand", "model": _raw(), "batch": {"seq_len": 8, "global_batch": 8}}
    job = spec_from_mapping(WorkloadSpec, raw, "toy")
    parts = model_states(job)
    assert sum(part.total_params for part in parts) == num_params(job.model)
    assert [part.layers for part in parts] == [2, 2, 1, 1]
    for part in parts:
        held = (part.weight_bytes, part.gradient_bytes, part.optimizer_bytes)
        assert held == (2 * part.total_params, 4 * part.total_params, 12 * part.total_params)
    assert [part.recurrent_state_bytes for part in parts] == [4 * 2 * 16 * 16, 0, 0, 0]
    narrow = spec_from_mapping(WorkloadSpec, {**raw, "precision": {"moments": "bf16"}}, "toy")
    assert model_states(narrow)[0].optimizer_bytes == 8 * parts[0].total_params
    assert model_states(load_workload("llama3-8b")) == ()


STATES = [
    # Mamba-2: heads x head_dim x state, and 3 inputs of a convolution over heads and two groups' matrices
    ({"kind": "mamba2", "num_heads": 4, "head_dim": 8, "state_dim": 16, "num_groups": 1, "conv_kernel": 4}, 512, 192),
    ({"kind": "mamba1", "inner": 32, "state_dim": 16, "dt_rank": 4, "conv_kernel": 4}, 512, 96),
    ({"kind": "gated_delta_net", "num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 16,
      "conv_kernel": 4}, 512, 288),
    ({"kind": "kimi_delta", "num_heads": 4, "head_dim": 8, "conv_kernel": 4}, 256, 288),
    ({"kind": "lightning", "num_heads": 4, "head_dim": 8}, 256, 0),
    ({"kind": "attention"}, 0, 0),
    ({"kind": "sparse", "num_heads": 4, "head_dim": 8, "top_k": 16}, 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(("mixer", "state", "conv"), STATES, ids=[str(mixer["kind"]) for mixer, _, _ in STATES])
def test_recurrent_states_by_hand(mixer: dict[str, Any], state: int, conv: int) -> None:
    kind = {"name": "one", "mixers": [mixer], "ffns": [{"kind": "mlp"}]}
    layers = _model(layers={"kinds": [kind], "pattern": ["one"]}).layers
    assert layers is not None
    assert (layers.kinds[0].state_elements, layers.kinds[0].conv_state_elements) == (state, conv)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with_layers(pattern=["linear", "none"]), "layers.pattern names none, which is no kind; use linear, full"),
        (_with_layers(prediction=["x"]), "layers.prediction names x"),
        (_with_layers(pattern=["linear"]), "layers.kinds: full is in no layer"),
        (_with_layers(kinds=[LINEAR, LINEAR]), "layers.kinds: two have one name"),
        (_with_layers(pattern=["linear", "full", "full"]), r"num_layers \(4\) must be a multiple of the 3 names"),
        (_with_layers(kinds=[LINEAR, {**FULL, "mixers": [], "ffns": []}]), "has neither mixers nor ffns"),
        (_with_layers(kinds=[LINEAR, {**FULL, "mixers": [{"kind": "mamba3"}]}]), r"mixers\[0\].kind \(mamba3\)"),
        (
            _with_layers(kinds=[LINEAR, {**FULL, "ffns": [{"kind": "moe", "hidden": 1}]}]),
            r"ffns\[0\].hidden is no field",
        ),
        ({"moe": None}, "moe is missing, and a kind of layers has it"),
        ({"mlp": {}}, "mlp.ffn_hidden is missing, and a kind of layers has mlp"),
        ({"moe": {**_raw()["moe"], "every": 2}}, "layers.pattern says where experts are"),
        ({"layers": None, "moe": {**_raw()["moe"], "score": "sqrtsoftplus"}}, "is of models with layers"),
    ],
)
def test_nonsense_is_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        _model(**change)
    assert "\n" not in str(caught.value)


def _refusal(*kinds: dict[str, Any]) -> str:
    named = [{"name": f"k{i}", **kind} for i, kind in enumerate(kinds)]
    model = _model(num_layers=len(kinds), layers={"kinds": named, "pattern": [kind["name"] for kind in named]})
    with pytest.raises(SpecError) as caught:
        refuse_unmodelled_layer_kinds(model)
    return str(caught.value)


def test_what_is_not_modelled_is_named() -> None:
    """The mixer that weighs most, then layers that lack attention, or have it twice."""
    mlp, plain = {"ffns": [{"kind": "mlp"}]}, {"kind": "attention"}
    full = {**mlp, "mixers": [plain]}
    linear = {**mlp, "mixers": LINEAR["mixers"]}
    sparse = {**mlp, "mixers": [{"kind": "sparse", "num_heads": 4, "head_dim": 8, "top_k": 16}]}
    shape = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 1, "head_dim": 16}
    other = {**mlp, "mixers": [{"kind": "other_attention", "shape": shape}]}
    assert _refusal(full, linear, sparse).startswith(
        "toy: linear attention is not modelled yet (lightning attention in 1 of 3 layers); mofa show workload"
    )
    assert "sparse attention is not modelled yet (attention with an indexer in 1 of 2" in _refusal(full, sparse)
    assert "attention of several shapes is not modelled yet" in _refusal(full, other)
    assert "attention with an output gate is not modelled yet (in 2" in _refusal(
        *2 * [{**mlp, "mixers": [{"kind": "gated"}]}]
    )
    assert "factorized attention is not modelled yet" in _refusal(
        {**mlp, "mixers": [{"kind": "factorized", "q_rank": 8}]}
    )
    assert "several attentions in one layer are not modelled yet" in _refusal({**mlp, "mixers": [plain, plain]})
    assert "layers without attention are not modelled yet (1 of 2)" in _refusal(full, mlp)
    assert "layers of several kinds are not modelled yet" in _refusal(full, {**full, "ffns": [{"kind": "moe"}]})


def test_no_count_of_a_plain_layer_is_given_for_them() -> None:
    """What steps and memory are made of refuses them too, whoever asks."""
    with pytest.raises(SpecError, match="linear attention is not modelled yet"):
        layer_params(_model(), moe=True)
    refuse_unmodelled_layer_kinds(load_workload("llama3-8b").model)
