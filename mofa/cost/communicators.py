"""Device memory of the communicators of a rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.topology import Group
from mofa.specs.framework import PYTORCH_MODULES, FrameworkSpec
from mofa.specs.hardware import ClusterSpec, CommunicatorSpec

ArrayN = NDArray[np.float64]

ALWAYS = {
    "fsdp1": (),
    "megatron": ("world", "tp", "dp_cp", "dp"),
    "megatron-2022": ("world", "tp", "dp_cp", "dp"),
    "megatron-local": ("world", "tp", "dp_cp", "dp"),
    "torchtitan": (),
}
"""Communicators that run collectives although they may have one rank (parallel_state.py; the loss reduces over tp)."""
COLLECTIVE = {
    "fsdp1": ("dp_cp", "dp_replicate"),
    "megatron": ("cp", "tp_cp", "etp", "etp_ep", "edp"),
    "megatron-2022": ("cp", "tp_cp", "etp", "etp_ep", "edp"),
    "megatron-local": ("cp", "tp_cp", "etp", "etp_ep", "edp"),
    "torchtitan": ("dp_cp", "tp", "dp_replicate", "edp_shard"),
}
"""Communicators that exist where their group has several ranks (torchtitan: parallel_dims.py)."""
DEEPSPEED_GROUPS = ("tp", "pp", "mp", "pp", "pp")
"""Communicators that DeepSpeed's pipeline makes beside Megatron's: of the slices that outputs are gathered from, of the
pipeline (the loss is broadcast), of the model (the norm) and of the two stages that share the embedding
(runtime/pipe/topology.py, ``PipelineParallelGrid``; runtime/pipe/module.py, ``_index_tied_modules``). Megatron's own
pipeline group has run as well before: its data set's barrier (data/gpt_dataset.py, ``_build_index_mappings``)."""
DIRECT = ("ep", "cp", "pp")
"""Groups whose ranks send to one another directly."""
_EXPERTS = ("ep", "etp", "etp_ep", "edp", "edp_shard", "tp_cp")


MEASURED_PEERS = 3
"""Peers in one domain up to which buffers were seen to grow; NCCL then spreads its channels over more peers. [-]"""


DEEPEP_BUFFER_BYTES = 2.0**30
"""DeepEP's own NVLink and RDMA buffers; assumed: they depend on its tuning and on the hidden size. [B]"""


def communicator_bytes(
    groups: dict[str, Group], cluster: ClusterSpec, framework: FrameworkSpec, experts: bool
) -> ArrayN:
    """Device memory of all communicators of a rank. (n,) [B]

    A communicator for collectives holds a fixed part; direct sends hold buffers per peer: all of an expert-parallel
    group, both neighbours of a ring and of a pipeline. Inside a domain at most MEASURED_PEERS peers count: more are
    extrapolated, not measured. DeepEP brings a buffer of its own, which is assumed.
    """
    spec = cluster.node.communicators
    total = np.zeros(len(np.atleast_1d(groups["world"].size)))
    for name in ALWAYS[framework.name]:
        total = total + _group_bytes(groups[name], spec)
    for name in (*COLLECTIVE[framework.name], *(DEEPSPEED_GROUPS if framework.deepspeed else ())):
        if name not in _EXPERTS or experts:
            total = total + np.where(groups[name].size > 1, _group_bytes(groups[name], spec), 0.0)
    for name in DIRECT:
        if name in _EXPERTS and (not experts or framework.dispatcher != "alltoall"):
            continue
        group = groups[name]
        peers = group.size - 1 if name == "ep" or framework.name in PYTORCH_MODULES else np.minimum(group.size - 1, 2)
        peers = np.minimum(peers, 2) if name == "pp" else peers
        near = np.minimum(peers, group.ranks_per_domain - 1)
        held = np.minimum(near, MEASURED_PEERS)
        total = total + held * spec.per_peer_bytes.value + (peers - near) * spec.per_remote_peer_bytes.value
    if experts and framework.dispatcher == "deepep":
        total = total + np.where(groups["ep"].size > 1, DEEPEP_BUFFER_BYTES, 0.0)
    return np.asarray(total + np.where(groups["world"].size > 1, spec.first_bytes.value, 0.0))


def _group_bytes(group: Group, spec: CommunicatorSpec) -> ArrayN:
    """Device memory of a communicator for collectives, by where its ranks are. (n,) [B]"""
    inside = spec.per_group_bytes
    spanning, remote = spec.per_spanning_group_bytes or inside, spec.per_remote_group_bytes or inside
    several = np.where(group.size > group.ranks_per_domain, spanning.value, inside.value)
    return np.asarray(np.where(group.ranks_per_domain > 1, several, remote.value))
