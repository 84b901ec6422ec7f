"""Bus bandwidths out of nccl-tests, text or JSON, into a node's profile: for links that nobody here could measure."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mofa.cost.forms import bus_share
from mofa.errors import SpecError
from mofa.specs.files import bundled_dir
from mofa.units import parse_quantity

NAMES = {"all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
         "alltoall": "all_to_all", "all_to_all": "all_to_all", "sendrecv": "send_recv"}  # fmt: skip
MAX_FILE_BYTES = 2**24


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
        return size * bus_share(self.op, self.group) / time_s


def import_nccl(file: Path, profile: Path | str) -> dict[str, Any]:
    """Put the bandwidth and the latency of a run into the node profile, and say what changed.

    ``profile`` is a node's YAML or the name of one below ``hardware_profiles/nodes``. Ranks on several hosts measure
    the network interfaces, ranks on one host the fast domain.

    Raises
    ------
    SpecError
        If the file is not of nccl-tests, or was measured on another GPU than the profile's; the profile stays as it is.
    """
    run = read_nccl(file)
    path = _profile_path(profile)
    try:
        node = yaml.safe_load(path.read_text(encoding="utf-8"))
        level = "nic" if run.hosts > 1 else "intra"
        link = parse_quantity(node[level]["bandwidth_bytes_per_s"]["value"], "B/s")
        gpu_name = str(node["gpu"])
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise SpecError(
            f"{path}: no node profile ({str(error).splitlines()[0]}); give one that `mofa plan` reads"
        ) from None
    words = re.findall(r"[A-Z]+\d+", run.gpu or "")
    if words and words[0].lower() not in gpu_name.lower() and words[0].lower() not in path.stem.lower():
        raise SpecError(
            f"{file}: measured on {run.gpu!r}, but {path.name} has the GPU {gpu_name!r}; choose its profile"
        )
    key = "all_to_all_efficiency" if run.op == "all_to_all" else "efficiency"
    share = run.bus_bytes_per_s / link
    if not 0 < share <= 2:
        raise SpecError(
            f"{file}: bus bandwidth {run.bus_bytes_per_s / 1e9:.1f} GB/s against a link of {link / 1e9:.1f} GB/s in "
            f"{path.name}; is this the right profile?"
        )
    source = f"nccl-tests, {run.op} of {max(run.points)[0]} B on {run.group} GPUs of {run.hosts} host(s), {file.name}"
    node[level][key] = {"value": float(f"{share:.4g}"), "provenance": "measured", "source": source}
    _replace(path, yaml.safe_dump(node, sort_keys=False, width=140, default_flow_style=None))
    return {"profile": str(path), "level": level, "field": key, "value": share, "points": len(run.points), "op": run.op}


def read_nccl(file: Path) -> NcclRun:
    """Read the output of one nccl-tests program."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise SpecError(f"{file}: larger than {MAX_FILE_BYTES >> 20} MiB; this is no output of nccl-tests")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{file}: cannot be read as text ({error}); give the output of an nccl-tests program") from None
    run = _from_json(file, text) if text.lstrip().startswith("{") else _from_text(file, text)
    if not run.points:
        raise SpecError(
            f"{file}: no rows of size and time; give the output of all_reduce_perf or another nccl-tests program"
        )
    if run.group < 2:
        raise SpecError(f"{file}: {run.group} rank(s); a collective needs two or more, and the header that lists them")
    return run


def _op_of(file: Path, text: str) -> str:
    for source in (*re.findall(r"(\w+?)_perf", text), file.stem.lower()):
        for name, op in NAMES.items():
            if name in source:
                return op
    raise SpecError(f"{file}: which collective? rename the file to, for example, all_reduce_perf.txt")


def _from_text(file: Path, text: str) -> NcclRun:
    ranks = re.findall(r"#\s+Rank\s+(\d+).*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)", text)
    points = []
    for number, line in enumerate(text.splitlines(), start=1):
        cells = line.split()
        if len(cells) < 2 or not cells[0].isdigit():
            continue
        if len(cells) < 8:
            raise SpecError(f"{file}: line {number}: truncated after {len(cells)} columns; run nccl-tests again")
        try:
            size, time_s = int(cells[0]), float(cells[5]) / 1e6
        except ValueError:
            raise SpecError(f"{file}: line {number}: no time in column 6; is the output complete?") from None
        if not (math.isfinite(time_s) and time_s > 0):
            raise SpecError(f"{file}: line {number}: time {cells[5]} us is no positive number")
        if size > 0:
            points.append((size, time_s))
    if points and "# Avg bus bandwidth" not in text:
        raise SpecError(f"{file}: truncated, its last line '# Avg bus bandwidth' is missing; run nccl-tests again")
    gpu = ranks[0][2].strip() if ranks else None
    return NcclRun(_op_of(file, text), len(ranks), len({r[1] for r in ranks}) or 1, gpu, tuple(points))


def _from_json(file: Path, text: str) -> NcclRun:
    try:
        found = json.loads(text)
        points = [(int(r["size"]), float(r["out_of_place"]["time"]) / 1e6) for r in found["results"]]
        devices = found.get("devices") or found.get("config", {}).get("devices") or []
        group = int(found.get("ranks") or found.get("config", {}).get("ranks") or len(devices))
        hosts = len({d.get("hostname", "") for d in devices}) or 1
        gpu = devices[0].get("device_name") if devices else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecError(f"{file}: not the JSON of nccl-tests ({type(error).__name__}: {error})") from None
    if any(not (math.isfinite(t) and t > 0) for _, t in points):
        raise SpecError(f"{file}: a time is no positive number; is the output complete?")
    return NcclRun(_op_of(file, text), group, hosts, gpu, tuple(p for p in points if p[0] > 0))


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise SpecError(f"{path}: cannot be written ({error.strerror}); copy the profile to a place that can") from None
    finally:
        temporary.unlink(missing_ok=True)


def _profile_path(profile: Path | str) -> Path:
    path = Path(profile)
    if path.suffix in (".yaml", ".yml"):
        return path
    local = Path("hardware_profiles") / "nodes" / f"{profile}.yaml"
    if local.is_file():
        return local
    if (bundled_dir("nodes") / f"{profile}.yaml").is_file():
        raise SpecError(
            f"{profile}: a bundled profile is not changed; copy it to hardware_profiles/nodes/ and name the copy"
        )
    raise SpecError(f"{profile}: no such node profile; give its YAML or a name in hardware_profiles/nodes")
