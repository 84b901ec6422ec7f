"""What the host takes to issue an optimizer step: what the device waits for it, and how far ahead it then is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.cost.optimizer import ParameterShards, optimizer_device_seconds_by_part
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.workload import WorkloadSpec

ArrayN = NDArray[np.float64]

PARAMS_A_LAUNCH = 320 * 65536
"""Of fused Adam: blocks a launch and parameters a block (Transformer Engine 2.20.2, common/multi_tensor/
multi_tensor_apply.cuh, ``depth_to_max_blocks``; pytorch/optimizers/fused_adam.py, ``chunk_size``). [-]"""


@dataclass(frozen=True)
class SteppedTensors:
    """Tensors that a rank steps, of a stage: all of them or its shards of them. (g, R) each [-]

    Under expert parallelism Megatron steps experts by an optimizer of their own, behind the other one.
    """

    first: ArrayN
    """Of the first optimizer."""
    second: ArrayN
    """Of the experts' own."""

    @property
    def total(self) -> ArrayN:
        """Of both. (g, R) [-]"""
        return self.first + self.second


@dataclass(frozen=True)
class OptimizerIssueTimesPerTensor:
    """What Megatron's host takes for each tensor in an optimizer step, kernel launches for many tensors apart. [s]"""

    before_norm_s: float
    """From the last gradient to the norm's kernel: main gradients and lists of them."""
    clip_s: float
    """Behind the read of the norm: gradients to scale."""
    lists_s: float
    """What Adam reads and writes, before its kernels are launched."""
    copy_s: float
    """A main parameter's copy to the model's."""
    reset_s: float
    """As the next step begins: gradients that are no more."""


def optimizer_issue_times_per_tensor(cluster: ClusterSpec, framework: FrameworkSpec) -> OptimizerIssueTimesPerTensor:
    """What the host takes for each tensor that the optimizer steps, by part of the step. [s]

    As timed whole where an optimizer was and the profile has it, else by loops over the tensors.

    Loops of Python (distrib_optimizer.py, clip_grads.py, torch/optim/adamw.py) take ``tensor_pass_s`` each: copy the
    gradients, gather the parameters, their gradients, and look at each twice (22 us a tensor in traces, without a
    kernel). Two gather what is clipped and stepped (11 us there), one copies parameters, two reset gradients. Without
    Apex or Transformer Engine each norm is an op of its own.

    Examples
    --------
    >>> from mofa.specs.load import load_cluster, load_framework
    >>> issue = optimizer_issue_times_per_tensor(load_cluster("h200-hgx", 8), load_framework("megatron"))
    >>> round((issue.clip_s + issue.lists_s) * 1e6, 1)
    18.5
    """
    host = cluster.gpu.curves.host
    loop, op = (cluster.slowest_host_factor * fact.value for fact in (host.tensor_pass_s, host.eager_op_s))
    timed, widening = host.fused_optimizer, op if framework.widens_gradients else 0.0
    if timed is not None and framework.optimizer_step_kernels.timed_whole:
        facts = (timed.before_norm_s, timed.clip_s, timed.lists_s, timed.copy_s, timed.reset_s)
        before, *others = (cluster.slowest_host_factor * fact.value for fact in facts)
        return OptimizerIssueTimesPerTensor(before + widening, *others)
    norms = loop + op if framework.optimizer_step_kernels.op_by_op else 0.0
    return OptimizerIssueTimesPerTensor(5.0 * loop + norms + widening, loop, loop, loop + op, 2.0 * loop)


@dataclass(frozen=True)
class _BehindNorm:
    """Megatron's step from the read of the norm on. (g, R) each [s]"""

    waited_s: ArrayN
    """What the device waits for Adam's launches and for copies."""
    host_ahead_s: ArrayN
    """How far the host is ahead of the device behind the last copy."""


def _behind_norm(
    cluster: ClusterSpec, framework: FrameworkSpec, shards: ParameterShards, zero: NDArray[np.int64],
    tensors: SteppedTensors, parts: Mapping[str, ArrayN],
) -> _BehindNorm:  # fmt: skip
    """One optimizer behind the other, each with its lists, its kernels and its copies, on both clocks."""
    issue = optimizer_issue_times_per_tensor(cluster, framework)
    op = cluster.slowest_host_factor * cluster.gpu.curves.host.eager_op_s.value
    dense, expert = (
        np.where(zero >= 1, params / ranks, params)
        for params, ranks in ((shards.dense, shards.dense_ranks), (shards.expert, shards.expert_ranks))
    )
    by_own = np.divide(expert, dense + expert, out=np.zeros_like(dense), where=dense + expert > 0)
    share = np.where(tensors.second > 0, by_own, 0.0)
    launches = (dense + expert) / PARAMS_A_LAUNCH
    host, device = issue.clip_s * tensors.total, np.zeros_like(launches)
    for count, part in ((tensors.first, 1.0 - share), (tensors.second, share)):
        host = host + issue.lists_s * count
        device = np.where(count > 0, np.maximum(device, host), device)
        host = host + op * launches * part
        device = np.maximum(device + parts["adam"] * part, np.where(count > 0, host, 0.0))
        host = host + issue.copy_s * count
        device = np.maximum(device + parts["copy"] * part, np.where(count > 0, host, 0.0))
    return _BehindNorm(np.maximum(device - parts["adam"] - parts["copy"], 0.0), device - host)


def optimizer_waits_for_host_s(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, shards: ParameterShards, precision: str,
    zero: NDArray[np.int64], tensors: SteppedTensors, lead_s: ArrayN, grid: NDArray[np.intp],
    distributed: NDArray[np.bool_] | bool = False, parts: Mapping[str, ArrayN] | None = None,
) -> ArrayN:  # fmt: skip
    """What the device waits for the host in the optimizer step. (n, R) [s]

    Parameters
    ----------
    shards, zero, tensors
        Of each grid of ranks. (g, R) [-]
    lead_s
        What the host is ahead of the device at the end of the backward pass. (n, R) [s]
    grid
        Which grid each candidate has. (n,)
    distributed
        Whether parameters are distributed tensors (torchtitan: any of FSDP, TP, EP), of each grid. (g, 1)
    parts
        Of :func:`optimizer_device_seconds_by_part`, where they are known. (g, R) each [s]

    Notes
    -----
    Megatron's host works by :func:`optimizer_issue_times_per_tensor`. It goes on beside the backward pass, as far as it
    is ahead, and
    reads the norm. Without Apex or Transformer Engine it reads every norm by itself (utils.py,
    local_multi_tensor_l2_norm: ``torch.tensor`` of a list of device scalars) and scales every gradient by two ops.
    torchtitan reads nothing: two loops beside the rest, and the dispatch of distributed tensors' lists where
    parameters are such.

    Examples
    --------
    A host that takes no time is not waited for:

    >>> from mofa.cost.kernels.toy_gpu import toy_gpu
    >>> toy_gpu().curves.host.tensor_pass_s.value
    0.0
    """
    host = cluster.gpu.curves.host
    loop, op, item, dispatched = (
        cluster.slowest_host_factor * fact.value
        for fact in (host.tensor_pass_s, host.eager_op_s, host.item_s, host.dtensor_step_s)
    )
    parts = (
        optimizer_device_seconds_by_part(workload, cluster, framework, shards, precision, zero)
        if parts is None
        else parts
    )
    if framework.traits.has_pytorch_modules:
        each = 2.0 * loop + np.where(distributed, dispatched, 0.0)
        return np.asarray(np.maximum((each * tensors.total - parts["adam"])[grid] - lead_s, 0.0))
    # its kernels run as they are issued
    before = optimizer_issue_times_per_tensor(cluster, framework).before_norm_s * tensors.total
    before = np.maximum(before - parts.get("norm", 0.0) - parts.get("widen", 0.0), 0.0)
    after = _behind_norm(cluster, framework, shards, zero, tensors, parts).waited_s
    if workload.optimizer.clip_grad_norm and framework.optimizer_step_kernels.op_by_op:
        after = after + item * tensors.total
        scaling = framework.clipped_steps * (loop + 2.0 * op) * tensors.total
        after = after + np.maximum(scaling - parts["clip"], 0.0)
    return np.asarray(np.maximum(before[grid] - lead_s, 0.0) + after[grid])


def host_lead_behind_optimizer_s(
    cluster: ClusterSpec, framework: FrameworkSpec, shards: ParameterShards, zero: NDArray[np.int64],
    tensors: SteppedTensors, parts: Mapping[str, ArrayN],
) -> ArrayN:  # fmt: skip
    """How far the host is ahead of the device when the next step begins; behind it where negative. (g, R) [s]

    Megatron's host reads the gradients' norm and then launches Adam's kernels, the copies behind them and, in the next
    step, the gradient buffer's zeroing. It goes on while the device computes them. torchtitan's host waits for
    its device as each step begins (train.py, ``train_step``), as does one that steps parameters itself.

    Parameters
    ----------
    shards, zero, tensors
        Of each grid of ranks. (g, R) [-]
    parts
        Of :func:`optimizer_device_seconds_by_part`. (g, R) each [s]
    """
    waits = framework.traits.has_pytorch_modules or framework.optimizer_offload or framework.launch_blocking
    if waits:
        return np.zeros_like(tensors.first)
    ahead = _behind_norm(cluster, framework, shards, zero, tensors, parts).host_ahead_s
    reset = optimizer_issue_times_per_tensor(cluster, framework).reset_s * tensors.total
    return np.asarray(ahead + parts["zero"] - reset)
