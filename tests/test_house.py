"""The rules of the house, checked over every file that git tracks: see docs/design.md."""

from __future__ import annotations

import ast
import importlib
import pydoc
import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import mofa
from mofa.specs.base import PROVENANCES
from tests.committed import ROOT, nodes_of, read_yaml, tree_of

MAX_LINES = 500
NEEDS_TORCH = ("mofa/calibrate/bench/", "mofa/measure/runners/")
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".csv", ".ipynb", ".sh", ".txt", ".cfg", ""}


@cache
def tracked() -> tuple[str, ...]:
    """Files of the project: those that git tracks, or in a copy without git all but the caches."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    else:
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        hidden = ("__pycache__", "node_modules", "build", "dist")
        names = [
            path.as_posix()
            for path in found
            if not any((p.startswith(".") and p != ".ci") or p in hidden for p in path.parts)
        ]
    return tuple(sorted(names))


def python_files(*folders: str) -> list[str]:
    """Tracked Python files below some folders."""
    return [name for name in tracked() if name.endswith(".py") and name.startswith(folders)]


def test_exported_names_are_sorted_and_documented() -> None:
    assert list(mofa.__all__) == sorted(mofa.__all__)
    for name in mofa.__all__:
        assert (getattr(mofa, name).__doc__ or "").strip(), f"mofa.{name} has no docstring"


def test_help_and_dir_show_every_public_name() -> None:
    """They are imported on first use, and shown before."""
    assert set(mofa.__all__) <= set(dir(mofa))
    shown = pydoc.render_doc(mofa, renderer=pydoc.plaintext)  # type: ignore[attr-defined]
    assert [name for name in mofa.__all__ if not re.search(rf"^    (class )?{name}\b", shown, re.MULTILINE)] == []


def has_all_list(name: str) -> bool:
    """Whether a module says what it offers."""
    return any(
        isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
        for node in tree_of(name).body
    )


def test_all_lists_are_sorted_and_true() -> None:
    for name in python_files("mofa/"):
        if name.startswith(NEEDS_TORCH) or not has_all_list(name):
            continue
        module = importlib.import_module(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        assert list(module.__all__) == sorted(module.__all__), name
        assert [word for word in module.__all__ if not hasattr(module, word)] == [], name


def _public(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Public functions and classes of a module."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node


def test_every_module_and_public_function_has_a_docstring() -> None:
    missing = []
    for name in python_files("mofa/", "benchmarks/", "scripts/"):
        tree = tree_of(name)
        if not ast.get_docstring(tree):
            missing.append(f"{name}: the module")
        missing += [f"{name}: {node.name}" for node in _public(tree.body) if not ast.get_docstring(node)]
    assert missing == []


def test_modules_can_be_read_in_one_sitting() -> None:
    long = {
        name: lines
        for name in python_files("mofa/", "tests/", "benchmarks/", "scripts/")
        if (lines := len((ROOT / name).read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert long == {}


UNSAFE_MODULES = ("pickle", "marshal", "dill", "shelve")


def test_nothing_evaluates_text_or_unpickles() -> None:
    found = []
    for name in python_files("mofa/"):
        for node in nodes_of(name):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                found += [
                    f"{name}:{node.lineno}: {m}" for m in modules if m.split(".")[0] in ("pickle", "marshal", "dill")
                ]
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in ("eval", "exec", "yaml.load", "yaml.unsafe_load", "pd.read_pickle") or (
                    called == "np.load" and "allow_pickle" in ast.unparse(node)
                ):
                    found.append(f"{name}:{node.lineno}: {called}")
    assert found == []


def test_no_utils_module() -> None:
    assert [n for n in tracked() if Path(n).name in ("utils.py", "util.py", "helpers.py", "misc.py")] == []


MACHINE = re.compile(r"(?<![\w.])(/home/[a-z]|/root/|/Users/[A-Za-z]|/work/|/mnt/[a-z]|C:\\Users)")


def test_no_paths_of_a_machine() -> None:
    found = []
    for name in tracked():
        if Path(name).suffix not in TEXT or name == "tests/test_house.py":
            continue
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE.search(line):
                found.append(f"{name}:{number}: {line.strip()[:100]}")
    assert found == []


def _numbers(value: Any, where: str) -> Iterator[str]:
    """Numbers of a hardware profile that do not say where they come from; counts of structure are names, not claims."""
    if isinstance(value, dict):
        if "value" in value or "form" in value:
            if value.get("provenance") not in PROVENANCES or len(str(value.get("source", ""))) < 3:
                yield f"{where}: lacks provenance or source"
            return
        for key, item in value.items():
            yield from _numbers(item, f"{where}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _numbers(item, f"{where}[{i}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if where.rsplit(".", 1)[-1] not in STRUCTURE:
            yield f"{where}: a bare number ({value})"
    elif isinstance(value, str) and re.match(r"^[\d.]+\s*\w*(/s|B|s|W)$", value):
        yield f"{where}: a bare quantity ({value})"


STRUCTURE = ("gpus_per_node", "gpus_per_domain", "num_per_node", "gpus", "runs", "families")
"""What a hardware profile counts rather than claims."""


@pytest.mark.parametrize(
    "name", [n for n in tracked() if n.startswith(("hardware_profiles/", "fault_profiles/")) and n.endswith(".yaml")]
)
def test_every_hardware_number_has_provenance_and_source(name: str) -> None:
    assert list(_numbers(read_yaml(ROOT / name), name)) == []


@pytest.mark.parametrize(
    "name", [n for n in tracked() if n.startswith(("workloads/", "framework_profiles/")) and n.endswith(".yaml")]
)
def test_every_workload_and_framework_has_its_source(name: str) -> None:
    raw = read_yaml(ROOT / name)
    assert len(raw["source"]) > 10
    if name.startswith("framework_profiles/"):
        assert raw["provenance"] in PROVENANCES
    else:
        assert len(raw["model"]["source"]) > 10


def _between(marker: str) -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    inside = text.split(f"<!-- {marker} -->\n")[1].split(f"<!-- /{marker} -->")[0]
    return "\n".join(line for line in inside.splitlines() if not line.startswith("```"))


def test_ci_runs_exactly_the_test_command_of_the_readme() -> None:
    printed = subprocess.run(["bash", str(ROOT / ".ci" / "run"), "--print"], capture_output=True, text=True, check=True)
    assert printed.stdout.rstrip("\n") == _between("test-command")
    assert "pip install -e '.[dev]'" in printed.stdout
    assert printed.stdout.rstrip().endswith("scripts/check")


def test_the_readme_has_one_command_that_plans() -> None:
    command = _between("plan-command")
    assert command.count("\n") == 0
    assert "pip install . && mofa plan deepseek-v3 h800-hgx --gpus 2048" in command


def test_what_readme_and_docs_link_to_exists() -> None:
    broken = []
    for name in tracked():
        if not name.endswith(".md"):
            continue
        for target in re.findall(r"\]\(([^)#\s]+)", (ROOT / name).read_text(encoding="utf-8")):
            if not target.startswith(("http:", "https:")) and not ((ROOT / name).parent / target).exists():
                broken.append(f"{name}: {target}")
    assert broken == []


def test_scripts_are_executable() -> None:
    for name in (".ci/run", "scripts/check"):
        path = ROOT / name
        assert path.stat().st_mode & 0o111, name
        assert path.read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n")


def test_slow_tests_that_are_named_exist() -> None:
    """``scripts/check fast`` leaves them out by name: one that was renamed would come back unseen."""
    for name in (ROOT / "tests" / "slow.txt").read_text(encoding="utf-8").splitlines():
        path, _, function = name.partition("::")
        assert function.rpartition(".")[2] in (ROOT / path).read_text(encoding="utf-8"), name


OWN_WORDS = frozenset(
    [
        "lives",
        "deed",
        "deeds",
        "acts",
        "courses",
        "held",
        "turns",
        "moments",
        "instants",
        "wander",
        "stretch",
        "lingering",
        "put_off",
        "apart",
        "doubt",
        "rounds",
        "repertoire",
    ]
)
"""Names that say nothing to a reader who is new to the code."""
FIELD_WORDS = {"moments": "Adam's moments, and the key of a workload that says their precision"}
"""Words of that list that a field uses itself."""
PLAIN_IN_COMPOUNDS = {
    "held": "who holds what is said beside it, as in held_by_watchdog; held_out is statistics'",
    "rounds": "of a schedule (docs/glossary.md)",
}
"""Words of that list that say something beside others."""
FIELDS_OF_FILES = ("ends_apart",)
"""Keys of profiles that users wrote: they keep their names."""
EMPTY_NAMES = frozenset(["found", "at", "one", "kept", "whole", "mine", "late", "way", "told", "here"])
"""Names of variables that do not say what they hold."""


@cache
def _bound_names(module: str) -> tuple[tuple[int, str], ...]:
    """Every identifier that a module defines, with its line, its own name and its folder's at line 0."""
    path = Path(module)
    return (0, path.stem), (0, path.parent.name), *_bindings(nodes_of(module))


def _bindings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Classes, functions, parameters, variables, attributes, and what imports, handlers and patterns are called."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.lineno, node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.lineno, node.rest


def _words(name: str) -> tuple[str, ...]:
    """The words of an identifier in snake case, camel case or capitals.

    ``_HeldInputs2`` has held, inputs2; ``MAX_APART`` max, apart.
    """
    return tuple(re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name.strip("_")).lower().split("_"))


def _says_nothing(name: str) -> bool:
    """Whether an identifier is or has one of :data:`OWN_WORDS`, or is one of :data:`EMPTY_NAMES`."""
    words, banned = _words(name), OWN_WORDS - set(FIELD_WORDS)
    if len(words) == 1:
        return words[0] in banned | EMPTY_NAMES
    joined = f"_{'_'.join(words)}_"
    return name not in FIELDS_OF_FILES and any(f"_{word}_" in joined for word in banned - set(PLAIN_IN_COMPOUNDS))


def test_identifiers_are_the_fields_or_plain_words() -> None:
    named = [f"{n}:{line}: {name}" for n in python_files("mofa/") for line, name in _bound_names(n)
             if _says_nothing(name)]  # fmt: skip
    assert named == []


@pytest.mark.parametrize(
    "source",
    [
        "held = 1", "def told(): ...", "class Deeds: ...", "class _Found: ...", "LATE = 1", "import numpy as turns",
        "from os import path as whole", "def f(*, doubt): ...", "self.kept = 1", "for mine in (): ...",
        "def put_off_gradients(): ...", "MAX_APART = 1", "closed_form_doubt_bytes = 0", "class PeakInstants: ...",
        "try: ...\nexcept E as found: ...", "match x:\n    case [late, *rest]: ...", "match x:\n    case {**told}: ...",
        "[0 for one in ()]", "(way := 1)", "lambda here: 0",
    ],
)  # fmt: skip
def test_no_spelling_of_such_a_word_passes(source: str) -> None:
    assert any(_says_nothing(name) for _, name in _bindings(ast.walk(ast.parse(source))))


def test_words_that_say_what_they_hold_pass() -> None:
    names = ("held_by_watchdog", "num_rounds", "moments", "HeldInputs", "late_frees", "whole_number", "ends_apart")
    assert [name for name in names if _says_nothing(name)] == []


ONE_MEANING = ("Clock", "Piece", "Plan", "Player", "Script", "ClockInputsOfPlan", "WALKED", "AHEAD")


def test_a_name_stands_for_one_thing() -> None:
    """A class or constant of each of these names is defined once at most."""
    defined = [(name.strip("_"), n) for n in python_files("mofa/") for _, name in _bound_names(n)]
    for word in ONE_MEANING:
        places = [n for name, n in defined if name == word]
        assert len(places) <= 1, (word, places)
