"""The keys of a ``config.json`` as they are, of whatever class, and what a class that is read makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mofa.errors import SpecError
from mofa.specs.files import load_json, shown_value
from mofa.specs.huggingface.reader import language_model_keys, model_from_config
from mofa.specs.limited_reads import is_folder
from mofa.specs.model import ModelSpec


def read_keys(path: str | Path) -> tuple[dict[str, Any], str]:
    """The keys of a file's language model, and what to call the model.

    Parameters
    ----------
    path
        A ``config.json`` or a folder that holds one.

    Raises
    ------
    SpecError
        If there is no such file, or it is no JSON object.
    """
    file = Path(path) / "config.json" if is_folder(Path(path)) else Path(path)
    where = shown_value(str(file), 200)
    keys, _ = language_model_keys(load_json(file, where), where)
    folder = file.absolute().parent.name
    return keys, folder if file.name == "config.json" and folder else file.stem


def model_of_config_class(path: str | Path) -> ModelSpec | None:
    """The model that a file's class makes of its keys; None where mofa does not read it, or not its steps.

    Parameters
    ----------
    path
        As of :func:`read_keys`, which has read it.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    where = shown_value(str(file), 200)
    try:
        model = model_from_config(load_json(file, where), where)
    except SpecError:
        return None
    return model if model.layers is None else None
