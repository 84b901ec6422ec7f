"""The table of Hugging Face architectures: the keys that each needs, and how they become a model.

A key of the table must be in the file. The few that Hugging Face's own classes derive or fix where published files lack
them are listed as ``derived``, each with its rule.

References
----------
Hugging Face transformers 4.57, ``src/transformers/models/*/configuration_*.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mofa.specs.attention.gqa import GQA
from mofa.specs.attention.mla import MLA
from mofa.specs.files import short

KeyType = Literal["count", "positive", "text", "truth", "list", "object"]
Config = Mapping[str, Any]


@dataclass(frozen=True)
class ConfigKey:
    """A key of the file: its type, and whether it may be null."""

    type: KeyType
    nullable: bool = False


@dataclass(frozen=True)
class Architecture:
    """One family of files: how it names itself, the keys it needs, and how they become a model.

    ``derived`` keys may be absent or null; the function is Hugging Face's rule for them.
    """

    model_types: tuple[str, ...]
    classes: tuple[str, ...]
    keys: Mapping[str, ConfigKey]
    convert: Callable[[Config, str], dict[str, Any]]
    derived: Mapping[str, tuple[ConfigKey, Callable[[Config], Any]]] = field(default_factory=dict)


_POSITIVE, _TRUTH, _TEXT, _LIST = ConfigKey("positive"), ConfigKey("truth"), ConfigKey("text"), ConfigKey("list")
_COMMON = {
    "hidden_size": _POSITIVE,
    "num_hidden_layers": _POSITIVE,
    "num_attention_heads": _POSITIVE,
    "vocab_size": _POSITIVE,
    "tie_word_embeddings": _TRUTH,
    "hidden_act": _TEXT,
}
_GQA = {**_COMMON, "num_key_value_heads": ConfigKey("positive", nullable=True)}


def _hidden_over_heads(config: Config) -> int:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if hidden % heads:
        raise ValueError(f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads}); correct one")
    return int(hidden // heads)


def _false(config: Config) -> bool:
    return False


_HEAD_DIM = (_POSITIVE, _hidden_over_heads)
"""LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config: ``head_dim = hidden_size // num_attention_heads``."""
_ABSENT_IS_FALSE = (_TRUTH, _false)
"""LlamaConfig fixes attention_bias and mlp_bias to False where files older than the option lack them."""
_LAYER_TYPES = (_LIST, lambda config: None)
"""Newer files list each layer's attention; older ones have only sliding_window."""


def _gqa(c: Config, qkv_bias: bool, out_bias: bool, qk_norm: bool = False, **window: Any) -> dict[str, Any]:
    kv = c["num_key_value_heads"]
    return {
        "kind": GQA.name,
        "num_heads": c["num_attention_heads"],
        "num_kv_heads": c["num_attention_heads"] if kv is None else kv,
        "head_dim": c["head_dim"],
        "qkv_bias": qkv_bias,
        "out_bias": out_bias,
        "qk_norm": qk_norm,
        **window,
    }


def _pattern(c: Config) -> dict[str, Any]:
    """Window and its period from ``layer_types``; every layer where the file lists none."""
    window, kinds = c["sliding_window"], c["layer_types"]
    if kinds is None:
        return {} if window is None else {"window": window}
    layers = c["num_hidden_layers"]
    if len(kinds) != layers:
        raise ValueError(f"layer_types lists {len(kinds)} layers, num_hidden_layers is {layers}; correct one")
    unknown = next((k for k in kinds if k not in ("sliding_attention", "full_attention")), None)
    if unknown is not None:
        raise ValueError(f"layer_types holds {short(unknown)!r}; mofa has sliding_attention and full_attention")
    windowed = [k == "sliding_attention" for k in kinds]
    if not any(windowed):
        return {}
    if window is None:
        raise ValueError("sliding_window is null, but layer_types has sliding layers; give its length")
    if all(windowed):
        return {"window": window}
    every = windowed.index(False) + 1
    if every > 1 and windowed == [i % every < every - 1 for i in range(layers)]:
        return {"window": window, "window_every": every}
    raise ValueError("layer_types is no regular pattern of n - 1 sliding layers and a full one; mofa has no other")


def _switched_window(c: Config) -> dict[str, Any]:
    """Qwen's window: only with ``use_sliding_window``, and from layer ``max_window_layers`` on."""
    if not c["use_sliding_window"]:
        return {}
    if c["layer_types"] is not None:
        return _pattern(c)
    if c["max_window_layers"] >= c["num_hidden_layers"]:
        return {}
    if c["max_window_layers"] > 0:
        raise ValueError(
            f"max_window_layers ({c['max_window_layers']}): mofa has no window that begins at a later layer"
        )
    return _pattern(c)


def _llama(c: Config, prefix: str) -> dict[str, Any]:
    mlp = {"ffn_hidden": c["intermediate_size"], "bias": c["mlp_bias"]}
    return {"attention": _gqa(c, c["attention_bias"], c["attention_bias"]), "mlp": mlp}


def _mistral(c: Config, prefix: str) -> dict[str, Any]:
    return {"attention": _gqa(c, False, False, **_pattern(c)), "mlp": {"ffn_hidden": c["intermediate_size"]}}


def _mixtral(c: Config, prefix: str) -> dict[str, Any]:
    moe = {
        "num_experts": c["num_local_experts"],
        "top_k": c["num_experts_per_tok"],
        "expert_hidden": c["intermediate_size"],
    }
    return {"attention": _gqa(c, False, False, **_pattern(c)), "mlp": {}, "moe": moe}


def _qwen2(c: Config, prefix: str) -> dict[str, Any]:
    return {"attention": _gqa(c, True, False, **_switched_window(c)), "mlp": {"ffn_hidden": c["intermediate_size"]}}


def _qwen3(c: Config, prefix: str) -> dict[str, Any]:
    bias = c["attention_bias"]
    attention = _gqa(c, bias, bias, qk_norm=True, **_switched_window(c))
    return {"attention": attention, "mlp": {"ffn_hidden": c["intermediate_size"]}}


def _sparse_layers(c: Config) -> dict[str, Any]:
    """Qwen: layer i is sparse where ``(i + 1) % decoder_sparse_step == 0`` and i is not in ``mlp_only_layers``."""
    dense, step = c["mlp_only_layers"], c["decoder_sparse_step"]
    if not dense:
        return {"every": step}
    if dense != list(range(len(dense))) or step != 1:
        raise ValueError(
            f"mlp_only_layers ({short(dense)}) must be the first layers, with decoder_sparse_step 1; mofa has no other"
        )
    return {"first_k_dense": len(dense)}


def _qwen_moe(c: Config, attention: dict[str, Any], **shared: Any) -> dict[str, Any]:
    layers = _sparse_layers(c)
    moe = {
        "num_experts": c["num_experts"],
        "top_k": c["num_experts_per_tok"],
        "expert_hidden": c["moe_intermediate_size"],
        **layers,
        **shared,
    }
    has_dense = layers.get("every", 1) > 1 or bool(layers.get("first_k_dense"))
    mlp = {"ffn_hidden": c["intermediate_size"]} if has_dense else {}
    return {"attention": attention, "mlp": mlp, "moe": moe}


def _qwen2_moe(c: Config, prefix: str) -> dict[str, Any]:
    attention = _gqa(c, True, False, **_switched_window(c))
    return _qwen_moe(c, attention, shared_hidden=c["shared_expert_intermediate_size"], shared_gate=True)


def _qwen3_moe(c: Config, prefix: str) -> dict[str, Any]:
    bias = c["attention_bias"]
    return _qwen_moe(c, _gqa(c, bias, bias, qk_norm=True, **_switched_window(c)))


def _deepseek(c: Config, prefix: str) -> dict[str, Any]:
    if c["attention_bias"]:
        raise ValueError("attention_bias is true; mofa's latent attention has no biases")
    if c["moe_layer_freq"] != 1:
        raise ValueError(f"moe_layer_freq ({c['moe_layer_freq']}) is not 1; mofa has no such pattern of layers")
    if c["scoring_func"] not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring_func ({short(c['scoring_func'])}) must be softmax or sigmoid")
    method = c["topk_method"]
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise ValueError(f"topk_method ({short(method)}) must be greedy, group_limited_greedy or noaux_tc")
    attention = {
        "kind": MLA.name,
        "num_heads": c["num_attention_heads"],
        **{k: c[k] for k in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    }
    grouped = method != "greedy"
    if grouped and (c["n_group"] is None or c["topk_group"] is None):
        raise ValueError(f"n_group and topk_group are null, but topk_method is {method}; give both")
    moe = {
        "num_experts": c["n_routed_experts"],
        "top_k": c["num_experts_per_tok"],
        "expert_hidden": c["moe_intermediate_size"],
        "shared_hidden": (c["n_shared_experts"] or 0) * c["moe_intermediate_size"],
        "first_k_dense": c["first_k_dense_replace"],
        "score": c["scoring_func"],
        "num_groups": c["n_group"] if grouped else 1,
        "groups_per_token": c["topk_group"] if grouped else 1,
        "correction_bias": method == "noaux_tc",
    }
    raw = {"attention": attention, "mlp": {"ffn_hidden": c["intermediate_size"]}, "moe": moe}
    return {**raw, "num_mtp_layers": c.get("num_nextn_predict_layers", 0)}


def _gpt_oss(c: Config, prefix: str) -> dict[str, Any]:
    bias = c["attention_bias"]
    moe = {
        "num_experts": c["num_local_experts"],
        "top_k": c["num_experts_per_tok"],
        "expert_hidden": c["intermediate_size"],
        "router_bias": True,
        "expert_bias": True,
    }
    raw = {"attention": _gqa(c, bias, bias, sinks=True, **_pattern(c)), "mlp": {}, "moe": moe}
    return {**raw, "rope_scale": _yarn_scale(c)}


def _yarn_scale(c: Config) -> float:
    """YaRN's factor of cosine and sine: 0.1 ln s + 1 for positions stretched s times; 1 without YaRN."""
    scaling = c["rope_scaling"] or {}
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        return 1.0
    factor = scaling.get("factor")
    if not isinstance(factor, (int, float)) or not factor >= 1:
        raise ValueError(f"rope_scaling.factor ({short(factor)}) is no factor of at least 1; correct it")
    return round(0.1 * math.log(factor) + 1.0, 4)


_WINDOW = {"sliding_window": ConfigKey("positive", nullable=True)}
_QWEN_WINDOW = {**_WINDOW, "use_sliding_window": _TRUTH, "max_window_layers": ConfigKey("count")}
_FFN = {"intermediate_size": _POSITIVE}
_LOCAL_EXPERTS = {"num_local_experts": _POSITIVE, "num_experts_per_tok": _POSITIVE}
_QWEN_EXPERTS = {
    "num_experts": _POSITIVE, "num_experts_per_tok": _POSITIVE, "moe_intermediate_size": _POSITIVE,
    "decoder_sparse_step": _POSITIVE,
}  # fmt: skip
_NO_DENSE_LIST: dict[str, tuple[ConfigKey, Callable[[Config], Any]]] = {"mlp_only_layers": (_LIST, lambda config: [])}
"""Qwen2MoeConfig and Qwen3MoeConfig: an absent list is empty."""
_DEEPSEEK = {
    **_COMMON,
    **_FFN,
    "q_lora_rank": ConfigKey("positive", nullable=True),
    "kv_lora_rank": _POSITIVE,
    "qk_nope_head_dim": _POSITIVE,
    "qk_rope_head_dim": _POSITIVE,
    "v_head_dim": _POSITIVE,
    "n_routed_experts": _POSITIVE,
    "n_shared_experts": ConfigKey("count", nullable=True),
    "num_experts_per_tok": _POSITIVE,
    "moe_intermediate_size": _POSITIVE,
    "first_k_dense_replace": ConfigKey("count"),
    "moe_layer_freq": _POSITIVE,
    "n_group": ConfigKey("positive", nullable=True),
    "topk_group": ConfigKey("positive", nullable=True),
    "topk_method": _TEXT,
    "scoring_func": _TEXT,
    "attention_bias": _TRUTH,
}

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        ("llama",), ("LlamaForCausalLM",), {**_GQA, **_FFN}, _llama,
        {"head_dim": _HEAD_DIM, "attention_bias": _ABSENT_IS_FALSE, "mlp_bias": _ABSENT_IS_FALSE},
    ),
    Architecture(
        ("mistral",), ("MistralForCausalLM",), {**_GQA, **_FFN, **_WINDOW}, _mistral,
        {"head_dim": _HEAD_DIM, "layer_types": _LAYER_TYPES},
    ),
    Architecture(
        ("mixtral",), ("MixtralForCausalLM",), {**_GQA, **_FFN, **_WINDOW, **_LOCAL_EXPERTS}, _mixtral,
        {"head_dim": _HEAD_DIM, "layer_types": _LAYER_TYPES},
    ),
    Architecture(
        ("qwen2",), ("Qwen2ForCausalLM",), {**_GQA, **_FFN, **_QWEN_WINDOW}, _qwen2,
        {"head_dim": _HEAD_DIM, "layer_types": _LAYER_TYPES},
    ),
    Architecture(
        ("qwen3",), ("Qwen3ForCausalLM",),
        {**_GQA, **_FFN, **_QWEN_WINDOW, "head_dim": _POSITIVE, "attention_bias": _TRUTH}, _qwen3,
        {"layer_types": _LAYER_TYPES},
    ),
    Architecture(
        ("qwen2_moe",), ("Qwen2MoeForCausalLM",),
        {**_GQA, **_FFN, **_QWEN_WINDOW, **_QWEN_EXPERTS, "shared_expert_intermediate_size": _POSITIVE}, _qwen2_moe,
        {"head_dim": _HEAD_DIM, "layer_types": _LAYER_TYPES, **_NO_DENSE_LIST},
    ),
    Architecture(
        ("qwen3_moe",), ("Qwen3MoeForCausalLM",),
        {**_GQA, **_FFN, **_QWEN_WINDOW, **_QWEN_EXPERTS, "head_dim": _POSITIVE, "attention_bias": _TRUTH}, _qwen3_moe,
        {"layer_types": _LAYER_TYPES, **_NO_DENSE_LIST},
    ),
    Architecture(("deepseek_v2",), ("DeepseekV2ForCausalLM",), _DEEPSEEK, _deepseek),
    Architecture(
        ("deepseek_v3", "kimi_k2"), ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"),
        {**_DEEPSEEK, "num_nextn_predict_layers": ConfigKey("count")}, _deepseek,
    ),
    Architecture(
        ("gpt_oss",), ("GptOssForCausalLM",),
        {**_GQA, **_FFN, **_WINDOW, **_LOCAL_EXPERTS, "head_dim": _POSITIVE, "attention_bias": _TRUTH,
         "layer_types": _LIST, "rope_scaling": ConfigKey("object", nullable=True)}, _gpt_oss,
    ),
)  # fmt: skip
