"""Jobs on torchtitan read: a TOML with its model's module, or a Python config."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mofa.errors import SpecError
from mofa.export.arguments import Argument, Given
from mofa.export.job_file import ReadJob, assemble, text_of
from mofa.export.launch_words import environment_of, gpus_of_launch
from mofa.export.shell import UNKNOWN, ShellError, read_script
from mofa.export.torchtitan.flavours import FLAVOURS
from mofa.export.torchtitan.job_settings import gpus_of
from mofa.export.torchtitan.model_settings import DEEPSEEK
from mofa.export.torchtitan.python_calls import (
    NotLiteral,
    PythonError,
    assignments,
    called_name,
    keywords,
    parse_python,
)  # fmt: skip
from mofa.export.torchtitan.toml_files import ARGUMENT_CLASSES
from mofa.export.torchtitan.torchtitan_table import TORCHTITAN
from mofa.specs.files import did_you_mean

MAX_SCRIPTS = 20
"""Shell scripts beside a TOML that are looked at for the one that starts it. [-]"""


def read_torchtitan(file: Path, num_gpus: int | None) -> ReadJob:
    """The job of a TOML or of a Python config.

    Raises
    ------
    SpecError
        If it cannot be read, or says something that matters and is not modelled.
    """
    if file.suffix == ".py":
        raise SpecError(f"{file}: Python configs are not read yet; name a TOML")
    try:
        raw = tomllib.loads(text_of(file))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SpecError(f"{file}: is no TOML ({error}); name a torchtitan config") from None
    settings = _flat(raw)
    values = _typed_settings(settings, str(file))
    values |= {f"args.{name}": value for name, value in _model(settings, file).items()}
    launched, environment = _launch(file)
    values |= environment
    known = {*TORCHTITAN.arguments, *TORCHTITAN.unmodelled}
    unread = tuple(name for name in settings if name not in known and not name.startswith(_OF_MODEL))
    return read_given(values, file, unread, num_gpus if num_gpus is not None else launched)


def read_given(values: Mapping[str, Any], file: Path, unread: tuple[str, ...], num_gpus: int | None) -> ReadJob:
    """The job of typed settings."""
    given = Given(values, TORCHTITAN, str(file), num_gpus)
    if num_gpus is None:
        given.num_gpus = gpus_of(given)
    return assemble(TORCHTITAN, given, file, unread, f"torchtitan's settings in {file.name}")


_OF_MODEL = ("model.name", "model.flavor", "experimental.custom_import")


def _flat(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings as ``section.name``."""
    out: dict[str, Any] = {}
    for name, value in raw.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return out


def _typed_settings(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings that the table has, of their types, and those that matter and are not modelled."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        argument = TORCHTITAN.arguments.get(name)
        if argument is not None:
            values[name] = typed(argument, value, where)
        elif name in TORCHTITAN.unmodelled:
            values[name] = value
    return values


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "flag": (bool,), "off": (bool,), "texts": (list,),
}  # fmt: skip


def typed(argument: Argument, value: Any, where: str) -> Any:
    """A value of a setting's type.

    Raises
    ------
    SpecError
        If it is of another, or Python would have to compute it.
    """
    if isinstance(value, NotLiteral):
        raise SpecError(f"{where}: {argument.name} ({value}) would have to be computed; write its value")
    wanted = _TYPES.get(argument.kind)
    is_truth = isinstance(value, bool) and bool not in (wanted or ())
    if value is not None and wanted is not None and (not isinstance(value, wanted) or is_truth):
        raise SpecError(f"{where}: {argument.name} ({str(value)[:40]}) is of the wrong type; write {argument.kind}")
    return value


# --- the model


def _model(settings: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Arguments of the model that a TOML names, by name."""
    name, flavour = settings.get("model.name", "llama3"), settings.get("model.flavor", "debugmodel")
    module = settings.get("experimental.custom_import")
    if name in FLAVOURS:
        return flavour_arguments(str(name), str(flavour), str(file))
    if not isinstance(module, str) or not module:
        raise SpecError(
            f"{file}: model.name ({name}) is none of torchtitan's models that mofa knows ({', '.join(FLAVOURS)}); name "
            "its module by experimental.custom_import"
        )
    place = file.parent.joinpath(*module.split(".")).with_suffix(".py")
    return module_arguments(place, str(flavour))


def flavour_arguments(name: str, flavour: str, where: str) -> dict[str, Any]:
    """Arguments of one of torchtitan's own models.

    Raises
    ------
    SpecError
        If there is no such flavour.
    """
    if flavour not in FLAVOURS[name]:
        raise SpecError(f"{where}: model.flavor ({flavour}): {did_you_mean(flavour, FLAVOURS[name])}")
    return {"model": name, **model_defaults(name), **FLAVOURS[name][flavour]}


def model_defaults(name: str) -> dict[str, Any]:
    """Defaults of a model's class where they are not those of the table: models/*/model/args.py."""
    if name == "llama3":
        return {"dim": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 128256}
    if name == DEEPSEEK:
        return {"dim": 2048, "n_layers": 27, "n_heads": 16, "vocab_size": 102400, "moe_inter_dim": 1408}
    return {"dim": 1024, "n_layers": 28, "n_heads": 16, "vocab_size": 151936}


def module_arguments(place: Path, flavour: str) -> dict[str, Any]:
    """Arguments that a Python module gives a model, under the name of the flavour where it has several.

    Raises
    ------
    SpecError
        If it has none, or Python would have to compute them.
    """
    try:
        tree = parse_python(text_of(place))
    except PythonError as error:
        raise SpecError(f"{place}: {error}; name a module of Python") from None
    classes = {kind: name for name, kind in ARGUMENT_CLASSES.items()}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and called_name(node) in classes]
    named = {
        key.value: value
        for node in ast.walk(tree) if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and value in calls
    }  # fmt: skip
    call = named.get(flavour) or (calls[0] if len(calls) == 1 else None)
    if not isinstance(call, ast.Call):
        raise SpecError(f"{place}: has no model arguments under {flavour!r}; write {', '.join(classes)}")
    names = assignments(tree)
    name = classes[called_name(call)]
    values: dict[str, Any] = {"model": name, **model_defaults(name)}
    for key, value in keywords(call, names).items():
        if isinstance(value, ast.Call):
            values |= {f"{key}.{inner}": v for inner, v in keywords(value, names).items()}
        else:
            values[key] = value
    for key, value in values.items():
        argument = TORCHTITAN.arguments.get(f"args.{key}")
        if argument is not None:
            typed(argument, value, str(place))
    return values


# --- the launch


def _launch(file: Path) -> tuple[int | None, dict[str, Any]]:
    """GPUs and environment of the one shell script beside a config that names it; nothing without."""
    scripts = sorted(file.parent.glob("*.sh"))[:MAX_SCRIPTS]
    naming = [script for script in scripts if file.name in text_of(script)]
    if len(naming) != 1:
        return None, {}
    text = text_of(naming[0])
    try:
        script = read_script(text)
        commands = [[text for word in command for text in script.words(word)] for command in script.commands]
        words = next((command for command in commands if any(file.name in word for word in command)), [])
        variables = tuple(argument for argument in TORCHTITAN.arguments.values() if argument.name.startswith("$"))
        environment = environment_of(script, variables)
    except ShellError as error:
        raise SpecError(f"{naming[0]}: {error}") from None
    out: dict[str, Any] = {}
    for argument in variables:
        for name in (argument.name, *argument.aliases):
            value = environment.get(name[1:])
            if value is not None and UNKNOWN in value:
                raise SpecError(f"{naming[0]}: {name[1:]}: {value.replace(UNKNOWN, '')}; write its value")
            if value is not None:
                out[argument.name] = value
    return gpus_of_launch(words, text), out
