"""All tapes of a model, and which of them are kept for the next estimate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import mofa
from mofa.blocks.op import Tape
from mofa.blocks.recomputation import Recompute, calls_without_autograd_record
from mofa.blocks.tapes import cached_context_tapes, model_tapes
from mofa.specs.strategy import RecomputeSpec
from tests.blocks.small import context, together
from tests.cost.toy import framework, mla_moe

MODES = (RecomputeSpec(), RecomputeSpec(kind="full"))


def test_a_model_has_its_layers_in_every_mode_and_its_ends() -> None:
    tapes = model_tapes(context(mla_moe(), framework("megatron")), MODES)
    layers = {f"{kind} recompute={mode}" for kind in ("dense", "moe") for mode in MODES}
    assert {*layers, "embedding", "head"} <= set(tapes.blocks)
    forward = {id(block.forward) for name, block in tapes.blocks.items() if name.startswith("dense ")}
    assert len(forward) == 1, "a forward tape is the same in all modes"
    largest = max(
        np.max(t.bytes)
        for name in layers for t in tapes.blocks[name].forward.tensors.values() if t.kind == "activation"
    )  # fmt: skip
    assert np.max(tapes.largest_activation) == largest


def test_experts_run_unrecorded_where_megatron_is_to_run_them_again() -> None:
    """In a checkpoint's first pass, one tape for all modes with it; as recorded where they run again, and under
    checkpoints that record as ever."""
    modes = (RecomputeSpec(), RecomputeSpec(kind="full"), RecomputeSpec(kind="selective", modules=("moe",)))
    blocks = model_tapes(context(mla_moe(), framework("megatron")), modes).blocks
    plain, full, experts = (blocks[f"moe recompute={mode}"] for mode in modes)

    def recorded(tape: Tape) -> set[bool]:
        calls = [op.module_call for op in tape.ops if op.module_call is not None]
        return {call.is_recorded for call in calls if call.module == "grouped_linear"}

    assert recorded(plain.forward) == {True}
    assert full.forward is experts.forward
    assert recorded(full.forward) == {False}
    assert [op._replace(module_call=None) for op in full.forward.ops] == [
        op._replace(module_call=None) for op in plain.forward.ops
    ]
    for block in (plain, full, experts):
        assert recorded(block.backward) == {True}
    recorded_anyway = Recompute(kind="full", early_stop=True)
    assert calls_without_autograd_record(plain.forward, recorded_anyway) == ()
    assert calls_without_autograd_record(plain.forward, replace(recorded_anyway, reentrant=True)) != ()


def test_tapes_of_one_context_are_kept_and_of_another_or_of_several_not() -> None:
    job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 64)
    cached_context_tapes.cache_clear()

    def described(strategy: str) -> int:
        before = cached_context_tapes.cache_info().misses
        mofa.estimate(job, machines, strategy, replay=False)
        return cached_context_tapes.cache_info().misses - before

    assert [described(s) for s in ("tp=2 pp=2", "tp=2 pp=4", "tp=4 pp=2", "tp=2 pp=2")] == [1, 0, 1, 0]
    several = together([context(mla_moe(), framework("megatron"), micro_batch=batch) for batch in (1, 3)])
    assert model_tapes(several, MODES) is not model_tapes(several, MODES)


def test_what_a_kept_tape_says_is_what_a_new_one_says() -> None:
    job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 64)
    other = job.model_copy(update={"batch": job.batch.model_copy(update={"seq_len": 2 * job.batch.seq_len})})

    def estimates() -> list[dict[str, object]]:
        return [
            mofa.estimate(workload, machines, "tp=2 pp=2 recompute=selective", replay=False).model_dump()
            for workload in (job, other)
        ]

    cached_context_tapes.cache_clear()
    first = estimates()
    assert estimates() == first
    cached_context_tapes.cache_clear()
    assert estimates() == first
