"""Compiles a part in C anew, for tests that hold it to its reference."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def compiled_anew(of: ModuleType, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let a module have the library of today's source, whatever is in place; skips where no compiler is."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert of.SOURCE.relative_to(ROOT) in build.SOURCES
    made = build.compile_in(ROOT, of.SOURCE.relative_to(ROOT), folder / of.LIBRARY.name)
    if made is None:
        pytest.skip("no C compiler")
    patch.setattr(of, "LIBRARY", made)
    of.c_library.cache_clear()
