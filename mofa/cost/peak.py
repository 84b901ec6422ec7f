"""Peak memory of every pipeline stage: the maximum over the instants at which it may occur."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.op import KINDS
from mofa.cost.breakdown import LIVE_COMPONENTS
from mofa.cost.compose import Rows
from mofa.cost.topology import Group
from mofa.specs.hardware import ClusterSpec

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
        self.buffers = static.buffers + self._pipeline_buffers()
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

    def _pipeline_buffers(self) -> ArrayN:
        """Activations received from the neighbours: one each way, or all micro-batches' where preallocated."""
        rows = self.rows
        if self.pp == 1:
            return np.zeros((self.n, self.pp))
        ctx = rows.costs.context
        one = (ctx.shard * float(rows.workload.model.hidden) * ctx.residual)[rows.k][:, None]
        if rows.framework.name == "torchtitan":
            m = rows.num_micro_batches[:, None] * rows.layout.stages.vpp
            ways = np.full(self.pp, 2.0)
            ways[0] -= 1.0 / rows.layout.stages.vpp
            ways[-1] -= 1.0 / rows.layout.stages.vpp
            return np.asarray(one * m * ways)
        return np.asarray(one * np.full(self.pp, 2.0))

    def _ends_saved(self) -> ArrayN:
        """What the embedding and the prediction layers keep for micro-batches in flight; the head's comes apart."""
        rows = self.rows
        out = np.zeros((self.n, self.pp))
        saved = rows.of_mtp("saved")
        if saved is not None:
            depth = rows.workload.model.num_mtp_layers
            out += depth * saved[:, None] * rows.is_head * rows.layout.last_in_flight
        return out

    def add(
        self, name: str, where: ArrayN, transient_kinds: ArrayN, minus: ArrayN | float, *, grads: ArrayN | float,
        kept: bool = True,
    ) -> None:  # fmt: skip
        """An instant that occurs where ``where`` (n, pp) is positive; ``minus`` (n, pp) of the kept is gone by then."""
        transient = transient_kinds.sum(axis=1)[:, None]
        alive = self.fixed + np.asarray(grads) * self.rows.static.grads + transient
        if kept:
            alive = alive + self.acts - minus
        self.names.append(name)
        self.totals.append(np.where(where > 0, alive, -np.inf))
        self.transients.append(transient_kinds)
        self.minus.append(np.broadcast_to(np.asarray(minus, dtype=float), (self.n, self.pp)) if kept else self.acts)
        self.grads.append(np.broadcast_to(np.asarray(grads, dtype=float), (self.n, self.pp)))

    def build(self) -> None:
        """All instants, in the order of a step."""
        rows, lay, c = self.rows, self.rows.layout, self.rows.costs
        n, pp, k = self.n, self.pp, rows.k
        always = rows.static.grads_always
        several = (rows.num_micro_batches > 1).astype(float)[:, None]
        mid = 1.0 if always else several * np.ones((n, pp))
        bk_plain, bk_full = rows.gather(rows.layers.backward_kinds)
        fk_plain, fk_full = rows.gather(rows.layers.forward_kinds)
        has_full = lay.full > 0
        has_plain = lay.plain > 0
        saved_least = np.where(
            has_full, np.minimum(self.saved_full, self.saved_plain)[:, :, None], self.saved_plain[:, :, None]
        )
        kinds = [kind.name for kind in lay.stages.kinds]
        for i, kind in enumerate(kinds):
            behind = np.einsum("or,nor->nr", lay.after[i], saved_least)
            for label, bk, fk, saved, has in (
                ("", bk_plain, fk_plain, self.saved_plain, has_plain),
                (" recomputed", bk_full, fk_full, self.saved_full, has_full),
            ):
                if not np.any(has[:, i]):
                    continue
                own = saved[:, i][:, None]
                self.add(f"forward of the last {kind} block{label}", has[:, i], fk[:, i], behind + own, grads=mid)
                self.add(f"backward of the last {kind} block{label}", has[:, i], bk[:, i], behind + own, grads=mid)
                if not always:
                    done = self._one_micro_batch() - own
                    self.add(f"backward of the first {kind} block{label}", has[:, i], bk[:, i], done + own, grads=1.0)
        head = c.head.memory
        depth = rows.workload.model.num_mtp_layers
        others = np.zeros((n, len(KINDS)))
        if depth:
            others = depth * head.saved_kinds[:, k].T
        on_head = np.broadcast_to(rows.is_head, (n, pp))
        self.add("loss forward", on_head, head.forward_kinds[:, k].T + others, 0.0, grads=mid)
        self.add("loss backward", on_head, head.backward_kinds[:, k].T + others, 0.0, grads=mid)
        on_first = np.broadcast_to(rows.is_first, (n, pp))
        emb = c.embedding.memory
        self.add("embedding backward", on_first, emb.backward_kinds[:, k].T, self._one_micro_batch(), grads=1.0)
        scratch = np.zeros((n, len(KINDS)))
        self.add("optimizer step", np.ones((n, pp)), scratch, 0.0, grads=1.0, kept=False)
        self.totals[-1] = self.totals[-1] + rows.static.step_scratch

    def _one_micro_batch(self) -> ArrayN:
        """What the layers of the chunk whose backward ends keep for one micro-batch. (n, pp)"""
        rows, lay = self.rows, self.rows.layout
        vpp = lay.stages.vpp
        one = np.einsum("nkr,nk->nr", lay.plain, self.saved_plain) + np.einsum("nkr,nk->nr", lay.full, self.saved_full)
        return np.minimum(one / vpp + self.ends_saved / np.maximum(lay.last_in_flight, 1.0), self.acts) + 0 * rows.k[:, None]

    def parts(self, instant: NDArray[np.int64], stage: NDArray[np.intp]) -> ArrayN:
        """The live components of each candidate at one instant of one stage. (len(LIVE_COMPONENTS), n)"""
        rows, lay, n = self.rows, self.rows.layout, self.n
        at = np.arange(n)
        out = np.zeros((len(LIVE_COMPONENTS), n))
        place = {name: i for i, name in enumerate(LIVE_COMPONENTS)}
        grads = np.stack(self.grads)[instant, at, stage]
        out[place["parameters"]] = rows.static.params[at, stage]
        out[place["gradients"]] = grads * rows.static.grads[at, stage]
        out[place["optimizer_states"]] = rows.static.states[at, stage]
        out[place["buffers"]] = self.buffers[at, stage]
        sk_plain, sk_full = rows.gather(rows.layers.saved_kinds)
        kept = np.einsum("nk,nkf->fn", lay.plain_in_flight[at, :, stage], sk_plain) + np.einsum(
            "nk,nkf->fn", lay.full_in_flight[at, :, stage], sk_full
        )
        mtp_kinds = rows.of_mtp("saved_kinds")
        if mtp_kinds is not None:
            weight = rows.workload.model.num_mtp_layers * rows.is_head[stage] * lay.last_in_flight[at, stage]
            kept = kept + weight * mtp_kinds.T
        acts = self.acts[at, stage]
        gone = np.stack(self.minus)[instant, at, stage]
        share = np.where(acts > 0, np.clip((acts - gone) / np.where(acts > 0, acts, 1.0), 0.0, 1.0), 0.0)
        transient = np.stack(self.transients)[instant, at].T
        np.add.at(out, _ROW, kept * share + transient)
        is_step = instant == len(self.names) - 1
        out[place["temporaries"]] += np.where(is_step, rows.static.step_scratch[at, stage], 0.0)
        return out


def stage_peaks(rows: Rows) -> tuple[Peak, _Instants]:
    """The peak of every stage and what was alive then on the fullest."""
    instants = _Instants(rows)
    instants.build()
    totals = np.stack(instants.totals)
    which = totals.argmax(axis=0)
    allocated = totals.max(axis=0)
    slack = _slack(rows)
    reserved = allocated + slack
    comm = communicator_bytes(rows.groups, rows.cluster, rows.framework.name, rows.workload.model.moe is not None)
    device = reserved + rows.cluster.gpu.context_bytes.value + comm[:, None]
    fullest = device.argmax(axis=1)
    at = np.arange(len(rows.table))
    instant = which[at, fullest]
    parts = instants.parts(instant, fullest)
    return Peak(
        allocated, reserved, device, which, fullest, parts, tuple(instants.names), comm
    ), instants  # fmt: skip


def _slack(rows: Rows) -> ArrayN:
    """What the allocator reserves beyond the live tensors: rounding of what is kept, and other streams' pools."""
    lay = rows.layout
    plain, full = rows.gather(rows.layers.slack)
    rounding = np.einsum("nkr,nk->nr", lay.plain_in_flight, plain) + np.einsum("nkr,nk->nr", lay.full_in_flight, full)
    pools, pools_full = rows.gather(rows.layers.pools)
    # parameters, gradients and states are rounded once a tensor: at most 2 MiB for each of some dozen a layer
    return rounding + np.maximum(pools.max(axis=1), pools_full.max(axis=1))[:, None]


COMMUNICATORS = {
    "megatron": ("world", "tp", "cp", "dp_cp", "dp", "pp", "tp_cp", "ep", "etp", "etp_ep", "edp"),
    "megatron-local": ("world", "tp", "cp", "dp_cp", "dp", "pp", "tp_cp", "ep", "etp", "etp_ep", "edp"),
    "torchtitan": ("world", "dp_cp", "dp_cp", "tp", "cp", "pp", "dp_shard_cp", "dp_replicate", "ep", "edp_shard"),
}
"""Communicators that a framework really creates, each kind once per mesh that uses it (read in parallel_state.py and
parallel_dims.py); one of a single rank holds nothing."""


def communicator_bytes(groups: dict[str, Group], cluster: ClusterSpec, framework: str, experts: bool) -> ArrayN:
    """Device memory of all communicators of a rank. (n,) [B]

    A communicator holds a fixed part and buffers for each peer it connects to: two neighbours for rings, all of the
    group for all-to-all.
    """
    spec = cluster.node.communicators
    total = np.zeros(len(np.atleast_1d(groups["world"].size)))
    for name in COMMUNICATORS[framework]:
        if name in ("ep", "etp", "etp_ep", "edp", "edp_shard", "tp_cp") and not experts:
            continue
        size = groups[name].size
        peers = size - 1 if name == "ep" else np.minimum(size - 1, 2)
        total = total + np.where(size > 1, spec.per_group_bytes.value + peers * spec.per_peer_bytes.value, 0.0)
    return np.asarray(total + np.where(groups["world"].size > 1, spec.first_bytes.value, 0.0))
