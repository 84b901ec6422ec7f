"""Facts of the routing load: how unevenly tokens fall on experts."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mofa.specs.base import Spec


class RoutingSpec(Spec):
    """A distribution of tokens over the experts of a layer, of one micro-batch.

    ``balanced``: exactly even. ``zipf``: the i-th most popular expert gets a share in proportion to ``i**-s``.
    ``dirichlet``: shares drawn with concentration ``alpha`` per expert. ``lognormal``: shares in proportion to
    ``exp(sigma * z)``, z standard normal. ``counts``: counted, from a CSV or Parquet file with columns iteration,
    layer, expert, tokens and optionally source_rank. Which expert is popular is drawn anew for every layer and
    iteration.
    """

    kind: Literal["balanced", "zipf", "dirichlet", "lognormal", "counts"] = "balanced"
    s: Annotated[float, Field(ge=0, le=10)] | None = None
    """Exponent of ``zipf``; 0 is balanced. [-]"""
    alpha: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    """Concentration of ``dirichlet``; the larger, the more even. [-]"""
    sigma: Annotated[float, Field(ge=0, le=10)] | None = None
    """Standard deviation of the logarithm, of ``lognormal``; 0 is balanced. [-]"""
    file: Annotated[str, Field(min_length=1)] | None = None
    """The counts, relative to the file that names it."""
    memory_quantile: float = Field(default=0.999, gt=0.5, le=1.0)
    """Quantile over layers, ranks and iterations that memory must hold. [-]"""
    seed: int = Field(default=0, ge=0)
    samples: int = Field(default=256, ge=1, le=100_000)
    """Draws of one layer's load, spread over whole iterations (rounded up); a file has its own."""

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
