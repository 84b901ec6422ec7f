"""What each framework launches, keeps and sends: one file a framework, one set of primitives each."""

from __future__ import annotations

from mofa.blocks.context import Primitives
from mofa.blocks.frameworks import megatron, megatron_local, torchtitan
from mofa.specs.framework import FrameworkSpec

PRIMITIVES: dict[str, Primitives] = {
    "megatron": megatron.PRIMITIVES,
    "megatron-local": megatron_local.PRIMITIVES,
    "torchtitan": torchtitan.PRIMITIVES,
}


def primitives_of(framework: FrameworkSpec) -> Primitives:
    """The primitives of a framework."""
    return PRIMITIVES[framework.name]
