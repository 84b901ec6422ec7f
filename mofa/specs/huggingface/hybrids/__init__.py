"""Architectures whose layers are of several kinds, by family."""

from __future__ import annotations

from mofa.specs.huggingface.hybrids import linear_hybrids, mamba, several_shapes, sparse_attention, windows

ARCHITECTURES = tuple(
    a for family in (mamba, linear_hybrids, sparse_attention, several_shapes, windows) for a in family.ARCHITECTURES
)
