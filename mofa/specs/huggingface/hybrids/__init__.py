"""Architectures whose layers are of several kinds, by family."""

from __future__ import annotations

from mofa.specs.huggingface.hybrids import linear, mamba, shapes, sparse

ARCHITECTURES = tuple(a for family in (mamba, linear, sparse, shapes) for a in family.ARCHITECTURES)
