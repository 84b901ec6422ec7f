"""What users name or write, into specs: workloads, clusters, frameworks, faults (runs: :mod:`mofa.specs.run_files`)."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from mofa.errors import SpecError
from mofa.specs.earlier_names import with_current_override_names
from mofa.specs.faults import FaultSpec, PowerDrawSpec
from mofa.specs.files import (
    bundled_dir,
    bundled_names,
    data_dir,
    did_you_mean,
    find_bundled_or_user_file,
    hardware_suggestion,
    load_json,
    load_yaml,
    read_text,
    shown_value,
)
from mofa.specs.framework import FRAMEWORK_NAMES, FrameworkSpec
from mofa.specs.framework_traits import TRAITS
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.hardware import ClusterSpec, GpuSpec
from mofa.specs.implied_facts import implied_facts
from mofa.specs.limited_reads import is_folder
from mofa.specs.nearest_node import bundled_node_for_gpu
from mofa.specs.overrides import parse_set_options, parse_strategy, refuse_non_mapping, refuse_other_gpu, with_overrides
from mofa.specs.profiles import find_gpu_file, is_gpu_file, profile_mapping_of_text
from mofa.specs.scaling import rescaled_gpu, rescaled_host, rescaled_node, with_rescaled_capacity
from mofa.specs.strategy_defaults import complete_strategy
from mofa.specs.workload import WorkloadSpec
from mofa.specs.workload_template import refuse_unfilled

__all__ = [
    "bundled_names", "complete_strategy", "data_dir", "load_cluster", "load_faults", "load_framework",
    "load_workload", "load_yaml", "parse_set_options", "parse_strategy", "spec_from_mapping", "with_routing_path",
]  # fmt: skip


def load_workload(
    ref: str | Path,
    *,
    seq_len: int | None = None,
    global_batch: int | None = None,
    tokens: float | str | None = None,
    overrides: Mapping[str, object] | None = None,
) -> WorkloadSpec:
    """Load a training job, from a bundled name or a file.

    Parameters
    ----------
    ref
        Name of a bundled workload, a workload's YAML file, a Hugging Face ``config.json`` or a folder that holds one.
    seq_len, global_batch, tokens
        Replace the file's; a Hugging Face config needs the first two. [tokens], [sequences], [tokens]
    overrides
        Dotted paths below the workload, such as ``{"model.num_layers": 4}``. A routing file named here is looked
        up from where the caller stands, one that the workload's file names from beside it.

    Returns
    -------
    WorkloadSpec
        The model, its batch, tokens, numerics and routing, all checked.

    Raises
    ------
    SpecError
        If there is no such file, or what it holds is wrong.

    Examples
    --------
    >>> load_workload("llama3-8b", seq_len=4096).batch.seq_len
    4096
    """
    path, where = find_bundled_or_user_file(ref, "workloads", "mofa show models lists them")
    refuse_non_mapping(overrides, where)
    named = {"batch.seq_len": seq_len, "batch.global_batch": global_batch, "tokens": tokens}
    changes: dict[str, object] = {field: value for field, value in named.items() if value is not None}
    for field, value in changes.items():
        if overrides and overrides.get(field, value) != value:
            raise SpecError(
                f"{where}: {field} is set to {shown_value(str(overrides[field]))} and to {value}; say it once"
            )
    changes |= dict(overrides or {})
    if is_folder(path) or path.suffix == ".json":
        path, where = (path / "config.json", f"{where}/config.json") if is_folder(path) else (path, where)
        raw = _huggingface_workload(path, where, changes)
    else:
        raw = load_yaml(path, where)
    raw = with_overrides(raw, changes, where)
    refuse_unfilled(raw, where)
    spec = spec_from_mapping(WorkloadSpec, raw, _changed(where, changes))
    if spec.framework is not None and spec.framework not in FRAMEWORK_NAMES:
        raise SpecError(
            f"{where}: framework ({shown_value(spec.framework)}) is unknown; "
            f"{did_you_mean(spec.framework, FRAMEWORK_NAMES)}"
        )
    return with_routing_path(spec, None if {"routing", "routing.file"} & set(changes) else path.parent)


def _huggingface_workload(path: Path, where: str, changes: Mapping[str, object]) -> dict[str, Any]:
    from mofa.specs.huggingface import read_config  # records of all architectures, which no other file needs

    folder = path.absolute().parent.name
    name = folder if path.name == "config.json" and folder else path.stem
    model, notes = read_config(load_json(path, where), where, name=name)
    options = {"batch.seq_len": "--seq-len", "batch.global_batch": "--global-batch"}
    batch = changes.get("batch")
    given = set(changes) | {f"batch.{key}" for key in (batch if isinstance(batch, Mapping) else {})}
    missing = [option for field, option in options.items() if field not in given]
    if missing:
        raise SpecError(f"{where}: a Hugging Face config does not say how to train; give {' and '.join(missing)}")
    return {"name": name, "source": model.source, "model": model.model_dump(), "notes": notes or None}


OFTEN_ABSENT = (
    "gpu.curves.chip_spread", "gpu.curves.step_jitter", "node.slow_nodes.share", "node.slow_nodes.slowdown",
)  # fmt: skip
"""Facts that many profiles have not, and that are set by a bare value all the same."""


def load_cluster(name_or_path: str | Path, num_gpus: int, overrides: Mapping[str, object] | None = None) -> ClusterSpec:
    """Load a cluster of GPUs in nodes of one type.

    Parameters
    ----------
    name_or_path
        Name of a bundled node, or a node's YAML file; its GPU is looked up in ``../gpus`` and beside it, then
        among the bundled ones.
    num_gpus
        GPUs, in whole nodes where it is more than one. [-]
    overrides
        Dotted paths below the cluster, such as ``{"gpu.memory_bytes": "96 GiB"}``. A fact set to a bare value becomes
        assumed; setting a GPU's memory alone scales its capacity with it.

    Returns
    -------
    ClusterSpec
        The GPU, the node and how many GPUs there are; every number has its provenance and source.

    Raises
    ------
    SpecError
        If there is no such node or GPU, what a file holds is wrong, or the GPUs are no whole nodes.

    Examples
    --------
    >>> cluster = load_cluster("h100-hgx", 16)
    >>> cluster.num_gpus // cluster.node.gpus_per_node
    2
    >>> load_cluster("h100-hgx", 8, {"gpu.memory_bytes": "96 GiB"}).gpu.memory_bytes.provenance
    'assumed'
    """
    if not overrides and name_or_path in bundled_names("nodes"):
        return _bundled_cluster(str(name_or_path), num_gpus)
    return _cluster(name_or_path, num_gpus, overrides)


@lru_cache(maxsize=64)
def _bundled_cluster(name: str, num_gpus: int) -> ClusterSpec:
    """So many GPUs of a bundled node as it is, read once: every run of a file of runs asks for it."""
    return _cluster(name, num_gpus, None)


def _cluster(name_or_path: str | Path, num_gpus: int, overrides: Mapping[str, object] | None) -> ClusterSpec:
    path, where = find_bundled_or_user_file(name_or_path, "nodes", "mofa show hardware lists them")
    refuse_other_gpu(overrides, where)
    overrides = with_current_override_names(overrides) if overrides else None
    if overrides and overrides.get("num_gpus", num_gpus) != num_gpus:
        said = shown_value(str(overrides["num_gpus"]))
        raise SpecError(f"{where}: num_gpus is set to {said}, but the GPUs asked for are {num_gpus}; say it once")
    if path.parent != bundled_dir("nodes") and is_gpu_file(path):
        gpu_name, near = Path(path).stem, bundled_node_for_gpu(load_yaml(path, where))
        raise SpecError(
            f"{where}: is a GPU's file, and a cluster is a node's; name one that says gpu: {shown_value(gpu_name)} "
            f"(mofa new node --like {near} --gpu {shown_value(gpu_name)})"
        )
    node_text = read_text(path, where)
    name = _gpu_of(node_text, where)
    gpu_path = find_gpu_file(name, path.parent)
    if gpu_path is None:
        raise SpecError(f"{where}: gpu ({shown_value(name)}) is unknown; {hardware_suggestion(name, 'gpus')}")
    is_bundled = gpu_path.parent == bundled_dir("gpus")
    gpu_where = f"gpus/{gpu_path.name}" if is_bundled else shown_value(str(gpu_path), 200)
    texts = node_text, read_text(gpu_path, gpu_where)
    if not overrides and type(num_gpus) is int:
        return _as_written(where, gpu_where, *texts, num_gpus)
    node, gpu = profile_mapping_of_text(texts[0], "nodes", where), profile_mapping_of_text(texts[1], "gpus", gpu_where)
    raw = {"name": node.get("name"), "gpu": gpu, "node": node, "num_gpus": num_gpus}
    changed = with_overrides(raw, overrides, where, OFTEN_ABSENT)
    if overrides and isinstance(changed.get("gpu"), dict):
        changed = {**changed, "gpu": rescaled_host(rescaled_gpu(changed["gpu"], gpu), gpu)}
    if overrides and isinstance(changed.get("node"), dict):
        changed = {**changed, "node": rescaled_node(changed["node"], node)}
    given = {str(key) for key in overrides or {}}
    scales = "gpu.memory_bytes" in given and not any(key.startswith("gpu.capacity_bytes") for key in given)
    if scales and isinstance(changed.get("gpu"), dict):  # all of it, until it can be scaled
        changed["gpu"] = {**changed["gpu"], "capacity_bytes": changed["gpu"]["memory_bytes"]}
    cluster = spec_from_mapping(ClusterSpec, changed, _changed(where, overrides))
    return with_rescaled_capacity(cluster, spec_from_mapping(ClusterSpec, raw, where)) if scales else cluster


@lru_cache(maxsize=32)
def _gpu_of(text: str, where: str) -> str:
    """The GPU that a node's file names."""
    name = profile_mapping_of_text(text, "nodes", where).get("gpu")
    if not isinstance(name, str):
        raise SpecError(f"{where}: gpu is missing or no text; name a GPU, {did_you_mean('', bundled_names('gpus'))}")
    return name


def _like(kind: str, text: str) -> str:
    """What a file may say in place of all facts: the bundled GPU or node that it is like; empty where it says one."""
    if re.search(r"^like:", text, re.MULTILINE):
        return ""
    bundled_kind = "GPU" if kind == "gpu" else kind
    return f", or write like: with a bundled {bundled_kind}'s name and only what differs (mofa new {kind})"


@lru_cache(maxsize=64)
def _as_written(where: str, gpu_where: str, node_text: str, gpu_text: str, num_gpus: int) -> ClusterSpec:
    """A cluster with nothing changed; one text is parsed once, which takes longer than many estimates."""
    node, gpu = profile_mapping_of_text(node_text, "nodes", where), profile_mapping_of_text(gpu_text, "gpus", gpu_where)
    raw = with_overrides({"name": node.get("name"), "gpu": gpu, "node": node, "num_gpus": num_gpus}, None, where)
    try:
        return spec_from_mapping(ClusterSpec, raw, where, or_else=_like("node", node_text))
    except SpecError:
        # a GPU's mistake stands in its own file
        spec_from_mapping(GpuSpec, raw["gpu"], gpu_where, or_else=_like("gpu", gpu_text))
        raise


def load_framework(
    name_or_mapping: str | Mapping[str, object],
    overrides: Mapping[str, object] | None = None,
    where: str = "framework",
) -> FrameworkSpec:
    """Load a framework's profile with the options of a run.

    Parameters
    ----------
    name_or_mapping
        A name such as ``megatron``, ``megatron-local`` or ``torchtitan``, or a mapping with ``name`` and any option.
    overrides
        Dotted paths below the framework, such as ``{"compile": True}``.
    where
        Begins error messages.

    Returns
    -------
    FrameworkSpec
        What the framework launches, keeps and sends by default, with the options given.

    Raises
    ------
    SpecError
        If the framework or an option is unknown, or options contradict each other.

    Examples
    --------
    >>> load_framework("torchtitan").data_parallel
    'fsdp'
    >>> load_framework("torchtitan", {"compile": True}).compile
    True
    """
    options = {"name": name_or_mapping} if isinstance(name_or_mapping, str) else dict(name_or_mapping)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise SpecError(f"{where}: name is missing or no text; {did_you_mean('', FRAMEWORK_NAMES)}")
    if name not in FRAMEWORK_NAMES:
        raise SpecError(
            f"{where}: name ({shown_value(name) or 'empty'}) is unknown; {did_you_mean(name, FRAMEWORK_NAMES)}"
        )
    refuse_non_mapping(overrides, "framework")
    if overrides and overrides.get("name", name) != name:
        other = shown_value(str(overrides["name"]))
        raise SpecError(f"{where}: name is set to {other}, but the framework asked for is {name}; say it once")
    if not options and not overrides:
        return _bundled_framework(name)
    where = f"{where} {name}"
    raw = copy.deepcopy(_framework_file(name))
    said = {**options, **(overrides or {})}
    said = {**implied_facts({k: v for k, v in said.items() if k != "deepspeed" or TRAITS[name].has_deepspeed}), **said}
    return spec_from_mapping(FrameworkSpec, with_overrides(raw, said, where), _changed(where, overrides))


@lru_cache
def _bundled_framework(name: str) -> FrameworkSpec:
    """A bundled profile as it is, read once: an estimate of a workload alone asks for it every time."""
    return spec_from_mapping(FrameworkSpec, _framework_file(name), f"framework {name}")


@lru_cache
def _framework_file(name: str) -> dict[str, Any]:
    """What is written in a bundled profile, read once: every run changes a copy of it."""
    return load_yaml(bundled_dir("framework_profiles") / f"{name}.yaml", f"framework_profiles/{name}.yaml")


def load_faults(ref: str | Path | None, overrides: Mapping[str, object] | None = None) -> FaultSpec:
    """Load the facts of long runs: reliability, restarts, checkpoints, storage, price, power.

    Parameters
    ----------
    ref
        Name of a bundled profile, such as ``llama3``, or a YAML file; None for one that has the overrides alone.
    overrides
        Dotted paths below the profile, such as ``{"reliability.failures_per_node_day": 0.004}``.

    Returns
    -------
    FaultSpec
        The facts; what the file lacks leaves the figures that need it unknown.

    Raises
    ------
    SpecError
        If there is no such file, or what it holds is wrong.

    Examples
    --------
    The failures of a node in a day, as Meta's RSC-1 cluster had them:

    >>> load_faults("rsc-1").reliability.failures_per_node_day.value
    0.0065
    """
    raw: dict[str, Any] = {"name": "options", "source": "set by the user"}
    where = "--set faults"
    if ref is not None:
        path, where = find_bundled_or_user_file(ref, "fault_profiles", "see mofa show faults")
        raw = load_yaml(path, where)
    if any(path.startswith("power.") for path in overrides or ()):  # the model's own facts can be changed too
        raw = {**raw, "power": {**PowerDrawSpec().model_dump(exclude_none=True), **(raw.get("power") or {})}}
    return spec_from_mapping(FaultSpec, with_overrides(raw, overrides, where), _changed(where, overrides))


def _changed(where: str, changes: Mapping[str, object] | None) -> str:
    """What messages call a file some of whose fields were changed."""
    return (
        f"{where} with {shown_value(', '.join(f'{path}={v}' for path, v in changes.items()), 80)}" if changes else where
    )


def with_routing_path(spec: WorkloadSpec, folder: Path | None) -> WorkloadSpec:
    """A workload whose file of routing counts is looked up in this folder, where it has one with a relative path.

    Parameters
    ----------
    spec
        The job.
    folder
        Where its file is; None leaves the path as it is.

    Returns
    -------
    WorkloadSpec
        The same but for the path.

    Examples
    --------
    >>> with_routing_path(load_workload("llama3-8b"), None).routing.file is None
    True
    """
    file = spec.routing.file
    if file is None or folder is None or Path(file).is_absolute():
        return spec
    routing = spec.routing.model_copy(update={"file": str(folder / file)})
    return spec.model_copy(update={"routing": routing})
