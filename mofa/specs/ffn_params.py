"""Parameters of feed-forwards: of a dense one of some width, and of a layer's experts."""

from __future__ import annotations

from typing import NamedTuple

from mofa.specs.model import ModelSpec


class FfnParams(NamedTuple):
    """Parameters of a feed-forward by what shards them, as in :class:`mofa.specs.params.LayerParams`. [params]"""

    matrices_tp: int
    replicated: int
    routed: int
    shared: int


def _matrices(model: ModelSpec, width: int, hidden: int) -> int:
    return (3 if model.mlp.gated else 2) * hidden * width


def dense_ffn_params(model: ModelSpec, width: int) -> FfnParams:
    """Parameters of a dense feed-forward of this width. [params]"""
    split, replicated = _matrices(model, width, model.hidden), 0
    if model.mlp.bias:
        split += width * (2 if model.mlp.gated else 1)
        replicated += model.hidden
    return FfnParams(split, replicated, 0, 0)


def experts_params(model: ModelSpec, *, hashed: bool = False) -> FfnParams:
    """Parameters of the experts of one layer and of their router. [params]

    Parameters
    ----------
    model
        A model with experts. Where its layers are of several kinds, the router also knows experts without parameters,
        and routed experts may read tokens projected to a narrower width.
    hashed
        Whether a table of tokens chooses experts, so that there is no correction bias.
    """
    assert model.moe is not None
    m, h = model.moe, model.hidden
    outputs = m.num_experts + (model.layers.zero_experts if model.layers else 0)
    latent = model.layers.expert_latent if model.layers else None
    replicated = outputs * (h + m.router_bias + (m.correction_bias and not hashed)) + 2 * h * (latent or 0)
    one_expert = _matrices(model, m.expert_hidden, latent or h)
    if m.expert_bias:
        one_expert += m.expert_hidden * (2 if model.mlp.gated else 1) + h
    shared = _matrices(model, m.shared_hidden, h) + (h if m.shared_gate else 0)
    return FfnParams(0, replicated, m.num_experts * one_expert, shared)
