"""The host's clock beside the device's: by hand, and against a scalar clock that plays every pass."""

from __future__ import annotations

import numpy as np
import pytest

from mofa.cost.block.host_clock import NEVER, ClockAdvance
from mofa.cost.step_time.critical_path import ComputationDurations, critical_path_s
from mofa.cost.step_time.micro_batch import HostBoundPasses


def clocks(device_s: float, held_s: float, woken_s: float, host_s: float) -> ClockAdvance:
    return ClockAdvance(*(np.array([x]) for x in (device_s, held_s, woken_s, host_s)))


WAITS = clocks(3.0, 6.0, 2.0, 5.0)
"""The host issues for 4, waits for what the device had to do, 1, and issues for 1 more what takes 2: 5 a turn."""
BUSY = clocks(8.0, 8.0, NEVER, 1.0)


def after(one: ClockAdvance, device: float, host: float) -> tuple[float, float]:
    d, held, woken, issued = (float(x[0]) for x in one[:4])
    return max(device + d, host + held), max(device + woken, host + issued)


@pytest.mark.parametrize("order", [(WAITS, BUSY), (BUSY, WAITS), (WAITS, WAITS, BUSY), (BUSY, BUSY)])
@pytest.mark.parametrize(("device", "host"), [(0.0, 0.0), (5.0, 0.0), (0.0, 5.0)])
def test_a_product_is_one_after_the_other(order: tuple[ClockAdvance, ...], device: float, host: float) -> None:
    whole, at = order[0], (device, host)
    for one in order[1:]:
        whole = whole.followed_by(one)
    for one in order:
        at = after(one, *at)
    assert after(whole, device, host) == at


@pytest.mark.parametrize("one", [WAITS, BUSY, clocks(1.0, 4.0, NEVER, 4.0)])
def test_many_are_a_product_of_many(one: ClockAdvance) -> None:
    for count in (1, 2, 5):
        whole = one
        for _ in range(count - 1):
            whole = whole.followed_by(one)
        for found, expected in zip(one.repeated(np.array([float(count)]))[:4], whole[:4], strict=True):
            assert found[0] == pytest.approx(expected[0]) or max(found[0], expected[0]) < NEVER / 2
    none = one.repeated(np.array([0.0]))
    assert after(none, 2.0, 3.0) == (2.0, 3.0)


@pytest.mark.parametrize("order", [(WAITS,), (WAITS, BUSY), (WAITS, WAITS, BUSY), (BUSY,)])
def test_a_cycle_is_the_long_run(order: tuple[ClockAdvance, ...]) -> None:
    """A host that is late in one pass gets ahead in the other: 8 and 5 take turns in 11, not 13."""
    whole = order[0]
    for one in order[1:]:
        whole = whole.followed_by(one)
    at = (0.0, 0.0)
    ends = []
    for _ in range(40):
        for one in order:
            at = after(one, *at)
        ends.append(at[0])
    assert float(whole.repetition_s[0]) == pytest.approx((ends[-1] - ends[9]) / 30)


def test_ranks_that_wait_get_ahead() -> None:
    """Two ranks, one micro-batch, two chunks: each forward takes 3 with the host ahead and 6 from a start of both, each
    backward 3. Only rank 0's first forward waits for the host, as all others wait for a neighbour: 8 passes of 3, and
    3 more."""
    f = np.full((1, 2, 2), 3.0)
    forward, backward = (
        ClockAdvance(*(np.full((1, 2, 2), x) for x in given))
        for given in ((3.0, 6.0, 2.0, 5.0), (3.0, 3.0, NEVER, 0.0))
    )
    plan = ("interleaved", "pytorch", 2, 2)
    alone = critical_path_s(plan, ComputationDurations(f, f, f, np.zeros(1)), np.array([1]))
    held = critical_path_s(plan, ComputationDurations(f, f, f, np.zeros(1), host=(forward, backward)), np.array([1]))
    assert alone.tolist() == [24.0]
    assert held.tolist() == [27.0]


def test_a_host_that_waits_for_nothing_issues_all_the_same() -> None:
    """Two ranks, ten micro-batches, hosts of 3 + 4 s: 70 s, and the second rank's last backward goes on for 5 s."""
    forward, backward = (
        ClockAdvance(*(np.full((1, 2, 1), x) for x in given))
        for given in ((2.0, 3.0, NEVER, 3.0), (5.0, 5.0, NEVER, 4.0))
    )
    late = HostBoundPasses(
        np.array([0]), forward, backward, waits=np.array([False]), with_full_queue=(forward, backward)
    )
    stages, num = np.array([0, 1]), np.array([10.0])
    assert late.earliest_end_by_hosts_s(stages, num, np.zeros((1, 2))).tolist() == [75.0]
    assert late.earliest_end_by_hosts_s(stages, num, np.array([[1.0, 2.0]])).tolist() == [73.0]
    assert [held.max() for held in late.device_waits_for_host_s()] == [0.0, 0.0]


def test_between_exchanges_both_clocks_begin_together() -> None:
    """Forwards of 2 s, 3 s from a common beginning, that end with the host 1 s behind; backwards of 5 s, of 6 s from
    there. An inner stage takes 4 + 6; a first stage goes on from a backward's lead, a last one has no exchange between
    its forward and its backward, whose issue goes on."""
    forward, backward = (
        ClockAdvance(*(np.full((1, 3, 1), x) for x in given))
        for given in ((2.0, 3.0, NEVER, 4.0), (5.0, 6.0, NEVER, 4.0))
    )
    late = HostBoundPasses(
        np.array([0]), forward, backward, waits=np.array([True]), with_full_queue=(forward, backward)
    )
    first, last = np.array([True, False, False]), np.array([False, False, True])
    f, b, waited = (part[0, :, -1] for part in late.passes_between_exchanges_s(first, last))
    assert (f + b).tolist() == [8.0, 10.0, 10.0]  # 6 + 2; 4 + 6; the host's 4 and 6
    assert waited.tolist() == [10.0, 10.0, 10.0]


def test_a_late_host_issues_beside_a_gather() -> None:
    """A forward of 2 s that a host issues in 5 s ends at 5 s. Behind a gather of 1 s or 3 s it does too, as the host
    issues meanwhile; behind one of 7 s it ends at 9 s, not at 12. Where the host waits for the device in it, and then
    issues for 5 s more, all of the gather counts."""
    late, waits = (
        ClockAdvance(*(np.full((1, 3, 1), x) for x in given))
        for given in ((2.0, 5.0, NEVER, 4.0), (7.0, 5.0, 7.0, 5.0))
    )
    gather_s = np.array([[1.0, 3.0, 7.0]])
    passes = [HostBoundPasses(np.array([0]), each, late, np.array([True]), (each, late)) for each in (late, waits)]
    none = np.zeros(3, dtype=bool)
    beside = [each.gather_s_beside_host_issue(gather_s, none) for each in passes]
    assert beside[0].tolist() == [[1.0, 3.0, 3.0]]
    assert beside[1].tolist() == [[0.0, 0.0, 0.0]]
    # the last stage's host goes on with a backward of 2 s on the device: both end at 9 s, behind 7 s at 11
    assert passes[0].gather_s_beside_host_issue(gather_s, ~none).tolist() == [[1.0, 3.0, 5.0]]
