"""Seconds and bytes of the part of an optimizer that hosts hold and step: Megatron's hybrid device optimizer."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mofa.cost.rows import GatheredRows
from mofa.errors import SpecError
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.host import HostIssueTimes
from mofa.specs.optimizer_offload import ADAM_MOVED_BYTES, COPIED_BYTES, HostOptimizerRates
from mofa.specs.params import num_mtp_params, num_params
from mofa.specs.workload import WorkloadSpec
from mofa.units import format_bytes

ArrayN = NDArray[np.float64]
LOOPS = 10.0
"""Over the tensors that hosts step, of Python without a kernel, besides those of every optimizer (``step``,
``_sync_hdo_param_groups_to_sub_optimizers``, ``_sync_sub_optimizers_state_to_hdo``). [-]"""
HELD_BYTES = 16.0
"""Of a parameter on its host in fp32: the main copy, two moments, a pinned gradient. [B/param]"""


def params_stepped_on_hosts(rows: GatheredRows) -> ArrayN:
    """Parameters of a rank that its host steps, of each grid of ranks. (g, R) [params]

    Tensors go to hosts whole, until the share is reached: the head's first, then layers' from the last to the first,
    the embedding's last. Within the layers half a tensor is too much on average. Of ranks that share their states each
    owns pieces of the tensors, and the slowest counts: one that owns a single piece steps all that it owns.
    """
    weights, k, shards = rows.costs.weights, rows.k[rows.first_row_of_grid], rows.shards
    num_kinds = len(weights.layers)

    def largest(is_meant: NDArray[np.bool_]) -> ArrayN:
        sizes = weights.params_of_each_weight[is_meant][:, k]
        return sizes.max(axis=0)[:, None] if len(sizes) else np.zeros((len(k), 1))

    layer = largest(weights.block_of_each_weight < num_kinds)
    embedding = largest(weights.block_of_each_weight == num_kinds) * rows.is_embedding_stage
    head = largest(weights.block_of_each_weight == num_kinds + 1) * rows.is_head_stage
    owned = shards.sharded_bytes(1.0)
    wanted = rows.framework.optimizer_offload * owned
    others = np.maximum(owned - embedding, head)
    within_layers = np.minimum(wanted + layer / 2.0, others)
    walked = np.where(wanted > others, owned, np.where(wanted <= head, head, within_layers))
    tensor = np.maximum(np.maximum(embedding, head), layer)
    of_pieces = np.where(tensor >= owned, owned, np.minimum(wanted + tensor, owned))
    return np.minimum(np.where(shards.dense_ranks > 1, of_pieces, walked), owned)


def host_step_extra_seconds(rows: GatheredRows, tensors: ArrayN, beside_s: ArrayN) -> ArrayN:
    """What a step takes longer for the part that hosts step than the device's part; (g, R), 0 without any. [s]

    Gradients go over the GPU's link into pinned memory. Adam then moves 28 bytes a parameter, at the rate of the
    rank's threads and its share of the node's memory. Values come back from memory that is not pinned, and the host
    waits for each (CUDA's copies of pageable memory). One after the other; where copies overlap, the first tensor's
    gradient is waited for, and those behind it go beside the steps of others. The device's part runs beside all this.

    Parameters
    ----------
    rows
        Candidates, whose cluster's hosts are asked.
    tensors
        Parameter tensors of a stage. (g, R) [-]
    beside_s
        What the device's part takes. (g, R) [s]

    Raises
    ------
    SpecError
        If the hosts' profile has no facts of an optimizer's step.

    References
    ----------
    Megatron-Core 0.16.1, core/optimizer/cpu_offloading/hybrid_optimizer.py, ``step``.
    """
    framework, cluster = rows.framework, rows.cluster
    if not framework.optimizer_offload:
        return np.zeros_like(rows.shards.dense)
    host, pass_s = _known_host(cluster), cluster.slowest_host_factor * cluster.gpu.curves.host.tensor_pass_s.value
    stepped = params_stepped_on_hosts(rows)
    num_tensors = tensors * stepped / np.maximum(rows.shards.sharded_bytes(1.0), 1.0)
    out_s = COPIED_BYTES * stepped / cluster.gpu.host_link_bytes_per_s.value
    step_s = ADAM_MOVED_BYTES * stepped / host_adam_bytes_per_s(cluster, framework.host_threads, host)
    back_s = COPIED_BYTES * stepped / host.pageable_bytes_per_s.value
    on_host = step_s + back_s + LOOPS * pass_s * num_tensors
    if not framework.overlap_optimizer_copies:
        return np.asarray(np.maximum(out_s + on_host - beside_s, 0.0))
    first_s = out_s / np.maximum(num_tensors, 1.0)
    return np.asarray(np.maximum(np.maximum(first_s + on_host, out_s) - beside_s, 0.0))


def host_adam_bytes_per_s(cluster: ClusterSpec, threads: int, host: HostOptimizerRates) -> float:
    """What one rank's threads move in Adam's step while all ranks of its node do. [B/s]

    A processor takes as long as its threads would and as its memory would, one behind the other: of tensors that lie in
    no cache within 13 % of what 1, 2, 4, 8 and 16 threads took (measurements/h200-host-optimizer). How fast hosts issue
    ops says nothing of it.

    Examples
    --------
    >>> from mofa.specs.load import load_cluster
    >>> host = load_cluster("h200-hgx", 1).gpu.curves.host.optimizer
    >>> [round(host_adam_bytes_per_s(load_cluster("h200-hgx", n), 8, host) / 1e9) for n in (1, 2, 8)]
    [86, 86, 37]
    """
    ranks = min(cluster.num_gpus, cluster.node.gpus_per_node)
    ranks_of_processor = math.ceil(ranks / host.processors.value)
    of_threads_s = 1.0 / (threads * host.thread_bytes_per_s.value)
    return 1.0 / (of_threads_s + ranks_of_processor / host.memory_bytes_per_s.value)


def optimizer_host_bytes_of_node(workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec) -> float:
    """What a node's memory holds of the optimizer, if all nodes hold as much. [B]"""
    params = num_params(workload.model) + num_mtp_params(workload.model)
    ranks = min(cluster.num_gpus, cluster.node.gpus_per_node)
    return HELD_BYTES * framework.optimizer_offload * params * ranks / cluster.num_gpus


def refuse_optimizer_beyond_host_memory(workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec) -> None:
    """Refuse a share of the optimizer that exceeds the hosts' memory, or hosts of which nothing is known.

    Raises
    ------
    SpecError
        With the bytes of both and what to change.
    """
    if not framework.optimizer_offload:
        return
    _known_host(cluster)
    held_bytes, has_bytes = (
        optimizer_host_bytes_of_node(workload, cluster, framework),
        cluster.node.host_memory_bytes.value,
    )
    if held_bytes > has_bytes:
        most = framework.optimizer_offload * has_bytes / held_bytes
        raise SpecError(
            f"optimizer_offload ({framework.optimizer_offload:g}): a node would hold {format_bytes(held_bytes)} of the "
            f"optimizer and has {format_bytes(has_bytes)}; use at most {most:.2f}, or "
            "more nodes"
        )


def _known_host(cluster: ClusterSpec) -> HostOptimizerRates:
    host: HostIssueTimes = cluster.gpu.curves.host
    if host.optimizer is None:
        raise SpecError(
            f"optimizer_offload: nothing is known of an optimizer's step on the hosts of {cluster.gpu.name} "
            "(curves.host.optimizer); measure it (mofa calibrate run --families host_optimizer) or leave it out"
        )
    return host.optimizer
