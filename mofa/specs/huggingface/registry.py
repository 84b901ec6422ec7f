"""All architectures that are read, by family."""

from __future__ import annotations

from mofa.specs.huggingface import (
    deepseek,
    experts,
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
    remote,
)
from mofa.specs.huggingface.record import Architecture

FAMILIES = (llama, mistral, qwen, deepseek, glm, gemma, granite, olmo, phi, gpt, experts, remote, hybrids)

ARCHITECTURES: tuple[Architecture, ...] = tuple(a for family in FAMILIES for a in family.ARCHITECTURES)
