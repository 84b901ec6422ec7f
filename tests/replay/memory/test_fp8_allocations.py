"""The order in which fp8 linears allocate and free, as recorded from the beginning of runs and as played."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path

import pytest

from mofa.replay.allocator.caching import Allocator
from mofa.replay.memory.executor import StepExecutor
from mofa.replay.rank.from_estimator import describe_ranks
from tests.replay.runs import load

BEGINNINGS = Path(__file__).parents[3] / "reference_runs" / "beginnings"
MIB = 1 << 20
LEAST = 33
"""Allocations below are left out: workspaces of 32 MiB come one place earlier as played. [MiB]"""
TUNING = 60
"""Of PyTorch's compiled kernels, which are tuned at their first use: the size of a buffer that clears the L2. [MiB]"""

Allocation = tuple[int, Counter[int]]
"""Its size, and how many there are of each size then. [MiB]"""


def _allocations(events: Iterator[int]) -> list[Allocation]:
    """Of sizes with their signs."""
    alive: Counter[int] = Counter()
    out = []
    for nbytes in events:
        size = round(abs(nbytes) / MIB)
        if size < LEAST:
            continue
        alive[size] += 1 if nbytes > 0 else -1
        if nbytes > 0:
            out.append((size, +alive))
    return out


def _recorded(name: str) -> list[Allocation]:
    with gzip.open(BEGINNINGS / f"{name}.0.json.gz", "rt") as file:
        history = json.load(file)
    sign = {"alloc": 1, "free_completed": -1}
    rows = zip(history["action"], history["bytes"], history["where"], strict=True)
    events = [
        sign[action] * nbytes
        for i, (number, nbytes, where) in enumerate(rows)
        if i >= history["step_starts"][0] and (action := history["actions"][number]) in sign
        and not (round(nbytes / MIB) == TUNING and "fused_bias" in history["places"][where])
    ]  # fmt: skip
    return _allocations(iter(events))


def _played(name: str) -> list[Allocation]:
    player = StepExecutor(describe_ranks(load(name).estimator)[0], Allocator(), skip_rounds=False)
    player.allocate_parameters_and_buffers()
    first = player.state.journal.num_events
    player.run_step()
    player.run_step()
    _, sizes = player.state.journal.instructions_and_sizes_since(first)
    return _allocations(iter(sizes))


@pytest.mark.parametrize(
    ("name", "size", "each"), [("h200-te1-ministral8b-7l-delayed", 64, 2), ("te1-nemo12b-5l-tensorwise", 80, 3)]
)
def test_two_steps_allocate_what_was_recorded(name: str, size: int, each: int) -> None:
    """All in order, with as much of each size alive: the zeros of a first backward, norms' outputs behind the copies
    that they are cast to. Not played are activations of a micro-batch that autograd makes anew for a sum, and of
    several sequences the embedding's output, which is transposed."""
    prefix = "" if name.startswith("h200") else "h200-"
    recorded, played = _recorded(f"{prefix}{name}-beginning"), _played(name)
    same = SequenceMatcher(None, [nbytes for nbytes, _ in recorded], [nbytes for nbytes, _ in played], autojunk=False)
    taken: list[int] = []
    differs = matched = 0
    for kind, first, last, begin, end in same.get_opcodes():
        if kind == "equal":
            matched += last - first
            differs += sum(a != b for (_, a), (_, b) in zip(recorded[first:last], played[begin:end], strict=True))
        else:
            assert begin == end, f"{played[begin:end]} played, {recorded[first:last]} recorded"
            taken += [nbytes for nbytes, _ in recorded[first:last]]
    assert taken == [size] * (2 * 2 * each)
    assert differs <= 0.03 * matched, f"{differs} of {matched} have others alive"
