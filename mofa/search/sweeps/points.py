"""The points of a sweep: what each plans, with everything that it names read, and the key that it is known by."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from mofa.errors import MofaError, SpecError
from mofa.search.sweeps.code_digest import digest_of_code
from mofa.specs.fault_changes import storage_of_text
from mofa.specs.faults import FaultSpec
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.limited_reads import exists
from mofa.specs.load import bundled_names, load_cluster, load_faults, load_framework, load_workload
from mofa.specs.routing import RoutingSpec
from mofa.specs.sweep_lists import Reference, SweepSearch, SweepSpec, name_in_sweep_table
from mofa.specs.workload import WorkloadSpec
from mofa.specs.written_counts import batch_in_sequences, parse_count

NO_FAILURES = "none"
"""Stands among fault profiles for a run without failures."""


@dataclass(frozen=True)
class PointTask:
    """What a process needs to plan one point."""

    key: str
    """Names the configuration: equal ones have equal keys, in every sweep."""
    workload: WorkloadSpec
    cluster: ClusterSpec
    framework: FrameworkSpec
    faults: FaultSpec | None
    search: SweepSearch


@dataclass(frozen=True)
class SweepPoint:
    """One combination of a sweep."""

    labels: dict[str, Any]
    """What the sweep says of it, as the first columns of its row."""
    usd_per_gpu_hour: float | None
    task: PointTask | None
    """None where what it names cannot be put together."""
    error: str = ""
    """Why it cannot."""


@dataclass(frozen=True)
class _Combination:
    """An entry of every list; None where a list is absent."""

    model: Reference
    cluster: Reference
    gpus: int
    global_batch: str | None
    seq_len: int | None
    tokens: float | None
    routing: RoutingSpec | None
    faults: Reference | None
    price: float | dict[str, float] | None
    framework: str | None


def sweep_points(spec: SweepSpec, folder: Path | None = None) -> list[SweepPoint]:
    """Every point of a sweep, in the order of its lists.

    Parameters
    ----------
    spec
        The lists.
    folder
        Where files that they name are looked up first; where the caller stands if absent.

    Returns
    -------
    list of SweepPoint
        A point each; those that cannot be put together say why.

    Raises
    ------
    SpecError
        If a model, cluster, framework or fault profile cannot be read whatever it is combined with.

    Examples
    --------
    >>> from mofa.specs.sweep_lists import load_sweep
    >>> spec = load_sweep({"models": "llama3-8b", "clusters": "h100-hgx", "gpus": [8, 12]})
    >>> [point.error for point in sweep_points(spec)]
    ['', 'nodes/h100-hgx.yaml: gpus (12) is more than one node of 8 GPUs but not whole nodes; use 8 or 16']
    """
    _refuse_unreadable(spec, folder)
    points = [_point(spec, each, folder) for each in _combinations(spec)]
    # 64 sequences and 4 for each of 16 GPUs are one point
    return list({(*point.labels.values(), point.usd_per_gpu_hour, point.error): point for point in points}.values())


def _combinations(spec: SweepSpec) -> Iterator[_Combination]:
    def entries(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return values or (None,)

    for row in itertools.product(
        spec.models, spec.clusters, spec.gpus, entries(spec.global_batch), entries(spec.seq_len), entries(spec.tokens),
        entries(spec.routing), entries(spec.faults), entries(spec.prices), entries(spec.frameworks),
    ):  # fmt: skip
        yield _Combination(*row)


def _refuse_unreadable(spec: SweepSpec, folder: Path | None) -> None:
    """Refuse names and files that no combination could use, before anything is planned."""
    combinations = {(each.global_batch, each.seq_len, each.tokens, each.gpus): each for each in _combinations(spec)}
    for i, model in enumerate(spec.models):
        with _Named(f"models[{i}]"):
            _refuse_unreadable_model(model, list(combinations.values()), folder)
    for i, cluster in enumerate(spec.clusters):
        with _Named(f"clusters[{i}]"):
            load_cluster(*_place(cluster, "nodes", folder), overrides=_changes(cluster), num_gpus=1)
    for i, framework in enumerate(spec.frameworks):
        with _Named(f"frameworks[{i}]"):
            load_framework(framework)
    for i, profile in enumerate(spec.faults):
        with _Named(f"faults[{i}]"):
            _faults(profile, spec.storage, folder)


def _refuse_unreadable_model(model: Reference, combinations: list[_Combination], folder: Path | None) -> None:
    """Raise the first error of a model that no combination can be made of; else those that cannot are points."""
    first: SpecError | None = None
    for each in combinations:
        try:
            _workload(model, each, folder)
        except SpecError as error:
            first = first or error
        else:
            return
    if first is not None:
        raise first


class _Named:
    """Puts the place of an entry before the error of reading it."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SpecError):
            raise SpecError(f"{self.place}: {error}") from None


def _point(spec: SweepSpec, each: _Combination, folder: Path | None) -> SweepPoint:
    labels: dict[str, Any] = {
        "model": name_in_sweep_table(each.model),
        "cluster": name_in_sweep_table(each.cluster),
        "framework": each.framework,
        "num_gpus": each.gpus,
        "seq_len": each.seq_len,
        "global_batch": None,
        "tokens": each.tokens,
        "routing": None if each.routing is None else str(each.routing),
        "faults": NO_FAILURES if each.faults is None else name_in_sweep_table(each.faults),
    }
    labels["price_case"] = None if len(spec.prices) < 2 else _price_text(each.price)
    usd = each.price[labels["cluster"]] if isinstance(each.price, dict) else each.price
    try:
        workload = _workload(each.model, each, folder)
        labels |= {
            "seq_len": workload.batch.seq_len,
            "global_batch": workload.batch.global_batch,
            "tokens": workload.tokens,
            "routing": str(workload.routing),
        }
        framework = load_framework(each.framework or workload.framework or "megatron")
        labels["framework"] = framework.name
        cluster = load_cluster(*_place(each.cluster, "nodes", folder), overrides=_changes(each.cluster),
                               num_gpus=each.gpus)  # fmt: skip
        faults = None if each.faults is None else _faults(each.faults, spec.storage, folder)
    except MofaError as error:
        return SweepPoint(labels, usd, None, " ".join(str(error).split()))
    key = _key(workload, cluster, framework, faults, spec.search)
    return SweepPoint(labels, usd, PointTask(key, workload, cluster, framework, faults, spec.search))


def _price_text(price: float | dict[str, float] | None) -> str:
    """What stands for one of several prices of a sweep: 2.5, or h100-hgx 2.5 h800-hgx 2."""
    return " ".join(f"{name} {usd:g}" for name, usd in price.items()) if isinstance(price, dict) else f"{price:g}"


def _workload(model: Reference, each: _Combination, folder: Path | None) -> WorkloadSpec:
    """A model's job with the batch, sequences, tokens and routing of a combination."""
    place, changes = _place(model, "workloads", folder)[0], _changes(model)
    words = (each.global_batch or "").split()
    sequences = None
    if words[1:] == ["per", "gpu"]:
        sequences = parse_count(words[0], "2 per gpu") * each.gpus
    elif each.global_batch is not None:
        seq_len = each.seq_len
        if seq_len is None and "tokens" in words:
            seq_len = load_workload(place, overrides=changes).batch.seq_len
        sequences = batch_in_sequences(each.global_batch, seq_len or 1, "global_batch")
    workload = load_workload(
        place, seq_len=each.seq_len, global_batch=sequences, tokens=each.tokens, overrides=changes
    )  # fmt: skip
    if each.routing is None:
        return workload
    routing = each.routing
    if routing.file is not None and folder is not None and exists(folder / routing.file):
        routing = routing.model_copy(update={"file": str(folder / routing.file)})
    return workload.model_copy(update={"routing": routing})


def _faults(profile: Reference, storage: str | None, folder: Path | None) -> FaultSpec | None:
    if profile == NO_FAILURES:
        return None
    faults = load_faults(_place(profile, "fault_profiles", folder)[0], _changes(profile))
    return faults if storage is None else faults.model_copy(update={"storage": storage_of_text(storage, "storage")})


def _place(reference: Reference, kind: str, folder: Path | None) -> tuple[str | Path]:
    """The name or file of an entry; files beside the sweep's come first, bundled names before these."""
    base = reference if isinstance(reference, str) else reference.get("base")
    if not isinstance(base, str) or not base:
        raise SpecError("base is missing or no text; write base: with a name or a file, and what it changes")
    if folder is None or base in bundled_names(cast("Any", kind)) or not exists(folder / base):
        return (base,)
    return (folder / base,)


def _changes(reference: Reference) -> dict[str, object] | None:
    if isinstance(reference, str):
        return None
    return {path: value for path, value in reference.items() if path != "base"} or None


def _key(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, faults: FaultSpec | None,
    search: SweepSearch,
) -> str:  # fmt: skip
    """A digest of everything that a point's plan follows from; the same wherever and whenever it is made."""
    parts = [digest_of_code()]
    parts += [each.model_dump_json() for each in (workload, cluster, framework, search)]
    parts.append("" if faults is None else faults.model_dump_json())
    if workload.routing.file is not None:
        parts.append(_file_digest(workload.routing.file))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@lru_cache(maxsize=16)
def _file_digest(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:  # said when the point is planned
        return ""
