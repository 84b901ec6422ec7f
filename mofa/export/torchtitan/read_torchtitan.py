"""Jobs on torchtitan read: a TOML with its model's module, or a Python config."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mofa.errors import SpecError
from mofa.export.job_file import JobOfFile, read_limited_text
from mofa.export.torchtitan.flavours import FLAVOURS
from mofa.export.torchtitan.launch_beside import read_launch_script_beside
from mofa.export.torchtitan.python_calls import (
    UnreadablePythonError,
    assigned_values,
    called_function_name,
    keyword_arguments,
    parse_python,
)
from mofa.export.torchtitan.read_python import read_python_config
from mofa.export.torchtitan.settings import (
    checked_setting,
    job_from_settings,
    model_class_defaults,
    model_flavour_arguments,
    typed_settings,
)
from mofa.export.torchtitan.toml_files import ARGUMENT_CLASSES
from mofa.export.torchtitan.torchtitan_table import TORCHTITAN

_OF_MODEL = ("model.name", "model.flavor", "experimental.custom_import")
"""Settings that say which model it is."""


def read_torchtitan_job(file: Path, num_gpus: int | None) -> JobOfFile:
    """The job of a TOML or of a Python config.

    Raises
    ------
    SpecError
        If it cannot be read, or says something that matters and is not modelled.
    """
    if file.suffix == ".py":
        return read_python_config(file, num_gpus)
    try:
        raw = tomllib.loads(read_limited_text(file))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SpecError(f"{file}: is no TOML ({error}); name a torchtitan config") from None
    settings = _flat(raw)
    values = typed_settings(TORCHTITAN, settings, str(file))
    values |= {f"args.{name}": value for name, value in _model(settings, file).items()}
    launched, environment = read_launch_script_beside(file, file.name)
    values |= environment
    known = {*TORCHTITAN.arguments, *TORCHTITAN.unmodelled}
    unread = tuple(name for name in settings if name not in known and not name.startswith(_OF_MODEL))
    return job_from_settings(TORCHTITAN, values, file, unread, num_gpus if num_gpus is not None else launched)


def _flat(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings as ``section.name``."""
    out: dict[str, Any] = {}
    for name, value in raw.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return out


# --- the model


def _model(settings: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Arguments of the model that a TOML names, by name."""
    name, flavour = settings.get("model.name", "llama3"), settings.get("model.flavor", "debugmodel")
    module = settings.get("experimental.custom_import")
    if isinstance(name, str) and name in FLAVOURS:
        return model_flavour_arguments(name, str(flavour), str(file))
    if not isinstance(module, str) or not module:
        raise SpecError(
            f"{file}: model.name ({name}) is none of torchtitan's models that mofa knows ({', '.join(FLAVOURS)}); name "
            "its module by experimental.custom_import"
        )
    place = file.parent.joinpath(*module.split(".")).with_suffix(".py")
    return model_arguments_of_module(place, str(flavour))


def model_arguments_of_module(place: Path, flavour: str) -> dict[str, Any]:
    """Arguments that a Python module gives a model, under the name of the flavour where it has several.

    Raises
    ------
    SpecError
        If it has none, or Python would have to compute them.
    """
    try:
        tree = parse_python(read_limited_text(place))
    except UnreadablePythonError as error:
        raise SpecError(f"{place}: {error}; name a module of Python") from None
    classes = {kind: name for name, kind in ARGUMENT_CLASSES.items()}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and called_function_name(node) in classes]
    named = {
        key.value: value
        for node in ast.walk(tree) if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and value in calls
    }  # fmt: skip
    call = named.get(flavour) or (calls[0] if len(calls) == 1 else None)
    if not isinstance(call, ast.Call):
        raise SpecError(f"{place}: has no model arguments under {flavour!r}; write {', '.join(classes)}")
    names = assigned_values(tree)
    name = classes[called_function_name(call)]
    values: dict[str, Any] = {"model": name, **model_class_defaults(name)}
    for key, value in keyword_arguments(call, names).items():
        if isinstance(value, ast.Call):
            values |= {f"{key}.{inner}": v for inner, v in keyword_arguments(value, names).items()}
        else:
            values[key] = value
    for key, value in values.items():
        argument = TORCHTITAN.arguments.get(f"args.{key}")
        if argument is not None:
            checked_setting(argument, value, str(place))
    return values
