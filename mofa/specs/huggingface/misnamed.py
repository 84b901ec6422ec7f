"""Sizes under names that are another class's, where the class would take its default in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mofa.errors import SpecError
from mofa.specs.files import shown_value
from mofa.specs.huggingface.record import ConfigFamily

_NAMES = (
    ("hidden_size", "n_embd", "n_embed", "d_model", "dim"),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    ("num_key_value_heads", "n_head_kv", "num_kv_heads", "n_kv_heads", "multi_query_group_num"),
    ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size"),
    ("vocab_size", "padded_vocab_size"),
)
"""Names that classes have for one size; first the one of most."""


def refuse_misnamed_sizes(config: Mapping[str, Any], architecture: ConfigFamily, where: str) -> None:
    """Refuse a file whose size has a name that its class does not read, such as ``n_embd`` of a first Phi-2.

    Parameters
    ----------
    config
        The keys of the language model.
    architecture
        How it is read.
    where
        The file and the place in it, which begin the error.

    Raises
    ------
    SpecError
        If a size is absent by the class's names and there by another's.
    """
    read = {name for key, rule in architecture.keys.items() for name in (rule.names or (key,))}
    for names in _NAMES:
        own = [name for name in names if name in read]
        if not own or any(config.get(name) is not None for name in own):
            continue
        other = next((name for name in names if name not in read and config.get(name) is not None), None)
        if other is not None:
            raise SpecError(
                f"{where}{other} ({shown_value(config[other])}) is no key of {architecture.owner_of_defaults}, "
                "whose name "
                f"for it is {own[0]}; rename it"
            )
