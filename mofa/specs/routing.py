"""Facts of the routing load: how unevenly tokens fall on experts."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mofa.specs.base import Spec


class RoutingSpec(Spec):
    """A distribution of tokens over experts.

    ``balanced``; ``zipf`` with exponent ``s``; ``dirichlet`` with concentration ``alpha`` per expert; ``lognormal``
    with ``sigma`` of the logarithm; ``counts`` from a file with columns iteration, layer, expert, tokens and
    optionally source_rank. ``memory_quantile`` is the quantile over layers, ranks and iterations that memory must
    hold; ``seed`` and ``samples`` make the draws repeatable.
    """

    kind: Literal["balanced", "zipf", "dirichlet", "lognormal", "counts"] = "balanced"
    s: Annotated[float, Field(ge=0, le=10)] | None = None
    alpha: Annotated[float, Field(gt=0, le=1e6)] | None = None
    sigma: Annotated[float, Field(ge=0, le=10)] | None = None
    file: str | None = None
    memory_quantile: float = Field(default=0.999, gt=0.5, le=1.0)
    seed: int = Field(default=0, ge=0)
    samples: int = Field(default=256, ge=1, le=100_000)

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed = {"zipf": "s", "dirichlet": "alpha", "lognormal": "sigma", "counts": "file"}
        for kind, field in needed.items():
            value = getattr(self, field)
            if self.kind == kind and value is None:
                raise ValueError(f"kind: {kind} needs {field}")
            if self.kind != kind and value is not None:
                raise ValueError(f"{field} belongs to kind: {kind}, not to kind: {self.kind}")
        return self
