"""Python's cycle collector, out of the way of what makes no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Without Python's cycle collector, which looks through hundreds of thousands of objects that all stay.

    What was made meanwhile counts as old afterwards: it is looked through when the collector next looks through all.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # nothing is frozen that would be thawed
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextmanager
def collect_garbage_at_end() -> Iterator[None]:
    """Run without garbage collection, and let go what is in cycles at the end: of many predictions, one after the
    other."""
    with without_garbage_collection():
        yield
        gc.collect(0)
