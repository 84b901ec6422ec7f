"""What a layer takes at least where its passes may run beside other layers' (:mod:`mofa.blocks.combined_passes`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mofa.cost.block.costs import BlockCosts
from mofa.cost.block.tape_clock import TapeTime

ArrayK = NDArray[np.float64]


def least_pass_quantity_in_pairs(costs: BlockCosts, pick: Callable[[TapeTime], ArrayK]) -> ArrayK:
    """The least of a quantity of passes that a forward and a backward of each kind of layer have in a step, by mode.

    Parameters
    ----------
    costs
        Of all blocks.
    pick
        The quantity of a pass. (K,)

    Returns
    -------
    array
        (modes, K, kinds)

    Notes
    -----
    A forward of kind i counts ``u_i``, a backward of kind j ``v_j``. With ``u_i`` and ``v_j`` below what either has
    alone, and ``u_i + v_j`` below what both have as a pair, no step has less than the sum over its passes. What passes
    have by themselves is lowered alike until that holds: a pair mixes kernels, and so runs at another clock.
    """
    out = []
    for spec, kinds in costs.blocks.items():
        forward, backward = [pick(kind.forward) for kind in kinds], [pick(kind.backward) for kind in kinds]
        share = _share_in_pairs(
            forward, backward, [[pick(pair) for pair in of] for of in costs.combined_layer_times[spec]]
        )
        out.append([share * (f + b) for f, b in zip(forward, backward, strict=True)])
    return np.ascontiguousarray(np.moveaxis(np.array(out), 2, 1))


def least_seconds_in_pairs(costs: BlockCosts) -> ArrayK:
    """The least seconds that a forward and a backward of each kind of layer have in a step, with what every pair waits
    besides. (modes, K, kinds) [s]"""
    out = []
    for spec, kinds in costs.blocks.items():
        alone = [[_least_s(getattr(kind, phase)) for kind in kinds] for phase in ("forward", "backward")]
        busy = [
            [np.minimum(getattr(kind, phase).busy, least) for kind, least in zip(kinds, of_phase, strict=True)]
            for phase, of_phase in zip(("forward", "backward"), alone, strict=True)
        ]
        pairs = [[_least_s(pair) for pair in of_forward] for of_forward in costs.combined_layer_times[spec]]
        share = _share_in_pairs(busy[0], busy[1], pairs)
        forward, backward = ([share * each for each in of_phase] for of_phase in busy)
        wait_s = [
            [np.maximum(pair - f - b, 0.0) for pair, b in zip(of_forward, backward, strict=True)]
            for of_forward, f in zip(pairs, forward, strict=True)
        ]
        of_backward = [
            np.minimum(least - b, np.minimum.reduce([of_forward[j] for of_forward in wait_s]))
            for j, (least, b) in enumerate(zip(alone[1], backward, strict=True))
        ]
        of_forward = [
            np.minimum(least - f, np.minimum.reduce([pair - v for pair, v in zip(waits, of_backward, strict=True)]))
            for least, f, waits in zip(alone[0], forward, wait_s, strict=True)
        ]
        parts = zip(forward, backward, of_forward, of_backward, strict=True)
        out.append([f + b + u + v for f, b, u, v in parts])
    return np.ascontiguousarray(np.moveaxis(np.array(out), 2, 1))


def _share_in_pairs(forward: list[ArrayK], backward: list[ArrayK], pairs: list[list[ArrayK]]) -> ArrayK:
    """The share of what passes have by themselves that every pair of them has. (K,) [-]"""
    shares = [
        pair / np.maximum(f + b, 1e-30)
        for f, of_forward in zip(forward, pairs, strict=True)
        for b, pair in zip(backward, of_forward, strict=True)
    ]
    return np.asarray(np.minimum(np.minimum.reduce(shares), 1.0))


def _least_s(phase: TapeTime) -> ArrayK:
    """The least that a tape takes, with its host far ahead or as late as it is by itself. (K,) [s]"""
    return np.asarray(np.minimum(phase.total_s, phase.clocks[0]))
