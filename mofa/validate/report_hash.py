"""What a report of the accuracy rests on, as a hash, so that a test can tell when it is stale."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mofa.calibrate.shapes.chunked import FAMILY
from mofa.validate.all_runs import layer_measurement_folders, reference_dir


def inputs_hash(references: Path | None = None) -> str:
    """A hash of all reference runs and measured layers.

    What the predictions rest on besides, the code and the profiles, changes more often; whether it still gives the
    numbers of the report is for a few runs predicted anew to say.
    """
    folder = reference_dir(references)
    digest = hashlib.sha256()
    for kind in ("measured", "exported", "drawn", "published"):
        for path in sorted((folder / kind).rglob("*")):
            if path.is_file() and path.suffix in (".yaml", ".csv"):
                digest.update(path.relative_to(folder).as_posix().encode())
                digest.update(path.read_bytes())
    for measured in layer_measurement_folders(folder):
        digest.update(measured.name.encode())
        digest.update((measured / f"{FAMILY}.csv").read_bytes())
    return digest.hexdigest()[:16]
