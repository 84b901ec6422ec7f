"""What configs say beside sizes: norms, windows, rotation, experts, notes and what is refused, by family."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mofa.errors import SpecError
from mofa.specs.attention.gqa import GqaSpec
from mofa.specs.huggingface import model_from_config, read_config
from mofa.specs.huggingface.record import ConfigFamily
from mofa.specs.huggingface.registry import ARCHITECTURES
from mofa.specs.model import ModelSpec

CONFIGS = Path(__file__).parent / "configs"


def _config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return config


def _model(name: str, **changes: Any) -> ModelSpec:
    return model_from_config({**_config(name), **changes}, name)


FACTS: dict[str, dict[str, Any]] = {
    "google--gemma-2-27b": {
        "norm_placement": "both", "logit_softcap": True, "multipliers": ("embedding",), "tied_embeddings": True,
        "attention.softcap": True, "attention.window": 4096, "attention.window_every": 2, "mlp.activation": "geglu",
    },
    "google--gemma-3-27b-pt": {
        "norm_placement": "both", "logit_softcap": False, "tied_embeddings": True, "attention.softcap": False,
        "attention.window": 1024, "attention.window_every": 6, "attention.qk_norm_kind": "head",
    },
    "google--gemma-2b": {"norm_placement": "before", "attention.window": None, "attention.num_kv_heads": 1},
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": {
        "attention.chunked": True, "attention.window": 8192, "attention.window_every": 4, "attention.nope_every": 4,
        "attention.qk_norm": False, "moe.every": 2, "moe.score": "sigmoid", "moe.shared_hidden": 8192,
        "mlp.ffn_hidden": 16384,
    },
    "HuggingFaceTB--SmolLM3-3B": {"attention.nope_every": 4, "attention.window": None},
    "CohereLabs--c4ai-command-a-03-2025": {
        "parallel_branches": True, "shared_branch_norm": True, "norm": "layernorm", "norm_bias": False,
        "multipliers": ("logits",), "attention.nope_every": 4, "attention.window_every": 4,
    },
    "CohereLabs--c4ai-command-r-plus": {"attention.qk_norm_kind": "heads", "attention.window": None},
    "allenai--OLMo-2-0325-32B": {"norm_placement": "after", "attention.qk_norm_kind": "full"},
    "allenai--Olmo-3-1025-7B": {"norm_placement": "after", "attention.window": 4096, "attention.window_every": 4},
    "allenai--OLMoE-1B-7B-0924": {"norm_placement": "before", "attention.qk_norm_kind": "full", "moe.top_k": 8},
    "ibm-granite--granite-3.0-8b-base": {"multipliers": ("embedding", "branches", "logits"), "norm": "rmsnorm"},
    "zai-org--GLM-4-32B-0414": {"norm_placement": "both", "attention.rotary_dim": 64, "attention.qkv_bias": False},
    "zai-org--GLM-4.5": {
        "attention.rotary_dim": 64, "attention.qk_norm": True, "attention.qkv_bias": True, "attention.out_bias": False,
        "moe.first_k_dense": 3, "moe.correction_bias": True, "num_mtp_layers": 1,
    },
    "zai-org--GLM-4.7-Flash": {"attention.kind": "mla", "attention.q_lora_rank": 768, "moe.first_k_dense": 1},
    "MiniMaxAI--MiniMax-M2": {
        "attention.rotary_dim": 64, "attention.qk_norm_kind": "full", "moe.score": "sigmoid", "num_mtp_layers": 3,
    },
    "microsoft--Phi-4-mini-instruct": {"attention.rotary_dim": 96, "attention.window": 262144},
    "microsoft--Phi-3.5-MoE-instruct": {"norm": "layernorm", "norm_bias": True, "head_bias": True,
                                        "attention.out_bias": True},
    "microsoft--phi-2": {"parallel_branches": True, "shared_branch_norm": True, "attention.rotary_dim": 32,
                         "head_bias": True, "mlp.activation": "gelu"},
    "nvidia--Nemotron-4-340B-Base": {"norm": "layernorm", "mlp.activation": "relu2", "attention.rotary_dim": 96},
    "tiiuae--falcon-7b": {"attention.num_kv_heads": 1, "shared_branch_norm": True, "positions": "rope"},
    "tiiuae--falcon-40b": {"attention.num_kv_heads": 8, "parallel_branches": True, "shared_branch_norm": False},
    "tiiuae--falcon-11B": {"parallel_branches": True, "shared_branch_norm": True, "tied_embeddings": False},
    "tiiuae--falcon-rw-1b": {"positions": "alibi", "parallel_branches": False, "mlp.bias": True},
    "bigscience--bloom": {"positions": "alibi", "embedding_norm": True, "num_layers": 70, "hidden": 14336},
    "Qwen--Qwen-7B": {"mlp.ffn_hidden": 11008, "attention.qkv_bias": True, "attention.out_bias": False},
    "facebook--opt-30b": {"positions": "learned", "max_positions": 2050, "mlp.activation": "relu"},
    "openai-community--gpt2": {"positions": "learned", "max_positions": 1024, "mlp.ffn_hidden": 3072},
    "bigcode--starcoder": {"attention.num_kv_heads": 1, "positions": "learned", "max_positions": 8192},
    "bigcode--starcoder2-15b": {"attention.window": 4096, "norm": "layernorm", "mlp.activation": "gelu"},
    "EleutherAI--gpt-neox-20b": {"parallel_branches": True, "shared_branch_norm": False, "attention.rotary_dim": 24},
    "EleutherAI--gpt-j-6b": {"shared_branch_norm": True, "attention.rotary_dim": 64, "attention.qkv_bias": False,
                             "mlp.bias": True, "head_bias": True},
    "mosaicml--mpt-30b": {"positions": "alibi", "norm": "layernorm", "norm_bias": False},
    "databricks--dbrx-base": {"norm": "layernorm", "norm_bias": False, "attention.num_kv_heads": 8, "moe.top_k": 4},
    "stabilityai--stablelm-2-12b": {"attention.qk_norm_kind": "heads", "parallel_branches": True,
                                    "shared_branch_norm": True, "attention.rotary_dim": 40},
    "LGAI-EXAONE--EXAONE-4.0-32B": {"norm_placement": "after", "attention.nope_every": 4, "attention.window_every": 4,
                                    "attention.qk_norm_kind": "head"},
    "LGAI-EXAONE--EXAONE-4.0-1.2B": {"attention.nope_every": 0, "attention.window": None},
    "ByteDance-Seed--Seed-OSS-36B-Base": {"attention.qkv_bias": True, "attention.out_bias": False},
    "tencent--Hunyuan-A13B-Instruct": {"moe.top_k": 8, "moe.shared_hidden": 3072, "attention.qk_norm": True},
    "baidu--ERNIE-4.5-21B-A3B-PT": {"moe.shared_hidden": 3072, "moe.first_k_dense": 1, "moe.correction_bias": True},
    "rednote-hilab--dots.llm1.base": {"attention.qk_norm": True, "moe.score": "sigmoid", "attention.window": None},
    "XiaomiMiMo--MiMo-7B-Base": {"num_mtp_layers": 1, "attention.qkv_bias": True},
    "internlm--internlm2-20b": {"attention.qkv_bias": False, "attention.num_kv_heads": 8},
    "baichuan-inc--Baichuan2-7B-Base": {"positions": "rope"},
    "baichuan-inc--Baichuan2-13B-Base": {"positions": "alibi"},
    "inclusionAI--Ling-lite": {"moe.shared_hidden": 2816, "moe.score": "softmax", "attention.qkv_bias": False},
    "inclusionAI--Ling-mini-2.0": {"moe.num_groups": 8, "moe.groups_per_token": 4, "attention.rotary_dim": 64},
    "hpcai-tech--grok-1": {"norm_placement": "both", "mlp.activation": "geglu", "attention.softcap": True,
                           "tied_embeddings": True},
    "xai-org--grok-2": {"moe.shared_hidden": 32768, "moe.expert_hidden": 16384, "logit_softcap": True},
    "moonshotai--Moonlight-16B-A3B": {"attention.q_lora_rank": None, "moe.shared_hidden": 2816},
    "mistralai--Mistral-Small-3.1-24B-Base-2503": {"tied_embeddings": False, "attention.window": None},
    "Qwen--Qwen2.5-VL-7B-Instruct": {"attention.qkv_bias": True, "attention.window": None},
}  # fmt: skip


@pytest.mark.parametrize("name", FACTS)
def test_facts_beside_sizes(name: str) -> None:
    _assert_facts(_model(name), FACTS[name])


def _assert_facts(model: ModelSpec, facts: dict[str, Any]) -> None:
    for path, wanted in facts.items():
        value: Any = model
        for part in path.split("."):
            value = getattr(value, part)
        assert value == wanted, path


ALL_FULL = ["full_attention"] * 4
BY_TYPE: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"model_type": "biogpt"}, {"positions": "learned", "max_positions": 1026, "norm": "layernorm",
                                "multipliers": ("embedding",), "attention.out_bias": True, "mlp.bias": True}),
    ({"model_type": "biogpt", "scale_embedding": False}, {"multipliers": ()}),
    ({"model_type": "cohere2_moe"}, {"norm": "layernorm", "norm_bias": False, "parallel_branches": True,
                                     "shared_branch_norm": True, "multipliers": ("logits",), "attention.window": 4096,
                                     "attention.window_every": 4, "attention.nope_every": 4, "moe.first_k_dense": 0}),
    ({"model_type": "cohere2_moe", "rms_norm_eps": 1e-6, "num_shared_experts": 2, "expert_selection_fn": "sigmoid"},
     {"norm": "rmsnorm", "moe.shared_hidden": 45056, "moe.score": "sigmoid"}),
    ({"model_type": "cohere2_moe", "first_k_dense_replace": 4, "prefix_dense_sliding_window_pattern": 4,
      "prefix_dense_intermediate_size": 30000},
     {"moe.first_k_dense": 4, "mlp.ffn_hidden": 30000, "attention.window_every": 4}),
    ({"model_type": "cohere2_moe", "num_hidden_layers": 4, "layer_types": ALL_FULL},
     {"attention.window": None, "attention.nope_every": 1}),
    ({"model_type": "cohere2_moe", "num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 4},
     {"attention.window_every": 1, "attention.nope_every": 0}),
    ({"model_type": "internlm3", "qkv_bias": True, "bias": True},
     {"attention.qkv_bias": True, "attention.out_bias": True, "mlp.bias": True, "attention.num_kv_heads": 2}),
    ({"model_type": "exaone", "num_layers": 30, "activation_function": "gelu"},
     {"num_layers": 30, "mlp.activation": "geglu", "attention.head_dim": 128}),
    ({"model_type": "sarvam_mla", "num_shared_experts": 2, "num_experts": 64},
     {"attention.kind": "mla", "attention.q_lora_rank": None, "moe.num_experts": 64, "moe.shared_hidden": 4096,
      "moe.first_k_dense": 1, "moe.score": "sigmoid", "num_mtp_layers": 0}),
    ({"model_type": "sarvam_moe", "use_qkv_bias": True},
     {"attention.qk_norm": True, "attention.qkv_bias": True, "attention.out_bias": False, "attention.rotary_dim": None,
      "attention.num_kv_heads": 4, "moe.correction_bias": True}),
    ({"model_type": "kolibri1"}, {"norm_placement": "both", "attention.qk_norm_kind": "head", "attention.window": 513,
                                  "attention.window_every": 5, "attention.nope_every": 5, "moe.score": "sigmoid",
                                  "moe.correction_bias": True, "moe.shared_hidden": 512}),
    ({"model_type": "kolibri1", "num_hidden_layers": 4, "layer_types": ALL_FULL},
     {"attention.window": None, "attention.nope_every": 1}),
    ({"model_type": "kolibri1", "num_hidden_layers": 4, "layer_types": ALL_FULL, "sliding_window": None},
     {"attention.nope_every": 0}),
)  # fmt: skip


@pytest.mark.parametrize(("config", "facts"), BY_TYPE)
def test_facts_of_classes_without_a_public_file(config: dict[str, Any], facts: dict[str, Any]) -> None:
    _assert_facts(model_from_config(config, "c"), facts)


def test_every_class_is_named_once_and_has_a_model_type() -> None:
    names = [name for a in ARCHITECTURES for name in (*a.classes, *a.model_types)]
    assert len(names) == len(set(names))
    assert all(a.classes and a.model_types for a in ARCHITECTURES)


def test_the_page_of_models_lists_every_class() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [
        line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `") and line.count("|") == 4
    ]
    listed = [(set(re.findall(r"`([^`]+)`", a)), set(re.findall(r"`([^`]+)`", b)), c) for a, b, c in rows]
    for a in ARCHITECTURES:
        assert (set(a.classes), set(a.model_types), a.remote or "transformers") in listed, a.classes


def test_no_class_that_the_page_says_is_not_read_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    section = page.partition("## Classes that are not read, and why")[2].partition("\n## ")[0]
    listed = {name for line in section.splitlines() if line.startswith("| `")
              for name in re.findall(r"`([^`]+)`", line.split("|")[1])}  # fmt: skip
    assert len(listed) > 20
    assert not listed & {name for a in ARCHITECTURES for name in a.model_types}


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a.built_as], ids=lambda a: a.config_class)
def test_a_type_without_a_class_of_its_own_is_read_whichever_class_is_named(architecture: ConfigFamily) -> None:
    """The class that transformers builds it as, which saved files name, its own published one, or none."""
    (model_type,), (published,) = architecture.model_types, architecture.classes
    config = {"model_type": model_type}
    by_type = model_from_config(config, "c")
    for named in (architecture.built_as, published):
        assert model_from_config({"architectures": [named], **config}, "c") == by_type


def test_gpt_2_names_and_standard_ones_are_one_key() -> None:
    config = _config("openai-community--gpt2")
    config["hidden_size"] = config.pop("n_embd")
    assert model_from_config(config, "c").hidden == 768
    with pytest.raises(SpecError, match="c: n_embd 1024 and hidden_size 768 are one key of this class; keep one"):
        model_from_config({**config, "n_embd": 1024}, "c")


def test_transformers_5_writes_rotation_in_rope_parameters() -> None:
    config = {k: v for k, v in _config("zai-org--GLM-4.5").items() if k != "partial_rotary_factor"}
    config["rope_parameters"] = {"rope_type": "default", "partial_rotary_factor": 0.25}
    attention = model_from_config(config, "c").attention
    assert isinstance(attention, GqaSpec)
    assert attention.rotary_dim == 32
    with pytest.raises(SpecError, match=r"c: rope_parameters \(5\) must be an object"):
        model_from_config({**config, "rope_parameters": 5}, "c")


def test_defaults_and_what_is_left_out_are_noted() -> None:
    llama = read_config(_config("huggyllama--llama-65b"), "c").notes
    said = "num_key_value_heads 64, head_dim 128, attention_bias false, mlp_bias false"
    assert llama == (f"absent keys as transformers' LlamaConfig has them: {said}",)
    assert read_config(_config("moonshotai--Kimi-K2.5"), "c").notes == (
        "the vision tower (vision_config) is left out: only the language model is read",
        "quantization_config is left out: it is how released weights are stored, not how they train",
    )
    assert any("clip_qkv (8)" in note for note in read_config(_config("databricks--dbrx-base"), "c").notes)
    assert any("dropout 0.1 is left out" in note for note in read_config(_config("facebook--opt-13b"), "c").notes)
    grok = read_config(_config("xai-org--grok-2"), "c").notes
    said = "attn_logit_softcapping 30.0, final_logit_softcapping 50.0"
    assert grok == (f"absent keys as Grok1Config of xai-org/grok-2 has them: {said}",)
    assert (
        read_config(_config("google--gemma-3-27b-pt"), "c")
        .notes[0]
        .startswith("absent keys as transformers' Gemma3TextConfig has them: hidden_activation gelu_pytorch_tanh,")
    )


def test_a_file_that_names_only_its_class_is_that_classs_default() -> None:
    read = read_config({"architectures": ["LlamaForCausalLM"]}, "c")
    assert (read.model.hidden, read.model.num_layers, read.model.vocab) == (4096, 32, 32000)
    assert "hidden_size 4096" in read.notes[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["FalconH2ForCausalLM"], "mamba_d_state": 256},
            r'layers: mamba_d_state\); nearest is FalconH1ForCausalLM: .* set architectures to \["FalconH1ForC',
        ),
        ({"model_type": "olmo_linear", "linear_num_key_heads": 16}, r"model_type \(olmo_linear\) .* linear"),
        ({"architectures": ["DeepseekV33ForCausalLM"], "index_topk": 2048}, "nearest is DeepseekV32ForCausalLM"),
        ({"architectures": ["DeepseekV31ForCausalLM"]}, "nearest is DeepseekV3ForCausalLM"),
        (
            {"architectures": ["Unheard"], "kv_lora_rank": 512, "q_lora_rank": 1536, "v_head_dim": 128,
             "n_routed_experts": 8, "topk_method": "noaux_tc", "moe_layer_freq": 1},
            "nearest is DeepseekV2ForCausalLM",
        ),
        ({"architectures": ["OrionForCausalLM"]}, "mofa reads; where its layers are those of a class in docs/models"),
        ({"architectures": ["ChatGLMModel"], "num_layers": 28, "ffn_hidden_size": 13696}, "reads; where its layers"),
        ({"architectures": ["LLaMAForCausalLM"], "model_type": "llama"}, "nearest is LlamaForCausalLM"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "qwen2"}, r"model_type \(qwen2\) are of two"),
        ({"architectures": ["PhiForCausalLM"], "n_embd": 2560}, r"n_embd \(2560\) is no key of .* is hidden_size"),
        ({"architectures": ["LlamaForCausalLM"], "num_kv_heads": 8}, "whose name for it is num_key_value_heads"),
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": "4096"}, r'hidden_size \("4096"\) must be a positive'),
        (
            {"tie_word_embeddings": False, "text_config": {"model_type": "llama", "tie_word_embeddings": True}},
            r"tie_word_embeddings \(False\) and text_config.tie_word_embeddings \(True\) differ; keep one",
        ),
        ({"architectures": ["A"], "text_config": {"llm_config": {}}}, "text_config holds another llm_config"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 2, "layer_types": [None, None]},
            "layer_types holds 'None'",
        ),
        ({"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": "x"}, "must be a number"),
        ({"architectures": ["HunYuanMoEV1ForCausalLM"], "moe_topk": [2, 0]}, "a positive whole number, or a list"),
        ({"architectures": ["HunYuanMoEV1ForCausalLM"], "moe_topk": [1, 2], "head_dim": 128}, "other numbers for"),
        ({"architectures": ["Exaone4ForCausalLM"], "sliding_window_pattern": 1.5}, "0 or more, or text"),
        ({"architectures": ["InternLM2ForCausalLM"]}, "hidden_size is missing, and InternLM2Config of internlm/"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0, 0] * 12}, "no regular pattern"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers lists 1 layers"),
        ({"architectures": ["Llama4ForCausalLM"], "moe_layers": [0]}, "moe_layers is not every"),
        ({"architectures": ["OPTForCausalLM"], "word_embed_proj_dim": 512}, "word_embed_proj_dim .512. is not"),
        ({"architectures": ["GlmForCausalLM"], "partial_rotary_factor": 0}, "must be above 0 and at most 1"),
        ({"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_layer_end_index": 20}, "no other pattern"),
        ({"architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": ["sparse", "dense"]}, "dense layers, then"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "attention is causal"),
        ({"architectures": ["PhiForCausalLM"], "qk_layernorm": True}, r"qk_layernorm \(True\) is not false"),
        ({"architectures": ["Cohere2ForCausalLM"], "sliding_window": None}, "without windows is not read"),
        ({"architectures": ["BioGptForCausalLM"], "layerdrop": 0.1}, r"layerdrop \(0.1\) is not 0; mofa has no layers"),
        ({"architectures": ["Cohere2MoeForCausalLM"], "expert_selection_fn": "tanh"}, "must be softmax or sigmoid"),
        ({"architectures": ["Cohere2MoeForCausalLM"], "first_k_dense_replace": 1}, "no regular pattern"),
        (
            {"architectures": ["Cohere2MoeForCausalLM"], "num_hidden_layers": 1, "layer_types": ["full_attention"],
             "mlp_layer_types": ["dense"]},
            "rotates dense layers without a window",
        ),
        ({"architectures": ["InternLM3ForCausalLM"], "bias": True}, r"qkv_bias \(False\) and bias \(True\) differ"),
        ({"model_type": "iquestcoder", "use_sliding_window": True}, r"use_sliding_window \(True\) is not false"),
        ({"architectures": ["Kolibri1ForCausalLM"], "sliding_window": None}, "sliding_window is null or 0, but"),
        ({"architectures": ["HeliumForCausalLM"], "head_dim": 64}, "head_dim .64. must be hidden_size /"),
    ],
)  # fmt: skip
def test_what_is_refused_says_where_what_and_what_to_do(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        model_from_config(config, "c")
    assert str(caught.value).startswith("c: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["text_config", "llm_config", "language_config"])
def test_a_language_model_is_read_from_where_files_of_images_hold_it(place: str) -> None:
    inner = {"model_type": "llama", "num_hidden_layers": 30, "vocab_size": 102400}
    read = read_config({"architectures": ["Unheard"], "vision_config": {}, place: inner}, "c")
    assert (read.model.num_layers, read.model.vocab) == (30, 102_400)
    assert "vision tower" in read.notes[-1]
    with pytest.raises(SpecError, match=f"{place}.num_hidden_layers"):
        read_config({place: {**inner, "num_hidden_layers": -1}}, "c")


def test_a_null_of_another_classs_name_is_no_size() -> None:
    read = read_config({"architectures": ["PhiForCausalLM"], "hidden_size": 2560, "n_embd": 9, "n_inner": None}, "c")
    assert read.model.hidden == 2560


def test_docs_name_every_causal_language_model_of_transformers() -> None:
    here = Path(__file__).parent
    page = (here.parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
    types = (here / "causal_lm_types.txt").read_text(encoding="utf-8").split()
    assert f"{len(types)} model types" in page
    assert [name for name in types if f"`{name}`" not in page] == []
