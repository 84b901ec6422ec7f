"""The order in which torchtitan's blocks register their modules, which a list of parameters has.

Attention comes first, in the order of its forward; the matrices of a feed-forward layer in the order of their numbers;
experts before the router and the shared ones. Norms come last, in blocks with latent attention between attention and
the rest (models/llama3/model/model.py, deepseek_v3/model/model.py, moe/moe.py).
"""

from __future__ import annotations

from mofa.blocks.context import Context

NORMS_AHEAD, FEED_FORWARD, EXPERTS, ROUTER, SHARED_EXPERTS, NORMS_BEHIND = range(10, 70, 10)
"""Places of a block's modules behind attention's, which is 0."""
MATRIX = {"w1": 0, "w2": 1, "w3": 2}
"""Places of a feed-forward layer's matrices within it."""


def registration_position_of_norms(ctx: Context) -> int:
    """Place of both norms of a block in the order in which its parameters are registered."""
    return NORMS_AHEAD if ctx.model.attention_kind.torchtitan.registers_norms_first else NORMS_BEHIND
