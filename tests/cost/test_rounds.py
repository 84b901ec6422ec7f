"""Ops that run in turn, against the same ops played round by round."""

from __future__ import annotations

import numpy as np
import pytest

from mofa.blocks.op import Op, Stream
from mofa.cost.rounds import in_turn

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
    ops = [Op(name, "gemm", Stream(1.0), rounds=float(ROUNDS)) for name in "abc"] + [Op("cat", "gemm", Stream(1.0))]
    whole = [s * ROUNDS for s in seconds] + [0.5]
    moved = in_turn(ops, whole, [i * ROUNDS for i in issue] + [0.1])
    turns = [step for _ in range(ROUNDS) for step in zip(seconds, issue, strict=True)] + [(0.5, 0.1)]
    host, device = played(list(zip(whole, moved, strict=True)), -lead, 0.0)  # type: ignore[arg-type]
    twin_host, twin_device = played(turns, -lead, 0.0)
    assert host == pytest.approx(twin_host)
    assert device == pytest.approx(twin_device, abs=max(sum(seconds), sum(issue)))
    assert device <= twin_device + 1e-9


def test_nothing_changes_without_rounds_or_where_there_is_one() -> None:
    ops = [Op(name, "gemm", Stream(1.0), rounds=np.array([1.0, 4.0])) for name in "ab"] + [Op("c", "gemm", Stream(1.0))]
    found = in_turn(ops, [1.0, 1.0, 1.0], [2.0, 3.0, 1.0])
    assert [float(x[0]) for x in found] == [2.0, 3.0, 1.0]  # type: ignore[index]
    assert [float(x[1]) for x in found] == [3.25, 0.0, 2.75]  # type: ignore[index]
    plain = [op._replace(rounds=1.0) for op in ops]
    assert in_turn(plain, [1.0, 1.0, 1.0], [2.0, 3.0, 1.0]) == [2.0, 3.0, 1.0]
