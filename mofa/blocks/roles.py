"""What blocks and ops are for: roles, and the sets of them that time and memory ask for."""

from __future__ import annotations

from typing import Literal, get_args

BlockRole = Literal["", "embedding", "dense", "experts", "head"]
"""What a block of the model is: an end, a dense layer or one with experts; empty for all others."""
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
Part = Literal["", "experts", "loss", "fsdp"]
"""What of a model issues an op: routed experts, the loss, or FSDP for a block's parameters or for its experts'."""
Purpose = Literal[
    "", "norm", "attention_output", "embedding", "output", "embedding_gradient", "weight_cast", "hold", "copy_out",
    "experts_copy_out", "renewal", "checkpoint_end", "gather_ahead",
]  # fmt: skip
"""What else time and memory ask of an op.

Whose weight it has: a norm's, attention's output's, the embedding's or the output layer's. That it makes the
embedding's gradient, or a 16-bit copy of a weight. A mark whose inputs are held for the next block. A copy of what FSDP
gathered into a tensor for each weight, of a block's own or of its experts'. New probabilities of a layer's dispatcher.
The end of a checkpoint that was made again for weights' gradients. FSDP's gather of a block that is computed next."""
RoutingStep = Literal[
    "", "count", "row_map", "permute", "dispatch", "gather", "sort", "first_product", "unsort", "scatter", "combine",
    "unpermute",
]  # fmt: skip
"""Which step of the tokens' way through the experts an op is; empty for all others.

``count`` counts each expert's tokens. ``row_map`` notes down where rows go. ``permute`` copies rows for the experts;
``unpermute`` adds them back to their tokens. ``dispatch`` sends rows or their probabilities to other ranks' experts;
``combine`` sends them back. ``gather`` and ``scatter`` are between tensor-parallel ranks of one expert. ``sort`` puts
rows in the order of experts; ``unsort`` undoes it. ``first_product`` is the first that experts compute."""
LayerStep = Literal[
    "", "norm", "folded_product", "split", "rope", "join", "kv_exchange", "core", "core_beside", "activation",
    "shared_activation", "residual", "router", "gate", "dispatch_preprocess", "routed", "relayout",
]  # fmt: skip
"""Which step of a layer an op is, where how it is dispatched or captured depends on that; empty for all others.

A ``folded_product`` is a linear whose input is folded to two dimensions, so that its input's gradient is a view.
``split`` and ``join`` take heads apart and together. ``core`` is attention, ``core_beside`` what of it runs beside the
exchange of keys and values. ``gate`` is the router's product, ``router`` the rest of it, ``dispatch_preprocess`` what
Megatron does between a router and the exchange of rows without its host. ``routed`` are ops on routed rows outside the
experts, ``relayout`` changes of their layout over tensor-parallel ranks."""
FsdpUse = Literal["gathered", "gathered_shard", "reduce_input", "reduced", "fsdp"]
TensorUse = Literal["", FsdpUse, "residual", "cast_once", "experts_input"]
"""What a tensor is used for, where time or memory ask.

By FSDP: what is gathered of a block's own parameters, a rank's shard in front of that, the input of a reduction, a
rank's part of its sum; ``fsdp`` is any other. ``residual`` is the residual stream, ``cast_once`` a cast that several
products of a compiled module read, ``experts_input`` what a layer of experts is given."""
FSDP_USES: frozenset[str] = frozenset(get_args(FsdpUse))
"""Of tensors that FSDP declares."""
