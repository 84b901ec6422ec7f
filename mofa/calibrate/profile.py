"""`mofa calibrate fit`: the profile of a measured device, as YAML that `mofa plan` reads and a person can check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mofa.calibrate.check import fit_folder
from mofa.calibrate.fit import Curves, Fitted
from mofa.calibrate.forms import attention_s, bus_share, collective_s
from mofa.errors import SpecError
from mofa.specs.files import bundled_dir
from mofa.units import parse_quantity

BASES = {"H200": ("h200-sxm", "h200-hgx"), "H100": ("h100-sxm", "h100-hgx"), "H800": ("h800", "h800-hgx"),
         "A100": ("a100-80gb", "a100-hgx"), "H20": ("h20", "h20-hgx"), "GB200": ("gb200", "gb200-nvl72"),
         "B200": ("b200", "b200-hgx")}  # fmt: skip
"""Word in the device's name, and the bundled profiles that hold the datasheet facts no measurement gives."""
ATTENTION = ("cudnn", "flash")
LARGE_BYTES = 2.0**30


def fit(folder: Path | Sequence[Path], name: str, out: Path, *, base: tuple[str, str] | None = None) -> dict[str, Path]:
    """Fit a folder of measurements, or several of the same GPU, and write its profile.

    Parameters
    ----------
    name
        Name of the profile; the files are ``gpus/NAME.yaml``, ``nodes/NAME.yaml`` and ``curves/NAME.yaml``, which holds
        every fitted parameter with its residuals and its measured range.
    base
        Bundled GPU and node profile that give what is not measured; found by the device's name if absent.

    Raises
    ------
    SpecError
        If the folder is corrupt, of several GPUs, or no bundled profile knows the device.
    """
    folders = [folder] if isinstance(folder, Path) else list(folder)
    curves = merged([fit_folder(f)[1] for f in folders], folders)
    if not curves.gemm:
        raise SpecError(f"{folders[0]}: no gemm rows to fit; run `mofa calibrate run` with the family gemm first")
    gpu_base, node_base = base or _base_of(curves.gpu, folders[0])
    source = "mofa calibrate, " + ", ".join(f"measurements of {f.name}" for f in folders)
    gpu = gpu_profile(_bundled("gpus", gpu_base), curves, name, source)
    node = node_profile(_bundled("nodes", node_base), curves, name, source)
    written = {}
    for kind, content in (
        ("gpus", gpu),
        ("nodes", node),
        ("curves", {"name": name, "source": source, **plain(curves)}),
    ):
        path = out / kind / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content, sort_keys=False, width=140, default_flow_style=None), encoding="utf-8")
        written[kind] = path
    return written


def merged(found: Sequence[Curves], folders: Sequence[Path]) -> Curves:
    """Curves of several folders as one; a family of a later folder joins or replaces an earlier one's."""
    if not found:
        raise SpecError("mofa calibrate fit: no folder given; give one that `mofa calibrate run` wrote")
    whole = found[0]
    for curves, folder in zip(found[1:], folders[1:], strict=True):
        if curves.gpu != whole.gpu:
            raise SpecError(f"{folder}: rows of {curves.gpu!r}, {folders[0]} holds {whole.gpu!r}; fit them one by one")
        whole = replace(
            whole,
            gemm=whole.gemm | curves.gemm,
            grouped_gemm=whole.grouped_gemm | curves.grouped_gemm,
            attention=whole.attention | curves.attention,
            memory_bound=whole.memory_bound | curves.memory_bound,
            collective=whole.collective | curves.collective,
            sustained=whole.sustained | curves.sustained,
            host_s=whole.host_s | curves.host_s,
            copy_bytes_per_s=whole.copy_bytes_per_s | curves.copy_bytes_per_s,
            overlap=whole.overlap | curves.overlap,
        )
    return whole


def gpu_profile(base: dict[str, Any], curves: Curves, name: str, source: str) -> dict[str, Any]:
    """The bundled GPU with the measured curves in place of its own."""
    made: dict[str, Any] = {**base, "name": name, "curves": dict(base["curves"])}
    peaks = {f: _si(fact["value"]) for f, fact in base["peak_flops_per_s"].items()}
    bandwidth = _si(base["memory_bandwidth_bytes_per_s"]["value"])
    made["num_sms"] = _fact(curves.num_sms, source + ": multiprocessors that CUDA reports")
    gemm = dict(made["curves"]["gemm"])
    for dtype, fitted in curves.gemm.items():
        kept = curves.sustained.get(f"gemm {dtype} between_memory", 1.0)
        best = max(rate for _, _, rate in fitted.form.tiles)
        words = f"{_words(source, fitted)}; x {kept:.3f} sustained"
        gemm[dtype] = {
            **gemm[dtype],
            "fraction": _fact(best * kept / peaks[dtype], words),
            "k_overhead": _fact(fitted.form.k_overhead, source),
            "floor_s": _fact(f"{fitted.form.floor_s * 1e6:.3g} us", source),
        }
    made["curves"]["gemm"] = gemm
    if "bf16" in curves.grouped_gemm:
        made["curves"]["grouped_gemm"] = {
            **made["curves"]["grouped_gemm"],
            "bf16": _grouped(curves, peaks["bf16"], source),
        }
    attention = _attention(curves, peaks["bf16"], source)
    if attention:
        made["curves"]["attention"] = attention
    if curves.memory_bound:
        shares = [
            f.form.bytes_per_s / bandwidth for f in curves.memory_bound.values() if f.form.bytes_per_s < 2 * bandwidth
        ]
        launches = [f.form.launch_s for f in curves.memory_bound.values()]
        made["curves"]["stream"] = {
            "fraction": _fact(float(np.median(shares)), f"{source}: median of {len(shares)} ops"),
            "floor_s": _fact(f"{float(np.median(launches)) * 1e6:.3g} us", source),
        }  # fmt: skip
    for key, op in (("eager_op_s", "eager_silu"), ("compiled_op_s", "compiled_kernel"), ("dtensor_op_s", "dtensor_mm"),
                    ("sync_s", "sync")):  # fmt: skip
        if op in curves.host_s:
            host = {**made["curves"]["host"], key: _fact(f"{curves.host_s[op] * 1e6:.3g} us", f"{source}: {op}")}
            made["curves"]["host"] = host
    if "h2d" in curves.copy_bytes_per_s:
        made["host_link_bytes_per_s"] = _fact(
            f"{curves.copy_bytes_per_s['h2d'] / 1e9:.4g} GB/s", source + ": pinned, 1 GiB"
        )
    slow = [1 - 1 / v for k, v in curves.overlap.items() if not k.split()[1].startswith("collective")]
    if slow:
        made["curves"]["overlap_slowdown"] = _fact(
            float(np.median(slow)), source + ": products and streams beside NCCL"
        )
    return made


def node_profile(base: dict[str, Any], curves: Curves, name: str, source: str) -> dict[str, Any]:
    """The bundled node with the measured links in place of its own."""
    made: dict[str, Any] = {**base, "name": name, "gpu": name}
    if not curves.collective:
        return made
    link = _si(base["intra"]["bandwidth_bytes_per_s"]["value"])
    largest = max(f.form.group for f in curves.collective.values())
    intra = dict(base["intra"])

    def share(op: str) -> float:
        form = curves.collective[f"{op} {largest}"].form
        return float(LARGE_BYTES * bus_share(op, largest) / collective_s(LARGE_BYTES, op, form) / link)

    for key, op in (("efficiency", "all_gather"), ("all_to_all_efficiency", "all_to_all")):
        if f"{op} {largest}" in curves.collective:
            intra[key] = _fact(share(op), f"{source}: {op} of 1 GiB on {largest} GPUs, without NVLS")
    starts = {f.form.group: f.form.protocols[0][0] for k, f in curves.collective.items() if k.startswith("all_gather ")}
    if len(starts) > 1:
        low, high = min(starts), max(starts)
        step = max((starts[high] - starts[low]) / (high - low), 1e-7)
        words = f"{source}: start of all-gather on {low} and {high} GPUs"
        intra["latency_s"] = _fact(f"{step * 1e6:.3g} us", words)
        made["collective_startup_s"] = _fact(f"{(starts[low] - step * (low - 1)) * 1e6:.3g} us", words)
    return {**made, "intra": intra}


def plain(curves: Curves) -> dict[str, Any]:
    """The curves as plain numbers and lists, rounded to what the measurement gives."""

    def tidy(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): tidy(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [tidy(v) for v in value]
        return float(f"{value:.5g}") if isinstance(value, float) else value

    found: dict[str, Any] = tidy(curves.as_dict())
    return found


def _grouped(curves: Curves, peak: float, source: str) -> dict[str, Any]:
    fitted = curves.grouped_gemm["bf16"]
    kept = curves.sustained.get("gemm bf16 between_memory", 1.0)
    return {
        "tile_m": fitted.form.large_tile[0], "tile_n": fitted.form.large_tile[1],
        "fraction": _fact(fitted.form.large_rate * kept / peak, f"{_words(source, fitted)}; x {kept:.3f} sustained"),
        "k_overhead": _fact(fitted.form.large_k_overhead, source),
        "floor_s": _fact(f"{fitted.form.floor_s * 1e6:.3g} us", source),
        "per_group_s": _fact(f"{fitted.form.per_group_s * 1e6:.3g} us", source),
    }  # fmt: skip


def _attention(curves: Curves, peak: float, source: str) -> dict[str, Any] | None:
    """Head size 128, causal: the share at 32K tokens, and the length at which it is halved, from the fitted form."""
    for backend in ATTENTION:
        ways = [curves.attention.get(f"{backend} {way} 128/128") for way in ("fwd", "bwd")]
        if ways[0] is None or ways[1] is None:
            continue
        long, short = 32768.0, 2048.0
        share = {}
        for way, fitted, flops in (("forward", ways[0], 2.0), ("backward", ways[1], 5.0)):
            times = attention_s(
                1, 32, 8, [short, long], [short, long], 128, 128, 1, fitted.form, backward=way == "backward"
            )
            share[way] = flops * 32 * np.array([short, long]) ** 2 * 128 / (times - fitted.form.floor_s) / peak
        q_half = float(np.mean([(s[1] / s[0] - 1) * short for s in share.values()]))
        kept = curves.sustained.get(f"attention_{backend} bf16 between_memory", 1.0)
        words = f"{source}: {backend}, head size 128, causal, 32K tokens; x {kept:.3f} sustained"
        return {
            "forward_fraction": _fact(float(share["forward"][1]) * kept, f"{words}; {_words('', ways[0])}"),
            "backward_fraction": _fact(float(share["backward"][1]) * kept, f"{words}; {_words('', ways[1])}"),
            "q_half": _fact(q_half, words), "floor_s": _fact(f"{ways[0].form.floor_s * 1e6:.3g} us", words),
        }  # fmt: skip
    return None


def _base_of(gpu: str, folder: Path) -> tuple[str, str]:
    for word, names in BASES.items():
        if word in gpu.replace("-", " ").split():
            return names
    raise SpecError(
        f"{folder}: no bundled profile knows {gpu!r}, and a profile needs datasheet facts; name the nearest with base"
    )


def _bundled(kind: Any, name: str) -> dict[str, Any]:
    path = bundled_dir(kind) / f"{name}.yaml"
    try:
        found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        raise SpecError(
            f"{name}: no such bundled profile of {kind}; choose one that `mofa show hardware` lists"
        ) from None
    return found


def _fact(value: float | str, source: str) -> dict[str, Any]:
    return {
        "value": float(f"{value:.4g}") if isinstance(value, float) else value,
        "provenance": "measured",
        "source": source,
    }


def _words(source: str, fitted: Fitted) -> str:
    ranges = ", ".join(f"{k} {low:g}-{high:g}" for k, (low, high) in fitted.ranges.items())
    error = f"median error {fitted.median_abs_error:.1%}, 90th percentile {fitted.p90_abs_error:.1%}"
    return f"{source}{': ' if source else ''}{fitted.points} points, {error}; {ranges}"


def _si(text: str) -> float:
    for unit in ("FLOP/s", "B/s"):
        try:
            return parse_quantity(text, unit)
        except ValueError:
            continue
    raise SpecError(f"{text!r} is no rate; write a number with FLOP/s or B/s")
