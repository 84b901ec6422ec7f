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
    """Base of all errors that mofa raises on purpose.

    Notes
    -----
    The command line prints the message as one line and ends with status 2, or 3 for :class:`NothingFits`.

    Examples
    --------
    >>> import mofa
    >>> try:
    ...     mofa.load_workload("llama3-8c")
    ... except mofa.MofaError as error:
    ...     print(type(error).__name__)
    SpecError
    """


class SpecError(MofaError, ValueError):
    """Something that the user wrote is wrong: a file, a field, an option. Exit status 2.

    Notes
    -----
    It is a ``ValueError`` too. The message begins with where the mistake is.

    Examples
    --------
    >>> import mofa
    >>> try:
    ...     mofa.load_cluster("h100-hgx", 12)
    ... except mofa.SpecError as error:
    ...     print(error)
    nodes/h100-hgx.yaml: gpus (12) is more than one node of 8 GPUs but not whole nodes; use 8 or 16
    """


class StrategyError(SpecError):
    """A strategy that is well formed but that the named framework cannot run. Exit status 2.

    Notes
    -----
    :func:`~mofa.search.one_plan.estimate` raises it for the one strategy it is given. A search counts such
    strategies under ``rejected`` instead.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> try:
    ...     mofa.estimate(job, machines, "tp=3")
    ... except mofa.StrategyError as error:
    ...     print(error)
    strategy: gpus (8) must be a multiple of tp (3) x cp (1) x pp (1) = 3; change one of them
    """


class NothingFits(MofaError):
    """No strategy of the search space fits the cluster. Exit status 3.

    Notes
    -----
    A search does not raise it: its report has no plans, and ``min_gpus`` says how many GPUs would do. What needs a
    plan to go on from raises it, such as :func:`mofa.search.long_run.goodput_by_scale.goodput_by_scale`.

    Examples
    --------
    >>> issubclass(NothingFits, MofaError), issubclass(NothingFits, SpecError)
    (True, False)
    """
