"""Device memory of the communicators of a rank."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import broadcast_to_combinations
from mofa.blocks.tp_overlap import user_buffer_bytes
from mofa.cost.amax_reductions import reduces_amaxes
from mofa.cost.kernels.topology import ProcessGroup, group_of_inner_and_outer_ranks, stacked_groups
from mofa.cost.rows import GatheredRows
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec, CommunicatorMemorySpec
from mofa.specs.shared_facts import load_shared_facts
from mofa.specs.strategy import CP_KINDS

ArrayN = NDArray[np.float64]
IntN = NDArray[np.int64]
BoolN = NDArray[np.bool_]

DEEPSPEED_GROUPS = ("pp", "mp", "pp", "pp")
"""Communicators that DeepSpeed's pipeline makes beside Megatron's: of the pipeline (the loss is broadcast), of the
model (the norm) and of the two stages that share the embedding (runtime/pipe/topology.py, ``PipelineParallelGrid``;
runtime/pipe/module.py, ``_index_tied_modules``). That of the slices gathers what stages send each other, and nothing
else (runtime/pipe/engine.py, ``get_slice_parallel_group``). Megatron's own pipeline group has run as well before: its
data set's barrier (data/gpt_dataset.py, ``_build_index_mappings``)."""

MEASURED_PEERS = 3
"""Peers in one domain of a group over several whose buffers count: channels a peer are then those of the network, of
which there are fewer (NCCL, graph/paths.cc, ``ncclTopoComputeP2pChannels``). [-]"""


class PipelineLinks(NamedTuple):
    """Links of a pipeline's ranks that decide on their communicators; R of its ranks."""

    interleaved: bool
    """Whether ranks hold several chunks and the last one sends to the first."""
    has_head: BoolN
    """Whether a rank computes the loss. (R,)"""
    neighbours: IntN
    """Ranks that a rank sends to or receives from. (R,)"""
    is_first: BoolN
    """Whether a rank holds the first stage. (R,)"""
    is_end: BoolN
    """Whether it holds the first or the last. (R,)"""


class _Used(NamedTuple):
    """What a rank's communicators of one kind of group do, None where none does; (n, 1) or (n, R) each."""

    group: ProcessGroup
    collectives: BoolN | None = None
    """Whether a communicator runs collectives."""
    peers: IntN | None = None
    """Ranks of the group that are sent to directly."""
    bare: IntN | None = None
    """Communicators that do nothing but sends."""


def communicator_bytes_of_stages(rows: GatheredRows) -> ArrayN:
    """Device memory of the communicators of candidates of one pp x vpp on every stage that is shown, and of Transformer
    Engine's user buffers, through which it communicates. (n, R) [B]"""
    stages = rows.stage_layers.stages
    pipeline = pipeline_links(
        rows.schedule_record.wraps_around, stages.pp, stages.rank_with_head, rows.stage_layers.shown.shown_stages
    )
    experts = rows.workload.model.moe is not None
    sizes = communicator_bytes(
        rows.groups, rows.cluster, rows.framework, experts, rows.grids.zero, pipeline, rows.grids.cp_kind,
        reduces_amaxes(rows.workload),
    )  # fmt: skip
    context = rows.costs.context
    user_buffers = broadcast_to_combinations(user_buffer_bytes(context), rows.costs.machine.num_k)[rows.k]
    return np.asarray(sizes[rows.grid_index] + user_buffers[:, None])


def pipeline_links(wraps_around: bool, pp: int, rank_with_head: int, shown_stages: IntN) -> PipelineLinks:
    """The pipeline as its ranks ``shown_stages`` see it; where it ``wraps_around`` the last sends to the first.

    Examples
    --------
    >>> pipeline_links(False, 4, 3, np.arange(4)).neighbours
    array([1, 2, 2, 1])
    """
    ends = (shown_stages > 0).astype(np.int64) + (shown_stages < pp - 1)
    neighbours = np.full_like(ends, min(pp - 1, 2)) if wraps_around else ends
    return PipelineLinks(
        wraps_around,
        shown_stages == rank_with_head,
        neighbours,
        shown_stages == 0,
        (shown_stages == 0) | (shown_stages == pp - 1),
    )


def communicator_bytes(
    groups: dict[str, ProcessGroup], cluster: ClusterSpec, framework: FrameworkSpec, experts: bool, zero: IntN,
    pipeline: PipelineLinks, cp_kind: IntN | int = 0, amaxes: bool = False,
) -> ArrayN:  # fmt: skip
    """Device memory of all communicators of the ranks of a pipeline. (n, R) [B]

    NCCL makes a communicator at its first use, unless groups are eager, and a connection when it is first needed: a
    ring's to both neighbours in every channel of collectives; for direct sends, to every peer in every channel of
    theirs. A connection's buffers are 4 MiB of the protocol Simple, 4.69 of LL128 and 0.5 of LL with the receiver and a
    page with the sender, each in pieces of 2 MiB: 10 and 2 MiB (transport/p2p.cc). On NVLink inside a domain there are
    24 channels of collectives and 32 a peer of sends. A communicator that spans domains, or whose ranks are each in a
    domain of their own, holds less. What of NCCL is loaded once is counted once. DeepEP brings a buffer of its own,
    which is assumed.

    Parameters
    ----------
    groups
        Of :func:`mofa.cost.kernels.topology.process_groups`. (n,)
    zero
        Stage of sharded optimizer states. (n,)
    cp_kind
        Of :data:`mofa.specs.strategy.CP_KINDS`. (n,)
    amaxes
        Whether the largest of fp8 tensors are reduced (:func:`mofa.cost.amax_reductions.reduces_amaxes`).
    """
    spec = cluster.node.communicators
    world = np.atleast_1d(groups["world"].size)[:, None]
    used = _torchtitan(groups, experts, pipeline) if framework.traits.has_pytorch_modules else _megatron(
        groups, framework, experts, np.atleast_1d(zero)[:, None], pipeline, np.atleast_1d(cp_kind)[:, None]
    )  # fmt: skip
    if amaxes:
        used.append(_Used(groups["tp_dp_cp"], _ranks(groups["tp_dp_cp"]) > 1))
    if framework.process_groups == "eager":
        used = [*_eager(groups, pipeline), *(_connected(group) for group in used)]
    total = np.zeros((len(world), len(pipeline.has_head)))
    sends = np.zeros(total.shape, dtype=bool)
    of_groups = _group_bytes(stacked_groups([group.group for group in used]), spec).reshape(len(used), -1, 1)
    for group, of_group in zip(used, of_groups, strict=True):
        if group.collectives is not None:
            total = total + group.collectives * of_group
        if group.bare is not None and spec.per_sending_group_bytes is not None:
            total = total + group.bare * spec.per_sending_group_bytes.value
        if group.peers is not None:
            total = total + _peer_bytes(group.group, group.peers, spec)
            sends = sends | (group.peers > 0)
    if experts and framework.dispatcher == "deepep":
        total = total + np.where(_ranks(groups["ep"]) > 1, load_shared_facts().libraries.deepep_buffer.value, 0.0)
    once = np.where(total > 0, spec.library_bytes.value if spec.library_bytes else 0.0, 0.0)
    once = once + np.where(sends, spec.first_send_bytes.value if spec.first_send_bytes else 0.0, 0.0)
    return np.asarray(total + once + np.where(world > 1, spec.first_bytes.value, 0.0))


def _torchtitan(groups: dict[str, ProcessGroup], experts: bool, pipeline: PipelineLinks) -> list[_Used]:
    """Communicators of PyTorch's meshes (torchtitan, distributed/parallel_dims.py).

    A dimension of one rank has none, and one of all ranks is the world's own (torch, distributed/device_mesh.py,
    ``_init_one_process_group``). The world's runs a barrier, that of the data's the number of tokens, those of weights
    their gathering and the norm; that of experts only where their norm goes dimension by dimension: without tensor
    parallelism the mesh made for the loss has the same ranks as the experts' (tensor/_redistribute.py).
    """
    world = _ranks(groups["world"])

    def own(name: str) -> BoolN:
        size = _ranks(groups[name])
        return np.asarray((size > 1) & (size < world))

    used = [_Used(groups["world"], world > 1)]
    used += [_Used(groups[name], own(name)) for name in ("dp", "dp_shard_cp", "dp_replicate", "tp")]
    used.append(_Used(groups["cp"], own("cp"), peers=_ranks(groups["cp"]) - 1))
    used.append(_Used(groups["pp"], own("pp"), peers=np.minimum(pipeline.neighbours, _ranks(groups["pp"]) - 1)))
    if not experts:
        return used
    sliced, has_experts = _ranks(groups["tp"]) > 1, _ranks(groups["ep"]) > 1
    used += [_Used(groups[name], own(name) & has_experts) for name in ("etp", "edp_shard", "edp_replicate")]
    used.append(_Used(groups["dp_cp"], own("dp_cp") & has_experts & ~sliced))
    ep = own("ep")
    return [
        *used,
        _Used(groups["ep"], ep & sliced, peers=_ranks(groups["ep"]) - 1, bare=(ep & ~sliced).astype(np.int64)),
    ]


def _megatron(
    groups: dict[str, ProcessGroup],
    framework: FrameworkSpec,
    experts: bool,
    zero: IntN,
    pipeline: PipelineLinks,
    cp_kind: IntN,
) -> list[_Used]:
    """Communicators of Megatron-Core (parallel_state.py), which also run with one rank: the world's barrier, the
    gradients, their norm and, with the head, the loss over tensor parallelism, but for Transformer Engine's.

    The norm is summed over all ranks where optimizer states are sharded, over the model's otherwise (optimizer/
    __init__.py); DeepSpeed's is among its own, beside another of the gradients. Interleaved stages send both ways at
    once, in a communicator for every pair (pipeline_parallel/p2p_communication.py; torch's isend makes it).
    """

    def several(name: str) -> BoolN:
        return np.asarray(_ranks(groups[name]) > 1)

    always = np.ones(zero.shape, dtype=bool)
    norm = [_Used(groups["dp"], always)] if framework.deepspeed else [
        _Used(groups["world"], zero >= 1), _Used(groups["mp"], zero < 1)
    ]  # fmt: skip
    used = [
        _Used(groups["world"], always),
        *norm,
        _Used(groups["dp_cp"], always),
        _Used(groups["tp"], several("tp") | (pipeline.has_head & (framework.cross_entropy_fusion != "te"))),
        _context_parallel(groups["cp"], cp_kind),
    ]
    pairs = 2 if pipeline.interleaved else 1
    neighbours = np.minimum(pipeline.neighbours, _ranks(groups["pp"]) - 1)
    used.append(_Used(groups["pp"], peers=neighbours, bare=pairs * several("pp").astype(np.int64)))
    if framework.deepspeed:
        used += [_Used(groups[name], several(name)) for name in DEEPSPEED_GROUPS]
        used.append(_Used(groups["tp"], several("tp") & several("pp")))
    if not experts:
        return used
    used += [_Used(groups[name], several(name)) for name in ("etp", "etp_ep")]
    used.append(_Used(groups["edp"], several("ep")))
    if framework.dispatcher == "alltoall":
        sent_to = _ranks(groups["ep"]) - 1
        used.append(_Used(groups["ep"], peers=sent_to, bare=np.minimum(sent_to, 1)))
    return used


def _context_parallel(group: ProcessGroup, cp_kind: IntN) -> _Used:
    """What Transformer Engine's attention makes of the context-parallel group (context_parallel.py, 2.20.2).

    All-gather runs collectives; all-to-all sends to every rank directly. A ring of two sends in a batch, which the
    group's own communicator does (``batch_p2p_comm``); a longer one has a communicator with each neighbour.
    """
    others = _ranks(group) - 1
    gathers = cp_kind == CP_KINDS.index("allgather")
    ring = cp_kind == CP_KINDS.index("ring")
    peers = np.where(gathers, 0, np.where(ring, np.minimum(others, 2), others))
    bare = np.where(gathers, 0, np.where(ring, peers, np.minimum(others, 1)))
    return _Used(group, np.asarray(gathers & (others > 0)), peers, bare)


def _eager(groups: dict[str, ProcessGroup], pipeline: PipelineLinks) -> list[_Used]:
    """Communicators that are made with their groups, where ``init_process_group`` is given a device.

    All groups of ``initialize_model_parallel`` (megatron_core 0.16.1, parallel_state.py) with one instance of the
    distributed optimizer, in its order, those of one rank and of experts too. Direct sends then run in a group's own
    communicator (PyTorch 2.11, ProcessGroupNCCL.cpp, ``eagerInit_``). Gloo's hold no device memory. One of several
    ranks has no ring before its first collective: it holds what one for sends does.
    """
    everywhere = np.ones((1, len(pipeline.is_end)), dtype=bool)
    joined = (
        group_of_inner_and_outer_ranks(groups["tp"], groups["dp"]),
        group_of_inner_and_outer_ranks(groups["etp_ep"], groups["pp"]),
    )
    own = [groups[name] for name in ("world", "dp_cp", "dp", "cp", "mp", "tp", "pp")]
    own += [groups["tp_dp_cp"], joined[0], groups["tp_cp"]]
    own += [groups["ep"], groups["etp"], groups["etp_ep"], joined[1], groups["edp"], groups["world"]]
    ones = np.ones_like(groups["tp"].size)
    alone = ProcessGroup(ones, ones, ones)
    made = [
        *((group, everywhere) for group in own), (groups["embd"], pipeline.is_end[None]),
        (alone, pipeline.is_first[None]),
    ]  # fmt: skip
    return [
        _Used(group, there & (_ranks(group) == 1), bare=(there & (_ranks(group) > 1)).astype(np.int64))
        for group, there in made
    ]


def _connected(used: _Used) -> _Used:
    """What a communicator that was made before takes for its ring, over one without, and for its peers."""
    if used.collectives is None:
        return _Used(used.group, peers=used.peers)
    rings = used.collectives & (_ranks(used.group) > 1)
    return _Used(used.group, rings, used.peers, -rings.astype(np.int64))


def _ranks(group: ProcessGroup) -> IntN:
    """Ranks of a group, as a column beside those of a pipeline. (n, 1)"""
    return np.reshape(group.size, (-1, 1))


def _group_bytes(group: ProcessGroup, spec: CommunicatorMemorySpec) -> ArrayN:
    """Device memory of a communicator for collectives, by where its ranks are; of the group's shape. [B]"""
    inside = spec.per_group_bytes
    spanning, remote = spec.per_spanning_group_bytes or inside, spec.per_remote_group_bytes or inside
    alone = spec.per_lone_group_bytes or remote
    several = np.where(group.size > group.ranks_per_domain, spanning.value, inside.value)
    several = np.where(group.ranks_per_domain > 1, several, remote.value)
    return np.asarray(np.where(group.size > 1, several, alone.value))


def _peer_bytes(group: ProcessGroup, peers: IntN, spec: CommunicatorMemorySpec) -> ArrayN:
    """Device memory of the connections to ranks that are sent to directly. (n, R) [B]"""
    near = np.minimum(peers, np.reshape(group.ranks_per_domain, (-1, 1)) - 1)
    mapped = np.where(group.crosses_domains[:, None], np.minimum(near, MEASURED_PEERS), near)
    return np.asarray(mapped * spec.per_peer_bytes.value + (peers - near) * spec.per_remote_peer_bytes.value)
