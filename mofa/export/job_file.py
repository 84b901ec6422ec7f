"""What the file of a job says, put together as what mofa estimates: a workload, a framework and a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mofa.export.arguments import ArgumentTable, GivenArguments
from mofa.specs.base import Fact
from mofa.specs.files import MAX_FILE_BYTES
from mofa.specs.framework import FrameworkSpec
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.hardware import ClusterSpec
from mofa.specs.limited_reads import read_bytes
from mofa.specs.load import load_framework
from mofa.specs.workload import WorkloadSpec

MAX_LOG_BYTES = 2**26
"""Largest log that is read. [B]"""


@dataclass(frozen=True)
class JobOfFile:
    """What a job's file says.

    Attributes
    ----------
    workload, framework
        The training job and how it is trained.
    strategy
        Fields of the strategy by name; dp follows from the GPUs.
    num_gpus
        GPUs of its launch; None where the file does not say. [-]
    nvls
        Whether NCCL may reduce in the NVLink switch.
    notes
        What of it is predicted otherwise than it says, and which arguments were not read.
    """

    workload: WorkloadSpec
    framework: FrameworkSpec
    strategy: Mapping[str, object]
    num_gpus: int | None
    nvls: bool
    notes: tuple[str, ...]

    def cluster_as_job_uses_it(self, cluster: ClusterSpec) -> ClusterSpec:
        """The cluster as the job uses it: without reductions in the NVLink switch where it switches them off."""
        if self.nvls:
            return cluster
        factor = Fact(value=1.0, provenance="read", source="NCCL_NVLS_ENABLE=0 in the job's file")
        return cluster.model_copy(update={"node": cluster.node.model_copy(update={"nvls_factor": factor})})


def read_limited_text(file: Path, limit: int = MAX_FILE_BYTES) -> str:
    """The text of a file, not larger than a limit.

    Raises
    ------
    SpecError
        If it is larger, or cannot be read.
    """
    return read_bytes(file, str(file), limit, "cut it down").decode("utf-8", errors="replace")


def job_from_arguments(
    table: ArgumentTable, given: GivenArguments, file: Path, unread: tuple[str, ...], what: str
) -> JobOfFile:
    """What the arguments of a job say, put together.

    Parameters
    ----------
    table
        Of the framework.
    given
        Its arguments.
    file
        Where they are from.
    unread
        Arguments that say nothing about the step or its memory that mofa reads.
    what
        The job in words, as the source of its facts.
    """
    fields = table.read_fields(given)
    nvls = bool(fields.pop("nvls", True))
    parts: dict[str, dict[str, Any]] = {"strategy": {}, "framework": {}}
    workload: dict[str, Any] = {"name": file.stem, "source": what}
    for path, value in fields.items():
        first, _, rest = path.partition(".")
        if first in parts:
            parts[first][rest] = value
        else:
            _put(workload, path, value)
    workload["model"] |= {"name": file.stem, "source": what}
    workload.setdefault("framework", table.framework)
    where = str(file)
    options = {"name": parts["framework"].pop("name", table.framework), **parts["framework"]}
    framework = load_framework(options, where=where)
    notes = [f"read from {file.name}: {difference}" for difference in
             table.differences_from_assumptions(given, "moe" in workload["model"])]  # fmt: skip
    if unread:
        notes.append(f"read from {file.name}, without: {', '.join(unread)}")
    spec = spec_from_mapping(WorkloadSpec, workload, where)
    return JobOfFile(spec, framework, parts["strategy"], given.num_gpus, nvls, tuple(notes))


def _put(nested: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        nested = nested.setdefault(key, {})
    nested[last] = value
