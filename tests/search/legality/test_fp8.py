"""fp8 recipes from what a user writes to what is refused, noted and predicted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mofa
from mofa.blocks.fp8 import FP8_RECIPES
from mofa.cost.kernels.compute import memory_bound_bytes_per_s
from mofa.cost.optimizer import fp8_cast_seconds_per_param, fp8_first_micro_batch_saving_s, weight_cast_seconds
from mofa.plan.result import Plan
from mofa.search.entry_points import find_plans
from mofa.search.job_setup import with_numerics
from tests.blocks.small import llama

ONE = {"micro_batch": 1}
RECIPES = ("fp8-delayed", "fp8-tensorwise", "fp8-blockwise")


def plan(gemm: str, strategy: dict[str, Any] | None = None, *, gpus: int = 1, **options: Any) -> Plan:
    job = mofa.load_workload("llama3-8b", seq_len=4096, global_batch=8, overrides={"precision": {"gemm": gemm}})
    changes = {"num_layers": 2, **options.pop("model", {})}
    mlp = {"mlp": job.model.mlp.model_copy(update={"ffn_hidden": changes.pop("ffn_hidden", job.model.mlp.ffn_hidden)})}
    model = job.model.model_copy(update={**changes, **mlp})
    framework = mofa.load_framework("megatron", overrides=options)
    job = job.model_copy(update={"model": model})
    return mofa.estimate(job, mofa.load_cluster("h100-hgx", gpus), strategy or ONE, framework=framework)


def test_the_old_spelling_is_delayed_scaling_and_says_so() -> None:
    old, new = plan("fp8"), plan("fp8-delayed")
    assert old.step_s == new.step_s and old.memory.device_bytes == new.memory.device_bytes
    notes = [note for note in old.notes if "fp8-delayed, Megatron-Core's default" in note]
    assert len(notes) == 1 and not any("is read as" in note for note in new.notes)


def test_stand_ins_are_told() -> None:
    """No GPU has the kinds' own curves until they are measured: PyTorch's product stands in, and counts as carried
    over, not as measured."""
    known = mofa.load_cluster("h100-hgx", 1).gpu.curves.gemm
    found = plan("fp8-blockwise")
    missing = [kind for kind in ("fp8_block", "fp8_block_rows") if kind not in known]
    assert any("stands in" in note for note in found.notes) == bool(missing)
    if missing:
        assert found.provenance.get("transferred", 0.0) > 0.3


def test_blocks_say_which_cuda_they_need() -> None:
    """Transformer Engine 2.20.2, quantization.py, ``_compute_fp8_block_scaling_support``."""
    said = {recipe: [note for note in plan(recipe).notes if "CUDA 12.9" in note] for recipe in RECIPES}
    assert [len(notes) for notes in said.values()] == [0, 0, 1]


def test_a_plan_says_what_rests_on_the_library_in_one_number() -> None:
    found = plan("fp8-blockwise")
    assert found.library_fraction is not None
    assert found.to_row()["library_fraction"] == pytest.approx(sum(found.library_fraction.values()))
    assert 0.0 < found.to_row()["library_fraction"] < 1.0


def test_recipes_are_faster_than_bf16_and_keep_less() -> None:
    bf16 = plan("bf16")
    found = {recipe: plan(recipe) for recipe in RECIPES}
    for recipe, one in found.items():
        assert one.step_s < bf16.step_s, recipe
    # a kernel more to look for the largest
    assert found["fp8-tensorwise"].step_s > found["fp8-delayed"].step_s


@pytest.mark.parametrize("tp", [1, 4])
def test_memory_of_recipes(tp: int) -> None:
    """Delayed scaling keeps the projection's input beside attention's output, blocks keep scales: both keep more than
    one scale a tensor does, that much. Over several ranks what blocks gathered stays until the watchdog has seen it."""
    strategy = {"tp": tp, "sp": tp > 1, "micro_batch": 1}
    delayed, tensorwise, blockwise = (
        plan(recipe, strategy, gpus=tp, model={"vocab": 4096}).memory.allocated_bytes for recipe in RECIPES
    )
    assert tensorwise < min(blockwise, delayed)
    assert (blockwise < delayed) == (tp == 1)


@pytest.mark.parametrize(
    ("gemm", "change", "strategy", "word"),
    [
        ("fp8-blockwise", {"hidden": 4096 + 8}, ONE, "hidden (4104"),
        # 14336 = 16 x 896; with 8 more the down-projection's depth is no multiple of 16
        ("fp8-tensorwise", {"ffn_hidden": 14344}, ONE, "ffn_hidden (14344"),
        ("fp8-delayed", {}, {"micro_batch": 1, "recompute": "selective:layernorm"}, "delayed"),
        ("fp8", {}, {"micro_batch": 1, "recompute": "selective:moe_act"}, "delayed"),
    ],
)
def test_what_is_refused(gemm: str, change: dict[str, Any], strategy: dict[str, Any], word: str) -> None:
    with pytest.raises(mofa.SpecError) as refused:
        plan(gemm, strategy, model=change)
    assert word in str(refused.value) and "\n" not in str(refused.value)
    bf16 = dict(strategy) if "recompute" not in strategy else ONE
    assert plan("bf16", bf16, model=change).step_s > 0


def test_other_frameworks_and_gpus_without_fp8_are_refused_in_one_line() -> None:
    job = mofa.load_workload("llama3-8b", overrides={"precision": {"gemm": "fp8-tensorwise"}})
    for cluster, framework, word in (
        ("h100-hgx", "megatron-local", "is modelled for megatron"),
        ("a100-hgx", "megatron", "no fp8"),
    ):
        with pytest.raises(mofa.SpecError, match=word):
            with_numerics(job, mofa.load_cluster(cluster, 8), mofa.load_framework(framework), ())


def test_with_takes_one_recipe() -> None:
    job = mofa.load_workload("llama3-8b", seq_len=4096, global_batch=8)
    job, machines = job.model_copy(update={"model": llama()}), mofa.load_cluster("h100-hgx", 1)
    found = find_plans(job, machines, framework=mofa.load_framework("megatron"), with_=("fp8-blockwise",))
    assert found.report.workload.gemm_format == "fp8-blockwise"
    with pytest.raises(mofa.SpecError, match="exclude each other"):
        find_plans(job, machines, framework=mofa.load_framework("megatron"), with_=("fp8", "fp8-delayed"))


def test_casts_of_weights_once_a_step_by_hand() -> None:
    """10^9 parameters: 2 bytes read, once more for the largest, 2 written. fp8 parameters are all transposed, and
    the half that the rank owns is cast from its bf16 copy."""
    machines = mofa.load_cluster("h100-hgx", 1)
    linears, owners = np.array([[1e9]]), np.array([[2.0]])

    def casts(recipe: str, fp8_params: bool) -> float:
        job = mofa.load_workload("llama3-8b", overrides={"precision": {"gemm": recipe}})
        framework = mofa.load_framework("megatron", overrides={"fp8_params": fp8_params})
        return float(weight_cast_seconds(job, machines, framework, linears, owners)[0, 0])

    for recipe, moved, like in (("delayed", 4, "both_delayed"), ("tensorwise", 6, "both_tensorwise"),
                                ("blockwise", 4, "weight_block")):  # fmt: skip
        rate = memory_bound_bytes_per_s(machines.gpu, f"fp8_cast_{like}")
        assert casts(f"fp8-{recipe}", False) == pytest.approx(moved * 1e9 / rate)
    transposed = 2e9 / memory_bound_bytes_per_s(machines.gpu, "fp8_transpose")
    largest = 2.0 / memory_bound_bytes_per_s(machines.gpu, "fp8_cast_tensorwise")
    # one row: 3828 instructions for 64 elements, on 132 multiprocessors' 4 schedulers at 1.98 GHz, are 57.2 ps at least
    main = 4.0 / memory_bound_bytes_per_s(machines.gpu, "fp8_cast_main")
    assert 1.0 < main / (3828.0 / 64.0 / (132 * 4 * 1.98e9)) < 1.3
    assert casts("fp8-delayed", True) == pytest.approx(transposed + 0.5e9 * main, rel=1e-4)
    assert casts("fp8-tensorwise", True) == pytest.approx(transposed + 0.5e9 * (main + largest), rel=1e-4)
    blocks = 5.0 / memory_bound_bytes_per_s(machines.gpu, "fp8_cast_block")
    assert casts("fp8-blockwise", True) == pytest.approx(transposed + 0.5e9 * blocks)


def test_the_first_micro_batch_reads_no_main_gradient() -> None:
    """4 bytes of each of 10^9 parameters once a step, 2 of 16-bit ones; where products add nothing, none."""
    gpu, linears = mofa.load_cluster("h100-hgx", 1).gpu, np.array([[1e9]])
    fused, apart = (fp8_first_micro_batch_saving_s(mofa.load_framework(name), linears, gpu)
                    for name in ("megatron", "megatron-local"))  # fmt: skip
    assert float(fused[0, 0]) == pytest.approx(4e9 / memory_bound_bytes_per_s(gpu, "te wgrad_add"))
    assert float(apart[0, 0]) == 0.0
    narrow = mofa.load_framework({"name": "megatron", "grads": "bf16"})
    assert float(fp8_first_micro_batch_saving_s(narrow, linears, gpu)[0, 0]) == pytest.approx(float(fused[0, 0]) / 2.0)


def test_main_parameters_are_cast_by_rows_where_no_transposed_copy_is_made() -> None:
    """The kernel for tiles runs where a transposed copy is made: elsewhere the cast moves 3 bytes, after 2 to look for
    the largest."""
    gpu = mofa.load_cluster("b200-hgx", 8).gpu
    recipe = FP8_RECIPES["tensorwise"]
    moved = 5.0 / memory_bound_bytes_per_s(gpu, "fp8_cast_tensorwise")
    assert fp8_cast_seconds_per_param(recipe, gpu) == pytest.approx(moved)
    transposing = gpu.model_copy(update={"fp8_transposes": True})
    assert fp8_cast_seconds_per_param(recipe, transposing) > 10.0 * moved
