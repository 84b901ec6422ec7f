"""What each framework launches, keeps and sends: one file a framework, one set of primitives each."""

from __future__ import annotations

import numpy as np

from mofa.blocks.context import ArrayK, Context, Primitives
from mofa.blocks.frameworks import megatron, megatron_local, torchtitan
from mofa.specs.framework import FrameworkSpec

PRIMITIVES: dict[str, Primitives] = {
    "megatron": megatron.PRIMITIVES,
    "megatron-local": megatron_local.PRIMITIVES,
    "torchtitan": torchtitan.PRIMITIVES,
}


def persistent_buffers(framework: FrameworkSpec, ctx: Context, *, with_head: bool) -> ArrayK:
    """Bytes that a framework keeps allocated outside the tapes, with or without the head's share. (K,) [B]"""
    if framework.name == "megatron":
        return megatron.persistent_buffers(ctx, with_head=with_head)
    if framework.name == "megatron-local":
        return megatron_local.persistent_buffers(ctx, with_head=with_head)
    return np.zeros_like(ctx.tp)


def primitives_of(framework: FrameworkSpec) -> Primitives:
    """The primitives of a framework."""
    return PRIMITIVES[framework.name]
