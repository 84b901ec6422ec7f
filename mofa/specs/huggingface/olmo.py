"""OLMo-2, OLMo-3, OLMoE and FlexOLMo: norms behind the parts, or over all heads of queries and keys."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.record import Config, ConfigFamily, count_key, flag_key, list_key, number_key, size_key
from mofa.specs.huggingface.shared_keys import (
    KV_HEADS,
    activation_field_without_mlp,
    common_keys,
    gated_mlp_fields,
    gqa_fields,
    moe_fields,
    periodic_window_fields,
)

_FULL = {"qk_norm": True, "qk_norm_kind": "full"}


def _olmo2(config: Config, **window: Any) -> dict[str, Any]:
    bias = config["attention_bias"]
    attention = gqa_fields(config, qkv_bias=bias, out_bias=bias, **_FULL, **window)
    return {"attention": attention, "mlp": gated_mlp_fields(config), "norm_placement": "after"}


def _olmo3(config: Config) -> dict[str, Any]:
    return _olmo2(config, **periodic_window_fields(config, 4))


def _olmoe(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    attention = gqa_fields(config, qkv_bias=bias, out_bias=bias, **_FULL)
    return {
        "attention": attention,
        "mlp": activation_field_without_mlp(config),
        "moe": moe_fields(config, width="intermediate_size"),
    }


def _flex_olmo(config: Config) -> dict[str, Any]:
    return {**_olmoe(config), "norm_placement": "after"}


def clipped_qkv_note(config: Config) -> tuple[str, ...]:
    """A note of clipped queries, keys and values."""
    limit = config.get("clip_qkv")
    return () if limit is None else (f"clip_qkv ({limit:g}): the clipping of queries, keys and values is left out",)


_OLMO2 = {
    **common_keys(4096, 32, 32, 11008, 50304), "num_key_value_heads": KV_HEADS, "attention_bias": flag_key(False),
}  # fmt: skip

ARCHITECTURES = (
    ConfigFamily("Olmo2Config", ("Olmo2ForCausalLM",), ("olmo2",), _OLMO2, _olmo2),
    ConfigFamily(
        "Olmo3Config", ("Olmo3ForCausalLM",), ("olmo3",),
        {**_OLMO2, "sliding_window": count_key(4096, nullable=True), "layer_types": list_key()}, _olmo3,
    ),
    ConfigFamily(
        "OlmoeConfig", ("OlmoeForCausalLM",), ("olmoe",),
        {**common_keys(2048, 16, 16, 2048, 50304), "num_key_value_heads": KV_HEADS, "attention_bias": flag_key(False),
         "num_experts": size_key(64, "num_experts", "num_local_experts"), "num_experts_per_tok": size_key(8),
         "clip_qkv": number_key(None)}, _olmoe, left_out=clipped_qkv_note,
    ),
    ConfigFamily(
        "FlexOlmoConfig", ("FlexOlmoForCausalLM",), ("flex_olmo",),
        {**common_keys(4096, 32, 32, 11008, 100352), "num_key_value_heads": KV_HEADS, "attention_bias": flag_key(False),
         "num_experts": size_key(7, "num_experts", "num_local_experts"), "num_experts_per_tok": size_key(5)},
         _flex_olmo,
    ),
)  # fmt: skip
