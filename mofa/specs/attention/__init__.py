"""Attention kinds: the list of them, and a file for each with its spec and its record.

A kind's record (:class:`mofa.specs.attention.record.AttentionKind`) says what it does. Other rooms ask the record and
never compare names; ``ModelSpec.attention_kind`` has a model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from mofa.specs.attention.gqa import GQA, GqaSpec
from mofa.specs.attention.mla import MLA, MlaSpec
from mofa.specs.attention.record import AttentionKind

AttentionSpec = Annotated[GqaSpec | MlaSpec, Field(discriminator="kind")]
"""What a model's file may write under ``attention``."""
ATTENTION_KINDS: Mapping[str, AttentionKind[Any, Any]] = {kind.name: kind for kind in (GQA, MLA)}
"""All kinds by name."""
MODULES_OF_ATTENTION: Mapping[str, tuple[str, ...]] = {
    module: regions for kind in ATTENTION_KINDS.values() for module, regions in kind.recompute_modules.items()
}
"""Modules that recomputation may name for a kind alone, by the regions whose outputs it discards."""
