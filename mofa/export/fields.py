"""All fields of a job that an export must say: each has an argument, or is refused, or has a reason for none."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from mofa.specs.framework import FrameworkSpec
from mofa.specs.strategy import StrategySpec
from mofa.specs.workload import WorkloadSpec


def job_field_paths() -> tuple[str, ...]:
    """Dotted paths of every field of the strategy, the framework and the workload, and ``nvls``.

    Examples
    --------
    >>> fields = job_field_paths()
    >>> "strategy.tp" in fields, "model.attention.kv_lora_rank" in fields, "model.attention" in fields
    (True, True, False)
    """
    paths = [f"strategy.{name}" for name in StrategySpec.model_fields]
    paths += [f"framework.{name}" for name in FrameworkSpec.model_fields]
    return tuple(dict.fromkeys([*paths, *_below(WorkloadSpec, ""), "nvls"]))


def _below(spec: type[BaseModel], prefix: str) -> list[str]:
    paths = []
    for name, field in spec.model_fields.items():
        parts = _specs_of(field.annotation)
        paths += [p for part in parts for p in _below(part, f"{prefix}{name}.")] if parts else [f"{prefix}{name}"]
    return paths


def _specs_of(annotation: Any) -> list[type[BaseModel]]:
    """The records that a field may be; none where it is a plain value."""
    if get_origin(annotation) is Annotated:
        return _specs_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [spec for option in get_args(annotation) for spec in _specs_of(option)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []
