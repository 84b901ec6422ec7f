"""What the readers of torchtitan's TOML and of its Python config share: types of settings, sizes of models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mofa.errors import SpecError
from mofa.export.arguments import Argument, ArgumentTable, GivenArguments
from mofa.export.job_file import JobOfFile, job_from_arguments
from mofa.export.torchtitan.flavours import FLAVOURS
from mofa.export.torchtitan.job_settings import num_gpus_of_degrees
from mofa.export.torchtitan.model_settings import DEEPSEEK, LLAMA3
from mofa.export.torchtitan.python_calls import NotLiteralError
from mofa.specs.files import did_you_mean

_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "flag": (bool,), "off": (bool,), "texts": (list,),
}  # fmt: skip


def checked_setting(argument: Argument, value: Any, where: str) -> Any:
    """A value, refused unless it is of its setting's type.

    Raises
    ------
    SpecError
        If it is of another, or Python would have to compute it.
    """
    if isinstance(value, NotLiteralError):
        raise SpecError(f"{where}: {argument.name} ({value}) would have to be computed; write its value")
    wanted = _TYPES.get(argument.kind)
    is_truth = isinstance(value, bool) and bool not in (wanted or ())
    if value is not None and wanted is not None and (not isinstance(value, wanted) or is_truth):
        raise SpecError(f"{where}: {argument.name} ({str(value)[:40]}) is of the wrong type; write {argument.kind}")
    return value


def typed_settings(table: ArgumentTable, settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings that a table has, of their types, and those that matter and are not modelled."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        argument = table.arguments.get(name)
        if argument is not None:
            values[name] = checked_setting(argument, value, where)
        elif name in table.unmodelled:
            values[name] = value
    return values


def job_from_settings(
    table: ArgumentTable, values: Mapping[str, Any], file: Path, unread: tuple[str, ...], num_gpus: int | None
) -> JobOfFile:
    """The job of typed settings; GPUs are those of its degrees where nothing else says them."""
    given = GivenArguments(values, table, str(file), num_gpus)
    if num_gpus is None:
        given.num_gpus = num_gpus_of_degrees(given)
    return job_from_arguments(table, given, file, unread, f"torchtitan's settings in {file.name}")


_OF_MODEL = ("model.name", "model.flavor", "experimental.custom_import")


def model_flavour_arguments(name: str, flavour: str, where: str) -> dict[str, Any]:
    """Arguments of one of torchtitan's own models.

    Raises
    ------
    SpecError
        If there is no such flavour.
    """
    if flavour not in FLAVOURS[name]:
        raise SpecError(f"{where}: model.flavor ({flavour}): {did_you_mean(flavour, FLAVOURS[name])}")
    return {"model": name, **model_class_defaults(name), **FLAVOURS[name][flavour]}


def model_class_defaults(name: str) -> dict[str, Any]:
    """Defaults of a model's class where they are not those of the table: models/*/model/args.py."""
    if name == LLAMA3:
        return {"dim": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 128256}
    if name == DEEPSEEK:
        return {"dim": 2048, "n_layers": 27, "n_heads": 16, "vocab_size": 102400, "moe_inter_dim": 1408}
    return {"dim": 1024, "n_layers": 28, "n_heads": 16, "vocab_size": 151936}
