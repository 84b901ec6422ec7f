"""How the tests run, whichever they are.

``--fast`` leaves out the tests that tests/slow.txt names. ``--write-slow``, in one process (``-n0``), writes that file
by a whole run; with ``--fast`` it adds what is slow without the tests before it, whose results it used. Slow is meant
in CPU seconds, those of commands that a test starts counted, so that a loaded machine makes no other list.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.doctest import DoctestModule

LONGEST = ("tests/replay/test_agreement.py", "tests/replay/memory/test_rank_memory.py",
           "tests/search/long_run/test_goodput.py", "tests/cli/test_commands.py",
           "tests/search/test_costing.py", "tests/search/test_entry_points.py",
           "tests/search/test_branch_and_bound.py", "tests/search/fewer_gpus/test_fewer_gpus.py",
           "tests/cost/test_estimate.py", "tests/calibrate/test_profile.py",
           "tests/search/experts/test_micromoe_paper.py")  # fmt: skip
"""Files whose tests take longest: they begin first, so that no process is left with a long one at the end."""
TOGETHER = (
    ("tests/calibrate/test_profile.py", "tests/calibrate/test_te_host_facts.py", "tests/cli/test_calibrate.py"),
    ("tests/test_house.py", "tests/test_imports.py", "tests/test_traits.py"),
    ("tests/search/test_costing.py", "tests/search/test_entry_points.py"),
    ("tests/cli/test_measure.py", "tests/measure/test_measure.py", "tests/measure/test_records.py",
     "tests/validate/test_accuracy.py", "tests/validate/test_hosts.py", "tests/specs/test_residuals.py",
     "tests/report/test_docs.py"),
)  # fmt: skip
"""Files that use the same results, which one process works out once: fits, trees of all modules, toy searches,
records of runs."""
MEASUREMENTS = Path(__file__).parents[1] / "measurements"
SLOW = Path(__file__).with_name("slow.txt")
SLOW_S = 0.08
"""A test function is slow where it computes longer with any of its parameters, or one of its fixtures does. [s]"""
MANY_BLOCKS = 8_000_000
"""Of Python's memory, some 600 MB; looking for cycles costs a second. [-]"""
_num_blocks = 0
"""How many there were after the last look for cycles. [-]"""
_took_s: dict[str, float] = {}
"""CPU seconds of each test."""
_fitted: dict[Path, tuple[list[Any], Any]] = {}
"""Rows and curves of the folders of measurements that were fitted."""
_slow_fixtures: set[tuple[str, str]] = set()
"""Files and names."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The two options."""
    parser.addoption("--fast", action="store_true", help=f"leave out the tests that tests/{SLOW.name} names")
    parser.addoption("--write-slow", action="store_true", help=f"write tests/{SLOW.name} by what this run takes")


def pytest_configure() -> None:
    """Take away the width that the workers of a session are told, which tables honour.

    Bytecode is written even where the environment says otherwise: each worker would compile all tests anew, and each
    of some hundred commands that tests start all of mofa. What is collected stays: the collector of cycles looks at
    none of it meanwhile.
    """
    os.environ.pop("COLUMNS", None)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    gc.disable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first, all else in its order."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
    if config.getoption("--fast"):
        slow = set(SLOW.read_text(encoding="utf-8").splitlines())
        left = [item for item in items if _function(item.nodeid) in slow]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if _function(item.nodeid) not in slow]


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, Any, Any]:
    """Look for examples in docstrings of those test files alone that have any; looking takes as long as the tests."""
    collectors = yield
    return [item for item in collectors if not isinstance(item, DoctestModule) or b">>> " in file_path.read_bytes()]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a file's tests to one process, and those of :data:`TOGETHER`: what they share is worked out once."""
    from xdist.scheduler import LoadFileScheduling

    class BySharedWork(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((files[0] for files in TOGETHER if file in files), file)

    config.option.loadscopereorder = False
    return BySharedWork(config, log)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the collector of cycles need not look at them again and again, as freezing
    makes them old at once.

    Nothing stays frozen: :func:`mofa.replay.garbage_collection.without_garbage_collection` would count it each time,
    0.04 s, and would leave to the collector as young what it else calls old.
    """
    gc.freeze()
    gc.unfreeze()
    gc.set_threshold(100_000, 20, 1_000_000)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Note what each test takes; look for old cycles between tests alone, once there are many more objects."""
    global _num_blocks
    begun_s = _cpu_s()
    try:
        return (yield)
    finally:
        _took_s[item.nodeid] = _cpu_s() - begun_s
        if _took_s[item.nodeid] > SLOW_S and sys.getallocatedblocks() > _num_blocks + MANY_BLOCKS:
            gc.collect()
            _num_blocks = sys.getallocatedblocks()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    """Note which fixtures are slow: whichever test is the first to ask for one takes as long."""
    begun_s = _cpu_s()
    try:
        return (yield)
    finally:
        if _cpu_s() - begun_s > SLOW_S:
            _slow_fixtures.add((fixturedef.baseid, fixturedef.argname))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write which functions are slow, where that is asked for; a fast run leaves the last look for cycles, in which
    exceptions may go unraised, to whole ones."""
    if session.config.getoption("--fast"):
        gc.freeze()
    if session.config.getoption("--write-slow"):
        slow = {_function(name) for name, seconds in _took_s.items() if seconds > SLOW_S}
        for item in session.items:
            if any((item.nodeid.split("::")[0], name) in _slow_fixtures for name in getattr(item, "fixturenames", ())):
                slow.add(_function(item.nodeid))
        if session.config.getoption("--fast"):
            slow |= set(SLOW.read_text(encoding="utf-8").splitlines())
        SLOW.write_text("".join(f"{name}\n" for name in sorted(slow)), encoding="utf-8")


@pytest.fixture
def undrawn() -> Iterator[None]:
    """Reports of the test draw nothing into the files of their figures, which other tests draw."""
    from tests.report.undrawn import figures_undrawn

    with figures_undrawn():
        yield


@pytest.fixture(scope="module")
def committed_folders_fitted_once() -> Iterator[None]:
    """Fit each folder of measurements/ once for all tests: none changes them, and a fit takes seconds."""
    from mofa.calibrate import check
    from mofa.calibrate.fits import profile

    fit_folder = check.rows_and_curve_fits_of_folder

    def known(folder: Path) -> tuple[list[Any], Any]:
        if folder.parent != MEASUREMENTS:
            return fit_folder(folder)
        if folder not in _fitted:
            _fitted[folder] = fit_folder(folder)
        rows, curves = _fitted[folder]
        return list(rows), curves

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "rows_and_curve_fits_of_folder", known)
        patch.setattr(profile, "rows_and_curve_fits_of_folder", known)
        yield


@pytest.fixture(scope="module")
def committed_records_read_once() -> Iterator[None]:
    """Read each committed record of a measured run once for all tests, also by the functions under test."""
    from mofa.measure import records
    from mofa.validate import reference
    from tests.committed import MEASURED, measured_record

    read_record = records.read_record

    def known(path: Path) -> Any:
        return measured_record(path.stem) if path.parent == MEASURED else read_record(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "read_record", known)
        patch.setattr(reference, "read_record", known)
        yield


def _cpu_s() -> float:
    """What this process and those that it waited for have computed. [s]"""
    return sum(os.times()[:4])


def _function(name: str) -> str:
    """A test's name without its parameters."""
    return name.partition("[")[0]
