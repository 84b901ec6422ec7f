"""What torchtitan's stages reserve: a block's acts by hand, and stages against the replay."""

from __future__ import annotations

import numpy as np
import pytest

import mofa
from mofa.blocks.build import BlockTapes
from mofa.blocks.op import Op, Tape, Tensor
from mofa.cost.acts import ACCUMULATE, FREE, script
from mofa.cost.closely import look_closely
from mofa.cost.peak import WORKSPACE, stage_bytes
from mofa.cost.sequence import plays, stage_played_bytes
from mofa.replay.play import play
from mofa.replay.ranks import rank_maker, rows_of
from mofa.search.playing import estimator_of

MIB = 1 << 20


def block() -> BlockTapes:
    """A layer that keeps ``h``, has ``wide`` for a moment, and makes a weight's gradient of 16 MiB."""
    sizes = {"x": 8, "wide": 64, "h": 24, "out": 8, "d:out": 8, "dW:w": 16, "d:x": 8}
    tensors = {name: Tensor(name, n * MIB) for name, n in sizes.items()}
    forward = Tape(
        (
            Op("widen", "mlp", None, ("x",), ("wide",)), Op("narrow", "mlp", None, ("wide",), ("h",)),
            Op("leave", "mlp", None, ("h",), ("out",)),
        ), tensors, ("x",), ("out",),
    )  # fmt: skip
    backward = Tape(
        (
            Op("w.wgrad", "mlp", None, ("d:out", "h"), ("dW:w",)),
            Op("w.dgrad", "mlp", None, ("d:out",), ("d:x",), scratch=36.0 * MIB),
            Op("fsdp.accumulate", "dp", None, ("dW:w",), ()),
        ), tensors, ("d:out",), ("d:x",),
    )  # fmt: skip
    return BlockTapes("layer", forward, backward)


def test_acts_are_the_tapes() -> None:
    """The input comes from the layer before, the output goes to the next; what is kept alone leaves out the rest."""
    one = script(block(), 0)
    size = dict(enumerate(one.sizes))
    name = {v // MIB: slot for slot, v in size.items() if v // MIB in (64, 24, 16, 36)}
    wide, kept, weight, scratch = (name[n] for n in (64, 24, 16, 36))
    assert [size[slot] // MIB for slot in (one.x, one.out, one.given, one.back)] == [8, 8, 8, 8]
    assert one.forward == [
        (64 * MIB, wide), (FREE, one.x), (24 * MIB, kept), (FREE, wide), (8 * MIB, one.out)
    ]  # fmt: skip
    assert one.kept_forward == [(FREE, one.x), (24 * MIB, kept), (8 * MIB, one.out)]
    assert one.backward == [
        (16 * MIB, weight), (FREE, kept), (36 * MIB, scratch), (8 * MIB, one.back), (FREE, scratch), (FREE, one.given),
        (ACCUMULATE, weight), (FREE, weight),
    ]  # fmt: skip
    assert [act for act in one.kept_backward if act[1] in (weight, scratch)] == [
        (16 * MIB, weight), (ACCUMULATE, weight), (FREE, weight)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "gpus", "batch", "strategy"),
    [
        ("llama3-8b", 32, 128, "tp=2 pp=2 cp=4 dp=2 micro_batch=2 recompute=every:2"),  # under a pipeline
        ("llama3-8b", 32, 128, "tp=2 pp=4 vpp=2 dp=4 micro_batch=1 recompute=ops"),  # an interleaved one
        ("qwen3-30b-a3b", 64, 128, "tp=2 pp=1 cp=2 dp=16 ep=2 etp=2 micro_batch=2 recompute=full"),  # FSDP alone
        ("llama3-8b", 32, 128, "tp=8 pp=4 dp=1 micro_batch=4 recompute=none"),  # no FSDP
    ],
)
def test_stages_reserve_what_the_replay_has(name: str, gpus: int, batch: int, strategy: str) -> None:
    """The first and the last stage within 2 %."""
    job, machines = mofa.load_workload(name, global_batch=batch), mofa.load_cluster("h200-hgx", gpus)
    estimator = estimator_of(job, machines, mofa.load_framework("torchtitan"), strategy)
    some, rank = rows_of(estimator), rank_maker(estimator)
    assert plays(some)
    for stage in {0, some.layout.stages.pp - 1}:
        played = play(rank(stage)).peak_reserved
        assert stage_played_bytes(some, 0, stage, WORKSPACE) == pytest.approx(played, rel=0.02), stage


def test_stages_that_are_alike_are_looked_at_once() -> None:
    """Of 8 stages the two ends are looked at and one between, which the others do not go beyond."""
    job, machines = mofa.load_workload("llama3-8b", global_batch=128), mofa.load_cluster("h100-hgx", 32)
    some = rows_of(
        estimator_of(job, machines, mofa.load_framework("torchtitan"), "tp=2 pp=8 dp=2 micro_batch=1 recompute=none")
    )
    closed = stage_bytes(some)
    reserved = np.full_like(closed.reserved, 1e15)  # as though every stage might be the fullest
    look_closely(some, closed.allocated, reserved, WORKSPACE)
    between = reserved[0, 1:-1]
    assert reserved[0, 0] < 1e15
    assert reserved[0, -1] < 1e15
    assert np.all(between <= between[0])
    assert np.all(reserved >= closed.allocated)
