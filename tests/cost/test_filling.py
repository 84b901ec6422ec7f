"""What Megatron's stages reserve when free blocks are filled in order: pieces that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from mofa.blocks.build import BlockTapes
from mofa.blocks.op import Op, Tape, Tensor
from mofa.cost.filling import Course, Stage, filled_bytes, stage_of
from mofa.cost.peak import WORKSPACE, stage_bytes
from mofa.replay.play import play
from mofa.replay.ranks import rank_maker, rows_of
from mofa.search.playing import estimator_of
from tests.cost.test_reserve import rows

MIB = 1 << 20


def course(kept: int, temporary: int) -> Course:
    """A layer whose forward keeps one tensor and has one temporary, gone by then."""
    return Course((((), (0,), ()), ((), (), (0,)), ((), (1,), ()), ((), (), (1,))), 3, (temporary, kept),
                  ((kept, 0, 1),), ())  # fmt: skip


def test_states_take_activations_blocks_and_the_next_step_takes_them_again() -> None:
    """A parameter of 24 MiB, 16 activations of 64 MiB, moments of 40 MiB each: they take two of these blocks.

    The hole of 24 MiB is of use to cuBLAS's workspaces alone. The first step has 16 blocks of 64 MiB (the last
    activation lies in its temporary's); of the moments each takes one, of which 24 MiB are left, and the second step
    two more.
    """
    stage = Stage(((24 * MIB, 40 * MIB, 1),), (), ((course(64 * MIB, 64 * MIB), 16),), (), None, None, 2 * MIB)
    hole, main = 24 * MIB, 40 * MIB
    assert filled_bytes(stage) == hole + main + 18 * 64 * MIB


def test_states_that_fit_into_holes_cost_nothing() -> None:
    """Shared out over 8 ranks a parameter of 64 MiB has states of 16 MiB: all three lie where it was."""
    alone = Stage(((64 * MIB, 16 * MIB, 4),), (), ((course(100 * MIB, 100 * MIB), 3),), (), None, None, 2 * MIB)
    assert filled_bytes(alone) == (4 * 64 + 3 * 100) * MIB


def test_what_is_kept_comes_to_lie_in_the_temporaries_blocks() -> None:
    """64 MiB are kept beside a temporary of 256 MiB that is gone before they are made: four of them fill its block."""
    tensors = {name: Tensor(name, n * MIB) for name, n in (("x", 0.0), ("wide", 256.0), ("y", 64.0), ("z", 0.0))}
    ops = (
        Op("a", "mlp", None, ("x",), ("wide",)), Op("b", "mlp", None, ("wide",), ("z",)),
        Op("c", "mlp", None, ("x",), ("y",)), Op("d", "mlp", None, ("x",), ("out",)),
    )  # fmt: skip
    tensors["out"], tensors["d:x"] = Tensor("out", 0.0), Tensor("d:x", 0.0)
    back = Tape((Op("d.backward", "mlp", None, ("y",), ("d:x",)),), tensors, (), ("d:x",))
    block = BlockTapes("layer", Tape(ops, tensors, ("x",), ("out",)), back)
    found = Course.of(block, 0)
    assert found.kept == ((64 * MIB, 256 * MIB, 1),)
    assert [made for _, made, _ in found.ops] == [[0], [], [1], [], []]


def test_parameters_are_those_of_the_stage() -> None:
    """Llama 3 70B on tp 2 and pp 4, ZeRO over 8 ranks: 20 layers a stage, states an eighth of 4 bytes a parameter."""
    some = rows("megatron", "tp=2 pp=4 cp=4 dp=2 micro_batch=1 recompute=full", 64)
    found = stage_of(some, 0, 1, WORKSPACE)
    params = sum(hole * number for hole, _, number in found.weights)
    states = sum(state * number for _, state, number in found.weights)
    assert params == pytest.approx(float(some.static.params[0, 1]), rel=1e-3)
    assert states == pytest.approx(params / 4, rel=1e-3)
    assert [number for _, number in found.layers] == [20 * 3]  # three micro-batches are in flight on the second stage


@pytest.mark.parametrize(
    ("strategy", "bound"),
    [("tp=8 pp=4 cp=2 micro_batch=1 recompute=none", 0.03), ("tp=8 dp=8 pp=1 recompute=full", 0.02)],
)
def test_a_closer_look_agrees_with_the_replay(strategy: str, bound: float) -> None:
    """Every look is at the fullest stage; others keep what the closed form says, and none less than is alive."""
    import mofa

    job, machines = mofa.load_workload("llama3-70b", global_batch=64), mofa.load_cluster("h200-hgx", 64)
    estimator = estimator_of(job, machines, mofa.load_framework("megatron"), strategy)
    some = rows_of(estimator)
    closely, closed = stage_bytes(some, closely=True), stage_bytes(some)
    fullest = int(np.argmax(closely.reserved[0]))
    played = play(rank_maker(estimator)(fullest)).peak_reserved
    assert closely.reserved[0, fullest] == pytest.approx(played, rel=bound)
    assert np.all(closely.reserved >= closely.allocated)
    assert np.array_equal(closely.allocated, closed.allocated)
