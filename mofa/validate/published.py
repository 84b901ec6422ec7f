"""Published runs: what other people measured, as configurations that ``mofa estimate`` can read, with their source.

``reference_runs/published`` holds a YAML file a source and ``unusable.csv`` with the rows that are left out and why;
both are written from the table by :mod:`mofa.validate.published_rows`.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from mofa.errors import SpecError
from mofa.measure.records import Split
from mofa.specs.base import Spec
from mofa.specs.files import load_yaml
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.ranges import MeasuredSeconds
from mofa.specs.run import RunSpec
from mofa.validate.reference import MeasuredOutcome, ReferenceRun, Switch, UnpredictedReferenceRun

UNUSABLE = "unusable.csv"

PublishedBytes = Annotated[float, Field(ge=1.0, le=1e15)]
"""Of a device: a petabyte at most. [B]"""


class PublishedOutcome(Spec):
    """What a published run gave. [s], [B]"""

    step_s: MeasuredSeconds | None = None
    allocated_bytes: PublishedBytes | None = None
    reserved_bytes: PublishedBytes | None = None
    device_bytes: PublishedBytes | None = None
    ranks_allocated_bytes: tuple[PublishedBytes, ...] = ()
    oom: bool = False
    oom_denied_by: str | None = None
    """The row whose reading says that it cannot have gone out of memory by itself."""


class PublishedRun(Spec):
    """One row of a published table."""

    run: RunSpec
    group: str = Field(pattern=r"^published-[a-z0-9-]+$")
    model: str
    measured: PublishedOutcome
    switches: tuple[Switch, ...] = ()
    """Switches of Transformer Engine's runs that nothing was learned from."""
    source: str = Field(min_length=10)
    notes: tuple[str, ...] = ()
    split: Split = "judging"
    """Fitting rows may set the network's global constants and the bands of steps, and nothing else."""


class PublishedFile(Spec):
    """All rows of one source."""

    source: str
    runs: tuple[PublishedRun, ...]


def published_reference_runs(folder: Path) -> tuple[list[ReferenceRun], list[UnpredictedReferenceRun]]:
    """The published runs of a folder, and the rows that a rule left out."""
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise SpecError(f"{folder}: holds no published runs; name a folder of *.yaml files")
    references = []
    for path in files:
        for item in spec_from_mapping(PublishedFile, load_yaml(path), str(path)).runs:
            m = item.measured
            outcome = MeasuredOutcome(
                m.step_s,
                m.allocated_bytes,
                m.reserved_bytes,
                m.device_bytes,
                m.ranks_allocated_bytes,
                m.oom,
                m.oom_denied_by,
            )
            run = item.run
            reference = ReferenceRun(run.id, item.group, item.model, item.source, run, folder, outcome, item.notes)
            references.append(replace(reference, split=item.split, switches=item.switches))
    return references, _left_out(folder / UNUSABLE)


def _left_out(path: Path) -> list[UnpredictedReferenceRun]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            UnpredictedReferenceRun(row["id"], row["group"], row["reason"], row["gpu"]) for row in csv.DictReader(file)
        ]
