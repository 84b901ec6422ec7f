"""The job that a server is about, and what a question makes of it: machines, constraints, the command that says it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mofa.search.space import default_space
from mofa.serve.question import DEGREES, Question
from mofa.specs.framework import FrameworkSpec
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.hardware import ClusterSpec
from mofa.specs.memory_limit import with_memory_limit
from mofa.specs.workload import WorkloadSpec


@dataclass(frozen=True)
class ServedJob:
    """A training job, one node of its machines, and what of the search is as it was when the server began."""

    workload: WorkloadSpec
    cluster: ClusterSpec
    framework: FrameworkSpec
    constraints: Mapping[str, Any] = field(default_factory=dict)
    """``fix``, ``maximum``, ``with_`` and ``without`` of :func:`mofa.find_plans`, degrees that have a slider aside."""
    words: tuple[str, ...] = ()
    """The workload and the cluster as ``mofa report`` reads them, with the size of the job where it was given."""
    options: tuple[str, ...] = ()
    """Options of ``mofa report`` besides, without what sliders say."""
    given: frozenset[str] = frozenset()
    """Settings that options gave, as ``defaults`` of a result names them."""
    refine_seconds: float = 0.0
    """How long layouts are searched behind the answer. [s]"""
    jobs: int = 1
    """Processes that search and play behind the answer. [-]"""

    def cluster_of_question(self, question: Question) -> ClusterSpec:
        """The GPUs that are asked about.

        Raises
        ------
        SpecError
            If they are not whole nodes, or the limit is more than a GPU has.
        """
        raw = {**dict(self.cluster), "num_gpus": question.gpus}
        cluster = spec_from_mapping(ClusterSpec, raw, "request")
        text = None if question.memory_gb is None else memory_text(question.memory_gb)
        return with_memory_limit(cluster, text, "memory_gb")

    def search_options(self, question: Question) -> dict[str, Any]:
        """Arguments of :func:`mofa.find_plans`: what was chosen, and what is held, is fixed."""
        chosen = {**question.anchor.given_degrees(), **question.degrees.given_degrees()}
        fix = {**self.constraints.get("fix", {}), **chosen}
        return {**self.constraints, "fix": fix, "framework": self.framework}

    def report_command(self, question: Question) -> str:
        """The command that writes the same report."""
        words = ["mofa", "report", *self.words, *self.options, "--gpus", str(question.gpus)]
        for name, value in question.degrees.given_degrees().items():
            words += ["--fix", f"{name}={value}"]
        if question.memory_gb is not None:
            words += ["--memory-limit", memory_text(question.memory_gb)]
        return shlex.join([*words, "--refine-seconds", f"{self.refine_seconds:g}", "--out", "report"])

    def degree_choices(self, cluster: ClusterSpec) -> dict[str, tuple[int, ...]]:
        """What each degree may be on so many GPUs; a search leaves out what is not legal together."""
        space = default_space(self.workload, cluster, self.framework)
        bounds: Mapping[str, int] = self.constraints.get("maximum", {})
        left_out = self.constraints.get("without", ())
        values: dict[str, tuple[int, ...]] = {}
        for name in DEGREES:
            legal = (1,) if name in left_out else getattr(space, name)
            values[name] = tuple(value for value in legal if 0 < value <= bounds.get(name, value))
        return values

    def of_workload(self, workload: WorkloadSpec, words: tuple[str, ...]) -> ServedJob:
        """This served job with another workload, on the same machines with the same options."""
        return replace(self, workload=workload, words=words)


def memory_text(memory_gb: float) -> str:
    """A limit as ``--memory-limit`` reads it.

    >>> memory_text(70.0), memory_text(67.5)
    ('70GB', '67.5GB')
    """
    return f"{memory_gb:.12g}GB"
