"""What torchtitan allocates before its first computation, in order: each model part's parameters and table of
rotations, what their first values are made of, and the buffers in which DDP hands them to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from mofa.cost.allocations.weight_buffers import WeightBytes
from mofa.cost.rows import GatheredRows

BROADCAST_BYTES = 250 * 2**20
"""Bytes from which DDP's broadcast of parameters begins another buffer (torch/nn/parallel/distributed.py,
``broadcast_bucket_size``)."""
IN_FLIGHT = 2
"""Such buffers at once (torch/csrc/distributed/c10d/comm.cpp, ``broadcast_coalesced``). [-]"""
TABLE, DRAFT, BROADCAST = "buffer", "draft of a first value", "broadcast of the parameters"
"""What is no parameter."""


class SlotRequest(NamedTuple):
    """So many bytes for a slot, named what they are for; 0 lets the slot go. [B]"""

    slot: int
    nbytes: int
    name: str


def rotary_table_bytes_of_model_part(rows: GatheredRows) -> tuple[int, ...]:
    """The table of every position's rotation that torchtitan registers for each model part: complex, or cosine and sine
    of the whole head where queries and keys are normed (Qwen3). [B]

    Returns
    -------
    tuple[int, ...]
        The table's bytes, then those of what it is made of: angles and ones (``torch.polar``), or angles, the same
        twice, cosine and sine (models/*/model/model.py, ``precompute_freqs_cis`` and ``precompute_rope_cache``).
    """
    a = rows.workload.model.attention
    if not rows.framework.traits.makes_rotation_tables or rows.workload.model.positions != "rope":
        return ()
    width = 2 * a.d_qk if a.qk_norm else a.d_rope
    table_bytes = 4 * rows.workload.batch.seq_len * int(width)
    parts = (table_bytes // 4, *[table_bytes // 2] * 3) if a.qk_norm else [table_bytes // 2] * 2
    return (table_bytes, *parts)


def weight_init_requests(weights: Sequence[WeightBytes], table: Sequence[int]) -> list[SlotRequest]:
    """Part after part: empty parameters and table, then their values (train.py, ``to_empty`` and ``init_weights``).

    The table is made anew, in new memory; a matrix that is not fp32 gets its values through a copy that is.

    Examples
    --------
    >>> weight = WeightBytes("a wq", 2, 0, 2, 0, init_copy_bytes=4)
    >>> weight_init_requests([weight], (8, 4, 4))[3:7]  # doctest: +NORMALIZE_WHITESPACE
    [SlotRequest(slot=3, nbytes=4, name='draft of a first value'), SlotRequest(slot=4, nbytes=8, name='buffer'),
     SlotRequest(slot=2, nbytes=0, name=''), SlotRequest(slot=3, nbytes=0, name='')]
    """
    out: list[SlotRequest] = []
    slots = count()

    def take(nbytes: int, name: str) -> int:
        out.append(SlotRequest(next(slots), nbytes, name))
        return out[-1].slot

    def give(slot: int) -> None:
        out.append(SlotRequest(slot, 0, ""))

    for c in sorted({w.chunk for w in weights}):
        of_chunk = [w for w in weights if w.chunk == c]
        for w in of_chunk:
            take(w.param_bytes, w.name)
        if table:
            old = take(table[0], TABLE)
            parts = [take(nbytes, DRAFT) for nbytes in table[1:]]
            take(table[0], TABLE)
            for slot in (*parts, old):
                give(slot)
        for w in sorted(of_chunk, key=lambda w: w.purpose == "embedding"):  # which is the head's, where it is one
            if w.init_copy_bytes:
                give(take(w.init_copy_bytes, DRAFT))
    return out


def ddp_broadcast_requests(weights: Sequence[WeightBytes]) -> list[SlotRequest]:
    """The flat buffers in which DDP hands the first rank's parameters to the others when it is made, at the first
    forward; a parameter that fills one alone needs none (torch/csrc/utils/tensor_flatten.h, ``flatten_dense_tensors``).

    Examples
    --------
    The first and the second go alone, two small ones and the third together.

    >>> sizes = (300 << 20, 400 << 20, 1 << 20, 1 << 20, 500 << 20)
    >>> [(w.slot, w.nbytes >> 20) for w in ddp_broadcast_requests([WeightBytes("w", n, 0, 0, 0) for n in sizes])]
    [(2, 502), (2, 0)]
    """
    filled: list[list[int]] = [[]]
    for w in weights:
        if sum(filled[-1]) >= BROADCAST_BYTES:
            filled.append([])
        filled[-1].append(w.param_bytes)
    out: list[SlotRequest] = []
    for n, sizes in enumerate(filled):
        if n >= IN_FLIGHT and len(filled[n - IN_FLIGHT]) > 1:
            out.append(SlotRequest(n - IN_FLIGHT, 0, ""))
        if len(sizes) > 1:
            out.append(SlotRequest(n, sum(sizes), BROADCAST))
    last = range(max(len(filled) - IN_FLIGHT, 0), len(filled))
    return [*out, *(SlotRequest(n, 0, "") for n in last if len(filled[n]) > 1)]
