"""Reports without the work of drawing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def figures_undrawn() -> Iterator[None]:
    """Figures are made and have their files, into which nothing is drawn: that is half of the time of a report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **_: file.write(b"not drawn"))
        yield
