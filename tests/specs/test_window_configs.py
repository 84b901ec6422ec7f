"""Configs whose windows follow no regular pattern, whose attention is gated, or whose experts alone have a norm."""

from __future__ import annotations

from typing import Any

import pytest

from mofa.errors import SpecError
from mofa.specs.attention.gqa import GqaSpec
from mofa.specs.huggingface import model_from_config
from mofa.specs.layer_kind_params import refuse_unmodelled_layer_kinds
from mofa.specs.layer_kinds import LayerKind
from mofa.specs.mixers.softmax_attention import OtherAttentionSpec
from mofa.specs.model import ModelSpec


def _model(model_type: str, **changes: Any) -> ModelSpec:
    return model_from_config({"model_type": model_type, **changes}, "c")


def _kinds(model: ModelSpec) -> list[LayerKind]:
    assert model.layers is not None
    return [model.layers.kind_of(layer) for layer in range(model.num_layers)]


def _attention(model: ModelSpec, kind: LayerKind) -> GqaSpec:
    """Of a layer: the model's, or its own."""
    (mixer,) = kind.mixers
    shape = mixer.shape if isinstance(mixer, OtherAttentionSpec) else model.attention
    assert isinstance(shape, GqaSpec)
    return shape


def _windows(model: ModelSpec) -> list[int | None]:
    return [_attention(model, kind).window for kind in _kinds(model)]


@pytest.mark.parametrize(("model_type", "length"), [("cwm", 8192), ("granite_swa", 128), ("granitemoe_swa", 128)])
def test_the_first_of_every_four_layers_is_full_where_none_are_listed(model_type: str, length: int) -> None:
    model = _model(model_type)
    assert _windows(model) == [length if i % 4 else None for i in range(model.num_layers)]
    listed = ["sliding_attention" if i % 4 else "full_attention" for i in range(model.num_layers)]
    assert _model(model_type, layer_types=listed) == model


def test_granite_has_sinks_and_turns_what_has_a_base() -> None:
    model = _model("granite_swa", num_hidden_layers=4, layer_rope_theta=[0, 1e4, 0, 1e6])
    shapes = [_attention(model, kind) for kind in _kinds(model)]
    assert all(shape.sinks for shape in shapes)
    assert [shape.nope_every for shape in shapes] == [1, 0, 1, 0]
    assert [shape.window for shape in shapes] == [None, 128, 128, 128]
    assert model.multipliers == ("embedding", "branches", "logits")


def test_flint_turns_windowed_layers_alone_and_begins_with_dense_ones() -> None:
    model = _model("flint")
    full = [i for i, window in enumerate(_windows(model)) if window is None]
    assert full == [0, *range(1, 49, 4), 48]
    assert all((_attention(model, kind).nope_every == 1) == (i in full) for i, kind in enumerate(_kinds(model)))
    assert [model.is_moe_layer(i) for i in range(4)] == [False, False, True, True]
    assert model.moe is not None and (model.moe.score, model.moe.shared_gate) == ("sigmoid", False)


def test_lara_mini_has_delta_nets_windows_and_full_layers() -> None:
    kinds = _kinds(_model("lara_mini"))
    assert [kind.name for kind in kinds[:5]] == ["linear", "windowed", "linear", "full", "windowed"]
    shapes = [_attention(_model("lara_mini"), kind) for kind in (kinds[1], kinds[3])]
    assert [(shape.window, shape.nope_every) for shape in shapes] == [(512, 0), (None, 1)]


def test_gpt_neo_lists_periods_and_their_repeats() -> None:
    assert _windows(_model("gpt_neo")) == [None, 256] * 12
    model = _model("gpt_neo", num_layers=3, attention_types=[[["local"], 2], [["global"], 1]])
    assert _windows(model) == [256, 256, None]
    assert (model.attention.qkv_bias, model.attention.out_bias, model.positions) == (False, True, "learned")


def test_afmoe_gates_every_layer_and_has_norms_on_both_sides() -> None:
    model = _model("afmoe", mup_enabled=True)
    assert {(kind.mixers[0].kind, kind.norms) for kind in _kinds(model)} == {("gated", 4)}
    assert isinstance(model.attention, GqaSpec)
    assert (model.attention.window_every, model.attention.nope_every, model.multipliers) == (4, 4, ("embedding",))
    assert [model.is_moe_layer(i) for i in range(3)] == [False, True, True]


def test_a_x_k1_has_a_norm_behind_experts_alone() -> None:
    model = _model("axk1", moe_layer_freq=2)
    assert [kind.norms for kind in _kinds(model)[:5]] == [2, 2, 3, 2, 3]


@pytest.mark.parametrize("model_type", ["gpt_neo", "cwm", "granite_swa", "flint", "lara_mini", "afmoe", "axk1"])
def test_a_step_of_them_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(SpecError, match=rf"^{model_type}: .* not modelled yet"):
        refuse_unmodelled_layer_kinds(_model(model_type))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "cwm", "sliding_window": None}, "sliding_window is null or 0, but layer_types has sliding"),
        ({"model_type": "cwm", "layer_types": ["full_attention"]}, "layer_types lists 1 layers, there are 64"),
        ({"model_type": "flint", "mlp_only_layers": ["0"]}, "mlp_only_layers .* must list numbers of layers"),
        ({"model_type": "granite_swa", "layer_rope_theta": [1]}, "must list 24 bases of at least 0"),
        ({"model_type": "granite_swa", "layer_rope_theta": [True] * 24}, "must list 24 bases of at least 0"),
        ({"model_type": "gpt_neo", "num_layers": 12}, "attention_types lists 24 layers, there are 12"),
        ({"model_type": "gpt_neo", "attention_types": ["global"]}, "list periods as"),
        ({"model_type": "gpt_neo", "attention_types": [[["local"], 10**9]]}, "list periods as"),
        ({"model_type": "gpt_neo", "attention_types": [[["near"], 24]]}, "attention_types holds 'near'"),
        ({"model_type": "afmoe", "attention_bias": True}, r"attention_bias \(True\) is not false"),
        ({"model_type": "axk1", "attention_bias": True}, r"attention_bias \(True\) is not false"),
    ],
)
def test_what_is_refused_says_where_and_what(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        model_from_config(config, "c")
    assert str(caught.value).startswith("c: ") and "\n" not in str(caught.value)


SLIDING, FULL = "sliding_attention", "full_attention"
REGULAR = [
    ("cwm", {"layer_types": [SLIDING, SLIDING, SLIDING, FULL]}, (8192, 4, 0)),
    ("cwm", {"layer_types": [FULL] * 4}, (None, 1, 0)),
    ("granite_swa", {"layer_types": [SLIDING, FULL] * 2, "layer_rope_theta": [1e4, 0] * 2}, (128, 2, 2)),
    ("granitemoe_swa", {"layer_types": [SLIDING] * 4}, (128, 1, 0)),
    ("flint", {"layer_types": [SLIDING, SLIDING, SLIDING, FULL]}, (513, 4, 4)),
]


@pytest.mark.parametrize(("model_type", "changes", "attention"), REGULAR)
def test_a_regular_pattern_is_read_with_its_step(
    model_type: str, changes: dict[str, Any], attention: tuple[int | None, int, int]
) -> None:
    model = _model(model_type, num_hidden_layers=4, **changes)
    refuse_unmodelled_layer_kinds(model)
    a = model.attention
    assert (a.window, a.window_every, a.nope_every) == attention
    assert [model.is_windowed_layer(i) for i in range(4)] == [kind == SLIDING for kind in changes["layer_types"]]


def test_flints_experts_behind_its_dense_layers_are_regular() -> None:
    model = _model("flint", num_hidden_layers=4, layer_types=[SLIDING] * 4)
    assert model.moe is not None and (model.moe.first_k_dense, model.moe.every) == (2, 1)
    assert [model.is_moe_layer(i) for i in range(4)] == [False, False, True, True]
    irregular = _model("flint", num_hidden_layers=4, layer_types=[SLIDING] * 4, mlp_only_layers=[1])
    assert irregular.layers is not None
