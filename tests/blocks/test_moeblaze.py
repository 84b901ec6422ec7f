"""Dispatch by index: what the layer keeps by hand, the paper's accounting, and where it cannot be."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

import mofa
from mofa.blocks.backward import NO_RECOMPUTE, derived_backward_tape
from mofa.blocks.build import BlockTapes, CostedLayerKind, layer_forward_tape, layer_tapes
from mofa.blocks.chunks import split_into_token_chunks
from mofa.blocks.frameworks import primitives_of
from mofa.blocks.moeblaze import moeblaze_saved_bytes, routed_copies_bytes
from mofa.blocks.op import Tape
from mofa.blocks.work import GroupedGemm, MemoryBound
from mofa.errors import SpecError, StrategyError
from mofa.units import MIB
from tests.blocks.small import EXPERTS, context, framework, kept, llama, primitives, size

MODEL = llama(moe=EXPERTS)  # 8 experts, top 2, 256 wide, hidden 512
TOKENS, ROWS, H, F = 512, 1024, 512, 256


def forward(copies: str) -> Tape:
    ctx = context(MODEL, framework("megatron", routed_copies=copies))
    return layer_forward_tape(ctx, primitives(ctx), CostedLayerKind(True))


def keeps(copies: str) -> dict[str, float]:
    tape = forward(copies)
    found = kept(BlockTapes("moe", tape, derived_backward_tape(tape)))
    return {n: b for n, b in found.items() if n.startswith(("moe.", "experts."))}


def moved(tape: Tape) -> float:
    return sum(
        float(np.sum(op.work.bytes))
        for op in tape.ops
        if isinstance(op.work, MemoryBound) and op.name.startswith("moe.")
    )


def test_what_is_kept_by_hand() -> None:
    """Both keep gate and up, and the activation's output; the copies of the rows become three index lists."""
    both = {"experts.fc1": 2.0 * ROWS * 2 * F, "experts.act": 2.0 * ROWS * F}
    index = 4 * (3 * ROWS + 8 + 1)
    assert keeps("index") == {**both, "moe.index_lists": index}
    copies = keeps("materialised")
    assert {n: copies[n] for n in both} == both
    assert copies["moe.sorted"] == 2 * ROWS * H
    assert copies["moe.sorted_weights"] == copies["moe.sort_map"] == 4 * ROWS


def test_rows_out_of_the_experts_are_added_to_the_output() -> None:
    tape = forward("index")
    assert size(tape, "experts.out") == 2 * TOKENS * H
    back = derived_backward_tape(tape)
    assert size(back, "d:moe.sent") == 2 * TOKENS * H  # added up over the experts of a token


def test_the_products_are_the_same_and_the_copies_are_not_moved() -> None:
    by_index, copies = forward("index"), forward("materialised")
    for tape in (lambda t: t, derived_backward_tape):
        flops = [sum(float(np.sum(op.work.flops)) for op in tape(t).ops if isinstance(op.work, GroupedGemm))
                 for t in (by_index, copies)]  # fmt: skip
        assert flops[0] == flops[1] > 0
        assert moved(tape(by_index)) < 0.3 * moved(tape(copies))


def test_chunks_of_it() -> None:
    tape = split_into_token_chunks(forward("index"), 4)
    assert sum(op.name.startswith("moe.gather#") for op in tape.ops) == 4
    assert not any(n.startswith("moe.sent") for n in kept(BlockTapes("moe", tape, derived_backward_tape(tape))))


def test_the_papers_examples() -> None:
    """moe.md B.1: about 2 million tokens, top 4, 6144 wide: "94 GB"; one 24576-wide tensor a token: "98 GB"."""
    assert routed_copies_bytes(2e6, 4, 6144) == pytest.approx(94e9, rel=0.05)
    assert routed_copies_bytes(2e6, 1, 24576) == pytest.approx(98e9, rel=0.005)


def test_the_papers_third_configuration() -> None:
    """moe.md B.5: three R x h tensors are 6,144 MiB. It measured about 10,000 MB against over 40,000 MB, a ratio of 4;
    its accounting gives 1.8."""
    sizes = {p: moeblaze_saved_bytes(32 * 2048, 4, 1024, 4096, 16, p) for p in ("moeblaze", "conventional")}  # type: ignore[arg-type]
    assert sizes["moeblaze"] == pytest.approx(2**20 * (6144 + 128 + 3), rel=1e-4)
    assert sizes["conventional"] / sizes["moeblaze"] == pytest.approx(1.81, abs=0.01)


CONFIGURATIONS = (
    (512, 4, 1, 32, 2048), (1024, 8, 2, 32, 2048), (1024, 16, 4, 32, 2048), (2048, 16, 4, 32, 1024),
    (512, 16, 4, 32, 1024), (1024, 16, 4, 16, 1024), (2048, 8, 4, 16, 512),
)  # fmt: skip
"""The paper's seven: width, experts, top k, batch, sequence; the experts are four times as wide (moe.md B.5)."""
DOCS = (Path(__file__).parents[2] / "docs" / "moe.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", range(1, 8))
def test_the_table_of_the_papers_configurations(number: int) -> None:
    """Each row of docs/moe.md: the paper's two accountings and their ratio, then what frameworks' tapes keep."""
    d, experts, k, batch, seq = CONFIGURATIONS[number - 1]
    model = llama(hidden=d, moe={"num_experts": experts, "top_k": k, "expert_hidden": 4 * d})

    def of_tape(name: str, **options: object) -> float:
        ctx = context(model, framework(name, **options), seq_len=seq, micro_batch=batch)
        found = kept(layer_tapes(ctx, primitives_of(ctx.framework), CostedLayerKind(True), NO_RECOMPUTE))
        return sum(b for n, b in found.items() if n.startswith(("moe.", "experts.")) or n == "mlp_norm.out") / MIB

    blaze, conventional = (
        moeblaze_saved_bytes(batch * seq, k, d, 4 * d, experts, p) / MIB for p in ("moeblaze", "conventional")
    )
    computed = [
        blaze, conventional, conventional / blaze, of_tape("megatron"), of_tape("megatron", routed_copies="index"),
        of_tape("torchtitan"), of_tape("torchtitan", compile=True),
    ]  # fmt: skip
    row = next(line for line in DOCS.splitlines() if line.startswith(f"| {number} | {d} | {experts} | {k} |"))
    said = [float(cell.replace(",", "")) for cell in row.strip("| ").split("|")[5:]]
    assert said == pytest.approx(computed, rel=1e-3, abs=0.51)
    assert said[2] == pytest.approx(computed[2], abs=0.005)


def test_where_it_cannot_be() -> None:
    with pytest.raises(ValidationError, match="routed_copies: index is modelled for megatron's grouped experts"):
        framework("torchtitan", routed_copies="index")
    with pytest.raises(ValidationError, match="routed_copies"):
        framework("megatron", routed_copies="index", experts="sequential")
    job, machines = mofa.load_workload("mixtral-8x7b"), mofa.load_cluster("h200-hgx", 8)
    facts = mofa.load_framework({"name": "megatron", "routed_copies": "index"})
    with pytest.raises(StrategyError, match=r"ep \(8\) x etp \(1\) must be 1"):
        mofa.estimate(job, machines, "ep=8", framework=facts, replay=False)
    with pytest.raises(SpecError, match="--with moeblaze"):
        mofa.find_plans(mofa.load_workload("llama3-8b"), machines, with_=["moeblaze"])


def test_the_plan_says_what_it_saves_and_both_memories_agree() -> None:
    job, machines = mofa.load_workload("qwen3-30b-a3b", global_batch=64), mofa.load_cluster("h200-hgx", 8)
    machines = machines.with_host_speed(1e-6, "one that never holds up the device")  # else Python hides what is saved
    plans = {}
    for copies in ("materialised", "index"):
        facts = mofa.load_framework({"name": "megatron", "routed_copies": copies})
        for replay in (False, True):
            plans[copies, replay] = mofa.estimate(
                job, machines, "pp=4 ep=1 micro_batch=1", framework=facts, replay=replay
            )
    saved = plans["materialised", False].memory.allocated_bytes - plans["index", False].memory.allocated_bytes
    # 12 layers a stage, 4 micro-batches in flight on the first: the copies that are kept, less the indices; and four
    # in the layer that is under way: permuted, sorted, sorted back, and a gradient
    assert saved == pytest.approx((12 * 4 + 4) * 4096 * 8 * 2048 * 2, rel=0.02)
    assert plans["index", True].memory.allocated_bytes == pytest.approx(
        plans["index", False].memory.allocated_bytes, rel=0.02
    )
    assert plans["index", False].step_s < plans["materialised", False].step_s
    assert any("128.00 MiB" in note and "a model" in note for note in plans["index", False].notes)


def test_either_is_index_where_a_rank_holds_all_experts_and_copies_elsewhere() -> None:
    """Costed together or one by one, in time and memory of the closed forms and of the replay."""
    job = mofa.load_workload("qwen3-30b-a3b", global_batch=32, overrides={"model.num_layers": 16})
    machines = mofa.load_cluster("h200-hgx", 8)

    @cache
    def plan(copies: str, strategy: str, *, replay: bool = False) -> mofa.Plan:
        facts = mofa.load_framework({"name": "megatron", "routed_copies": copies})
        return mofa.estimate(job, machines, strategy, framework=facts, replay=replay, explain=False, over_time=False)

    alone, shared = "pp=4 ep=1 micro_batch=1", "pp=4 ep=2 micro_batch=1"
    for strategy, same in ((alone, "index"), (shared, "materialised")):
        for replay in (False, True):
            one, other = (plan(c, strategy, replay=replay) for c in ("either", same))
            assert one.step_s == pytest.approx(other.step_s, rel=1e-12)
            assert one.memory.by_component == pytest.approx(other.memory.by_component)
    assert any("dispatch by index" in note for note in plan("either", alone).notes)
    assert not any("dispatch by index" in note for note in plan("either", shared).notes)
    fix = {
        "pp": 4,
        "tp": 1,
        "cp": 1,
        "etp": 1,
        "micro_batch": 1,
        "vpp": 1,
        "recompute": "none",
        "dispatcher": "alltoall",
    }
    found = mofa.find_plans(
        job, machines, fix=fix, with_=["moeblaze"], without=["overlap_param_gather"], top=2, replay=False
    ).report.plans
    assert {p.strategy.ep for p in found} == {1, 2}  # the search has both, costed in one table
    for p in found:
        text = f"pp=4 ep={p.strategy.ep} micro_batch=1"
        assert p.step_s == pytest.approx(plan("either", text).step_s, rel=1e-9)
        assert p.memory.device_bytes == pytest.approx(plan("either", text).memory.device_bytes, rel=1e-9)
