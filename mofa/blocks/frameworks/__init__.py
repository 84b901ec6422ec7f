"""What each framework launches, keeps and sends: one file or folder a framework, one set of primitives each."""

from __future__ import annotations

from collections.abc import Sequence

from mofa.blocks.context import ArrayK, Context, Primitives
from mofa.blocks.frameworks import fsdp1
from mofa.blocks.frameworks.megatron import local as megatron_local
from mofa.blocks.frameworks.megatron import transformer_engine as megatron
from mofa.blocks.frameworks.torchtitan import layer as torchtitan
from mofa.blocks.op import Op
from mofa.specs.framework import FrameworkSpec

PRIMITIVES: dict[str, Primitives] = {
    "fsdp1": fsdp1.PRIMITIVES,
    "megatron": megatron.PRIMITIVES,
    "megatron-2022": megatron_local.PRIMITIVES,
    "megatron-local": megatron_local.PRIMITIVES,
    "torchtitan": torchtitan.PRIMITIVES,
}


def persistent_buffer_bytes_without_and_with_head(
    framework: FrameworkSpec, ctx: Context, ops: Sequence[Op]
) -> tuple[ArrayK, ArrayK]:
    """Bytes that a framework keeps allocated outside the tapes: without and with the head's share. (K,) [B]

    ``ops`` are the forward ops of the model's blocks.
    """
    if framework.name == "megatron":
        body = megatron.persistent_buffer_bytes(ctx, ops, with_head=False)
        return body, body + megatron.head_persistent_buffer_bytes(ctx)
    if framework.owner_of_layer_modules == "megatron":
        buffers_bytes = megatron_local.persistent_buffer_bytes(ctx)
        return buffers_bytes, buffers_bytes
    return 0.0, 0.0


def primitives_of(framework: FrameworkSpec) -> Primitives:
    """The primitives of a framework."""
    return PRIMITIVES[framework.name]
