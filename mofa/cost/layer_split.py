"""How many layers each virtual chunk of a pipeline holds: as a strategy's layout says, else as the framework splits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from mofa.specs.framework_traits import TRAITS
from mofa.specs.layouts.framework_split import SplitError, megatron_layers_by_chunk, torchtitan_layers_by_chunk
from mofa.specs.layouts.pipeline_layout import PipelineLayout
from mofa.specs.layouts.read import read_layout
from mofa.specs.model import ModelSpec
from mofa.specs.params import layer_params
from mofa.specs.shared_facts import load_shared_facts

SplitBy = Literal["strategy", "framework", "mofa"]


@dataclass(frozen=True)
class LayerSplit:
    """The layers of each virtual chunk as the layout of a pipeline, and who made it."""

    layout: PipelineLayout
    made_by: SplitBy
    """``mofa`` where the framework splits the layers over these degrees by no rule of its own, and needs a layout."""


@lru_cache(maxsize=2048)
def layer_split_of(
    model: ModelSpec, pp: int, vpp: int, framework: str, splits: str = "even", layout: str = ""
) -> LayerSplit:
    """The layout of a model's layers over virtual chunks.

    A strategy's ``layout`` says it. Without one the framework splits by itself
    (:mod:`mofa.specs.layouts.framework_split`; DeepSpeed by ``splits``). Where Megatron refuses the degrees, the layout
    is the one that makes the heaviest chunk lightest, with the head and multi-token-prediction layers counted. With one
    or two layers fewer than chunks the last chunk holds the head alone and the first the embedding alone (Llama 3 405B:
    126 layers in 128 chunks).

    Raises
    ------
    ValueError
        If a layout is refused, or there are too few layers for the chunks.
    """
    rule = TRAITS[framework].split_rule
    num_layers, num_predictions, num_chunks = model.num_layers, model.num_mtp_layers, pp * vpp
    if layout:
        return LayerSplit(read_layout(layout, pp, vpp, num_layers, num_predictions, rule), "strategy")
    spare = num_chunks - num_layers
    if spare > (2 if pp > 1 else 0):
        raise ValueError(f"{num_layers} layers over pp {pp} x vpp {vpp} = {num_chunks} chunks leave a chunk empty")
    by: SplitBy = "framework"
    if splits != "even" and pp > 1:
        sizes = _greedy_sizes(num_layers, num_chunks, ends=splits == "greedy-embeddings")
    elif rule.counts_ends:
        sizes = list(torchtitan_layers_by_chunk(num_layers, num_chunks))
    elif spare > 0:  # Megatron's layouts may give the last chunk the head alone, and the first the embedding alone
        sizes, by = [0] * (spare - 1) + [1] * num_layers + [0], "mofa"
    else:
        try:
            sizes = list(megatron_layers_by_chunk(num_layers, pp, vpp))
        except SplitError:
            sizes, by = _balanced_sizes(model, num_chunks), "mofa"
    return LayerSplit(PipelineLayout.of_layers(sizes, num_predictions), by)


def active_params_of_layer(model: ModelSpec, moe: bool) -> float:
    """Parameters that a token uses in one layer: its relative cost when layers are balanced. [params]"""
    p = layer_params(model, moe)
    routed = p.routed * model.moe.top_k / model.moe.num_experts if moe and model.moe else 0.0
    return p.total_params - p.routed + routed


NEXT_TO = np.arange(-2, 2)
"""Cuts that are compared, from the first behind which the chunks ahead are the heavier: sums are rounded. [-]"""


def _balanced_sizes(model: ModelSpec, num_chunks: int) -> list[int]:
    """Contiguous chunk sizes, at least one layer each, that make the heaviest chunk lightest.

    Of several that do, every cut, from the last on, is the earliest one. Weights are numbers of parameters, whose sums
    are exact, so that no rounding decides.
    """
    weight_of = {
        moe: active_params_of_layer(model, moe) for moe in {model.is_moe_layer(i) for i in range(model.num_layers)}
    }
    weights = np.array([weight_of[model.is_moe_layer(i)] for i in range(model.num_layers)])
    head = float(model.vocab * model.hidden)
    tail = head + model.num_mtp_layers * (weights[-1] + head)
    total = np.concatenate([[0.0], np.cumsum(weights)])
    n = model.num_layers
    best = np.concatenate([[np.inf], total[1:] + load_shared_facts().layers.embedding_param_cost.value * head])
    """The heaviest of the chunks so far, of each number of layers in them; more layers are no lighter."""
    back = []
    for chunk in range(1, num_chunks):
        last = tail if chunk == num_chunks - 1 else 0.0
        choice = np.zeros(n + 1, dtype=np.intp)
        ends = np.arange(chunk + 1, n + 1)
        # this chunk gets lighter by a later cut, those ahead heavier: the best cut is next to where they meet
        meet = chunk + np.searchsorted(best[chunk:] + total[chunk:], total[ends] + last)
        cuts = np.clip(meet + NEXT_TO[:, None], chunk, ends - 1)
        heaviest = np.maximum(best[cuts], total[ends] - total[cuts] + last)
        # among equals the earlier cut: the first stages keep the most micro-batches, so they get fewer layers
        chosen = np.argmin(heaviest, axis=0), np.arange(len(ends))
        choice[ends], best = cuts[chosen], np.full(n + 1, np.inf)
        best[ends] = heaviest[chosen]
        back.append(choice)
    sizes, end = [], n
    for choice in reversed(back):
        start = int(choice[end])
        sizes.append(end - start)
        end = start
    sizes.append(end)
    return sizes[::-1]


def _greedy_sizes(num_layers: int, num_chunks: int, *, ends: bool) -> list[int]:
    """DeepSpeed's: the smallest size of the fullest stage, which all stages have until none is left.

    ``ends``: the embedding and the head count as a layer each (deepspeed/runtime/utils.py, ``partition_balanced``).

    Raises
    ------
    ValueError
        If a stage gets no layer.

    Examples
    --------
    >>> _greedy_sizes(78, 12, ends=False)[-2:], _greedy_sizes(70, 12, ends=True)[:2]
    ([7, 1], [5, 6])
    """
    items = num_layers + 2 * ends
    most = -(-items // num_chunks)
    sizes = [max(min(most, items - most * i), 0) for i in range(num_chunks)]
    sizes[0] -= ends
    sizes[-1] -= ends
    if min(sizes) < 1:
        raise ValueError(f"{num_layers} layers over {num_chunks} stages of up to {most} leave a stage without a layer")
    return sizes
