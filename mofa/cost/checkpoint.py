"""Bytes of a checkpoint and the seconds to copy, write, read and send them; how often is for ``mofa.faults`` to say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.cost.optimizer import ParameterShards
from mofa.specs.faults import CheckpointSpec, StorageSpec
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.params import num_mtp_params, num_params
from mofa.specs.workload import WorkloadSpec

ArrayN = NDArray[np.float64]


def checkpoint_bytes_per_param(workload: WorkloadSpec, framework: FrameworkSpec) -> float:
    """Bytes that a checkpoint has for each parameter: weights, main weights and moments; gradients are not kept. [B]

    Megatron saves its bf16 weights (2) beside the optimizer's fp32 ones and two moments (12); torchtitan its weights as
    it holds them, which are the main ones, and two moments: 12 in fp32, 6 where everything is bf16.

    References
    ----------
    MLPerf Storage v2.0, Submission_guidelines.md, table 2: 105 GB, 912 GB and 5.29 TB for 8B, 70B and 405B, 13 bytes a
    parameter.
    """
    num_moments = workload.optimizer.traits.num_moments
    moments_bytes = (2.0 if workload.precision.moments == "bf16" else 4.0) * num_moments
    if not framework.traits.has_pytorch_modules:
        return 2.0 + 4.0 + moments_bytes
    return 2.0 + 2.0 * num_moments if workload.precision.params == "bf16" else 4.0 + moments_bytes


def checkpoint_bytes(workload: WorkloadSpec, framework: FrameworkSpec) -> float:
    """Bytes of one whole checkpoint: every parameter once, prediction layers included. [B]"""
    params = num_params(workload.model) + num_mtp_params(workload.model)
    return params * checkpoint_bytes_per_param(workload, framework)


def checkpoint_bytes_of_rank(workload: WorkloadSpec, framework: FrameworkSpec, shards: ParameterShards) -> ArrayN:
    """Bytes that a rank of the heaviest stage saves. (n,) [B]

    The data-parallel ranks of a stage save a share each, of what they hold whole as well: Megatron's fully parallel
    save, PyTorch's distributed checkpoint.
    """
    return np.asarray(shards.sharded_bytes(checkpoint_bytes_per_param(workload, framework)).max(axis=1))


@dataclass(frozen=True)
class CheckpointTimes:
    """Seconds of one checkpoint of n candidates; arrays (n,) or scalars.

    ``copy_s`` between device and host, ``write_s`` and ``read_s`` to and from storage, ``peer_s`` to other nodes' host
    memory, ``load_s`` from storage to the device. ``host_bytes`` of a node that the mode needs.
    """

    copy_s: ArrayN
    write_s: ArrayN
    read_s: ArrayN
    peer_s: ArrayN
    host_bytes: ArrayN

    @property
    def load_s(self) -> ArrayN:
        """To load a checkpoint: read and copied to the device at once, at the slower rate. [s]"""
        return np.maximum(self.copy_s, self.read_s)

    @property
    def blocking_s(self) -> ArrayN:
        """A checkpoint that everybody waits for: copied and written at once, at the slower rate. [s]"""
        return np.maximum(self.copy_s, self.write_s)

    @property
    def blocking_peer_copy_s(self) -> ArrayN:
        """A copy in other nodes' host memory that everybody waits for, as :attr:`blocking_s`. [s]"""
        return np.maximum(self.copy_s, self.peer_s)


def checkpoint_times(
    per_rank_bytes: ArrayN, total_bytes: float, cluster: ClusterSpec, storage: StorageSpec, spec: CheckpointSpec
) -> CheckpointTimes:
    """Seconds of one checkpoint, each at the slowest of what its bytes pass.

    Parameters
    ----------
    per_rank_bytes
        What a rank of the heaviest stage saves. (n,) [B]
    total_bytes
        The whole checkpoint. [B]
    cluster
        Whose host links and NICs the bytes pass.
    storage
        Its rates are shared by all nodes.
    spec
        Copies and checkpoints under way, for the host memory.

    Notes
    -----
    Copy: a rank's bytes over its host link. Write: the larger of all bytes at the storage's rate and a node's bytes at
    what one node can send. Peers: ``copies - 1`` times a node's bytes over its NICs. Host memory: ``async`` holds the
    checkpoints under way; modes that read it again two, of which one is always whole, with peers also the others'.

    Examples
    --------
    >>> from mofa.specs.load import load_cluster, load_faults
    >>> node, facts = load_cluster("h100-hgx", 16384), load_faults("llama3")
    >>> found = checkpoint_times(np.array([1e9]), 5.29e12, node, facts.storage, facts.checkpoint)
    >>> round(float(found.copy_s[0]), 4), round(float(found.write_s[0]), 3)
    (0.0182, 2.645)
    """
    nic = cluster.node.nic
    per_node = per_rank_bytes * min(cluster.node.gpus_per_node, cluster.num_gpus)
    nics = nic.num_per_node * nic.bandwidth_bytes_per_s.value * nic.efficiency.value
    node = nics if storage.node_bytes_per_s is None else storage.node_bytes_per_s.value
    copies = {
        "async": spec.in_flight,
        "memory": 2,
        "two-level": 2,
        "peer": 2 * spec.copies,
        "three-level": 2 * spec.copies,
    }
    return CheckpointTimes(
        copy_s=per_rank_bytes / cluster.gpu.host_link_bytes_per_s.value,
        write_s=np.maximum(total_bytes / storage.write_bytes_per_s.value, per_node / node),
        read_s=np.maximum(total_bytes / storage.read_bytes_per_s.value, per_node / node),
        peer_s=per_node * (spec.copies - 1) / nics,
        host_bytes=per_node * copies.get(spec.mode, 0),
    )
