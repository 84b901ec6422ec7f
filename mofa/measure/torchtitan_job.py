"""A run in torchtitan's words: its model arguments and job settings, or one line why it cannot say it."""

from __future__ import annotations

from typing import Any

from mofa.measure.expand import ExpandedRun
from mofa.schedules import SCHEDULES, default_schedule
from mofa.specs.model import ModelSpec, MoeSpec


def _llama3(run: ExpandedRun, model: ModelSpec) -> dict[str, Any]:
    assert model.mlp.ffn_hidden is not None
    a = model.attention
    if a.d_qk * a.num_heads != model.hidden:
        raise run.refusal(f"head_dim {a.d_qk} with {a.num_heads} heads", "its llama3 needs hidden / num_heads")
    if model.tied_embeddings:
        raise run.refusal("tied embeddings with llama3", "use qk_norm: true (qwen3) or untied embeddings")
    return {
        "dim": model.hidden,
        "n_layers": model.num_layers,
        **model.attention_kind.torchtitan_args(a),
        "vocab_size": model.vocab,
        # hidden = multiple_of * ceil(int(multiplier * int(8 dim / 3)) / multiple_of): exactly ffn_hidden
        "multiple_of": model.mlp.ffn_hidden,
        "ffn_dim_multiplier": 0.9 * model.mlp.ffn_hidden / (8 * model.hidden / 3),
        "rope_theta": 500000,
    }


def _moe_args(run: ExpandedRun, moe: MoeSpec) -> dict[str, Any]:
    if moe.expert_bias or moe.shared_gate or moe.every != 1:
        raise run.refusal("expert_bias, shared_gate or moe.every", "leave them out")
    shared, rest = divmod(moe.shared_hidden, moe.expert_hidden)
    if rest:
        raise run.refusal(
            f"shared_hidden ({moe.shared_hidden})", f"use a multiple of expert_hidden ({moe.expert_hidden})"
        )
    grouped = moe.num_groups > 1
    return {
        "num_experts": moe.num_experts,
        "num_shared_experts": shared,
        "top_k": moe.top_k,
        "score_func": moe.score,
        "route_norm": True,
        "gate_bias": moe.router_bias,
        "score_before_experts": False,
        "num_expert_groups": moe.num_groups if grouped else None,
        "num_limited_groups": moe.groups_per_token if grouped else None,
        "load_balance_coeff": 1e-3 if moe.correction_bias else None,
        "use_grouped_mm": run.framework.experts == "grouped",
    }


def _qwen3(run: ExpandedRun, model: ModelSpec) -> dict[str, Any]:
    a = model.attention
    args: dict[str, Any] = {
        "dim": model.hidden,
        "n_layers": model.num_layers,
        **model.attention_kind.torchtitan_args(a),
        "head_dim": a.d_qk,
        "vocab_size": model.vocab,
        "hidden_dim": model.mlp.ffn_hidden or model.hidden,
        "qk_norm": a.qk_norm,
        "enable_weight_tying": model.tied_embeddings,
    }
    if model.moe is not None:
        if model.moe.first_k_dense or model.moe.shared_hidden:
            raise run.refusal("dense layers or shared experts with qwen3", "use MLA (deepseek_v3) or leave them out")
        args |= {
            "moe_enabled": True,
            "moe_inter_dim": model.moe.expert_hidden,
            "moe_args": _moe_args(run, model.moe),
        }
    return args


def _deepseek(run: ExpandedRun, model: ModelSpec) -> dict[str, Any]:
    if model.moe is None:
        raise run.refusal("MLA without experts", "use a model with moe")
    return {
        "dim": model.hidden,
        "n_layers": model.num_layers,
        "n_dense_layers": model.moe.first_k_dense,
        **model.attention_kind.torchtitan_args(model.attention),
        "vocab_size": model.vocab,
        "inter_dim": model.mlp.ffn_hidden or model.hidden,
        "moe_inter_dim": model.moe.expert_hidden,
        "moe_args": _moe_args(run, model.moe),
    }


_MODELS = {"llama3": _llama3, "qwen3": _qwen3, "deepseek_v3": _deepseek}
"""By their names in torchtitan."""


def _model(run: ExpandedRun) -> tuple[str, dict[str, Any]]:
    model, a = run.model, run.model.attention
    if model.norm != "rmsnorm" or model.positions != "rope" or model.mlp.activation != "swiglu" or model.mlp.bias:
        raise run.refusal(f"model {model.name}", "it has RMSNorm, RoPE and SwiGLU without biases only")
    if model.num_mtp_layers or model.dropout:
        raise run.refusal("multi-token prediction or dropout", "set num_mtp_layers and dropout to 0")
    if a.qkv_bias or a.out_bias or a.sinks or a.window is not None:
        raise run.refusal("attention with biases, sinks or a window", "use plain grouped-query attention")
    if model.uncommon_facts:
        raise run.refusal(model.uncommon_facts[0], "its models have no such layers; leave it out")
    name = model.attention_kind.torchtitan.model(a, model.moe is not None)
    return name, _MODELS[name](run, model)


def _recompute(run: ExpandedRun) -> dict[str, Any]:
    r = run.recompute
    if r.kind == "full" and r.layers is None:
        return {"mode": "full"}
    if r.kind == "ops":
        return {"mode": "selective", "selective_ac_option": "op"}
    if r.kind == "every":
        return {"mode": "selective", "selective_ac_option": str(r.layers or 2)}
    if r.kind == "none":
        return {"mode": "none"}
    raise run.refusal(f"recompute: {r}", "use none, full, ops or every:n")


def _data_parallel(run: ExpandedRun) -> tuple[int, int]:
    """(replicas, shards) of the data-parallel ranks."""
    kind, dp, replicas = run.framework.data_parallel, run.strategy.dp, run.framework.dp_replicate
    if kind == "ddp":
        if dp != run.run.gpus:
            raise run.refusal("ddp with tp, cp or pp", "use data_parallel: fsdp or hsdp")
        return dp, 1
    if kind == "hsdp":
        if replicas < 2 or dp % replicas:
            raise run.refusal(f"hsdp with dp_replicate {replicas} of dp {dp}", "use a divisor of dp above 1")
        return replicas, dp // replicas
    if kind != "fsdp" or replicas != 1:
        raise run.refusal(f"data_parallel: {kind} with dp_replicate {replicas}", "use fsdp, hsdp or ddp")
    return 1, dp


def _dtype(run: ExpandedRun, shards: int) -> str:
    """Format of the parameters, their gradients and states: bfloat16 where nothing else mixes precision."""
    s = run.strategy
    mixed = shards > 1 or s.cp > 1 or (s.tp == 1 and s.pp == 1)
    wanted = run.run.precision.params or ("fp32" if mixed else "bf16")
    if wanted == "fp32" and not mixed:
        raise run.refusal("params: fp32 with tp or pp and no FSDP", "its matrix products would be fp32; use bf16")
    return {"fp32": "float32", "bf16": "bfloat16"}[wanted]


def _reshard(run: ExpandedRun) -> str:
    """ZeRO's stage in FSDP's words: 3 reshards after the forward pass, 2 does not."""
    if not run.framework.reshard_after_forward:
        return "never"
    zero = run.run.strategy.get("zero")
    if zero in (None, 0, 1) or (zero == 3) == (run.strategy.pp == 1):
        return "default"
    return "always" if zero == 3 else "never"


RECIPE_NAMES = {"tensorwise": None, "rowwise": "rowwise", "rowwise-gw-hp": "rowwise_with_gw_hp"}
"""As torchtitan's ``recipe_name`` has them."""


def _float8(run: ExpandedRun) -> dict[str, Any]:
    """Settings of Float8Linear: a recipe's name, but none of ``tensorwise``, beside which nothing may be gathered in
    fp8."""
    recipe, framework = run.run.precision.fp8_recipe, run.framework
    if not recipe:
        return {}
    settings: dict[str, Any] = {
        "recipe_name": RECIPE_NAMES[recipe],
        "filter_fqns": list(framework.fp8_filters),
        "enable_fsdp_float8_all_gather": framework.fp8_all_gather,
        "precompute_float8_dynamic_scale_for_fsdp": framework.fp8_scales_ahead,
    }
    return {"model": {"converters": ["quantize.linear.float8"]}, "quantize": {"linear": {"float8": settings}}}


def torchtitan_job(run: ExpandedRun) -> dict[str, Any]:
    """The settings of torchtitan's Trainer for this run.

    Raises
    ------
    SpecError
        If torchtitan cannot run it.
    """
    s, batch, framework = run.strategy, run.run.batch, run.framework
    recipe = run.run.precision.fp8_recipe
    if recipe and recipe not in framework.traits.fp8_recipes:
        offered = " or ".join(f"fp8-{name}" for name in framework.traits.fp8_recipes)
        raise run.refusal(f"precision.gemm ({run.run.precision.gemm})", f"use bf16 or {offered}")
    if recipe and not framework.compile:
        raise run.refusal(f"{run.run.precision.gemm} without compilation", "set framework.compile: true")
    if not run.run.optimizer.clip_grad_norm:
        raise run.refusal("without clipping", "use optimizer.clip_grad_norm: true")
    if s.layout:
        raise run.refusal("layout here", "leave it out")
    if SCHEDULES[s.schedule].has_several_chunks and s.vpp != 2:
        raise run.refusal(f"{s.schedule} with vpp {s.vpp}", "use vpp: 2, its default")
    if not SCHEDULES[s.schedule].has_several_chunks and s.vpp != 1:
        raise run.refusal(f"{s.schedule} with vpp {s.vpp}", f"use schedule: {default_schedule(2)} or vpp: 1")
    if framework.attention != "sdpa" or framework.dispatcher != "alltoall":
        raise run.refusal(
            f"attention: {framework.attention} or dispatcher: {framework.dispatcher}", "use sdpa, alltoall"
        )
    if not framework.shards_head_norms or framework.repeats_keys:
        raise run.refusal("heads as before 0.2.2", "leave shards_head_norms and repeats_keys out")
    if s.tp > 1 and not s.sp:
        raise run.refusal("tp without sp", "use sp: true")
    name, args = _model(run)
    if s.pp > 1 and name == "qwen3":
        raise run.refusal("qwen3 in a pipeline", "use a llama or DeepSeek model, or pp: 1")
    replicas, shards = _data_parallel(run)
    if s.ep > 1 and (s.etp not in (1, s.tp) or (shards * s.cp * s.tp) % s.ep):
        raise run.refusal(f"ep {s.ep} with etp {s.etp}", "ep must divide the FSDP ranks, etp must be 1 or tp")
    implementation = run.run.optimizer.implementation or framework.optimizer
    if implementation == "te":
        raise run.refusal("optimizer: te", "use fused, foreach or for-loop")
    per_rank = batch.micro * run.num_micro_batches
    return {
        "model": name,
        "args": args,
        "job": {
            "training": {
                "local_batch_size": per_rank if s.pp > 1 else batch.micro,
                "global_batch_size": batch.global_,
                "seq_len": batch.seq_len,
                "dtype": _dtype(run, shards),
                "steps": 10_000,
            },
            "optimizer": {"implementation": implementation, "lr": 1e-4},
            "parallelism": {
                "data_parallel_replicate_degree": replicas,
                "data_parallel_shard_degree": shards,
                "fsdp_reshard_after_forward": _reshard(run),
                "tensor_parallel_degree": s.tp,
                "disable_loss_parallel": not framework.loss_parallel,
                "pipeline_parallel_degree": s.pp,
                "pipeline_parallel_schedule": SCHEDULES[s.schedule].pytorch_name,
                "pipeline_parallel_microbatch_size": batch.micro,
                "context_parallel_degree": s.cp,
                "context_parallel_rotate_method": "alltoall" if s.cp_kind == "ring" else "allgather",
                "expert_parallel_degree": s.ep,
                "expert_tensor_parallel_degree": s.etp,
            },
            "activation_checkpoint": {**_recompute(run), "early_stop": run.framework.early_stop},
            "compile": {"enable": framework.compile, **({} if framework.compile_loss else {"components": ["model"]})},
            **_float8(run),
            "debug": {
                "seed": 0,
                "moe_force_load_balance": run.model.moe is not None and run.run.routing.kind == "balanced",
            },
        },
    }
