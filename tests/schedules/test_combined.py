"""Orders whose forwards run beside backwards: Megatron-Core's, with one forward more ahead."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mofa.replay.time.pipeline import play_program
from mofa.schedules import SCHEDULES, Action, combined_schedule_name, computation_order_of, program_with_exchanges
from mofa.schedules.combined import backward_beside_each_forward
from mofa.schedules.order_check import check_program

PLANS = [(1, 1, 1), (1, 1, 5), (2, 2, 2), (2, 2, 8), (4, 3, 4), (4, 3, 16), (8, 2, 24)]


def name_of(vpp: int) -> str:
    return combined_schedule_name("1f1b" if vpp == 1 else "interleaved")


@pytest.mark.parametrize(("pp", "vpp", "m"), PLANS)
def test_every_rank_computes_all_in_an_order_that_can_be(pp: int, vpp: int, m: int) -> None:
    order = computation_order_of(name_of(vpp), "megatron", pp, vpp, m)
    for r, actions in enumerate(order.ranks):
        stages = range(r, pp * vpp, pp)
        wanted = {Action(kind, stage, i) for kind in "FB" for stage in stages for i in range(m)}  # type: ignore[arg-type]
        assert set(actions) == wanted and len(actions) == len(wanted)
    check_program(program_with_exchanges(order, name_of(vpp), "megatron"))


@pytest.mark.parametrize(("pp", "vpp", "m"), PLANS)
def test_both_of_a_pair_are_independent_and_the_warm_up_is_one_longer(pp: int, vpp: int, m: int) -> None:
    """schedules.py, ``get_pp_rank_microbatches``: 2 (pp - r - 1) + (vpp - 1) pp, and one more with a pipeline."""
    order = computation_order_of(name_of(vpp), "megatron", pp, vpp, m)
    for r, actions in enumerate(order.ranks):
        ahead = 1 if pp == 1 else min((pp - r - 1) * 2 + (vpp - 1) * pp + 1, m * vpp)
        assert [action.kind for action in actions[:ahead]] == ["F"] * ahead
        pairs = backward_beside_each_forward(actions)
        assert len(pairs) == m * vpp - ahead
        done = set(actions[:ahead])
        for forward, backward in pairs.items():
            assert backward._replace(kind="F") in done - {forward}
            done.add(forward)


def test_a_pair_sends_what_it_makes_behind_its_forward() -> None:
    """combined_1f1b.py: both post-processings come behind the combined computing."""
    name = name_of(2)
    order = computation_order_of(name, "megatron", 2, 2, 8)
    for actions, items in zip(order.ranks, program_with_exchanges(order, name, "megatron").ranks, strict=True):
        in_pair = set(backward_beside_each_forward(actions).values())
        for item, behind in pairwise(items):
            if item in in_pair:
                assert isinstance(behind, Action) and behind.kind == "F"


def test_as_many_are_in_flight_as_without() -> None:
    """The forward that precedes a first backward precedes its pair: what is alive more is a layer of it."""
    plain, paired = (
        SCHEDULES[name].in_flight(4, 2, 16) for name in ("interleaved", combined_schedule_name("interleaved"))
    )
    assert plain == paired


def test_a_pair_takes_no_time_of_its_backward() -> None:
    """On one stage of 3 micro-batches: a forward of 1 s, two pairs of 2.5, a backward of 2."""
    name = name_of(1)
    order = computation_order_of(name, "megatron", 1, 1, 3)
    pairs = backward_beside_each_forward(order.ranks[0])
    seconds = {action: 1.0 if action.kind == "F" else 2.0 for action in order.ranks[0]}
    seconds |= dict.fromkeys(pairs.values(), 0.0) | dict.fromkeys(pairs, 2.5)
    played = play_program(program_with_exchanges(order, name, "megatron"), seconds.__getitem__)
    assert played.total == 1.0 + 2 * 2.5 + 2.0
