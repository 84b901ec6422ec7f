"""Megatron-LM's arguments about how a job runs: degrees, recomputation, numerics, optimizer, experts' kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mofa.export.arguments import (
    Argument,
    FieldRow,
    GivenArguments,
    required_row,
    rows_if_present,
    same_value_row,
    switch_row,
    translated_row,
)
from mofa.export.environment import ENVIRONMENT_ROWS
from mofa.export.job import ExportJob
from mofa.export.megatron.graph_arguments import GRAPH_ROWS
from mofa.export.megatron.model_arguments import EXPERTS, LAYERS, read_positions
from mofa.export.megatron.offload_arguments import OFFLOAD_ROWS
from mofa.export.megatron.optimizer_arguments import OPTIMIZER_ROWS
from mofa.measure.megatron_te_job import AMAX_HISTORY, CP_COMM, FP8_FORMATS
from mofa.schedules import default_schedule
from mofa.specs.framework_names import RANK_ORDERS
from mofa.specs.implied_facts import GRADIENTS
from mofa.specs.layouts.pipeline_layout import LayoutError, parse_layout
from mofa.specs.strategy import RecomputeSpec
from mofa.specs.strategy_defaults import default_zero_stage
from mofa.specs.workload import OLD_FP8

TP = Argument("tensor-model-parallel-size", "int", 1)
PP = Argument("pipeline-model-parallel-size", "int", 1)
CP = Argument("context-parallel-size", "int", 1)
MICRO_BATCH = Argument("micro-batch-size", "int")
GLOBAL_BATCH = Argument("global-batch-size", "int")
LAYOUT = Argument("pipeline-model-parallel-layout", "text")
CHUNKS = Argument("num-virtual-stages-per-pipeline-rank", "int")
CHUNK_LAYERS = Argument("num-layers-per-virtual-pipeline-stage", "int")
OWN_SPLIT = (
    Argument("decoder-first-pipeline-num-layers", "int"), Argument("decoder-last-pipeline-num-layers", "int"),
    Argument("account-for-embedding-in-pipeline-split", "flag", False),
    Argument("account-for-loss-in-pipeline-split", "flag", False),
)  # fmt: skip
SHARDED = Argument("use-distributed-optimizer", "flag", False)
OVERLAP_GRADS = Argument("overlap-grad-reduce", "flag", False)
OVERLAP_PARAMS = Argument("overlap-param-gather", "flag", False)


def _has_experts(job: ExportJob) -> bool:
    return job.model.moe is not None


def _given_experts(given: GivenArguments) -> bool:
    return bool(given[EXPERTS.name])


# --- the pipeline


def _write_layout(job: ExportJob) -> Mapping[str, Any]:
    s, layout = job.strategy, job.layout
    if layout is not None and layout.by != "framework":
        return {LAYOUT.name: layout.text}
    return {CHUNKS.name: s.vpp} if s.vpp > 1 else {}


def _read_layout(given: GivenArguments) -> Mapping[str, Any]:
    pp = given[PP.name]
    if (text := given[LAYOUT.name]) is not None:
        try:
            chunks = len(parse_layout(text).chunks)
        except LayoutError as error:
            raise given.refusal(f"{LAYOUT.name} ({str(text)[:60]})", str(error)) from None
        if chunks % pp:
            raise given.refusal(f"{LAYOUT.name} has {chunks} chunks", f"{PP.name} is {pp}; write a multiple of it")
        return {"strategy.layout": text, "strategy.vpp": max(chunks // pp, 1)}
    options = [argument for argument in OWN_SPLIT if given[argument.name]]
    words_ = [a.name if a.kind == "flag" else f"{a.name}:{given[a.name]}" for a in options]
    layers = given.required_value(LAYERS.name) + sum(a.kind == "flag" for a in options)
    vpp = given[CHUNKS.name] or 1
    if (each := given[CHUNK_LAYERS.name]) is not None:
        if each < 1 or layers % (pp * each):
            raise given.refusal(f"{CHUNK_LAYERS.name} ({each})", f"{layers} layers don't divide over pp ({pp}) with it")
        vpp = layers // (pp * each)
    return {"strategy.layout": "+".join(words_), "strategy.vpp": vpp}


def _write_schedule(job: ExportJob) -> Mapping[str, Any]:
    s = job.strategy
    if s.schedule != default_schedule(s.vpp):
        raise job.refusal(
            f"strategy.schedule ({s.schedule})", "Megatron-Core runs 1f1b, with several chunks interleaved; use these"
        )
    return {}


# --- data parallelism and the optimizer


def _write_sharding(job: ExportJob) -> Mapping[str, Any]:
    s, framework = job.strategy, job.framework
    own = int(default_zero_stage(framework, s.dp, s.cp, s.pp))
    if s.zero != own:
        raise job.refusal(
            f"strategy.zero ({s.zero}) with framework.data_parallel ({framework.data_parallel})",
            f"{SHARDED.name} shards optimizer states alone; use {own}",
        )
    return {SHARDED.name: True} if framework.data_parallel == "distributed-optimizer" else {}


def _read_sharding(given: GivenArguments) -> Mapping[str, Any]:
    kind = "distributed-optimizer" if given[SHARDED.name] else "ddp"
    return {"framework.data_parallel": kind, "strategy.zero": int(given[SHARDED.name])}


def _write_overlaps(job: ExportJob) -> Mapping[str, Any]:
    s, framework = job.strategy, job.framework
    if framework.overlap_param_gather and not framework.overlap_grad_reduce:
        raise job.refusal(
            "framework.overlap_param_gather (true) without overlap_grad_reduce", "Megatron-LM asks for both; set both"
        )
    of_experts = s.dp * s.cp * s.tp // (s.ep * s.etp) if job.model.moe is not None else 1
    shared = max(s.dp * s.cp, of_experts) > 1  # else no ranks hold the same parameters, and nothing is reduced
    sharded = framework.data_parallel == "distributed-optimizer"
    return {
        **({OVERLAP_GRADS.name: True} if framework.overlap_grad_reduce and shared else {}),
        **({OVERLAP_PARAMS.name: True} if framework.overlap_param_gather and shared and sharded else {}),
    }


def _read_overlaps(given: GivenArguments) -> Mapping[str, Any]:
    alone = given[TP.name] * given[PP.name]
    if _given_experts(given):
        etp = given["expert-tensor-parallel-size"] or given[TP.name]
        alone = min(alone, given["expert-model-parallel-size"] * etp * given[PP.name])
    shared = given.num_gpus is None or given.num_gpus > alone
    return {
        "framework.overlap_grad_reduce": bool(given[OVERLAP_GRADS.name]) or not shared,
        "framework.overlap_param_gather": bool(given[OVERLAP_PARAMS.name]) or not (shared and given[SHARDED.name]),
    }


def _write_grads(job: ExportJob) -> Mapping[str, Any]:
    framework = job.framework
    for name, facts in GRADIENTS.items():
        if all(getattr(framework, field) == value for field, value in facts.items()):
            return {"grad-reduce-in-bf16": True} if name == "bf16" else {}
    raise job.refusal(
        f"framework.grads_bytes_per_param ({framework.grads_bytes_per_param:g})",
        "main gradients are fp32 or bf16 and reduced as they are held; use framework.grads",
    )


def _read_grads(given: GivenArguments) -> Mapping[str, Any]:
    return {"framework.grads": "bf16"} if given["grad-reduce-in-bf16"] else {}


def _write_optimizer(job: ExportJob) -> Mapping[str, Any]:
    kernels = job.workload.optimizer.implementation or job.framework.optimizer
    if kernels != "te":
        raise job.refusal(
            f"framework.optimizer ({kernels})",
            "Megatron-LM takes Transformer Engine's Adam wherever it is installed; use te",
        )
    return {"optimizer": "adam"}


def _read_optimizer(given: GivenArguments) -> Mapping[str, Any]:
    if given["optimizer"] != "adam":
        raise given.refusal(f"optimizer ({given['optimizer']}) is not modelled", "what is: adam")
    return {"optimizer.name": "adamw", "framework.optimizer": "te"}


def _write_clipping(job: ExportJob) -> Mapping[str, Any]:
    return {} if job.workload.optimizer.clip_grad_norm else {"clip-grad": 0.0}


# --- numerics


MXFP8 = "mxfp8"


def _write_products(job: ExportJob) -> Mapping[str, Any]:
    recipe = job.workload.precision.fp8_recipe
    if job.workload.precision.params == "fp32":
        raise job.refusal("precision.params (fp32)", "bf16 keeps the main copy in fp32 already; leave it out")
    if not recipe:
        return {"bf16": True}
    history = {name.replace("_", "-"): value for name, value in AMAX_HISTORY.items()} if recipe == "delayed" else {}
    return {"bf16": True, "fp8-format": FP8_FORMATS[recipe], "fp8-recipe": recipe, **history}


def _read_products(given: GivenArguments) -> Mapping[str, Any]:
    if not given["bf16"]:
        raise given.refusal("bf16 is not given", "parameters in fp32 or fp16 are not modelled; add --bf16")
    if given["fp8-format"] is None:
        return {"precision.gemm": "bf16"}
    recipe = given["fp8-recipe"]
    if recipe not in FP8_FORMATS:
        raise given.refusal(f"fp8-recipe ({recipe}) is not modelled", f"what is: {', '.join(FP8_FORMATS)}")
    if given["fp8-format"] != FP8_FORMATS[recipe]:
        raise given.refusal(
            f"fp8-format ({given['fp8-format']}) with fp8-recipe ({recipe}) is not modelled",
            f"what is: {FP8_FORMATS[recipe]}",
        )
    return {"precision.gemm": f"{OLD_FP8}-{recipe}"}


SHARES_BUFFER = Argument("reuse-grad-buf-for-mxfp8-param-ag", "flag", False)
"""MXFP8's parameters are gathered into the gradients' buffer: Megatron-Bridge asserts it where they are held in fp8
(training/mixed_precision.py, ``finalize``), and Megatron-Core that they are (distributed_data_parallel_config.py)."""


def _write_fp8_params(job: ExportJob) -> Mapping[str, Any]:
    if not job.framework.fp8_params:
        return {}
    shares = {SHARES_BUFFER.name: True} if job.workload.precision.fp8_recipe == MXFP8 else {}
    return {"fp8-param-gather": True, **shares}


def _read_fp8_params(given: GivenArguments) -> Mapping[str, Any]:
    holds, shares = bool(given["fp8-param-gather"]), bool(given[SHARES_BUFFER.name])
    if shares != (holds and given["fp8-recipe"] == MXFP8):
        raise given.refusal(
            f"{SHARES_BUFFER.name} ({'given' if shares else 'not given'}) with fp8-recipe ({given['fp8-recipe']})",
            "it goes with fp8-param-gather and fp8-recipe mxfp8, and they with it; give all three or neither",
        )
    return {"framework.fp8_params": holds}


# --- activations

_RECOMPUTE = (
    Argument("recompute-granularity", "text"), Argument("recompute-method", "text"),
    Argument("recompute-num-layers", "int"), Argument("recompute-modules", "texts"),
    Argument("recompute-activations", "flag", False),
)  # fmt: skip


def _write_recompute(job: ExportJob) -> Mapping[str, Any]:
    mode = job.recompute
    if mode.kind == "none":
        return {}
    if mode.kind == "selective":
        return {"recompute-granularity": "selective", "recompute-modules": list(mode.modules)}
    if mode.kind == "full":
        method = "uniform" if mode.layers is None else "block"
        return {"recompute-granularity": "full", "recompute-method": method, "recompute-num-layers": mode.layers or 1}
    raise job.refusal(
        f"strategy.recompute ({mode})", "Megatron-Core recomputes modules or layers; use none, selective or full"
    )


def _read_recompute(given: GivenArguments) -> Mapping[str, Any]:
    kind = "selective" if given["recompute-activations"] else given["recompute-granularity"]
    if kind is None:
        return {"strategy.recompute": "none"}
    if kind == "selective":
        modules = given["recompute-modules"] or ["core_attn"]
        return {"strategy.recompute": RecomputeSpec.parse("selective:" + "+".join(modules)).text}
    method, number = given["recompute-method"], given["recompute-num-layers"]
    if method == "uniform" and number == 1:
        return {"strategy.recompute": "full"}
    if method == "block" and number:
        return {"strategy.recompute": f"full:{number}"}
    raise given.refusal(
        f"recompute-method ({method}) with recompute-num-layers ({number}) is not modelled",
        "what is: uniform with 1, or block",
    )


# --- kernels


def _write_attention(job: ExportJob) -> Mapping[str, Any]:
    return {"attention-backend": job.framework.attention}


def _read_attention(given: GivenArguments) -> Mapping[str, Any]:
    """Left to Transformer Engine it is taken to choose cuDNN's kernels, as on Hopper without FlashAttention 3."""
    kind = {"auto": "fused", "fused": "fused", "flash": "flash"}.get(str(given["attention-backend"]))
    if kind is None:
        backend = given["attention-backend"]
        raise given.refusal(f"attention-backend ({backend}) is not modelled", "what is: fused, flash or auto")
    return {"framework.attention": kind}


_DISPATCHER = Argument("moe-token-dispatcher-type", "text", "allgather")
_FLEX = Argument("moe-flex-dispatcher-backend", "text", "deepep")


def _write_dispatcher(job: ExportJob) -> Mapping[str, Any]:
    if job.framework.dispatcher == "deepep":
        return {_DISPATCHER.name: "flex", _FLEX.name: "deepep"}
    return {_DISPATCHER.name: job.framework.dispatcher}


def _read_dispatcher(given: GivenArguments) -> Mapping[str, Any]:
    kind = given[_DISPATCHER.name]
    if kind == "flex" and given[_FLEX.name] == "deepep":
        return {"framework.dispatcher": "deepep"}
    if kind not in ("alltoall", "allgather"):
        backend = f" with {_FLEX.name} ({given[_FLEX.name]})" if kind == "flex" else ""
        raise given.refusal(f"{_DISPATCHER.name} ({kind}){backend} is not modelled", "what is: alltoall, allgather")
    return {"framework.dispatcher": kind}


def _write_loss(job: ExportJob) -> Mapping[str, Any]:
    kind = job.framework.cross_entropy_fusion
    return {} if kind == "none" else {"cross-entropy-loss-fusion": True, "cross-entropy-fusion-impl": kind}


def _read_loss(given: GivenArguments) -> Mapping[str, Any]:
    fused = given["cross-entropy-loss-fusion"]
    return {"framework.cross_entropy_fusion": given["cross-entropy-fusion-impl"] if fused else "none"}


def _read_capacity(given: GivenArguments) -> Mapping[str, Any]:
    factor = given["moe-expert-capacity-factor"]
    return {
        "routing.capacity_factor": None if factor is not None and factor < 0 else factor,
        "routing.pad_to_capacity": bool(given["moe-pad-expert-input-to-capacity"]),
    }


def _write_capacity(job: ExportJob) -> Mapping[str, Any]:
    routing = job.workload.routing
    if routing.capacity_factor is None:
        return {}
    padded = {"moe-pad-expert-input-to-capacity": True} if routing.pad_to_capacity else {}
    return {"moe-expert-capacity-factor": routing.capacity_factor, **padded}


def _write_tp_overlap(job: ExportJob) -> Mapping[str, Any]:
    s = job.strategy
    if not job.framework.tp_overlap:
        return {}
    if s.tp == 1 or not s.sp:
        raise job.refusal(
            "framework.tp_overlap (true) without sequence parallelism", "Megatron-LM refuses it; leave it out"
        )
    return {"tp-comm-overlap": True}


def _given_rotary(given: GivenArguments) -> bool:
    return bool(read_positions(given)["model.positions"] == "rope")


def _check_overlapped_sends(given: GivenArguments) -> Mapping[str, Any]:
    """Nothing, where the sends of an interleaved pipeline are overlapped; others cannot be."""
    if _read_layout(given)["strategy.vpp"] > 1 and not given["no-overlap-p2p-communication"]:
        raise given.refusal(
            "no-overlap-p2p-communication is not modelled", "an interleaved pipeline overlaps its sends; leave it out"
        )
    return {}


def _read_cp_kind(given: GivenArguments) -> Mapping[str, Any]:
    kinds = set(given["cp-comm-type"])
    own = {word: kind for kind, word in CP_COMM.items()}
    if len(kinds) != 1 or (word := kinds.pop()) not in own:
        raise given.refusal(f"cp-comm-type ({' '.join(sorted(kinds))}) is not modelled", f"what is: {', '.join(own)}")
    return {"strategy.cp_kind": own[word]}


def _read_global_batch(given: GivenArguments) -> Mapping[str, Any]:
    if (batch := given[GLOBAL_BATCH.name]) is None:
        if given.num_gpus is None:
            raise given.refusal(f"{GLOBAL_BATCH.name} is missing", "it follows from the GPUs; give --gpus")
        batch = given.required_value(MICRO_BATCH.name) * (
            given.num_gpus // (given[TP.name] * given[PP.name] * given[CP.name])
        )
    return {"batch.global_batch": batch}


_EXPERT_ROWS = rows_if_present(_has_experts, _given_experts, (
    same_value_row("strategy.ep", Argument("expert-model-parallel-size", "int", 1)),
    FieldRow(
        ("strategy.etp",), (Argument("expert-tensor-parallel-size", "int"),),
        lambda job: {"expert-tensor-parallel-size": job.strategy.etp},
        lambda given: {"strategy.etp": given["expert-tensor-parallel-size"] or given[TP.name]},
    ),
    FieldRow(("framework.dispatcher",), (_DISPATCHER, _FLEX), _write_dispatcher, _read_dispatcher),
    translated_row("framework.experts", Argument("moe-grouped-gemm", "flag", False),
    {"grouped": True, "sequential": False}),
    switch_row("framework.permute_fusion", Argument("moe-permute-fusion", "flag", False)),
    switch_row("framework.router_fusion", Argument("moe-router-fusion", "flag", False)),
    switch_row("framework.router_padding", Argument("moe-router-padding-for-quantization", "flag", False,
                                                aliases=("moe-router-padding-for-fp8",))),
    FieldRow(
        ("routing.capacity_factor", "routing.pad_to_capacity"),
        (Argument("moe-expert-capacity-factor", "float"), Argument("moe-pad-expert-input-to-capacity", "flag", False)),
        _write_capacity, _read_capacity,
    ),
))  # fmt: skip
JOB_ROWS: tuple[FieldRow, ...] = (
    same_value_row("strategy.tp", TP),
    FieldRow(
        ("strategy.sp",), (Argument("sequence-parallel", "flag", False),),
        lambda job: {"sequence-parallel": True} if job.strategy.sp and job.strategy.tp > 1 else {},
        lambda given: {"strategy.sp": bool(given["sequence-parallel"]) and given[TP.name] > 1},
    ),
    same_value_row("strategy.pp", PP),
    FieldRow(("strategy.layout", "strategy.vpp"), (LAYOUT, CHUNKS, CHUNK_LAYERS, *OWN_SPLIT), _write_layout,
    _read_layout),
    FieldRow(("strategy.schedule",), (), _write_schedule, lambda given: {}),
    same_value_row("strategy.cp", CP),
    translated_row("framework.rank_order", Argument("use-tp-pp-dp-mapping", "flag", False),
    dict(zip(RANK_ORDERS, (False, True), strict=True))),
    FieldRow(
        ("strategy.cp_kind",), (Argument("cp-comm-type", "texts", ["p2p"]),),
        lambda job: {"cp-comm-type": [CP_COMM[s.cp_kind]]} if (s := job.strategy).cp > 1 or s.cp_kind != "ring" else {},
        _read_cp_kind,
    ),
    required_row("strategy.micro_batch", MICRO_BATCH),
    FieldRow(
        ("batch.global_batch",), (GLOBAL_BATCH,),
        lambda job: {GLOBAL_BATCH.name: job.workload.batch.global_batch}, _read_global_batch,
    ),
    FieldRow(("strategy.recompute",), _RECOMPUTE, _write_recompute, _read_recompute),
    FieldRow(("framework.data_parallel", "strategy.zero"), (SHARDED,), _write_sharding, _read_sharding),
    FieldRow(
        ("framework.overlap_grad_reduce", "framework.overlap_param_gather"), (OVERLAP_GRADS, OVERLAP_PARAMS),
        _write_overlaps, _read_overlaps,
    ),
    FieldRow(
        ("framework.grads", "framework.grads_bytes_per_param", "framework.reduced_bytes_per_param",
         "framework.accumulation_bytes_per_param"),
        (Argument("grad-reduce-in-bf16", "flag", False),), _write_grads, _read_grads,
    ),
    FieldRow(
        ("optimizer.name", "optimizer.implementation", "framework.optimizer"), (Argument("optimizer", "text", "adam"),),
        _write_optimizer, _read_optimizer,
    ),
    FieldRow(
        ("optimizer.clip_grad_norm",), (Argument("clip-grad", "float", 1.0),), _write_clipping,
        lambda given: {"optimizer.clip_grad_norm": given["clip-grad"] > 0},
    ),
    *OPTIMIZER_ROWS,
    *OFFLOAD_ROWS,
    FieldRow(
        ("precision.gemm", "precision.params"),
        (Argument("bf16", "flag", False), Argument("fp8-format", "text", stored_as="fp8"),
         Argument("fp8-recipe", "text", "delayed"), Argument("fp8-amax-history-len", "int", 1),
         Argument("fp8-amax-compute-algo", "text", "most_recent")), _write_products, _read_products,
    ),
    FieldRow(
        ("framework.fp8_params",), (Argument("fp8-param-gather", "flag", False), SHARES_BUFFER), _write_fp8_params,
        _read_fp8_params,
    ),
    FieldRow(("framework.attention",), (Argument("attention-backend", "text", "auto"),), _write_attention,
    _read_attention),
    FieldRow(
        ("framework.tp_overlap",), (Argument("tp-comm-overlap", "flag", False),), _write_tp_overlap,
        lambda given: {"framework.tp_overlap": bool(given["tp-comm-overlap"])},
    ),
    FieldRow(
        ("framework.cross_entropy_fusion",),
        (Argument("cross-entropy-loss-fusion", "flag", False), Argument("cross-entropy-fusion-impl", "text", "native")),
        _write_loss, _read_loss,
    ),
    switch_row("framework.fuses_wgrad_accumulation",
           Argument("no-gradient-accumulation-fusion", "off", True, "gradient_accumulation_fusion")),
    switch_row("framework.fused_swiglu", Argument("no-bias-swiglu-fusion", "off", True, "bias_swiglu_fusion")),
    FieldRow(
        ("framework.fused_rope",), (Argument("no-rope-fusion", "off", True, "apply_rope_fusion"),),
        lambda job: {} if job.framework.fused_rope else {"no-rope-fusion": False},
        lambda given: {"framework.fused_rope": bool(given["no-rope-fusion"]) or not _given_rotary(given)},
    ),
    FieldRow(
        (), (Argument("no-overlap-p2p-communication", "off", True, "overlap_p2p_comm"),), lambda job: {},
        _check_overlapped_sends,
    ),
    same_value_row("framework.vocab_divisor", Argument("make-vocab-size-divisible-by", "int", 128)),
    *_EXPERT_ROWS,
    *GRAPH_ROWS,
    *ENVIRONMENT_ROWS,
)  # fmt: skip
"""The strategy, numerics, optimizer and options of the framework."""
