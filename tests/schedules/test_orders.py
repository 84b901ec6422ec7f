"""Pipeline orders: PyTorch's own lists, published formulas, and what the checker refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mofa.cost.stages import in_flight_at_first_backward as closed_form
from mofa.replay.time.pipeline import most_micro_batches_in_flight, play_program
from mofa.schedules import Action, Exchange, Order, Program, Runtime, computation_order_of, program_with_exchanges
from mofa.schedules.interleaved import megatron_interleaved_order
from mofa.schedules.order_check import OrderError, check_program
from mofa.schedules.point_to_point import exchanges_before_and_after_computations, overlapped_exchanges

RECORDED = json.loads((Path(__file__).parent / "recorded" / "orders.json").read_text())
UNIT = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
SIZES = [(1, 1), (2, 2), (2, 8), (3, 9), (4, 4), (4, 8), (4, 16), (8, 16), (8, 64)]
SCHEDULES = [
    ("gpipe", "pytorch", 1),
    ("1f1b", "pytorch", 1),
    ("1f1b", "megatron", 1),
    ("interleaved", "megatron", 2),
    ("interleaved", "megatron", 3),
    ("interleaved", "pytorch", 2),
    ("interleaved", "pytorch", 3),
    ("zbv", "pytorch", 2),
    ("interleaved-zb", "pytorch", 1),
    ("interleaved-zb", "pytorch", 2),
]


def _seconds(action: Action) -> float:
    return UNIT[action.kind]


def _text(action: Action) -> str:
    return f"{action.stage}{action.kind}{action.micro_batch}"


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: "-".join(str(x) for x in row[:4]))
def test_pytorch_has_the_same_order(row: list[object]) -> None:
    """PyTorch 2.11's classes, run: computations, and sends and receives as ``_add_send_recv`` places them."""
    name, pp, vpp, m, compute, comms = row
    assert isinstance(name, str) and isinstance(pp, int) and isinstance(vpp, int) and isinstance(m, int)
    order = computation_order_of(name, "pytorch", pp, vpp, m)
    assert [[_text(a) for a in acts] for acts in order.ranks] == compute
    program = program_with_exchanges(order, name, "pytorch")
    found = [[_text(i.ops[0]) if isinstance(i, Exchange) else _text(i) for i in items] for items in program.ranks]
    assert isinstance(comms, list)
    assert found == [[a for a in acts if "SHARD" not in a and "REDUCE" not in a] for acts in comms]


def test_megatron_table_by_hand() -> None:
    """schedules.py:798-826, its docstring's example: 5 micro-batches in groups of 3, two chunks (pp 2 here)."""
    forwards = [(a.micro_batch, a.stage // 2) for a in megatron_interleaved_order(2, 2, 5, 3).ranks[0] if a.kind == "F"]
    assert forwards == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]
    # rank 1 of 2: (vpp - 1) * 3 = 3 forwards ahead
    assert [a.kind for a in megatron_interleaved_order(2, 2, 5, 3).ranks[1]][:5] == ["F", "F", "F", "F", "B"]


@pytest.mark.parametrize(("schedule", "runtime", "vpp"), SCHEDULES)
@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_every_order_can_be(schedule: str, runtime: Runtime, vpp: int, pp: int, m: int) -> None:
    order = computation_order_of(schedule, runtime, pp, vpp, m)
    check_program(program_with_exchanges(order, schedule, runtime))
    check_program(overlapped_exchanges(order))


@pytest.mark.parametrize(("pp", "m"), SIZES)
@pytest.mark.parametrize(("schedule", "runtime"), [("gpipe", "pytorch"), ("1f1b", "pytorch"), ("1f1b", "megatron")])
def test_bubble_of_gpipe_and_1f1b(schedule: str, runtime: Runtime, pp: int, m: int) -> None:
    """(pp - 1) / m: Huang et al. 2019, arXiv 1811.06965, section 2.3; Narayanan et al. 2021, section 2.2.1."""
    played = play_program(
        program_with_exchanges(computation_order_of(schedule, runtime, pp, 1, m), schedule, runtime), _seconds
    )
    assert played.total == 3.0 * (m + pp - 1)
    assert played.bubble_fraction == pytest.approx((pp - 1) / m, rel=1e-12)


@pytest.mark.parametrize("runtime", ["megatron", "pytorch"])
@pytest.mark.parametrize("vpp", [2, 3, 4])
@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_bubble_of_interleaved(pp: int, m: int, vpp: int, runtime: Runtime) -> None:
    """(pp - 1) / (m vpp): Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2, where sends run beside computing."""
    played = play_program(overlapped_exchanges(computation_order_of("interleaved", runtime, pp, vpp, m)), _seconds)
    assert played.total - 3.0 * m * vpp == 3.0 * (pp - 1)
    assert played.bubble_fraction == pytest.approx((pp - 1) / (m * vpp), rel=1e-12)


@pytest.mark.parametrize(("pp", "m"), [(2, 3), (2, 8), (3, 9), (4, 8), (4, 16), (8, 16), (8, 64)])
def test_zbv_has_no_bubble(pp: int, m: int) -> None:
    """Qi et al. 2024, arXiv 2401.10241, section 6: no rank idles between its first and last op from 2 pp - 1
    micro-batches on, where F, B and W are equal; the ranks start one after the other."""
    played = play_program(overlapped_exchanges(computation_order_of("zbv", "pytorch", pp, 2, m)), _seconds)
    assert [spans[-1].end - spans[0].start for spans in played.compute] == [6.0 * m] * pp
    assert played.total == 6.0 * m + pp - 1


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize(("pp", "m"), [(2, 8), (3, 9), (4, 4), (4, 16), (8, 64)])
def test_bubble_of_zero_bubble_1p(pp: int, m: int, vpp: int) -> None:
    """ZB-H1: (pp - 1)(T_F + T_B - T_W), Qi et al. 2024, table 2; with equal times pp - 1."""
    played = play_program(overlapped_exchanges(computation_order_of("interleaved-zb", "pytorch", pp, vpp, m)), _seconds)
    assert played.total - 3.0 * m * vpp == pp - 1


def test_pytorch_runtime_waits_for_more_than_its_order() -> None:
    """All sends and receives of a rank run in launch order on one stream: deeper pipelines lose by it."""
    order = computation_order_of("interleaved", "pytorch", 4, 2, 8)
    real = play_program(program_with_exchanges(order, "interleaved", "pytorch"), _seconds)
    assert (real.total, play_program(overlapped_exchanges(order), _seconds).total) == (70.0, 57.0)


@pytest.mark.parametrize(("pp", "m"), [(1, 1), (2, 2), (2, 8), (3, 9), (4, 4), (4, 8), (8, 64), (4, 2)])
@pytest.mark.parametrize(("schedule", "vpp"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_in_flight_is_the_closed_form(schedule: str, vpp: int, pp: int, m: int) -> None:
    """min(m, pp - r) of 1F1B, all of GPipe, ``2 (pp - r - 1) + (vpp - 1) pp + 1`` chunks of interleaved 1F1B."""
    if schedule == "interleaved" and m < pp:
        with pytest.raises(ValueError, match="groups of 4"):
            computation_order_of(schedule, "megatron", pp, vpp, m)
        return
    order = computation_order_of(schedule, "megatron", pp, vpp, m)
    assert most_micro_batches_in_flight(order) == closed_form(pp, vpp, schedule, m).astype(int).tolist()


@pytest.mark.parametrize(("pp", "m"), [(2, 3), (2, 8), (3, 9), (4, 8), (8, 64)])
def test_in_flight_of_zbv(pp: int, m: int) -> None:
    """2 pp chunk activations on every rank (arXiv 2405.15362, section 4: 1F1B's memory), unevenly over its chunks."""
    found = most_micro_batches_in_flight(computation_order_of("zbv", "pytorch", pp, 2, m))
    assert found == [[2 * pp - r - 1, r + 1] for r in range(pp)]
    assert [sum(x) for x in found] == closed_form(pp, 2, "zbv", m).sum(axis=1).tolist()


def test_in_flight_of_zero_bubble_1p() -> None:
    """pp micro-batches on every rank: what 1F1B's first rank holds, as weight gradients come r backwards late."""
    assert most_micro_batches_in_flight(computation_order_of("interleaved-zb", "pytorch", 4, 1, 8)) == [[4]] * 4
    assert most_micro_batches_in_flight(computation_order_of("interleaved-zb", "pytorch", 4, 2, 16)) == [[4, 4]] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", "megatron", 2, 2, 4), "one chunk a rank, not vpp 2"),
        (("zbv", "pytorch", 2, 3, 4), "two chunks a rank, not vpp 3"),
        (("interleaved", "megatron", 4, 2, 6), "leave 2 for the last"),
        (("interleaved", "pytorch", 2, 2, 5), "5 micro-batches in 2 rounds"),
        (("interleaved-zb", "pytorch", 2, 2, 7), "7 micro-batches in 3 rounds"),
        (("1f1b", "megatron", 2, 1, 0), "take at least 1"),
        (("dualpipe", "megatron", 2, 1, 4), "no schedule dualpipe"),
    ],
)
def test_what_cannot_be(arguments: tuple[str, Runtime, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        computation_order_of(*arguments)


def _edit(order: Order, rank: int, text: str) -> Order:
    """The order with other computations on one rank: ``F0 B0 ...`` of the rank's own stage."""
    acts = tuple(Action(word[0], rank, int(word[1:])) for word in text.split())  # type: ignore[arg-type]
    return replace(order, ranks=(*order.ranks[:rank], acts, *order.ranks[rank + 1 :]))


@pytest.mark.parametrize(
    ("rank", "text", "message"),
    [
        (0, "F0 F1 B0", "B of stage 0, micro-batch 1: it runs whole or as I and W"),
        (0, "B0 F0 F1 B1", "rank 0: B of stage 0, micro-batch 0 waits for F of stage 0, micro-batch 0"),
        (0, "F0 F1 W0 I0 B1", "rank 0: W of stage 0, micro-batch 0 waits for I of stage 0, micro-batch 0"),
        (0, "F0 F0 F1 B0 B1", "F of stage 0, micro-batch 0 runs 2 times"),
        (0, "F1 B0 B1", "F of stage 0, micro-batch 0 never runs"),
        (0, "F0 B0 I0 F1 B1", "B of stage 0, micro-batch 0: it runs whole or as"),
        (0, "F0 F2 F1 B0 B1 B2", "F of stage 0, micro-batch 2: there are 2 stages and 2 micro-batches"),
    ],
)
def test_the_checker_names_what_is_wrong(rank: int, text: str, message: str) -> None:
    with pytest.raises(OrderError, match=message):
        check_program(
            exchanges_before_and_after_computations(_edit(computation_order_of("1f1b", "pytorch", 2, 1, 2), rank, text))
        )


def test_a_cycle_is_named() -> None:
    """Rank 0 wants the backward of micro-batch 0 before it sends 1; rank 1 wants 1 before that backward."""
    order = _edit(computation_order_of("1f1b", "pytorch", 2, 1, 2), 0, "F0 B0 F1 B1")
    order = _edit(order, 1, "F0 F1 B0 B1")
    with pytest.raises(OrderError, match=r"rank 0 waits at RECV_B of stage 0, micro-batch 0 for ever: .*rank 1 is at"):
        check_program(exchanges_before_and_after_computations(order))
    with pytest.raises(OrderError, match="for ever"):
        play_program(exchanges_before_and_after_computations(order), _seconds)
    with pytest.raises(ValueError, match="cycle: rank 0 waits at B of stage 0, micro-batch 0; rank 1"):
        program_with_exchanges(order, "zbv", "pytorch")


def test_crossed_receives_are_named() -> None:
    """Both frameworks wait for a message in the order of its launch: receives the other way round never end."""
    program = exchanges_before_and_after_computations(computation_order_of("gpipe", "pytorch", 2, 1, 2))
    items = list(program.ranks[1])
    a, b = items.index(Exchange((Action("RECV_F", 1, 0),))), items.index(Exchange((Action("RECV_F", 1, 1),)))
    items[a], items[b] = items[b], items[a]
    with pytest.raises(
        OrderError,
        match=r"SEND_F of stage 0, micro-batch 0 lacks RECV_F of stage 1, micro-batch 0, while rank 1 is at RECV_F",
    ):
        check_program(Program(program.order, (program.ranks[0], tuple(items))))


def test_missing_send_is_named() -> None:
    program = exchanges_before_and_after_computations(computation_order_of("gpipe", "pytorch", 2, 1, 2))
    cut = tuple(i for i in program.ranks[0] if i != Exchange((Action("SEND_F", 0, 1),), blocking=False))
    with pytest.raises(OrderError, match="SEND_F of stage 0, micro-batch 1 is launched 0 times, not 1"):
        check_program(Program(program.order, (cut, program.ranks[1])))


def test_stage_on_the_wrong_rank() -> None:
    order = computation_order_of("gpipe", "pytorch", 2, 1, 2)
    with pytest.raises(OrderError, match="runs on rank 0, but the stage is on rank 1"):
        check_program(exchanges_before_and_after_computations(replace(order, ranks=order.ranks[::-1])))
