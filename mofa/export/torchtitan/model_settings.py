"""torchtitan's arguments of models: sizes of its llama3, qwen3 and deepseek_v3 models."""

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
    translated_row,
)
from mofa.export.job import ExportJob
from mofa.specs.attention import ATTENTION_KINDS

MODEL = Argument("args.model", "text")
"""Which of torchtitan's models it is: no argument of it, but which class of arguments it has."""
LLAMA3, QWEN3, DEEPSEEK = "llama3", "qwen3", "deepseek_v3"
MODELS = (LLAMA3, QWEN3, DEEPSEEK)
_DIM = Argument("args.dim", "int")
_HEADS = Argument("args.n_heads", "int")
_KV_HEADS = Argument("args.n_kv_heads", "int")
_LAYERS = Argument("args.n_layers", "int")
_MULTIPLE = Argument("args.multiple_of", "int", 256)
_MULTIPLIER = Argument("args.ffn_dim_multiplier", "float")
_HIDDEN = Argument("args.hidden_dim", "int", 3072)
_INTER = Argument("args.inter_dim", "int", 10944)
_HEAD_DIM = Argument("args.head_dim", "int", 128)
_QK_NORM = Argument("args.qk_norm", "flag", True)
_TIED = Argument("args.enable_weight_tying", "flag", False)
_HAS_EXPERTS = Argument("args.moe_enabled", "flag", False)
_EXPERT_HIDDEN = Argument("args.moe_inter_dim", "int", 768)
_SHARED = Argument("args.moe_args.num_shared_experts", "int", 1)
_ROUTE_NORM = Argument("args.moe_args.route_norm", "flag", False)
_EARLY = Argument("args.moe_args.score_before_experts", "flag", True)
_BALANCE = Argument("args.moe_args.load_balance_coeff", "float", 1e-3)
_GROUPS = Argument("args.moe_args.num_expert_groups", "int")
_LIMITED = Argument("args.moe_args.num_limited_groups", "int")


def torchtitan_model_name(job: ExportJob) -> str:
    """The name of the torchtitan model that has the job's attention and experts.

    Raises
    ------
    SpecError
        If none has its mix of parts.
    """
    model, a = job.model, job.model.attention
    name = model.attention_kind.torchtitan.model(a, model.moe is not None)
    if name == LLAMA3 and model.tied_embeddings:
        raise job.refusal("model.tied_embeddings (true)", "its llama3 has none; untie them, or use qk_norm (qwen3)")
    if name == LLAMA3 and a.d_qk * a.num_heads != model.hidden:
        raise job.refusal(f"model.attention.head_dim ({a.d_qk})", "its llama3 has hidden / num_heads; use that")
    if name == QWEN3 and model.moe is not None and (model.moe.first_k_dense or model.moe.shared_hidden):
        raise job.refusal(
            "model.moe.first_k_dense or shared_hidden of grouped-query attention", "its qwen3 has neither; use 0"
        )
    if name == DEEPSEEK and model.moe is None:
        raise job.refusal("model.moe (none) of latent attention", "its deepseek_v3 has experts; use a model with moe")
    if name == DEEPSEEK and model.tied_embeddings:
        raise job.refusal("model.tied_embeddings (true)", "its deepseek_v3 has none; untie them")
    return name


def _is(*names: str) -> Any:
    return lambda job: torchtitan_model_name(job) in names


def _given_is(*names: str) -> Any:
    return lambda given: given[MODEL.name] in names


def _write_kind(job: ExportJob) -> Mapping[str, Any]:
    return {MODEL.name: torchtitan_model_name(job)}


def _read_kind(given: GivenArguments) -> Mapping[str, Any]:
    name = given.required_value(MODEL.name)
    if name not in MODELS:
        raise given.refusal(f"model {name} is not modelled", f"what is: {', '.join(MODELS)}")
    kinds = (kind.name for kind in ATTENTION_KINDS.values() if kind.megatron.has_latents == (name == DEEPSEEK))
    return {"model.attention.kind": next(kinds)}


# --- grouped-query attention


def _read_kv_heads(given: GivenArguments) -> Mapping[str, Any]:
    default = 8 if given[MODEL.name] == QWEN3 else given.required_value(_HEADS.name)
    return {"model.attention.num_kv_heads": given[_KV_HEADS.name] or default}


def _write_head_dim(job: ExportJob) -> Mapping[str, Any]:
    a = job.model.attention
    if not job.has_latent_attention and a.d_v != a.d_qk:
        raise job.refusal(f"model.attention.v_head_dim ({a.d_v})", f"its value heads are as wide as others ({a.d_qk})")
    return {_HEAD_DIM.name: job.model.attention.d_qk} if torchtitan_model_name(job) == QWEN3 else {}


def _read_head_dim(given: GivenArguments) -> Mapping[str, Any]:
    if given[MODEL.name] == QWEN3:
        return {"model.attention.head_dim": given[_HEAD_DIM.name]}
    return {"model.attention.head_dim": given.required_value(_DIM.name) // given.required_value(_HEADS.name)}


def _write_qk_norm(job: ExportJob) -> Mapping[str, Any]:
    return {_QK_NORM.name: job.model.attention.qk_norm} if torchtitan_model_name(job) == QWEN3 else {}


def _read_qk_norm(given: GivenArguments) -> Mapping[str, Any]:
    return {"model.attention.qk_norm": given[MODEL.name] == QWEN3 and bool(given[_QK_NORM.name])}


def _write_tied(job: ExportJob) -> Mapping[str, Any]:
    return {_TIED.name: job.model.tied_embeddings} if torchtitan_model_name(job) == QWEN3 else {}


# --- dense layers


def _write_dense(job: ExportJob) -> Mapping[str, Any]:
    model, name = job.model, torchtitan_model_name(job)
    width = model.mlp.ffn_hidden or model.hidden  # where all layers have experts, nothing has this width
    if name == LLAMA3:
        # hidden = multiple_of * ceil(int(multiplier * int(8 dim / 3)) / multiple_of): with these exactly the width
        return {_MULTIPLE.name: width, _MULTIPLIER.name: 0.9 * width / (8 * model.hidden / 3)}
    return {_HIDDEN.name if name == QWEN3 else _INTER.name: width}


def _read_dense(given: GivenArguments) -> Mapping[str, Any]:
    name = given[MODEL.name]
    if name == QWEN3:
        return {"model.mlp.ffn_hidden": None if given[_HAS_EXPERTS.name] else given[_HIDDEN.name]}
    if name == DEEPSEEK:
        return {"model.mlp.ffn_hidden": given[_INTER.name] if given["args.n_dense_layers"] else None}
    width, multiple, multiplier = (
        int(8 * given.required_value(_DIM.name) / 3),
        given[_MULTIPLE.name],
        given[_MULTIPLIER.name],
    )
    if multiplier is not None:
        width = int(multiplier * width)
    return {"model.mlp.ffn_hidden": multiple * -(-width // multiple)}


# --- experts


def _has_experts(job: ExportJob) -> bool:
    return job.model.moe is not None


def job_has_experts(given: GivenArguments) -> bool:
    """Whether a job's model has experts."""
    return given[MODEL.name] == DEEPSEEK or (given[MODEL.name] == QWEN3 and bool(given[_HAS_EXPERTS.name]))


def _write_experts(job: ExportJob) -> Mapping[str, Any]:
    moe = job.model.moe
    assert moe is not None
    enabled = {_HAS_EXPERTS.name: True} if torchtitan_model_name(job) == QWEN3 else {}
    return {**enabled, "args.moe_args.num_experts": moe.num_experts, _EXPERT_HIDDEN.name: moe.expert_hidden}


def _read_experts(given: GivenArguments) -> Mapping[str, Any]:
    width = given.values.get(_EXPERT_HIDDEN.name, 1408 if given[MODEL.name] == DEEPSEEK else _EXPERT_HIDDEN.default)
    return {"model.moe.num_experts": given["args.moe_args.num_experts"], "model.moe.expert_hidden": width}


def _write_shared(job: ExportJob) -> Mapping[str, Any]:
    moe = job.model.moe
    assert moe is not None
    number, rest = divmod(moe.shared_hidden, moe.expert_hidden)
    if rest:
        raise job.refusal(
            f"model.moe.shared_hidden ({moe.shared_hidden})",
            f"shared experts are as wide as others; use a multiple of {moe.expert_hidden}",
        )
    return {_SHARED.name: number}


def _read_shared(given: GivenArguments) -> Mapping[str, Any]:
    width = _read_experts(given)["model.moe.expert_hidden"]
    return {"model.moe.shared_hidden": given[_SHARED.name] * width}


def _write_places(job: ExportJob) -> Mapping[str, Any]:
    moe = job.model.moe
    assert moe is not None
    return {"args.n_dense_layers": moe.first_k_dense} if torchtitan_model_name(job) == DEEPSEEK else {}


def _read_places(given: GivenArguments) -> Mapping[str, Any]:
    return {"model.moe.first_k_dense": given["args.n_dense_layers"] if given[MODEL.name] == DEEPSEEK else 0}


def _write_routing(job: ExportJob) -> Mapping[str, Any]:
    moe = job.model.moe
    assert moe is not None
    grouped = {_GROUPS.name: moe.num_groups, _LIMITED.name: moe.groups_per_token} if moe.num_groups > 1 else {}
    return {
        "args.moe_args.top_k": moe.top_k, "args.moe_args.score_func": moe.score, _ROUTE_NORM.name: True,
        _EARLY.name: False, "args.moe_args.gate_bias": moe.router_bias,
        _BALANCE.name: 1e-3 if moe.correction_bias else None, **grouped,
    }  # fmt: skip


def _read_routing(given: GivenArguments) -> Mapping[str, Any]:
    if given[_EARLY.name]:
        raise given.refusal(f"{_EARLY.name} (true) is not modelled", "what is: scores behind the experts, false")
    return {
        "model.moe.top_k": given["args.moe_args.top_k"], "model.moe.score": given["args.moe_args.score_func"],
        "model.moe.router_bias": bool(given["args.moe_args.gate_bias"]),
        "model.moe.correction_bias": given[_BALANCE.name] is not None,
        "model.moe.num_groups": given[_GROUPS.name] or 1,
        "model.moe.groups_per_token": given[_LIMITED.name] or 1,
    }  # fmt: skip


_GROUPED_ROWS = rows_if_present(_is(LLAMA3, QWEN3), _given_is(LLAMA3, QWEN3), (
    FieldRow(
        ("model.attention.num_kv_heads",), (_KV_HEADS,),
        lambda job: {_KV_HEADS.name: job.model.attention.num_kv_heads}, _read_kv_heads,
    ),
    FieldRow(("model.attention.head_dim",), (_HEAD_DIM,), _write_head_dim, _read_head_dim),
    FieldRow(("model.attention.qk_norm",), (_QK_NORM,), _write_qk_norm, _read_qk_norm),
))  # fmt: skip
_LATENT_ROWS = rows_if_present(_is(DEEPSEEK), _given_is(DEEPSEEK), (
    FieldRow(
        ("model.attention.q_lora_rank",), (Argument("args.q_lora_rank", "int", 0),),
        lambda job: {"args.q_lora_rank": job.value_at_path("model.attention.q_lora_rank") or 0},
        lambda given: {"model.attention.q_lora_rank": given["args.q_lora_rank"] or None},
    ),
    same_value_row("model.attention.kv_lora_rank", Argument("args.kv_lora_rank", "int", 512)),
    same_value_row("model.attention.qk_nope_head_dim", Argument("args.qk_nope_head_dim", "int", 128)),
    same_value_row("model.attention.qk_rope_head_dim", Argument("args.qk_rope_head_dim", "int", 64)),
    same_value_row("model.attention.v_head_dim", Argument("args.v_head_dim", "int", 128)),
))  # fmt: skip
_EXPERT_ROWS = rows_if_present(_has_experts, job_has_experts, (
    FieldRow(
        ("model.moe.num_experts", "model.moe.expert_hidden"),
        (_HAS_EXPERTS, Argument("args.moe_args.num_experts", "int", 8), _EXPERT_HIDDEN), _write_experts, _read_experts,
    ),
    FieldRow(("model.moe.shared_hidden",), (_SHARED,), _write_shared, _read_shared),
    FieldRow(("model.moe.first_k_dense",), (Argument("args.n_dense_layers", "int", 1),), _write_places, _read_places),
    FieldRow(
        ("model.moe.top_k", "model.moe.score", "model.moe.router_bias", "model.moe.correction_bias",
         "model.moe.num_groups", "model.moe.groups_per_token"),
        (Argument("args.moe_args.top_k", "int", 1), Argument("args.moe_args.score_func", "text", "sigmoid"),
         Argument("args.moe_args.gate_bias", "flag", False), _ROUTE_NORM, _EARLY, _BALANCE, _GROUPS, _LIMITED),
        _write_routing, _read_routing,
    ),
    translated_row("framework.experts", Argument("args.moe_args.use_grouped_mm", "text", True),
          {"grouped": True, "sequential": False}),
))  # fmt: skip
MODEL_ROWS: tuple[FieldRow, ...] = (
    FieldRow(("model.attention.kind",), (MODEL,), _write_kind, _read_kind),
    required_row("model.hidden", _DIM),
    required_row("model.num_layers", _LAYERS),
    required_row("model.attention.num_heads", _HEADS),
    *_GROUPED_ROWS,
    *_LATENT_ROWS,
    required_row("model.vocab", Argument("args.vocab_size", "int")),
    FieldRow(
        ("model.tied_embeddings",), (_TIED,), _write_tied,
        lambda given: {"model.tied_embeddings": given[MODEL.name] == QWEN3 and bool(given[_TIED.name])},
    ),
    FieldRow(("model.mlp.ffn_hidden",), (_HIDDEN, _INTER, _MULTIPLE, _MULTIPLIER), _write_dense, _read_dense),
    *_EXPERT_ROWS,
)  # fmt: skip
"""What a model is made of."""
