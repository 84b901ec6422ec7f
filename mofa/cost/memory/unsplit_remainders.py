"""What parameters and optimizer states hold beyond their bytes, as the allocator leaves the ends of segments whole.

Of a block that is found for a request the rest is cut off only if it is larger than 1 MiB
(PyTorch 2.11, CUDACachingAllocator.cpp, ``should_split``). Otherwise the request holds all of it, and it counts as
allocated. That is some percent of tensors of 1 to 20 MiB, such as those of many small experts. Expandable segments cut
all rests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.cost.block.block_cost import unique_rows
from mofa.cost.memory.reserved import LARGE_SEGMENT, MIN_OWN, ROUND, SMALL
from mofa.cost.optimizer import torchtitan_optimizer_element_bytes
from mofa.cost.rank_rules import has_flat_gradient_buffers, shards_optimizer_states, shards_params
from mofa.cost.rows import GatheredRows

ArrayN = NDArray[np.float64]
REPEATS, MOST = 4, 600
"""Layers that are laid out one behind the other, and tensors of them at most. [-]"""
TensorRuns = tuple[tuple[tuple[int, ...], int], ...]
"""A layer's tensors in order: sizes that come one behind the other, and how often they do. [B], [-]"""


class UnsplitRemainders(NamedTuple):
    """Unsplit remainders of each stage's parameters, of all its optimizer states, and of one state's temporaries.
    (n, R) each [B]"""

    params: ArrayN
    states: ArrayN
    step_scratch: ArrayN


def unsplit_remainder_bytes_per_layer(sizes: Sequence[int]) -> float:
    """Unsplit remainders of equal layers' tensors beyond these ``sizes``, each layer; allocated in order, none freed.
    [B]

    Examples
    --------
    Three of 6 MiB leave 2 MiB of a segment, which a fourth one can't use. Three of 6.5 MiB leave half a MiB, which
    the third one holds; one of 11.5 MiB holds its segment of 12:

    >>> [unsplit_remainder_bytes_per_layer((int(mib * 2**20),)) * 3 / 2**20 for mib in (6.0, 6.5, 11.5)]
    [0.0, 0.375, 1.5]
    """
    free, rests, layers = list[int](), 0, 0
    for _ in range(max(min(REPEATS, MOST // max(len(sizes), 1)), 1)):
        layers += 1
        for size in sizes:
            place = bisect_left(free, size)
            own = LARGE_SEGMENT if size < MIN_OWN else -(-size // ROUND) * ROUND
            rest = (free.pop(place) if place < len(free) else int(own)) - size
            if rest > SMALL:
                insort(free, rest)
            else:
                rests += rest
    return rests / layers


@lru_cache(maxsize=8192)
def _remainder_of_runs(runs: TensorRuns) -> float:
    """The same of sizes that repeat, such as those of thousands of experts. [B]"""
    return unsplit_remainder_bytes_per_layer([size for sizes, times in runs for size in sizes * times])


def unsplit_remainders(rows: GatheredRows, freed: ArrayN) -> UnsplitRemainders | None:
    """Unsplit remainders of the static tensors of layers, held beyond their bytes; None where all rests are cut, or
    none is left.

    Parameters
    ----------
    freed
        What is free of the first step when the optimizer's moments come. (n, R) [B]

    Notes
    -----
    Parameters and main copies lie one behind the other. So do moments, and what the step has beside them, as far as
    they do not fit into what is free: that is in large blocks, of which rests are cut. Of Megatron's distributed
    optimizer each rank owns some tensors whole: as many bytes of rests as of states.
    """
    if rows.framework.allocator == "expandable" or rows.framework.deepspeed:
        return None
    fw, shards, grid = rows.framework, rows.shards, rows.grid_index
    num_moments, flat = rows.workload.optimizer.traits.num_moments, has_flat_gradient_buffers(rows)
    wide = torchtitan_optimizer_element_bytes(rows.workload, rows.mode.precision)
    stored, each = (2.0, fw.states_bytes_per_param / 3.0) if flat else (wide * fw.params_bytes_per_param / 4.0, wide)
    ranks = (shards.dense_ranks[:, 0], shards.expert_ranks[:, 0]) if shards_params(rows) else (1.0, 1.0)
    of_params, of_state = (_of_stages(rows, width, ranks) for width in (stored, each))
    if flat:
        is_sharded = shards_optimizer_states(rows)[:, None]
        of_params = np.where(is_sharded, 0.0, of_params)  # in one buffer
        of_state = of_state * np.where(
            is_sharded, shards.sharded_bytes(1.0) / np.maximum(shards.unsharded_bytes(1.0), 1.0), 1.0
        )
    if not (of_params.any() or of_state.any()):
        return None
    state = np.maximum(rows.static.states[grid] / (num_moments + flat), 1.0)
    scratch = rows.static.step_scratch[grid]
    moments = np.clip(1.0 - freed / (num_moments * state), 0.0, 1.0)
    temporaries = np.clip(1.0 - (freed - num_moments * state) / np.maximum(scratch, 1.0), 0.0, 1.0)
    return UnsplitRemainders(
        of_params[grid], (flat + num_moments * moments) * of_state[grid],
        temporaries * np.minimum(scratch / state, 1.0) * of_state[grid],
    )  # fmt: skip


def _of_stages(rows: GatheredRows, width: float, ranks: Sequence[ArrayN | float]) -> ArrayN:
    """The rests of one tensor for each weight of the stages' layers, of so many bytes a parameter. (g, R) [B]"""
    counts = rows.stage_layers.stages.layer_counts[:, rows.stage_layers.shown.shown_stages].sum(axis=2).astype(float)
    weights, k = rows.costs.weights, rows.k[rows.first_row_of_grid]
    params, numbers = (
        weights.params_of_each_weight[:, k],
        np.maximum(weights.number_of_each_weight[:, k], 1.0).astype(np.int64),
    )
    sequential = rows.framework.experts == "sequential"
    out = np.zeros((len(k), counts.shape[1]))
    each = [np.broadcast_to(number, len(k)).astype(np.int64) for number in ranks]
    firsts, alike = unique_rows([k, *each])
    for kind in range(len(counts)):
        own = np.flatnonzero(weights.block_of_each_weight == kind)
        expert, some = weights.is_expert_weight[own], np.ix_(own, firsts)
        shared = np.where(expert[:, None], each[1][firsts], each[0][firsts])
        nbytes = (np.ceil(width * params[some] / shared / 512.0) * 512.0).astype(np.int64)
        of_layer = np.array([
            _remainder_of_layer(sizes.tobytes(), number.tobytes(), expert.tobytes(), sequential)
            for sizes, number in zip(nbytes.T, numbers[some].T, strict=True)
        ])[alike]  # fmt: skip
        out += of_layer[:, None] * counts[kind]
    return out


@lru_cache(maxsize=8192)
def _remainder_of_layer(nbytes: bytes, numbers: bytes, expert: bytes, sequential: bool) -> float:
    """The same of a layer's tensors, whose sizes, numbers and kinds are given as bytes: most rows have those of others.
    [B]"""
    sizes, times = (np.frombuffer(each, dtype=np.int64) for each in (nbytes, numbers))
    return _remainder_of_runs(_in_order(sizes, times, np.frombuffer(expert, dtype=np.bool_), sequential))


def _in_order(
    nbytes: NDArray[np.int64], numbers: NDArray[np.int64], expert: NDArray[np.bool_], sequential: bool
) -> TensorRuns:
    """A layer's tensors of more than 1 MiB as its modules register them: of experts in a loop one after the other."""
    dense, experts = list[tuple[int, int]](), list[tuple[int, int]]()
    for size, number, is_expert in zip(nbytes.tolist(), numbers.tolist(), expert.tolist(), strict=True):
        (experts if is_expert else dense).append((size, number if size > SMALL else 0))
    numbers_of_experts = {number for _, number in experts}
    if sequential and len(numbers_of_experts) == 1:
        in_loop = tuple(size for size, _ in experts), numbers_of_experts.pop()
        return (*(((size,), number) for size, number in dense), in_loop)
    return tuple(((size,), number) for size, number in (*dense, *experts))
