"""Ops that run in turn, against the same ops played round by round."""

from __future__ import annotations

import numpy as np
import pytest

from mofa.blocks.op import Op
from mofa.blocks.work import GroupedGemm, MemoryBound
from mofa.cost.block.sequential_experts import expert_loop_issue_seconds

ROUNDS = 16


def played(steps: list[tuple[float, float]], host: float, device: float) -> tuple[float, float]:
    """Ends of the host's and the device's clock after steps of (device, issue) seconds."""
    for seconds, issue in steps:
        host += issue
        if seconds:
            device = max(device, host) + seconds
    return host, device


@pytest.mark.parametrize("lead", [0.0, 3.0, 40.0])
@pytest.mark.parametrize("issue", [(0.2, 0.1, 0.1), (1.0, 0.5, 0.5), (3.0, 2.0, 1.0)])
def test_the_device_waits_as_it_does_round_by_round(issue: tuple[float, ...], lead: float) -> None:
    """Whoever is slower, at most one round apart; the host ends at the same time."""
    seconds = (1.0, 0.1, 0.5)
    ops = [Op(name, "gemm", MemoryBound(1.0), expert_loops=float(ROUNDS)) for name in "abc"] + [
        Op("cat", "gemm", MemoryBound(1.0))
    ]
    whole = [s * ROUNDS for s in seconds] + [0.5]
    moved = expert_loop_issue_seconds(ops, whole, [i * ROUNDS for i in issue] + [0.1])
    turns = [step for _ in range(ROUNDS) for step in zip(seconds, issue, strict=True)] + [(0.5, 0.1)]
    host, device = played(list(zip(whole, moved, strict=True)), -lead, 0.0)  # type: ignore[arg-type]
    twin_host, twin_device = played(turns, -lead, 0.0)
    assert host == pytest.approx(twin_host)
    assert device == pytest.approx(twin_device, abs=max(sum(seconds), sum(issue)))
    assert device <= twin_device + 1e-9


def test_nothing_changes_without_rounds_or_where_there_is_one() -> None:
    ops = [Op(name, "gemm", MemoryBound(1.0), expert_loops=np.array([1.0, 4.0])) for name in "ab"] + [
        Op("c", "gemm", MemoryBound(1.0))
    ]
    found = expert_loop_issue_seconds(ops, [1.0, 1.0, 1.0], [2.0, 3.0, 1.0])
    assert [float(x[0]) for x in found] == [2.0, 3.0, 1.0]  # type: ignore[index]
    assert [float(x[1]) for x in found] == [3.25, 0.0, 2.75]  # type: ignore[index]
    plain = [op._replace(expert_loops=1.0) for op in ops]
    assert expert_loop_issue_seconds(plain, [1.0, 1.0, 1.0], [2.0, 3.0, 1.0]) == [2.0, 3.0, 1.0]


@pytest.mark.parametrize("issue", [0.3, 0.7, 0.9, 1.0, 1.2, 2.0])
@pytest.mark.parametrize("rounds", [4, 16, 64])
def test_unequal_rounds_make_the_device_wait_as_random_orders_do(issue: float, rounds: int) -> None:
    """Products of lognormal lengths, the mean of 1, issued alike: 400 orders of 20 draws, played."""
    rng = np.random.default_rng(rounds)
    waits, told = [], []
    for _ in range(20):
        lengths = np.exp(0.5 * rng.standard_normal(rounds))
        lengths /= lengths.mean()
        for _ in range(20):
            _, end = played([(d, issue) for d in rng.permutation(lengths)], 0.0, 0.0)
            waits.append(end - rounds)
        work = GroupedGemm(1.0, 1.0, 1.0, 1.0, sequential=True, uneven=lengths.std())
        ops = [Op("a", "grouped_gemm", work, expert_loops=float(rounds)), Op("cat", "gemm", MemoryBound(1.0))]
        moved = expert_loop_issue_seconds(ops, [float(rounds), 0.0], [issue * rounds, 0.0])
        told.append(played([(float(rounds), float(moved[0])), (0.0, float(moved[1]))], 0.0, 0.0)[1] - rounds)
    assert np.mean(told) == pytest.approx(np.mean(waits), abs=0.25)
