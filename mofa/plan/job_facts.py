"""The facts that a result was predicted for, whole: what ``mofa export`` needs beside a plan."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, Self

from pydantic import Field

from mofa.specs.base import Spec
from mofa.specs.framework import FrameworkSpec
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.hardware import ClusterSpec
from mofa.specs.workload import WorkloadSpec


class JobFacts(Spec):
    """The workload and the framework of a result, with all that options changed of them."""

    workload: dict[str, Any] = Field(description="The training job, as a workload's YAML has it.")
    framework: dict[str, Any] = Field(description="The framework's options and facts, as its profile has them.")
    nvls: bool = Field(description="Whether the prediction counts on reductions in the NVLink switch (NVLS).")

    @classmethod
    def from_specs(cls, workload: WorkloadSpec, framework: FrameworkSpec, cluster: ClusterSpec) -> Self:
        """The facts of a job; of a file of routing counts the name alone, as its folder is one machine's.

        Parameters
        ----------
        workload, framework, cluster
            The job, the framework, the machines.

        Returns
        -------
        JobFacts
            What an export needs to write the job down.

        Examples
        --------
        >>> import mofa
        >>> specs = mofa.load_workload("llama3-8b"), mofa.load_framework("megatron"), mofa.load_cluster("h100-hgx", 8)
        >>> JobFacts.from_specs(*specs).workload["model"]["num_layers"]
        32
        """
        raw = workload.model_dump(mode="json", exclude_none=True)
        if workload.routing.file is not None:
            raw["routing"]["file"] = PurePath(workload.routing.file).name
        facts = framework.model_dump(mode="json", exclude_none=True)
        return cls(workload=raw, framework=facts, nvls=cluster.node.nvls_factor.value > 1.0)

    def workload_spec(self) -> WorkloadSpec:
        """The training job.

        Raises
        ------
        SpecError
            If a field is unknown or wrong.
        """
        return spec_from_mapping(WorkloadSpec, self.workload, "job.workload")

    def framework_spec(self) -> FrameworkSpec:
        """The framework.

        Raises
        ------
        SpecError
            If a field is unknown or wrong.
        """
        return spec_from_mapping(FrameworkSpec, self.framework, "job.framework")
