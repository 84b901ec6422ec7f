"""Which parts of a step are captured in CUDA graphs, read and written as text.

Megatron-Core 0.16.1 has three ways (core/transformer/transformer_config.py, ``cuda_graph_impl``, ``cuda_graph_scope``):
its own graphs of whole layers (``local``), one graph of all of forward and backward (``local:full_iteration``), and
Transformer Engine's of whole layers or of parts of them (``te``, ``te:attn+moe_router``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self, cast

from pydantic import AfterValidator

Implementation = Literal["none", "local", "te"]
Scope = Literal["full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("none", "local", "te")
PARTS: tuple[Scope, ...] = ("attn", "mlp", "moe", "moe_router", "moe_preprocess")
"""Parts of a layer that Transformer Engine's graphs capture; none named: the whole layer."""
HOW = "use none, local, local:full_iteration, te, or te: with parts of " + "+".join(PARTS)


@dataclass(frozen=True)
class CudaGraphs:
    """What is captured, and by whom.

    >>> str(CudaGraphs.parse("te:moe_router+attn")), CudaGraphs.parse("local").whole_layers
    ('te:attn+moe_router', True)
    """

    implementation: Implementation = "none"
    scope: tuple[Scope, ...] = ()
    """In the order of :data:`PARTS`; empty: whole layers."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Graphs out of their text.

        Raises
        ------
        ValueError
            If Megatron-Core has no such graphs.
        """
        implementation, colon, parts = text.partition(":")
        named = parts.split("+") if colon else []
        offered = {"none": (), "local": ("full_iteration",), "te": PARTS}
        if implementation not in offered:
            raise ValueError(f"cuda_graphs ({text}) is no way to capture a step; {HOW}")
        unknown = [part for part in named if part not in offered[implementation]]
        if unknown:
            raise ValueError(f"cuda_graphs ({text}): {implementation} captures no {unknown[0] or 'nothing'}; {HOW}")
        if len(set(named)) < len(named):
            raise ValueError(f"cuda_graphs ({text}) names a part twice; name each once")
        scope = [part for part in ("full_iteration", *PARTS) if part in named]
        return cls(cast("Implementation", implementation), cast("tuple[Scope, ...]", tuple(scope)))

    def __str__(self) -> str:
        return f"{self.implementation}:{'+'.join(self.scope)}" if self.scope else self.implementation

    @property
    def captures_any(self) -> bool:
        """Whether anything is captured."""
        return self.implementation != "none"

    @property
    def full_iteration(self) -> bool:
        """Whether forward and backward of all micro-batches are one graph."""
        return self.scope == ("full_iteration",)

    @property
    def whole_layers(self) -> bool:
        """Whether a graph holds a whole layer's pass."""
        return self.captures_any and not self.scope

    def captures_part(self, part: Scope) -> bool:
        """Whether the ops of a part of a layer are in a graph."""
        return self.captures_any and (not self.scope or self.full_iteration or part in self.scope)


NO_GRAPHS = CudaGraphs()


def _as_written(text: str) -> str:
    return str(CudaGraphs.parse(text))


CudaGraphsText = Annotated[str, AfterValidator(_as_written)]
"""The text of :class:`CudaGraphs`, its parts in order."""
