"""What a rank holds of its parameters, as ranks have it: :mod:`mofa.cost.weights`."""

from __future__ import annotations

from mofa.cost.weights import flat_buffers, weights_of

__all__ = ["flat_buffers", "weights_of"]
