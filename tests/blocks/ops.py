"""Ops of tapes as tests look at them."""

from __future__ import annotations

import numpy as np

from mofa.blocks.op import Op, Tape
from mofa.blocks.work import MemoryBound


def one(tape: Tape, name: str) -> Op:
    """The only op of this name."""
    (op,) = [op for op in tape.ops if op.name == name]
    return op


def moved(op: Op) -> float:
    """Bytes that a memory-bound op moves, of the first candidate. [B]"""
    assert isinstance(op.work, MemoryBound)
    return float(np.asarray(op.work.bytes).reshape(-1)[0])
