"""Plans as jobs that frameworks run, and jobs of frameworks as strategies.

The package can be called: ``mofa.export(...)`` is :func:`mofa.export.entry.export`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableRoom(ModuleType):
    """This package, whose name is the name of its one public function too."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Export a plan; see :func:`mofa.export.entry.export`."""
        from mofa.export.entry import export

        return export(*args, **options)


sys.modules[__name__].__class__ = _CallableRoom
