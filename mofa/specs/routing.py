"""Facts of the routing load: how unevenly tokens fall on experts."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from mofa.specs.base import Spec
from mofa.specs.ranges import LoadFactor, LoadFactorAboveMean

Preset = Literal["memfine-iteration-7"]
PRESETS: tuple[Preset, ...] = get_args(Preset)
_PARAMETER = {"zipf": "s", "dirichlet": "alpha", "lognormal": "sigma", "preset": "preset"}


class RoutingSpec(Spec):
    """A distribution of tokens over the experts of a layer, of one micro-batch.

    ``balanced``: exactly even. ``zipf``: the i-th most popular expert gets a share in proportion to ``i**-s``.
    ``dirichlet``: shares drawn with concentration ``alpha`` per expert. ``lognormal``: shares in proportion to
    ``exp(sigma * z)``, z standard normal. ``counts``: counted, from a CSV or Parquet file with columns iteration,
    layer, expert, tokens and optionally source_rank. ``preset``: a published distribution that grows with depth, put
    together again from what was printed of it (:mod:`mofa.routing.presets`). Which expert is popular is drawn anew for
    every layer and iteration.
    """

    kind: Literal["balanced", "zipf", "dirichlet", "lognormal", "counts", "preset"] = "balanced"
    s: Annotated[float, Field(ge=0, le=10)] | None = None
    """Exponent of ``zipf``; 0 is balanced. [-]"""
    alpha: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    """Concentration of ``dirichlet``; the larger, the more even. [-]"""
    sigma: Annotated[float, Field(ge=0, le=10)] | None = None
    """Standard deviation of the logarithm, of ``lognormal``; 0 is balanced. [-]"""
    file: Annotated[str, Field(min_length=1)] | None = None
    """The counts, relative to the file that names it."""
    preset: Preset | None = None
    capacity_factor: LoadFactor | None = None
    """Copies beyond this multiple of an even share of a rank's tokens are dropped, as by Megatron's
    ``--moe-expert-capacity-factor``; none are where absent. Changes numerics. [-]"""
    pad_to_capacity: bool = False
    """Experts below their capacity compute on zeros up to it, as with ``--moe-pad-expert-input-to-capacity``."""
    rank_capacity_factor: LoadFactorAboveMean | None = None
    """Rows that each rank's experts are padded to, as a multiple of their balanced number, as by Megatron's
    ``--moe-expert-rank-capacity-factor``; a step in which some rank gets more runs again without. [-]"""
    memory_quantile: float = Field(default=0.999, gt=0.5, le=1.0)
    """Quantile over layers, ranks and iterations that memory must hold. [-]"""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    steps_before: int | None = Field(default=None, ge=0, le=10**9)
    """Steps that the run has made before those that are estimated, in which libraries get to know the shapes that
    uneven routing makes; a long run's where absent. [-]"""
    drifts: bool = True
    """Whether the popularity of experts moves from step to step in a run's first steps, as where routers learn; not
    where tokens are drawn."""
    samples: int = Field(default=256, ge=1, le=100_000)
    """Draws of one layer's load, spread over whole iterations (rounded up); a file has its own."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed = {"zipf": "s", "dirichlet": "alpha", "lognormal": "sigma", "counts": "file", "preset": "preset"}
        for kind, field in needed.items():
            value = getattr(self, field)
            if self.kind == kind and value is None:
                raise ValueError(f"kind: {kind} needs {field}")
            if self.kind != kind and value is not None:
                raise ValueError(f"{field} belongs to kind: {kind}, not to kind: {self.kind}")
        if self.pad_to_capacity and self.capacity_factor is None:
            raise ValueError("pad_to_capacity needs capacity_factor")
        if self.rank_capacity_factor is not None and self.capacity_factor is not None:
            raise ValueError("rank_capacity_factor drops nothing and capacity_factor does; give one of them")
        return self

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``balanced``, ``zipf:0.9``, ``dirichlet:0.5``, ``lognormal:1`` or a preset's name.

        >>> RoutingSpec.parse("zipf:0.9").s
        0.9
        """
        name, colon, value = text.strip().partition(":")
        if name in PRESETS and not colon:
            return cls.model_validate({"kind": "preset", "preset": name})
        if name == "balanced" and not colon:
            return cls()
        if name not in ("zipf", "dirichlet", "lognormal"):
            known = ("balanced", "zipf:S", "dirichlet:ALPHA", "lognormal:SIGMA", *PRESETS)
            close = get_close_matches(name[:40], [word.partition(":")[0] for word in known], n=1)
            meant = next((word for word in known if close and word.partition(":")[0] == close[0]), None)
            hint = f"did you mean {meant}?" if meant else f"write {', '.join(known[:-1])} or {known[-1]}"
            raise ValueError(f"routing ({text[:40]!r}) is unknown; {hint}")
        field = _PARAMETER[name]
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"routing ({text[:40]!r}): {field} is no number; write {name}:1") from None
        return cls.model_validate({"kind": name, field: number})

    def __str__(self) -> str:
        """The text that :meth:`parse` reads; of counts, their file.

        >>> str(RoutingSpec(kind="zipf", s=0.9)), str(RoutingSpec())
        ('zipf:0.9', 'balanced')
        """
        if self.kind in ("balanced", "preset"):
            return self.preset or "balanced"
        if self.kind == "counts":
            return f"counts of {self.file}"
        return f"{self.kind}:{getattr(self, _PARAMETER[self.kind]):g}"
