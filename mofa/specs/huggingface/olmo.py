"""OLMo-2, OLMo-3, OLMoE and FlexOLMo: norms behind the parts, or over all heads of queries and keys."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.record import Architecture, Config, count, entries, flag, number, size
from mofa.specs.huggingface.shared_keys import KV_HEADS, experts_only, gated_mlp, gqa, moe, period_window, sizes

_FULL = {"qk_norm": True, "qk_norm_kind": "full"}


def _olmo2(config: Config, **window: Any) -> dict[str, Any]:
    bias = config["attention_bias"]
    attention = gqa(config, qkv_bias=bias, out_bias=bias, **_FULL, **window)
    return {"attention": attention, "mlp": gated_mlp(config), "norm_placement": "after"}


def _olmo3(config: Config) -> dict[str, Any]:
    return _olmo2(config, **period_window(config, 4))


def _olmoe(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    attention = gqa(config, qkv_bias=bias, out_bias=bias, **_FULL)
    return {"attention": attention, "mlp": experts_only(config), "moe": moe(config, width="intermediate_size")}


def _flex_olmo(config: Config) -> dict[str, Any]:
    return {**_olmoe(config), "norm_placement": "after"}


def clipped(config: Config) -> tuple[str, ...]:
    """A note of clipped queries, keys and values."""
    limit = config.get("clip_qkv")
    return () if limit is None else (f"clip_qkv ({limit:g}): the clipping of queries, keys and values is left out",)


_OLMO2 = {
    **sizes(4096, 32, 32, 11008, 50304), "num_key_value_heads": KV_HEADS, "attention_bias": flag(False),
}  # fmt: skip

ARCHITECTURES = (
    Architecture("Olmo2Config", ("Olmo2ForCausalLM",), ("olmo2",), _OLMO2, _olmo2),
    Architecture(
        "Olmo3Config", ("Olmo3ForCausalLM",), ("olmo3",),
        {**_OLMO2, "sliding_window": count(4096, nullable=True), "layer_types": entries()}, _olmo3,
    ),
    Architecture(
        "OlmoeConfig", ("OlmoeForCausalLM",), ("olmoe",),
        {**sizes(2048, 16, 16, 2048, 50304), "num_key_value_heads": KV_HEADS, "attention_bias": flag(False),
         "num_experts": size(64, "num_experts", "num_local_experts"), "num_experts_per_tok": size(8),
         "clip_qkv": number(None)}, _olmoe, left_out=clipped,
    ),
    Architecture(
        "FlexOlmoConfig", ("FlexOlmoForCausalLM",), ("flex_olmo",),
        {**sizes(4096, 32, 32, 11008, 100352), "num_key_value_heads": KV_HEADS, "attention_bias": flag(False),
         "num_experts": size(7, "num_experts", "num_local_experts"), "num_experts_per_tok": size(5)}, _flex_olmo,
    ),
)  # fmt: skip
