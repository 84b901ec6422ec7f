"""Peak memory of every pipeline stage: the maximum over the instants at which it may occur."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import first_largest
from mofa.blocks.op import KINDS
from mofa.cost.breakdown import LIVE_COMPONENTS
from mofa.cost.compose import Rows
from mofa.cost.topology import Group
from mofa.specs.framework import PYTORCH_MODULES, FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.params import embedding_params, layer_params

ArrayN = NDArray[np.float64]

# where a kind of tensor of the tape shows in the report
KIND_COMPONENT = {
    "activation": "activations", "weight_copy": "weight_copies", "grad": "gradients", "state": "optimizer_states",
    "buffer": "buffers", "scratch": "temporaries",
}  # fmt: skip
_ROW = np.array([LIVE_COMPONENTS.index(KIND_COMPONENT[kind]) for kind in KINDS])


@dataclass(frozen=True)
class Instant:
    """One instant: bytes alive per stage, (n, pp), -inf where it does not occur; its parts are found on demand.

    ``transient`` (kinds, n) is what the op at the instant holds, ``kept`` (kinds, n, pp) the activations besides.
    """

    name: str
    total: ArrayN
    transient: ArrayN
    kept_minus: tuple[tuple[str, int], ...]
    grads: float


@dataclass(frozen=True)
class Peak:
    """Peak of each stage. ``parts`` (len(LIVE_COMPONENTS), n) of the fullest stage; the rest (n, pp) or (n,)."""

    allocated: ArrayN
    reserved: ArrayN
    device: ArrayN
    instant: NDArray[np.int64]
    fullest: NDArray[np.intp]
    parts: ArrayN
    names: tuple[str, ...]
    communicators: ArrayN


class _Instants:
    """Builds the instants of all stages and remembers how to take each apart."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        lay, static = rows.layout, rows.static
        self.n, self.pp = len(rows.table), lay.stages.pp
        self.buffers = static.buffers + self._pipeline_buffers() + self._persistent_buffers()
        self.fixed = static.params + static.states + self.buffers
        self.saved_plain, self.saved_full = rows.gather(rows.layers.saved)
        self.acts = np.einsum("nkr,nk->nr", lay.plain_in_flight, self.saved_plain) + np.einsum(
            "nkr,nk->nr", lay.full_in_flight, self.saved_full
        )
        self.ends_saved = self._ends_saved()
        self.acts = self.acts + self.ends_saved
        self.names: list[str] = []
        self.totals: list[ArrayN] = []
        self.transients: list[ArrayN] = []
        self.minus: list[ArrayN] = []
        self.grads: list[ArrayN] = []
        self.copies: list[ArrayN] = []
        self._arrays: dict[str, ArrayN] = {}

    def _pipeline_buffers(self) -> ArrayN:
        """Activations received from the neighbours: one each way, or all micro-batches' where preallocated."""
        rows = self.rows
        if self.pp == 1:
            return np.zeros((self.n, self.pp))
        one = rows.costs.boundary[rows.k][:, None]
        if rows.framework.name in PYTORCH_MODULES:
            m = rows.num_micro_batches[:, None] * rows.layout.stages.vpp
            ways = np.full(self.pp, 2.0)
            ways[0] -= 1.0 / rows.layout.stages.vpp
            ways[-1] -= 1.0 / rows.layout.stages.vpp
            return np.asarray(one * m * ways)
        return np.asarray(one * np.full(self.pp, 2.0))

    def _persistent_buffers(self) -> ArrayN:
        """What the framework allocates once and keeps; the head's share on its stage. (n, pp)"""
        rows, c = self.rows, self.rows.costs
        body = c.persistent[rows.k][:, None]
        return np.asarray(body + (c.persistent_head - c.persistent)[rows.k][:, None] * rows.is_head)

    def _layer_grads(self, kind: int) -> ArrayN:
        """Share of a stage's gradients that one layer of a kind and the embedding, or the stage's last work, make.

        When the first layer's backward runs, neither its own gradients nor the embedding's exist yet.
        """
        rows, model = self.rows, self.rows.workload.model
        p = layer_params(model, rows.layout.stages.kinds[kind].moe)
        t, s = rows.table, rows.shards
        sharded = rows.mode.precision == "mixed" and not rows.mode.pipelined
        dense_ranks, expert_ranks = (s.dense_ranks, s.expert_ranks) if sharded else (1.0, 1.0)
        dense = ((p.matrices_tp + p.shared) / t.tp + p.replicated)[:, None] + (embedding_params(model) / t.tp)[
            :, None
        ] * rows.is_first
        expert = (p.routed / (t.ep * t.etp))[:, None]
        whole = s.dense / dense_ranks + s.expert / expert_ranks
        return np.asarray(np.clip((dense / dense_ranks + expert / expert_ranks) / whole, 0.0, 1.0))

    def _embedding_gather(self, kind: int) -> ArrayN | float:
        """What the first block's backward prefetches more than one in the middle: the embedding, not a block. [B]"""
        rows, model = self.rows, self.rows.workload.model
        if rows.mode.precision != "mixed" or rows.mode.pipelined or not rows.framework.shards_params:
            return 0.0
        p = layer_params(model, rows.layout.stages.kinds[kind].moe)
        tp = rows.table.tp
        more = embedding_params(model) / tp - ((p.matrices_tp + p.shared) / tp + p.replicated)
        gathered = np.where(rows.shards.dense_ranks[:, 0] > 1, 2.0 * more, 0.0)
        return np.asarray(gathered[:, None] * np.ones((1, self.pp)))

    def _ends_saved(self) -> ArrayN:
        """What the embedding and the prediction layers keep for micro-batches in flight; the head's comes apart."""
        rows = self.rows
        out = np.zeros((self.n, self.pp))
        saved = rows.of_mtp("saved")
        if saved is not None:
            depth = rows.workload.model.num_mtp_layers
            out += depth * saved[:, None] * rows.is_head * rows.layout.last_in_flight
        return out + self._loss_saved()

    def _loss_saved(self) -> ArrayN:
        """What the loss keeps for micro-batches before the one at hand: GPipe runs all forwards first. (n, pp)"""
        rows = self.rows
        if rows.schedule != "gpipe":
            return np.zeros((self.n, self.pp))
        before = np.maximum(rows.layout.last_in_flight - 1.0, 0.0)
        return np.asarray(rows.costs.head.memory.saved[rows.k][:, None] * rows.is_head * before)

    def add(
        self, name: str, where: ArrayN | NDArray[np.bool_], transient_kinds: ArrayN, minus: ArrayN | float, *,
        grads: ArrayN | float, kept: bool = True, copies: ArrayN | float = 0.0,
    ) -> None:  # fmt: skip
        """An instant that occurs where ``where`` (n, pp) is positive; ``minus`` (n, pp) of the kept is gone by then.

        ``copies`` are weight copies that are there besides. [B]
        """
        transient = transient_kinds.sum(axis=1)[:, None]
        alive = self.fixed + np.asarray(grads) * self.rows.static.grads + transient + copies
        if kept:
            alive = alive + self.acts - minus
        self.names.append(name)
        self.totals.append(np.where(where > 0, alive, -np.inf))
        self.transients.append(transient_kinds)
        self.minus.append(np.broadcast_to(np.asarray(minus, dtype=float), (self.n, self.pp)) if kept else self.acts)
        self.grads.append(np.broadcast_to(np.asarray(grads, dtype=float), (self.n, self.pp)))
        self.copies.append(np.broadcast_to(np.asarray(copies, dtype=float), (self.n, self.pp)))

    def build(self) -> None:
        """All instants, in the order of a step."""
        rows, lay, c = self.rows, self.rows.layout, self.rows.costs
        n, pp, k = self.n, self.pp, rows.k
        always = rows.static.grads_always
        several = (rows.num_micro_batches > 1).astype(float)[:, None]
        if rows.schedule == "gpipe":  # no backward has run when all activations are there
            several = np.zeros_like(several)
        mid = 1.0 if always else several * np.ones((n, pp))
        bk_plain, bk_full = rows.gather(rows.layers.backward_kinds)
        fk_plain, fk_full = rows.gather(rows.layers.forward_kinds)
        has_full = lay.full > 0
        has_plain = lay.plain > 0
        saved_least = np.where(
            has_full, np.minimum(self.saved_full, self.saved_plain)[:, :, None], self.saved_plain[:, :, None]
        )
        kinds = [kind.name for kind in lay.stages.kinds]
        # autocast's cache holds the weight copies of recomputed layers until the loss is there
        cached = np.einsum("nkr,nk->nr", lay.full, rows.gather(rows.layers.cached)[1]) + np.einsum(
            "nkr,nk->nr", lay.plain, rows.gather(rows.layers.cached)[0]
        )
        for i, kind in enumerate(kinds):
            behind = np.einsum("or,nor->nr", lay.after[i], saved_least)
            for label, bk, fk, saved, has in (
                ("", bk_plain, fk_plain, self.saved_plain, has_plain),
                (" recomputed", bk_full, fk_full, self.saved_full, has_full),
            ):
                if not np.any(has[:, i]):
                    continue
                own = saved[:, i][:, None]
                self.add(
                    f"forward of the last {kind} block{label}",
                    has[:, i],
                    fk[:, i],
                    behind + own,
                    grads=mid,
                    copies=cached,
                )
                self.add(f"backward of the last {kind} block{label}", has[:, i], bk[:, i], behind + own, grads=mid)
                if not always:
                    done = self._one_micro_batch() - own
                    first = np.where(several > 0, 1.0, 1.0 - self._layer_grads(i))
                    name = f"backward of the first {kind} block{label}"
                    swap = self._embedding_gather(i)
                    self.add(name, has[:, i], bk[:, i], done + own, grads=first, copies=swap)
        head = c.head.memory
        depth = rows.workload.model.num_mtp_layers
        others = np.zeros((n, len(KINDS)))
        if depth:
            others = depth * head.saved_kinds[:, k].T
        on_head = np.broadcast_to(rows.is_head, (n, pp))
        self.add("loss forward", on_head, head.forward_kinds[:, k].T + others, 0.0, grads=mid, copies=cached)
        self.add("loss backward", on_head, head.backward_kinds[:, k].T + others, 0.0, grads=mid)
        on_first = np.broadcast_to(rows.is_first, (n, pp))
        emb = c.embedding.memory
        self.add("embedding backward", on_first, emb.backward_kinds[:, k].T, self._one_micro_batch(), grads=1.0)
        scratch = np.zeros((n, len(KINDS)))
        self.add("optimizer step", np.ones((n, pp)), scratch, 0.0, grads=1.0, kept=False)
        self.totals[-1] = self.totals[-1] + rows.static.step_scratch

    def _one_micro_batch(self) -> ArrayN:
        """What the layers of the chunk whose backward ends keep for one micro-batch. (n, pp)"""
        lay = self.rows.layout
        vpp = lay.stages.vpp
        one = np.einsum("nkr,nk->nr", lay.plain, self.saved_plain) + np.einsum("nkr,nk->nr", lay.full, self.saved_full)
        ends = self.ends_saved / np.maximum(lay.last_in_flight, 1.0)
        return np.asarray(np.minimum(one / vpp + ends, self.acts))

    def _stacked(self, name: str) -> ArrayN:
        """A list of all instants as one array, made once. (instants, n, ...)"""
        if name not in self._arrays:
            self._arrays[name] = np.stack(getattr(self, name))
        return self._arrays[name]

    def parts(self, at: NDArray[np.intp], instant: NDArray[np.int64], stage: NDArray[np.intp]) -> ArrayN:
        """Live components of candidates ``at``, each at one instant of one stage. (len(LIVE_COMPONENTS), len(at))"""
        rows, lay = self.rows, self.rows.layout
        out = np.zeros((len(LIVE_COMPONENTS), len(at)))
        place = {name: i for i, name in enumerate(LIVE_COMPONENTS)}
        grads = self._stacked("grads")[instant, at, stage]
        out[place["parameters"]] = rows.static.params[at, stage]
        out[place["gradients"]] = grads * rows.static.grads[at, stage]
        out[place["optimizer_states"]] = rows.static.states[at, stage]
        out[place["buffers"]] = self.buffers[at, stage]
        plain, full = rows.gather(rows.layers.saved_kinds)
        kept = np.einsum("nk,nkf->fn", lay.plain_in_flight[at, :, stage], plain[at]) + np.einsum(
            "nk,nkf->fn", lay.full_in_flight[at, :, stage], full[at]
        )
        mtp_kinds = rows.of_mtp("saved_kinds")
        if mtp_kinds is not None:
            weight = rows.workload.model.num_mtp_layers * rows.is_head[stage] * lay.last_in_flight[at, stage]
            kept = kept + weight * mtp_kinds[at].T
        if rows.schedule == "gpipe":
            before = np.maximum(lay.last_in_flight[at, stage] - 1.0, 0.0) * rows.is_head[stage]
            kept = kept + before * rows.costs.head.memory.saved_kinds[:, rows.k[at]]
        acts = self.acts[at, stage]
        gone = self._stacked("minus")[instant, at, stage]
        share = np.where(acts > 0, np.clip((acts - gone) / np.where(acts > 0, acts, 1.0), 0.0, 1.0), 0.0)
        transient = self._stacked("transients")[instant, at].T
        np.add.at(out, _ROW, kept * share + transient)
        out[place["weight_copies"]] += self._stacked("copies")[instant, at, stage]
        is_step = instant == len(self.names) - 1
        out[place["temporaries"]] += np.where(is_step, rows.static.step_scratch[at, stage], 0.0)
        return out


def stage_peaks(rows: Rows) -> tuple[Peak, _Instants]:
    """The peak of every stage and what was alive then on the fullest."""
    instants = _Instants(rows)
    instants.build()
    totals = np.stack(instants.totals)
    which = first_largest(totals)
    allocated = totals.max(axis=0)
    grads = np.take_along_axis(np.stack(instants.grads), which[None], axis=0)[0]
    slack = _slack(rows, grads)
    reserved = allocated + slack
    experts = rows.workload.model.moe is not None
    comm = communicator_bytes(rows.groups, rows.cluster, rows.framework, experts)
    device = reserved + rows.cluster.gpu.context_bytes.value + comm[:, None]
    fullest = first_largest(device, axis=1)
    at = np.arange(len(rows.table))
    instant = which[at, fullest]
    parts = instants.parts(at, instant, fullest)
    return Peak(
        allocated, reserved, device, which, fullest, parts, tuple(instants.names), comm
    ), instants  # fmt: skip


def _slack(rows: Rows, grads: ArrayN) -> ArrayN:
    """What the allocator holds beyond the live tensors at the peak, ``grads`` of the gradients being there. (n, pp) [B]

    - Requests are rounded; see :func:`mofa.cost.liveness.rounded_bytes`.
    - Memory is pooled per stream. FSDP's sharded gradients live in the reduce-scatter stream's pool, which keeps its
      blocks while they are gone, and its gathered weights in the gather stream's, at their own peaks.
    - From the second step on the optimizer's states lie in blocks that the loss had freed in the first, so that its
      largest tensor finds no whole block again: one more of its size is taken. Assumes that smaller tensors fill what
      the states leave. The expandable allocator maps pages instead and has no such loss.
    """
    lay, c = rows.layout, rows.costs
    plain, full = rows.gather(rows.layers.slack)
    slack = np.einsum("nkr,nk->nr", lay.plain_in_flight, plain) + np.einsum("nkr,nk->nr", lay.full_in_flight, full)
    pools, pools_full = rows.gather(rows.layers.pools)
    ends = np.maximum(c.head.memory.pool_slack[rows.k][:, None] * rows.is_head,
                      c.embedding.memory.pool_slack[rows.k][:, None] * rows.is_first)  # fmt: skip
    for there, pool in ((lay.plain > 0, pools), (lay.full > 0, pools_full)):  # of the layers that a stage has
        ends = np.maximum(ends, np.where(there, pool[:, :, None], 0.0).max(axis=1))
    slack = slack + ends
    if rows.framework.shards_params and rows.mode.precision == "mixed" and not rows.mode.pipelined:
        slack = slack + (1.0 - grads) * rows.static.grads
    elif rows.framework.shards_params and rows.mode.precision == "mixed":  # they come when the others have gone
        slack = slack + rows.shards.sharded(rows.framework.grads_bytes_per_param)
    if rows.framework.allocator != "expandable":
        slack = slack + c.head.memory.largest[rows.k][:, None] * rows.is_head
    return np.asarray(slack)


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
DEEPSPEED_GROUPS = ("tp", "pp", "mp")
"""Communicators that DeepSpeed's pipeline makes beside Megatron's: of the slices that outputs are gathered from, of the
pipeline (the loss is broadcast) and of the model (the norm); runtime/pipe/topology.py, ``PipelineParallelGrid``."""
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
    ones = np.ones(len(np.atleast_1d(groups["world"].size)))
    total = ones * len(ALWAYS[framework.name]) * spec.per_group_bytes.value
    for name in (*COLLECTIVE[framework.name], *(DEEPSPEED_GROUPS if framework.deepspeed else ())):
        if name not in _EXPERTS or experts:
            total = total + np.where(groups[name].size > 1, spec.per_group_bytes.value, 0.0)
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
