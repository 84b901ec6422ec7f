"""Which layers each pipeline stage and virtual chunk holds, and how many activations are in flight there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.build import BlockKind, block_kinds, layer_kind
from mofa.schedules import SCHEDULES, Placement
from mofa.schedules.order import hands_over, ranks_of_stages
from mofa.specs.framework_traits import TRAITS
from mofa.specs.model import ModelSpec
from mofa.specs.params import layer_params
from mofa.specs.strategy import RecomputeSpec

ArrayN = NDArray[np.float64]
IntA = NDArray[np.int64]
BoolA = NDArray[np.bool_]


Recomputed = tuple[tuple[tuple[bool, ...], ...], ...]
"""Whether each layer of each chunk of each rank is recomputed whole. (pp, vpp, layers of the chunk)"""


@dataclass(frozen=True)
class Stages:
    """Which layers each pipeline rank holds in each of its chunks, and what a chunk has at its ends.

    ``counts`` (kinds, pp, vpp); ``kinds`` names the first axis; ``layers`` (pp, vpp) lists the layers of each chunk
    by index of kind, in forward order, ``first_layers`` (pp, vpp) the number of the first of them in the model. The
    embedding is on stage 0, the head and the multi-token-prediction layers on stage ``head_stage``: the last one, or
    stage 0 where chunks are placed in a V.
    """

    kinds: tuple[BlockKind, ...]
    counts: IntA
    layers: tuple[tuple[tuple[int, ...], ...], ...]
    first_layers: tuple[tuple[int, ...], ...]
    placement: Placement

    @property
    def pp(self) -> int:
        return int(self.counts.shape[1])

    @property
    def vpp(self) -> int:
        return int(self.counts.shape[2])

    @property
    def num_chunks(self) -> int:
        """Chunks of the model on all ranks. [-]"""
        return self.pp * self.vpp

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each of the model's chunks, along the model."""
        return ranks_of_stages(self.pp, self.vpp, self.placement)

    @cached_property
    def positions(self) -> IntA:
        """Where along the model each chunk is; the first chunk of a model has the embedding. (pp, vpp)"""
        out = np.empty((self.pp, self.vpp), dtype=np.int64)
        for position, rank in enumerate(self.ranks):
            out[rank, position // self.pp] = position
        return out

    @property
    def ranks_of_layers(self) -> IntA:
        """The rank of each layer of the model. (layers,)"""
        chunks = ((rank, self.layers[rank][position // self.pp]) for position, rank in enumerate(self.ranks))
        return np.array([rank for rank, chunk in chunks for _ in chunk], dtype=np.int64)

    @property
    def head_stage(self) -> int:
        """The rank with the model's last chunk, which has the head behind it."""
        return self.ranks[-1]

    @cached_property
    def has_embedding(self) -> BoolA:
        """Whether each rank has the embedding. (pp,)"""
        return np.asarray((self.positions == 0).any(axis=1))

    @cached_property
    def has_head(self) -> BoolA:
        """Whether each rank has the head, and the multi-token-prediction layers. (pp,)"""
        return np.asarray((self.positions == self.num_chunks - 1).any(axis=1))

    @cached_property
    def is_last(self) -> BoolA:
        """Whether each rank is the pipeline's last. (pp,)"""
        return np.asarray(np.arange(self.pp) == self.pp - 1)

    @cached_property
    def sends(self) -> BoolA:
        """Whether each chunk's output goes to another rank. (pp, vpp)"""
        return np.array(hands_over(self.ranks))[self.positions]

    @cached_property
    def receives(self) -> BoolA:
        """Whether each chunk's input comes from another rank. (pp, vpp)"""
        return np.array((False, *hands_over(self.ranks)))[self.positions]

    @cached_property
    def feeds_own_chunk(self) -> BoolA:
        """Whether each chunk's output goes to another chunk of its rank, where others have chunks too. (pp, vpp)"""
        return np.asarray(~self.sends & (self.positions < self.num_chunks - 1) & (self.pp > 1))

    @cached_property
    def behind(self) -> ArrayN:
        """Layers of each other kind behind the last layer of a kind in the last chunk. (kinds, kinds, pp)"""
        out = np.zeros((len(self.kinds), len(self.kinds), self.pp))
        for r, chunks in enumerate(self.layers):
            chunk = chunks[-1]
            for kind in set(chunk):
                last = len(chunk) - 1 - chunk[::-1].index(kind)
                for other in chunk[last + 1 :]:
                    out[kind, other, r] += 1
        return out

    def recomputed(self, spec: RecomputeSpec, first: int) -> Recomputed:
        """Which layers are recomputed whole.

        Parameters
        ----------
        spec
            ``full`` recomputes the ``first`` layers of every chunk, Megatron's block method; ``every`` each n-th layer
            of a rank, counted over its chunks, torchtitan's layer-selective mode. Others recompute none whole.
        first
            All layers of a chunk where negative. [-]
        """
        known = self._recomputed
        if (spec, first) not in known:
            known[spec, first] = tuple(_recomputed(chunks, spec, first) for chunks in self.layers)
        return known[spec, first]

    def num_recomputed(self, spec: RecomputeSpec, first: int) -> IntA:
        """Numbers of the layers of :meth:`recomputed`. (kinds, pp, vpp)"""
        known = self._num_recomputed
        if (spec, first) not in known:
            out = known[spec, first] = np.zeros_like(self.counts)
            for r, chunks in enumerate(self.recomputed(spec, first) if spec.kind in ("full", "every") else ()):
                for c, chunk in enumerate(chunks):
                    for kind, is_recomputed in zip(self.layers[r][c], chunk, strict=True):
                        out[kind, r, c] += is_recomputed
        return known[spec, first]

    @cached_property
    def _recomputed(self) -> dict[tuple[RecomputeSpec, int], Recomputed]:
        return {}

    @cached_property
    def _num_recomputed(self) -> dict[tuple[RecomputeSpec, int], IntA]:
        return {}

    @property
    def largest_chunk(self) -> int:
        return int(self.counts.sum(axis=0).max())


def _recomputed(chunks: tuple[tuple[int, ...], ...], spec: RecomputeSpec, first: int) -> tuple[tuple[bool, ...], ...]:
    """Of the layers of a rank's chunks those that are recomputed whole."""
    if spec.kind == "full":
        return tuple(tuple(first < 0 or j < first for j in range(len(chunk))) for chunk in chunks)
    if spec.kind != "every":
        return tuple((False,) * len(chunk) for chunk in chunks)
    number = count(1)
    return tuple(tuple(next(number) % (spec.layers or 1) == 0 for _ in chunk) for chunk in chunks)


@lru_cache(maxsize=512)
def split_layers(
    model: ModelSpec, pp: int, vpp: int, framework: str, placement: Placement = "loop", splits: str = "even"
) -> Stages:
    """Split a model's layers over stages and chunks as the framework does.

    Megatron splits evenly where the layers divide, else by a layout that makes the heaviest chunk lightest, with the
    head (and multi-token-prediction layers) counted; with one or two layers fewer than chunks the last chunk holds the
    head alone and the first the embedding alone (Llama 3 405B: 126 layers in 128 chunks). torchtitan counts embedding
    and head as a layer each and gives the first stages one more. DeepSpeed's ``splits`` fill all stages but the last.

    Raises
    ------
    ValueError
        If there are too few layers for the chunks.
    """
    num_chunks = pp * vpp
    spare = num_chunks - model.num_layers
    if spare > (0 if TRAITS[framework].has_pytorch_modules or pp == 1 else 2):
        raise ValueError(
            f"{model.num_layers} layers over pp {pp} x vpp {vpp} = {num_chunks} chunks leave a chunk empty"
        )
    if splits != "even" and pp > 1:
        sizes = _greedy_sizes(model.num_layers, num_chunks, ends=splits == "greedy-embeddings")
    elif spare > 0:  # Megatron's layouts may give the last chunk the head alone, and the first the embedding alone
        sizes = [0] * (spare - 1) + [1] * model.num_layers + [0]
    elif TRAITS[framework].has_pytorch_modules:
        sizes = _torchtitan_sizes(model.num_layers, num_chunks)
    elif model.num_layers % num_chunks == 0:
        sizes = [model.num_layers // num_chunks] * num_chunks
    else:
        sizes = _balanced_sizes(model, num_chunks)
    kinds = block_kinds(model)
    index = {kind: i for i, kind in enumerate(kinds)}
    counts = np.zeros((len(kinds), pp, vpp), dtype=np.int64)
    layers: list[list[tuple[int, ...]]] = [[] for _ in range(pp)]
    first_layers: list[list[int]] = [[] for _ in range(pp)]
    start = 0
    for rank, size in zip(ranks_of_stages(pp, vpp, placement), sizes, strict=True):
        chunk = tuple(index[layer_kind(model, i)] for i in range(start, start + size))
        for kind in chunk:
            counts[kind, rank, len(layers[rank])] += 1
        layers[rank].append(chunk)
        first_layers[rank].append(start)
        start += size
    return Stages(kinds, counts, tuple(map(tuple, layers)), tuple(map(tuple, first_layers)), placement)


def layer_weight(model: ModelSpec, moe: bool) -> float:
    """Parameters that a token uses in one layer: its relative cost when layers are balanced. [params]"""
    p = layer_params(model, moe)
    routed = p.routed * model.moe.top_k / model.moe.num_experts if moe and model.moe else 0.0
    return p.total - p.routed + routed


EMBEDDING_WEIGHT = 0.1
"""Cost of an embedding parameter over that of a matrix parameter: its gradient moves some 10 B a parameter and
micro-batch (3 ps at 3.5 TB/s), a matrix takes 6 FLOP a token (35 ps at 4096 tokens and 700 TFLOP/s). [-]"""


def _balanced_sizes(model: ModelSpec, num_chunks: int) -> list[int]:
    """Contiguous chunk sizes, at least one layer each, that make the heaviest chunk lightest.

    Of several that do, every cut, from the last on, is the earliest one. Weights are numbers of parameters, whose sums
    are exact, so that no rounding decides.
    """
    weights = np.array([layer_weight(model, model.is_moe_layer(i)) for i in range(model.num_layers)])
    head = float(model.vocab * model.hidden)
    tail = head + model.num_mtp_layers * (weights[-1] + head)
    total = np.concatenate([[0.0], np.cumsum(weights)])
    n = model.num_layers
    cost = total[None, :] - total[:, None]  # cost[i, j]: layers i..j-1
    cost = np.where(np.arange(n + 1)[:, None] < np.arange(n + 1)[None, :], cost, np.inf)
    best = cost[0] + EMBEDDING_WEIGHT * head
    back = []
    for chunk in range(1, num_chunks):
        last = chunk == num_chunks - 1
        options = np.maximum(best[:, None], cost + (tail if last else 0.0))
        # among equals the earlier cut: the first stages keep the most micro-batches, so they get fewer layers
        choice = np.argmin(options, axis=0)
        best = options[choice, np.arange(n + 1)]
        back.append(choice)
    sizes, end = [], n
    for choice in reversed(back):
        start = int(choice[end])
        sizes.append(end - start)
        end = start
    sizes.append(end)
    return sizes[::-1]


def _greedy_sizes(num_layers: int, num_chunks: int, *, ends: bool) -> list[int]:
    """DeepSpeed's: the smallest size of the fullest stage, which all stages have until none is left.

    ``ends``: the embedding and the head count as a layer each (deepspeed/runtime/utils.py, ``partition_balanced``).

    Raises
    ------
    ValueError
        If a stage gets no layer.

    Examples
    --------
    >>> _greedy_sizes(78, 12, ends=False)[-2:], _greedy_sizes(70, 12, ends=True)[:2]
    ([7, 1], [5, 6])
    """
    items = num_layers + 2 * ends
    most = -(-items // num_chunks)
    sizes = [max(min(most, items - most * i), 0) for i in range(num_chunks)]
    sizes[0] -= ends
    sizes[-1] -= ends
    if min(sizes) < 1:
        raise ValueError(f"{num_layers} layers over {num_chunks} stages of up to {most} leave a stage without a layer")
    return sizes


def _torchtitan_sizes(num_layers: int, num_chunks: int) -> list[int]:
    if num_chunks == 1:
        return [num_layers]
    base, extra = divmod(num_layers + 2, num_chunks)
    sizes = [base + (1 if i < extra else 0) for i in range(num_chunks)]
    sizes[0] -= 1
    sizes[-1] -= 1
    return sizes


@lru_cache(maxsize=4096)
def _in_flight(pp: int, vpp: int, schedule: str, m: int) -> ArrayN:
    return np.array(SCHEDULES[schedule].in_flight(pp, vpp, m), dtype=float)


def in_flight(pp: int, vpp: int, schedule: str, num_micro_batches: int) -> ArrayN:
    """Micro-batches whose activations each chunk of each stage holds when the first backward begins. (pp, vpp)

    GPipe holds all; 1F1B ``min(m, pp - r)``; interleaved 1F1B runs ``2 (pp - r - 1) + (vpp - 1) pp`` chunk forwards
    before its first backward and one with it (Narayanan et al. 2021, arXiv 2104.04473, section 2.2); where pp does not
    divide m, PyTorch's rounds take the place of pp (:func:`mofa.schedules.interleaved.micro_batches_per_round`).

    Examples
    --------
    >>> in_flight(4, 1, "1f1b", 8)[:, 0]
    array([4., 3., 2., 1.])
    >>> in_flight(2, 2, "interleaved", 8).sum(axis=1)
    array([5., 3.])
    """
    return _in_flight(pp, vpp, schedule, int(enough_for_flight(pp, schedule, np.array([num_micro_batches]))[0]))


def enough_for_flight(pp: int, schedule: str, num_micro_batches: IntA) -> IntA:
    """Micro-batches with which as many are in flight, but for those that GPipe holds: four rounds of equal length. (n,)

    Examples
    --------
    >>> enough_for_flight(4, "interleaved", np.array([7, 10, 64]))
    array([ 7, 10, 16])
    """
    if SCHEDULES[schedule].forwards_first:
        return num_micro_batches
    count = np.maximum(num_micro_batches // pp, 1)
    return np.where(count > 4, 4 * (num_micro_batches // count), num_micro_batches)
