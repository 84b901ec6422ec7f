"""Parameters and FLOPs of a model, counted out of its structure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mofa.specs.ffn_params import dense_ffn_params, experts_params
from mofa.specs.layer_kind_params import (
    all_layers_params,
    mtp_entry_params,
    refuse_unmodelled_layer_kinds,
    residual_streams_params,
    routed_experts_params,
)
from mofa.specs.model import ModelSpec


@dataclass(frozen=True)
class LayerParams:
    """Parameters of one layer by what shards them. [params]

    ``matrices_tp`` are split over tp; ``replicated`` are held whole by every tp rank (norms, latent projections,
    router, biases that are added after the reduction); ``routed`` are all routed experts, split over ep and etp.
    """

    matrices_tp: int
    replicated: int
    routed: int
    shared: int

    @property
    def total_params(self) -> int:
        """All of them, routed experts included. [params]"""
        return self.matrices_tp + self.replicated + self.routed + self.shared


def _norm(model: ModelSpec, width: int) -> int:
    return width * model.tensors_per_norm


def attention_params(model: ModelSpec) -> tuple[int, int]:
    """Parameters of one attention layer without norms over the hidden width: split over tp, replicated. [params]"""
    return model.attention_kind.params(model.attention, model.hidden, model.tensors_per_norm)


@lru_cache(maxsize=64)
def layer_params(model: ModelSpec, moe: bool) -> LayerParams:
    """Parameters of one layer, dense or with experts. [params]

    Raises
    ------
    SpecError
        If the model has layers of several kinds, which :mod:`mofa.specs.layer_kind_params` counts.
    """
    refuse_unmodelled_layer_kinds(model)
    split, replicated = attention_params(model)
    h = model.hidden
    replicated += model.norms_per_layer * _norm(model, h)
    ffn = experts_params(model) if moe else dense_ffn_params(model, model.mlp.ffn_hidden or 0)
    return LayerParams(split + ffn.matrices_tp, replicated + ffn.replicated, ffn.routed, ffn.shared)


def layer_parameter_tensors(model: ModelSpec, moe: bool, *, packed: bool) -> tuple[int, int]:
    """Parameter tensors of one layer, and of one routed expert. [tensors]

    ``packed`` is Megatron's: q, k and v are one matrix, gate and up are one, an expert has its own. Else every matrix
    is a tensor, and those of all experts are one (torchtitan).

    Examples
    --------
    Llama: two norms, qkv, projection, two of the MLP; in torchtitan seven matrices and two norms.

    >>> from mofa.specs.load import load_workload
    >>> llama = load_workload("llama3-8b").model
    >>> layer_parameter_tensors(llama, False, packed=True), layer_parameter_tensors(llama, False, packed=False)
    ((6, 0), (9, 0))
    """
    norm = model.tensors_per_norm
    up = 2 if model.mlp.gated and not packed else 1
    count = model.norms_per_layer * norm + model.attention_kind.num_tensors(model.attention, norm, packed)
    if not moe:
        return count + up + 1 + (up + 1 if model.mlp.bias else 0), 0
    assert model.moe is not None
    m = model.moe
    count += 1 + m.router_bias + m.correction_bias + (up + 1 + m.shared_gate if m.shared_hidden else 0)
    expert = (up + 1) * (2 if m.expert_bias else 1)
    return (count, expert) if packed else (count + expert, 0)


def mtp_layer_params(model: ModelSpec) -> LayerParams:
    """Parameters of one multi-token-prediction layer without the embedding and head that it shares. [params]

    Two norms, a projection from 2h to h, one layer like the last, and a final norm (DeepSeek-V3, section 2.2).
    """
    layer = layer_params(model, model.is_moe_layer(model.num_layers - 1))
    extra = 2 * model.hidden * model.hidden + 3 * _norm(model, model.hidden)
    return LayerParams(layer.matrices_tp, layer.replicated + extra, layer.routed, layer.shared)


def embedding_params(model: ModelSpec) -> int:
    """Parameters of the token embedding and, where learned, the position embedding. [params]"""
    rows = model.vocab + (model.max_positions or 0 if model.positions == "learned" else 0)
    return rows * model.hidden + (_norm(model, model.hidden) if model.embedding_norm else 0)


def head_params(model: ModelSpec) -> int:
    """Parameters of the output layer, of its bias alone where it is tied, without the final norm. [params]"""
    return (0 if model.tied_embeddings else model.vocab * model.hidden) + (model.vocab if model.head_bias else 0)


def num_params(model: ModelSpec) -> int:
    """All parameters of the main model; multi-token-prediction layers are counted apart by :func:`num_mtp_params`."""
    if model.layers is not None:
        layers = all_layers_params(model) + residual_streams_params(model)
    else:
        dense, moe = model.num_dense_layers, model.num_moe_layers
        layers = dense * layer_params(model, moe=False).total_params if dense else 0
        layers += moe * layer_params(model, moe=True).total_params if moe else 0
    return layers + embedding_params(model) + head_params(model) + _norm(model, model.hidden)


def num_mtp_params(model: ModelSpec) -> int:
    """Parameters of the multi-token-prediction layers, embedding and head shared. [params]"""
    if not model.num_mtp_layers:
        return 0
    return model.num_mtp_layers * (
        mtp_layer_params(model).total_params if model.layers is None else mtp_entry_params(model)
    )


def num_active_params(model: ModelSpec) -> int:
    """Parameters that one token uses: all but the routed experts it is not sent to; embeddings included. [params]"""
    if model.moe is None:
        return num_params(model)
    routed = (
        routed_experts_params(model) if model.layers else model.num_moe_layers * layer_params(model, moe=True).routed
    )
    return num_params(model) - (routed - routed * model.moe.top_k // model.moe.num_experts)


def num_active_params_without_embedding(model: ModelSpec) -> int:
    """Parameters that one token uses, without the rows that its input is looked up in. [params]

    A tied embedding stays, because the output layer multiplies with it; position embeddings and their norm go with the
    lookup.

    Examples
    --------
    A card that says 5.1 billion active parameters of gpt-oss-120b counts no input embedding.

    >>> from mofa.specs.load import load_workload
    >>> model = load_workload("gpt-oss-120b").model
    >>> num_active_params(model), num_active_params_without_embedding(model)
    (5711982912, 5132849472)
    """
    looked_up = embedding_params(model) - (model.vocab * model.hidden if model.tied_embeddings else 0)
    return num_active_params(model) - looked_up
