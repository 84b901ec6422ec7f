"""What is said of a class that is not read: why, and which one is nearest."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mofa.specs.files import shown_value
from mofa.specs.huggingface.record import ConfigFamily

_REASONS = (
    (("mamba_d_state", "mamba_n_heads", "mamba_num_heads", "ssm_state_size", "state_size"), "state-space layers"),
    (("linear_num_key_heads", "linear_attn_config", "full_attention_interval"), "linear attention"),
    (("index_topk", "index_n_heads", "compress_ratios"), "sparse attention that picks keys"),
    (("block_configs", "hybrid_layer_pattern", "hybrid_override_pattern"), "layers of several shapes"),
    (("zero_expert_num",), "experts without weights"),
    (("encoder_layers", "encoder_attention_heads"), "an encoder"),
)
"""Keys that tell of layers that are not plain: a class that has one is nearest to others that have it."""
_LATENT = ("kv_lora_rank",)
"""Keys of latent attention, which is no reason to refuse a class."""


def unknown_class_message(
    named: tuple[str, str], config: Mapping[str, Any], architectures: Iterable[ConfigFamily], file: str
) -> str:
    """The end of the error for a class or model type that is not read: the reason, the nearest one, what to do.

    Parameters
    ----------
    named
        The key and the class or model type that it holds.
    config
        The keys of its language model.
    architectures
        Those that are read.
    file
        The file, as the user named it.
    """
    signs = [(sign, what) for signs, what in _REASONS for sign in signs if config.get(sign)]
    reason = f" (it has {signs[0][1]}: {signs[0][0]})" if signs else ""
    key, name = named
    known = tuple(architectures)
    shapes = [sign for sign, _ in signs] or [sign for sign in _LATENT if config.get(sign)]
    alike = tuple(a for a in known if any(sign in _names_of_keys(a) for sign in shapes))
    near = _nearest(name, config, known, alike)
    advice = "where its layers are those of a class in docs/models.md, set architectures to that"
    if near:
        advice = f'nearest is {near}: where the layers are its own, set architectures to ["{near}"]'
    return (
        f"{key} ({shown_value(name)}) is no model that mofa reads{reason}; {advice}; else begin a workload YAML by "
        f"mofa new workload --like {nearest_workload(config)} --from-config {file}"
    )


def nearest_workload(config: Mapping[str, Any]) -> str:
    """The bundled workload whose fields a model's are likest to: with latent attention, with experts, or dense.

    Examples
    --------
    >>> nearest_workload({"num_experts": 64}), nearest_workload({"hidden_size": 64})
    ('qwen3-30b-a3b', 'llama3-8b')
    """
    if config.get("kv_lora_rank"):
        return "deepseek-v3"
    has_experts = any(value and "expert" in key for key, value in config.items())
    return "qwen3-30b-a3b" if has_experts else "llama3-8b"


def _names_of_keys(architecture: ConfigFamily) -> set[str]:
    return {name.partition(".")[0] for key, rule in architecture.keys.items() for name in (rule.names or (key,))}


def _nearest(
    named: str, config: Mapping[str, Any], known: tuple[ConfigFamily, ...], alike: tuple[ConfigFamily, ...]
) -> str | None:
    """The class of the model type, else one whose name is close, else that with most of the file's keys; or none.

    Keys tell only among classes of unusual layers: those of plain ones are nearly all classes'.
    """
    by_type = [a.classes[0] for a in known if config.get("model_type") in a.model_types]
    if by_type:
        return by_type[0]
    names = {_stem(name): a.classes[0] for a in alike or known for name in (*a.model_types, *a.classes)}
    close = difflib.get_close_matches(_stem(named), names, n=1, cutoff=0.8)
    if close:
        return names[close[0]]
    given = {key for key, value in config.items() if value is not None}

    def likeness(architecture: ConfigFamily) -> tuple[int, int]:
        keys = _names_of_keys(architecture)
        return len(keys & given), -len(keys - given)

    return max(alike, key=likeness).classes[0] if alike else None


def _stem(name: str) -> str:
    """What tells a class from others: its name without what all have.

    Examples
    --------
    >>> _stem("Qwen2ForCausalLM"), _stem("qwen2_vl_text"), _stem("GPT2LMHeadModel")
    ('qwen2', 'qwen2vl', 'gpt2')
    """
    return re.sub(r"(For[A-Z]\w*|LMHeadModel|Model|_text)$", "", name).replace("_", "").lower()
