"""Files of users, read defensively: size, nesting, aliases and duplicate keys are checked before anything is built."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from mofa.errors import SpecError
from mofa.specs.limited_reads import exists, json_fault_text, read_bytes, refuse_unreachable, utf8_text
from mofa.specs.unmodelled import known_synonym, nearly_synonyms, why_not_modelled

DataKind = Literal["workloads", "hardware_profiles", "framework_profiles", "fault_profiles"]
BundledKind = Literal[
    "workloads", "hardware_profiles", "framework_profiles", "fault_profiles", "gpus", "nodes", "hosts"
]

MAX_FILE_BYTES = 2**20
MOST_MEANT = 5
"""As many known words are named as what an unknown one may mean."""
MAX_DEPTH = 32
MAX_EXPANDED_NODES = 100_000
"""Nodes of a YAML document once every alias is written out; a bomb of a few lines has billions."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


@lru_cache
def data_dir(kind: DataKind) -> Path:
    """Folder of the bundled files of one kind: inside the installed package, else at the top of the repository."""
    package = Path(__file__).resolve().parent.parent
    packaged = package / "_data" / kind
    return packaged if packaged.is_dir() else package.parent / kind


def bundled_names(kind: BundledKind) -> tuple[str, ...]:
    """Names of the bundled files of one kind, sorted; ``hardware_profiles`` are the nodes."""
    return tuple(sorted(path.stem for path in bundled_dir(kind).glob("*.yaml")))


def bundled_dir(kind: BundledKind) -> Path:
    """Folder that holds the YAML files of one kind of bundled fact."""
    if kind in ("workloads", "framework_profiles", "fault_profiles"):
        return data_dir(cast("DataKind", kind))
    return data_dir("hardware_profiles") / ("nodes" if kind == "hardware_profiles" else kind)


def gpus_of_nodes() -> dict[str, str]:
    """The GPU of every bundled node, by the node's name.

    >>> gpus_of_nodes()["h100-hgx"]
    'h100-sxm'
    """
    texts = {
        name: (bundled_dir("nodes") / f"{name}.yaml").read_text(encoding="utf-8") for name in bundled_names("nodes")
    }
    return {node: gpu[1] for node, text in texts.items() if (gpu := re.search(r"^gpu: *(\S+)", text, re.MULTILINE))}


def hardware_suggestion(word: str, folder: Literal["gpus", "nodes"]) -> str:
    """End of an error message about an unknown GPU or node: which one stands in the other folder, else the closest.

    >>> hardware_suggestion("gb300-nvl72", "gpus"), hardware_suggestion("h200-sxm", "nodes")
    ('it is a node, of the GPU gb300', 'it is a GPU, of the node h200-hgx')
    >>> hardware_suggestion("dgx-h200", "nodes"), hardware_suggestion("8xMI300X", "nodes")
    ('did you mean h200-hgx?', 'did you mean mi300x-oam?')
    """
    gpu_of = gpus_of_nodes()
    if folder == "gpus" and word in gpu_of:
        return f"it is a node, of the GPU {gpu_of[word]}"
    if folder == "nodes" and (nodes := [node for node, gpu in gpu_of.items() if gpu == word]):
        return f"it is a GPU, of the node {' or '.join(nodes)}"
    parts, known = re.split(r"[^a-z0-9]+", word[:100].casefold()), bundled_names(folder)
    chips = {name.partition("-")[0] for name in known}
    named = chips & set(parts) or {chip for chip in chips if any(part.endswith(f"x{chip}") for part in parts)}
    return did_you_mean(word if word.casefold().startswith(tuple(chips)) or len(named) != 1 else named.pop(), known)


def did_you_mean(word: object, known: Iterable[str], before: str = "") -> str:
    """End of an error message: the closest known word, that it is not modelled, else all known words.

    A word that several known ones begin with stands for all of these. ``before`` is put before each word meant.

    >>> did_you_mean("num_layrs", ["num_layers", "hidden"])
    'did you mean num_layers?'
    >>> did_you_mean("zzz", ["num_layers", "hidden"])
    'use one of num_layers, hidden'
    >>> did_you_mean("mbs", ["tp", "micro_batch"]), did_you_mean("tensor_paralel", ["tp", "micro_batch"])
    ('did you mean micro_batch?', 'did you mean tp?')
    >>> did_you_mean("H100", ["gb200", "h100-nvl", "h100-sxm", "h1000"])
    'did you mean h100-nvl or h100-sxm?'
    >>> did_you_mean("lora", ["fp8-blockwise"])
    'LoRA is not modelled; the nearest is training all weights, which takes more memory'
    """
    names = list(known)
    if not names:
        return "there is none to choose from"
    if meant := known_synonym(word, tuple(names)):
        return f"did you mean {before}{meant}?"
    if why := why_not_modelled(word):
        return why
    stem = re.escape(str(word)[:100])
    close = [name for name in names if len(stem) > 1 and re.match(rf"{stem}[-_:.]", name, re.IGNORECASE)]
    if not 1 <= len(close) <= MOST_MEANT:
        close = difflib.get_close_matches(str(word)[:100], names, n=1, cutoff=0.6) or nearly_synonyms(word, names)
    meant = " or ".join(", ".join(before + name for name in some) for some in (close[:-1], close[-1:]) if some)
    return f"did you mean {meant}?" if meant else f"use one of {', '.join(names)}"


def shown_value(value: object, length: int = 40) -> str:
    """A value as an error message shows it, on one line."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:  # a whole number of more digits than Python writes out
        text = "a very large number"
    text = "".join(c if c.isprintable() else " " for c in text[: 4 * length])
    return text if len(text) <= length else text[: length - 3] + "..."


def read_text(path: str | Path, where: str) -> str:
    """Text of a file of at most :data:`MAX_FILE_BYTES`, UTF-8."""
    text = utf8_text(read_bytes(path, where, MAX_FILE_BYTES, "this file should be a few kB, check the path"), where)
    if not text.strip():
        raise SpecError(f"{where}: the file is empty; write the fields, mofa show workload llama3-8b is an example")
    return text


def load_yaml(path: str | Path, where: str | None = None) -> dict[str, Any]:
    """Mapping that a YAML file of a user holds.

    Parameters
    ----------
    path
        The file.
    where
        What error messages call the file; the path by default.

    Returns
    -------
    dict
        Plain mappings, lists and scalars; nothing shared between two places.

    Raises
    ------
    SpecError
        In one line, if the file is missing, empty, too large, not UTF-8, not YAML, no mapping, nested too deeply,
        larger than it looks once its aliases are written out, or holds a key twice.
    """
    name = where or shown_value(str(path), 200)
    return yaml_mapping(read_text(path, name), name)


def yaml_mapping(text: str, name: str) -> dict[str, Any]:
    """Mapping of a YAML text that messages call by a name, with the guards of :func:`load_yaml`."""
    raw = parse_yaml(text, name)
    if not isinstance(raw, dict):
        what = "nothing but comments" if raw is None else f"a {_kind(raw)}"
        raise SpecError(f"{name}: holds {what}, not a mapping; write 'field: value' lines")
    return cast("dict[str, Any]", raw)


def parse_yaml(text: str, where: str) -> Any:
    """Value of a YAML text, with the guards of :func:`load_yaml`."""
    try:
        return _plain_yaml(text)
    except Exception:  # whatever it is, the slow way says it in words
        return _any_yaml(text, where)


_YAML_MISTAKES = {  # the first that is found says it
    "another document": "a second document begins (---), where one is read",
    "tab character": "begins with a tab, where YAML wants spaces",
    "cannot start any token": "a value begins with a character that YAML keeps for itself (put it in quotes)",
    "mapping values are not allowed": "a colon too many (a value with one needs quotes), or a line indented too far",
    "could not find expected ':'": "no colon behind a field's name, or a space is missing behind it",
    "end of stream": "a quote or a bracket is not closed",
    "unexpected end": "a quote or a bracket is not closed",
    "but got": "a quote, a comma or a bracket is missing",
    "expected ','": "a quote, a comma or a bracket is missing",
    "expected '-'": "the indentation, a comma or a bracket is wrong",
    "expected key": "the indentation, a comma or a bracket is wrong",
    "but found": "the indentation, a comma or a bracket is wrong",
    "constructor": "a tag (!) that is not read here",
    "undefined alias": "an undefined alias, a name behind * that no & defines (put it in quotes)",
}


def profile_as_yaml(facts: dict[str, Any]) -> str:
    """A profile of hardware as YAML: keys in their order, what has no parts in one line.

    Examples
    --------
    >>> print(profile_as_yaml({"name": "toy", "tdp_w": {"value": "700 W", "provenance": "assumed"}}), end="")
    name: toy
    tdp_w: {value: 700 W, provenance: assumed}
    """
    return str(yaml.dump(facts, Dumper=_Dumper, sort_keys=False, width=140, default_flow_style=None))


def _yaml_mistake(problem: str) -> str:
    """What is wrong with a line, of what the YAML reader found.

    >>> _yaml_mistake("found a tab character that violates indentation")
    'begins with a tab, where YAML wants spaces'
    """
    return next(
        (words for part, words in _YAML_MISTAKES.items() if part in problem),
        shown_value(problem or "broken", 120),
    )


UNREADABLE_YAML = "holds a character, date, number or tag that YAML cannot read; write valid YAML"


def finite_int(value: str | int) -> int:
    """A whole number of a file that a float can hold.

    Raises
    ------
    OverflowError
        If it is beyond that, as no size, count or time is.
    ValueError
        If it is no whole number, or one of thousands of digits.

    Examples
    --------
    >>> finite_int("15000")
    15000
    """
    number = int(value)
    float(number)
    return number


class _NotPlain(Exception):
    """A YAML text has what the quick way does not read."""


def _plain_yaml(text: str) -> Any:
    """Value of a YAML text in one pass over its events, which takes a quarter of the time of :func:`_any_yaml`: where
    it is one document without tags, anchors, merged keys and anything that is refused there."""
    loader = _Loader(text)
    try:
        next_event = loader.get_event
        value: Any = _NotPlain
        open_values: list[tuple[Any, set[str] | None, Any]] = []
        into: Any = None  # the mapping or list that is open, and of a mapping the texts of its keys
        keys: set[str] | None = None
        key: Any = _NotPlain
        nodes = 0
        while (event := next_event()) is not None:
            kind = type(event)
            if kind is yaml.ScalarEvent:
                if event.anchor is not None or event.tag is not None:
                    raise _NotPlain
                item = _plain_scalar(event.value) if event.implicit[0] else event.value
                if keys is not None and key is _NotPlain:
                    if event.value in keys:
                        raise _NotPlain
                    keys.add(event.value)
                    key = item
                    continue
            elif kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
                item = into
                into, keys, key = open_values.pop()
            elif kind is yaml.MappingStartEvent or kind is yaml.SequenceStartEvent:
                no_key = keys is not None and key is _NotPlain
                if event.anchor is not None or event.tag is not None or no_key or len(open_values) == MAX_DEPTH:
                    raise _NotPlain
                open_values.append((into, keys, key))
                into, keys = ({}, set()) if kind is yaml.MappingStartEvent else ([], None)
                key = _NotPlain
                continue
            elif kind is yaml.AliasEvent or (kind is yaml.DocumentStartEvent and value is not _NotPlain):
                raise _NotPlain
            else:
                continue
            nodes += 1
            if keys is not None:
                into[key] = item
                key = _NotPlain
            elif into is not None:
                into.append(item)
            else:
                value = item
    finally:
        loader.dispose()
    if value is _NotPlain or 2 * nodes > MAX_EXPANDED_NODES:  # keys are nodes as well
        raise _NotPlain
    return value


_NUMBER = re.compile(r"(0|[1-9][0-9]*)|[0-9]+\.[0-9]*(?:[eE][-+][0-9]+)?")
"""Most of the numbers of YAML; all of what this matches are."""

_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_OTHER_BASE = re.compile(r"[-+]?(?:[0-9_]+(?::[0-9_]+)+(?:\.[0-9_]*)?|0[0-7_]+)")
"""Numbers that YAML 1.1 reads in base 60, as 2:30 for 150, or in base 8, as 010 for 8."""


@lru_cache(maxsize=4096)
def _plain_scalar(text: str) -> Any:
    """Value of a scalar without quotes and without a tag: a number, a truth value, a date, nothing or text."""
    number = _NUMBER.fullmatch(text)
    if number is not None:
        return float(text) if number[1] is None else finite_int(text)
    loader = _Loader("")
    try:
        tag = loader.resolve(yaml.ScalarNode, text, (True, False))
        if tag in _NUMBER_TAGS and _OTHER_BASE.fullmatch(text):
            raise _NotPlain
        if tag in ("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value"):
            raise _NotPlain
        value = loader.construct_document(yaml.ScalarNode(tag, text))
        return finite_int(value) if type(value) is int else value
    finally:
        loader.dispose()


def _any_yaml(text: str, where: str) -> Any:
    """Value of any YAML text, or what is wrong with it."""
    try:
        _check_depth(text, where)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_nodes(node, where)
            value = loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise SpecError(f"{where}: {line}{_yaml_mistake(error.problem or '')}; write valid YAML") from None
    except SpecError:
        raise
    except Exception:  # constructors of YAML's own tags fail in ways of their own: !!bool maybe, !!timestamp x
        raise SpecError(f"{where}: {UNREADABLE_YAML}") from None
    try:
        return _unshared(value)
    except OverflowError:
        raise SpecError(f"{where}: {UNREADABLE_YAML}") from None


def load_json(path: str | Path, where: str | None = None) -> dict[str, Any]:
    """Mapping that a JSON file of a user holds, with the guards of :func:`load_yaml`.

    An infinity is read as one: Nemotron-H's published files have it as a limit that mofa has no use for. Who reads a
    number checks that it is finite.
    """
    name = where or shown_value(str(path), 200)
    text = read_text(path, name)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in items:
            if key in out:
                raise SpecError(f"{name}: key {shown_value(key)!r} is written twice; keep one")
            out[key] = value
        return out

    def constant(text: str) -> float:
        if text != "NaN":
            return float(text)
        raise SpecError(f"{name}: {text} is no finite number; write a number")

    try:
        raw = json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_int=finite_int)
    except SpecError:
        raise
    except json.JSONDecodeError as error:
        raise SpecError(f"{name}: {json_fault_text(error)}; write valid JSON") from None
    except (ValueError, OverflowError, RecursionError):
        raise SpecError(
            f"{name}: nested too deeply or holds an absurd number; check that it is the right file"
        ) from None
    if not isinstance(raw, dict):
        raise SpecError(f"{name}: holds a {_kind(raw)}, not an object; check that it is a model's config.json")
    return raw


def _kind(value: object) -> str:
    return {list: "list", str: "text", dict: "mapping", bool: "truth value"}.get(type(value), "number")


def _check_depth(text: str, where: str) -> None:
    """Refuse deep nesting before the recursive composer sees it."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise SpecError(f"{where}: nested more than {MAX_DEPTH} levels deep; check that it is the right file")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _check_nodes(root: yaml.Node, where: str) -> None:
    """Refuse duplicate keys, aliases that hold themselves or expand to an absurd size, and numbers in other bases."""
    sizes: dict[int, int] = {}
    under_way: set[int] = set()

    def size(node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode):
            if node.tag in _NUMBER_TAGS and _OTHER_BASE.fullmatch(node.value):
                raise SpecError(
                    f"{where}: line {node.start_mark.line + 1}: {shown_value(node.value)} is a number in base "
                    f"{60 if ':' in node.value else 8} to YAML; write it in base 10 and with its unit, or in quotes"
                )
            return 1
        if id(node) in under_way:
            raise SpecError(f"{where}: line {node.start_mark.line + 1}: an alias refers to itself; write the value out")
        if id(node) not in sizes:
            under_way.add(id(node))
            if isinstance(node, yaml.MappingNode):
                _check_keys(node, where)
                total = sum(size(key) + size(value) for key, value in node.value)
            else:
                total = sum(size(item) for item in node.value)
            under_way.discard(id(node))
            sizes[id(node)] = 1 + total
            if sizes[id(node)] > MAX_EXPANDED_NODES:
                raise SpecError(
                    f"{where}: its aliases expand to more than {MAX_EXPANDED_NODES} values; write the values out"
                )
        return sizes[id(node)]

    size(root)


def _check_keys(node: yaml.MappingNode, where: str) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise SpecError(f"{where}: line {line}: a key is no text; write 'field: value'")
        if key.value in seen:
            raise SpecError(f"{where}: line {line}: key {shown_value(key.value)!r} is written twice; keep one")
        seen.add(key.value)


def _unshared(value: Any) -> Any:
    """A copy in which no alias is shared, so that one place can be changed without another."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unshared(item) for item in value]
    return finite_int(value) if type(value) is int else value


def find_bundled_or_user_file(ref: str | Path, kind: BundledKind, hint: str) -> tuple[Path, str]:
    """Path of a bundled name or of a user's file, and what messages call it."""
    if not isinstance(ref, (str, Path)):
        raise SpecError(f"{kind}: {type(ref).__name__} is no name and no path; give text or a Path")
    text = str(ref)
    if isinstance(ref, str) and ref in bundled_names(kind):
        return bundled_dir(kind) / f"{ref}.yaml", f"{kind}/{ref}.yaml"
    path = Path(ref)
    if text and exists(path):
        return path, shown_value(text, 200)
    refuse_unreachable(path, shown_value(text, 200))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and kind == "workloads" and not path.suffix and not exists(path.parent):
        raise SpecError(
            f"{shown_value(text, 200)}: no such file or folder; a model of Hugging Face is read from its config.json: "
            f"download that and give its path"
        )
    if "/" in text or path.suffix in (".yaml", ".yml", ".json"):
        raise SpecError(f"{shown_value(text, 200)}: no such file; check the path")
    nouns = {"workloads": "workload", "fault_profiles": "fault profile", "gpus": "GPU", "hosts": "host"}
    noun = nouns.get(kind, "node")
    meant = hardware_suggestion(text, kind) if kind in ("gpus", "nodes") else did_you_mean(text, bundled_names(kind))
    raise SpecError(f"{shown_value(text) or 'empty name'}: no bundled {noun} and no file; {meant} ({hint})")
