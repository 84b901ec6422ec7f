"""All tapes of a model: each kind of layer under each recomputation, the ends of the model, the prediction layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mofa.blocks import build
from mofa.blocks.build import BlockKind, BlockTapes
from mofa.blocks.chunks import split_into_token_chunks
from mofa.blocks.context import Context
from mofa.blocks.elementwise import PLAIN, FloatK, maximum
from mofa.blocks.frameworks import primitives_of
from mofa.blocks.frameworks.megatron.captured_ops import captured_end, captured_layer
from mofa.blocks.frameworks.recompute import derive_recompute as recompute_of
from mofa.blocks.op import Op
from mofa.blocks.recomputation import NO_RECOMPUTE
from mofa.specs.strategy import RecomputeSpec

MOST_CACHED = 16
"""Contexts of one combination whose tapes are kept, 0.2 to 0.4 MiB each. [-]"""


@dataclass(frozen=True)
class ModelTapes:
    """Every block by its name; of the layers the forward ops and the largest activation, the same in all modes. [B]"""

    blocks: dict[str, BlockTapes]
    layer_ops: tuple[Op, ...]
    largest_activation: FloatK


def layer_label(kind: BlockKind, spec: RecomputeSpec) -> str:
    """The name of a kind of layer under a recomputation."""
    return f"{kind.name} recompute={spec}"


def kept_label(label: str) -> str:
    """The name of the same layer where it leaves on the device what others offload.

    >>> kept_label("dense recompute=none")
    'dense recompute=none kept'
    """
    return f"{label} kept"


def model_tapes(ctx: Context, modes: tuple[RecomputeSpec, ...]) -> ModelTapes:
    """The tapes of a model.

    Those of one combination are kept for who asks again: tapes depend on nothing but their context, which strategies
    share that differ in what blocks do not depend on, such as the pipeline.
    """
    return cached_tapes(ctx, modes) if isinstance(ctx.tp, PLAIN) else _described(ctx, modes)


@lru_cache(maxsize=MOST_CACHED)
def cached_tapes(ctx: Context, modes: tuple[RecomputeSpec, ...]) -> ModelTapes:
    """As :func:`model_tapes`, of one combination."""
    return _described(ctx, modes)


def _described(ctx: Context, modes: tuple[RecomputeSpec, ...]) -> ModelTapes:
    framework, model = ctx.framework, ctx.model
    p = primitives_of(framework)
    tapes: dict[str, BlockTapes] = {}
    ops: list[Op] = []
    largest: FloatK = 0.0
    halves: build.Halves = {}
    for kind in build.block_kinds(model):
        forward = build.layer_forward_tape(ctx, p, kind, halves)
        ops += forward.ops
        for tensor in forward.tensors.values():
            largest = maximum(largest, tensor.bytes) if tensor.kind == "activation" else largest
        chunks_of = {
            c: split_into_token_chunks(forward, c, overlap=framework.chunk_overlap)
            for c in {spec.token_chunks for spec in modes}
        }
        for spec in modes:
            recompute = NO_RECOMPUTE if spec.kind == "none" else recompute_of(framework, spec, forward, model)
            layer_forward = chunks_of[spec.token_chunks] if kind.moe else forward
            layer = build.layer_tapes(ctx, p, kind, recompute, layer_forward)
            tapes[layer_label(kind, spec)] = captured_layer(layer, ctx, moe=kind.moe)
            if framework.offload.on:
                last = build.layer_tapes(ctx, p, kind, recompute, layer_forward, keeps_activations=True)
                tapes[kept_label(layer_label(kind, spec))] = last
    if model.num_mtp_layers:
        tapes["mtp"] = build.mtp_entry_tapes(ctx, p)
    ends = {
        "embedding": captured_end(build.embedding_tapes(ctx, p), ctx),
        "head": captured_end(build.head_tapes(ctx, p), ctx),
    }
    return ModelTapes({**tapes, **ends}, tuple(ops), largest)
