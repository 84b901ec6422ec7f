"""Whose a wait is under a host that issues late: a family's what a host far ahead would leave, host idle the rest."""

from __future__ import annotations

import pytest

from mofa.cost.block.tape_clock import EXPOSED
from mofa.replay.time.kernel_runs import FAMILY, NOW, SideStreamOp, Step, one_kernel_step, waiting_step
from mofa.replay.time.stream_clocks import StreamClocks


def gather(name: str, seconds: float, issue: float, *reads: str) -> SideStreamOp:
    """A gather of experts behind what has been computed."""
    return SideStreamOp(name, seconds, issue, FAMILY["ep"], "ep", (*reads, NOW), (name,), 0.0)


def kernel(seconds: float, issue: float, *waits: str) -> Step:
    """A product behind tensors of other streams."""
    return one_kernel_step("product", seconds, issue, "gemm", waits)


def named(*steps: Step) -> dict[str, float]:
    """What computing does and waits for in these steps, by name; device and host begin together. [s]"""
    clock = StreamClocks(0.0)
    clock.reset_counts()
    clock.play_steps(steps)
    late_s = dict(zip(EXPOSED, clock.late_issue_s, strict=True))
    exposed = dict(zip(EXPOSED, clock.exposed, strict=True))
    exposed = {name: seconds - late_s[name] for name, seconds in exposed.items()}
    exposed["host_idle"] += sum(late_s.values())
    assert sum(exposed.values()) == pytest.approx(clock.compute)
    return {name: seconds for name, seconds in exposed.items() if abs(seconds) > 1e-12}


def test_a_late_issue_counts_once() -> None:
    """Two gathers of 2 s and 3 s that are issued 4 s late, one behind the other: both are waited for in full."""
    parts = named(
        kernel(1.0, 0.0), gather("a", 2.0, 5.0), gather("b", 3.0, 0.0), waiting_step(("a",)), waiting_step(("b",))
    )
    assert parts == pytest.approx({"gemm": 1.0, "ep": 5.0, "host_idle": 4.0})


def test_what_runs_beside_a_late_kernel_is_waited_for_none_the_less() -> None:
    """A gather of 2 s that is over before the host has issued the kernel that does not need it."""
    steps = kernel(1.0, 0.0), gather("a", 2.0, 0.0), kernel(1.0, 6.0), kernel(1.0, 0.0, "a")
    # a host far ahead leaves a second of the gather beside the kernel between, and one to wait for
    assert named(*steps) == pytest.approx({"gemm": 3.0, "ep": 1.0, "host_idle": 4.0})


def test_a_host_far_ahead_is_late_nowhere() -> None:
    clock = StreamClocks(0.0, host=-100.0)
    clock.reset_counts()
    clock.play_steps([kernel(1.0, 1.0), gather("a", 2.0, 1.0), kernel(1.0, 1.0, "a")])
    assert clock.late_by_host_s == 0.0
    assert clock.exposed[FAMILY["ep"]] == pytest.approx(2.0)


def test_what_does_not_wait_for_computing_would_have_begun_with_it() -> None:
    """A gather of parameters on a stream of its own order, issued late and waited for: a host far ahead hides it."""
    early = SideStreamOp("p", 2.0, 3.0, FAMILY["dp"], "fsdp_gather", (), ("p",), 0.0)
    assert named(kernel(3.0, 0.0), early, kernel(1.0, 0.0, "p")) == pytest.approx({"gemm": 4.0, "host_idle": 2.0})
