"""The tree of exceptions that mofa raises on purpose.

::

    MofaError
    ├── SpecError            a file, a field or an option that is wrong (exit status 2)
    │   └── StrategyError    a strategy that the framework cannot run (exit status 2)
    └── NothingFits          no strategy of the space fits (exit status 3)

Every message reads *where: what, with values and units; what to do.*
"""

from __future__ import annotations


class MofaError(Exception):
    """Base of all errors that mofa raises on purpose."""


class SpecError(MofaError, ValueError):
    """Something that the user wrote is wrong: a file, a field, an option."""


class StrategyError(SpecError):
    """A strategy that is well formed but that the named framework cannot run."""


class NothingFits(MofaError):
    """No strategy of the search space fits the cluster."""
