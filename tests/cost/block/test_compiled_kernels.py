"""What torch.compile makes of torchtitan's layers of experts, kernel by kernel, and what a micro-batch begins with."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from mofa.blocks.tapes import BlockTapes
from mofa.blocks.work import HostSync, MemoryBound
from mofa.cost.block.durations import OpTimingMachine, device_seconds
from mofa.cost.estimate import TableEstimator
from mofa.measure.records import read_record
from mofa.search.strategy_estimator import strategy_estimator
from mofa.validate.hosts import read_machine_hosts
from mofa.validate.reference import reference_of_record

REFERENCES = Path(__file__).parents[3] / "reference_runs"


@cache
def estimator(id: str) -> TableEstimator:
    """Of a measured run, as it ran."""
    folder = REFERENCES / "measured"
    record = read_record(folder / f"{id}.yaml")
    with tempfile.TemporaryDirectory() as scratch:
        reference = reference_of_record(record, folder, read_machine_hosts(folder), Path(scratch))
        workload, cluster, framework, strategy = reference.resolved_specs()
        return strategy_estimator(workload, cluster, framework, strategy)


def kernels(id: str, name: str) -> list[float]:
    """Durations of the first rank's kernels whose name matches. [s]"""
    with gzip.open(REFERENCES / "traces" / f"{id}.0.json.gz") as file:
        found = json.load(file)["kernels_us"]
    return [took * 1e-6 for _, kernel, _, took in found if re.search(name, kernel)]


def block(id: str, kind: str) -> tuple[BlockTapes, OpTimingMachine]:
    costs = estimator(id).parts[0].costs
    (found,) = (tapes for name, tapes in costs.tapes.items() if str(name).startswith(kind))
    return found, costs.machine


def seconds(id: str, kind: str, op: str, way: str) -> float:
    """Predicted device time of an op of a block. [s]"""
    tapes, machine = block(id, kind)
    tape = getattr(tapes, way)
    took = device_seconds(tape.ops, machine)
    (found,) = (took[i] for i, one in enumerate(tape.ops) if one.name == op)
    return float(np.ravel(found)[0])


HUNYUAN, MOE = "tt1-hunyuana13b-3l-compile-skewed-traced", "moe recompute=none"


@pytest.mark.parametrize("which", ["w1", "w2", "w3"])
def test_experts_weights_are_cast_and_turned_by_one_kernel(which: str) -> None:
    measured = median(kernels(HUNYUAN, "grouped_mm__to_copy_transpose_2$"))
    assert seconds(HUNYUAN, MOE, f"experts.{which}.weight_cast", "forward") == pytest.approx(measured, rel=0.02)


def test_the_gradient_of_the_experts_output_is_too() -> None:
    measured = median(kernels(HUNYUAN, "grouped_mm__to_copy_transpose_0$"))
    assert seconds(HUNYUAN, MOE, "experts.out.cast.backward", "backward") == pytest.approx(measured, rel=0.03)


def test_compiled_casts_of_gradients_run_at_the_memory_s_rate() -> None:
    """The eager kernel that a weight's gradient is cast with reaches half of it."""
    measured = max(kernels(HUNYUAN, "^triton_poi_fused__to_copy_3$"))  # experts' are the largest of that name
    assert seconds(HUNYUAN, MOE, "experts.w1.grad_cast", "backward") == pytest.approx(measured, rel=0.05)
    tapes, _ = block(HUNYUAN, "head")
    assert not any(op.compiled for op in tapes.backward.ops if op.name == "output.grad_cast")


def test_sums_inside_a_compiled_module_are_part_of_the_next_kernel() -> None:
    measured = median(kernels(HUNYUAN, "^triton_poi_fused__to_copy_add_2$"))
    added = seconds(HUNYUAN, MOE, "accumulate experts.in.bf16 at experts.w1", "backward")
    assert added + seconds(HUNYUAN, MOE, "experts.in.cast.backward", "backward") == pytest.approx(measured, rel=0.05)
    tapes, _ = block(HUNYUAN, MOE)
    sums = {op.name: op for op in tapes.backward.ops if op.name.startswith("accumulate ")}
    assert sums["accumulate attn.bf16 at wk"].launches == 0
    assert sums["accumulate mid at mlp_norm"].launches == 1  # outside: autograd's


def test_head_norms_turn_in_their_own_kernels() -> None:
    forward, rotated = (kernels(HUNYUAN, f"_cat_mean_mul_neg_pow_rsqrt_slice_view_{n}$") for n in (5, 6))
    assert seconds(HUNYUAN, MOE, "q_norm", "forward") == pytest.approx(median(forward), rel=0.05)
    assert seconds(HUNYUAN, MOE, "k_norm", "forward") == pytest.approx(median(rotated), rel=0.1)
    back = sum(median(kernels(HUNYUAN, name)) for name in (
        "add_mul_neg_slice_slice_backward_transpose_2$", "expand_mul_pow_sum_view_3$"))  # fmt: skip
    assert back < seconds(HUNYUAN, MOE, "q_norm.backward", "backward") < 1.15 * back


def test_every_micro_batch_begins_with_a_host_that_waited_for_the_device() -> None:
    """Tokens come from pageable memory, so that the host has no lead in the second micro-batch either: its device idles
    between the first kernels, as the trace has it too."""
    tapes, _ = block("tt1-granite1b-24l-2k-skewed", "embedding")
    assert isinstance(tapes.forward.ops[0].work, HostSync)
    piped = estimator("tt2-pp2-llama-6l-traced").parts[0].costs.tapes["embedding"]
    assert not any(isinstance(op.work, HostSync) for op in piped.forward.ops)
    assert any(isinstance(op.work, MemoryBound) for op in piped.forward.ops)
    assert len(kernels("tt1-qwen06b-28l-1k-compile-traced", r"Memcpy HtoD \(Pageable")) >= 2 * 2
