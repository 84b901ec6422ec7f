"""Files of GPUs and nodes that say what they are like, and only what differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field

from mofa.errors import SpecError
from mofa.specs.base import Fact, RatioFact, Spec
from mofa.specs.copied_facts import Folder, bundled_profile_mapping, mark_all_as_transferred
from mofa.specs.curve_ratios import curves_scaled_by_ratios
from mofa.specs.files import bundled_names, did_you_mean, shown_value
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.hardware import GpuSpec, NodeSpec
from mofa.specs.scaling import capacity_scaled_with_memory, rescaled_node

FITTED: Mapping[Folder, str] = {"gpus": "curves", "nodes": "collectives"}
"""The field of each file that holds fitted forms, which are rescaled by its facts."""


OF_DATASHEETS = (
    "memory_bytes", "memory_bandwidth_bytes_per_s", "num_sms", "l2_bytes", "host_link_bytes_per_s", "tdp_w",
    "bandwidth_bytes_per_s", "host_memory_bytes",
)  # fmt: skip
"""Facts that a datasheet says; a bare value of another one is assumed."""


class LikeAnotherProfile(Spec):
    """What a file says that is like another's, beside the facts that differ."""

    like: Annotated[str, Field(min_length=1)]
    """Name of a bundled GPU or node."""
    rates_over_like: dict[Literal["bf16", "fp8", "fp32", "attention"], RatioFact] = {}
    """Of a GPU: rates of large products by format, and of attention, over those of the GPU that it is like, measured
    on both by one program. They scale the curves in place of the peaks. [-]"""


HEADS = ("intra", "nic", "peak_flops_per_s")
"""Mappings that every profile has: one below which a file leaves out all lines is as the profile's that it is like."""


def expand_like(raw: Mapping[str, Any], folder: Folder, where: str) -> dict[str, Any]:
    """A file's mapping with everything that it takes from the profile that it is like.

    Parameters
    ----------
    raw
        What the file holds: ``name``, ``like``, and facts that differ, each with value, provenance and source, or its
        value alone. That is then of the datasheet that ``source`` names, or assumed where datasheets do not say it.
    folder
        Whether it is a GPU's or a node's.
    where
        Begins error messages.

    Returns
    -------
    dict
        ``raw`` itself where it is like nothing. Facts that the file does not say are ``transferred`` where they were
        measured; a GPU's curves and a node's collectives are rescaled and ``assumed``, but for those that the file
        has. So is a GPU's capacity where the file says another memory alone.

    Raises
    ------
    SpecError
        If there is no such profile, a bare value has no source, or some formats' peaks, or the NICs of a node with
        another number of GPUs, are left unsaid.
    """
    if "like" not in raw:
        return dict(raw)
    said = spec_from_mapping(
        LikeAnotherProfile, {key: raw[key] for key in ("like", "rates_over_like") if key in raw}, where
    )
    if said.like not in bundled_names(folder):
        raise SpecError(
            f"{where}: like ({shown_value(said.like)}) is no bundled profile; "
            f"{did_you_mean(said.like, bundled_names(folder))}"
        )
    if folder == "nodes" and said.rates_over_like:
        raise SpecError(f"{where}: rates_over_like is a GPU's; write it into the GPU's file")
    base = mark_all_as_transferred(expanded_profile(folder, said.like), said.like)
    own = {key: raw[key] for key in raw if key not in ("like", "rates_over_like", "source", FITTED[folder])}
    own = {key: item for key, item in own.items() if item is not None or key not in HEADS}
    with_facts = _merged({**base, "name": None}, _as_facts(own, raw.get("source"), where, ""))
    if "name" not in own:
        del with_facts["name"]  # to be missed by the check
    if folder == "nodes":
        scaled = rescaled_node({**with_facts, **_sizes(own, base, said.like, where)}, base)
    else:
        formats = with_facts.get("peak_flops_per_s")
        if "peak_flops_per_s" in own and isinstance(formats, dict):
            with_facts["peak_flops_per_s"] = _peaks(own["peak_flops_per_s"], formats, said.like, where)
        if "memory_bytes" in own and "capacity_bytes" not in own:
            with_facts |= capacity_scaled_with_memory(with_facts, base, said.like)
        rates: dict[str, float] = {format_: fact.value for format_, fact in said.rates_over_like.items()}
        scaled = {**with_facts, "curves": curves_scaled_by_ratios(with_facts, base, rates)}
    fitted = FITTED[folder]
    return {**scaled, fitted: _merged(scaled.get(fitted, {}), raw[fitted])} if fitted in raw else scaled


@cache
def expanded_profile(folder: Folder, name: str) -> dict[str, Any]:
    """A bundled profile with what it takes from another one; not to be changed.

    Examples
    --------
    >>> expanded_profile("nodes", "h100-hgx")["gpus_per_node"]
    8
    """
    return expand_like(bundled_profile_mapping(folder, name), folder, f"{folder}/{name}.yaml")


def _peaks(own: Any, merged: Mapping[str, Any], like: str, where: str) -> dict[str, Any]:
    """Peaks of all formats, of which a file says all or none, and null of one that it has not."""
    unsaid = [format_ for format_ in merged if isinstance(own, Mapping) and format_ not in own]
    if unsaid:
        names = ", ".join(f"peak_flops_per_s.{format_}" for format_ in unsaid)
        raise SpecError(
            f"{where}: {names}: missing beside the peaks that are given, and {like} has them; write each, or null "
            "where the GPU has none"
        )
    return {format_: fact for format_, fact in merged.items() if fact is not None}


def _sizes(own: Mapping[str, Any], base: Mapping[str, Any], like: str, where: str) -> dict[str, Any]:
    """GPUs of a node's fast domain that go with the node's, which are another number than those of ``like``."""
    gpus, before = own.get("gpus_per_node"), base.get("gpus_per_node")
    if gpus is None or gpus == before or type(gpus) is not int or gpus < 1:  # what is no number is refused later
        return {}
    nic = own.get("nic")
    if not isinstance(nic, Mapping) or "num_per_node" not in nic:
        raise SpecError(
            f"{where}: nic.num_per_node: missing beside gpus_per_node ({shown_value(str(gpus))}), and {like} has "
            f"{base['nic']['num_per_node']} for {before} GPUs; write it"
        )
    if "gpus_per_domain" in own or base.get("gpus_per_domain") != before:
        return {}
    return {"gpus_per_domain": gpus}


def _merged(base: Any, own: Any) -> Any:
    """What a file says over what it takes: facts and curves whole, mappings key by key."""
    if not isinstance(own, Mapping) or not isinstance(base, Mapping) or _is_whole(own) or _is_whole(base):
        return own
    return {**base, **{key: _merged(base.get(key), item) for key, item in own.items()}}


def _is_whole(value: Mapping[str, Any]) -> bool:
    return "value" in value or "form" in value


def _as_facts(own: Mapping[str, Any], source: object, where: str, prefix: str) -> dict[str, Any]:
    """Bare values of facts as facts of the datasheet that the file names."""
    made: dict[str, Any] = {}
    for key, item in own.items():
        path = f"{prefix}{key}"
        if isinstance(item, Mapping):
            made[key] = dict(item) if _is_whole(item) else _as_facts(item, source, where, f"{path}.")
        elif isinstance(item, list):
            made[key] = [
                _as_facts(entry, source, where, f"{path}[{i}].") if isinstance(entry, Mapping) else entry
                for i, entry in enumerate(item)
            ]
        elif item is not None and (key in _fact_names() or prefix == "peak_flops_per_s."):
            if isinstance(source, str) and 0 < len(source) < 3:
                raise SpecError(f"{where}: source ({source!r}) must have at least 3 characters; name the datasheet")
            if not isinstance(source, str) or not source:
                raise SpecError(
                    f"{where}: {path} ({shown_value(str(item))}) is a value alone; add a line source: with the "
                    "datasheet "
                    "that such values are from"
                )
            provenance = "datasheet" if key in OF_DATASHEETS or prefix == "peak_flops_per_s." else "assumed"
            made[key] = {"value": item, "provenance": provenance, "source": source}
        else:
            made[key] = item
    return made


@cache
def _fact_names() -> frozenset[str]:
    """Names of all facts of GPUs and nodes, curves apart."""
    of_gpus, of_nodes = _facts_below(GpuSpec, {"curves", "peak_flops_per_s"}), _facts_below(NodeSpec, {"collectives"})
    return frozenset(of_gpus) | frozenset(of_nodes)


def _facts_below(spec: type[BaseModel], without: set[str]) -> Iterator[str]:
    for name, field in spec.model_fields.items():
        for kind in () if name in without else _types_in(field.annotation):
            if issubclass(kind, Fact):
                yield name
            elif issubclass(kind, Spec):
                yield from _facts_below(kind, without)


def _types_in(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    for inner in get_args(annotation):
        yield from _types_in(inner)
