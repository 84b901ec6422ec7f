"""A space that is small enough to search while a page opens, for degrees that a first answer holds."""

from __future__ import annotations

from dataclasses import replace

from mofa.search.job_setup import with_numerics
from mofa.search.space import StrategySpace, default_space
from mofa.serve.served_job import ServedJob
from mofa.specs.hardware import ClusterSpec

CP_TOKENS = 4096
"""Fewest tokens of a sequence on a rank with more context parallelism than none. [tokens]"""
CHUNKS = (1, 4)
"""Chunks of a stage: none, and some with which interleaving shows what it is worth. [-]"""
MICRO_BATCHES = 2
"""How many of the smallest micro-batches. [-]"""


def coarse_space(job: ServedJob, cluster: ClusterSpec) -> StrategySpace:
    """Every tp, pp and ep, and few of what costs time to search.

    The framework's options are as given, experts are not split by tensors, sequences are split where they can be.
    Constraints of the job are not applied: a search does that. On 256 and 2,048 GPUs the degrees that it finds gave
    steps within 7 % of those of all strategies (docs/serve.md).

    Parameters
    ----------
    job
        What the server is about.
    cluster
        The GPUs that are asked about.

    Examples
    --------
    >>> import mofa
    >>> machines = mofa.load_cluster("h100-hgx", 64)
    >>> job = ServedJob(mofa.load_workload("llama3-8b"), machines, mofa.load_framework("megatron"))
    >>> space = coarse_space(job, machines)
    >>> space.cp, space.vpp, space.micro_batch, len(space.options)
    ((1, 2), (1, 4), (1, 2), 1)
    """
    workload, cluster, framework = with_numerics(job.workload, cluster, job.framework, job.constraints.get("with_", ()))
    space = default_space(workload, cluster, framework)
    tokens = workload.batch.seq_len
    return replace(
        space,
        cp=tuple(cp for cp in space.cp if cp == 1 or tokens // cp >= CP_TOKENS),
        vpp=tuple(vpp for vpp in space.vpp if vpp in CHUNKS),
        etp=space.etp[:1],
        micro_batch=space.micro_batch[:MICRO_BATCHES],
        sp=space.sp[:1],
        options=space.options[:1],
    )
