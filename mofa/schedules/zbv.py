"""ZB-V: two chunks a rank, placed there and back, deferred weight gradients (PyTorch 2.11's ``ScheduleZBVZeroBubble``).

Qi et al. 2024, arXiv 2401.10241, section 6, and "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362. If
forward, backward by inputs and backward by weights take equally long, the only bubble is the filling. A rank holds at
most ``2 pp`` chunk activations, as 1F1B's first rank.
"""

from __future__ import annotations

from mofa.schedules.order import Action, Order, Program, Runtime
from mofa.schedules.point_to_point import overlapped_exchanges, torch_multi_stage_exchanges
from mofa.schedules.record import Schedule


def zbv_order(pp: int, num_micro_batches: int) -> Order:
    """The order of every rank under ZBV: made for ``max(2 pp - 1, m)`` micro-batches, then cut to the m that exist.

    Examples
    --------
    >>> [f"{a.kind}{a.stage}.{a.micro_batch}" for a in zbv_order(1, 1).ranks[0]]
    ['F0.0', 'F1.0', 'I1.0', 'W1.0', 'I0.0', 'W0.0']
    """
    made_for = max(2 * pp - 1, num_micro_batches)
    ranks = tuple(tuple(a for a in _rank(pp, r, made_for) if a.micro_batch < num_micro_batches) for r in range(pp))
    return Order(pp, 2, num_micro_batches, ranks, "v")


def _rank(pp: int, rank: int, micro_batch: int) -> list[Action]:
    out: list[Action] = []
    first, second = rank, 2 * pp - 1 - rank
    count = {(kind, stage): 0 for kind in "FIW" for stage in (first, second)}

    def do(stage: int, *kinds: str) -> None:
        for kind in kinds:
            out.append(Action(kind, stage, count[kind, stage]))  # type: ignore[arg-type]
            count[kind, stage] += 1

    for _ in range(2 * (pp - rank) - 1):
        do(first, "F")
    for _ in range(rank):
        do(second, "F")
        do(first, "F")
    for _ in range(pp - rank):
        do(second, "F", "I", "W")
    while count["F", second] < count["F", first] or count["F", first] < micro_batch:
        if count["F", first] < micro_batch:
            do(first, "F")
        do(first, "I", "W")
        do(second, "F", "I", "W")
    for _ in range(rank):
        do(first, "I")
        do(second, "I")
    for _ in range(pp - rank):
        do(first, "I", "W")
    while count["W", second] < count["I", second]:
        do(second, "W")
    while count["W", first] < count["I", first]:
        do(first, "W")
    return out


def _order(runtime: Runtime, pp: int, vpp: int, num_micro_batches: int) -> Order:
    return zbv_order(pp, num_micro_batches)


def _program(order: Order, runtime: Runtime) -> Program:
    return torch_multi_stage_exchanges(order) if runtime == "pytorch" else overlapped_exchanges(order)


def _in_flight(pp: int, vpp: int, num_micro_batches: int) -> list[list[int]]:
    # every rank holds up to pp micro-batches of both its chunks together
    return [[min(num_micro_batches, pp)] * vpp for _ in range(pp)]


ZBV = Schedule(
    "zbv", _order, _program, _in_flight, "ZBVZeroBubble", chunks_per_rank=2, placement="v", is_searched=True,
    defers_weight_gradients=True, gathers_by_chunk=True,
)  # fmt: skip
