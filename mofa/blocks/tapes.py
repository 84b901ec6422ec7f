"""All tapes of a model: each kind of layer under each recomputation, the ends of the model, the prediction layer."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from mofa.blocks import build
from mofa.blocks.build import BlockTapes, CostedLayerKind
from mofa.blocks.chunks import split_into_token_chunks
from mofa.blocks.context import Context
from mofa.blocks.elementwise import PLAIN, FloatK, maximum
from mofa.blocks.frameworks import primitives_of
from mofa.blocks.frameworks.megatron.captured_ops import graph_captured_embedding_or_head, graph_captured_layer
from mofa.blocks.frameworks.recompute import recompute_of_layer as recompute_of
from mofa.blocks.op import Op, Tape
from mofa.blocks.recomputation import (
    NO_RECOMPUTE,
    Recompute,
    calls_without_autograd_record,
    with_calls_without_autograd_record,
)
from mofa.specs.strategy import RecomputeSpec

MOST_CACHED = 16
"""Contexts of one combination whose tapes are kept, 0.2 to 0.4 MiB each and 0.1 MiB for each further mode. [-]"""


KnownTimes = dict[Hashable, dict[int, tuple[Tape, Any]]]
"""Tapes with what they take, by the ``id`` of each, by all that it depends on besides them: for who times the same
again. The tapes stay, so that no others get their ``id``."""


@dataclass(frozen=True)
class ModelTapes:
    """Every block by its name; of each kind of layer the forward ops, and the largest activation of all, the same in
    all modes. [B]"""

    blocks: dict[str, BlockTapes]
    layer_ops: tuple[tuple[Op, ...], ...]
    largest_activation: FloatK
    known_times: KnownTimes | None = None
    """Where there is one combination."""


def layer_label(kind: CostedLayerKind, spec: RecomputeSpec) -> str:
    """The name of a kind of layer under a recomputation."""
    return f"{kind.name} recompute={spec}"


def kept_layer_label(label: str) -> str:
    """The name of the same layer where it leaves on the device what others offload.

    >>> kept_layer_label("dense recompute=none")
    'dense recompute=none kept'
    """
    return f"{label} kept"


def model_tapes(ctx: Context, modes: tuple[RecomputeSpec, ...]) -> ModelTapes:
    """The tapes of a model.

    Those of one combination are kept for who asks again: tapes depend on nothing but their context, which strategies
    share that differ in what blocks do not depend on, such as the pipeline.
    """
    return (cached_context_tapes(ctx) if isinstance(ctx.tp, PLAIN) else ContextTapes(ctx)).tapes_in_modes(modes)


@lru_cache(maxsize=MOST_CACHED)
def cached_context_tapes(ctx: Context) -> ContextTapes:
    """The tapes of a context of one combination."""
    return ContextTapes(ctx)


class ContextTapes:
    """The tapes of a model under one context, each described when it is first asked for."""

    def __init__(self, ctx: Context) -> None:
        self.ctx, self.primitives = ctx, primitives_of(ctx.framework)
        halves: build.Halves = {}
        self.forwards = {
            kind: build.layer_forward_tape(ctx, self.primitives, kind, halves)
            for kind in build.distinct_layer_kinds(ctx.model)
        }
        self.known_times: KnownTimes = {}
        self._unrecorded: dict[tuple[int, ...], tuple[Tape, Tape]] = {}
        self._chunked: dict[tuple[CostedLayerKind, int], Tape] = {}
        self._layers: dict[tuple[CostedLayerKind, RecomputeSpec], dict[str, BlockTapes]] = {}

    def tapes_in_modes(self, modes: tuple[RecomputeSpec, ...]) -> ModelTapes:
        """Layers in these modes, and the ends."""
        tapes: dict[str, BlockTapes] = {}
        for kind in self.forwards:
            for spec in modes:
                tapes |= self._layer(kind, spec)
        known = self.known_times if isinstance(self.ctx.tp, PLAIN) else None
        return ModelTapes({**tapes, **self._ends}, self._layer_ops, self._largest_activation, known)

    def _layer(self, kind: CostedLayerKind, spec: RecomputeSpec) -> dict[str, BlockTapes]:
        """A kind of layer in a mode by its name, and where others offload as it is without."""
        known = self._layers.get((kind, spec))
        if known is not None:
            return known
        framework, forward = self.ctx.framework, self.forwards[kind]
        recompute = NO_RECOMPUTE if spec.kind == "none" else recompute_of(framework, spec, forward, self.ctx.model)
        if kind.moe:
            forward = self._in_chunks(kind, spec.token_chunks)
        given = self.ctx, self.primitives, kind, recompute, forward
        label = layer_label(kind, spec)
        layer = graph_captured_layer(build.layer_tapes(*given), self.ctx, moe=kind.moe)
        tapes = {label: self._as_recorded(layer, recompute)}
        if framework.offloaded_activations.offloads_any:
            beside = build.layer_tapes(*given, keeps_activations=True)
            tapes[kept_layer_label(label)] = self._as_recorded(beside, recompute)
        self._layers[kind, spec] = tapes
        return tapes

    def _as_recorded(self, layer: BlockTapes, recompute: Recompute) -> BlockTapes:
        """A layer whose forward runs without autograd's record where it is to run again; alike ones share a tape."""
        calls = calls_without_autograd_record(layer.forward, recompute)
        if not calls:
            return layer
        key = id(layer.forward), *map(id, calls)
        if key not in self._unrecorded:  # what an id names stays alive beside it
            self._unrecorded[key] = layer.forward, with_calls_without_autograd_record(layer.forward, calls)
        return replace(layer, forward=self._unrecorded[key][1])

    def _in_chunks(self, kind: CostedLayerKind, number: int) -> Tape:
        """A layer's forward of so many token chunks."""
        if (kind, number) not in self._chunked:
            overlap = self.ctx.framework.chunk_overlap
            self._chunked[kind, number] = split_into_token_chunks(self.forwards[kind], number, overlap=overlap)
        return self._chunked[kind, number]

    @cached_property
    def _ends(self) -> dict[str, BlockTapes]:
        """The entry of a prediction, if any, the embedding and the head."""
        ctx, p = self.ctx, self.primitives
        entry = {"mtp": build.mtp_entry_tapes(ctx, p)} if ctx.model.num_mtp_layers else {}
        return {
            **entry,
            "embedding": graph_captured_embedding_or_head(build.embedding_tapes(ctx, p), ctx),
            "head": graph_captured_embedding_or_head(build.head_tapes(ctx, p), ctx),
        }

    @cached_property
    def _layer_ops(self) -> tuple[tuple[Op, ...], ...]:
        return tuple(forward.ops for forward in self.forwards.values())

    @cached_property
    def _largest_activation(self) -> FloatK:
        largest: FloatK = 0.0
        for forward in self.forwards.values():
            for tensor in forward.tensors.values():
                largest = maximum(largest, tensor.bytes) if tensor.kind == "activation" else largest
        return largest
