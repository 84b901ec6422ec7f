"""Configs of classes whose layers are of several kinds: what their keys become, and nonsense in one line."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from mofa.errors import SpecError
from mofa.specs.files import load_json
from mofa.specs.huggingface import model_from_config
from mofa.specs.layer_kind_params import params_of_layer_kind
from mofa.specs.model import ModelSpec
from mofa.specs.params import num_params

CONFIGS = Path(__file__).parent / "configs"


def _config(name: str, **changes: Any) -> dict[str, Any]:
    file = next(CONFIGS.glob(f"*--{name}.json"))
    config = copy.deepcopy(load_json(file))
    inner = config.get("text_config", config)
    for key, value in changes.items():
        if value is ...:
            del inner[key]
        else:
            inner[key] = value
    return config


def _model(name: str, **changes: Any) -> ModelSpec:
    return model_from_config(_config(name, **changes), "config.json")


def _pattern(model: ModelSpec) -> tuple[str, ...]:
    assert model.layers is not None
    return model.layers.pattern


PERIODS = [
    ("Qwen3-Next-80B-A3B-Instruct", ("linear", "linear", "linear", "full")),
    ("MiniMax-M1-80k", (*["linear"] * 7, "full")),
    ("LongCat-Flash-Chat", ("shortcut",)),
    ("Falcon-H1-34B-Base", ("hybrid",)),
    ("AI21-Jamba-1.5-Large", tuple(
        f"{'attention' if i == 4 else 'mamba'}-{'moe' if i % 2 else 'mlp'}" for i in range(8)
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "period"), PERIODS)
def test_the_shortest_pattern_is_kept(name: str, period: tuple[str, ...]) -> None:
    assert _pattern(_model(name)) == period


def test_a_list_of_layers_is_what_an_interval_says() -> None:
    """Of Qwen3-Next, MiMo and Nemotron-H, in the words of before transformers had its own, and in its own."""
    listed = (["linear_attention"] * 3 + ["full_attention"]) * 12
    assert _model("Qwen3-Next-80B-A3B-Instruct", layer_types=listed) == _model("Qwen3-Next-80B-A3B-Instruct")
    names = {"M": "mamba", "*": "attention", "E": "moe"}
    pattern = _config("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")["hybrid_override_pattern"]
    for own in (names, {"M": "linear_attention", "*": "full_attention", "E": "moe"}):
        listed = [own[letter] for letter in pattern]
        named = _model("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", hybrid_override_pattern=..., layers_block_type=listed)
        assert named == _model("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    mimo = _config("MiMo-V2-Flash")["hybrid_layer_pattern"]
    listed = ["sliding_attention" if windowed else "full_attention" for windowed in mimo]
    assert _model("MiMo-V2-Flash", hybrid_layer_pattern=..., layer_types=listed) == _model("MiMo-V2-Flash")
    assert _model("MiMo-V2-Flash", hybrid_layer_pattern=..., moe_layer_freq=...) == _model("MiMo-V2-Flash")


def test_layers_without_an_indexer_take_anothers_choice() -> None:
    """GLM-5.1: every fourth layer behind the first ones has one; a pattern of letters says the same."""
    shared = _model("GLM-5", index_topk_freq=4, index_skip_topk_offset=3)
    letters = "".join("F" if max(i - 2, 0) % 4 == 0 else "S" for i in range(78))
    assert _model("GLM-5", index_topk_pattern=letters) == shared
    assert num_params(_model("GLM-5")) - num_params(shared) == 57 * (2048 * 32 * 128 + 6144 * (128 + 32) + 2 * 128)


def test_experts_of_a_narrower_width() -> None:
    """Nemotron 3 Super: tokens are projected to a latent for routed experts; a prediction is two layers."""
    own = {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hybrid_override_pattern": "ME*E",
        "moe_latent_size": 1024, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E",
    }  # fmt: skip
    model = model_from_config(own, "config.json")
    assert model.layers is not None
    assert model.layers.prediction == ("attention", "moe")
    experts = params_of_layer_kind(model, model.layers.kind_named("moe"))
    assert experts.routed == 8 * 2 * 1024 * 7688
    assert experts.ffns == 2 * 4096 * 7688 + 2 * 4096 * 1024 + 8 * 4096 + 8


def test_granite_without_experts_has_its_shared_layer() -> None:
    model = _model("granite-4.0-h-small", num_local_experts=0)
    assert (model.moe, model.mlp.ffn_hidden) == (None, 1536)


def test_key_value_heads_of_decilm_may_differ() -> None:
    """A block with other heads than most is an attention of another shape."""
    config = _config("Llama-3_3-Nemotron-Super-49B-v1")
    config["block_configs"][1]["attention"]["n_heads_in_group"] = 16
    layers = model_from_config(config, "config.json").layers
    assert layers is not None
    other = layers.kind_named("attention-4-28672").mixers[0]
    assert (other.kind, other.shape.num_kv_heads if other.kind == "other_attention" else 0) == ("other_attention", 4)


_NO_LINEAR = {"attention": {"no_op": False, "replace_with_linear": True}, "ffn": {"ffn_mult": 1}}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Qwen3-Next-80B-A3B-Instruct", {"layer_types": ["full_attention"]}, "lists 1 layers, there are 48"),
        ("Qwen3-Next-80B-A3B-Instruct", {"layer_types": ["mamba"] * 48}, "layer_types holds 'mamba'"),
        ("Qwen3-Next-80B-A3B-Instruct", {"linear_num_value_heads": 0}, "must be a positive whole number"),
        ("Qwen3.5-397B-A17B", {"layer_types": [[]] * 60}, r"layer_types holds '\[\]'"),
        ("Nemotron-H-56B-Base-8K", {"hybrid_override_pattern": "MX"}, "holds 'X'; mofa has M, "),
        ("Nemotron-H-56B-Base-8K", {"hybrid_override_pattern": "M*"}, r"num_hidden_layers \(118\) is not the 2 layers"),
        ("Nemotron-H-56B-Base-8K", {"hybrid_override_pattern": ...}, r"num_hidden_layers \(118\) is not the 4 layers"),
        ("Nemotron-H-56B-Base-8K", {"hidden_size": float("inf")}, r"hidden_size \(inf\) must be a positive whole"),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"mlp_bias": True}, "no biases of Nemotron's experts"),
        ("Falcon-H1-34B-Base", {"mamba_n_heads": 5}, r"mamba_n_heads \(5\) x mamba_d_head \(128\) must be the inner"),
        ("Falcon-H1-34B-Base", {"mamba_d_head": "none"}, "must be a positive whole number, or auto"),
        ("granite-4.0-h-small", {"layer_types": ["rwkv"] * 40}, "layer_types holds 'rwkv'"),
        ("MiniMax-M1-80k", {"attn_type_list": ...}, "attn_type_list is missing, and MiniMaxM1Config of MiniMaxAI"),
        ("MiniMax-M1-80k", {"attn_type_list": [2] * 80}, "attn_type_list holds '2'"),
        ("MiniMax-M1-80k", {"shared_intermediate_size": 4}, "no shared expert of MiniMax's"),
        ("DeepSeek-V3.2", {"moe_layer_freq": 2}, "no such pattern of layers"),
        ("DeepSeek-V4-Flash", {"compress_ratios": [0, 8] * 22}, "compress_ratios holds '8'"),
        ("DeepSeek-V4-Flash", {"compress_ratios": [0, 4]}, "lists 2 layers, there are 43 and 1 predictions"),
        ("DeepSeek-V4-Flash", {"scoring_func": "tanh"}, "moe.score .'tanh'. must be softmax, sigmoid"),
        ("GLM-5", {"index_topk_pattern": "FS"}, "a letter F or S for each of 78 layers"),
        ("MiMo-V2-Flash", {"moe_layer_freq": [1]}, "moe_layer_freq lists 1 layers"),
        ("step3", {"moe_layers_enum": "4,x"}, r"moe_layers_enum \(4,x\) must list numbers"),
        ("Llama-3_3-Nemotron-Super-49B-v1", {"block_configs": [{}] * 80}, r"block_configs\[0\] must be an object"),
        ("Llama-3_3-Nemotron-Super-49B-v1", {"block_configs": [{}]}, "lists 1 layers"),
        ("Llama-3_3-Nemotron-Super-49B-v1", {"block_configs": [_NO_LINEAR] * 80}, "replaced by a linear layer"),
    ],
)  # fmt: skip
def test_nonsense_is_one_line(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        _model(name, **changes)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("config.json: ")
