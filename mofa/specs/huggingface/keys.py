"""The keys of a ``config.json`` as they are, of whatever class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mofa.specs.bounded import is_folder
from mofa.specs.files import load_json, short
from mofa.specs.huggingface.reader import language_model


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
    where = short(str(file), 200)
    keys, _ = language_model(load_json(file, where), where)
    folder = file.absolute().parent.name
    return keys, folder if file.name == "config.json" and folder else file.stem
