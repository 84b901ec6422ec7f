"""Parameters and states of a model whose layers are of several kinds, counted kind by kind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mofa.errors import SpecError
from mofa.specs.ffn_params import dense_ffn_params, experts_params
from mofa.specs.layer_kinds import LayerKind, LayersSpec
from mofa.specs.model import ModelSpec


def refuse_unmodelled_layer_kinds(model: ModelSpec) -> None:
    """Refuse a step of layers that are not modelled yet, by name.

    Raises
    ------
    SpecError
        If the model's layers are of several kinds.
    """
    if model.layers is not None:
        what = model.layers.unmodelled_text(model.num_layers)
        raise SpecError(f"{model.name}: {what}; mofa show workload has its parameters and the memory of its states")


@dataclass(frozen=True)
class LayerKindParams:
    """Parameters of one layer of a kind. [params]

    ``norms`` also has what mixes residual streams; ``ffns`` are dense feed-forwards, routers and shared experts.
    """

    mixers: int
    norms: int
    ffns: int
    routed: int

    @property
    def total_params(self) -> int:
        """All of them, routed experts included. [params]"""
        return self.mixers + self.norms + self.ffns + self.routed


@lru_cache(maxsize=256)
def params_of_layer_kind(model: ModelSpec, kind: LayerKind) -> LayerKindParams:
    """Parameters of one layer of a kind. [params]

    The hyper-connection of a branch reads all n residual streams, n h. It weighs each stream into the branch, the
    branch into each stream, and each pair of streams: 2n + n^2 numbers with a bias each, and three scales.

    References
    ----------
    Hugging Face transformers 5.24, ``models/deepseek_v4/modeling_deepseek_v4.py``, ``DeepseekV4HyperConnection``.
    """
    layers = _layers(model)
    mixers = sum(mixer.params(model.attention, model.hidden) for mixer in kind.mixers)
    norms = kind.norms * model.hidden * model.tensors_per_norm
    n = layers.residual_streams
    if n > 1:
        weights = 2 * n + n * n
        norms += kind.norms * (weights * (n * model.hidden + 1) + 3)
    ffns = routed = 0
    for ffn in kind.ffns:
        if ffn.kind == "moe":
            counted = experts_params(model, hashed=ffn.hashed)
        else:
            counted = dense_ffn_params(model, ffn.ffn_hidden or model.mlp.ffn_hidden or 0)
        ffns += sum(counted) - counted.routed
        routed += counted.routed
    return LayerKindParams(mixers, norms, ffns, routed)


def all_layers_params(model: ModelSpec) -> int:
    """Parameters of all layers. [params]"""
    layers = _layers(model)
    counts = layers.num_layers_by_kind(model.num_layers)
    return sum(counts[kind.name] * params_of_layer_kind(model, kind).total_params for kind in layers.kinds)


def routed_experts_params(model: ModelSpec) -> int:
    """Parameters of the routed experts of all layers. [params]"""
    layers = _layers(model)
    counts = layers.num_layers_by_kind(model.num_layers)
    return sum(counts[kind.name] * params_of_layer_kind(model, kind).routed for kind in layers.kinds)


def mtp_entry_params(model: ModelSpec) -> int:
    """Parameters of one multi-token-prediction entry without the embedding and head that it shares. [params]

    Its layers, a projection from 2h to h, three norms, and what joins its residual streams.
    """
    layers = _layers(model)
    names = layers.prediction or (layers.kind_of(model.num_layers - 1).name,)
    own = sum(params_of_layer_kind(model, layers.kind_named(name)).total_params for name in names)
    h = model.hidden
    return own + 2 * h * h + 3 * h * model.tensors_per_norm + residual_streams_params(model)


def residual_streams_params(model: ModelSpec) -> int:
    """Parameters of what joins residual streams behind the layers, 0 with a single stream. [params]"""
    n = _layers(model).residual_streams
    return n * (n * model.hidden + 1) + 1 if n > 1 else 0


def _layers(model: ModelSpec) -> LayersSpec:
    assert model.layers is not None
    return model.layers
