"""Python configs of torchtitan 0.3.0, read by ``ast``: nothing of the file is run."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mofa.errors import SpecError
from mofa.export.job_file import JobOfFile, read_limited_text
from mofa.export.torchtitan.launch_beside import read_launch_script_beside
from mofa.export.torchtitan.model_settings import LLAMA3
from mofa.export.torchtitan.python_calls import (
    NotLiteralError,
    UnreadablePythonError,
    assigned_values,
    called_function_name,
    keyword_arguments,
    literal_value,
    parse_python,
)  # fmt: skip
from mofa.export.torchtitan.python_file import SIZES
from mofa.export.torchtitan.python_table import BACKEND, IMPLEMENTATION, POLICY, TORCHTITAN_PYTHON
from mofa.export.torchtitan.settings import (
    job_from_settings,
    model_class_defaults,
    model_flavour_arguments,
    typed_settings,
)
from mofa.specs.files import shown_value

_SECTIONS = ("training", "parallelism", "compile", "debug")
_CONFIG = "Trainer.Config"


def read_python_config(file: Path, num_gpus: int | None) -> JobOfFile:
    """The job of a Python config of torchtitan 0.3.0.

    Raises
    ------
    SpecError
        If it has no one ``Trainer.Config(...)``, or says something that matters and is not modelled.
    """
    try:
        tree = parse_python(read_limited_text(file))
    except UnreadablePythonError as error:
        raise SpecError(f"{file}: {error}; name a Python config") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and called_function_name(node) == _CONFIG]
    if len(calls) != 1:
        raise SpecError(f"{file}: has {len(calls)} calls of {_CONFIG}; keep the one of the job")
    names = assigned_values(tree)
    settings = _settings(calls[0], names, file) | _set_later(tree, file)
    values = typed_settings(TORCHTITAN_PYTHON, settings, str(file)) | {
        f"args.{name}": value for name, value in _model(tree, names, file).items()
    }
    launched, environment = read_launch_script_beside(file, file.stem)
    known = {*TORCHTITAN_PYTHON.arguments, *TORCHTITAN_PYTHON.unmodelled}
    unread = tuple(name for name in settings if name not in known)
    gpus = num_gpus if num_gpus is not None else launched
    return job_from_settings(TORCHTITAN_PYTHON, values | environment, file, unread, gpus)


def _settings(call: ast.Call, names: Mapping[str, ast.expr], file: Path) -> dict[str, Any]:
    """Settings of the call by name, those of its sections as ``section.name``."""
    out: dict[str, Any] = {}
    for keyword in call.keywords:
        name, node = keyword.arg or "", keyword.value
        if isinstance(node, ast.Name) and node.id in names:
            node = names[node.id]
        if name in _SECTIONS and isinstance(node, ast.Call):
            out |= {f"{name}.{key}": value for key, value in keyword_arguments(node, names).items()}
        elif name == POLICY.name:
            out[name] = "none" if literal_value(node) is None else called_function_name(node)
        elif name == "loss":
            out[name] = called_function_name(node)
        elif name == "optimizer" and isinstance(node, ast.Call):
            out |= _optimizer(node, names, file)
        elif name not in ("model_spec", "compile"):
            out[name] = None
    return out


def _optimizer(call: ast.Call, names: Mapping[str, ast.expr], file: Path) -> dict[str, Any]:
    """The kernels of the optimizer's config."""
    kind, given = called_function_name(call), keyword_arguments(call, names)
    if kind not in ("default_adamw", "OptimizersContainer.Config"):
        raise SpecError(f"{file}: optimizer ({shown_value(kind)}) is not modelled; what is: default_adamw")
    inner = [
        node
        for node in ast.walk(call)
        if isinstance(node, ast.Call) and called_function_name(node) == "ParamGroupConfig"
    ]
    kinds = {keyword_arguments(node, names).get("optimizer_name", "AdamW") for node in inner}
    if others := kinds - {"AdamW"}:
        raise SpecError(f"{file}: optimizer_name ({shown_value(str(others.pop()))}) is not modelled; what is: AdamW")
    return {IMPLEMENTATION.name: given["implementation"]} if "implementation" in given else {}


def _set_later(tree: ast.Module, file: Path) -> dict[str, Any]:
    """Settings that the file gives a value behind the call: ``config.training.steps = 10``."""
    out: dict[str, Any] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
            continue
        path = ast.unparse(node.targets[0])
        parts = path.split(".")
        if parts[-2:] == ["optimizer", "implementation"] or (len(parts) > 2 and parts[-2] in _SECTIONS):
            out[".".join(parts[-2:])] = literal_value(node.value)
    return out


def _model(tree: ast.Module, names: Mapping[str, ast.expr], file: Path) -> dict[str, Any]:
    """Sizes of the model: those that the file names, or of a flavour of torchtitan's registry."""
    if SIZES in names:
        sizes = literal_value(names[SIZES])
        if not isinstance(sizes, dict) or not isinstance(sizes.get("model"), str):
            raise SpecError(f"{file}: {SIZES} is no dictionary with a model; write one as mofa export does")
        flat: dict[str, Any] = {}
        for name, value in sizes.items():
            flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {str(name): value}
        own = {"attn_type": "sdpa", "fuse_qkv": False}
        return {**model_class_defaults(flat["model"]), **own, **flat}
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and called_function_name(node) == "model_registry"
    ]
    if len(calls) != 1 or not calls[0].args:
        raise SpecError(f"{file}: has {len(calls)} calls of model_registry with a flavour; keep the one of the job")
    flavour, given = literal_value(calls[0].args[0], names), keyword_arguments(calls[0], names)
    if isinstance(flavour, NotLiteralError):
        raise SpecError(f"{file}: the flavour ({flavour}) would have to be computed; write it")
    if given.get("converters"):
        raise SpecError(f"{file}: converters of model_registry are not modelled; leave them out")
    arguments = model_flavour_arguments(_module_of(tree, calls[0]), str(flavour), str(file))
    backend = {BACKEND.name.removeprefix("args."): given["moe_comm_backend"]} if "moe_comm_backend" in given else {}
    return {**arguments, **backend, "attn_type": given.get("attn_backend", "flex"), "fuse_qkv": True}


def _module_of(tree: ast.Module, call: ast.Call) -> str:
    """The model whose registry is called, by the import of its name."""
    name = ast.unparse(call.func).split(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            module = (node.module or "").split(".")
            return module[-1] if name == "model_registry" else next(a.name for a in node.names)
    return LLAMA3
