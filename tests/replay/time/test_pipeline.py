"""The pipeline's clock: by hand, and against the closed form of the search."""

from __future__ import annotations

import numpy as np
import pytest

from mofa.cost.block.host_clock import ClockAdvance
from mofa.cost.step_time.bubble import pipeline_s
from mofa.cost.step_time.critical_path import ComputationDurations, DataParallelOncePerStep, critical_path_s
from mofa.replay.time.pipeline import play_program
from mofa.schedules import SCHEDULES, Action, Runtime, computation_order_of, program_with_exchanges
from mofa.schedules.point_to_point import overlapped_exchanges


def test_two_stages_by_hand() -> None:
    """F takes 1, B 2, a hop 0.5: rank 1 starts at 1.5; B0 comes back at 5, and so on."""
    program = program_with_exchanges(computation_order_of("1f1b", "pytorch", 2, 1, 2), "1f1b", "pytorch")
    played = play_program(program, lambda a: 1.0 if a.kind == "F" else 2.0, 0.5)
    spans = {(s.action.kind, s.action.stage, s.action.micro_batch): (s.start, s.end) for r in played.compute for s in r}
    assert spans["F", 1, 0] == (1.5, 2.5)
    assert spans["B", 1, 0] == (2.5, 4.5)
    assert spans["F", 0, 1] == (1.0, 2.0)
    # the send of F1 goes with the receive of B0: both end when that is there, at 5
    assert spans["B", 0, 0] == (5.0, 7.0)
    assert spans["F", 1, 1] == (5.0, 6.0)
    assert spans["B", 1, 1] == (6.0, 8.0)
    assert spans["B", 0, 1] == (8.5, 10.5)
    assert played.total == 10.5


@pytest.mark.parametrize(("schedule", "runtime", "vpp"), [("1f1b", "megatron", 1), ("interleaved", "pytorch", 2),
                                                            ("zbv", "pytorch", 2)])  # fmt: skip
def test_idle_and_busy_fill_the_time(schedule: str, runtime: Runtime, vpp: int) -> None:
    rng = np.random.default_rng(0)
    seconds = {kind: rng.uniform(1, 2, (8, 8)) for kind in "FBIW"}
    program = program_with_exchanges(computation_order_of(schedule, runtime, 4, vpp, 8), schedule, runtime)
    played = play_program(program, lambda a: float(seconds[a.kind][a.stage, a.micro_batch]), 0.1)
    for rank, causes in enumerate(played.idle):
        assert played.busy_s(rank) + sum(causes.values()) == pytest.approx(played.total)
        ends = [span.end for span in played.compute[rank]]
        assert ends == sorted(ends)
        assert min(causes.values()) >= 0.0
    assert played.idle[0]["fill"] == 0.0
    assert played.idle[3]["fill"] > 0.0


def _closed_form(schedule: str, stage_s: np.ndarray, vpp: int, m: int, runtime: Runtime = "megatron") -> float:
    """The search's time of stages whose forwards take a third of it, their chunks being alike."""
    stage = stage_s[None]
    if not SCHEDULES[schedule].has_closed_form:
        third = np.repeat(stage[..., None] / vpp, vpp, axis=2) / 3
        given = ComputationDurations(third, 2 * third, third, np.zeros(1))
        return float(critical_path_s((schedule, runtime, len(stage_s), vpp), given, np.array([m]))[0])
    return float(pipeline_s(SCHEDULES[schedule], stage / 3, 2 * stage / 3, np.array([float(m)]))[0])


@pytest.mark.parametrize("m", [4, 16])
@pytest.mark.parametrize(("slow", "saved"), [(0, 4.5), (1, 3.0), (2, 1.5), (3, 0.0)])
def test_one_slow_stage_by_hand(slow: int, saved: float, m: int) -> None:
    """1F1B, one stage at 1.5 of the others' 1 + 2: its ``pp - s - 1`` forwards ahead run while the first backward is on
    its way, and later backwards come as fast as it takes them: m times its own and once the others', less the former.
    """
    stage = np.where(np.arange(4) == slow, 1.5, 1.0)
    program = overlapped_exchanges(computation_order_of("1f1b", "megatron", 4, 1, m))
    played = play_program(program, lambda a: float(stage[a.stage]) * (1.0 if a.kind == "F" else 2.0))
    assert played.total == pytest.approx(m * 4.5 + 9.0 - saved)
    assert _closed_form("1f1b", 3 * stage, 1, m) == pytest.approx(played.total)


@pytest.mark.parametrize(
    ("schedule", "vpp", "below", "above"),
    [("gpipe", 1, 1e-9, 1e-9), ("1f1b", 1, 0.005, 1e-9), ("interleaved", 2, 1e-9, 0.013)],
)
def test_uneven_stages_against_the_closed_form(schedule: str, vpp: int, below: float, above: float) -> None:
    """Stages up to a third apart, forward to backward 1 to 2: exact for GPipe, at most 0.5 % under for 1F1B, at most
    1.3 % over for interleaved 1F1B, of whose steady state one round stands for the others."""
    rng = np.random.default_rng(1)
    ratios = []
    for _ in range(30):
        pp = int(rng.integers(2, 9))
        m = pp * int(rng.integers(1, 9))
        stage = rng.uniform(1.0, 1.33, pp)

        def seconds(a: Action, stage: np.ndarray = stage, pp: int = pp) -> float:
            return float(stage[a.stage % pp]) * (1.0 if a.kind == "F" else 2.0) / vpp

        played = play_program(overlapped_exchanges(computation_order_of(schedule, "megatron", pp, vpp, m)), seconds)
        ratios.append(_closed_form(schedule, 3 * stage, vpp, m) / played.total)
    assert 1 - below <= min(ratios) <= max(ratios) <= 1 + above
    assert np.median(ratios) < 1.02


@pytest.mark.parametrize("pp", [2, 6, 8, 12])
@pytest.mark.parametrize(("schedule", "vpp"), [("interleaved", 2), ("interleaved", 4), ("interleaved", 8), ("zbv", 2),
                                              ("interleaved-zb", 2), ("interleaved-zb", 3)])  # fmt: skip
def test_one_stream_holds_sends_up(pp: int, schedule: str, vpp: int) -> None:
    """PyTorch's runtime, equal stages of 1 + 1 + 1 or, whole, 1 + 2: what its receives hold up, as the search has it.

    The bubble itself, not the step, within 4 %; PyTorch issue 188833 shows it on 8 GPUs, pp 8 and vpp 2.
    """
    m = 2 * pp

    def seconds(a: Action) -> float:
        if a.stage == 0 and a.kind in ("I", "W"):  # no input to differentiate by
            return 2.0 if a.kind == "W" else 0.0
        return 2.0 if a.kind == "B" else 1.0

    played = play_program(
        program_with_exchanges(computation_order_of(schedule, "pytorch", pp, vpp, m), schedule, "pytorch"), seconds
    )
    busy = 3.0 * m * vpp
    closed = _closed_form(schedule, np.full(pp, 3.0 * vpp), vpp, m, "pytorch")
    assert closed - busy == pytest.approx(played.total - busy, rel=0.04)
    if pp > 2:
        ideal = play_program(overlapped_exchanges(computation_order_of(schedule, "pytorch", pp, vpp, m)), seconds)
        assert played.total > ideal.total


@pytest.mark.parametrize("runtime", ["megatron", "pytorch"])
@pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 3, 8), (4, 2, 4), (4, 3, 12), (8, 2, 16), (4, 4, 40)])
def test_uneven_chunks_take_what_the_clock_says(runtime: Runtime, pp: int, vpp: int, m: int) -> None:
    """Random chunks, with hand-overs beside which computing slows down: exact for up to three rounds of micro-batches,
    within 2 % for more."""
    rng = np.random.default_rng(pp * vpp * m)
    forward = rng.uniform(0.7, 1.3, (3, pp, vpp))
    backward = forward * rng.uniform(1.8, 3.0, (3, 1, 1))
    given = ComputationDurations(forward, backward, 0.0 * forward, np.full(3, 0.05))
    closed = critical_path_s(("interleaved", runtime, pp, vpp), given, np.full(3, m))
    program = program_with_exchanges(computation_order_of("interleaved", runtime, pp, vpp, m), "interleaved", runtime)
    for i in range(3):

        def seconds(a: Action, i: int = i) -> float:
            return float((forward if a.kind == "F" else backward)[i, a.stage % pp, a.stage // pp])

        played = play_program(program, seconds, 0.05).total
        assert closed[i] == pytest.approx(played, rel=1e-9 if m <= 3 * pp else 0.02)


@pytest.mark.parametrize(("gather", "reduce", "expected"), [(0, 0, 15), (5, 0, 23), (0, 7, 25), (5, 7, 33)])
def test_gathers_and_reductions_are_on_the_path(gather: int, reduce: int, expected: int) -> None:
    """Two ranks of two chunks of 1 + 2 s, two micro-batches: 15 s. The second chunk's gather, behind the first's, ends
    at 10 s instead of the 2 s at which it would begin; both ranks reduce one chunk from 11 s on, then the other."""
    f = np.ones((1, 2, 2))
    once = DataParallelOncePerStep(*(np.full_like(f, seconds) for seconds in (gather, gather, reduce)))
    given = ComputationDurations(f, 2 * f, 0.0 * f, np.zeros(1), once=once)
    total = critical_path_s(("interleaved", "megatron", 2, 2), given, np.array([2]))
    assert total.tolist() == [expected]


@pytest.mark.parametrize("m", [1, 2, 8, 12])
def test_first_forwards_of_their_own_and_reductions_behind_the_last_backward(m: int) -> None:
    """1F1B on four ranks whose first forwards take 3 instead of 1; the first rank, which ends last, reduces for 5."""

    def seconds(a: Action) -> float:
        return (1.0 if a.kind == "F" else 2.0) + 2.0 * (a.kind == "F" and a.micro_batch == 0)

    f = np.ones((1, 4, 1))
    once = DataParallelOncePerStep(0.0 * f, 0.0 * f, 5.0 * f, "FSDP of pieces")
    given = ComputationDurations(
        f, 2 * f, 0.0 * f, np.zeros(1), once=once, first_forward=ClockAdvance(3 * f, 0 * f, 0 * f, 0 * f)
    )
    closed = critical_path_s(("1f1b", "pytorch", 4, 1), given, np.array([m]))
    played = play_program(
        program_with_exchanges(computation_order_of("1f1b", "pytorch", 4, 1, m), "1f1b", "pytorch"), seconds
    )
    assert closed.tolist() == [played.total + 5.0]


@pytest.mark.parametrize(("gather", "reduce", "expected"), [(0, 0, 15), (2, 0, 17), (8, 0, 29), (0, 3, 18), (0, 7, 25)])
def test_fsdp_gathers_ahead_and_reduces_each_chunk(gather: int, reduce: int, expected: int) -> None:
    """Two ranks of two chunks of 1 + 2 s, two micro-batches: 15 s. Both chunks are gathered at the start; gathers of 8
    end at 16 s instead of the 2 s at which the second chunk would begin on the first rank. Reductions begin at 11 s
    and at 15 s, or behind each other."""
    f = np.ones((1, 2, 2))
    once = DataParallelOncePerStep(
        *(np.full_like(f, seconds) for seconds in (gather, gather, reduce)), "FSDP of chunks"
    )
    given = ComputationDurations(f, 2 * f, 0.0 * f, np.zeros(1), once=once)
    total = critical_path_s(("interleaved", "pytorch", 2, 2), given, np.array([2]))
    assert total.tolist() == [expected]


def test_one_slow_micro_batch_delays_the_step_once() -> None:
    """A first micro-batch whose forward takes 1 more on each of four stages delays the step by 4."""

    def seconds(a: Action) -> float:
        return (1.0 if a.kind == "F" else 2.0) + (a.kind == "F" and a.micro_batch == 0)

    program = overlapped_exchanges(computation_order_of("gpipe", "pytorch", 4, 1, 8))
    even = play_program(program, lambda a: 1.0 if a.kind == "F" else 2.0)
    assert play_program(program, seconds).total == even.total + 4.0


def test_a_large_pipeline_is_quick() -> None:
    """pp 16 x vpp 4, 256 micro-batches: 32 768 computations."""
    played = play_program(
        overlapped_exchanges(computation_order_of("interleaved", "megatron", 16, 4, 256)),
        lambda a: 1.0 if a.kind == "F" else 2.0,
    )
    assert played.total == 3.0 * (256 * 4 + 15)


@pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 4, 16), (4, 5, 64), (4, 10, 32), (8, 6, 64)])
@pytest.mark.parametrize("hop", [0.1, 0.9])
def test_interleaved_hand_overs_hide_behind_computations(pp: int, vpp: int, m: int, hop: float) -> None:
    """Shorter than a forward of 1, they cost what a micro-batch takes round the ranks for each further chunk in the
    warm-up and the cool-down, and nothing in the steady state, where each runs beside a computation."""
    order = computation_order_of("interleaved", "megatron", pp, vpp, m)
    alone, sent = (
        play_program(overlapped_exchanges(order), lambda a: 1.0 if a.kind == "F" else 2.0, h).total for h in (0.0, hop)
    )
    assert sent - alone == pytest.approx(2 * (pp - 1 + (vpp - 1) * pp) * hop)
