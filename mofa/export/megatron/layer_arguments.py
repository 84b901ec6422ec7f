"""Megatron-LM's arguments about what layers are made of beside their sizes: activation, norms of heads, rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mofa.export.arguments import Argument, FieldRow, FixedField, GivenArguments
from mofa.export.job import ExportJob
from mofa.units import is_whole_number

GATED, SQUARED_RELU = Argument("swiglu", "flag", False), Argument("squared-relu", "flag", False)
QK_NORM, L2_NORM = Argument("qk-layernorm", "flag", False), Argument("qk-l2-norm", "flag", False)
NO_ROPE, ROTARY_SHARE = Argument("no-rope-freq", "text"), Argument("rotary-percent", "float", 1.0)
_MODULES = "Megatron-Core's GPT model has no such layers"
FIXED: Mapping[str, FixedField] = {
    "model.norm_bias": FixedField((True,), "its LayerNorms have a bias"),
    "model.norm_placement": FixedField(("before",), _MODULES),
    "model.parallel_branches": FixedField((False,), _MODULES),
    "model.shared_branch_norm": FixedField((False,), _MODULES),
    "model.head_bias": FixedField((False,), "its output layer has no bias"),
    "model.logit_softcap": FixedField((False,), _MODULES),
    "model.multipliers": FixedField(((),), _MODULES),
    "model.attention.softcap": FixedField((False, None), _MODULES),
    "model.attention.chunked": FixedField((False, None), _MODULES),
}
"""Facts of a layer that no argument says, and the values that need none."""


def write_activation_switch(job: ExportJob) -> Mapping[str, Any]:
    """The switch of the activation, none for GELU."""
    activation = job.model.mlp.activation
    switches: dict[str, dict[str, Any]] = {"swiglu": {GATED.name: True}, "relu2": {SQUARED_RELU.name: True}, "gelu": {}}
    if activation not in switches:
        raise job.refusal(
            f"model.mlp.activation ({activation})", f"no argument says it; what one does: {', '.join(switches)}"
        )
    return switches[activation]


def read_activation_switches(given: GivenArguments) -> Mapping[str, Any]:
    """The activation of the switches."""
    if given[GATED.name] and given[SQUARED_RELU.name]:
        raise given.refusal("swiglu and squared-relu exclude each other", "leave one out")
    activation = "swiglu" if given[GATED.name] else "relu2" if given[SQUARED_RELU.name] else "gelu"
    return {"model.mlp.activation": activation}


def write_qk_norm(job: ExportJob) -> Mapping[str, Any]:
    """Norms of queries and keys: over each head, with one weight for all or without."""
    a = job.model.attention
    if not a.qk_norm:
        return {}
    if a.qk_norm_kind not in ("head", "unweighted"):
        raise job.refusal(
            f"model.attention.qk_norm_kind ({a.qk_norm_kind})", "its norms are over each head; use head or unweighted"
        )
    return {QK_NORM.name: True} | ({L2_NORM.name: True} if a.qk_norm_kind == "unweighted" else {})


def write_head_dim(job: ExportJob) -> Mapping[str, Any]:
    """The argument of the width of a head, of queries, keys and values alike."""
    a = job.model.attention
    if a.d_v != a.d_qk:
        raise job.refusal(
            f"model.attention.v_head_dim ({a.d_v})", f"its value heads are as wide as queries' ({a.d_qk}); leave it out"
        )
    return {"kv-channels": a.d_qk}


def read_qk_norm(given: GivenArguments) -> Mapping[str, Any]:
    """The kind of norms that the switches ask for."""
    kind = "unweighted" if given[QK_NORM.name] and given[L2_NORM.name] else "head"
    return {"model.attention.qk_norm": bool(given[QK_NORM.name]), "model.attention.qk_norm_kind": kind}


def write_rotation(job: ExportJob) -> Mapping[str, Any]:
    """Which layers are rotated, and how much of a head."""
    a, layers = job.model.attention, job.model.num_layers
    out: dict[str, Any] = {}
    if a.nope_every:
        if layers % a.nope_every:
            raise job.refusal(
                f"model.attention.nope_every ({a.nope_every})",
                f"Megatron-Core asks for a divisor of the number of layers ({layers})",
            )
        out[NO_ROPE.name] = str(a.nope_every)
    if a.d_rope != a.d_qk:
        out[ROTARY_SHARE.name] = a.d_rope / a.d_qk
    return out


def read_rotation(given: GivenArguments) -> Mapping[str, Any]:
    """The layers without a rotation and the share of a head that is rotated."""
    text = given[NO_ROPE.name]
    if text is not None and not is_whole_number(str(text)):
        raise given.refusal(f"no-rope-freq ({text}) is a list", "a number says every n-th layer; lists are not read")
    share, width = float(given[ROTARY_SHARE.name]), given["kv-channels"]
    fields: dict[str, Any] = {"model.attention.nope_every": int(text or 0), "model.attention.rotary_dim": None}
    if share != 1.0:
        width = int(width or given.required_value("hidden-size") // given.required_value("num-attention-heads"))
        fields["model.attention.rotary_dim"] = round(share * width)
    return fields


ACTIVATION_ROW = FieldRow(
    ("model.mlp.activation",), (GATED, SQUARED_RELU), write_activation_switch, read_activation_switches
)
QK_NORM_ROW = FieldRow(
    ("model.attention.qk_norm", "model.attention.qk_norm_kind"), (QK_NORM, L2_NORM), write_qk_norm, read_qk_norm
)
ROTATION_ROW = FieldRow(
    ("model.attention.nope_every", "model.attention.rotary_dim"), (NO_ROPE, ROTARY_SHARE), write_rotation, read_rotation
)
