"""Memory of a layer's forward beside another layer's backward: the most alive at once of both, op by op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.build import BlockTapes
from mofa.blocks.combined_passes import ISSUED, part_of_each_op
from mofa.blocks.elementwise import broadcast_to_combinations, where
from mofa.blocks.op import KINDS

ArrayK = NDArray[np.float64]


def peak_bytes_of_layer_pair(
    forward: BlockTapes, backward: BlockTapes, num_k: int, *, delays: bool
) -> tuple[ArrayK, ArrayK]:
    """The most that a layer's forward and a layer's backward of another micro-batch hold at once, and of what kinds.

    Parameters
    ----------
    forward
        The layer that runs forward; its input and what it keeps are counted.
    backward
        The layer that runs backward; what its forward kept is counted.
    delays
        Whether weights' gradients are put off.

    Returns
    -------
    tuple of arrays
        (K,), (len(KINDS), K) [B]

    Notes
    -----
    The parts of both take turns as the host issues them. While an op of the one runs, the other holds what is alive
    behind its last op.
    """
    names = {
        "F": part_of_each_op(forward.forward, forward.backward, delays=delays)[0],
        "B": part_of_each_op(backward.forward, backward.backward, delays=delays)[1],
    }
    alive = {"F": _Alive(forward, num_k, backward=False), "B": _Alive(backward, num_k, backward=True)}
    most, kinds = np.zeros(num_k), np.zeros((len(KINDS), num_k))
    for of, part in ISSUED:
        own, other = alive[of], alive["B" if of == "F" else "F"]
        for position in own.ops_of(names[of], part):
            own.run(position)
            now = own.during + other.behind
            total = now.sum(axis=0)
            larger = total > most
            most, kinds = np.where(larger, total, most), np.where(larger, now, kinds)
    return most, kinds


class _Alive:
    """What a block's forward, or its backward, holds as its ops run: ``during`` its last op and ``behind`` it, by kind.
    (len(KINDS), K) [B]"""

    def __init__(self, block: BlockTapes, num_k: int, *, backward: bool) -> None:
        lifetimes, self.num_k = block.lifetimes, num_k
        first, last = lifetimes.first_backward_op, len(lifetimes.ops)
        self.begin, self.end = (first, last) if backward else (0, first)
        self.ops = lifetimes.ops
        self.starts: dict[int, list[tuple[int, ArrayK]]] = {}
        self.ends: dict[int, list[tuple[int, ArrayK]]] = {}
        self.behind = np.zeros((len(KINDS), num_k))
        for interval in lifetimes.intervals:
            if interval.end < self.begin or interval.start >= self.end:
                continue
            nbytes = interval.kind, broadcast_to_combinations(interval.bytes, num_k)
            if interval.start < self.begin or interval.tensor in (*block.forward.inputs, *block.backward.inputs):
                self.behind[interval.kind] += nbytes[1]
            else:
                self.starts.setdefault(interval.start, []).append(nbytes)
            self.ends.setdefault(interval.end, []).append(nbytes)
        self.during = self.behind

    def ops_of(self, names: Mapping[str, str], part: str) -> Sequence[int]:
        """The positions of a part's ops."""
        return [i for i in range(self.begin, self.end) if names[self.ops[i].name] == part]

    def run(self, position: int) -> None:
        """Run the op at a position."""
        op = self.ops[position]
        for kind, nbytes in self.starts.get(position, ()):
            self.behind[kind] += nbytes
        self.during = self.behind.copy()
        self.during[KINDS.index("scratch")] += broadcast_to_combinations(where(op.present, op.scratch, 0.0), self.num_k)
        for kind, nbytes in self.ends.get(position, ()):
            self.behind[kind] -= nbytes
