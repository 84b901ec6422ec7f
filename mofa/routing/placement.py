"""Which GPUs of a group hold which experts: plain expert parallelism, and placements with replicas that overlap.

A *group* is d expert-parallel groups of one layer merged; every GPU holds as many experts as before, its *slots*.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError
from mofa.routing.cayley import cayley_gpu_pairs_of_experts

FloatA = NDArray[np.float64]
IntA = NDArray[np.int64]
MAX_GPUS = 1024


@dataclass(frozen=True)
class Placement:
    """Replicas of every expert on every GPU of a group: ``copies`` (E, G), mostly 0 or 1."""

    copies: IntA

    def __post_init__(self) -> None:
        missing = np.flatnonzero(self.copies.sum(axis=1) == 0)
        if missing.size:
            raise SpecError(f"placement: expert {missing[0]} has no GPU; give every expert at least one replica")

    @property
    def num_experts(self) -> int:
        """Experts of the layer."""
        return int(self.copies.shape[0])

    @property
    def num_gpus(self) -> int:
        """GPUs that hold them."""
        return int(self.copies.shape[1])

    @property
    def has_replica(self) -> NDArray[np.bool_]:
        """Where an expert has a replica. (E, G)"""
        return self.copies > 0

    @property
    def experts_and_gpus(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Expert and GPU of each replica, by expert. (R,), (R,)"""
        experts, gpus = np.nonzero(self.copies)
        return experts, gpus

    def num_replicas_to_receive(self, new: Placement) -> IntA:
        """Replicas that each GPU must receive to become ``new``. (G,)

        >>> Placement(np.eye(2, dtype=int)).num_replicas_to_receive(Placement(np.array([[0, 1], [1, 1]]))).tolist()
        [1, 1]
        """
        return np.asarray(np.maximum(new.copies - self.copies, 0).sum(axis=0))


def slots_per_gpu(num_experts: int, num_gpus: int, ep: int) -> int:
    """Experts that a GPU holds, in a group of ``num_gpus`` that merges whole expert-parallel groups.

    Raises
    ------
    SpecError
        If the experts do not divide over ep or the group over it.

    Examples
    --------
    >>> slots_per_gpu(32, 8, 4)
    8
    """
    if ep < 1 or num_experts < 1 or num_experts % ep:
        raise SpecError(f"ep ({ep}) must divide experts ({num_experts}); every rank holds equally many")
    if num_gpus < 1 or num_gpus % ep:
        raise SpecError(f"gpus ({num_gpus}) must be a multiple of ep ({ep}); the group merges whole EP groups")
    if num_gpus > MAX_GPUS:
        raise SpecError(f"gpus ({num_gpus}): a merged group has at most {MAX_GPUS}; merge fewer EP groups")
    return num_experts // ep


def plain_placement(num_experts: int, num_gpus: int, ep: int) -> Placement:
    """Plain expert parallelism: every EP group holds all experts in order.

    >>> plain_placement(4, 4, 2).copies.tolist()
    [[1, 0, 1, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 1, 0, 1]]
    """
    slots = slots_per_gpu(num_experts, num_gpus, ep)
    rank = np.arange(num_experts) // slots
    return Placement((rank[:, None] == np.arange(num_gpus) % ep).astype(np.int64))


def symmetric_placement(num_experts: int, num_gpus: int, ep: int, seed: int = 0) -> Placement:
    """Placement that knows no loads: every expert has d replicas, every pair of GPUs shares about as many experts.

    Notes
    -----
    With d = 2 replicas experts are the edges of a graph on the GPUs, here a Cayley graph (:mod:`mofa.routing.cayley`)
    where the group is a power of two. Otherwise slot by slot: the experts of one local index share all GPUs among
    them, in an order drawn anew for each slot (:func:`shuffled_placement`). Either way the replicas of an expert can
    have the same local index, which keeps data parallelism's gradient buckets from waiting for each other in a circle.

    References
    ----------
    MicroMoE, arXiv 2511.16947, section 6 and appendix B.

    Examples
    --------
    8 GPUs and 32 experts: the complete graph on 8 (28 edges) and four more.

    >>> shared = symmetric_placement(32, 8, 4).copies
    >>> together = shared.T @ shared
    >>> together[0].tolist()
    [8, 2, 1, 1, 1, 1, 1, 1]
    """
    slots_per_gpu(num_experts, num_gpus, ep)
    if num_gpus == 2 * ep and num_gpus & (num_gpus - 1) == 0:
        edges = cayley_gpu_pairs_of_experts(num_gpus, num_experts)
        copies = np.zeros((num_experts, num_gpus), dtype=np.int64)
        for end in edges.T:
            np.add.at(copies, (np.arange(num_experts), end), 1)
        return Placement(copies)
    return shuffled_placement(num_experts, num_gpus, ep, seed)


def shuffled_placement(num_experts: int, num_gpus: int, ep: int, seed: int = 0) -> Placement:
    """Random placement: every slot deals all GPUs out to its ep experts, d to each.

    >>> bool(np.all(shuffled_placement(8, 8, 4, seed=1).copies.sum(axis=0) == 2))
    True
    """
    slots = slots_per_gpu(num_experts, num_gpus, ep)
    rng = np.random.default_rng(seed)
    copies = np.zeros((num_experts, num_gpus), dtype=np.int64)
    for slot in range(slots):
        experts = np.repeat(np.arange(ep) * slots + slot, num_gpus // ep)
        copies[experts, rng.permutation(num_gpus)] = 1
    return Placement(copies)


def replica_counts(load: FloatA, num_replicas: int, most: int) -> IntA:
    """Replicas of each expert: one each, and every further one to the expert with the most load a replica.

    Parameters
    ----------
    load
        Tokens of the experts. (E,) [tokens]
    num_replicas
        Slots of all GPUs together. [-]
    most
        Replicas that one expert can have: the GPUs. [-]

    Raises
    ------
    SpecError
        If the experts, or the replicas, do not fit.

    References
    ----------
    MicroMoE, section 6; DeepSeek's EPLB, README, "replicate experts": the same greedy choice.

    Examples
    --------
    >>> replica_counts(np.array([8.0, 2.0, 1.0]), 6, 8)
    array([4, 1, 1])
    """
    num = len(load)
    if num_replicas < num:
        raise SpecError(f"replicas ({num_replicas}): {num} experts need a slot each; give more slots a GPU")
    if num_replicas > num * most:
        limit = num * most
        raise SpecError(f"replicas ({num_replicas}): {num} experts on {most} GPUs have at most {limit}; give fewer")
    counts = np.ones(num, dtype=np.int64)
    heap = [(-float(x), i) for i, x in enumerate(load)]
    heapify(heap)
    for _ in range(num_replicas - num):
        i = heap[0][1]
        counts[i] += 1
        heapreplace(heap, (-float(load[i]) / counts[i] if counts[i] < most else np.inf, i))
    return counts


def placement_dealt_at_random(load: FloatA, counts: IntA, num_gpus: int, rng: np.random.Generator) -> Placement:
    """Place so many replicas of each expert at random, each slot's experts on all GPUs once.

    Experts are put into slots, the most replicated first into the emptiest slot; where the last ones of a slot don't
    come out even, its busiest expert takes a replica more, and one too many is left out. The replicas of an expert
    lie on different GPUs and have the same local index.

    >>> rng = np.random.default_rng(0)
    >>> placed = placement_dealt_at_random(np.array([8.0, 2.0, 1.0]), np.array([4, 1, 1]), 3, rng)
    >>> placed.copies.sum(axis=0).tolist(), placed.copies.sum(axis=1).tolist()
    ([2, 2, 2], [3, 2, 1])
    """
    slots = int(counts.sum()) // num_gpus
    free_gpus = np.full(slots, num_gpus)
    members: list[list[int]] = [[] for _ in range(slots)]
    final = counts.copy()
    left = len(counts)
    for expert in np.argsort(-counts, kind="stable"):
        left -= 1
        slot = int(np.argmax(free_gpus))
        # every expert still to come needs a place
        final[expert] = min(counts[expert], free_gpus[slot], max(int(free_gpus.sum()) - left, 1))
        free_gpus[slot] -= final[expert]
        members[slot].append(int(expert))
    copies = np.zeros((len(counts), num_gpus), dtype=np.int64)
    for slot, experts in enumerate(members):
        while free_gpus[slot] > 0:
            open_ = [e for e in experts if final[e] < num_gpus]
            busiest = max(open_, key=lambda e: load[e] / final[e])
            final[busiest] += 1
            free_gpus[slot] -= 1
        copies[np.repeat(experts, final[experts]), rng.permutation(num_gpus)] = 1
    return Placement(copies)


def placement_packed_by_load(load: FloatA, num_gpus: int, slots: int) -> Placement:
    """Replicate by load and pack the heaviest replica first onto the least loaded GPU, as DeepSeek's EPLB does.

    Parameters
    ----------
    load
        Expected tokens of the experts. (E,) [tokens]
    num_gpus, slots
        GPUs of the group and experts that each holds. [-]

    Notes
    -----
    EPLB's global policy: a replica of an expert with r of them counts ``load / r``. A GPU that holds the expert already
    is taken only where no other has a free slot.

    References
    ----------
    DeepSeek, EPLB, https://github.com/deepseek-ai/EPLB, README.

    Examples
    --------
    >>> placement_packed_by_load(np.array([6.0, 2.0, 1.0]), 2, 2).copies.tolist()
    [[1, 1], [1, 0], [0, 1]]
    """
    counts = replica_counts(load, num_gpus * slots, num_gpus)
    each = load / counts
    copies = np.zeros((len(load), num_gpus), dtype=np.int64)
    loads, free = np.zeros(num_gpus), np.full(num_gpus, slots)
    for expert in np.argsort(-each, kind="stable"):
        for _ in range(counts[expert]):
            # free slots first, then GPUs without the expert, then the least loaded
            gpu = np.lexsort((loads, copies[expert] > 0, free == 0))[0]
            copies[expert, gpu] += 1
            loads[gpu] += each[expert]
            free[gpu] -= 1
    return Placement(copies)
