"""FSDP under PyTorch's pipelines: parameters are gathered once a step, gradients reduced behind a last backward.

A piece is what is gathered and reduced together: a layer, or an end of the model (PyTorch 2.11,
``distributed/pipelining/stage.py`` and ``fsdp/_fully_shard``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.work import CollectiveKind
from mofa.cost.block.host_clock import NEVER, ClockAdvance
from mofa.cost.kernels.collectives import collective_s
from mofa.cost.kernels.launch_queue import QUEUE
from mofa.cost.rank_rules import gathered_bytes_per_param, reduced_bytes_per_param
from mofa.cost.rows import GatheredRows, chunk_layer_params
from mofa.specs.params import layer_params

ArrayN = NDArray[np.float64]
IntA = NDArray[np.intp]


@dataclass(frozen=True)
class FsdpCollectiveSeconds:
    """FSDP's gathers and reductions by piece, of each grid of ranks: of a layer of each kind, (kinds, g), and of what
    a chunk holds beside its layers, (g, R, vpp). [s]"""

    layer_gather_s: ArrayN
    layer_reduce_s: ArrayN
    end_gather_s: ArrayN
    end_reduce_s: ArrayN

    def gather_and_reduce_of_chunks_s(self, rows: GatheredRows) -> tuple[ArrayN, ArrayN]:
        """All gathers and all reductions of each chunk, one after the other. (n, R, vpp) each [s]"""
        lay = rows.stage_layers
        counts = lay.stages.layer_counts[:, lay.shown.shown_stages].astype(float)
        gather, reduce = (
            np.einsum("krc,kg->grc", counts, of_layer) + of_end
            for of_layer, of_end in (
                (self.layer_gather_s, self.end_gather_s), (self.layer_reduce_s, self.end_reduce_s),
            )
        )  # fmt: skip
        return gather[rows.grid_index], reduce[rows.grid_index]


def piece_seconds(rows: GatheredRows, *, pipelined: bool = True) -> FsdpCollectiveSeconds:
    """What gathering and reducing a piece takes.

    Dense and expert parameters go one after the other. Under pipelines, ahead of each reduction, or each copy where a
    rank has its experts alone, the host writes down where gradients lie: 1.7 of the 2.1 ms that a layer takes behind
    the last backward in tt4-pp2-ep2-dsv2lite-12l-skewed-traced (fitting half).
    """
    grids, lay = rows.grids, rows.stage_layers
    of_kinds = [layer_params(rows.workload.model, kind.moe) for kind in lay.stages.kinds]
    layers = np.array([
        [(p.matrices_tp + p.shared) / grids.tp + p.replicated for p in of_kinds],
        [p.routed / (grids.ep * grids.etp) for p in of_kinds],
    ])  # fmt: skip
    ends = np.maximum(rows.params - chunk_layer_params(rows.workload, grids, lay), 0.0)
    return FsdpCollectiveSeconds(
        _gather_s(rows, layers), _reduce_s(rows, layers, pipelined),
        _gather_s(rows, ends), _reduce_s(rows, ends, pipelined),
    )  # fmt: skip


def _collectives_s(rows: GatheredRows, kind: CollectiveKind, params: ArrayN, width: float) -> ArrayN:
    """Of dense and expert parameters, one after the other; axes (2, kinds, g) or (2, g, R, vpp). [s]"""
    seconds = np.zeros(params.shape[1:])
    for of_group, name in zip(params, ("fsdp", "efsdp"), strict=True):
        group = rows.groups[name]
        group = group.with_indexed_arrays(np.s_[:, None, None]) if of_group.ndim == 3 else group
        seconds += np.where(
            of_group > 0, collective_s(kind, of_group * width, group, rows.costs.machine.network_fabric), 0.0
        )
    return seconds


def _gather_s(rows: GatheredRows, params: ArrayN) -> ArrayN:
    return _collectives_s(rows, "all_gather", params, gathered_bytes_per_param(rows))


def _reduce_s(rows: GatheredRows, params: ArrayN, pipelined: bool) -> ArrayN:
    """The reduction; under pipelines what the host takes to write down where its gradients lie, if that is longer."""
    reduce_s = _collectives_s(rows, "reduce_scatter", params, reduced_bytes_per_param(rows))
    if not pipelined:
        return reduce_s
    host = rows.cluster.slowest_host_factor * rows.cluster.gpu.curves.host.listing_s.value
    sizes = [rows.groups[name].size for name in ("fsdp", "efsdp")]
    shared = [size[:, None, None] if params.ndim == 4 else size for size in sizes]
    listing_s = host * (params[0] / shared[0] + params[1] / shared[1]) / 2**20
    return np.asarray(np.maximum(reduce_s, listing_s))


def computing_lost_beside_gathers_s(rows: GatheredRows, gather_s: ArrayN, chunk_s: ArrayN, slow: ArrayN) -> ArrayN:
    """What computing loses while FSDP gathers the chunks behind the first one from a step's start on. (n,) [s]

    The first micro-batch passes through all chunks but its first, ``chunk_s`` each, on one rank after the other. A
    chunk is gathered once the one two before it is computed: computing and gathers take turns where these are long.
    Where gathers take longer than the path, what is lost is waited for anyway.
    """
    stages = rows.stage_layers.stages
    path_s = (stages.vpp * stages.pp - 1) * chunk_s
    lost_s = slow * np.minimum(gather_s, path_s)
    return np.asarray(np.minimum(lost_s, np.maximum((1.0 + slow) * path_s - gather_s, 0.0)))


def computing_lost_beside_reductions_s(
    rows: GatheredRows, reduces_s: ArrayN, sums_s: ArrayN, chunk_s: ArrayN, slow: ArrayN, slow_by_sums: ArrayN
) -> ArrayN:
    """What computing loses while FSDP reduces chunks ahead of the last one, behind their last backwards. (n,) [s]

    Each rank reduces a chunk while the next one goes through all ``pp`` ranks, ``chunk_s`` on each. It computes itself
    in the last ``m`` of these pp turns, with m micro-batches and pp at most. The longest path goes through one rank
    after the other, so that pp / m ranks lose on it. The last rank begins ``m - 1`` turns ahead of the first; what it
    loses until then comes on top, and the others' reductions are so much further. Where reductions take longer than
    the path, what is lost is waited for anyway. ``reduces_s`` over shards and ``sums_s`` over replicas are those of
    each chunk, (n, vpp), of which the first is reduced last: one chunk's sums go on beside the next one's reductions.
    """
    pp, others = rows.stage_layers.stages.pp, rows.stage_layers.stages.vpp - 1
    num_computed = np.minimum(rows.num_micro_batches, pp)
    ahead_s = (num_computed - 1) * chunk_s
    path_s = others * pp * chunk_s + ahead_s
    reduce_s, sum_s = reduces_s[:, 1:].sum(axis=1), sums_s[:, 1:].sum(axis=1)
    # sums beside reductions cost a share of what these leave
    as_reduction = (1.0 - slow) * slow_by_sums / np.maximum(slow, 1e-12)
    each_s = (reduce_s + as_reduction * sum_s) / max(others, 1)
    lost_ahead_s = slow * np.minimum(each_s, ahead_s)
    left_s = each_s - lost_ahead_s - (pp - num_computed) * chunk_s
    lost_s = lost_ahead_s + slow * others * pp / num_computed * np.clip(left_s, 0.0, num_computed * chunk_s)
    queued_s = np.maximum(reduce_s, sum_s + reduces_s[:, -1] - reduces_s[:, 0])
    return np.asarray(np.minimum(lost_s, np.maximum(path_s - queued_s, 0.0)))


def first_forward_clock_advance(
    rows: GatheredRows, index: IntA, pieces: FsdpCollectiveSeconds, like: ClockAdvance, slowdown: ArrayN
) -> ClockAdvance:
    """How host and device advance in the first forward of each stage's only chunk, which gathers as its host gets to
    each piece.

    A gather begins when the host launches it and the one before has ended, and computing waits for it. The host is
    no further ahead of its device than the launch queue takes.

    Parameters
    ----------
    index
        Rows. (late rows,)
    like
        Forwards of these rows without gathers, which are no longer. (late rows, R, 1)
    slowdown
        What computing loses per second beside a gather. (late rows, R) [-]
    """
    lay, grid = rows.stage_layers, rows.grid_index[index]
    counts = lay.stages.layer_counts[:, lay.shown.shown_stages, 0]
    num_full = lay.fully_recomputed_by_chunk[lay.recompute_choice[index]][..., 0]
    plain, full = (
        rows.layers.forward_clocks[mode[index], rows.k[index]] for mode in (rows.base_mode_index, rows.full_mode_index)
    )  # (late rows, kinds, 5)
    launch_s = rows.cluster.slowest_host_factor * rows.cluster.gpu.curves.host.eager_op_s.value
    walk = _PiecesWalk.beginning(slowdown)
    end_s = pieces.end_gather_s[grid][:, :, 0]
    first, last = rows.is_embedding_stage > 0, (rows.is_head_stage > 0) | (rows.is_prediction_stage > 0)
    embedding, head = (cost.forward.clocks[:, rows.k[index]].T for cost in (rows.costs.embedding, rows.costs.head))
    walk.add(first, launch_s, end_s, embedding)
    for kind, of_stages in enumerate(counts):
        gather_s = pieces.layer_gather_s[kind, grid][:, None]
        for number in range(int(of_stages.max())):
            is_plain = number < of_stages - num_full[:, kind]
            for clocks, there in ((plain, is_plain), (full, (number < of_stages) & ~is_plain)):
                if there.any():
                    walk.add(there, launch_s, gather_s, clocks[:, kind])
    walk.add(last, launch_s, end_s, head)
    passed = (times[:, :, None] for times in walk.clocks())
    return ClockAdvance(*(np.maximum(*both) for both in zip(passed, like[:4], strict=True)))


@dataclass
class _PiecesWalk:
    """Where the device, the host and the stream of gathers are behind some pieces, of a device and of a host that begin
    at 0, with the other far ahead. (2, late rows, R) each [s]

    The host is no more than :data:`mofa.cost.kernels.launch_queue.QUEUE` launches ahead of its device: a stage that
    waits for its first input has launched the gathers of so many kernels, and gathers the rest behind it.
    """

    device_s: ArrayN
    host_s: ArrayN
    gathered_s: ArrayN
    launched: ArrayN
    """Kernels so far. (late rows, R) [-]"""
    begun: list[tuple[ArrayN, ArrayN]]
    """Of each piece when the device began it, and the kernels up to its end. [s], [-]"""
    taken: IntA
    """How many pieces the device must have begun. (late rows, R) [-]"""
    slowdown: ArrayN
    """What computing loses per second beside a gather. (late rows, R) [-]"""

    @classmethod
    def beginning(cls, slowdown: ArrayN) -> _PiecesWalk:
        """In front of all pieces."""
        shape = slowdown.shape
        nothing, never = np.zeros(shape), np.full(shape, NEVER)
        begins, hosts = np.stack([nothing, never]), np.stack([never, nothing])
        return cls(begins, hosts, np.full((2, *shape), NEVER), nothing, [], np.zeros(shape, dtype=np.intp), slowdown)

    def add(self, there: NDArray[np.bool_], launch_s: float, gather_s: ArrayN, clocks: ArrayN) -> None:
        """Go on behind one more piece, on the stages where it is ``there``; its ``clocks`` are (late rows, 5)."""
        device_s, behind_host_s, woken_s, host_s, kernels = (each[:, None] for each in clocks.T)
        launched = np.maximum(self.host_s + launch_s, self._room_in_queue_s())
        gathers = np.maximum(self.gathered_s, launched)
        gathered = gathers + gather_s
        beside_s = np.maximum(np.minimum(gathered, self.device_s) - np.maximum(gathers, 0.0), 0.0)
        begun = np.maximum(self.device_s + self.slowdown * beside_s, gathered)
        device = np.maximum(begun + device_s, launched + behind_host_s)
        host = np.maximum(begun + woken_s, launched + host_s)
        self.device_s = np.where(there, device, self.device_s)
        self.host_s = np.where(there, host, self.host_s)
        self.gathered_s = np.where(there, gathered, self.gathered_s)
        self.launched = self.launched + np.where(there, kernels, 0.0)
        self.begun.append((np.where(there, begun, NEVER), self.launched))

    def _room_in_queue_s(self) -> ArrayN:
        """When the device has begun the piece whose kernels must have left the queue. (2, late rows, R) [s]"""
        room = np.full_like(self.device_s, NEVER)
        if not self.begun or not np.any(self.launched > QUEUE):
            return room
        while True:
            ends = self._of_taken([launched for _, launched in self.begun])
            later = (ends <= self.launched - QUEUE) & (self.taken < len(self.begun) - 1)
            if not later.any():
                break
            self.taken = self.taken + later
        begun = [self._of_taken([begun[clock] for begun, _ in self.begun]) for clock in (0, 1)]
        return np.where(self.launched > QUEUE, np.stack(begun), room)

    def _of_taken(self, of_pieces: list[ArrayN]) -> ArrayN:
        """Of each row and stage that of the piece that must have begun. (late rows, R)"""
        first = int(self.taken.min())
        some = np.stack(of_pieces[first : int(self.taken.max()) + 1])
        return np.asarray(np.take_along_axis(some, (self.taken - first)[None], axis=0)[0])

    def clocks(self) -> tuple[ArrayN, ArrayN, ArrayN, ArrayN]:
        """As :class:`mofa.cost.block.host_clock.ClockAdvance`."""
        return self.device_s[0], self.device_s[1], self.host_s[0], self.host_s[1]
