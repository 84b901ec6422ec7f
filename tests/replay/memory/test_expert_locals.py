"""What Python's frames hold of experts in fp8 at the fullest moment of a stage: recorded and played."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from mofa.replay.memory.rank_memory import play_memory
from mofa.replay.rank.from_estimator import describe_ranks
from tests.replay.runs import load

BEGINNINGS = Path(__file__).parents[3] / "reference_runs" / "beginnings"
RECORDED = "te2-pp2-qwen30b-6l-blockwise"
MB = 10**6
ROWS = {
    "permute_with_mask_map": "moe.sent",
    "sort_chunks_by_map": "moe.sorted",
    "fp8_padding": "experts.padded",
    "weighted_swiglu": "experts.act",
    "fp8_unpadding": "experts.unpadded",
}
"""Functions that allocate rows of tokens of one layer alone, and the tensors by which they are played."""


def _recorded_at_the_fullest_moment() -> dict[str, list[int]]:
    """Sizes of rows that are alive when the first rank's second step has the most, by the functions of ``ROWS``. [B]"""
    with gzip.open(BEGINNINGS / f"{RECORDED}.0.json.gz", "rt") as file:
        found = json.load(file)
    alive: dict[int, tuple[int, str]] = {}
    fullest: list[tuple[int, str]] = []
    total = most = 0
    rows = zip(found["action"], found["bytes"], found["address"], found["where"], strict=True)
    for i, (action, nbytes, address, where) in enumerate(rows):
        if found["actions"][action] == "alloc":
            alive[address] = nbytes, found["places"][where]
            total += nbytes
        elif found["actions"][action] == "free_requested" and address in alive:
            total -= alive.pop(address)[0]
        if i >= found["step_starts"][1] and total > most:
            most, fullest = total, list(alive.values())
    return {
        played: sorted(n for n, place in fullest if function in place and n > 10 * MB)
        for function, played in ROWS.items()
    }


def test_rows_that_the_experts_were_given_are_alive_until_they_return() -> None:
    """One tensor each of the layer that is passed, within the 2 % by which its tokens differ from step to step."""
    recorded = _recorded_at_the_fullest_moment()
    assert {name: len(sizes) for name, sizes in recorded.items()} == dict.fromkeys(ROWS.values(), 1)
    played = play_memory(describe_ranks(load(RECORDED).estimator)[0])
    tensors = {tensor.name: tensor for tensor in played.peak_instant.tensors}
    for name, (nbytes,) in recorded.items():
        assert tensors[name].count == 1, name
        assert abs(tensors[name].bytes / nbytes - 1) < 0.02, (name, tensors[name].bytes, nbytes)
