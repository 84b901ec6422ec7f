"""What many tests read of the project itself: its modules as trees and its measured runs, each read once a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mofa.measure.records import RunRecord, read_record, record_files

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "reference_runs" / "measured"


def read_yaml(path: Path) -> Any:
    """The values of a YAML file, anew each time: by libyaml where it is there, five times as fast on a profile."""
    return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506


def yaml_text(values: Any) -> str:
    """Values as YAML, likewise."""
    return str(yaml.dump(values, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)))


@cache
def tree_of(name: str) -> ast.Module:
    """A Python file of the project as a tree; nobody changes it."""
    return ast.parse((ROOT / name).read_text(encoding="utf-8"), name)


@cache
def nodes_of(name: str) -> tuple[ast.AST, ...]:
    """All nodes of that tree, in the order of :func:`ast.walk`."""
    return tuple(ast.walk(tree_of(name)))


@cache
def measured_names() -> tuple[str, ...]:
    """Names of the committed records of measured runs, in order."""
    return tuple(path.stem for path in record_files(MEASURED))


@cache
def measured_record(name: str) -> RunRecord:
    """A committed record of a measured run; nobody changes it."""
    return read_record(MEASURED / f"{name}.yaml")


@cache
def measured_records() -> tuple[RunRecord, ...]:
    """All of them, in the order of their names."""
    return tuple(map(measured_record, measured_names()))
