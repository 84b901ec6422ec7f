"""How the tests run, whichever they are."""

from __future__ import annotations

import gc

import pytest

LONGEST = ("tests/replay/test_agreement.py", "tests/replay/test_play.py", "tests/search/test_goodput.py",
           "tests/cli/test_commands.py", "tests/search/test_costing.py")  # fmt: skip
"""Files whose tests take longest: they begin first, so that no process is left with a long one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, all else in its order."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the collector of cycles need not look at them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
