"""The device's queue: how far a host may be ahead, launch by launch."""

from __future__ import annotations

import numpy as np
import pytest

from mofa.blocks.op import Op, Tape
from mofa.blocks.work import MemoryBound
from mofa.cost.block.host_clock import NEVER, ClockAdvance
from mofa.cost.block.sequential_experts import issue_seconds_around_loops, tape_with_full_queue_waits
from mofa.cost.kernels.launch_queue import QUEUE
from mofa.replay.time.kernel_runs import FAMILY, KernelInRun, KernelRun
from mofa.replay.time.stream_clocks import PARTS, StreamClocks

Given = tuple[float, float, int]
"""Device and host seconds of a kind of kernel, and how many there are."""


def run_of(kernels: list[Given]) -> KernelRun:
    made = tuple(
        KernelInRun(str(i), device_s, host_s, FAMILY["gemm"], n) for i, (device_s, host_s, n) in enumerate(kernels)
    )
    issue = sum(host_s for _, host_s, _ in kernels)
    busy = sum(device_s for device_s, _, _ in kernels)
    parts = ((FAMILY["gemm"], busy),)
    return KernelRun(made, (), (), busy, issue, issue, parts, float(sum(n for *_, n in kernels)))


def launch_by_launch(kernels: list[Given], ahead_s: float) -> tuple[float, float]:
    """When device and host end, each launch waiting for the one that is a queue's length ahead of it. [s]"""
    device, host, begun = 0.0, -ahead_s, list[float]()
    for device_s, host_s, n in kernels:
        for _ in range(n):
            host += host_s / n
            if len(begun) >= QUEUE:
                host = max(host, begun[len(begun) - int(QUEUE)])
            begun.append(max(device, host))
            device = begun[-1] + device_s / n
    return device, host


LOSS_THEN_EXPERTS: list[Given] = [(40.0, 1.0, 8)] + 8 * [(3.0, 5.0, 256)]
DENSE: list[Given] = 200 * [(1.0, 0.1, 1)]


@pytest.mark.parametrize(
    ("kernels", "ahead_s"),
    [
        (LOSS_THEN_EXPERTS, 20.0),
        (LOSS_THEN_EXPERTS, 1.0),
        (DENSE, 50.0),
        ([(30.0, 0.5, 4)] + 40 * [(1.0, 1.0, 64)], 10.0),
    ],
)
def test_a_clock_waits_for_the_queue_as_launch_by_launch(kernels: list[Given], ahead_s: float) -> None:
    clock = StreamClocks(0.0, host=-ahead_s)
    for one in kernels:
        clock.play_steps([run_of([one])])
    device, host = launch_by_launch(kernels, ahead_s)
    assert clock.compute == pytest.approx(device, rel=0.05)
    assert clock.host == pytest.approx(host, rel=0.05)


def test_a_host_that_waited_for_the_device_has_an_empty_queue() -> None:
    clock = StreamClocks(0.0, host=-20.0)
    clock.play_steps([run_of(LOSS_THEN_EXPERTS)])
    clock.synchronise()
    assert (clock.launched, len(clock.queue)) == (0.0, 0)


def test_the_closed_form_lets_the_rest_wait_for_the_device() -> None:
    """Eight times 256 kernels behind a loss: the host ends as launch by launch, and so does the device."""
    loss, experts = (
        ClockAdvance(*(np.array([x]) for x in given))
        for given in ((40.0, 40.0, NEVER, 1.0, 8.0), (3.0, 5.0, NEVER, 5.0, 256.0))
    )
    both = loss.followed_by(experts.repeated(np.array([8.0])).limited_by_launch_queue())
    device, host = launch_by_launch(LOSS_THEN_EXPERTS, 20.0)
    ends = [
        float(max(both.device_s[0], both.device_behind_host_s[0] - 20.0)),
        float(max(both.host_behind_device_s[0], both.host_s[0] - 20.0)),
    ]
    assert ends == pytest.approx([device, host], rel=0.05)
    assert float(both.host_s[0]) - 20.0 < host - 10.0  # without the queue it would be done long before


ROUNDS, KERNELS_OF_OP = 16, 1024
LOOP_THEN_REST: list[Given] = [(20.0, 48.0, KERNELS_OF_OP), (20.0, 48.0, KERNELS_OF_OP), (60.0, 2.0, 8)]
"""Two ops of a loop over experts and what is behind it: device and host seconds of all rounds together, launches."""


def run_of_loop(kernels: list[Given]) -> KernelRun:
    """All but the last of these in a loop, as tapes have it."""
    ops = [Op(str(i), "grouped_gemm", MemoryBound(1.0), expert_loops=float(ROUNDS)) for i in range(len(kernels) - 1)]
    seconds, issue = [list(column) for column in zip(*kernels, strict=True)][:2]
    issued, behind = issue_seconds_around_loops([*ops, Op("rest", "gemm", MemoryBound(1.0))], seconds, issue)
    made = [
        KernelInRun(str(i), seconds[i], float(issued[i]), FAMILY["gemm"], n, i < len(ops), float(behind.get(i, 0.0)))
        for i, (*_, n) in enumerate(kernels)
    ]
    launches = float(sum(n for *_, n in kernels))
    return KernelRun(tuple(made), (), (), sum(seconds), sum(issue), sum(issue), ((FAMILY["gemm"], 1.0),), launches)


def expert_by_expert(kernels: list[Given]) -> list[Given]:
    """The same in the order in which they are launched."""
    of_round = [(device_s / ROUNDS, host_s / ROUNDS, n // ROUNDS) for device_s, host_s, n in kernels[:-1]]
    return [*(ROUNDS * of_round), kernels[-1]]


@pytest.mark.parametrize("device_over_host", [0.1, 0.5, 1.0, 1.5, 3.0])
@pytest.mark.parametrize("ahead_s", [0.0, 30.0, 90.0])
def test_a_loop_over_experts_waits_for_the_queue_as_launch_by_launch(device_over_host: float, ahead_s: float) -> None:
    """A late host issues the loop while the device computes it: a full queue does not come on top of that."""
    kernels = [(device_over_host * host_s, host_s, n) for _, host_s, n in LOOP_THEN_REST[:-1]] + LOOP_THEN_REST[-1:]
    clock = StreamClocks(0.0, host=-ahead_s)
    clock.play_steps([run_of_loop(kernels), run_of_loop(kernels)])
    device, host = launch_by_launch(2 * expert_by_expert(kernels), ahead_s)
    assert clock.compute == pytest.approx(device, rel=0.05)
    assert clock.host == pytest.approx(host, rel=1.0 / (2 * PARTS))


def test_a_loop_takes_the_device_no_less_than_what_its_queue_does_not_hold() -> None:
    ops = [Op(str(i), "grouped_gemm", MemoryBound(1.0), launches=n, expert_loops=float(ROUNDS))
           for i, (*_, n) in enumerate(LOOP_THEN_REST[:-1])]  # fmt: skip
    seconds, issue = [list(column) for column in zip(*LOOP_THEN_REST, strict=True)][:2]
    tape = Tape((*ops, Op("rest", "gemm", MemoryBound(1.0))), {}, (), ())
    _, waited, _ = tape_with_full_queue_waits(tape, seconds, issue)
    device, _ = launch_by_launch(expert_by_expert(LOOP_THEN_REST), 48.0)  # a queue's length is issued by then
    assert float(sum(waited)) == pytest.approx(device, rel=0.02)
