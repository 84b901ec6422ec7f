"""What computing and copies lose beside collectives that the host, far ahead of its device, launches behind them."""

from __future__ import annotations

import pytest

from mofa.replay.time.kernel_runs import FAMILY, NOW, SideStreamOp, Step, one_kernel_step
from mofa.replay.time.stream_clocks import StreamClocks


def side_op(name: str, seconds: float, slowdown: float, *reads: str) -> SideStreamOp:
    """An op on a stream of its own, which no host issues late."""
    return SideStreamOp(name, seconds, 0.0, FAMILY["dp"], name, reads, (name,), slowdown)


def kernel(seconds: float) -> Step:
    return one_kernel_step("product", seconds, 0.0, "gemm", ())


def computed_s(*steps: Step) -> float:
    """When the device has computed them all; host and device begin together. [s]"""
    clock = StreamClocks(0.0)
    clock.play_steps(steps)
    return clock.compute


@pytest.mark.parametrize("told_of_first", [True, False])
def test_computing_loses_as_much_beside_a_collective_told_of_later(told_of_first: bool) -> None:
    """One second beside a gather of 4 s that takes half of the rate: 2 s."""
    steps = [side_op("gather", 4.0, 0.5), kernel(1.0)]
    assert computed_s(*(steps if told_of_first else reversed(steps))) == pytest.approx(2.0)


@pytest.mark.parametrize("told_of_first", [True, False])
def test_computing_loses_no_longer_than_a_collective_lasts(told_of_first: bool) -> None:
    """Three seconds beside a gather of 2 s: half of these are lost."""
    steps = [side_op("gather", 2.0, 0.5), kernel(3.0)]
    assert computed_s(*(steps if told_of_first else reversed(steps))) == pytest.approx(4.0)


@pytest.mark.parametrize("copy_first", [True, False])
def test_a_copy_loses_beside_a_collective_as_computing_does(copy_first: bool) -> None:
    """A copy of 1 s takes 2 s beside a gather of 4 s, and nothing is computed until then: the second of computing
    behind it takes 2 s more."""
    steps = [side_op("copy", 1.0, 1.0, NOW), side_op("gather", 4.0, 0.5, NOW)]
    assert computed_s(*(steps if copy_first else reversed(steps)), kernel(1.0)) == pytest.approx(4.0)
