"""Model FLOPs of a training step: what the mathematics needs, recomputation and padding not counted."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from mofa.specs.model import ModelSpec
from mofa.specs.params import layer_params, mtp_layer_params

FlopsConvention = Literal["causal", "full"]


@lru_cache(maxsize=64)
def matmul_params(model: ModelSpec) -> float:
    """Parameters that multiply each token: active experts alone, the head but not the embedding. [params]

    The router counts; norms and biases, which add or scale, are so few that they are counted as well. Multi-token
    prediction counts its layer and its pass through the head, because it is trained.
    """
    total = model.num_dense_layers * _active(model, moe=False) + model.num_moe_layers * _active(model, moe=True)
    total += model.vocab * model.hidden
    if model.num_mtp_layers:
        p = mtp_layer_params(model)
        routed = p.routed * model.moe.top_k / model.moe.num_experts if model.moe and p.routed else float(p.routed)
        total += model.num_mtp_layers * (p.total_params - p.routed + routed + model.vocab * model.hidden)
    return total


def _active(model: ModelSpec, moe: bool) -> float:
    if moe and model.moe is None:
        return 0.0
    p = layer_params(model, moe)
    routed = p.routed * model.moe.top_k / model.moe.num_experts if model.moe and p.routed else 0.0
    return p.total_params - p.routed + routed


@lru_cache(maxsize=64)
def attention_flops_per_token(model: ModelSpec, seq_len: int, convention: FlopsConvention) -> float:
    """Forward FLOPs of all attention layers per token: two products over the positions a token attends to. [FLOP]

    ``causal`` counts the half that the mask leaves (the exact ``(s + 1) / 2`` positions on average), ``full`` all s
    positions. A window limits both.
    """
    a = model.attention
    per_position = 2.0 * a.num_heads * (a.d_qk + a.d_v)
    total = 0.0
    for i in range(model.num_layers + model.num_mtp_layers):
        windowed = model.is_windowed_layer(min(i, model.num_layers - 1))
        if convention == "causal":
            positions = model.attended_pairs(seq_len, windowed) / seq_len
        else:
            positions = float(min(a.window or seq_len, seq_len) if windowed else seq_len)
        total += per_position * positions
    return total


def model_flops_per_token(model: ModelSpec, seq_len: int, convention: FlopsConvention = "causal") -> float:
    """FLOPs per token forward and backward: ``6 N + 3 x`` attention. [FLOP]

    References
    ----------
    Chowdhery et al. 2022 (PaLM), arXiv 2204.02311, appendix B, with attention halved by the causal mask where the
    convention is ``causal``.
    """
    return 6.0 * matmul_params(model) + 3.0 * attention_flops_per_token(model, seq_len, convention)


@lru_cache(maxsize=64)
def routed_flops_share(model: ModelSpec, seq_len: int) -> float:
    """Share of the model FLOPs that routed experts do, multi-token prediction not counted. [-]

    Examples
    --------
    >>> from mofa.specs.load import load_workload
    >>> routed_flops_share(load_workload("llama3-8b").model, 4096)
    0.0
    """
    if model.moe is None:
        return 0.0
    active = layer_params(model, True).routed * model.moe.top_k / model.moe.num_experts
    return 6.0 * model.num_moe_layers * active / model_flops_per_token(model, seq_len)
