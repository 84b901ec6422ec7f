"""What the recipe behind a published row says beyond its columns: gradients, loss, fp8, kernels, overlaps.

Each reading names its source at the release that the row's table belongs to. A later reading wins over an earlier one,
a row's own notes over all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mofa.specs.workload import OLD_FP8
from mofa.validate.architecture import Row, is_mlperf_gpt3, number, source_of

TE_LOSS = {"cross_entropy_fusion": "te", "loss_copies_logits": False}
"""Transformer Engine's fused loss before its release 2.20.2."""


class Reading(NamedTuple):
    """Options of a framework that hold for rows of these sources and models, in fp8 alone or in any precision."""

    sources: tuple[str, ...]
    models: str
    says: dict[str, Any]
    in_fp8: bool = False
    where: Callable[[Row], bool] = lambda row: True


READINGS = (
    # "all overlaps OFF; CE fusion" (its overlap_notes), which is Transformer Engine's (docs/strategy.md) of 2.11
    # (docs/b200/b200_real_repro_guide.md)
    Reading(("simumax",), "", {"overlap_grad_reduce": False, "overlap_param_gather": False, **TE_LOSS}),
    # its sweep's default until March 2024, a FlashAttention 1 in Triton (submit_benchmarks.py, llm-foundry pull 1041);
    # bf16 rows ran mosaicml/pytorch:2.1.0_cu121-nightly20230827 (its benchmarking/h100new.md)
    Reading(("foundry",), "", {"pytorch": "2.1", "attention": "flash1", "optimizer": "for-loop", "fused_qkv": True,
                               "cross_entropy_fusion": True, "loss_metrics": 2}),
    # "SDPA implementation of Flash attention v2" (its README)
    Reading(("fms",), "", {"attention": "flash"}),
    # PYTORCH_CUDA_ALLOC_CONF of its run_train.sh
    Reading(("titan",), "", {"allocator": "expandable"}),
    # "DP grad all-reduce NOT overlapped with backward" (korth-009); no distributed optimizer in the paper
    Reading(("korth",), "", {"data_parallel": "ddp"}),
    # Megatron-Bridge, scripts/performance from v0.1.0 (container 25.09) to v0.5.0 (26.06): grad_reduce_in_fp32 = False
    # of every model; cross_entropy_fusion_impl "te" (configs/*.yaml, later utils/overrides.py, _set_common_perf_
    # overrides) on Transformer Engine 2.6 to 2.16 (uv.lock)
    Reading(("bridge",), "", {"grads": "bf16", **TE_LOSS}),
    # tp_comm_overlap where tp > 1: configs/llama, configs/qwen (H100's of 235B from v0.2.0 on has it off, and no row)
    Reading(("bridge",), r"LLAMA3|Qwen3_235B", {"tp_overlap": True}),
    # fp8_param_gather of bf16_with_fp8_current_scaling_mixed and ..._delayed_... (training/mixed_precision.py)
    Reading(("bridge",), "", {"fp8_params": True}, in_fp8=True),
    # NeMo 1 with Apex's distributed Adam: of bf16 parameters the main copy holds the other 16 bits alone
    # (megatron_base_model.py, setup_optimization: store_param_remainders), 2 of 12 bytes less
    Reading(("nemo", "nemolauncher"), "", {"states_bytes_per_param": 10}),
    # NeMo-Framework-Launcher, conf/config.yaml of 24.05 and 24.07: NVTE_FUSED_ATTN: 0, "Disable cudnn FA until we've
    # tested it more", until 29 August 2024; 175B's script sets it to 1 from July on (examples/training/gpt/h100)
    Reading(("nemo", "nemolauncher"), "", {"attention": "flash"}),
    Reading(("nemo",), r"GPT3-175B", {"attention": "fused"}),
    # grad_sync_dtype=bf16 of all scripts in fp8 (examples/training/{gpt,llama}/h100 of 24.05 and 24.07) and of
    # conf/training/nemotron/nemotron_340b.yaml; gradients are accumulated in that buffer (contiguous_grad_buffer)
    Reading(("nemo", "nemolauncher"), "", {"grads": "bf16"}, in_fp8=True),
    # ub_tp_comm_overlap of conf/training at 24.05 and 24.07; 175b.yaml has it off; Nemotron 340B's from 17 December
    # 2024 on, whose degrees are the row's
    Reading(("nemo", "nemolauncher"), r"GPT3-20B|LLAMA2-70B|LLAMA3-70B|Nemotron-340B", {"tp_overlap": True}),
    # cross_entropy_loss_fusion of conf/training/llama from 2 August 2024 on, before the table, which has those files'
    # virtual stages; Nemotron's as above
    Reading(("nemo",), r"LLAMA|Nemotron-340B", {"cross_entropy_fusion": "native"}),
    # conf/training/gpt3/175b_mlperf.yaml of August 2024, NeMo's copy of MLPerf's configuration: fp8_params,
    # grad_sync_dtype, ub_tp_comm_overlap, which MLPerf's rows say themselves; with fp8 parameters no remainders are
    # stored. Taken for MLPerf's rows from v4.0 on (training_results_v4.0, conf/optim/distributed_fused_adam.yaml)
    Reading(("mlperf",), r"GPT3-175B", {"fp8_params": True, "grads": "bf16"}, in_fp8=True,
            where=lambda row: "v4." in row["framework"]),
    Reading(("nemo",), r"GPT3-175B", {"fp8_params": True, "tp_overlap": True, "states_bytes_per_param": 12},
            in_fp8=True, where=is_mlperf_gpt3),
    # NeMo 2, scripts/performance/llm: grad_reduce_in_fp32 = False in fp8, fp8_params of bf16_with_fp8_mixed
    # (llm/recipes/precision/mixed_precision.py); GPTConfig.cross_entropy_loss_fusion; "te" from v2.4.0 on (helpers.py)
    Reading(("nemodoc",), "", {"grads": "bf16", "cross_entropy_fusion": "native"}),
    Reading(("nemodoc",), "", TE_LOSS, where=lambda row: "25.07" in row["framework"]),
    Reading(("nemodoc",), "", {"fp8_params": True}, in_fp8=True),
    Reading(("nemodoc",), r"GPT3-|LLAMA3|Nemotron-340B", {"tp_overlap": True}),
    # Megatron-LM, examples/llama/train_llama3_8b_h100_fp8.sh: --grad-reduce-in-bf16 --cross-entropy-loss-fusion
    # --fp8-param-gather; its README's configurations "follow those defined in NeMo Framework's performance scripts",
    # whose 70B and 405B overlap tensor-parallel communication
    Reading(("mlmllama",), "", {"grads": "bf16", "cross_entropy_fusion": "native"}),
    Reading(("mlmllama",), "", {"fp8_params": True}, in_fp8=True),
    Reading(("mlmllama",), r"Llama3(\.1)?-(70|405)B", {"tp_overlap": True}),
)  # fmt: skip
"""In the order in which they are applied."""

SAID: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"(?i)\bfp8[ _-](primary[ _-])?(param|weight)", {"fp8_params": True}),
    (r"(?i)\bbf16[ _-](main[ _-])?grad|grad[a-z ]*(=|in|are|:) ?bf16|grad_reduce_in_fp32 ?= ?False",
     {"grads": "bf16"}),
    (r"(?i)(?<!no )(?<!without )\b(tp[ _-](comm[ _-])?overlap|userbuffers)(?! ?(=|:)? ?(off|false))",
     {"tp_overlap": True}),
)  # fmt: skip
"""What a row of Megatron's says of itself in its notes or those on overlaps, and what that is called here."""

CARDS: dict[tuple[str, str], dict[str, Any]] = {
    ("deepseek-v3 [pretrain_performance]", "H100"): {
        "strategy": {"recompute": "selective:mla_up_proj+mlp"},
        "framework": {"dispatcher": "deepep", "overlap_grad_reduce": False, "grads": "bf16", **TE_LOSS},
    },
    ("qwen3-8b [pretrain]", "H100"): {
        "strategy": {},
        "framework": {
            "allocator": "expandable", "fused_rope": False, "fused_swiglu": False, "grads": "bf16", **TE_LOSS,
        },
    },
}  # fmt: skip
"""What the recipe that a card names says beyond its columns, which all match.

DeepSeek-V3: deepseek_v3_pretrain_1024gpu_h100_bf16_config (Megatron-Bridge 79308d0, perf_recipes/deepseek/h100). Its
HybridEP sends a token once to each node, as DeepEP does. Qwen3 8B: qwen3_8b_pretrain_16gpu_h100_bf16_config (619cc20,
recipes/qwen/h100/qwen3.py), whose bridge leaves Megatron-Core's ``apply_rope_fusion`` and ``bias_activation_fusion``
off (models/qwen/qwen3_bridge.py); Transformer Engine 2.17 and 2.18 (uv.lock)."""

BF16_MOMENTS = {"bridge": r"DeepSeek|Kimi"}
"""Models whose recipe holds Adam's moments in bf16 (``use_precision_aware_optimizer`` with ``exp_avg_dtype`` and
``exp_avg_sq_dtype``): Megatron-Bridge, recipes/deepseek and recipes/kimi."""

VIRTUAL_STAGES = {"nemolauncher": {"LLAMA2-13B": 10, "LLAMA2-70B": 20, "LLAMA3-70B": 10}}
"""Chunks of a stage where the table has no column of them: NeMo-Framework-Launcher 24.05, conf/training. Its GPT-3 175B
is MLPerf's, which its figure links to, and of which nothing says how many."""

LAYOUTS = {"bridge": r"DeepSeek|Kimi", "bridgecard": r"deepseek|kimi"}
"""Models whose layers a recipe lays out over stages by hand (``pipeline_model_parallel_layout``): Megatron-Bridge,
recipes/deepseek/deepseek_v3.py (``set_deepseek_v3_pipeline_model_parallel_layout``) and recipes/kimi."""

SCALINGS = (
    (r"current scaling|_FP8_CS_", "fp8-tensorwise"),
    (r"delayed scaling|_FP8_DS_", "fp8-delayed"),
)
"""What a row's precision, or the recipe that its notes name, says of how fp8 is scaled."""
CURRENT_SCALING = {"bridge": "Qwen3"}
"""Models that run current scaling where a row says no more than fp8: scripts/performance/configs/qwen3 of v0.1.0 has
bf16 and fp8_cs alone. A row of which nothing is known is read as the old spelling is, the scripts' default (``ds``)."""


def fp8_of(row: Row) -> str:
    """How a row in fp8 scales."""
    said = f"{row['precision']} {row['notes']}"
    named = next((recipe for word, recipe in SCALINGS if re.search(word, said)), None)
    if named is None and re.match(CURRENT_SCALING.get(source_of(row), "$^"), row["model"]):
        return "fp8-tensorwise"
    return named or OLD_FP8


def framework_options(row: Row, gpu: str, *, in_fp8: bool) -> dict[str, Any]:
    """Options of the framework that a row's recipe and its notes say.

    Parameters
    ----------
    row
        Of the table.
    gpu
        Its GPU, as profiles are looked up.
    in_fp8
        Whether its products are.
    """
    found: dict[str, Any] = {}
    source = source_of(row)
    for reading in READINGS:
        holds = source in reading.sources and re.match(reading.models, row["model"]) and reading.where(row)
        if holds and (in_fp8 or not reading.in_fp8):
            found |= reading.says
    for pattern, said in SAID if source in MEGATRON else ():
        if re.search(pattern, f"{row['overlap_notes']}; {row['notes']}"):
            found |= said
    if number(row, "tp") == 1:
        found.pop("tp_overlap", None)
    if not in_fp8:
        found.pop("fp8_params", None)
    found |= CARDS.get((row["model"], gpu), {}).get("framework", {})
    return found


MEGATRON = ("bridge", "bridgecard", "nemo", "nemodoc", "nemolauncher", "mlperf", "mcore08", "mlmllama", "simumax")
"""Sources of Megatron-Core on Transformer Engine."""


def switches_of(row: Row, options: dict[str, Any]) -> list[str]:
    """Switches of a row whose runs nothing was learned from on Transformer Engine: ``tp_overlap``, ``layout``."""
    found = ["tp_overlap"] if options.get("tp_overlap") else []
    laid_out = re.match(LAYOUTS.get(source_of(row), "$^"), row["model"]) and (number(row, "pp") or 1) > 1
    return [*found, "layout"] if laid_out else found


def doubted(row: Row) -> str | None:
    """Why a row's configuration cannot be the one that ran, or None.

    GPT-OSS 120B on H100 has micro-batches of 1 in every version of its recipe (scripts/performance/configs/gpt_oss of
    v0.2.0 to v0.5.0), which computes its norms and activations again; 4 is that of B200 and GB200.
    """
    of_4 = source_of(row) == "bridge" and row["gpu"] == "H100" and row["mbs"] == "4" and not row["recompute"]
    if of_4 and re.match("GPT.?OSS.?120B", row["model"], re.IGNORECASE):
        return "its micro-batch is not that of any version of its recipe"
    return None


def routing_of(row: Row) -> dict[str, Any]:
    """How tokens fall on experts where a row says more than that they are balanced.

    ``apply_moe_token_drop`` of Megatron-Bridge (training/utils/moe_token_drop.py): a capacity of 1, padded to it.
    """
    return {"capacity_factor": 1.0, "pad_to_capacity": True} if "tokendrop" in row["model"].lower() else {}


def expert_tensor_parallel(row: Row) -> int | None:
    """Ranks that share an expert where the table has no column of them: 1 in all of Megatron-Bridge's configs."""
    given = number(row, "etp")
    return 1 if given is None and row["moe_experts"] and source_of(row) == "bridge" else given


def unmodelled(row: Row, patterns: Sequence[tuple[str, str]]) -> str | None:
    """The reason of the first pattern that a row's notes hold."""
    said = f"{row['overlap_notes']} {row['notes']}"
    return next((reason for pattern, reason in patterns if re.search(pattern, said)), None)
