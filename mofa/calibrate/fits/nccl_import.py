"""Runs of nccl-tests into a node's profile: for links that nobody here could measure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mofa.calibrate.fits import network
from mofa.calibrate.fits.fit import fit_collective_curve
from mofa.calibrate.fits.folder import BASES
from mofa.calibrate.fits.nccl_tests import NcclTestsRun, read_nccl_tests_output
from mofa.calibrate.fits.network import NetworkFacts, NetworkRun, NetworkRunErrors
from mofa.calibrate.fits.profile import curve_profile_entry
from mofa.calibrate.shapes.families import MIN_POINTS
from mofa.cost.kernels.collectives import Fabric, collective_time
from mofa.cost.kernels.topology import ProcessGroup
from mofa.errors import SpecError
from mofa.specs.files import bundled_names, load_yaml, profile_as_yaml
from mofa.specs.hardware import ClusterSpec, NodeSpec
from mofa.specs.like_profiles import expand_like
from mofa.specs.limited_reads import is_plain_file
from mofa.specs.load import load_cluster
from mofa.specs.nccl import FILE as NCCL_FILE
from mofa.specs.nccl import load_nccl_facts
from mofa.specs.write_files import write_file_atomically

if TYPE_CHECKING:
    from mofa.blocks.work import CollectiveKind

LEAST_BYTES = 1024
"""Smaller payloads say nothing that a curve from 4 KiB on needs. [B]"""
MAX_FILES = 256
"""Each is fitted without itself as well: more take minutes. [-]"""
MOST_ERROR = 0.5
"""A run that no facts of the network bring nearer is of other links than the profile's. [-]"""


@dataclass(frozen=True)
class NodeProfileChanges:
    """What changed in a profile: numeric facts by their dotted names, and curves of collectives."""

    profile: Path
    facts: dict[str, float]
    curves: tuple[str, ...]
    runs: tuple[tuple[Path, NcclTestsRun], ...]
    errors: dict[str, NetworkRunErrors]
    """Of each file whose ranks span several fast domains, where they gave the network's latency as well."""


def import_nccl_tests_runs(files: Sequence[Path], profile: Path | str) -> NodeProfileChanges:
    """Put what runs measured into a node profile, and say what changed.

    ``profile`` is a node's YAML or the name of one below ``hardware_profiles/nodes``. Ranks on several hosts measure
    the network interfaces, ranks inside a fast domain its links.

    Raises
    ------
    SpecError
        If a file is not of nccl-tests, was measured on another GPU than the profile's, or with another NCCL than the
        others or than any whose collectives are known; the profile stays as it is.

    Notes
    -----
    Between domains, five sizes and more of all runs together give the latency of a hop and the shares of the ports'
    rate (:mod:`mofa.calibrate.fits.network`); fewer give the share alone that lets the planner's own formula give the
    measured time of the largest payload. Inside a domain that share is the link's, and five sizes and more also become
    a curve of that collective over that many GPUs, as `mofa calibrate fit` writes it. All-reduce is imported as it ran,
    with in-switch reduction or without: the profile's ``nvls_factor``, which the planner puts on top, is taken out.
    """
    if len(files) > MAX_FILES:
        raise SpecError(f"{len(files)} files are more than {MAX_FILES}; give those of the largest sizes")
    runs = [(file, read_nccl_tests_output(file)) for file in files]
    path = _profile_path(profile)
    _check_versions(runs)
    node = load_yaml(path)
    clusters = [_cluster(path, node, run) for _, run in runs]
    for (file, run), cluster in zip(runs, clusters, strict=True):
        _check_gpu(file, run, path, cluster.gpu.name)
    groups = [_group_of(file, run, cluster.node) for (file, run), cluster in zip(runs, clusters, strict=True)]
    placed = list(zip(runs, clusters, groups, strict=True))
    outside = [each for each in placed if bool(each[2].crosses_domains[0])]
    facts: dict[str, float] = {}
    curves: list[str] = []
    for (file, run), cluster, group in placed:
        if not bool(group.crosses_domains[0]):
            facts |= _put_share(file, run, group, cluster, "intra", node, path)
            curve = _add_curve(file, run, node, cluster.node.nvls_factor.value, _source([run], [file]))
            curves += [] if curve is None else [curve]
    errors: dict[str, NetworkRunErrors] = {}
    of_network = [_network_run(file, run, group) for (file, run), _, group in outside]
    if sum(len(run.time_s) for run in of_network) >= MIN_POINTS:
        of_network_facts, errors = _put_network([each[0] for each in outside], of_network, outside[0][1], node, path)
        facts |= of_network_facts
    else:
        for (file, run), cluster, group in outside:
            facts |= _put_share(file, run, group, cluster, "nic", node, path)
    write_file_atomically(path, profile_as_yaml(node).encode(), replaces_input=True)
    return NodeProfileChanges(path, facts, tuple(curves), tuple(runs), errors)


def _check_versions(runs: Sequence[tuple[Path, NcclTestsRun]]) -> None:
    """Refuse runs of several NCCLs, and of one that no known collective was measured with."""
    said = load_nccl_facts().nccl_version
    first, last = (tuple(map(int, version.split("."))) for version in said.split(" to "))
    known: tuple[Path, tuple[int, int]] | None = None
    for file, run in runs:
        if run.nccl is None:
            continue
        name = ".".join(map(str, run.nccl))
        if run.hosts > 1 and not first <= run.nccl <= last:
            raise SpecError(
                f"{file}: ran with NCCL {name}; what collectives do between nodes is known of {said} ({NCCL_FILE}): "
                "run nccl-tests with one of these"
            )
        if known is not None and known[1] != run.nccl:
            other = ".".join(map(str, known[1]))
            raise SpecError(
                f"{file}: ran with NCCL {name}, but {known[0]} with {other}; give runs of the one that will train"
            )
        known = file, run.nccl


def _cluster(path: Path, node: dict[str, Any], run: NcclTestsRun) -> ClusterSpec:
    """As many nodes as a run used, as the planner reads them."""
    each = expand_like(node, "nodes", str(path)).get("gpus_per_node")
    if type(each) is not int or each < 1:
        raise SpecError(f"{path}: no node profile (gpus_per_node is missing); give one that `mofa plan` reads")
    return load_cluster(path, run.hosts * each)


def _put_share(
    file: Path,
    run: NcclTestsRun,
    group: ProcessGroup,
    cluster: ClusterSpec,
    level: str,
    node: dict[str, Any],
    path: Path,
) -> dict[str, float]:
    """Put the share of a link that the largest payload reached into the profile; the fact by its name."""
    key = "all_to_all_efficiency" if run.op == "all_to_all" else "efficiency"
    share = _share_of(run, group, cluster, level)
    if not 0 < share <= network.MOST_SHARE:
        raise _unlikely(f"{file}: bus bandwidth {run.bus_bytes_per_s / 1e9:.1f} GB/s", share, level, cluster, path)
    value = float(f"{share:.4g}")
    source = _source([run], [file])
    node.setdefault(level, {})[key] = {"value": value, "provenance": "measured", "source": source}
    return {f"{level}.{key}": value}


def _unlikely(what: str, share: float, level: str, cluster: ClusterSpec, path: Path) -> SpecError:
    link = getattr(cluster.node, level).bandwidth_bytes_per_s.value
    return SpecError(
        f"{what} would be {share:.2f} of the {level} link of {link / 1e9:g} GB/s in {path.name}; "
        "is this the right profile?"
    )


def _source(runs: Sequence[NcclTestsRun], files: Sequence[Path]) -> str:
    """Where a fact is from, in words."""
    if len(runs) == 1:
        (run,), (file,) = runs, files
        largest = max(run.points)[0]
        return f"nccl-tests, {run.op} of {largest} B on {run.group} GPUs of {run.hosts} host(s), {file.name}"
    ops = ", ".join(sorted({run.op for run in runs}))
    hosts = sorted({run.hosts for run in runs})
    return f"nccl-tests, {ops} on {', '.join(map(str, hosts))} hosts, {len(runs)} files from {files[0].name} on"


def _network_run(file: Path, run: NcclTestsRun, group: ProcessGroup) -> NetworkRun:
    points = np.array([point for point in run.points if point[0] >= network.LEAST_BYTES], dtype=float).reshape(-1, 2)
    return NetworkRun(str(file), cast("CollectiveKind", run.op), group, points[:, 0], points[:, 1])


def _put_network(
    runs: Sequence[tuple[Path, NcclTestsRun]], placed: Sequence[NetworkRun], cluster: ClusterSpec, node: dict[str, Any],
    path: Path,
) -> tuple[dict[str, float], dict[str, NetworkRunErrors]]:  # fmt: skip
    """Put latency and shares of the network into the profile: the facts by their names, the errors by file."""
    usable = [run for run in placed if len(run.time_s)]
    fitted = network.fit_network_facts(usable, cluster)
    changed = _measured_facts(usable, fitted)
    shares = [value for name, value in changed.items() if name != "latency_s"]
    if max(shares) >= network.MOST_SHARE * 0.999:
        raise _unlikely(f"{usable[0].name}: what the runs reach between nodes", max(shares), "nic", cluster, path)
    errors = network.network_run_errors(usable, cluster, fitted)
    farthest = max(errors, key=lambda each: each.fitted)
    if farthest.fitted > MOST_ERROR:
        raise SpecError(
            f"{farthest.name}: off by {farthest.fitted:.0%} whatever the network of {path.name} reaches; "
            "is this the right profile?"
        )
    source = _source([run for _, run in runs], [file for file, _ in runs])
    nic = node.setdefault("nic", {})
    facts = {}
    for name, value in changed.items():
        shown = f"{value * 1e6:.3g} us" if name == "latency_s" else float(f"{value:.4g}")
        nic[name] = {"value": shown, "provenance": "measured", "source": source}
        facts[f"nic.{name}"] = value
    return facts, {each.name: each for each in errors}


def _measured_facts(runs: Sequence[NetworkRun], fitted: NetworkFacts) -> dict[str, float]:
    """Those of the facts that runs say something of."""
    facts = {"latency_s": fitted.latency_s}
    if any(run.kind != "all_to_all" for run in runs):
        facts["efficiency"] = fitted.efficiency
    if any(run.kind == "all_to_all" for run in runs):
        facts["all_to_all_efficiency"] = fitted.all_to_all_efficiency
    return facts


def _check_gpu(file: Path, run: NcclTestsRun, path: Path, gpu: str) -> None:
    """Refuse a run of another GPU, as far as the names of the files and of the fitted device say which it is."""
    measured = [word for word in re.findall(r"[A-Z]+\d+", run.gpu or "") if word in BASES]
    fitted = path.parent.parent / "curves" / f"{gpu}.yaml"
    device = ""
    if is_plain_file(fitted):
        match = re.search(r"^gpu: (.*)$", fitted.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        device = match[1] if match else ""
    words = {word.upper() for name in (gpu, path.stem, device) for word in re.split(r"[^A-Za-z0-9]+", name)}
    known = sorted(words & set(BASES))
    if measured and known and measured[0] not in known:
        raise SpecError(
            f"{file}: measured on {run.gpu!r}, but {path.name} is of the GPU {'/'.join(known)}; choose its profile"
        )


def _group_of(file: Path, run: NcclTestsRun, node: NodeSpec) -> ProcessGroup:
    """Where the ranks lay, as the planner places groups."""
    each, rest = divmod(run.group, run.hosts)
    if rest or each > node.gpus_per_node:
        raise SpecError(
            f"{file}: {run.group} ranks on {run.hosts} host(s) do not fit nodes of {node.gpus_per_node} GPUs; "
            "run as many ranks on every host"
        )
    hosts = min(run.hosts, node.gpus_per_domain // node.gpus_per_node)
    n = node.gpus_per_node
    blocks = {b: min(b, each) if b <= n else min(b // n * each, run.group) for b in node.block_sizes}
    return ProcessGroup(
        np.array([run.group]), np.array([each * hosts]), np.array([each]),
        {gpus: np.array([ranks]) for gpus, ranks in blocks.items()},
    )  # fmt: skip


def _share_of(run: NcclTestsRun, group: ProcessGroup, cluster: ClusterSpec, level: str) -> float:
    """Share of the link's bandwidth at which the planner's formula gives the measured time of the largest payload."""
    fabric = Fabric.from_cluster(_at_full_rate(cluster, level))
    size, time_s = max(run.points)
    kind = cast("CollectiveKind", run.op)
    at_full = collective_time(kind, np.array([float(size)]), group, replace(fabric, measured={}))
    busy = float(np.ravel(at_full.intra_s if level == "intra" else at_full.inter_s)[0])
    other = max(float(np.ravel(at_full.intra_s)[0]), float(np.ravel(at_full.inter_s)[0]))
    latency = float(np.ravel(at_full.total_s)[0]) - other
    return busy / max(time_s - latency, 1e-12)


def _at_full_rate(cluster: ClusterSpec, level: str) -> ClusterSpec:
    """The cluster with collectives that reach all of a link's bandwidth, and of what is shared of it."""
    link = getattr(cluster.node, level)
    full = {
        name: getattr(link, name).model_copy(update={"value": 1.0}) for name in ("efficiency", "all_to_all_efficiency")
    }
    node = cluster.node.model_copy(update={level: link.model_copy(update=full)})
    return cluster.model_copy(update={"node": node})


def _add_curve(file: Path, run: NcclTestsRun, node: dict[str, Any], nvls: float, source: str) -> str | None:
    """Put the run among the measured collectives of the domain; without sizes enough, refuse if others hide it."""
    points = [(size, time_s) for size, time_s in run.points if size >= LEAST_BYTES]
    measured = node.get("collectives") or {}
    if len(points) < MIN_POINTS:
        if any(str(key).split()[0] == run.op for key in measured):
            raise SpecError(
                f"{file}: {len(points)} sizes of {LEAST_BYTES} B and more, but {run.op} has measured curves in this "
                f"profile, and one more needs {MIN_POINTS}; run nccl-tests with -b 4K -e 1G -f 2"
            )
        return None
    factor = nvls if run.op == "all_reduce" else 1.0
    fitted = fit_collective_curve(run.op, run.group, [size / factor for size, _ in points], [t for _, t in points])
    words = f"{source}; payloads over nvls_factor {factor:g}" if factor != 1.0 else source
    key = f"{run.op} {run.group}"
    ranges = {"bytes": [float(min(points)[0]), float(max(points)[0])]}
    node["collectives"] = {**measured, key: {**curve_profile_entry(fitted, words), "ranges": ranges}}
    return key


def _profile_path(profile: Path | str) -> Path:
    path = Path(profile)
    if path.suffix in (".yaml", ".yml"):
        return path
    local = Path("hardware_profiles") / "nodes" / f"{profile}.yaml"
    if is_plain_file(local):
        return local
    if str(profile) in bundled_names("nodes"):
        raise SpecError(
            f"{profile}: a bundled profile is not changed; copy it to hardware_profiles/nodes/ and name the copy"
        )
    raise SpecError(f"{profile}: no such node profile; give its YAML or a name in hardware_profiles/nodes")
