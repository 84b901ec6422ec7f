"""How many buckets the gradients of a chunk fill, and what the last of them holds, of each grid of ranks.

A bucket takes whole weights, in the order of the backward, and is reduced once it is full. Each pays a collective's own
start: with many ranks and small buckets that is most of a reduction. The replay fills the same buckets weight by
weight.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.cost.rank_rules import first_reduced_bucket_params
from mofa.cost.rows import GatheredRows

ArrayN = NDArray[np.float64]


class BucketSizes(NamedTuple):
    """Buckets by the weight that fills them: those of one weight, in all layers alike, are nearly of one size.

    ``shares`` of all parameters each of them holds, ``numbers`` how many there are. (E, g) each [-]
    """

    shares: ArrayN
    numbers: ArrayN
    kinds: NDArray[np.intp]
    """The kind of layer, or behind these the embedding and the head, whose weight fills them. (E,)"""

    @classmethod
    def from_filled(cls, params: ArrayN, numbers: ArrayN, kinds: NDArray[np.intp]) -> BucketSizes:
        """Of all parameters in the buckets that each weight fills, and their numbers; one empty bucket where none is
        filled."""
        some = numbers.any(axis=1)
        params, numbers, kinds = params[some], numbers[some], kinds[some]
        if not len(numbers):
            return cls(np.ones((1, params.shape[1])), np.ones((1, params.shape[1])), np.full(1, -1))
        mean = params / np.maximum(numbers, 1.0)
        return cls(mean / np.maximum(params.sum(axis=0), 1.0), numbers, kinds)


class FilledBuckets(NamedTuple):
    """Buckets of dense parameters and of experts; the last is the one that is reduced last, with the embedding."""

    dense: ArrayN
    """Buckets of dense parameters. (g,) [-]"""
    expert: ArrayN
    """Buckets of experts. (g,) [-]"""
    last_params: ArrayN
    """Parameters in the last bucket of dense ones. (g,) [params]"""
    sizes: tuple[BucketSizes, BucketSizes]
    """Of dense parameters and of experts."""


@lru_cache(maxsize=1)
def megatron_first_chunk_buckets(rows: GatheredRows) -> FilledBuckets:
    """Buckets of Megatron's gradient buffers in the first chunk of the first stage; experts fill their own."""
    return first_chunk_buckets(rows, first_reduced_bucket_params(rows), experts_separate=True)


def first_chunk_buckets(rows: GatheredRows, full_params: ArrayN, *, experts_separate: bool) -> FilledBuckets:
    """The buckets of the first stage's first chunk, the embedding's gradient last.

    Parameters
    ----------
    full_params
        A bucket is closed once it holds so many parameters. (g,) [params]
    experts_separate
        Whether experts fill buckets of their own; else they count as dense.

    Notes
    -----
    Layers of one kind are taken to follow each other, and weights of one op to be one.
    """
    stages = rows.stage_layers.stages
    counts: list[int] = stages.layer_counts[:, 0, 0].tolist()
    has_head = bool(rows.stage_layers.stages_with_head[0]) and stages.vpp == 1
    weights, k = rows.costs.weights, rows.k[rows.first_row_of_grid]
    op_params = (weights.params_of_each_weight * weights.number_of_each_weight)[:, k]
    blocks, are_experts = tuple(weights.block_of_each_weight.tolist()), tuple(weights.is_expert_weight.tolist())
    as_bytes = [params.astype(np.float64).tobytes() for params in (op_params, full_params)]
    return _filled(*as_bytes, blocks, are_experts, tuple(counts), has_head, experts_separate)


@lru_cache(maxsize=64)
def _filled(
    params_of_ops: bytes, full_params_of_grids: bytes, blocks: tuple[int, ...], are_experts: tuple[bool, ...],
    counts: tuple[int, ...], has_head: bool, experts_separate: bool,
) -> FilledBuckets:  # fmt: skip
    """The same of so many layers of each kind, with or without the head: clocks, layouts and searches share them.

    ``params_of_ops`` are those of each op's weights, (W, g), ``full_params_of_grids`` those of full buckets, (g,), both
    as bytes; ``blocks`` and ``are_experts`` say whose the weights are, (W,).
    """
    full_params, kinds = np.frombuffer(full_params_of_grids), len(counts)
    op_params = np.frombuffer(params_of_ops).reshape(len(blocks), len(full_params))
    pieces = [(kinds, 1), *enumerate(counts), *([(kinds + 1, 1)] if has_head else [])]
    filled, number, last = np.zeros((3, 2, len(full_params)))
    by_weight = np.zeros((2, 2, 1 + len(blocks), len(full_params)))  # of dense and expert ones parameters and numbers
    for kind, count in reversed(pieces):
        of_kind = [
            (w, op_params[w], int(experts_separate and are_experts[w]))
            for w in reversed(range(len(blocks)))
            if blocks[w] == kind
        ]
        for w, params, group in of_kind * count:
            unreduced = filled[group]
            unreduced += params
            is_full = unreduced >= full_params
            number[group] += is_full
            by_weight[group, 0, w] += unreduced * is_full
            by_weight[group, 1, w] += is_full
            np.copyto(last[group], unreduced, where=is_full)
            unreduced[is_full] = 0.0
    rest = filled > 0.0
    by_weight[:, 0, -1], by_weight[:, 1, -1] = filled, rest
    last = np.where(rest, filled, last)
    number = np.maximum(number + rest, 1.0)
    of_weights = np.append(np.array(blocks, dtype=np.intp), kinds)  # what is left is filled up by the embedding
    dense, expert = (BucketSizes.from_filled(of_group[0], of_group[1], of_weights) for of_group in by_weight)
    return FilledBuckets(number[0], number[1], last[0], (dense, expert))


__all__ = ["BucketSizes", "FilledBuckets", "first_chunk_buckets", "megatron_first_chunk_buckets"]
