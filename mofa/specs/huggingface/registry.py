"""All architectures that are read, by family."""

from __future__ import annotations

from mofa.specs.huggingface import (
    deepseek,
    gemma,
    glm,
    gpt,
    granite,
    hybrids,
    llama,
    mistral,
    olmo,
    phi,
    qwen,
    recent,
    remote,
    sarvam,
    sparse_models,
)
from mofa.specs.huggingface.record import ConfigFamily

FAMILIES = (
    llama, mistral, qwen, deepseek, glm, gemma, granite, olmo, phi, gpt, sarvam, sparse_models, recent, remote,
    hybrids,
)  # fmt: skip

ARCHITECTURES: tuple[ConfigFamily, ...] = tuple(a for family in FAMILIES for a in family.ARCHITECTURES)
