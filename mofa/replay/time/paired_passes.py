"""What a rank plays in a pair of passes: a forward of one micro-batch beside the backward of another, layer by layer.

Layers run side by side as far as both chunks have one, then those that are left over. The embedding comes ahead of all,
and what the head has of the backward behind it; the head's forward and the embedding's backward come last
(megatron_core 0.16.1, models/common/model_chunk_schedule_plan.py, ``TransformerModelChunkSchedulePlan.run``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from mofa.cost.rank_spec import BlockSpec


class PairedPiece(NamedTuple):
    """A block's forward, a block's backward, or both side by side."""

    forward: BlockSpec | None
    backward: BlockSpec | None

    @property
    def name(self) -> str:
        """What runs."""
        return " beside ".join(block.name for block in self if block is not None)


def pieces_of_pair(forward: Sequence[BlockSpec], backward: Sequence[BlockSpec]) -> list[PairedPiece]:
    """The pieces of a pair, in order.

    Parameters
    ----------
    forward
        The blocks of the chunk that runs forward, in the order of the model.
    backward
        Those of the chunk that runs backward, in the same order.

    Examples
    --------
    >>> layers = [BlockSpec("layer", "moe", number) for number in range(2)]
    >>> [piece.name for piece in pieces_of_pair([BlockSpec("embedding", "embedding"), *layers], layers[:1])]
    ['embedding', 'block 0 beside block 0', 'block 1']
    """
    ahead_of, ends = _with_what_is_ahead(forward)
    ahead_of_backward, backward_ends = _with_what_is_ahead(backward[::-1])
    out: list[PairedPiece] = []
    alone: list[PairedPiece] = []
    for of_forward, of_backward in zip_longest(ahead_of, ahead_of_backward):
        *before, layer = of_forward or (None,)
        *behind, layer_back = of_backward or (None,)
        pieces = [PairedPiece(block, None) for block in before] + [PairedPiece(None, block) for block in behind]
        out += [*pieces, PairedPiece(layer, layer_back)]
    alone += [PairedPiece(block, None) for block in ends] + [PairedPiece(None, block) for block in backward_ends]
    return out + alone


def _with_what_is_ahead(blocks: Sequence[BlockSpec]) -> tuple[list[list[BlockSpec]], list[BlockSpec]]:
    """Each layer behind the ends that come ahead of it, and the ends behind the last layer."""
    out: list[list[BlockSpec]] = []
    ahead: list[BlockSpec] = []
    for block in blocks:
        ahead.append(block)
        if block.is_layer:
            out.append(ahead)
            ahead = []
    return out, ahead
