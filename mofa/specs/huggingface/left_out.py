"""What a ``config.json`` says and a model of the language part does not hold, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TOWERS = {"vision_config": "vision", "vision_tower_config": "vision", "audio_config": "audio", "visual": "vision"}


def left_out_notes(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> tuple[str, ...]:
    """Notes on other towers, quantization and dropout.

    Parameters
    ----------
    outer, inner
        The file's object, and the part of it that is the language model; the same where nothing is nested.

    Examples
    --------
    >>> left_out_notes({"vision_config": {}}, {"attention_dropout": 0.1})
    ('the vision tower (vision_config) is left out: only the language model is read', \
'attention_dropout 0.1 is left out; set model.dropout for the dropout of residual branches')
    """
    notes = [
        f"the {kind} tower ({key}) is left out: only the language model is read"
        for key, kind in _TOWERS.items()
        if outer.get(key) is not None
    ]
    if any(part.get("quantization_config") is not None for part in (outer, inner)):
        notes.append("quantization_config is left out: it is how released weights are stored, not how they train")
    dropped = {key: value for key, value in inner.items() if _is_dropout(key, value)}
    if dropped:
        said = ", ".join(f"{key} {value:g}" for key, value in dropped.items())
        verb = "is" if len(dropped) == 1 else "are"
        notes.append(f"{said} {verb} left out; set model.dropout for the dropout of residual branches")
    return tuple(notes)


def _is_dropout(key: str, value: Any) -> bool:
    named = ("dropout" in key or key.endswith("pdrop")) and "classifier" not in key and "summary" not in key
    return named and isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
