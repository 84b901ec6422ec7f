"""SWEEP.yaml: what ``mofa sweep`` plans, every combination of a few lists."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mofa.errors import SpecError
from mofa.specs.base import Spec
from mofa.specs.fault_changes import storage_of_text
from mofa.specs.files import did_you_mean, load_yaml, shown_value
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.ranges import MOST_USD, Degree, Tokens
from mofa.specs.routing import RoutingSpec
from mofa.specs.written_counts import doubled_counts, parse_count
from mofa.units import parse_quantity

MOST_POINTS = 10_000
"""Points of a sweep: each is a search of seconds, and a file until the sweep is done. [-]"""


def _listed(value: object) -> object:
    """A value alone as a list of itself."""
    return value if isinstance(value, list | tuple) else [value]


def _distinct(value: object) -> object:
    """A list without what it repeats."""
    items: list[object] = []
    for item in value if isinstance(value, list | tuple) else [value]:
        if item not in items:
            items.append(item)
    return items


def _numbers_of_gpus(value: object) -> object:
    """Numbers of GPUs, with ranges written out."""
    out: list[object] = []
    for item in value if isinstance(value, list | tuple) else [value]:
        out += doubled_counts(item) if isinstance(item, str) else [item]
    return _distinct(out)


def _counts(value: object) -> object:
    """Counts, with those that are written as text read."""
    items = value if isinstance(value, list | tuple) else [value]
    return _distinct([parse_count(item, "8192 or 8K") if isinstance(item, str) else item for item in items])


def _numbers_of_tokens(value: object) -> object:
    items = value if isinstance(value, list | tuple) else [value]
    return _distinct([parse_quantity(item, "tokens") if isinstance(item, str) else item for item in items])


def _batches(value: object) -> object:
    """Batches as text, each checked as far as it can be without a sequence's length."""
    items = value if isinstance(value, list | tuple) else [value]
    out: list[object] = []
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int | str):
            out.append(item)
            continue
        words = str(item).split()
        if words[1:] not in ([], ["tokens"], ["sequences"], ["per", "gpu"]):
            raise ValueError(f'{str(item)[:30]!r} is no batch; write 1024, 1K, "4M tokens" or "2 per gpu"')
        parse_count(words[0] if words else "", '1024, 1K, "4M tokens" or "2 per gpu"')
        out.append(" ".join(words))
    return _distinct(out)


def _routings(value: object) -> object:
    """Routings, with those that are written as text read."""
    items = value if isinstance(value, list | tuple) else [value]
    return [RoutingSpec.parse(item) if isinstance(item, str) else item for item in items]


Reference = str | dict[str, Any]
"""A name or a file, or a mapping with such a ``base`` and dotted paths that it changes."""
References = Annotated[tuple[Reference, ...], BeforeValidator(_distinct), Field(min_length=1)]


class SweepSearch(Spec):
    """How each point is searched; the words are those of ``mofa plan``."""

    fast: bool = False
    """Whether to stop at the closed forms: no plan is played out."""
    refine_seconds: float = Field(default=0.0, ge=0.0, le=86_400.0)
    """How long layouts of each point's best plans are searched; results then differ from run to run. [s]"""
    objective: Literal["tokens", "days", "kwh"] = "tokens"
    """What a point's best plan is best at: tokens/s/GPU, or days or energy of the run with its failures. What takes the
    fewest days of so many GPUs is cheapest too."""
    fix: dict[str, Any] = {}
    """Values, or lists of values, by field of a strategy."""
    maximum: dict[str, Degree] = Field(default={}, alias="max")
    """The most of a degree by its name. [-]"""
    with_: Annotated[tuple[str, ...], BeforeValidator(_listed)] = Field(default=(), alias="with")
    without: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()


class SweepSpec(Spec):
    """{models, clusters, gpus, global_batch, seq_len, tokens, routing, faults, prices, frameworks, storage, search}.

    Every field but the last two is a list, or a value alone; a point is a combination of theirs. What is absent is as
    each workload says. ``models``, ``clusters`` and ``faults`` are names, files, or mappings with such a ``base`` and
    dotted paths that it changes.
    """

    models: References
    clusters: References
    gpus: Annotated[tuple[Degree, ...], BeforeValidator(_numbers_of_gpus), Field(min_length=1)]
    """Numbers of GPUs, and ranges such as 256..1K. [-]"""
    global_batch: Annotated[tuple[str, ...], BeforeValidator(_batches)] = ()
    """Sequences, ``4M tokens``, or sequences ``per gpu``."""
    seq_len: Annotated[tuple[Tokens, ...], BeforeValidator(_counts)] = ()
    """[tokens]"""
    tokens: Annotated[tuple[float, ...], BeforeValidator(_numbers_of_tokens)] = ()
    """To train on. [tokens]"""
    routing: Annotated[tuple[RoutingSpec, ...], BeforeValidator(_routings)] = ()
    """Distributions of tokens over experts."""
    faults: Annotated[tuple[Reference, ...], BeforeValidator(_distinct)] = ()
    """Fault profiles; ``none`` for a run without failures."""
    prices: Annotated[tuple[float | dict[str, float], ...], BeforeValidator(_distinct)] = ()
    """Of a GPU-hour, or mappings of it by cluster. [USD]"""
    frameworks: Annotated[tuple[str, ...], BeforeValidator(_distinct)] = ()
    storage: str | None = None
    """Rate of the storage that all nodes share, or a write and a read rate."""
    search: SweepSearch = SweepSearch()

    @property
    def num_points(self) -> int:
        """Combinations of all lists. [-]"""
        lists = (self.models, self.clusters, self.gpus, self.global_batch, self.seq_len, self.tokens, self.routing,
                 self.faults, self.prices, self.frameworks)  # fmt: skip
        return math.prod(max(len(each), 1) for each in lists)

    @model_validator(mode="after")
    def _check_points(self) -> Self:
        if self.num_points > MOST_POINTS:
            raise ValueError(
                f"its lists combine to {self.num_points:,} points, and {MOST_POINTS:,} are the most, as each is a "
                "search of seconds; shorten a list or write two sweeps"
            )
        return self

    @model_validator(mode="after")
    def _check_storage(self) -> Self:
        if self.storage is not None:
            storage_of_text(self.storage, "storage")
        return self

    @model_validator(mode="after")
    def _check_prices(self) -> Self:
        names = [name_in_sweep_table(cluster) for cluster in self.clusters]
        for prices in self.prices:
            for price in prices.values() if isinstance(prices, dict) else (prices,):
                if not 0.0 <= price <= MOST_USD:
                    raise ValueError(f"prices: {price:g} USD must be at least 0 and at most {MOST_USD:g}")
            if not isinstance(prices, dict):
                continue
            if unknown := [name for name in prices if name not in names]:
                hint = did_you_mean(unknown[0], names)
                raise ValueError(f"prices: {shown_value(unknown[0])} is none of the clusters; {hint}")
            if missing := [name for name in names if name not in prices]:
                raise ValueError(f"prices: {missing[0]} has none; add it, or write one price for all clusters")
        return self


def name_in_sweep_table(reference: Reference) -> str:
    """What a table calls a model, a cluster or a fault profile: its name or file, and what of it is changed.

    Examples
    --------
    >>> name_in_sweep_table("h100-hgx"), name_in_sweep_table({"base": "llama3-8b", "model.num_layers": 16})
    ('h100-hgx', 'llama3-8b model.num_layers=16')
    """
    if isinstance(reference, str):
        return reference
    changes = [f"{path}={value}" for path, value in reference.items() if path != "base"]
    return " ".join([str(reference.get("base", "")), *changes])


def load_sweep(source: str | Path | Mapping[str, Any]) -> SweepSpec:
    """A sweep from its file, or from a mapping with the same fields.

    Parameters
    ----------
    source
        A YAML file, or what it would hold.

    Returns
    -------
    SweepSpec
        The lists, checked; what they name is not read yet.

    Raises
    ------
    SpecError
        If there is no such file, a field is wrong, or the lists combine to too many points.

    Examples
    --------
    >>> load_sweep({"models": "llama3-8b", "clusters": "h100-hgx", "gpus": "8..32"}).gpus
    (8, 16, 32)
    """
    if isinstance(source, Mapping):
        return spec_from_mapping(SweepSpec, dict(source), "sweep")
    where = shown_value(str(source), 200)
    raw = load_yaml(source, where)
    if "models" not in raw and {"model", "batch"} <= set(raw):
        raise SpecError(f"{where}: is a workload; a sweep has lists of models, clusters and gpus (docs/sweep.md)")
    return spec_from_mapping(SweepSpec, raw, where)
