"""What computes, as a digest: points of other code are not reused, and workers with other code are refused."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from mofa.specs.files import data_dir

SHOWS = ("cli", "report", "export")
"""Rooms that show what was computed: they may change."""


@lru_cache(maxsize=1)
def digest_of_code() -> str:
    """A digest of mofa's code and of the facts that no point names, such as what residuals were measured."""
    package = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    files = sorted(path for suffix in ("py", "c") for path in package.rglob(f"*.{suffix}"))
    for path in (*files, *sorted(data_dir("hardware_profiles").glob("*.yaml"))):
        if path.is_relative_to(package) and path.relative_to(package).parts[0] in SHOWS:
            continue
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
