"""Closed forms against the replay: 40 of the strategies of benchmarks/replay_agreement.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module")
def benchmark() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "replay_agreement.py"
    spec = importlib.util.spec_from_file_location("replay_agreement", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["replay_agreement"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_steps_agree(benchmark: Any) -> None:
    """Nine in ten within 3 %, half within 1 %; what is further off are interleaved pipelines of unequal chunks."""
    found = [(case, benchmark.compare(case, memory=False).step) for case in benchmark.cases(40)]
    size = np.abs([step for _, step in found])
    assert (size <= benchmark.TIME_BAR).sum() >= 36
    assert np.median(size) < 0.01
    for case, step in found:
        if abs(step) > benchmark.TIME_BAR:
            assert case.row.vpp[0] > 1, benchmark.describe(case)
            assert abs(step) < 0.15, benchmark.describe(case)
    kinds = {
        name: sum(bool(want(case.job, case.row)[0]) for case, _ in found) for name, want in benchmark.WANTED.items()
    }
    assert min(kinds.values()) >= 4, kinds


def test_memory_agrees(benchmark: Any) -> None:
    """Allocated memory within 2 %, half of it within 0.2 %. Reserved memory is off by what the allocator's holes take,
    which no closed form knows: 4 % on average."""
    found = [(case, benchmark.compare(case)) for case in benchmark.cases(40)]
    allocated, reserved = (np.abs([getattr(a, name) for _, a in found]) for name in ("allocated", "reserved"))
    assert (allocated <= benchmark.MEMORY_BAR).sum() >= 39
    assert np.median(allocated) < 0.002
    assert allocated.max() < 0.03
    assert reserved.mean() < 0.05
    assert reserved.max() < 0.16
