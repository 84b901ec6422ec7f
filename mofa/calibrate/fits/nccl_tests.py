"""Bus bandwidths out of nccl-tests, text or JSON, into a node's profile: for links that nobody here could measure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import yaml

from mofa.calibrate.fits.fit import fit_collective
from mofa.calibrate.fits.folder import BASES
from mofa.calibrate.fits.profile import curve_fact
from mofa.calibrate.shapes.families import MIN_POINTS
from mofa.cost.kernels.collectives import Fabric, collective_time
from mofa.cost.kernels.fitted_forms import bus_bytes_per_payload_byte
from mofa.cost.kernels.topology import Group
from mofa.errors import SpecError
from mofa.specs.files import bundled, load_yaml, short
from mofa.specs.hardware import ClusterSpec, NodeSpec
from mofa.specs.like_profiles import expand_like
from mofa.specs.limited_reads import is_plain_file, read_bytes, read_json, utf8_text
from mofa.specs.load import load_cluster
from mofa.specs.ranges import MAX_GPUS
from mofa.specs.write_files import write_atomic

if TYPE_CHECKING:
    from mofa.blocks.work import CollectiveKind

NAMES = {"all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
         "alltoall": "all_to_all", "all_to_all": "all_to_all", "sendrecv": "send_recv"}  # fmt: skip
MAX_FILE_BYTES = 2**24
LEAST_S, MOST_S = 1e-12, 1e6
"""Of a collective. [s]"""
MAX_PAYLOAD_BYTES = 2**50
LEAST_BYTES = 1024
"""Smaller payloads say nothing that a curve from 4 KiB on needs. [B]"""


@dataclass(frozen=True)
class NcclRun:
    """One run of nccl-tests: out-of-place times per payload."""

    op: str
    group: int
    hosts: int
    gpu: str | None
    points: tuple[tuple[int, float], ...]
    """Payload and time. [B, s]"""

    @property
    def bus_bytes_per_s(self) -> float:
        """Bus bandwidth of the largest payload. [B/s]"""
        size, time_s = max(self.points)
        return size * bus_bytes_per_payload_byte(self.op, self.group) / time_s


def import_nccl(file: Path, profile: Path | str) -> dict[str, Any]:
    """Put what a run measured into the node profile, and say what changed.

    ``profile`` is a node's YAML or the name of one below ``hardware_profiles/nodes``. Ranks on several hosts measure
    the network interfaces, ranks inside a fast domain its links.

    Raises
    ------
    SpecError
        If the file is not of nccl-tests, or was measured on another GPU than the profile's; the profile stays as it is.

    Notes
    -----
    The share of the link is what lets the planner's own formula give the measured time of the largest payload. Inside
    a domain five sizes and more also become a curve of that collective over that many GPUs, as `mofa calibrate fit`
    writes it. All-reduce is imported as it ran, with in-switch reduction or without: the profile's ``nvls_factor``,
    which the planner puts on top, is taken out.
    """
    run = read_nccl(file)
    path = _profile_path(profile)
    node, cluster = _read_profile(path, run)
    _check_gpu(file, run, path, cluster.gpu.name)
    group = _group_of(file, run, cluster.node)
    level = "nic" if bool(group.crosses_domains[0]) else "intra"
    key = "all_to_all_efficiency" if run.op == "all_to_all" else "efficiency"
    share = _share_of(run, group, cluster, level)
    if not 0 < share <= 1.5:
        link = getattr(cluster.node, level).bandwidth_bytes_per_s.value
        raise SpecError(
            f"{file}: bus bandwidth {run.bus_bytes_per_s / 1e9:.1f} GB/s would be {share:.2f} of the {level} link of "
            f"{link / 1e9:g} GB/s in {path.name}; is this the right profile?"
        )
    source = f"nccl-tests, {run.op} of {max(run.points)[0]} B on {run.group} GPUs of {run.hosts} host(s), {file.name}"
    node.setdefault(level, {})[key] = {"value": float(f"{share:.4g}"), "provenance": "measured", "source": source}
    curve = None
    if level == "intra":
        curve = _add_curve(file, run, node, cluster.node.nvls_factor.value, source)
    _replace(path, yaml.safe_dump(node, sort_keys=False, width=140, default_flow_style=None))
    return {
        "profile": str(path), "level": level, "field": key, "value": share, "points": len(run.points), "op": run.op,
        "curve": curve,
    }  # fmt: skip


def _read_profile(path: Path, run: NcclRun) -> tuple[dict[str, Any], ClusterSpec]:
    """The node as it is written, and as the planner reads it."""
    node = load_yaml(path)
    each = expand_like(node, "nodes", str(path)).get("gpus_per_node")
    if type(each) is not int or each < 1:
        raise SpecError(f"{path}: no node profile (gpus_per_node is missing); give one that `mofa plan` reads")
    return node, load_cluster(path, run.hosts * each)


def _check_gpu(file: Path, run: NcclRun, path: Path, gpu: str) -> None:
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


def _group_of(file: Path, run: NcclRun, node: NodeSpec) -> Group:
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
    return Group(
        np.array([run.group]), np.array([each * hosts]), np.array([each]),
        {gpus: np.array([ranks]) for gpus, ranks in blocks.items()},
    )  # fmt: skip


def _share_of(run: NcclRun, group: Group, cluster: ClusterSpec, level: str) -> float:
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


def _add_curve(file: Path, run: NcclRun, node: dict[str, Any], nvls: float, source: str) -> str | None:
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
    fitted = fit_collective(run.op, run.group, [size / factor for size, _ in points], [t for _, t in points])
    words = f"{source}; payloads over nvls_factor {factor:g}" if factor != 1.0 else source
    key = f"{run.op} {run.group}"
    ranges = {"bytes": [float(min(points)[0]), float(max(points)[0])]}
    node["collectives"] = {**measured, key: {**curve_fact(fitted, words), "ranges": ranges}}
    return key


def read_nccl(file: Path) -> NcclRun:
    """Read the output of one nccl-tests program."""
    where = short(str(file), 200)
    text = utf8_text(read_bytes(file, where, MAX_FILE_BYTES, "this is no output of nccl-tests"), where)
    run = _from_json(file, text) if text.lstrip().startswith("{") else _from_text(file, text)
    if not run.points:
        raise SpecError(
            f"{file}: no rows of size and time; give the output of all_reduce_perf or another nccl-tests program"
        )
    if run.group < 2:
        raise SpecError(f"{file}: {run.group} rank(s); a collective needs two or more, and the header that lists them")
    return run


def _op_of(file: Path, text: str) -> str:
    programs = re.findall(r"(\w+?)_perf", text)
    for source in (*programs, file.stem.lower()):
        for name, op in NAMES.items():
            if name in source:
                return op
    if programs:
        known = ", ".join(f"{name}_perf" for name in NAMES if name != "all_to_all")
        raise SpecError(f"{file}: {programs[0]}_perf is of no collective that a plan has; give one of {known}")
    raise SpecError(f"{file}: which collective? rename the file to, for example, all_reduce_perf.txt")


def _from_text(file: Path, text: str) -> NcclRun:
    ranks = re.findall(r"#\s+Rank\s+\d+(?:\s+Group\s+(\d+))?.*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)", text)
    column, points = _time_column(text), []
    for number, line in enumerate(text.splitlines(), start=1):
        cells = line.split()
        if len(cells) < 2 or not (cells[0].isascii() and cells[0].isdigit()):
            continue
        if len(cells) < column + 3:
            raise SpecError(f"{file}: line {number}: truncated after {len(cells)} columns; run nccl-tests again")
        try:
            size, time_s = int(cells[0]), float(cells[column]) / 1e6
        except ValueError:
            raise SpecError(f"{file}: line {number}: no time in column {column + 1}; is the output complete?") from None
        if not LEAST_S <= time_s <= MOST_S:
            raise SpecError(f"{file}: line {number}: time {cells[column]} us is no positive number")
        if size > MAX_PAYLOAD_BYTES:
            raise SpecError(f"{file}: line {number}: size {short(cells[0])} B is more than any GPU holds")
        if size > 0:
            points.append((size, time_s))
    if points and "# Avg bus bandwidth" not in text:
        raise SpecError(f"{file}: truncated, its last line '# Avg bus bandwidth' is missing; run nccl-tests again")
    if match := re.search(r"# Out of bounds values\s*:\s*(\d+) FAILED", text):
        raise _wrong(file, int(match[1]))
    together = [rank for rank in ranks if rank[0] == ranks[0][0]]  # NCCL_TESTS_SPLIT runs several groups side by side
    gpu = ranks[0][2].strip() if ranks else None
    return NcclRun(_op_of(file, text), len(together), len({r[1] for r in together}) or 1, gpu, tuple(points))


def _time_column(text: str) -> int:
    """Where the out-of-place time stands: its header names it, of programs without a root it comes earlier.

    Examples
    --------
    >>> _time_column("#       size         count      type   redop    root     time   algbw   busbw #wrong     time")
    5
    """
    header = re.search(r"^#\s+size(.*?)\b(?:cpu)?time\b", text, re.MULTILINE)
    return 1 + len(header[1].split()) if header else 5


def _wrong(file: Path, values: int) -> SpecError:
    return SpecError(f"{file}: {values} wrong values: the collective did not work; its times say nothing")


def _from_json(file: Path, text: str) -> NcclRun:
    """What ``--json`` writes since nccl-tests 2.17: devices hold the first rank of each process.

    Every process has ``nthreads * ngpus`` ranks.
    """
    document = read_json(text, short(str(file), 200), "give the JSON of an nccl-tests program")
    try:
        config, rows = document["config"], [r for r in document["results"] if r["out_of_place"] is not None]
        points = [
            (int(r["size"]), float(r["out_of_place"].get("time", r["out_of_place"].get("cpu_time"))) / 1e6)
            for r in rows
        ]
        devices = config["devices"]
        group = len(devices) * int(config["nthreads"]) * int(config["ngpus"])
        hosts = len({d["hostname"] for d in devices})
        gpu = str(devices[0]["device_info"]).strip()
        op = _op_of(file, str(document["args"][0]))
        wrong = int(document.get("out_of_bounds", {}).get("count", 0))
    except SpecError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise SpecError(
            f"{file}: not the JSON of nccl-tests ({type(error).__name__}: {short(str(error), 80)}); run it with --json"
        ) from None
    if any(not LEAST_S <= t <= MOST_S for _, t in points):
        raise SpecError(f"{file}: a time is no positive number; is the output complete?")
    if any(not 0 <= size <= MAX_PAYLOAD_BYTES for size, _ in points):
        raise SpecError(f"{file}: a size is no number of bytes that a GPU holds; is the output complete?")
    if not 0 <= group <= MAX_GPUS:
        raise SpecError(f"{file}: {short(str(group))} ranks are more than a cluster has; is the output complete?")
    if wrong:
        raise _wrong(file, wrong)
    return NcclRun(op, group, hosts, gpu, tuple(p for p in points if p[0] > 0))


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    write_atomic(path, text.encode(), replaces_input=True)


def _profile_path(profile: Path | str) -> Path:
    path = Path(profile)
    if path.suffix in (".yaml", ".yml"):
        return path
    local = Path("hardware_profiles") / "nodes" / f"{profile}.yaml"
    if is_plain_file(local):
        return local
    if str(profile) in bundled("nodes"):
        raise SpecError(
            f"{profile}: a bundled profile is not changed; copy it to hardware_profiles/nodes/ and name the copy"
        )
    raise SpecError(f"{profile}: no such node profile; give its YAML or a name in hardware_profiles/nodes")
