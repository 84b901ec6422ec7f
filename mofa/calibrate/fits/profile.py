"""`mofa calibrate fit`: the profile of a measured device, as YAML that `mofa plan` reads and a person can check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from mofa.calibrate.fits.fitted_curves import CurveFit, DeviceCurveFits
from mofa.calibrate.fits.folder import bundled_gpu_and_node_of_device, rows_and_curve_fits_of_folder
from mofa.calibrate.fits.host_optimizer import host_optimizer_facts
from mofa.calibrate.fits.te_host_facts import module_host_facts, small_layer_host_facts
from mofa.calibrate.shapes.routed import OPS as ROUTED_OPS
from mofa.calibrate.shapes.te_fp8 import CASTS as FP8_CASTS
from mofa.calibrate.shapes.te_fp8 import MAIN_CAST
from mofa.cost.kernels.fitted_forms import bus_bytes_per_payload_byte, collective_s
from mofa.errors import SpecError
from mofa.specs.copied_facts import Folder, mark_all_as_transferred
from mofa.specs.files import bundled_names, profile_as_yaml
from mofa.specs.host import SmallLayerTime
from mofa.specs.like_profiles import expanded_profile
from mofa.specs.products import FALLBACK
from mofa.specs.scaling import FIT_FIELDS, scaled_curve, slowed_host
from mofa.units import parse_quantity

BETWEEN = "between_memory"
"""The sustained state that training is in: products and attention with memory-bound kernels between them."""
SMALL_OPS = ("eager_add", "eager_silu", "eager_rmsnorm")
"""Ops whose median says how fast a host is."""
ROUNDING = 0.005
"""Change of a host's speed that is none: files hold three digits. [-]"""
ONE_KERNEL = ("mul", "residual_add", "silu", "cast_up", "cast_down", "permute", "embedding", "gelu_fwd")
PLANNED = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")
LARGE_BYTES = 2.0**30


def fit_and_write_profiles(
    folder: Path | Sequence[Path], name: str, out: Path, *, base: tuple[str, str] | None = None
) -> dict[str, Path]:
    """Fit a folder of measurements, or several of the same GPU, and write the profiles of its GPU and node.

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
    curves = merge_curves([rows_and_curve_fits_of_folder(f)[1] for f in folders], folders)
    if not curves.gemm:
        raise SpecError(f"{folders[0]}: no gemm rows to fit; run `mofa calibrate run` with the family gemm first")
    gpu_base, node_base = base or bundled_gpu_and_node_of_device(curves.gpu, folders[0])
    source = "mofa calibrate, " + ", ".join(f"measurements of {f.name}" for f in folders)
    gpu = measured_gpu_profile(mark_all_as_transferred(_bundled("gpus", gpu_base), gpu_base), curves, name, source)
    node = measured_node_profile(mark_all_as_transferred(_bundled("nodes", node_base), node_base), curves, name, source)
    written = {}
    for kind, content in (
        ("gpus", gpu),
        ("nodes", node),
        ("curves", {"name": name, "source": source, **curves_as_plain_numbers(curves)}),
    ):
        path = out / kind / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(profile_as_yaml(content), encoding="utf-8")
        written[kind] = path
    return written


def merge_curves(fitted: Sequence[DeviceCurveFits], folders: Sequence[Path]) -> DeviceCurveFits:
    """Curves of several folders as one; a family of a later folder joins or replaces an earlier one's."""
    if not fitted:
        raise SpecError("mofa calibrate fit: no folder given; give one that `mofa calibrate run` wrote")
    together = fitted[0]
    for curves, folder in zip(fitted[1:], folders[1:], strict=True):
        if curves.gpu != together.gpu:
            others = f"{folders[0]} holds {together.gpu!r}"
            raise SpecError(f"{folder}: rows of {curves.gpu!r}, {others}; fit them one by one")
        together = replace(
            together,
            l2_bytes=curves.l2_bytes or together.l2_bytes,
            gemm=together.gemm | curves.gemm,
            grouped_gemm=together.grouped_gemm | curves.grouped_gemm,
            multi_stream=together.multi_stream | curves.multi_stream,
            attention=together.attention | curves.attention,
            memory_bound=together.memory_bound | curves.memory_bound,
            collective=together.collective | curves.collective,
            sustained=together.sustained | curves.sustained,
            clocks=together.clocks | curves.clocks,
            full_load_flops=together.full_load_flops | curves.full_load_flops,
            memory_clock=curves.memory_clock or together.memory_clock,
            clock_powers=together.clock_powers | curves.clock_powers,
            clock_shares=together.clock_shares | curves.clock_shares,
            host_s=together.host_s | curves.host_s,
            modules=together.modules | curves.modules,
            layer_in_small_ops=curves.layer_in_small_ops or together.layer_in_small_ops,
            copy_bytes_per_s=together.copy_bytes_per_s | curves.copy_bytes_per_s,
            host_optimizer=together.host_optimizer | curves.host_optimizer,
            overlap=together.overlap | curves.overlap,
            overlap_slowdown=curves.overlap_slowdown or together.overlap_slowdown,
            slowdown_by_held_multiprocessors=curves.slowdown_by_held_multiprocessors
            or together.slowdown_by_held_multiprocessors,
        )
    return together


def measured_gpu_profile(base: dict[str, Any], curves: DeviceCurveFits, name: str, source: str) -> dict[str, Any]:
    """The bundled GPU with the measured curves in place of its own."""
    peaks = {f: _si(fact["value"]) for f, fact in base["peak_flops_per_s"].items()}
    made: dict[str, Any] = {**base, "name": name, "curves": fitted_gpu_curves(base["curves"], peaks, curves, source)}
    made["num_sms"] = _fact(curves.num_sms, source + ": multiprocessors that CUDA reports")
    if curves.l2_bytes:
        size = f"{curves.l2_bytes / 2**20:g} MiB"
        made["l2_bytes"] = _fact(size, source + ": L2 that CUDA reports")
    if "h2d" in curves.copy_bytes_per_s:
        made["host_link_bytes_per_s"] = _fact(
            f"{curves.copy_bytes_per_s['h2d'] / 1e9:.4g} GB/s", source + ": pinned, 1 GiB"
        )
    return made


def fitted_gpu_curves(
    base: dict[str, Any], peaks: dict[str, float], curves: DeviceCurveFits, source: str
) -> dict[str, Any]:
    """The fitted curves as the planner reads them; families that were not measured stay the bundled profile's.

    A format without measurements takes bf16's curve by the ratio of the peaks, and is assumed.
    """
    made = dict(base)
    best = {f: max(rate for _, _, rate in fitted.form.tiles) for f, fitted in curves.gemm.items()}
    powered_of = {f: power_limit_fields(curves, f"gemm {f}") for f in peaks}
    if "bf16" in curves.gemm:
        made["gemm"] = {}
        for dtype, peak in peaks.items():
            if dtype in curves.gemm:
                made["gemm"][dtype] = curve_profile_entry(curves.gemm[dtype], source, **powered_of[dtype])
            else:
                faster = peak / peaks["bf16"]
                made["gemm"][dtype] = _scaled(
                    curve_profile_entry(curves.gemm["bf16"], source, **powered_of["bf16"]), faster
                )
    if "bf16" in curves.grouped_gemm:
        grouped = curve_profile_entry(curves.grouped_gemm["bf16"], source, **powered_of["bf16"])
        made["grouped_gemm"] = {
            dtype: grouped if dtype == "bf16"
            else _scaled(grouped, best[dtype] / best["bf16"] if {dtype, "bf16"} <= set(best) else peak / peaks["bf16"])
            for dtype, peak in peaks.items()
        }  # fmt: skip
    made |= product_curves_with_fp8(base, made, curves, source)
    if curves.multi_stream:
        made["multi_stream"] = made.get("multi_stream", {}) | {
            dtype: {**curve_profile_entry(fitted, source, **powered_of.get(dtype, powered_of["bf16"])), **OF_TE}
            for dtype, fitted in curves.multi_stream.items()
            if dtype not in FALLBACK
        }
    if curves.attention:
        made["attention"] = {key: curve_profile_entry(fitted, source, **_attention_powered(curves, key))
                             for key, fitted in curves.attention.items()}  # fmt: skip
    if curves.memory_bound:
        made["stream"] = {"default": _default_stream(curves, source)}
        made["stream"] |= {
            key: memory_bound_profile_entry(key, fitted, source) for key, fitted in curves.memory_bound.items()
        }
        made["stream"] |= {key: curve for key, curve in base["stream"].items() if key not in made["stream"]}
        if "device_copy" in curves.copy_bytes_per_s:
            form = {**made["stream"]["default"]["form"], "bytes_per_s": curves.copy_bytes_per_s["device_copy"]}
            words = f"{source}: copy of 1 GiB on the device"
            made["stream"]["eager copy"] = round_numbers({"provenance": "measured", "source": words, "form": form})
    made["stream"] = with_clock_shares(made["stream"], curves)
    if curves.memory_clock is not None:
        made["stream_clock"] = _fact(curves.memory_clock, f"{source}: from the clocks of products and "
                                     "attention alone and between memory-bound kernels")  # fmt: skip
    made["host"] = host_facts_of_curves(made["host"], curves, source)
    if made["host"]["eager_op_s"] != base["host"]["eager_op_s"]:
        made.pop("hosts", None)  # it is one machine's, no typical one's
    return {**made, **overlap_slowdown_fact(curves, source), **held_multiprocessor_facts(curves, source)}


def overlap_slowdown_fact(curves: DeviceCurveFits, source: str) -> dict[str, Any]:
    """What computing loses beside a collective, as a GPU's file has it; empty where it was not measured."""
    if not curves.overlap_slowdown:
        return {}
    words = f"{source}: time that computing loses beside NCCL, over what the collectives take alone"
    return {"overlap_slowdown": _fact(curves.overlap_slowdown, words)}


def held_multiprocessor_facts(curves: DeviceCurveFits, source: str) -> dict[str, Any]:
    """What computing loses beside held multiprocessors, by their number, as a GPU's file has it; empty where it was
    not measured."""
    if not curves.slowdown_by_held_multiprocessors:
        return {}
    words = f"{source}: what whole layers lose per second that so many multiprocessors are held"
    by_number = {number: _fact(value, words) for number, value in curves.slowdown_by_held_multiprocessors.items()}
    return {"slowdown_by_held_multiprocessors": by_number}


def product_curves_with_fp8(
    base: dict[str, Any], made: dict[str, Any], curves: DeviceCurveFits, source: str
) -> dict[str, Any]:  # fmt: skip
    """Products with those of Transformer Engine's fp8 kinds: measured here, else the bundled profile's if it has any.

    Where the clock of a kind was not read, that of PyTorch's fp8 product counts.
    """
    products = {}
    profiles = {"gemm fp8": made["gemm"]["fp8"]["clock"]} if "clock" in made["gemm"].get("fp8", {}) else {}
    curves = replace(curves, clocks=profiles | curves.clocks)
    families = {"gemm": curves.gemm, "multi_stream": curves.multi_stream}
    for family, fitted in families.items():
        known = base.get(family, {})
        kinds = {kind: known[kind] for kind in FALLBACK if kind in known}
        kinds |= {
            kind: curve_profile_entry(fitted[kind], source, **power_limit_fields(curves, f"gemm {kind}", "gemm fp8"))
            for kind in FALLBACK if kind in fitted
        }  # fmt: skip
        if kinds or family in made:
            products[family] = {**made.get(family, {}), **kinds}
    return products


OF_TE: dict[str, Any] = {"library": "transformer-engine"}


def memory_bound_profile_entry(key: str, fitted: CurveFit, source: str) -> dict[str, Any]:
    """A memory-bound op's curve; of Transformer Engine's kernels with their library."""
    return {**curve_profile_entry(fitted, source), **(OF_TE if key.startswith("te ") else {})}


def with_clock_shares(stream: dict[str, Any], curves: DeviceCurveFits) -> dict[str, Any]:
    """Memory-bound ops' curves with their :attr:`mofa.specs.curves.MemoryBoundCurve.clock_share` where it was
    measured."""
    shares = curves.clock_shares
    return {
        key: round_numbers({**curve, "clock_share": shares[key]}) if key in shares else curve
        for key, curve in stream.items()
    }


def curve_profile_entry(fitted: CurveFit, source: str, **more: float) -> dict[str, Any]:
    """A fitted curve as a profile holds it."""
    form = asdict(fitted.form)
    if not form.get("missed_bytes_per_s", 1.0):
        del form["missed_bytes_per_s"]  # what only ops that read rows again have
    fact = {
        "provenance": "measured", "source": source, "points": fitted.points,
        "median_abs_error": fitted.median_abs_error, "p90_abs_error": fitted.p90_abs_error,
        "ranges": fitted.ranges, "form": form, **more,
    }  # fmt: skip
    made: dict[str, Any] = round_numbers(fact)
    return made


def _scaled(curve: dict[str, Any], factor: float) -> dict[str, Any]:
    """The same kernels at another rate: of a format that was not measured."""
    known = {k: v for k, v in curve.items() if k not in FIT_FIELDS}
    return {**scaled_curve(known, factor, 1.0, 1.0), "provenance": "assumed",
            "source": f"{curve['source']}: bf16's, {factor:.3g} times as fast"}  # fmt: skip


def power_limit_fields(curves: DeviceCurveFits, *names: str) -> dict[str, float]:
    """A curve's fields under the power limit: rate between memory-bound kernels, rate alone, clock, its exponent and
    the rate of full load.

    Each comes from the first of ``names`` that has it. [-]
    """
    for name in names:
        if f"{name} {BETWEEN}" in curves.sustained:
            between = min(curves.sustained[f"{name} {BETWEEN}"], 1.0)
            alone = min(curves.sustained.get(f"{name} alone", between), between)
            clock = next((curves.clocks[kind] for kind in names if kind in curves.clocks), 1.0)
            power = next((curves.clock_powers[kind] for kind in names if kind in curves.clock_powers), None)
            load = next((curves.full_load_flops[kind] for kind in names if kind in curves.full_load_flops), None)
            more = {"clock_power": power, "full_load_flops": load}
            return {"sustained": between, "alone": alone, "clock": clock,
                    **{key: value for key, value in more.items() if value is not None}}  # fmt: skip
    return {"sustained": 1.0, "alone": 1.0, "clock": 1.0}


def _attention_powered(curves: DeviceCurveFits, key: str) -> dict[str, float]:
    backend, direction, _ = key.split()
    return power_limit_fields(curves, f"attention_{backend}_{direction} bf16", f"attention_{backend} bf16")


def _default_stream(curves: DeviceCurveFits, source: str) -> dict[str, Any]:
    """The middle of the eager ops: of their rates, and of the launches of those with one kernel."""
    forms = {k.split()[1]: f.form for k, f in curves.memory_bound.items() if k.startswith("eager")}
    eager = {op: form for op, form in forms.items() if op not in ROUTED_OPS}  # strided: no example for others
    eager = {op: form for op, form in eager.items() if op not in (*FP8_CASTS, MAIN_CAST)}
    eager = eager or {k.split()[1]: f.form for k, f in curves.memory_bound.items()}
    rates = [f.bytes_per_s for f in eager.values()]
    launches = [f.launch_s for op, f in eager.items() if op in ONE_KERNEL] or [f.launch_s for f in eager.values()]
    form = {"launch_s": float(np.median(launches)), "bytes_per_element": 4.0, "bytes_per_s": float(np.median(rates))}
    words = f"{source}: median of {len(eager)} ops"
    made: dict[str, Any] = round_numbers({"provenance": "interpolated", "source": words, "form": form})
    return made


def host_facts_of_curves(base: dict[str, Any], curves: DeviceCurveFits, source: str) -> dict[str, Any]:
    """The host's facts, its issue times. A backward node of a product has two products and one addition: the rest is
    autograd's engine.

    What was not timed is the base's, as much longer as a small op takes here.
    """
    s = curves.host_s
    made = dict(base)

    def put(key: str, value_s: float, words: str) -> None:
        made[key] = _fact(f"{max(value_s, 0.0) * 1e6:.3g} us", f"{source}: {words}")

    if "eager_silu" in s:
        op_s = float(np.median([s[op] for op in SMALL_OPS if op in s]))
        factor = op_s / parse_quantity(base["eager_op_s"]["value"], "s")
        if abs(factor - 1.0) > ROUNDING:
            made = slowed_host(base, factor, f"as a small op, {source}")
        put("eager_op_s", op_s, "median of an addition, SiLU and a norm")
    if "eager_linear_grad" in s:
        put("linear_op_s", s["eager_linear_grad"], "a linear with autograd")
    if {"eager_backward_per_op", "eager_linear_grad", "eager_add"} <= set(s):
        engine = 2 * s["eager_backward_per_op"] - 2 * s["eager_linear_grad"] - s["eager_add"]
        put("backward_op_s", engine, "backward of a product, without its two products and the addition")
    if "compiled_kernel" in s:
        put("compiled_op_s", s["compiled_kernel"], "a kernel more in a compiled function")
        if "compiled_call" in s:
            put("compiled_call_s", s["compiled_call"] - s["compiled_kernel"], "call of a compiled function")
    if "dtensor_mm" in s:
        put("dtensor_op_s", (s["dtensor_mm"] + s.get("dtensor_add", s["dtensor_mm"])) / 2, "addition and product")
    if "sync" in s:
        put("sync_s", s["sync"], "torch.cuda.synchronize after a kernel")
    if {"mm_new_rows", "mm_seen_rows"} <= set(s):
        words = "a product with a number of rows that is new to the library, less one with a number that is not"
        put("gemm_choice_s", s["mm_new_rows"] - s["mm_seen_rows"], words)
    if curves.modules and curves.layer_in_small_ops is not None:
        op_s = parse_quantity(made["eager_op_s"]["value"], "s")
        layer = SmallLayerTime(*(times * op_s for times in curves.layer_in_small_ops))
        made |= small_layer_host_facts(layer, f"{source}: over the small op of the same moments")
        words = f"{source}: of a chain, or of a layer more, over the small layer beside it"
        made["modules"] = {**made.get("modules", {}), **module_host_facts(curves.modules, layer, words)}
    if optimizer := host_optimizer_facts(curves.host_optimizer, source):
        made["optimizer"] = optimizer
    return made


def measured_node_profile(base: dict[str, Any], curves: DeviceCurveFits, name: str, source: str) -> dict[str, Any]:
    """The bundled node with the measured links in place of its own."""
    made: dict[str, Any] = {**base, "name": name, "gpu": name}
    if not curves.collective:
        return made
    link = _si(base["intra"]["bandwidth_bytes_per_s"]["value"])
    largest = max(f.form.group for f in curves.collective.values())
    intra = dict(base["intra"])

    def share(op: str) -> float:
        form = curves.collective[f"{op} {largest}"].form
        return float(LARGE_BYTES * bus_bytes_per_payload_byte(op, largest) / collective_s(LARGE_BYTES, op, form) / link)

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
    made["collectives"] = {
        key: curve_profile_entry(fitted, source + ", without NVLS")
        for key, fitted in curves.collective.items() if key.split()[0] in PLANNED
    }  # fmt: skip
    return {**made, "intra": intra}


def round_numbers(value: Any) -> Any:
    """Plain numbers and lists, rounded to what a measurement gives."""
    if isinstance(value, dict):
        return {str(k): round_numbers(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [round_numbers(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def curves_as_plain_numbers(curves: DeviceCurveFits) -> dict[str, Any]:
    """The curves as plain numbers and lists, rounded to what the measurement gives."""
    curves_dict: dict[str, Any] = round_numbers(curves.as_dict())
    return curves_dict


def _bundled(kind: Folder, name: str) -> dict[str, Any]:
    if name not in bundled_names(kind):
        raise SpecError(f"{name}: no such bundled profile of {kind}; choose one that `mofa show hardware` lists")
    return expanded_profile(kind, name)


def _fact(value: float | str, source: str) -> dict[str, Any]:
    return {
        "value": float(f"{value:.4g}") if isinstance(value, float) else value,
        "provenance": "measured",
        "source": source,
    }


def _si(text: str) -> float:
    for unit in ("FLOP/s", "B/s"):
        try:
            return parse_quantity(text, unit)
        except ValueError:
            continue
    raise SpecError(f"{text!r} is no rate; write a number with FLOP/s or B/s")
