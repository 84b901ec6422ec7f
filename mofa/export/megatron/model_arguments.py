"""Megatron-LM's arguments about the model: its sizes, attention, experts."""

from __future__ import annotations

import math
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
from mofa.export.job import ExportJob
from mofa.export.megatron.layer_arguments import ACTIVATION_ROW, QK_NORM_ROW, ROTATION_ROW, write_head_dim
from mofa.export.megatron.patterns import (
    expert_layers_of_frequency,
    first_dense_and_expert_flags,
    list_expression_of_layers,
)
from mofa.specs.attention import ATTENTION_KINDS
from mofa.units import is_whole_number

LAYERS = Argument("num-layers", "int")
HIDDEN = Argument("hidden-size", "int")
SEQ_LENGTH = Argument("seq-length", "int")
EXPERTS = Argument("num-experts", "int")
LATENT = Argument("multi-latent-attention", "flag", False)
BIASES = Argument("disable-bias-linear", "off", True, "add_bias_linear")
TOKENIZER = Argument("tokenizer-type", "text")
LATENT_KIND, GROUPED_KIND = (
    next(name for name, kind in ATTENTION_KINDS.items() if kind.megatron.has_latents == has_latents)
    for has_latents in (True, False)
)
"""Kinds of attention as a model's file has them, by Megatron's switch."""
NULL_TOKENIZER = "NullTokenizer"
"""It has a token more than ``--vocab-size`` says (core/tokenizers/text/libraries/null_tokenizer.py)."""


def _has_experts(job: ExportJob) -> bool:
    return job.model.moe is not None


def _given_experts(given: GivenArguments) -> bool:
    return bool(given[EXPERTS.name])


def _is_latent(job: ExportJob) -> bool:
    return job.has_latent_attention


def _given_latent(given: GivenArguments) -> bool:
    return bool(given[LATENT.name])


# --- the vocabulary and the positions


def _write_vocab(job: ExportJob) -> Mapping[str, Any]:
    return {"tokenizer-type": NULL_TOKENIZER, "vocab-size": job.model.vocab - 1}


def _read_vocab(given: GivenArguments) -> Mapping[str, Any]:
    size = given["vocab-size"]
    if size is None:
        raise given.refusal(
            "the vocabulary is not said (vocab-size, or a log's 'padded vocab (size: N)')",
            "its tokenizer's file says it; add --vocab-size N",
        )
    return {"model.vocab": size + (given["tokenizer-type"] == NULL_TOKENIZER)}


def _write_positions(job: ExportJob) -> Mapping[str, Any]:
    model = job.model
    if model.positions == "alibi":
        raise job.refusal("model.positions (alibi)", "position-embedding-type has no ALiBi; use rope or learned")
    if model.positions == "learned":
        seq_len = job.workload.batch.seq_len
        if (model.max_positions or 0) < seq_len:
            raise job.refusal(
                f"model.max_positions ({model.max_positions})", f"Megatron-LM wants as many as seq_len ({seq_len})"
            )
        return {"position-embedding-type": "learned_absolute", "max-position-embeddings": model.max_positions}
    rows = max(model.max_positions or 0, job.workload.batch.seq_len)
    return {"position-embedding-type": "rope", "max-position-embeddings": rows}


def read_positions(given: GivenArguments) -> Mapping[str, Any]:
    """The kind of positions, and the rows of a learned embedding."""
    kind = "rope" if given["use-rotary-position-embeddings"] else given["position-embedding-type"]
    if kind == "rope":
        return {"model.positions": "rope", "model.max_positions": None}
    if kind == "learned_absolute":
        rows = given.required_value("max-position-embeddings")
        return {"model.positions": "learned", "model.max_positions": rows}
    raise given.refusal(f"position-embedding-type ({kind}) is not modelled", "what is: rope and learned_absolute")


# --- attention


def _write_grouped(job: ExportJob) -> Mapping[str, Any]:
    a = job.model.attention
    grouped = {"group-query-attention": True, "num-query-groups": a.num_kv_heads}
    return grouped if a.num_kv_heads < a.num_heads else {}


def _read_grouped(given: GivenArguments) -> Mapping[str, Any]:
    heads = given.required_value("num-attention-heads")
    return {"model.attention.num_kv_heads": given["num-query-groups"] if given["group-query-attention"] else heads}


def _read_head_dim(given: GivenArguments) -> Mapping[str, Any]:
    hidden, heads = given.required_value(HIDDEN.name), given.required_value("num-attention-heads")
    return {"model.attention.head_dim": given["kv-channels"] or hidden // heads}


def _write_window(job: ExportJob) -> Mapping[str, Any]:
    a = job.model.attention
    if a.window is None:
        return {}
    some = {"window-attn-skip-freq": a.window_every} if a.window_every > 1 else {}
    return {"window-size": f"{a.window - 1},0", **some}


def _read_window(given: GivenArguments) -> Mapping[str, Any]:
    text = given["window-size"]
    if text is None:
        return {"model.attention.window": None, "model.attention.window_every": 1}
    sizes = str(text).strip("()").replace(" ", "").split(",")
    if len(sizes) != 2 or not is_whole_number(sizes[0]) or sizes[1] != "0":
        raise given.refusal(f"window-size ({text}) is not modelled", "what is: W,0, a window of W + 1 tokens")
    every = str(given["window-attn-skip-freq"] or 1)
    if not is_whole_number(every):
        raise given.refusal(f"window-attn-skip-freq ({every}) is not modelled", "what is: a number")
    return {"model.attention.window": int(sizes[0]) + 1, "model.attention.window_every": int(every)}


def _write_latent(job: ExportJob) -> Mapping[str, Any]:
    return {LATENT.name: True, "qk-layernorm": True, "rope-type": "yarn"} if _is_latent(job) else {}


def _read_latent(given: GivenArguments) -> Mapping[str, Any]:
    if not _given_latent(given):
        return {"model.attention.kind": GROUPED_KIND}
    if not given["qk-layernorm"]:
        raise given.refusal(
            "multi-latent-attention without qk-layernorm is not modelled", "what is: a norm behind each compression"
        )
    return {"model.attention.kind": LATENT_KIND}


def _write_rope_scale(job: ExportJob) -> Mapping[str, Any]:
    scale = job.model.rope_scale
    if scale == 1.0:
        return {}
    if not _is_latent(job):
        raise job.refusal(
            f"model.rope_scale ({scale:g})", "position-embedding-type has no YaRN but for latent attention; use 1"
        )
    return {"rotary-scaling-factor": math.exp((scale - 1.0) / 0.1)}


def _read_rope_scale(given: GivenArguments) -> Mapping[str, Any]:
    if not _given_latent(given) or given["rope-type"] == "rope":
        return {"model.rope_scale": 1.0}
    return {"model.rope_scale": round(0.1 * math.log(given["rotary-scaling-factor"]) + 1.0, 12)}


def _write_biases(job: ExportJob) -> Mapping[str, Any]:
    model, a, moe = job.model, job.model.attention, job.model.moe
    has_mlp = moe is None or bool(moe.shared_hidden) or model.num_dense_layers > 0
    biased = model.mlp.bias if has_mlp else moe.expert_bias if moe is not None else False
    linears = "model.mlp.bias" if has_mlp else "model.moe.expert_bias"
    if not _is_latent(job) and (a.out_bias != biased or (biased and not a.qkv_bias)):
        raise job.refusal(
            f"model.attention.out_bias ({a.out_bias}) with qkv_bias ({a.qkv_bias}) and {linears} ({biased})",
            "one switch is for all linears, another for queries, keys and values; set them alike, or qkv_bias alone",
        )
    if moe is not None and (moe.expert_bias != biased or moe.router_bias != biased):
        raise job.refusal(
            f"model.moe.expert_bias ({moe.expert_bias}) with router_bias ({moe.router_bias}) and {linears} "
            f"({biased})", "one switch is for all linears, the router's too; set them alike",
        )  # fmt: skip
    unfused = {"no-bias-dropout-fusion": False} if biased and moe is not None else {}
    return {
        **({} if biased else {BIASES.name: False}),
        **({"add-qkv-bias": True} if a.qkv_bias and not biased else {}), **unfused,
    }  # fmt: skip


def _read_biases(given: GivenArguments) -> Mapping[str, Any]:
    biased = bool(given[BIASES.name])
    fields: dict[str, Any] = {"model.mlp.bias": biased}
    if not _given_latent(given):
        qkv = biased or bool(given["add-qkv-bias"])
        fields |= {"model.attention.qkv_bias": qkv, "model.attention.out_bias": biased}
    if _given_experts(given):
        fields |= {"model.moe.expert_bias": biased, "model.moe.router_bias": biased}
        layers = given.required_value(LAYERS.name)
        if not given["moe-shared-expert-intermediate-size"] and all(
            expert_layers_of_frequency(given["moe-layer-freq"], layers, given)
        ):
            fields["model.mlp.bias"] = False
    return fields


# --- the feed-forward layers and experts


def _write_dense(job: ExportJob) -> Mapping[str, Any]:
    return {"ffn-hidden-size": job.model.mlp.ffn_hidden or 4 * job.model.hidden}


def _read_dense(given: GivenArguments) -> Mapping[str, Any]:
    hidden, layers = given.required_value(HIDDEN.name), given.required_value(LAYERS.name)
    if _given_experts(given) and all(expert_layers_of_frequency(given["moe-layer-freq"], layers, given)):
        return {"model.mlp.ffn_hidden": None}
    own = int(4 * hidden * 2 / 3 / 64) * 64 if given["swiglu"] else 4 * hidden
    return {"model.mlp.ffn_hidden": given["ffn-hidden-size"] or own}


def _write_dropout(job: ExportJob) -> Mapping[str, Any]:
    return {"hidden-dropout": job.model.dropout, "attention-dropout": job.model.dropout}


def _read_dropout(given: GivenArguments) -> Mapping[str, Any]:
    hidden, attention = given["hidden-dropout"], given["attention-dropout"]
    if hidden != attention:
        raise given.refusal(
            f"hidden-dropout ({hidden}) and attention-dropout ({attention}) differ, which is not modelled",
            "what is: both alike",
        )
    return {"model.dropout": hidden}


def _write_places(job: ExportJob) -> Mapping[str, Any]:
    layers = [job.model.is_moe_layer(i) for i in range(job.model.num_layers)]
    return {} if all(layers) else {"moe-layer-freq": list_expression_of_layers(layers)}


def _read_places(given: GivenArguments) -> Mapping[str, Any]:
    layers = expert_layers_of_frequency(given["moe-layer-freq"], given.required_value(LAYERS.name), given)
    first, every = first_dense_and_expert_flags(layers, given)
    return {"model.moe.first_k_dense": first, "model.moe.every": every}


def _write_score(job: ExportJob) -> Mapping[str, Any]:
    moe = job.model.moe
    assert moe is not None
    before = {"moe-router-pre-softmax": True} if moe.score == "softmax" and moe.top_k == 1 else {}
    return {"moe-router-score-function": moe.score, **before}


def _write_groups(job: ExportJob) -> Mapping[str, Any]:
    moe = job.model.moe
    assert moe is not None
    grouped = {"moe-router-num-groups": moe.num_groups, "moe-router-group-topk": moe.groups_per_token}
    return grouped if moe.num_groups > 1 else {}


_LATENT_ROWS = rows_if_present(_is_latent, _given_latent, (
    same_value_row("model.attention.q_lora_rank", Argument("q-lora-rank", "int")),
    same_value_row("model.attention.kv_lora_rank", Argument("kv-lora-rank", "int", 32)),
    same_value_row("model.attention.qk_nope_head_dim", Argument("qk-head-dim", "int", 128)),
    same_value_row("model.attention.qk_rope_head_dim", Argument("qk-pos-emb-head-dim", "int", 64)),
    same_value_row("model.attention.v_head_dim", Argument("v-head-dim", "int", 128)),
))  # fmt: skip
_GROUPED_ROWS = rows_if_present(lambda job: not _is_latent(job), lambda given: not _given_latent(given), (
    FieldRow(
        ("model.attention.num_kv_heads",),
        (Argument("group-query-attention", "flag", False), Argument("num-query-groups", "int", 1)),
        _write_grouped, _read_grouped,
    ),
    FieldRow(
        ("model.attention.head_dim",), (Argument("kv-channels", "int"),), write_head_dim, _read_head_dim,
    ),
    QK_NORM_ROW,
    ROTATION_ROW,
    translated_row("model.attention.sinks", Argument("softmax-type", "text", "vanilla"),
    {False: "vanilla", True: "learnable"}),
    FieldRow(
        ("model.attention.window", "model.attention.window_every"),
        (Argument("window-size", "text"), Argument("window-attn-skip-freq", "text")), _write_window, _read_window,
    ),
))  # fmt: skip
_EXPERT_ROWS = rows_if_present(_has_experts, _given_experts, (
    same_value_row("model.moe.num_experts", EXPERTS),
    same_value_row("model.moe.top_k", Argument("moe-router-topk", "int", 2)),
    FieldRow(
        ("model.moe.expert_hidden",), (Argument("moe-ffn-hidden-size", "int"),),
        lambda job: {"moe-ffn-hidden-size": job.value_at_path("model.moe.expert_hidden")},
        lambda given: {
            "model.moe.expert_hidden": given["moe-ffn-hidden-size"] or given.required_value("ffn-hidden-size")
        },
    ),
    FieldRow(
        ("model.moe.shared_hidden",), (Argument("moe-shared-expert-intermediate-size", "int"),),
        lambda job: {"moe-shared-expert-intermediate-size": width}
        if (width := job.value_at_path("model.moe.shared_hidden")) else {},
        lambda given: {"model.moe.shared_hidden": given["moe-shared-expert-intermediate-size"] or 0},
    ),
    switch_row("model.moe.shared_gate", Argument("moe-shared-expert-gate", "flag", False)),
    FieldRow(
        ("model.moe.first_k_dense", "model.moe.every"), (Argument("moe-layer-freq", "text", "1"),),
        _write_places, _read_places,
    ),
    FieldRow(
        ("model.moe.score",),
        (Argument("moe-router-score-function", "text", "softmax"), Argument("moe-router-pre-softmax", "flag", False)),
        _write_score, lambda given: {"model.moe.score": given["moe-router-score-function"]},
    ),
    FieldRow(
        ("model.moe.num_groups", "model.moe.groups_per_token"),
        (Argument("moe-router-num-groups", "int"), Argument("moe-router-group-topk", "int")), _write_groups,
        lambda given: {
            "model.moe.num_groups": given["moe-router-num-groups"] or 1,
            "model.moe.groups_per_token": given["moe-router-group-topk"] or 1,
        },
    ),
    switch_row("model.moe.correction_bias", Argument("moe-router-enable-expert-bias", "flag", False)),
))  # fmt: skip
MODEL_ROWS: tuple[FieldRow, ...] = (
    required_row("model.num_layers", LAYERS),
    required_row("model.hidden", HIDDEN),
    required_row("model.attention.num_heads", Argument("num-attention-heads", "int")),
    FieldRow(
        ("model.attention.kind",),
        (LATENT, Argument("qk-layernorm", "flag", False), Argument("rope-type", "text")), _write_latent, _read_latent,
    ),
    *_GROUPED_ROWS,
    *_LATENT_ROWS,
    FieldRow(("model.rope_scale",), (Argument("rotary-scaling-factor", "float", 1.0),), _write_rope_scale,
    _read_rope_scale),
    FieldRow(("model.mlp.ffn_hidden",), (Argument("ffn-hidden-size", "int"),), _write_dense, _read_dense),
    ACTIVATION_ROW,
    FieldRow(
        ("model.mlp.bias", "model.attention.qkv_bias", "model.attention.out_bias", "model.moe.expert_bias",
         "model.moe.router_bias"),
        (BIASES, Argument("add-qkv-bias", "flag", False),
         Argument("no-bias-dropout-fusion", "off", True, "bias_dropout_fusion")), _write_biases, _read_biases,
    ),
    translated_row("model.norm", Argument("normalization", "text", "LayerNorm"),
          {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}),
    FieldRow(
        ("model.positions", "model.max_positions"),
        (Argument("position-embedding-type", "text", "learned_absolute"), Argument("max-position-embeddings", "int"),
         Argument("use-rotary-position-embeddings", "flag", False)), _write_positions, read_positions,
    ),
    FieldRow(("model.vocab",), (TOKENIZER, Argument("vocab-size", "int")), _write_vocab, _read_vocab),
    translated_row("model.tied_embeddings", Argument("untie-embeddings-and-output-weights", "flag", False),
          {True: False, False: True}),
    FieldRow(
        ("model.dropout",), (Argument("hidden-dropout", "float", 0.1), Argument("attention-dropout", "float", 0.1)),
        _write_dropout, _read_dropout,
    ),
    *_EXPERT_ROWS,
    FieldRow(
        ("model.num_mtp_layers",), (Argument("mtp-num-layers", "int"),),
        lambda job: {"mtp-num-layers": job.model.num_mtp_layers} if job.model.num_mtp_layers else {},
        lambda given: {"model.num_mtp_layers": given["mtp-num-layers"] or 0},
    ),
    required_row("batch.seq_len", SEQ_LENGTH),
)  # fmt: skip
"""The model and the length of its sequences."""
