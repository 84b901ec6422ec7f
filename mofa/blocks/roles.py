"""What ops of a backward are for: roles, and the sets of them that time and memory ask for."""

from __future__ import annotations

from typing import Literal

Role = Literal["", "regather", "backward", "dgrad", "wgrad", "grad_cast", "whole", "accumulate", "sum"]
"""What an op of a backward is for; empty for all others, those of a forward among them.

``regather`` is a collective that runs again for a linear, ``backward`` a node of autograd's graph. ``dgrad`` and
``wgrad`` are a linear's products for its input and for its weight. ``grad_cast`` casts a weight's gradient; ``whole``
makes all experts' gradient in one tensor; ``accumulate`` adds a gradient to the parameter's. ``sum`` adds two gradients
of one tensor."""
WEIGHT_ROLES: frozenset[Role] = frozenset({"wgrad", "grad_cast", "whole", "accumulate"})
"""Of ops that make or add a weight's gradient, which zero-bubble schedules put off."""
NODE_ROLES: frozenset[Role] = frozenset({"backward", "dgrad", "whole"})
"""Of ops at which autograd's engine begins a node of its graph."""
PRODUCT_ROLES: frozenset[Role] = frozenset({"dgrad", *WEIGHT_ROLES})
"""Of a linear's products and what follows them."""
CLAIMS = {
    "fsdp.turn": "fsdp.next", "efsdp.turn": "efsdp.next", "fsdp.turn@": "fsdp.next@", "efsdp.turn@": "efsdp.next@",
    "fsdp.previous": "fsdp.reduce_input",
}  # fmt: skip
"""Marks at which a block takes over what the block before it held, and under which name that was held."""
