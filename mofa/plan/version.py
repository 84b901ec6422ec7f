"""The version of mofa that a result is of."""

from __future__ import annotations

from functools import lru_cache

FROM_SOURCE = "from source"


@lru_cache(maxsize=1)
def installed_version() -> str:
    """The version that is installed, or that mofa runs from its source.

    Returns
    -------
    str
        Such as ``0.1.0``.

    Examples
    --------
    >>> installed_version() == installed_version() != ""
    True
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("mofa")
    except PackageNotFoundError:
        return FROM_SOURCE
