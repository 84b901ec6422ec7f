"""What a plan was made for, in short: the job, the cluster and the framework."""

from __future__ import annotations

from typing import Self

from pydantic import Field

from mofa.specs.base import Provenance, Spec
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.params import num_active_params, num_mtp_params, num_params
from mofa.specs.workload import WorkloadSpec


class WorkloadSummary(Spec):
    """The training job that was planned for."""

    name: str = Field(description="Name of the workload.")
    num_params: int = Field(gt=0, description="Parameters of the model without multi-token prediction. [params]")
    num_active_params: int = Field(
        gt=0, description="Parameters that one token uses: all but the routed experts it is not sent to. [params]"
    )
    num_mtp_params: int = Field(ge=0, description="Parameters of the multi-token-prediction layers. [params]")
    num_layers: int = Field(gt=0, description="Transformer layers. [-]")
    seq_len: int = Field(gt=0, description="Sequence length. [tokens]")
    global_batch: int = Field(gt=0, description="Sequences per optimizer step. [-]")
    tokens: float | None = Field(default=None, description="Tokens to train on; null where not given. [tokens]")
    gemm_format: str = Field(description="Number format of the matrix products.")
    moments_format: str = Field(description="Number format of the optimizer's moments.")
    routing: str = Field(description="Distribution of tokens over experts.")

    @classmethod
    def from_spec(cls, workload: WorkloadSpec) -> Self:
        """The summary of a workload.

        Parameters
        ----------
        workload
            The job.

        Returns
        -------
        WorkloadSummary
            Its sizes and formats.

        Examples
        --------
        >>> import mofa
        >>> WorkloadSummary.from_spec(mofa.load_workload("llama3-8b")).num_layers
        32
        """
        return cls(
            name=workload.name,
            num_params=num_params(workload.model),
            num_active_params=num_active_params(workload.model),
            num_mtp_params=num_mtp_params(workload.model),
            num_layers=workload.model.num_layers,
            seq_len=workload.batch.seq_len,
            global_batch=workload.batch.global_batch,
            tokens=workload.tokens,
            gemm_format=workload.precision.gemm,
            moments_format=workload.precision.moments,
            routing=workload.routing.kind,
        )


class ClusterSummary(Spec):
    """The cluster that was planned for."""

    name: str = Field(description="Name of the cluster or its node type.")
    gpu: str = Field(description="Name of the GPU.")
    num_gpus: int = Field(gt=0, description="GPUs of the cluster. [-]")
    gpus_per_node: int = Field(gt=0, description="GPUs of one node. [-]")
    gpus_per_domain: int = Field(gt=0, description="GPUs of one fast (NVLink) domain. [-]")
    capacity_bytes: float = Field(gt=0, description="Memory that CUDA reports for one GPU. [B]")
    capacity_provenance: Provenance = Field(description="Where capacity_bytes comes from.")

    @classmethod
    def from_spec(cls, cluster: ClusterSpec) -> Self:
        """The summary of a cluster.

        Parameters
        ----------
        cluster
            The machines.

        Returns
        -------
        ClusterSummary
            How many GPUs there are, of what kind and how they are grouped.

        Examples
        --------
        >>> import mofa
        >>> ClusterSummary.from_spec(mofa.load_cluster("h100-hgx", 16)).gpus_per_node
        8
        """
        capacity = cluster.gpu.capacity_bytes
        return cls(
            name=cluster.name,
            gpu=cluster.gpu.name,
            num_gpus=cluster.num_gpus,
            gpus_per_node=cluster.node.gpus_per_node,
            gpus_per_domain=cluster.node.gpus_per_domain,
            capacity_bytes=capacity.value,
            capacity_provenance=capacity.provenance,
        )


class FrameworkSummary(Spec):
    """The training framework that was planned for."""

    name: str = Field(description="Name of the framework.")
    version: str = Field(description="Version that its facts describe.")
    compile: bool = Field(description="Whether blocks are compiled.")
    allocator: str = Field(description="Memory allocator: native or expandable segments.")
    dispatcher: str = Field(description="How tokens are sent to experts.")
    experts: str = Field(description="grouped matrix products of all local experts, or sequential ones.")
    routed_copies: str = Field(description="Whether experts read copies of their tokens or gather them by index.")
    attention: str = Field(description="Attention kernels.")
    data_parallel: str = Field(description="distributed-optimizer, fsdp, hsdp (in replicas) or ddp.")
    dp_replicate: int = Field(ge=1, description="Replicas of a shard group under hsdp; 1 otherwise. [-]")
    optimizer: str = Field(description="Optimizer kernels: fused, foreach, te (Transformer Engine's) or for-loop.")
    provenance: Provenance = Field(description="read from its source, or measured: shown by a run.")
    source: str = Field(description="Where its facts come from.")

    @classmethod
    def from_spec(cls, framework: FrameworkSpec) -> Self:
        """The summary of a framework.

        Parameters
        ----------
        framework
            The framework.

        Returns
        -------
        FrameworkSummary
            The options that its predictions rest on.

        Examples
        --------
        >>> import mofa
        >>> FrameworkSummary.from_spec(mofa.load_framework("torchtitan")).name
        'torchtitan'
        """
        facts = {name: getattr(framework, name) for name in cls.model_fields}
        if framework.dp_replicate > 1:
            facts["data_parallel"] = "hsdp"
        return cls(**facts)
