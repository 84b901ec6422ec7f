"""What stages reserve, their requests played: a block's by hand, scripts and stages against the replay's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import mofa
from mofa.blocks.build import BlockTapes
from mofa.blocks.op import Op, Tape, Tensor
from mofa.cost.acts import (
    CACHE,
    CLAIM,
    DROP,
    FREE,
    HOLD,
    KEEP,
    LASTING,
    LATE,
    OF_POOL,
    PRODUCT,
    SUM,
    TAKE,
    Ends,
    course,
    pool_of,
    script,
)
from mofa.cost.closely import look_closely
from mofa.cost.heap import rounded
from mofa.cost.held import Blocks, plays, stage_of
from mofa.cost.lasting import PYTORCH_WORKSPACE
from mofa.cost.lead import lag
from mofa.cost.lives import life
from mofa.cost.peak import stage_bytes
from mofa.cost.sequence import reserved_bytes
from mofa.cost.shelf import QUEUE
from mofa.replay import script as replayed
from mofa.replay.play import play
from mofa.replay.ranks import rank_maker, rows_of
from mofa.search.playing import estimator_of

MIB = 1 << 20
LARGE = pool_of(1 << 30)
ALONE = Ends(8 * MIB, receives=False, sends=False)


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


def sizes(requests: list[tuple[int, int]]) -> list[int]:
    """MiB that come, and below 0 that go."""
    held = {slot: size // MIB for size, slot in requests if size}
    return [size // MIB or -held.get(slot, 0) for size, slot in requests]


def test_two_layers_are_one_list_of_requests() -> None:
    """The first one's output is the other's input; what both keep goes in their backwards, the last layer's first."""
    one = script(life(block()))
    found = course(LARGE, [one, one], ALONE, accumulates="there")
    assert sizes(found.forward) == [64, 24, -64, 8, 64, -8, 24, -64, 8]
    kept = {slot: size // MIB for size, slot in found.forward if size}
    assert [kept[slot] for slot in found.left] == [24, 24, 8]
    made = {**kept, **{slot: size // MIB for size, slot in found.backward if size}}
    assert [size // MIB or -made[slot] for size, slot in found.backward] == [
        -8, 16, -24, 36, 8, -36, -16, 16, -24, 36, 8, -36, -8, -16, -8
    ]  # fmt: skip
    assert found.first is found.backward


def test_gradients_stay_or_are_copied() -> None:
    """The first micro-batch's gradient of 16 MiB becomes the parameter's, or one of 32 MiB beside it does."""
    one = script(life(block()))
    for accumulates, size in (("stay", 16), ("fp32", 32)):
        found = course(LARGE, [one], ALONE, accumulates=accumulates)
        ((slot,),) = found.gradients
        assert (size * MIB, slot) in found.first
        assert (0, slot) not in found.first
        assert sum(sizes(found.backward)) < sum(sizes(found.first))
    assert course(LARGE, [one], ALONE, accumulates="stay", tied=True).gradients == ((),)


def test_pools_are_apart() -> None:
    """Of a block without small tensors the small pool hears nothing; what stages send each other is of its size."""
    one = script(life(block()))
    found = course(pool_of(1), [one], ALONE, accumulates="there")
    assert (found.forward, found.backward) == ([], [])
    found = course(pool_of(1), [one], dataclasses.replace(ALONE, boundary=512, receives=True), accumulates="there")
    assert [size for size, _ in found.forward] == [512, 0]  # which is let go as the layer's input


def test_a_pipelines_schedule_lets_outputs_and_gradients_go() -> None:
    """Kept, an input comes in no slot, and output and input's gradient are not let go by the passes. A trial forward
    leaves nothing."""
    one = script(dataclasses.replace(life(block()), dry=life(block()).forward))
    found = course(LARGE, [one, one], Ends(8 * MIB, receives=True, sends=True, kept=True), accumulates="stay")
    made = {slot for requests in (found.forward, found.backward) for size, slot in requests if size}
    gone = {slot for requests in (found.forward, found.backward) for size, slot in requests if not size}
    assert made - gone == {found.output, found.gradient}
    assert found.first_gradient not in {slot for size, slot in found.first if not size}
    assert sizes(found.trial) == [64, 24, -64, 8, -24, 64, -8, 24, -64, 8, -24, -8]


def test_what_was_sent_comes_back_once_the_device_is_as_far() -> None:
    """Twice as slow as its host, a device is behind by as many launches as there were, and never by more than 1,024."""
    assert [lag(launched, 2.0) for launched in (0.0, 300.0, 5000.0)] == [0.0, 300.0, QUEUE]
    assert lag(300.0, 0.9) == 0.0


CASES = [
    ("llama3-8b", 32, 128, "torchtitan", "tp=2 pp=2 cp=4 dp=2 micro_batch=2 recompute=every:2"),  # under a pipeline
    ("llama3-8b", 32, 64, "torchtitan", "tp=2 pp=4 vpp=2 dp=4 micro_batch=1 recompute=ops"),  # an interleaved one
    ("qwen3-30b-a3b", 64, 128, "torchtitan", "tp=2 pp=1 cp=2 dp=16 ep=2 etp=2 micro_batch=2 recompute=full"),  # FSDP
    ("llama3-8b", 32, 128, "torchtitan", "tp=8 pp=4 dp=1 micro_batch=4 recompute=none"),  # no FSDP
    ("llama3-70b", 64, 64, "megatron", "tp=8 pp=4 cp=2 micro_batch=1 recompute=none"),
    ("llama3-8b", 32, 128, "megatron", "tp=4 pp=4 vpp=2 dp=2 micro_batch=4 recompute=selective:core_attn+mlp"),
    ("mixtral-8x7b", 32, 64, "megatron", "tp=2 pp=2 vpp=8 cp=2 ep=8 etp=2 dp=4 micro_batch=8 recompute=selective"),
    ("qwen3-30b-a3b", 64, 128, "megatron", "tp=8 pp=2 vpp=4 cp=1 ep=2 etp=4 dp=4 micro_batch=1 recompute=full"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "gpus", "batch", "framework", "strategy"), CASES)
def test_stages_reserve_what_the_replay_has(name: str, gpus: int, batch: int, framework: str, strategy: str) -> None:
    """The first and the last stage within 0.5 %, most to the byte: few rounds are played, of even tokens."""
    job, machines = mofa.load_workload(name, global_batch=batch), mofa.load_cluster("h200-hgx", gpus)
    estimator = estimator_of(job, machines, mofa.load_framework(framework), strategy)
    some, rank = rows_of(estimator), rank_maker(estimator)
    assert plays(some)
    blocks = Blocks(some)
    for stage in {0, some.layout.stages.pp - 1}:
        played = play(dataclasses.replace(rank(stage), wander=None)).peak_reserved
        assert reserved_bytes(stage_of(some, stage, PYTORCH_WORKSPACE, blocks)) == pytest.approx(played, rel=5e-3), (
            stage
        )


@pytest.mark.parametrize(
    ("name", "framework", "options", "changes", "strategy"),
    [
        ("llama3-8b", "torchtitan", {"data_parallel": "ddp"}, {"model": {"tied_embeddings": True}}, "pp=1"),  # autocast
        ("llama3-8b", "torchtitan", {"data_parallel": "ddp"}, None, "pp=1 recompute=full"),
        ("llama3-8b", "fsdp1", None, None, "pp=1"),
        ("llama3-8b", "megatron-2022", None, None, "tp=2 pp=2"),
        ("llama3-8b", "megatron", {"fp8_params": True}, {"precision": {"gemm": "fp8"}}, "tp=2 pp=2"),
        ("deepseek-v3", "megatron", None, {"precision": {"gemm": "fp8"}}, "pp=8 ep=32 recompute=full"),  # predicts on
    ],
)
def test_other_frameworks_and_options(
    name: str, framework: str, options: dict[str, object] | None, changes: dict[str, object] | None, strategy: str
) -> None:  # fmt: skip
    """The last stage to the byte."""
    gpus = 256 if name == "deepseek-v3" else 32
    job = mofa.load_workload(name, global_batch=4 * gpus, overrides=changes)
    estimator = estimator_of(
        job, mofa.load_cluster("h200-hgx", gpus), mofa.load_framework(framework, overrides=options),
        f"{strategy} micro_batch=1",
    )  # fmt: skip
    some = rows_of(estimator)
    last = some.layout.stages.pp - 1
    found = reserved_bytes(stage_of(some, last, PYTORCH_WORKSPACE, Blocks(some)))
    assert found == play(dataclasses.replace(rank_maker(estimator)(last), wander=None)).peak_reserved


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("llama3-8b", "tp=4 pp=4 vpp=4 dp=2 micro_batch=4 recompute=selective"),  # its second round takes the most
        ("llama3-70b", "tp=2 pp=1 dp=16 micro_batch=2 recompute=none"),  # 2.4 TiB: addresses would end
    ],
)
def test_scores_of_attention_that_is_not_fused(name: str, strategy: str) -> None:
    """The fullest stage within 2 %: blocks of GiB, of which one more in a hole or beside it is seen."""
    job, machines = mofa.load_workload(name, global_batch=128), mofa.load_cluster("h100-hgx", 32)
    unfused = mofa.load_framework("megatron-local", overrides={"attention": "unfused"})
    estimator = estimator_of(job, machines, unfused, strategy)
    detail = estimator.rows(detail=True, closely=True).detail
    assert detail is not None
    assert detail.reserved_bytes[0].max() == pytest.approx(play(rank_maker(estimator)(0)).peak_reserved, rel=0.02)


@pytest.mark.parametrize("vpp", [3, 4])
def test_blocks_that_wander_for_a_dozen_rounds(vpp: int) -> None:
    """Pipelines of few ranks with many micro-batches, 3.6 and 3.8 % of the device's memory short after four rounds."""
    job, machines = mofa.load_workload("qwen3-30b-a3b", global_batch=2048), mofa.load_cluster("h200-hgx", 64)
    strategy = f"tp=1 pp=2 vpp={vpp} ep=8 micro_batch=2 schedule=interleaved recompute=none"
    estimator = estimator_of(job, machines, mofa.load_framework("torchtitan"), strategy)
    some = rows_of(estimator)
    found = reserved_bytes(stage_of(some, 1, PYTORCH_WORKSPACE, Blocks(some)))
    assert found == pytest.approx(play(rank_maker(estimator)(1)).peak_reserved, rel=1e-3)


def test_scripts_are_the_replays() -> None:
    """Of every block the same acts on as many bytes in the same order."""
    job, machines = mofa.load_workload("qwen3-30b-a3b", global_batch=128), mofa.load_cluster("h200-hgx", 64)
    codes = {
        replayed.NEW: TAKE, replayed.FREE: FREE, replayed.CLAIM: CLAIM, replayed.HOLD: HOLD, replayed.CACHE: CACHE,
        replayed.KEEP: KEEP, replayed.DROP_CARRIED: DROP, replayed.PRODUCT: PRODUCT, replayed.SUM: SUM,
        replayed.LATE: LATE, replayed.LASTING: LASTING,
    }  # fmt: skip
    for framework, strategy in (("torchtitan", "pp=1 dp=32 cp=2 ep=8 recompute=ops"), ("megatron", "pp=2 dp=32 ep=8")):
        estimator = estimator_of(job, machines, mofa.load_framework(framework), f"tp=1 micro_batch=1 {strategy}")
        blocks = Blocks(rows_of(estimator))
        for name in estimator.parts[0].costs.tapes:
            mine, other = script(blocks.life(name)), replayed.script(blocks.life(name))
            for own, theirs in ((mine.forward, other.forward), (mine.backward, other.backward)):
                made = [(codes[code], size if codes[code] in OF_POOL else 0) for _, code, _, size, _ in theirs]
                assert [(code, size) for code, _, size, _ in own] == made, name


def test_stages_that_are_alike_are_looked_at_once() -> None:
    """Of 8 stages the two ends are looked at and one between, which the others do not go beyond."""
    job, machines = mofa.load_workload("llama3-8b", global_batch=128), mofa.load_cluster("h100-hgx", 32)
    some = rows_of(
        estimator_of(job, machines, mofa.load_framework("torchtitan"), "tp=2 pp=8 dp=2 micro_batch=1 recompute=none")
    )
    closed = stage_bytes(some)
    reserved = np.full_like(closed.reserved, 1e15)  # as though every stage might be the fullest
    look_closely(some, closed.allocated, reserved, PYTORCH_WORKSPACE)
    between = reserved[0, 1:-1]
    assert reserved[0, 0] < 1e15
    assert reserved[0, -1] < 1e15
    assert np.all(between <= between[0])
    assert np.all(reserved >= closed.allocated)


def test_a_closer_look_is_at_one_candidate() -> None:
    job, machines = mofa.load_workload("llama3-8b", global_batch=128), mofa.load_cluster("h100-hgx", 32)
    some = rows_of(estimator_of(job, machines, mofa.load_framework("megatron"), "tp=2 pp=8 dp=2 micro_batch=1"))
    two = np.ones((2, 8))
    with pytest.raises(ValueError, match="one candidate"):
        look_closely(some, two, two, PYTORCH_WORKSPACE)
    assert rounded(513.0) == 1024


@pytest.mark.parametrize(
    ("name", "framework", "strategy"),
    [
        ("llama3-8b", "torchtitan", "tp=2 sp=true pp=2 vpp=2 micro_batch=1 recompute=full"),
        ("qwen3-30b-a3b", "megatron-local", "pp=4 ep=4 micro_batch=1 recompute=full"),
    ],
)
def test_a_look_ends_where_a_limit_is_passed(name: str, framework: str, strategy: str) -> None:
    """It says the same at a limit that is met as without one, and more than the limit, at once, where it is not."""
    job = mofa.load_workload(name, global_batch=64), mofa.load_cluster("h100-hgx", 16), mofa.load_framework(framework)
    estimator = estimator_of(*job, strategy)
    whole = estimator.closely()
    assert whole == estimator.rows(closely=True).device_bytes[0]
    assert estimator.closely(whole) == whole
    for limit in (0.5 * whole, 0.9 * whole, whole - 1.0):
        assert limit < estimator.closely(limit) <= whole
    rows = rows_of(estimator)
    stage = stage_of(rows, 0, PYTORCH_WORKSPACE, Blocks(rows))
    assert reserved_bytes(stage, 0.0) < 0.5 * reserved_bytes(stage)
