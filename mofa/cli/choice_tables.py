"""What can be written: every field of a strategy, the schedules, and the frameworks with their options, as rows."""

from __future__ import annotations

import inspect
import re
from typing import Any, Literal, get_args, get_origin


def strategy_field_rows() -> list[dict[str, Any]]:
    """Every field of a strategy: its name, its values, its default and what it means, as its docstring has it."""
    from mofa.specs.overrides import STRATEGY_KEYS
    from mofa.specs.strategy import RECOMPUTE_MODULES, StrategySpec

    meanings = _attributes(StrategySpec)
    spec = StrategySpec()
    fields = []
    for name in STRATEGY_KEYS:
        values = _values(StrategySpec.model_fields[name].annotation)
        if name == "recompute":
            values = f"none, selective[:module+module], full[:n], ops, every:n; modules: {', '.join(RECOMPUTE_MODULES)}"
        if name == "zero":
            values = "0, 1, 2, 3"
        default = getattr(spec, name)
        text = "the framework's" if default in (None, "") else str(default).lower()
        if name in ("dp", "sp", "zero", "etp"):
            text = "follows from the others"
        fields.append({"name": name, "values": values, "default": text, "meaning": meanings.get(name, "")})
    return fields


def schedule_rows() -> list[dict[str, Any]]:
    """Every pipeline schedule: who runs it, its chunks on a rank, and when a search tries it."""
    from mofa.schedules import SCHEDULE_NAMES, SCHEDULES

    return [
        {
            "name": name,
            "runs_on": ["megatron", "torchtitan"] if record.runs_in_megatron else ["torchtitan"],
            "vpp": "2 and more" if record.chunks_per_rank is None else str(record.chunks_per_rank),
            "searched": "yes" if record.is_searched else f"where fixed: --fix schedule={name}",
            "meaning": _what_it_does(record),
        }
        for name, record in ((name, SCHEDULES[name]) for name in SCHEDULE_NAMES)
    ]


def framework_rows() -> list[dict[str, Any]]:
    """Every framework: its version, where its facts are from, and what jobs its plans are exported to."""
    from mofa.specs.framework_names import FRAMEWORK_NAMES
    from mofa.specs.framework_traits import TRAITS
    from mofa.specs.load import load_framework

    facts = [load_framework(name) for name in FRAMEWORK_NAMES]
    return [
        {
            "name": spec.name,
            "version": spec.version,
            "facts": spec.provenance,
            "exported_to": list(TRAITS[spec.name].exported_to),
            "source": spec.source,
        }
        for spec in facts
    ]


def framework_option_rows(name: str) -> list[dict[str, Any]]:
    """Every option of a framework: its name, the values that it offers, and the one that it has by default."""
    from mofa.specs.framework import FrameworkSpec
    from mofa.specs.framework_offers import OFFERED
    from mofa.specs.load import load_framework

    spec = load_framework(name)
    offered = OFFERED[spec.name]
    return [
        {
            "name": field,
            "values": ", ".join(offered[field]) if field in offered else _values(info.annotation),
            "default": str(getattr(spec, field)).lower() if getattr(spec, field) not in (None, "") else "none",
        }
        for field, info in FrameworkSpec.model_fields.items()
        if field not in ("name", "version", "provenance", "source", "python_functions")
    ]


def _attributes(spec: type) -> dict[str, str]:
    """Meanings of fields, out of the section Attributes of a docstring."""
    text = inspect.getdoc(spec) or ""
    section = re.search(r"^Attributes\n-+\n(.*?)(?:\n\n|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    lines_by_name: dict[str, list[str]] = {}
    name = ""
    for line in (section[1] if section else "").splitlines():
        if not line.startswith(" "):
            name = line.strip()
        else:
            lines_by_name.setdefault(name, []).append(line.strip())
    meanings = {field: " ".join(lines).replace("``", "") for field, lines in lines_by_name.items()}
    return {field: re.sub(r":mod:`([^`]*)`", r"\1", meaning) for field, meaning in meanings.items()}


def _values(annotation: Any) -> str:
    """What a field takes, in words.

    >>> _values(Literal["a", "b"]), _values(bool), _values(int | None)
    ('a, b', 'true, false', 'whole numbers from 1')
    """
    literals = [str(value) for value in _members(annotation) if not isinstance(value, type)]
    if literals:
        return ", ".join(value for value in literals if value)
    kinds = _members(annotation)
    if bool in kinds:
        return "true, false"
    if int in kinds:
        return "0 to 3" if "le=3" in str(annotation) else "whole numbers from 1"
    return "numbers" if float in kinds else "text" if str in kinds else "a mapping"


def _members(annotation: Any) -> list[Any]:
    """Types and literal values of an annotation."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    inner = get_args(annotation)
    if not inner:
        return [annotation] if isinstance(annotation, type) and annotation is not type(None) else []
    return [member for part in inner for member in _members(part)]


def _what_it_does(record: Any) -> str:
    words = ["chunks go round and round the ranks" if record.placement == "loop" else "chunks go there and back"]
    if record.forwards_first:
        words.append("all forwards come first")
    if record.defers_weight_gradients:
        words.append("weight gradients are made later, in what would be bubble")
    return "; ".join(words)
