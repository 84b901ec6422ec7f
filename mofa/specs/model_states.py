"""Memory of a model's parameters, gradients and optimizer states, part by part: kinds of layers, embedding, head."""

from __future__ import annotations

from mofa.specs.base import Spec
from mofa.specs.layer_kind_params import params_of_layer_kind, residual_streams_params
from mofa.specs.params import embedding_params, head_params, num_mtp_params
from mofa.specs.workload import WorkloadSpec

WEIGHT_BYTES = 2
"""A bf16 weight. [B/param]"""
GRADIENT_BYTES = 4
"""An fp32 gradient, as Megatron-Core accumulates it. [B/param]"""
STATE_BYTES = 4
"""An fp32 element of a recurrent state. [B/element]"""


class ModelPartStates(Spec):
    """What one part of a model holds for training, over all ranks, before it is sharded or copied."""

    name: str
    contents: str
    """Its mixers and feed-forwards, or what it is."""
    layers: int
    """How many layers are of this kind. [layers]"""
    params: int
    """Parameters of one of them. [params]"""
    mixer_params: int
    """Of these, those of mixers. [params]"""
    routed_params: int
    """Of these, those of routed experts. [params]"""
    total_params: int
    """Parameters of all of them. [params]"""
    weight_bytes: int
    """bf16 weights of all of them. [B]"""
    gradient_bytes: int
    """fp32 gradients of all of them. [B]"""
    optimizer_bytes: int
    """Main copies and moments of all of them. [B]"""
    recurrent_state_bytes: int
    """fp32 recurrent state of one of them and one sequence, with what its convolutions remember. [B]"""


def model_states(workload: WorkloadSpec) -> tuple[ModelPartStates, ...]:
    """What each part of a model with layers of several kinds holds for training.

    Parameters
    ----------
    workload
        Its optimizer and the format of its moments say the states.

    Returns
    -------
    tuple of PartStates
        Each kind of layer, the embedding, the output layer with the final norm, and multi-token-prediction entries
        where there are some. Without these their parameters add up to the model's. Empty for a model whose layers
        have no kinds.
    """
    model = workload.model
    layers = model.layers
    if layers is None:
        return ()
    counts = layers.num_layers_by_kind(model.num_layers)
    parts = []
    for kind in layers.kinds:
        counted = params_of_layer_kind(model, kind)
        state = kind.state_elements + kind.conv_state_elements
        own = (counted.total_params, counted.mixers, counted.routed)
        if counts[kind.name]:
            parts.append(_part(workload, kind.name, kind.contents_text, counts[kind.name], own, state))
    head = head_params(model) + model.hidden * model.tensors_per_norm + residual_streams_params(model)
    output = "final norm" if model.tied_embeddings else "output layer, final norm"
    parts.append(_part(workload, "embedding", "token embedding", 1, (embedding_params(model), 0, 0), 0))
    parts.append(_part(workload, "head", output, 1, (head, 0, 0), 0))
    if model.num_mtp_layers:
        entry = num_mtp_params(model) // model.num_mtp_layers
        parts.append(_part(workload, "prediction", "multi-token prediction", model.num_mtp_layers, (entry, 0, 0), 0))
    return tuple(parts)


def _part(
    workload: WorkloadSpec, name: str, contents: str, layers: int, params: tuple[int, int, int], state: int
) -> ModelPartStates:
    moment_bytes = 4.0 if workload.precision.moments == "fp32" else 2.0
    states = workload.optimizer.traits.main_and_moments_bytes_per_param(moment_bytes)
    total = layers * params[0]
    return ModelPartStates(
        name=name,
        contents=contents,
        layers=layers,
        params=params[0],
        mixer_params=params[1],
        routed_params=params[2],
        total_params=total,
        weight_bytes=WEIGHT_BYTES * total,
        gradient_bytes=GRADIENT_BYTES * total,
        optimizer_bytes=int(states * total),
        recurrent_state_bytes=STATE_BYTES * state,
    )
