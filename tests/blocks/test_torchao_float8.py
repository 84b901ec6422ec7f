"""torchtitan's linears in fp8 by torchao: what is kept, what kernels move, what FSDP gathers, and what is refused.

Numbers are those that PyTorch 2.11's compiler gives for one block of Llama 3 8B with torchao 0.17.0
(docs/evidence/torchao_float8.md).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import mofa
from mofa.blocks.build import BlockTapes, CostedLayerKind, layer_tapes
from mofa.blocks.float8 import float8_linears, fp8_gathered_share
from mofa.blocks.fp8 import FP8_RECIPES
from mofa.blocks.frameworks import fsdp1
from mofa.blocks.op import Tape
from mofa.blocks.work import Collective, Gemm, MemoryBound
from mofa.errors import SpecError, StrategyError
from mofa.search.job_setup import with_numerics
from mofa.search.one_plan import plan_in_closed_form
from mofa.search.one_strategy import checked_strategy_row
from mofa.specs.profiles import load_gpu
from mofa.specs.workload import PrecisionSpec, WorkloadSpec
from tests.blocks.small import framework, gpt
from tests.blocks.test_torchtitan import context, layer, saved

TOKENS = 8192
MB = 1e6
INPUTS = TOKENS * (6 * 4096 + 14336)
"""Elements of the inputs of a block's seven linears."""


@cache
def _tapes(gemm: str, mode: str = "mixed", **options: Any) -> BlockTapes:
    model = mofa.load_workload("llama3-8b").model
    ctx = context(model, mode, compile_=True)
    ctx = replace(ctx, framework=ctx.framework.model_copy(update=options), seq_len=TOKENS, micro_batch=1.0)
    return layer(
        replace(ctx, float8=float8_linears(model, ctx.framework, PrecisionSpec.model_validate({"gemm": gemm})))
    )


def _streamed(tape: Tape) -> float:
    """What memory-bound kernels move, FSDP's not counted. [MB]"""
    works = [op.work for op in tape.ops if isinstance(op.work, MemoryBound) and op.part != "fsdp"]
    return sum(float(np.asarray(work.bytes).reshape(-1)[0]) for work in works) / MB


@pytest.mark.parametrize(
    ("gemm", "kept"),
    [("bf16", 1142), ("fp8-tensorwise", 773), ("fp8-rowwise", 773), ("fp8-rowwise-gw-hp", 1142)],
)
def test_kept_as_the_partitioner_keeps(gemm: str, kept: int) -> None:
    """Outputs of norms and SwiGLU are made again, where weights' gradients are no bf16 products of them."""
    assert round(saved(_tapes(gemm)) / MB) == kept


@pytest.mark.parametrize(
    ("gemm", "forward", "backward"),
    [("fp8-tensorwise", 3624, 5018), ("fp8-rowwise", 2484, 10451), ("fp8-rowwise-gw-hp", 2819, 5219)],
)
def test_kernels_move_what_the_compiler_counts(gemm: str, forward: int, backward: int) -> None:
    """Beyond the same block in bf16, for which it counts 1812 and 2685 MB. Inputs' gradients are multiplied by their
    scales in kernels that do more."""
    bf16, fp8 = _tapes("bf16"), _tapes(gemm)
    assert _streamed(fp8.forward) - _streamed(bf16.forward) == pytest.approx(forward - 1812, rel=0.05)
    elsewhere = 4.0 * INPUTS / MB * ("rowwise" in gemm)
    assert _streamed(fp8.backward) - elsewhere - _streamed(bf16.backward) == pytest.approx(backward - 2685, rel=0.15)


@pytest.mark.parametrize("gemm", ["fp8-tensorwise", "fp8-rowwise", "fp8-rowwise-gw-hp"])
def test_scales_by_rows_are_multiplied_behind_products(gemm: str) -> None:
    """Of 319 million inputs and 218 million parameters: 6.3 ps each on an H200, where to move them takes less than one.
    Then a weight's gradient comes out in fp32, and is not cast once more."""
    tape = _tapes(gemm, "autocast").backward
    rate = load_gpu("h200-sxm").curves.stream["compiled fp8_rescale"].form.bytes_per_s
    works = [op.work for op in tape.ops if isinstance(op.work, MemoryBound)]
    seconds = sum(float(np.asarray(w.bytes).reshape(-1)[0]) for w in works if w.like == "compiled fp8_rescale") / rate
    by_rows, rescales = gemm != "fp8-tensorwise", gemm == "fp8-rowwise"
    assert seconds == pytest.approx(6.3e-12 * (INPUTS * by_rows + 218_103_808 * rescales), rel=0.01)
    casts = [op for op in tape.ops if op.role == "grad_cast" and op.work is not None]
    assert len(casts) == (0 if rescales else 7)


def test_products_are_fp8_but_where_a_recipe_keeps_them() -> None:
    """Forward with fast accumulation, backward without; weights' gradients of ``gw-hp`` in bf16."""
    formats = {
        gemm: [{op.work.format for op in tape.ops if isinstance(op.work, Gemm)} for tape in (t.forward, t.backward)]
        for gemm in ("fp8-tensorwise", "fp8-rowwise", "fp8-rowwise-gw-hp")
        for t in [_tapes(gemm)]
    }
    assert formats["fp8-tensorwise"] == [{"fp8_fast"}, {"fp8_split"}]
    assert formats["fp8-rowwise"] == [{"fp8_rows"}, {"fp8_split"}]
    assert formats["fp8-rowwise-gw-hp"] == [{"fp8_rows_hp"}, {"fp8_split", "bf16"}]


def test_autocast_casts_fp32_weights_and_keeps_no_bf16_copies() -> None:
    """Weights are cast to fp8 as they are: 4 bytes read for the largest, 4 and 1 for the cast."""
    tapes = _tapes("fp8-tensorwise", "autocast")
    assert not any(name.endswith("weight16") for name in tapes.forward.tensors)
    (op,) = [op for op in tapes.forward.ops if op.name == "mlp.w2.weight8"]
    assert isinstance(op.work, MemoryBound)
    assert float(np.asarray(op.work.bytes).reshape(-1)[0]) == 9.0 * 4096 * 14336


def test_weights_gathered_in_fp8_take_a_byte() -> None:
    """Norms' weights alone take two; shards are cast in front, by scales that seven reductions make unless known."""
    model, linears = mofa.load_workload("llama3-8b").model, _tapes("fp8-tensorwise", fp8_all_gather=True)
    gathers = [op for op in linears.forward.ops if op.name.endswith("all_gather")]
    each = float(np.asarray(gathers[0].work.payload).reshape(-1)[0])  # type: ignore[union-attr]
    found = float8_linears(model, framework("torchtitan", fp8_all_gather=True), PrecisionSpec(gemm="fp8-tensorwise"))
    share = fp8_gathered_share(model, framework("torchtitan", fp8_all_gather=True), found)
    assert each == pytest.approx((2.0 - share) * 218_112_000, rel=1e-9) and 0.9999 < share < 1.0
    ahead = _tapes("fp8-tensorwise", fp8_all_gather=True, fp8_scales_ahead=True)

    def reductions(tapes: BlockTapes) -> int:
        return sum(".amax." in op.name and isinstance(op.work, Collective) for op in tapes.forward.ops)

    assert (reductions(linears), reductions(ahead)) == (7, 0)


def _job(gemm: str, **model: Any) -> WorkloadSpec:
    job = mofa.load_workload("llama3-8b")
    precision = job.precision.model_copy(update={"gemm": gemm})
    return job.model_copy(update={"precision": precision, "model": job.model.model_copy(update=model)})


@pytest.mark.parametrize(
    ("gemm", "options", "named"),
    [
        ("fp8-tensorwise", {}, "compiled alone"),
        ("fp8-delayed", {"compile": True}, "has no fp8-delayed"),
        ("fp8-tensorwise", {"compile": True, "fp8_filter": ""}, "output layer"),
        ("fp8-rowwise", {"compile": True, "fp8_all_gather": True}, "one scale a tensor"),
        ("bf16", {"compile": True, "fp8_all_gather": True}, "needs fp8 products"),
        ("fp8-rowwise-gw-hp", {"compile": True, "fp8_filter": "output+auto_filter_small_kn"}, "auto_filter_small_kn"),
    ],
)
def test_what_torchtitan_refuses_or_is_not_modelled(gemm: str, options: dict[str, Any], named: str) -> None:
    titan = mofa.load_framework({"name": "torchtitan", **options})
    with pytest.raises(SpecError, match=named) as caught:
        with_numerics(_job(gemm), mofa.load_cluster("h100-hgx", 8), titan, ())
    assert "\n" not in str(caught.value)


def test_experts_and_tensor_parallelism_are_refused() -> None:
    titan, cluster = mofa.load_framework({"name": "torchtitan", "compile": True}), mofa.load_cluster("h100-hgx", 8)
    experts = mofa.load_workload("qwen3-30b-a3b")
    precision = experts.precision.model_copy(update={"gemm": "fp8-tensorwise"})
    with pytest.raises(SpecError, match="dense layers"):
        with_numerics(experts.model_copy(update={"precision": precision}), cluster, titan, ())
    with pytest.raises(StrategyError, match="splits"):
        checked_strategy_row(_job("fp8-tensorwise"), cluster, titan, {"tp": 2})


# -- weights that stay gathered, and Transformer Engine's linears in fsdp1


@pytest.mark.parametrize("name", ["fsdp1", "torchtitan"])
def test_weights_that_stay_gathered_are_kept_and_gathered_once(name: str) -> None:
    """2 bytes a parameter more of every block until its backward, which gathers nothing."""
    model = mofa.load_workload("llama3-8b").model

    def tapes(**options: Any) -> BlockTapes:
        ctx = context(model, "mixed")
        return layer(replace(ctx, framework=framework(name, **options)))

    again, kept = tapes(), tapes(reshard_after_forward=False)
    assert saved(kept) - saved(again) == pytest.approx(2.0 * 218_112_000, rel=1e-3)

    def gathers(tape: Tape) -> int:
        return sum(isinstance(op.work, Collective) and op.work.kind == "all_gather" for op in tape.ops)

    assert (gathers(again.forward), gathers(kept.forward)) == (1, 1)
    assert (gathers(again.backward), gathers(kept.backward)) == (1, 0)


def test_kept_weights_cost_memory_and_save_time() -> None:
    """The closed form, whose memory the replay has as well (tests/replay/test_kept_weights.py)."""
    job, cluster = mofa.load_workload("llama3-8b", global_batch=8), mofa.load_cluster("h200-hgx", 8)
    plans = [
        plan_in_closed_form(job, cluster, "recompute=full", mofa.load_framework({"name": "fsdp1", **options}))
        for options in ({}, {"reshard_after_forward": False})
    ]
    assert plans[1].step_s < plans[0].step_s
    more = plans[1].memory.allocated_bytes - plans[0].memory.allocated_bytes
    assert 0.8 < more / (2.0 * 8.03e9) < 1.0


def test_linears_of_transformer_engine_in_fsdp1() -> None:
    """Of each a byte an element of its input and of its weight is kept; the bias's gradient is no kernel."""
    model = gpt(dropout=0.0)
    ctx = context(model, "mixed")
    ctx = replace(ctx, framework=framework("fsdp1", fused_qkv=True))
    fp8 = replace(ctx, fp8=FP8_RECIPES["delayed"])
    forward = layer_tapes(fp8, fsdp1.PRIMITIVES, CostedLayerKind(False)).forward
    names = {op.name for op in forward.ops}
    assert {"wqkv.weight8", "wo.weight8", "mlp.up.weight8", "mlp.down.weight8"} <= names
    assert not any(name.endswith(".bias") for name in names)
    assert all(
        op.work.format == ("fp8_fast" if op.weight != "output" else "bf16")
        for op in forward.ops if isinstance(op.work, Gemm)
    )  # fmt: skip
