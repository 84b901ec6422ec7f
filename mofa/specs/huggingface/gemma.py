"""Gemma 1 to 3 and VaultGemma: gated GELU, tied embeddings that are scaled, windows and soft caps."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.record import (
    Config,
    ConfigFamily,
    count_key,
    flag_key,
    list_key,
    number_key,
    size_key,
    text_key,
)
from mofa.specs.huggingface.shared_keys import (
    common_keys,
    gated_mlp_fields,
    gqa_fields,
    kv_heads_key,
    periodic_window_fields,
)

_SCALED = {"multipliers": ("embedding",)}


def _gemma(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    return {"attention": gqa_fields(config, qkv_bias=bias, out_bias=bias), "mlp": gated_mlp_fields(config), **_SCALED}


def _gemma2(config: Config, **more: Any) -> dict[str, Any]:
    bias = config["attention_bias"]
    if config["use_bidirectional_attention"]:
        raise ValueError("use_bidirectional_attention is true; mofa's attention is causal")
    attention = gqa_fields(
        config, qkv_bias=bias, out_bias=bias, softcap=config["attn_logit_softcapping"] is not None,
        **periodic_window_fields(config, config.get("sliding_window_pattern", 2)), **more,
    )  # fmt: skip
    softcap = config["final_logit_softcapping"] is not None
    raw = {"attention": attention, "mlp": gated_mlp_fields(config), "norm_placement": "both", "logit_softcap": softcap}
    return {**raw, **_SCALED}


def _gemma3(config: Config) -> dict[str, Any]:
    return _gemma2(config, qk_norm=True)


def _vaultgemma(config: Config) -> dict[str, Any]:
    """VaultGemma has Gemma 2's layers without the norms behind their parts."""
    return {**_gemma2(config), "norm_placement": "before"}


def _caps(attention: float | None, logits: float | None) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": number_key(attention, nullable=True),
        "final_logit_softcapping": number_key(logits, nullable=True),
    }


_GEMMA2 = {
    **common_keys(2304, 26, 8, 9216, 256000, tied=True),
    "hidden_act": text_key("gelu_pytorch_tanh", "hidden_activation"),
    "num_key_value_heads": kv_heads_key(4), "head_dim": size_key(256), "attention_bias": flag_key(False),
    "sliding_window": count_key(4096, nullable=True), "layer_types": list_key(), **_caps(50.0, 30.0),
    "use_bidirectional_attention": flag_key(None),
}  # fmt: skip

ARCHITECTURES = (
    ConfigFamily(
        "GemmaConfig", ("GemmaForCausalLM",), ("gemma",),
        {**common_keys(3072, 28, 16, 24576, 256000, tied=True),
         "hidden_act": text_key("gelu_pytorch_tanh"), "num_key_value_heads": kv_heads_key(16),
         "head_dim": size_key(256), "attention_bias": flag_key(False)}, _gemma,
    ),
    ConfigFamily("Gemma2Config", ("Gemma2ForCausalLM",), ("gemma2",), _GEMMA2, _gemma2),
    ConfigFamily(
        "Gemma3TextConfig", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), ("gemma3_text", "gemma3"),
        {**_GEMMA2, "vocab_size": size_key(262208), **_caps(None, None),
         "sliding_window_pattern": size_key(6, "sliding_window_pattern", "_sliding_window_pattern")}, _gemma3,
    ),
    ConfigFamily("VaultGemmaConfig", ("VaultGemmaForCausalLM",), ("vaultgemma",), _GEMMA2, _vaultgemma),
)  # fmt: skip
