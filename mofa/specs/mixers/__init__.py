"""Mixers: what in a layer moves information between tokens.

A mixer's spec has its sizes, ``params`` of one layer, the elements of its recurrent state (0 without one), its
``title``, and ``refused_as``, by which steps with it are refused, empty where its steps are modelled. To add one, write
its spec and add it to the list.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mofa.specs.mixers.linear_attention import GatedDeltaNetSpec, KimiDeltaSpec, LightningSpec
from mofa.specs.mixers.softmax_attention import (
    CompressedAttentionSpec,
    FactorizedAttentionSpec,
    GatedAttentionSpec,
    ModelAttentionSpec,
    OtherAttentionSpec,
    SparseAttentionSpec,
)
from mofa.specs.mixers.state_space import GatedRecurrentUnitSpec, Mamba1Spec, Mamba2Spec

MixerSpec = Annotated[
    ModelAttentionSpec
    | OtherAttentionSpec
    | Mamba1Spec
    | Mamba2Spec
    | GatedRecurrentUnitSpec
    | GatedDeltaNetSpec
    | KimiDeltaSpec
    | LightningSpec
    | SparseAttentionSpec
    | CompressedAttentionSpec
    | FactorizedAttentionSpec
    | GatedAttentionSpec,
    Field(discriminator="kind"),
]
"""What a model's file may write under a layer kind's ``mixers``."""
