"""The lives of blocks, as ranks have them: :mod:`mofa.cost.lives`."""

from __future__ import annotations

from mofa.blocks.elementwise import value
from mofa.cost.lives import Deed, Life, life

__all__ = ["Deed", "Life", "life", "value"]
