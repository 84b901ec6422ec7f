"""Shared experts beside exchanges: where their ops are, what they keep, and what a step saves."""

from __future__ import annotations

from typing import Any

import pytest

from mofa.blocks.build import BlockTapes
from mofa.blocks.op import SHARED_EXPERT_STREAM, Tape
from mofa.replay.time.step import replay_step_time
from tests.blocks.small import build, context, framework, kept, llama
from tests.replay.test_odd_jobs import Job, strategy_estimator

MODEL: dict[str, Any] = {"num_experts": 8, "top_k": 2, "expert_hidden": 256, "shared_hidden": 256}
LITE: Job = ("deepseek-v2-lite", "h100-hgx", 16, 128, 4096)


def layer(*, overlap: bool = True, ep: int = 4, tp: int = 1, gate: bool = False) -> BlockTapes:
    model = llama(moe=MODEL | {"shared_gate": gate})
    return build(
        context(model, framework("megatron", shared_expert_overlap=overlap), ep=ep, tp=tp, sp=tp > 1), moe=True
    )


def between(tape: Tape, before: str, behind: str) -> list[str]:
    names = [op.name for op in tape.ops if op.work is not None]
    return names[names.index(before) + 1 : names.index(behind)]


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_products_are_behind_the_exchanges_that_they_run_beside(tp: int, gate: bool) -> None:
    """token_dispatcher.py: fc1 in ``dispatch_postprocess``, fc2 in ``combine_postprocess``; backward the other way."""
    tapes = layer(tp=tp, gate=gate)
    first = between(tapes.forward, "moe.dispatch_weights", "moe.sort")
    second = between(tapes.forward, "moe.combine", "moe.unpermute")
    assert "shared.fc1" in first and "shared.activation" in first and "shared.fc2" in second
    assert "shared.fc2.dgrad" in between(tapes.backward, "moe.combine.backward", "moe.unsort.backward")
    assert "shared.fc1.dgrad" in between(tapes.backward, "moe.dispatch.backward", "moe.permute.backward")


@pytest.mark.parametrize("tp", [1, 2])
def test_every_op_is_still_there_and_reads_what_was_made(tp: int) -> None:
    tapes, plain = layer(tp=tp, gate=True), layer(tp=tp, gate=True, overlap=False)
    assert sorted(op.name for op in tapes.forward.ops) == sorted(op.name for op in plain.forward.ops)
    given = {*tapes.forward.tensors, *tapes.backward.inputs}
    made = {name for op in tapes.backward.ops for name in op.writes} - set(tapes.forward.tensors)
    for op in tapes.backward.ops:
        assert all(name in given or name not in made for name in op.reads), op.name
        given.update(op.writes)


def test_what_was_gathered_is_kept_and_comes_from_their_own_memory() -> None:
    """Linears without a parallel mode keep their whole input, where Transformer Engine's gather a part again."""
    assert "shared.fc1.full" in kept(layer(tp=2)) and "shared.fc1.full" not in kept(layer(tp=2, overlap=False))
    assert all(op.role != "regather" or op.origin != "shared.fc1" for op in layer(tp=2).backward.ops)
    assert {op.pool for op in layer().forward.ops if op.name in ("shared.fc1", "shared.fc2")} == {SHARED_EXPERT_STREAM}


def test_without_exchanges_nothing_changes() -> None:
    alone, plain = layer(ep=1), layer(ep=1, overlap=False)
    assert [op.name for op in alone.forward.ops] == [op.name for op in plain.forward.ops]
    assert [op.name for op in alone.backward.ops] == [op.name for op in plain.backward.ops]


def test_a_step_hides_what_it_runs_beside() -> None:
    steps = []
    for overlap in (False, True):
        options = {"name": "megatron", "balances_by": "turn", "shared_expert_overlap": overlap}
        estimator = strategy_estimator(LITE, options, "ep=8 micro_batch=2")
        played = replay_step_time(estimator, detail=False)
        assert float(estimator.breakdown().step_s[0]) == pytest.approx(played.step_s, rel=0.02)
        steps.append(played)
    before, after = steps
    assert after.step_s < before.step_s and after.hidden["ep"] > before.hidden["ep"]
    assert after.step_s >= before.step_s - before.exposed["ep"] - before.exposed["host_idle"]
