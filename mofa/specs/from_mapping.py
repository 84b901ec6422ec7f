"""Raw mappings into specs: the errors of pydantic are turned into one line of ours here, once."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from mofa.errors import SpecError
from mofa.specs.attention import ATTENTION_KINDS
from mofa.specs.files import did_you_mean, shown_value

S = TypeVar("S", bound=BaseModel)

_WHAT = {
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of fewer digits",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "dict_type": "must be a mapping",
    "dataclass_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
}
_LENGTHS = {
    "string_too_short": ("at least", "characters"), "string_too_long": ("at most", "characters"),
    "too_short": ("at least", "entries"), "too_long": ("at most", "entries"),
}  # fmt: skip
"""Kinds of wrong lengths: which bound was passed, and of what. [entries or characters]"""


def spec_from_mapping(cls: type[S], raw: object, where: str, prefix: str = "", *, or_else: str = "") -> S:
    """Check a raw mapping and make a spec of it.

    Parameters
    ----------
    cls
        The spec.
    raw
        What was read.
    where
        The file or option, which begins the error message.
    prefix
        Path of ``raw`` within the file, such as ``runs[3].``.
    or_else
        What one may do instead of adding fields that are missing.

    Raises
    ------
    SpecError
        One line ``where: field.path what, with values; what to do``, of the first thing that is wrong; misspelt keys
        come first, because they make others missing. Where a field is missing, all that are missing are named.

    Examples
    --------
    >>> from mofa.specs.workload import BatchSpec
    >>> spec_from_mapping(BatchSpec, {"seq_len": 4096, "globl_batch": 8}, "x.yaml")
    Traceback (most recent call last):
    mofa.errors.SpecError: x.yaml: globl_batch is no field here; did you mean global_batch?
    """
    try:
        made = cls.model_validate(raw)
        if (problem := first_truth_for_number(cls, raw)) is not None:
            raise SpecError(f"{where}: {sentence_of_problem(cls, problem, prefix)}")
        return made
    except ValidationError as error:
        problems = error.errors(include_url=False)
        first = min(problems, key=lambda p: p["type"] != "extra_forbidden")
        missing = [path for p in problems if p["type"] == "missing" for path in _missing(cls, p["loc"], prefix)]
        if first["type"] == "missing" and len(missing) > 1:
            raise SpecError(f"{where}: {', '.join(missing)} are missing; add them{or_else}") from None
        raise SpecError(f"{where}: {sentence_of_problem(cls, first, prefix)}") from None


class _Truth(str):
    """A true or false as text, which a field of truth takes and one of numbers does not."""


def first_truth_for_number(cls: type[BaseModel], raw: object) -> Mapping[str, Any] | None:
    """The first true or false where a number is asked for, as a problem of pydantic's, which takes them for 1 and 0.

    Parameters
    ----------
    cls
        A spec, or what a result is read as.
    raw
        What was read, which the class has taken.

    Examples
    --------
    >>> from mofa.specs.base import Fact
    >>> problem = first_truth_for_number(Fact, {"value": True, "provenance": "assumed", "source": "an example"})
    >>> problem["loc"], problem["input"]
    (('value',), True)
    """
    marked = _with_marked_truths(raw)
    if marked is raw:
        return None
    try:
        cls.model_validate(marked)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_context=False):
            if isinstance(problem["input"], _Truth) and problem["type"] in ("float_parsing", "int_parsing"):
                return {**problem, "input": problem["input"] == "true"}
    return None


def _with_marked_truths(raw: Any) -> Any:
    """Nested facts whose true and false are :class:`_Truth`; themselves where there are none.

    >>> facts = {"x": [1, 2]}
    >>> _with_marked_truths(facts) is facts, _with_marked_truths({"x": [True, 2]})
    (True, {'x': ['true', 2]})
    """
    if isinstance(raw, bool):
        return _Truth("true" if raw else "false")
    if isinstance(raw, dict):
        items = {key: _with_marked_truths(value) for key, value in raw.items()}
        return items if any(items[key] is not raw[key] for key in raw) else raw
    if isinstance(raw, list | tuple):
        entries = [_with_marked_truths(value) for value in raw]
        return entries if any(new is not old for new, old in zip(entries, raw, strict=True)) else raw
    return raw


def _missing(cls: type[BaseModel], loc: tuple[int | str, ...], prefix: str) -> Iterator[str]:
    """A missing field, or the required fields of the mapping that is missing."""
    path, owners, _ = _locate(cls, loc)
    field = owners[0].model_fields.get(str(loc[-1])) if len(owners) == 1 else None
    inner = _flat(field.annotation) if field is not None else owners
    yield from _required(prefix + path, inner)


def _required(path: str, members: list[Any]) -> Iterator[str]:
    """Paths of what a missing field must have: itself, or the required fields of the one spec that it holds."""
    spec = members[0] if len(members) == 1 and isinstance(members[0], type) else None
    required = (
        [(name, f) for name, f in spec.model_fields.items() if f.is_required()]
        if spec is not None and issubclass(spec, BaseModel)
        else []
    )
    if not required or {"value", "provenance", "source"} <= {name for name, _ in required}:  # a fact is one
        yield path
        return
    for name, field in required:
        yield from _required(f"{path}.{field.alias or name}", _flat(field.annotation))


def sentence_of_problem(cls: type[BaseModel], problem: Mapping[str, Any], prefix: str = "") -> str:
    """What is wrong with a field and what to do, of one of the problems that checking a spec found."""
    path, owner, entries = _locate(cls, problem["loc"])
    place = (prefix + path).rstrip(".") or "the file"
    kind, context, value = problem["type"], problem.get("ctx", {}), problem.get("input")
    if kind == "extra_forbidden":
        name = problem["loc"][-1]
        elsewhere = {".".join(names) for names in _paths(cls) if names[-1] == name} - {path}
        # a field of one other place: what it is in was left out, or another written
        there = f"did you mean {prefix}{min(elsewhere)}?" if len(elsewhere) == 1 else ""
        hint = there or did_you_mean(name, _field_names(owner))
        return f"{shown_value(place, 120)} is no field here; {hint}"
    if kind == "missing":
        return f"{place} is missing; add it"
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        key = str(context.get("discriminator", "kind")).strip("'")
        tags = str(context.get("expected_tags", ", ".join(ATTENTION_KINDS))).replace("'", "")
        got = f"({shown_value(context['tag'])}) " if "tag" in context else ""
        return f"{place}.{key} {got}must be one of {tags}; write it"
    if value is None:
        return f"{place} is empty; write its value, or leave the line out where it is optional"
    if kind == "value_error":
        text = str(context["error"])
        text = text if ";" in text else f"{text}; {'change one of them' if isinstance(value, dict) else 'correct it'}"
        if isinstance(value, dict):
            # A rule between fields: its text begins with the name of a field of this mapping.
            head = text.split(" ")[0].split(".")[0].rstrip(":")
            if path and head in _field_names(owner):
                return f"{place}.{text}"
            return f"{place}: {text}" if path else text
        return f"{place}: {text}"
    shown = f" ({shown_value(repr(value))})" if not isinstance(value, (dict, list)) else ""
    if kind == "string_pattern_mismatch":
        return f"{place}{shown} must match {context['pattern']}; use letters, digits, '.', '_' and '-'"
    if kind in _LENGTHS:
        bound, unit = _LENGTHS[kind]
        number = context["min_length" if bound == "at least" else "max_length"]
        return f"{place}{shown} must have {bound} {number:,} {unit}; correct it"
    what = _WHAT.get(kind) or problem["msg"].replace("Input should", "must").replace("'", "").lower()
    if kind == "literal_error":
        offered = str(context["expected"]).removeprefix("'', ")  # empty is what a key left out stands for
        what = f"must be {offered.replace(chr(39), '')}"
        known = tuple(re.findall(r"'([^']+)'", str(context["expected"])))
        hint = "choose one" if not known or not isinstance(value, str) else did_you_mean(value, known)
        hint = "choose one" if hint.startswith("use one of") else hint  # all of them stand there already
        return f"{place}{shown} {what}; {hint}"
    if what == "must be a mapping" and not isinstance(value, (dict, list)):
        return f"{place}{shown} {what}; write its {entries}"
    return f"{place}{shown} {what}; correct it"


def _locate(cls: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[str, list[type[BaseModel]], str]:
    """Path as the user wrote it, without tags of unions, the specs that own its end, and what a mapping there has."""
    path = ""
    owners: list[Any] = [cls]
    last_owner: list[type[BaseModel]] = [cls]
    for part in loc:
        models = [t for t in owners if isinstance(t, type) and issubclass(t, BaseModel)]
        if isinstance(part, int):
            path += f"[{part}]"
            owners = [a for t in owners for a in _flat(*get_args(t)[:1])]
            continue
        field = next((f for m in models for n, f in m.model_fields.items() if part in (n, f.alias)), None)
        form = next((inner for t in owners if part in (inner := getattr(t, "__dataclass_fields__", {}))), None)
        if form is not None:  # a fitted form
            fields = next(t.__pydantic_fields__ for t in owners if hasattr(t, "__pydantic_fields__"))
            owners = _flat(fields[part].annotation)
        elif field is not None:
            last_owner = models
            owners = _flat(field.annotation)
        elif len(owners) > 1 and _is_member(part, owners):
            continue
        elif len(models) > 1 and any(_tag(m) == part for m in models):
            owners = [m for m in models if _tag(m) == part]
            last_owner = owners
            continue
        elif any(get_origin(t) is dict for t in owners):
            owners = [a for t in owners if get_origin(t) is dict for a in _flat(get_args(t)[1])]
        elif not models:
            continue  # the name of a validator
        else:
            last_owner = models
        path += f".{part}" if path else part
    ends = [t for t in owners if isinstance(t, type) and issubclass(t, BaseModel)]
    return path, ends or last_owner, _entries(owners)


def _entries(types_: list[Any]) -> str:
    """What a mapping of one of these types holds, in words.

    >>> _entries([dict[Literal["bf16", "fp8"], int]]), _entries([dict[str, int]])
    ('entries, each by its name, which is one of bf16, fp8', 'entries, each by its name')
    """
    keys = next((get_args(t)[0] for t in types_ if get_origin(t) is dict), None)
    if keys is not None:
        names = [str(name) for name in get_args(keys)] if get_origin(keys) is Literal else []
        return f"entries, each by its name{', which is one of ' if names else ''}{', '.join(names)}"
    fields = [name for t in types_ for name in getattr(t, "__dataclass_fields__", {})]
    names = fields or _field_names([t for t in types_ if hasattr(t, "model_fields")])
    return f"fields, which are {', '.join(dict.fromkeys(names))}" if names else "fields"


def _paths(cls: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Paths of all fields of a spec and of the specs in it, but for those in mappings by name."""
    for name, field in cls.model_fields.items():
        yield (field.alias or name,)
        for inner in _flat(field.annotation):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from ((field.alias or name, *path) for path in _paths(inner))


def _flat(*annotations: Any) -> list[Any]:
    """Members of unions, without their metadata."""
    out: list[Any] = []
    for annotation in annotations:
        origin = get_origin(annotation)
        if origin is Annotated:
            out += _flat(get_args(annotation)[0])
        elif origin in (Union, types.UnionType):
            out += _flat(*get_args(annotation))
        else:
            out.append(annotation)
    return out


def _is_member(part: str, owners: list[Any]) -> bool:
    """Whether pydantic put this part into a path to name one member of a union."""
    return "[" in part or part in {getattr(t, "__name__", "") for t in owners}


def _tag(model: type[BaseModel]) -> object:
    field = model.model_fields.get("kind")
    return field.default if field else None


def _field_names(owners: list[type[BaseModel]]) -> list[str]:
    return [field.alias or name for owner in owners for name, field in owner.model_fields.items()]
