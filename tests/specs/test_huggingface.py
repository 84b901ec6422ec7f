"""Hugging Face configs with the public values of each architecture become the bundled models."""

from __future__ import annotations

from typing import Any

import pytest

from mofa.errors import SpecError
from mofa.specs.huggingface import model_from_config, read_config
from mofa.specs.load import load_workload
from mofa.specs.params import num_params

Config = dict[str, Any]


def _config(
    cls: str, model_type: str, hidden: int, layers: int, heads: int, ffn: int, vocab: int, **more: Any
) -> Config:
    return {
        "architectures": [cls], "model_type": model_type, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "intermediate_size": ffn, "vocab_size": vocab, "tie_word_embeddings": False,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, **more,
    }  # fmt: skip


def _mla(q_lora_rank: int | None) -> Config:
    return {
        "q_lora_rank": q_lora_rank, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "attention_bias": False, "moe_layer_freq": 1,
    }  # fmt: skip


LLAMA = _config("LlamaForCausalLM", "llama", 4096, 32, 32, 14336, 128256, num_key_value_heads=8, attention_bias=False)
QWEN_SWITCH = {"use_sliding_window": False, "sliding_window": None}
QWEN_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 128, "num_experts_per_tok": 8}
DEEPSEEK_V3 = _config(
    "DeepseekV3ForCausalLM", "deepseek_v3", 7168, 61, 128, 18432, 129280, num_key_value_heads=128, **_mla(1536),
    n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048,
    first_k_dense_replace=3, n_group=8, topk_group=4, topk_method="noaux_tc", scoring_func="sigmoid",
    num_nextn_predict_layers=1, quantization_config={"quant_method": "fp8"},
)  # fmt: skip
GPT_OSS = _config(
    "GptOssForCausalLM", "gpt_oss", 2880, 36, 64, 2880, 201088, num_key_value_heads=8, head_dim=64,
    attention_bias=True, num_local_experts=128, num_experts_per_tok=4, sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 18,
    rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
)  # fmt: skip

SAME_AS_BUNDLED = {
    "llama3-8b": LLAMA,
    "mixtral-8x7b": _config(
        "MixtralForCausalLM", "mixtral", 4096, 32, 32, 14336, 32000, num_key_value_heads=8, num_local_experts=8,
        num_experts_per_tok=2, sliding_window=None,
    ),
    "qwen3-30b-a3b": _config(
        "Qwen3MoeForCausalLM", "qwen3_moe", 2048, 48, 32, 6144, 151936, num_key_value_heads=4, head_dim=128,
        attention_bias=False, max_window_layers=48, moe_intermediate_size=768, **QWEN_SWITCH, **QWEN_MOE,
    ),
    "deepseek-v2-lite": _config(
        "DeepseekV2ForCausalLM", "deepseek_v2", 2048, 27, 16, 10944, 102400, num_key_value_heads=16, **_mla(None),
        n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408,
        first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="greedy", scoring_func="softmax",
    ),
    "deepseek-v3": DEEPSEEK_V3,
    "kimi-k2": {
        **DEEPSEEK_V3, "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64,
        "vocab_size": 163840, "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "num_nextn_predict_layers": 0,
    },
    "gpt-oss-120b": GPT_OSS,
}  # fmt: skip


@pytest.mark.parametrize(("name", "config"), SAME_AS_BUNDLED.items())
def test_config_is_the_bundled_model(name: str, config: Config) -> None:
    bundled = load_workload(name).model
    model = model_from_config(config, "config.json", name=name)
    assert model.model_copy(update={"source": bundled.source}) == bundled


@pytest.mark.parametrize(
    ("config", "released"),
    [
        # Mistral-7B-v0.1, 7,241,732,096; Qwen2.5-7B, 7,615,616,512; Qwen3-8B, 8,190,735,360; Qwen1.5-MoE-A2.7B,
        # 14,315,784,192 (huggingface.co/api/models/NAME, safetensors.total; from memory of those pages, not fetched).
        (
            _config(
                "MistralForCausalLM", "mistral", 4096, 32, 32, 14336, 32000, num_key_value_heads=8, sliding_window=4096
            ),
            7_241_732_096,
        ),
        (
            _config(
                "Qwen2ForCausalLM", "qwen2", 3584, 28, 28, 18944, 152064, num_key_value_heads=4,
                use_sliding_window=False, sliding_window=131072, max_window_layers=28,
            ),
            7_615_616_512,
        ),
        (
            _config(
                "Qwen3ForCausalLM", "qwen3", 4096, 36, 32, 12288, 151936, num_key_value_heads=8, head_dim=128,
                attention_bias=False, max_window_layers=36, **QWEN_SWITCH,
            ),
            8_190_735_360,
        ),
        (
            _config(
                "Qwen2MoeForCausalLM", "qwen2_moe", 2048, 24, 16, 5632, 151936, num_key_value_heads=16,
                max_window_layers=21, decoder_sparse_step=1, num_experts=60, num_experts_per_tok=4,
                moe_intermediate_size=1408, shared_expert_intermediate_size=5632, **QWEN_SWITCH,
            ),
            14_315_784_192,
        ),
    ],
    ids=["mistral", "qwen2", "qwen3", "qwen2-moe"],
)  # fmt: skip
def test_config_counts_the_released_tensors(config: Config, released: int) -> None:
    assert num_params(model_from_config(config, "config.json")) == released


def test_null_kv_heads_mean_one_per_head_and_so_does_an_absent_key() -> None:
    """LlamaConfig: ``num_key_value_heads=None`` is multi-head attention, and its default."""
    assert model_from_config({**LLAMA, "num_key_value_heads": None}, "c").attention.num_kv_heads == 32
    config = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    read = read_config(config, "c")
    assert read.model.attention.num_kv_heads == 32
    assert "num_key_value_heads 32" in read.notes[0]


def test_head_dim_that_is_null_is_derived_and_one_that_is_given_is_read() -> None:
    assert model_from_config({**LLAMA, "head_dim": None}, "c").attention.d_qk == 128
    assert model_from_config({**LLAMA, "head_dim": 64}, "c").attention.d_qk == 64


def test_nested_text_config_is_read_by_its_model_type() -> None:
    inner = {k: v for k, v in DEEPSEEK_V3.items() if k not in ("architectures", "tie_word_embeddings")}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "tie_word_embeddings": False, "text_config": inner}
    assert num_params(model_from_config(outer, "c")) == 671_026_419_200
    inner["vocab_size"] = "129280"
    with pytest.raises(SpecError, match=r'text_config\.vocab_size \("129280"\) must be a positive whole number'):
        model_from_config(outer, "c")


@pytest.mark.parametrize("config", SAME_AS_BUNDLED.values(), ids=SAME_AS_BUNDLED)
def test_every_absent_key_takes_a_default_and_the_note_names_it(config: Config) -> None:
    """The classes of transformers have a default for nearly every key; what they are is in test_model_counts.py."""
    keys = set(config) & {
        "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size", "hidden_act",
        "tie_word_embeddings", "kv_lora_rank", "n_routed_experts", "num_experts_per_tok", "topk_method",
        "num_nextn_predict_layers", "num_local_experts", "num_experts", "moe_intermediate_size",
        "first_k_dense_replace", "n_shared_experts",
    }  # fmt: skip
    for key in keys:
        without = {k: v for k, v in config.items() if k != key}
        if config["model_type"] == "deepseek_v2" and key == "num_experts_per_tok":
            with pytest.raises(SpecError, match="num_experts_per_tok is missing, and transformers' Deep"):
                read_config(without, "config.json")
            continue
        notes = read_config({**without, "head_dim": 64}, "config.json").notes
        assert f"{key} " in notes[0], key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "BertForMaskedLM.* is no model that mofa reads"),
        ({"architectures": None, "model_type": "vit"}, r"\(vit\) is no model"),
        ({"architectures": None, "model_type": None}, "is it a language model"),
        ({"architectures": "Llama"}, "must be a list of names"),
        ({"architectures": [3]}, "must be a list of names"),
        ({"hidden_size": "4096"}, "hidden_size .* must be a positive whole number"),
        ({"hidden_size": 4096.5}, "must be a positive whole number"),
        ({"hidden_size": None}, "must be a positive whole number"),
        ({"num_hidden_layers": -1}, r"num_hidden_layers \(-1\) must be a positive"),
        ({"vocab_size": True}, "must be a positive whole number"),
        ({"hidden_size": 4097}, r"hidden_size \(4097\) must be a multiple of num_attention_heads \(32\)"),
        ({"num_attention_heads": 64, "num_key_value_heads": 6}, r"num_heads \(64\) must be a multiple"),
        ({"hidden_act": "tanh"}, r"hidden_act \(tanh\) is not silu, swish or gelu; mofa has no other gated layer"),
        ({"tie_word_embeddings": 1}, "true or false"),
        ({"text_config": 5}, "text_config .* must be an object"),
        ({"hidden_size": 10**15}, "hidden"),
    ],
)
def test_nonsense_is_one_line(change: Config, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        model_from_config({**LLAMA, **change}, "config.json")
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


def test_irregular_windows_are_refused() -> None:
    kinds = ["full_attention", "sliding_attention"] * 18
    with pytest.raises(SpecError, match="no regular pattern"):
        model_from_config({**GPT_OSS, "layer_types": kinds}, "c")
    with pytest.raises(SpecError, match="lists 2 layers"):
        model_from_config({**GPT_OSS, "layer_types": kinds[:2]}, "c")


def test_yarn_scales_cosine_and_sine() -> None:
    """0.1 ln 32 + 1 = 1.3466 (arXiv 2309.00071, section 3.4)."""
    assert model_from_config(GPT_OSS, "config.json").rope_scale == 1.3466
    assert model_from_config({**GPT_OSS, "rope_scaling": None}, "config.json").rope_scale == 1.0
    for bad, message in (({"rope_type": "yarn"}, "rope_scaling.factor"), (5, "must be an object")):
        with pytest.raises(SpecError, match=message):
            model_from_config({**GPT_OSS, "rope_scaling": bad}, "config.json")
