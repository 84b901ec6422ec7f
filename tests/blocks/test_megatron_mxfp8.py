"""MXFP8 by hand: what Transformer Engine casts, keeps and gathers with a scale for every 32 elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mofa
from mofa.blocks.fp8 import FP8_RECIPES, copies_per_fp8_weight, formats_of_layer_products
from mofa.blocks.frameworks.megatron.fp8 import padded_expert_rows
from mofa.blocks.work import Collective, Gemm, MemoryBound
from mofa.cost.kernels.compute import memory_bound_bytes_per_s
from mofa.cost.optimizer import weight_cast_seconds
from mofa.search.job_setup import with_numerics
from mofa.specs.products import known_or_stand_in_format
from tests.blocks.small import EXPERTS, build, context, framework, in_fp8, kept, llama, size
from tests.blocks.test_megatron_fp8 import TOKENS, TP, B, F, H, S, layer, moved, names, number, one

SCALED = 1.0 + 1.0 / 32.0
"""A byte and its share of a scale of one byte for 32 elements. [B]"""
MATRICES = 2 * (512 * (8 + 2 * 4) * 64 + 8 * 64 * 512 + 3 * 512 * 1536)
"""Parameters of the linears of the two layers of :func:`tests.blocks.small.llama`. [params]"""


def test_casts_write_both_copies_in_one_kernel() -> None:
    """2 bytes read, one written for each copy; the norm in front casts nothing (normalization.cpp: ``UNFUSED``)."""
    tapes = layer("mxfp8")
    assert moved(one(tapes.forward, "qkv.cast")) == 4.0 * TOKENS * H
    assert moved(one(tapes.forward, "attn_norm")) == 4.0 * TOKENS * H
    assert number(one(tapes.forward, "qkv.cast").scratch) == 2.0 * TOKENS * H
    cast = one(tapes.backward, "mlp.fc1.dy.cast")
    assert moved(cast) == 4.0 * TOKENS * 2 * F
    assert [size(tapes.backward, name) for name in cast.writes] == [SCALED * TOKENS * 2 * F] * 2


def test_the_three_products_are_of_one_kind() -> None:
    """All scale 1 x 32 blocks of both operands (linear.py)."""
    backward = layer("mxfp8").backward
    works = [one(backward, f"mlp.fc1.{end}").work for end in ("dgrad", "wgrad")]
    assert [work.format for work in works if isinstance(work, Gemm)] == ["mxfp8", "mxfp8"]
    assert formats_of_layer_products("mxfp8") == ("mxfp8",)


def test_what_is_kept() -> None:
    """A column-wise copy of each input with its scales; the projection casts its input again (attention.py)."""
    found = kept(layer("mxfp8"))
    assert found["qkv.fp8_t"] == SCALED * TOKENS * H
    assert found["mlp.fc2.fp8_t"] == SCALED * TOKENS * F
    assert "proj.fp8_t" not in found
    assert moved(one(layer("mxfp8").backward, "proj.again.cast")) == 3.0 * TOKENS * H


def test_gathered_columns_are_in_order_already() -> None:
    """Blocks of 128 transpose their columns and put gathered shards in order; these lie as the tensor does
    (mxfp8_tensor.py, ``get_columnwise_shape``). Rows and columns are gathered, each with its scales."""
    mx, blocks = layer("mxfp8", TP).backward, layer("blockwise", TP).backward
    assert any(name.endswith(".order") for name in names(blocks))
    assert not any(name.endswith((".order", ".transpose")) for name in names(mx))
    gathers = [op.work.payload for op in mx.ops if op.name.startswith("mlp.fc2.dy") and isinstance(op.work, Collective)]
    assert [number(payload) for payload in gathers] == [SCALED * TOKENS * H] * 2


def test_experts_rows_are_padded_to_32() -> None:
    """``get_align_size_for_quantization``: 32 under MXFP8, 15.5 rows of each expert in the mean."""
    ctx = in_fp8(context(llama(moe=EXPERTS), framework("megatron"), seq_len=S, micro_batch=B), "mxfp8")
    rows = number(ctx.rows_memory)
    assert number(padded_expert_rows(ctx, ctx.rows_memory)) == rows + 15.5 * EXPERTS["num_experts"]
    padded = one(build(ctx, moe=True).forward, "experts.pad")
    assert isinstance(padded.work, MemoryBound)


def plan(gemm: str, cluster: str = "b200-hgx", gpus: int = 1, replay: bool = True, **options: Any) -> Any:
    job = mofa.load_workload("llama3-8b", seq_len=256, global_batch=8, overrides={"precision": {"gemm": gemm}})
    own = mofa.load_framework("megatron", overrides=options)
    machines = mofa.load_cluster(cluster, gpus)
    job = job.model_copy(update={"model": llama()})
    return mofa.estimate(job, machines, {"micro_batch": 1}, framework=own, replay=replay)


def component(gemm: str, name: str, **options: Any) -> float:
    (stage,) = plan(gemm, **options).memory.by_stage
    return float(dict(stage.by_component)[name])


def test_both_copies_of_a_weight_stay_with_their_scales() -> None:
    """One scale a tensor needs one copy on a B200; these need two, and a thirty-second more."""
    assert copies_per_fp8_weight("mxfp8", False) == 2
    more = component("fp8-mxfp8", "buffers") - component("bf16", "buffers")
    assert more == pytest.approx(2 * SCALED * MATRICES, rel=0.01)


def test_parameters_in_mxfp8_share_the_gradients_buffer() -> None:
    """param_and_grad_buffer.py: no buffer of their own; both copies stay where the modules made them. What is bf16 is
    in its tensors and in the buffer that is gathered."""
    held, wide = component("fp8-mxfp8", "parameters", fp8_params=True), component("bf16", "parameters")
    others = wide - 2.0 * MATRICES
    assert held == pytest.approx(SCALED * MATRICES + 2.0 * others, abs=4 << 20)  # blocks are rounded to 2 MiB
    assert component("fp8-mxfp8", "gradients", fp8_params=True) == component("bf16", "gradients")


def test_closed_form_and_replay_agree() -> None:
    for fp8_params in (False, True):
        for gpus in (1, 8):
            closed, played = (plan("fp8-mxfp8", gpus=gpus, replay=r, fp8_params=fp8_params) for r in (False, True))
            assert closed.memory.allocated_bytes == pytest.approx(played.memory.allocated_bytes, rel=0.02)
            assert closed.step_s == pytest.approx(played.step_s, rel=0.03)


def test_parameters_travel_in_bf16_and_are_cast_whole() -> None:
    """10^9 parameters of a rank's layers, whoever owns their states: 2 bytes read, 2 written, 2 of the buffer zeroed.
    With one scale a tensor a byte travels, and a rank casts its own half."""
    machines = mofa.load_cluster("b200-hgx", 8)
    job = mofa.load_workload("llama3-8b", overrides={"precision": {"gemm": "fp8-mxfp8"}})
    linears, owners = np.array([[1e9]]), np.array([[2.0]])

    def casts(fp8_params: bool) -> float:
        own = mofa.load_framework("megatron", overrides={"fp8_params": fp8_params})
        return float(weight_cast_seconds(job, machines, own, linears, owners)[0, 0])

    cast = 4e9 / memory_bound_bytes_per_s(machines.gpu, "fp8_cast_both_block")
    zeroed = 2e9 / memory_bound_bytes_per_s(machines.gpu, "megatron zero_buffer")
    assert casts(False) == pytest.approx(cast)
    assert casts(True) == pytest.approx(cast + zeroed)
    exposed = {
        gemm: plan(gemm, gpus=8, fp8_params=gemm != "bf16", overlap_param_gather=False).time.exposed["dp"]
        for gemm in ("fp8-mxfp8", "fp8-tensorwise", "bf16")
    }
    assert exposed["fp8-mxfp8"] == exposed["bf16"] > exposed["fp8-tensorwise"]


def test_only_blackwell_multiplies_them() -> None:
    """quantization.py, ``_compute_mxfp8_support``: compute capability 10.0 and above, below 12.0."""
    job = mofa.load_workload("llama3-8b", overrides={"precision": {"gemm": "fp8-mxfp8"}})
    megatron = mofa.load_framework("megatron")
    for cluster in ("b200-hgx", "b300-hgx", "gb200-nvl72", "gb300-nvl72"):
        with_numerics(job, mofa.load_cluster(cluster, 8), megatron, ())
    for cluster in ("h100-hgx", "h200-hgx", "l40s-pcie", "mi300x-oam"):
        with pytest.raises(mofa.SpecError, match=r"fp8-mxfp8|no fp8"):
            with_numerics(job, mofa.load_cluster(cluster, 8), megatron, ())


@pytest.mark.parametrize(
    ("strategy", "seq_len", "word"),
    [
        ({"micro_batch": 1}, 4096 + 16, "tokens of a micro-batch on a rank (4112"),
        ({"micro_batch": 1, "tp": 8, "sp": True}, 4096 + 128, "tokens of a sequence shard (528"),
    ],
)
def test_sizes_are_multiples_of_32(strategy: dict[str, Any], seq_len: int, word: str) -> None:
    """mxfp8_tensor.py, ``is_quantizable``; one scale a tensor takes multiples of 8 rows."""
    machines, megatron = mofa.load_cluster("b200-hgx", 8), mofa.load_framework("megatron")

    def step_s(gemm: str) -> float:
        changes = {"precision": {"gemm": gemm}}
        job = mofa.load_workload("llama3-8b", seq_len=seq_len, global_batch=8, overrides=changes)
        return mofa.estimate(job, machines, strategy, framework=megatron, replay=False).step_s

    assert step_s("fp8-tensorwise") > 0.0
    with pytest.raises(mofa.SpecError) as refused:
        step_s("fp8-mxfp8")
    assert word in str(refused.value)
    assert "multiple of 32" in str(refused.value)


def test_it_saves_what_products_save_and_says_what_stands_in() -> None:
    job = mofa.load_workload("llama3-8b", seq_len=8192, global_batch=16)
    machines, megatron = mofa.load_cluster("b200-hgx", 8), mofa.load_framework("megatron")
    plans = {}
    for gemm in ("bf16", "fp8-mxfp8", "fp8-blockwise"):
        own = job.model_copy(update={"precision": job.precision.model_copy(update={"gemm": gemm})})
        plans[gemm] = mofa.estimate(own, machines, {"micro_batch": 1}, framework=megatron, replay=False)
    assert plans["fp8-mxfp8"].step_s < plans["fp8-blockwise"].step_s < plans["bf16"].step_s
    assert any("mxfp8" in note and "stand in" in note for note in plans["fp8-mxfp8"].notes)
    assert known_or_stand_in_format("mxfp8", machines.gpu.curves.gemm) == "fp8_fast"
    assert FP8_RECIPES["mxfp8"].min_cuda_version == ""


def test_hosts_run_the_modules_of_blocks_until_these_are_timed() -> None:
    host = mofa.load_cluster("b200-hgx", 8).gpu.curves.host
    assert host.module_call_time("linear", "fp8-mxfp8") == host.module_call_time("linear", "fp8-blockwise")
    assert host.module_call_time("linear", "fp8-mxfp8") != host.module_call_time("linear", "bf16")
