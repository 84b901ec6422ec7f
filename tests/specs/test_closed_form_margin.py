"""What a closed form leaves free of reserved memory follows from how far replays go beyond it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("made_residuals", ROOT / "scripts" / "closed_form_residuals.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.path.copy()
    spec.loader.exec_module(module)  # it looks for the benchmarks beside it
    sys.path[:] = before
    return module


def test_false_fits_are_as_rare_as_said(script: ModuleType) -> None:
    """Jobs spread evenly around their limit, of which a tenth reserve up to 30 % more: with the share that is left free
    one in 10,000 fits wrongly."""
    random = np.random.default_rng(3)
    needs = random.uniform(0.5, 1.5, 400_000)
    more = random.uniform(0.0, 0.3, len(needs)) * (random.random(len(needs)) < 0.1)
    free = script.share_to_leave_free(more, more, script.density_at_limit(needs))
    wrong = (needs * (1.0 + free) <= 1.0) & (needs * (1.0 + more) > 1.0)
    assert 0.1 < free < 0.3
    assert 0.4 < float(np.mean(wrong)) / script.MOST_FALSE_FITS <= 1.1  # (x - m) is a little more than its logarithm


def test_few_jobs_leave_more_free(script: ModuleType) -> None:
    """A group of 5 jobs that reserve nothing more than others that do; of 5,000 the others hardly count."""
    pooled = np.append(np.zeros(95), np.full(5, 0.3))
    few, many = (script.share_to_leave_free(np.zeros(number), pooled, 0.3) for number in (5, 5000))
    assert many < 0.1 < few < 0.3
