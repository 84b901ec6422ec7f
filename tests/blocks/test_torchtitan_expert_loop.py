"""torchtitan's experts one after the other, by hand and as one profiled step has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mofa.blocks.build import BlockTapes
from mofa.blocks.context import Context
from mofa.blocks.op import Op
from mofa.blocks.recomputation import Recompute
from mofa.blocks.work import GroupedGemm, MemoryBound
from mofa.replay.replayer import Replayer
from tests.blocks.small import EXPERTS, framework, llama
from tests.blocks.test_torchtitan import TOKENS, D, context, layer, ops_named
from tests.replay.runs import load

E, F = 8.0, 256.0


def in_turn(ctx: Context) -> Context:
    return replace(ctx, framework=framework("torchtitan", experts="sequential"), unseen_rows_share=0.5)


def one_gpu(recompute: Recompute | None = None) -> BlockTapes:
    """Autocast of fp32 parameters, with gradients that are added up over micro-batches."""
    ctx = in_turn(context(llama(moe=EXPERTS), "autocast", accumulating=True))
    return layer(ctx, recompute) if recompute else layer(ctx)


def moved(op: Op) -> float:
    assert isinstance(op.work, MemoryBound)
    return float(np.max(op.work.bytes))


def test_a_slice_s_gradient_is_as_large_as_the_whole_weight() -> None:
    """Each expert's is written into zeros for all eight, which all but the first are added to the first: in fp32."""
    ops = one_gpu().backward.ops
    whole = 4.0 * E * F * D
    for name in ("experts.w1", "experts.w2", "experts.w3"):
        zeros, copied, added = (ops_named(ops, f"{name}.{end}")[0] for end in ("zeros.whole", "copy.whole", "whole"))
        assert [moved(op) for op in (zeros, copied, added)] == [E * whole, 2.0 * whole, 3.0 * (E - 1.0) * whole]
        assert [float(np.max(op.launches)) for op in (zeros, copied, added)] == [E, E, E - 1.0]
        assert float(np.max(added.scratch)) == whole


def test_the_loop_ends_behind_the_last_expert() -> None:
    """In one go from the output's product to the last sum; what adds to the parameters' gradients is behind."""
    ops = one_gpu().backward.ops
    rounds = [float(np.max(op.expert_loops)) > 1 for op in ops]
    first, last = rounds.index(True), len(rounds) - rounds[::-1].index(True)
    assert all(rounds[first:last])
    assert [ops[first].name, ops[last - 1].name] == ["experts.w2.dgrad", "experts.w1.whole"]
    assert [op.name for op in ops[last : last + 3]] == [f"experts.{w}.accumulate" for w in ("w2", "w3", "w1")]


def test_rows_are_neither_padded_nor_put_in_order_without_expert_parallelism() -> None:
    names = {op.name for op in one_gpu().forward.ops}
    assert not names & {"moe.plan", "moe.permute", "moe.unpermute"}
    spread = layer(in_turn(context(llama(moe=EXPERTS), ep=2)))
    assert names - {op.name for op in spread.forward.ops} >= {"experts.w1.cast", "experts.w1.weight_cast"}
    assert {"moe.plan", "moe.permute", "moe.unpermute"} <= {op.name for op in spread.forward.ops}


def test_launches_of_an_expert_are_those_of_a_profiled_step() -> None:
    """Ten forward: three products, five casts in front of them, SiLU and a product. Back 24: six products, of which
    each weight's is cast, written into zeros and added, five gradients of activations, two casts and their sum."""
    tapes = one_gpu()

    def launches(ops: tuple[Op, ...]) -> float:
        return sum(float(np.max(op.launches)) for op in ops if float(np.max(op.expert_loops)) > 1)

    assert launches(tapes.forward.ops) == 10 * E
    assert launches(tapes.backward.ops) == (6 + 3 * 4 + 3 + 2 + 1) * E - 3


def test_matrices_up_share_the_choice_of_a_kernel() -> None:
    """The second one's shape is that of the first, which the library remembers."""
    found = {op.name: op.kernel_choices for op in one_gpu().forward.ops if isinstance(op.work, GroupedGemm)}
    assert found == {"experts.w1": 0.5 * E, "experts.w3": 0.0, "experts.w2": 0.5 * E}


def test_output_stays_in_16_bits() -> None:
    """The rows in order are bf16, which the model casts to fp32 and autocast back."""
    tapes = one_gpu()
    (zeros,) = ops_named(tapes.forward.ops, "moe.zeros")
    assert moved(zeros) == 2.0 * 2 * TOKENS * D
    assert [op.name for op in tapes.forward.ops if op.name.startswith("moe.operand")] == [
        "moe.operand32.cast", "moe.operand.cast",
    ]  # fmt: skip


def test_memory_of_a_measured_step() -> None:
    run = load("tt1-phiminimoe-16l-sequential")
    played = Replayer(run.estimator).rank_memory(0)
    assert played.allocated == pytest.approx(run.allocated, rel=0.002)
    assert played.peak_reserved == pytest.approx(run.reserved, rel=0.005)
