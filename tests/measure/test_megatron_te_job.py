"""What a runner of Megatron-Core on Transformer Engine is told, by option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mofa.errors import SpecError
from mofa.measure.expand import expand_run
from mofa.measure.megatron_te_job import megatron_te_job
from mofa.measure.records import half_dealt_by_model
from mofa.measure.runs import task_of_run
from mofa.specs.run_files import load_runs


def run_of(folder: Path, **changes: Any) -> Any:
    raw = {
        "id": "a", "model": {"base": "llama3-8b", "num_layers": 4}, "framework": {"name": "megatron"},
        "hardware": "h100-hgx", "gpus": 1, "batch": {"seq_len": 4096, "micro": 1, "global": 4}, **changes,
    }  # fmt: skip
    path = folder / "runs.yaml"
    path.write_text(yaml.safe_dump({"runs": [raw]}))
    (run,) = load_runs(path)
    return expand_run(run)


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    job: dict[str, Any] = megatron_te_job(run_of(folder, **changes))["config"]
    return job


def test_a_dense_layer_takes_every_fusion_of_megatron_lm_by_default(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert config["gradient_accumulation_fusion"] and config["apply_rope_fusion"] and config["masked_softmax_fusion"]
    assert not config["cross_entropy_loss_fusion"]
    assert "fp8" not in config


@pytest.mark.parametrize(
    ("recipe", "format_", "history"),
    [("delayed", "hybrid", 1024), ("tensorwise", "hybrid", None), ("blockwise", "e4m3", None)],
)
def test_a_recipe_of_fp8_is_megatrons(tmp_path: Path, recipe: str, format_: str, history: int | None) -> None:
    run = run_of(tmp_path, precision={"gemm": f"fp8-{recipe}"}, framework={"name": "megatron", "fp8_params": True})
    job = megatron_te_job(run)
    config = job["config"]
    assert (config["fp8"], config["fp8_recipe"], config["fp8_param"]) == (format_, recipe, True)
    assert config.get("fp8_amax_history_len") == history
    assert job["ddp"]["fp8_param_gather"] is True
    assert job["optimizer"]["fp8_recipe"] == recipe


@pytest.mark.parametrize(("kind", "comm"), [("ring", "p2p"), ("allgather", "all_gather"), ("a2a", "a2a")])
def test_context_parallelism_is_megatrons(tmp_path: Path, kind: str, comm: str) -> None:
    job = megatron_te_job(run_of(tmp_path, gpus=2, strategy={"cp": 2, "cp_kind": kind}))
    assert job["config"]["cp_comm_type"] == comm
    assert job["config"]["context_parallel_size"] == job["parallel"]["context_parallel_size"] == job["cp"] == 2
    assert job["ddp"]["overlap_grad_reduce"]  # over dp x cp ranks


def test_experts_are_grouped_and_routed_in_fp32(tmp_path: Path) -> None:
    config = config_of(tmp_path, model={"base": "qwen3-30b-a3b", "num_layers": 2})
    assert config["moe_grouped_gemm"] and config["moe_permute_fusion"] and config["moe_router_force_load_balancing"]
    assert config["moe_router_dtype"] == "fp32"
    assert config["moe_router_fusion"] is False
    options = {"name": "megatron", "permute_fusion": False, "router_padding": True, "router_fusion": True}
    config = config_of(tmp_path, model={"base": "qwen3-30b-a3b", "num_layers": 2}, framework=options,
                       precision={"gemm": "fp8-delayed"})  # fmt: skip
    assert config["moe_permute_fusion"] is False and config["moe_router_padding_for_quantization"] is True
    assert config["moe_router_fusion"] is True


def test_a_capacity_is_megatrons_and_of_its_engine_alone(tmp_path: Path) -> None:
    model = {"base": "qwen3-30b-a3b", "num_layers": 2}
    routing = {"capacity_factor": 1.25, "pad_to_capacity": True}
    config = config_of(tmp_path, model=model, routing=routing)
    assert (config["moe_expert_capacity_factor"], config["moe_pad_expert_input_to_capacity"]) == (1.25, True)
    without = config_of(tmp_path, model=model)
    assert (without["moe_expert_capacity_factor"], without["moe_pad_expert_input_to_capacity"]) == (None, False)
    for name in ("megatron-local", "torchtitan"):
        with pytest.raises(SpecError, match=f"routing.capacity_factor on {name}.*use framework: megatron"):
            task_of_run(run_of(tmp_path, model=model, routing=routing, framework={"name": name}), timeout_s=10.0)


def test_gradients_losses_and_groups_are_as_asked_for(tmp_path: Path) -> None:
    options = {"name": "megatron", "grads": "bf16", "cross_entropy_fusion": "te", "process_groups": "eager"}
    job = megatron_te_job(run_of(tmp_path, framework=options))
    assert job["ddp"]["grad_reduce_in_fp32"] is False
    assert job["config"]["cross_entropy_loss_fusion"] and job["config"]["cross_entropy_fusion_impl"] == "te"
    assert job["eager_groups"] is True


def test_forwards_beside_backwards_are_asked_for(tmp_path: Path) -> None:
    """The configuration's two switches, and that of the wrapper which waits for weight gradients that come later."""
    options = {"name": "megatron", "expert_overlap": "combined", "delay_wgrad": True}
    model = {"base": "qwen3-30b-a3b", "num_layers": 2}
    job = megatron_te_job(run_of(tmp_path, model=model, framework=options, gpus=2, strategy={"dp": 2, "ep": 2}))
    assert job["config"]["overlap_moe_expert_parallel_comm"] and job["config"]["delay_wgrad_compute"]
    assert job["ddp"]["delay_wgrad_compute"] is True


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"framework": {"name": "megatron", "tp_overlap": True}}, "tp_overlap"),
        ({"framework": {"name": "megatron", "optimizer": "foreach"}}, "another optimizer"),
        (
            {
                "model": {"base": "qwen3-30b-a3b", "num_layers": 2},
                "framework": {"name": "megatron", "expert_overlap": "combined"},
            },
            "expert_overlap",
        ),
        ({"precision": {"moments": "bf16"}}, "moments: bf16"),
        ({"strategy": {"schedule": "zbv", "vpp": 2, "pp": 2}, "gpus": 2}, "schedule"),
    ],
)
def test_what_cannot_be_run_is_one_line(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(SpecError, match=line):
        task_of_run(run_of(tmp_path, **changes), timeout_s=10.0)


def test_a_run_s_half_is_its_model_s_whatever_its_layers_and_batch(tmp_path: Path) -> None:
    base = half_dealt_by_model(run_of(tmp_path).run_with_full_specs())
    deeper = run_of(
        tmp_path, model={"base": "llama3-8b", "num_layers": 8}, batch={"seq_len": 8192, "micro": 2, "global": 4}
    )
    assert half_dealt_by_model(deeper.run_with_full_specs()) == base
    halves = {
        half_dealt_by_model(
            run_of(tmp_path, model={"base": "llama3-8b", "num_layers": 4, "vocab": v}).run_with_full_specs()
        )
        for v in range(1000, 1010)
    }
    assert halves == {"fitting", "judging"}


@pytest.mark.parametrize(
    ("graphs", "implementation", "scope"),
    [
        ("local", "local", []),
        ("local:full_iteration", "local", ["full_iteration"]),
        ("te", "transformer_engine", []),
        ("te:mlp+attn", "transformer_engine", ["attn", "mlp"]),
    ],
)
def test_graphs_are_megatrons(tmp_path: Path, graphs: str, implementation: str, scope: list[str]) -> None:
    config = config_of(tmp_path, framework={"name": "megatron", "cuda_graphs": graphs})
    assert (config["cuda_graph_impl"], config["cuda_graph_scope"]) == (implementation, scope)
    assert config["cuda_graph_warmup_steps"] == 3
    assert not any(key.startswith("cuda_graph") for key in config_of(tmp_path))


def test_graphs_in_expandable_segments_need_nccl_not_to_register(tmp_path: Path) -> None:
    options = {"name": "megatron", "cuda_graphs": "te", "allocator": "expandable"}
    task = task_of_run(run_of(tmp_path, framework=options), timeout_s=10.0)
    assert task.environment["NCCL_GRAPH_REGISTER"] == "0"
    assert "NCCL_GRAPH_REGISTER" not in task_of_run(run_of(tmp_path), timeout_s=10.0).environment


def test_a_captured_router_takes_no_noise_from_outside(tmp_path: Path) -> None:
    options = {"name": "megatron", "cuda_graphs": "te:attn+moe_router"}
    run = run_of(
        tmp_path,
        model={"base": "qwen3-30b-a3b", "num_layers": 2},
        framework=options,
        routing={"kind": "zipf", "s": 0.6},
    )
    with pytest.raises(SpecError, match="captured router; use routing: balanced"):
        megatron_te_job(run)


def test_an_optimizer_on_hosts_is_megatrons_hybrid_one(tmp_path: Path) -> None:
    options = {"name": "megatron", "optimizer_offload": 0.5, "overlap_optimizer_copies": True, "host_threads": 8}
    run = run_of(tmp_path, framework=options)
    optimizer = megatron_te_job(run)["optimizer"]
    assert (optimizer["optimizer_cpu_offload"], optimizer["optimizer_offload_fraction"]) == (True, 0.5)
    assert optimizer["overlap_cpu_optimizer_d2h_h2d"] and optimizer["use_precision_aware_optimizer"]
    assert task_of_run(run, timeout_s=1.0).environment["OMP_NUM_THREADS"] == "8"
    plain = run_of(tmp_path)
    assert "optimizer_cpu_offload" not in megatron_te_job(plain)["optimizer"]
    assert task_of_run(plain, timeout_s=1.0).environment["OMP_NUM_THREADS"] == "1"


def test_activations_on_the_host_are_megatrons_modules(tmp_path: Path) -> None:
    options = {"name": "megatron", "activation_offload": "core_attn+attn_proj"}
    run = run_of(tmp_path, framework=options)
    config = megatron_te_job(run)["config"]
    assert config["fine_grained_activation_offloading"] and config["offload_modules"] == ["core_attn", "attn_proj"]
    assert task_of_run(run, timeout_s=1.0).environment["NVTE_CPU_OFFLOAD_V1"] == "1"
    plain = run_of(tmp_path)
    assert "offload_modules" not in megatron_te_job(plain)["config"]
    assert "NVTE_CPU_OFFLOAD_V1" not in task_of_run(plain, timeout_s=1.0).environment


def test_activations_on_the_host_are_refused_with_what_is_not_modelled(tmp_path: Path) -> None:
    options = {"name": "megatron", "activation_offload": "core_attn"}
    with pytest.raises(SpecError, match="recompute: full"):
        megatron_te_job(run_of(tmp_path, framework=options, strategy={"recompute": "full"}))
    with pytest.raises(SpecError, match="with fp8 products"):
        megatron_te_job(run_of(tmp_path, framework=options, precision={"gemm": "fp8-tensorwise"}))


def test_attention_is_asked_for_by_name(tmp_path: Path) -> None:
    """Runs lock PyTorch's attention out (``NVTE_UNFUSED_ATTN``), which Megatron-Core refuses unless it is told."""
    run = run_of(tmp_path)
    assert megatron_te_job(run)["config"]["attention_backend"] == "fused"
    assert task_of_run(run, timeout_s=1.0).environment["NVTE_UNFUSED_ATTN"] == "0"
