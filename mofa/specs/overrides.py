"""What a user changes on the command line: dotted paths into specs, and strategies as text."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

from mofa.errors import SpecError
from mofa.specs.files import did_you_mean, parse_yaml, shown_value
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.strategy import StrategySpec
from mofa.specs.unmodelled import ELSEWHERE, normalised_word

ROOTS = ("workload", "hardware", "framework", "strategy")
STRATEGY_KEYS = tuple(name for name in StrategySpec.model_fields if name != "framework")
_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def refuse_non_mapping(changes: object, where: str) -> None:
    """Refuse changes that are no mapping of paths to values."""
    if changes is not None and not isinstance(changes, Mapping):
        raise SpecError(
            f"{where}: overrides are {type(changes).__name__}; give a mapping, such as {{'model.num_layers': 4}}"
        )


def refuse_other_gpu(changes: Mapping[str, object] | None, where: str) -> None:
    """Refuse changes of a cluster that are no mapping, or that name another GPU: its file is the node's to name."""
    refuse_non_mapping(changes, where)
    if changes and (named := next((path for path in ("gpu.name", "node.name") if path in changes), None)):
        raise SpecError(
            f"{where}: {named} ({shown_value(str(changes[named]))}) is a name, which moves no number; name "
            "another cluster, "
            "or set the facts that differ"
        )
    if changes and "node.gpu" in changes:
        raise SpecError(
            f"{where}: node.gpu ({shown_value(str(changes['node.gpu']))}) cannot be set, as the GPU is read with "
            "the node; "
            "copy the node's file and change gpu there"
        )


def with_overrides(
    raw: Mapping[str, Any], changes: Mapping[str, Any] | None, where: str, facts: Collection[str] = ()
) -> dict[str, Any]:
    """A raw mapping with values at dotted paths replaced.

    A fact ``{value, provenance, source}`` that is given a bare value becomes ``assumed``, "set by the user". So does
    one at a path of ``facts``, where the mapping has none yet.
    A mapping is merged into the one it meets, unless its ``kind`` differs.

    >>> with_overrides({"a": {"b": 1, "c": 2}}, {"a.b": 3, "d": 4}, "x")
    {'a': {'b': 3, 'c': 2}, 'd': 4}
    """
    refuse_non_mapping(changes, where)
    out = _copy(raw)
    for path, value in (changes or {}).items():
        keys = str(path).split(".")
        if not all(keys):
            raise SpecError(f"{where}: {shown_value(path)!r} is no dotted path; write it like model.num_layers")
        target = out
        for depth, key in enumerate(keys[:-1]):
            if target.get(key) is None:
                target[key] = {}
            if not isinstance(target[key], dict):
                parent = ".".join(keys[: depth + 1])
                raise SpecError(
                    f"{where}: {shown_value(path)} goes below {parent}, which is a single value; set {parent}"
                )
            target = target[key]
        old = {"value": None} if path in facts and target.get(keys[-1]) is None else target.get(keys[-1])
        target[keys[-1]] = _replaced(old, value, where)
    return out


def _replaced(old: Any, new: Any, where: str) -> Any:
    if isinstance(old, dict) and "value" in old and not isinstance(new, Mapping):
        return {"value": new, "provenance": "assumed", "source": "set by the user"}
    if isinstance(old, dict) and isinstance(new, Mapping):
        same_kind = "kind" not in new or "kind" not in old or new["kind"] == old["kind"]
        return with_overrides(old, new, where) if same_kind else _copy(new)
    return _copy(new) if isinstance(new, Mapping) else new


def _copy(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in raw.items()}


def parse_set_options(items: Sequence[str], roots: tuple[str, ...] = ROOTS) -> dict[str, dict[str, object]]:
    """Items of ``--set`` as dotted paths below each root: workload, hardware, framework and strategy.

    >>> parse_set_options(["workload.model.num_layers=4", 'hardware.gpu.memory_bytes="96 GiB"'])["workload"]
    {'model.num_layers': 4}
    """
    out: dict[str, dict[str, object]] = {root: {} for root in roots}
    for item in items:
        path, equals, text = item.partition("=")
        root, _, rest = path.strip().partition(".")
        if not equals or not rest or not text.strip():
            raise SpecError(f"--set {shown_value(item)}: is no assignment; write it like workload.model.num_layers=4")
        if root not in roots:
            raise SpecError(
                f"--set {shown_value(item)}: {shown_value(root)!r} is no beginning of a path; "
                f"{did_you_mean(root, roots)}"
            )
        if rest in out[root]:
            raise SpecError(f"--set {shown_value(item)}: {shown_value(path)} is set twice; keep one")
        value = _scalar(text, f"--set {shown_value(path)}")
        if root == "strategy":
            out[root].update(parse_strategy(f"{rest}={text.strip()}", "--set strategy"))
        else:
            out[root][rest] = value
    return out


def _scalar(text: str, where: str) -> object:
    if len(text) > 1000:
        raise SpecError(f"{where}: the value is longer than 1000 characters; write one value")
    value = parse_yaml(text, where)
    if isinstance(value, (dict, list)):
        raise SpecError(f"{where}: {shown_value(text)} is no single value; set each field by its own path")
    return value if value is None or isinstance(value, (str, int, float)) else text


def parse_strategy(text: str, where: str = "--strategy") -> dict[str, object]:
    """A strategy as text, such as ``"tp=4 pp=4 vpp=5 micro_batch=1 recompute=selective"``, checked field by field.

    Only the named fields are returned; :func:`mofa.specs.load.complete_strategy` fills the others.

    >>> parse_strategy("tp=4 sp=true recompute=full:2")
    {'tp': 4, 'sp': True, 'recompute': 'full:2'}
    """
    out: dict[str, object] = {}
    for item in re.split(r"[\s,]+", text.strip()):
        key, equals, value = item.partition("=")
        if item and not equals and list(out)[-1:] == ["layout"]:  # its commas are for the eye alone
            out["layout"] = f"{out['layout']},{item}"
            continue
        if not equals or not key or not value:
            raise SpecError(
                f"{where}: {shown_value(item) or 'nothing'!r} is no field=value; write it like 'tp=4 pp=2 "
                "micro_batch=1'"
            )
        if key not in STRATEGY_KEYS:
            raise SpecError(f"{where}: {shown_value(key)} is no field of a strategy; {_where_instead(key)}")
        if key in out:
            raise SpecError(f"{where}: {key} is given twice; keep one")
        if re.fullmatch(r"\d+(\.\.+|-|:|;)\d*", value) and key not in ("layout", "recompute"):
            instead = f"several values by --fix, as {key}=4,8" if where == "--fix" else f"one whole number, as {key}=4"
            raise SpecError(f"{where}: {shown_value(item)} is no field=value; write {instead}")
        out[key] = _strategy_value(key, value)
    strategy_from_fields(out, where)
    return out


def _where_instead(key: str) -> str:
    """Where what is no field of a strategy belongs.

    >>> _where_instead("gbs"), _where_instead("dp_size")
    ('it is an option: --global-batch', 'did you mean dp?')
    """
    option = ELSEWHERE.get(normalised_word(key))
    return f"it is an option: {option}" if option else did_you_mean(key, STRATEGY_KEYS)


def strategy_from_fields(raw: Mapping[str, Any], where: str) -> StrategySpec:
    """The strategy of these fields alone; raises SpecError unless each is known and of its type."""
    for key in raw:
        if key not in STRATEGY_KEYS:
            raise SpecError(
                f"{where}: {shown_value(key)} is no field of a strategy; {did_you_mean(key, STRATEGY_KEYS)}"
            )
    return spec_from_mapping(StrategySpec, dict(raw), where)


def _strategy_value(key: str, text: str) -> object:
    annotation = StrategySpec.model_fields[key].annotation
    types = [get_args(t)[0] if get_origin(t) is Annotated else t for t in (get_args(annotation) or (annotation,))]
    if bool in types:
        return _TRUTH.get(text.lower(), text)
    if int in types and re.fullmatch(r"[-+]?\d{1,12}", text):
        return int(text)
    return text
