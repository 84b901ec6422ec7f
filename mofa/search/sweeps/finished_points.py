"""Points that are finished, a file each: a run that was killed goes on from them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from mofa.search.sweeps.plan_point import Result
from mofa.specs.write_files import make_directory, write_file_atomically

MOST_BYTES = 2**20
"""Of a point's file; they have some 5 kB. [B]"""


class FinishedPoints:
    """The folder of finished points: each is written whole or not at all, under its key.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     FinishedPoints(Path(folder)).add("ab12", {"status": "planned", "final": True})
    ...     FinishedPoints(Path(folder)).read(["ab12", "cd34"])
    {'ab12': {'status': 'planned', 'final': True}}
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is not None:
            make_directory(folder)

    def read(self, keys: Iterable[str]) -> dict[str, Result]:
        """The results that are there, by key; what cannot be read is computed again."""
        results: dict[str, Result] = {}
        for key in keys:
            if self.folder is None:
                break
            try:
                path = self.folder / f"{key}.json"
                if path.stat().st_size > MOST_BYTES:
                    continue
                result = json.loads(path.read_bytes())
            except (OSError, ValueError):
                continue
            if isinstance(result, dict) and isinstance(result.get("status"), str) and result.get("final") is True:
                results[key] = result
        return results

    def add(self, key: str, result: Result) -> None:
        """Write a result, unless the next run should try its point again."""
        if self.folder is not None and result["final"]:
            write_file_atomically(self.folder / f"{key}.json", json.dumps(result).encode())
