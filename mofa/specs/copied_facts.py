"""Facts of a profile that its author copied: what was measured on a bundled machine is transferred to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Any, Literal

from mofa.specs.files import bundled_dir, bundled_names, load_yaml

Folder = Literal["gpus", "nodes"]
"""Folders of bundled profiles."""


def with_copied_facts_transferred(facts: dict[str, Any], folder: Folder) -> dict[str, Any]:
    """A profile whose measured facts are ``transferred`` where their source is that of a bundled profile's.

    A copy keeps ``provenance: measured`` and the source of what it was copied from. That source was measured on the
    bundled machine, so it says nothing certain of the new one. A profile with a bundled one's name is that machine.

    Parameters
    ----------
    facts
        What a profile's file holds.
    folder
        Whether it is a GPU's or a node's.

    Returns
    -------
    dict
        The same, or a copy with other provenances. Values stay.

    Examples
    --------
    >>> node = {**load_yaml(bundled_dir("nodes") / "h100-hgx.yaml", "h100-hgx"), "name": "mine"}
    >>> with_copied_facts_transferred(node, "nodes")["intra"]["latency_s"]["provenance"]
    'transferred'
    """
    if facts.get("name") in bundled_names(folder):
        return facts
    marked: dict[str, Any] = _marked(facts, _measured_sources(folder))
    return marked


@cache
def bundled_profile_mapping(folder: Folder, name: str) -> dict[str, Any]:
    """What is written in a bundled profile, read once; not to be changed."""
    where = f"{folder}/{name}.yaml"
    return load_yaml(bundled_dir(folder) / f"{name}.yaml", where)


def mark_all_as_transferred(facts: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A bundled profile as the base of another machine's: what was measured for it is transferred there.

    Examples
    --------
    >>> mark_all_as_transferred({"a": {"value": 1, "provenance": "measured", "source": "a run"}, "b": "x"}, "h200-sxm")
    {'a': {'value': 1, 'provenance': 'transferred', 'source': "h200-sxm's: a run"}, 'b': 'x'}
    """
    made = {
        key: mark_all_as_transferred(value, name) if isinstance(value, dict) else value for key, value in facts.items()
    }
    if made.get("provenance") == "measured":
        made |= {"provenance": "transferred", "source": f"{name}'s: {made.get('source', '')}"}
    return made


def _marked(value: Any, owners: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_marked(item, owners) for item in value]
    if not isinstance(value, dict):
        return value
    made = {key: _marked(item, owners) for key, item in value.items()}
    source = made.get("source")
    if made.get("provenance") == "measured" and isinstance(source, str) and source in owners:
        made |= {"provenance": "transferred", "source": f"{owners[source]}'s: {source}"}
    return made


@lru_cache
def _measured_sources(folder: Folder) -> dict[str, str]:
    """The bundled profile that each source of a measured fact stands in, the first where several have it."""
    out: dict[str, str] = {}
    for name in bundled_names(folder):
        for source in _sources(bundled_profile_mapping(folder, name)):
            out.setdefault(source, name)
    return out


def _sources(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if value.get("provenance") == "measured" and isinstance(value.get("source"), str):
            yield value["source"]
        for item in value.values():
            yield from _sources(item)
    elif isinstance(value, list):
        for item in value:
            yield from _sources(item)
