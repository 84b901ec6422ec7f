"""Write the bundled GPU and node profiles: H200 and H100 by the committed measurements, the others by their curves.

python scripts/bundled_profiles.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from profile_draws import OWN_DRAWS, with_own_draws
from profile_hosts import grace_host, si, typical_host, with_modules

from mofa.calibrate.fits.fitted_curves import DeviceCurveFits
from mofa.calibrate.fits.folder import rows_and_curve_fits_of_folder
from mofa.calibrate.fits.profile import OF_TE as TE_LIBRARY
from mofa.calibrate.fits.profile import (
    curve_profile_entry,
    fitted_gpu_curves,
    held_multiprocessor_facts,
    host_facts_of_curves,
    measured_gpu_profile,
    measured_node_profile,
    memory_bound_profile_entry,
    merge_curves,
    overlap_slowdown_fact,
    product_curves_with_fp8,
    round_numbers,
    with_clock_shares,
)
from mofa.calibrate.fits.published_kernels import fit_published_kernel_curves
from mofa.calibrate.measurements import read_rows
from mofa.calibrate.shapes.te_fp8 import CASTS as FP8_CASTS
from mofa.calibrate.shapes.te_fp8 import MAIN_CAST
from mofa.cost.kernels.fitted_forms import bus_bytes_per_payload_byte
from mofa.specs.scaling import FIT_FIELDS, OF_LIBRARIES, gpu_curves_transferred_to_other, scaled_curve

ROOT = Path(__file__).resolve().parent.parent
PROFILES = ROOT / "hardware_profiles"
HOST_OPTIMIZER = "h200-host-optimizer"
"""Folder of Adam's steps on a host and its copies to and from the device."""
FOLDERS = ("h200-1gpu", "h200-1gpu-routed", "h200-1gpu-sums", "h200-2gpu", "h200-4gpu")
H200_OVERLAP = "h200-2gpu-overlap"
"""Layers beside the collective that carries them; others' folders have kernels in a loop alone."""
H200_HELD = "h200-1gpu-held"
"""The same layers beside a kernel that holds multiprocessors."""
H100_FOLDERS = ("h100-1gpu-routed", "h100-1gpu", "h100-1gpu-sums", "h100-2gpu", "h100-4gpu")
ACTIVATIONS = "h100-1gpu-te-activations"
THROTTLED_FOLDERS = ("h100-1gpu-throttled", "h100-1gpu-te-throttled", "h100-1gpu-te-throttled-second", ACTIVATIONS)
"""Memory-bound kernels and attention behind products that hold the H100's clock down."""
H200_THROTTLED = ("h200-1gpu-throttled", "h200-1gpu-te", "h200-1gpu-te-loss")
"""The same of the H200."""
TE_FP8_FOLDERS = ("h100-1gpu-te", "h100-1gpu-te-sustained")
"""Folders of the fp8 kernels of Transformer Engine, measured on the H100."""
H100_TE, H100_TE_MORE = "h100-1gpu-te-bf16", ("h100-1gpu-te-order", "h100-1gpu-te-dense", ACTIVATIONS)
"""Transformer Engine's and Megatron-Core's own kernels in bf16, the router's; what puts gathered chunks in order, and
dense layers' activations."""
H200_TE = "h200-1gpu-te"
"""All of Transformer Engine's kernels on the H200, bf16 and fp8."""
H200_LOSS = "h200-1gpu-te-loss"
"""Megatron's loss and the zeroing of its gradients on the H200."""
H200_CAPACITY, DROPS = "h200-1gpu-te-capacity", ("megatron router_drop_fwd", "megatron router_drop_bwd")
"""What drops tokens beyond an expert's capacity, on the H200; the H100 has it from there."""
OF_TE = ("te rmsnorm", "te layernorm", "te rope", "te permute", "te unpermute", "te sort", "te row_map",
         "te weighted_swiglu", "te swiglu", "te wgrad_add", "te chunk_order", "megatron router", "te router",
         "te geglu", "te squared_relu", "te bias_gelu", "megatron loss", "megatron compiled_loss",
         "megatron zero_buffer")  # fmt: skip
"""How keys of those of their memory-bound ops begin that tapes are made of."""
ADDING = (
    "17 products of an H200 that add to fp32 take 1.25 ps an element longer than those that write bf16, as long as on "
    "the H100 (6 bytes at 4.77 TB/s); rows of te_wgrad tell only of products that add"
)
H100_LOSS = {"megatron loss_fwd": 15.4e-12, "megatron loss_bwd": 5.43e-12}
"""Seconds an element of the logits. [s]"""
H100_LOSS_SOURCE = (
    "medians of 13 traced H100 steps of the fitting half (reference_runs/traces, *-warm-traced): 15.1 to "
)
H100_LOSS_SOURCE += (
    "16.3 ps a logit forward, 5.28 to 5.74 back, at the clock of those steps; launches and power the H200's"
)
SWIGLU_BACK = "te weighted_swiglu_bwd"
SWIGLU_BACK_FORM = {"bytes_per_s": 10.0 / 6.7e-12, "per_row_s": 0.0, "per_column_s": 0.0}
SWIGLU_BACK_SOURCE = (
    "6.7 ps an element of 10 bytes, both kernels (6.5 to 6.9 over widths of 512 to 14336): the median of 7 traced "
    "configurations of the fitting half; compiled for one shape, as measurements/h100-1gpu-te-bf16 timed it, 8.6 to 9.0"
)
H100_EIGHT = "h100-8gpu-simumax"
H100_RELEASES = {"2.1": "h100-torch-2.1"}
"""Folders of the kernels of other releases of PyTorch; today's, timed in turn with them, are in ``-beside``."""
RATES_FROM_BYTES = 16 * 2**20
"""Payloads from which times are the device's, and not the host's launch alone. [B]"""
MAIN_CAST_INSTRUCTIONS, HOPPER_CLOCK_HZ = 3828.0, 1.98e9
MAIN_CAST_SOURCE = (
    "machine code of Transformer Engine 2.20.2 for sm_90, cast_transpose_general_kernel of bf16 to e4m3, one row: "
    "3828 warp instructions for a block of 64 elements, one a cycle on each of a multiprocessor's 4 schedulers, "
    "at the 1980 MHz of measurements/h100-1gpu-te"
)
OTHERS = ("a100-80gb", "h20", "b200")
CLOCKS = {"a100-80gb": 1.41 / 1.98}
"""Highest clock over the H200's, of processors whose own differs: 19.5 TFLOP/s in fp32 are 108 multiprocessors of 64
lanes, two operations each, at 1.41 GHz; nvidia-smi gives the H200 and the H100 1.98 GHz. [-]"""
FLASH1 = {"fwd": 1.4, "bwd": 2.0}
"""Time of the first FlashAttention in Triton over FlashAttention 2: 1.3 to 1.5 forward, around 2 backward. [-]"""
FLASH1_SOURCE = "Dao 2023, FlashAttention-2, arXiv 2307.08691, section 4.1"
A100_GEMM = 1.08
"""Rate of the A100's products over the H200's by the ratio of the peaks: with it the five layer timings of Korthikanti
et al. (2022), Table 4, 19.0 to 27.2 ms forward and backward, are met within 0.5 %
(tests/validate/test_megatron_2022.py); end-to-end runs were not looked at. [-]"""
A100_SOURCE = (
    f"the H200's form by the datasheets' ratios, {A100_GEMM} times as fast: the five layer timings of "
    "Korthikanti et al. (2022), arXiv 2205.05198, Table 4"
)
A100_FLASH = 230.0 / 370.0
"""Rate of FlashAttention 2 on an A100 (its paper, arXiv 2307.08691: up to 230 TFLOP/s forward) over the H200's curve
at 16384 tokens: it was written for the A100 and does not use the H100's asynchronous products. [-]"""
A100_FLASH_SOURCE = "the H200's form, 230 (Dao 2023, arXiv 2307.08691) over 370 TFLOP/s as fast"
A100_OVERLAP_SOURCE = "products in a loop on an H200, whose layers lose more by kernels that Ampere has not"
SPREAD_SOURCE = (
    "the H200's: chips differ wherever a power limit acts (Sinha et al. 2022, Not All GPUs Are Created Equal, SC22, on "
    "five clusters of earlier GPUs)"
)
HOST = PROFILES / "hosts" / "xeon-8480c.yaml"
HOST_HEAD = (
    "# The host that most issue times were measured on; scripts/bundled_profiles.py makes a typical one of it.\n"
)
SIMUMAX = "measured by SimuMax on a B200 (configs/system/b200_bf16_ceperm.json), measurements/b200-simumax"


class _Dumper(yaml.SafeDumper):
    """Short numbers, aliases written out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _number(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    text = f"{value:.6g}" if 1e-4 <= abs(value) < 1e6 or value == 0 else f"{value:.5e}"
    if "e" in text:
        mantissa, exponent = text.split("e")
        mantissa = mantissa.rstrip("0")
        text = f"{mantissa}0e{int(exponent):+d}" if mantissa.endswith(".") else f"{mantissa}e{int(exponent):+d}"
    elif "." not in text:
        text += ".0"
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_Dumper.add_representer(float, _number)


def read(kind: str, name: str) -> dict[str, Any]:
    """A bundled profile as it is."""
    found: dict[str, Any] = yaml.safe_load((PROFILES / kind / f"{name}.yaml").read_text(encoding="utf-8"))
    return found


def flow(value: Any) -> str:
    """One line."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def text_of(value: dict[str, Any], depth: int = 0) -> str:
    """YAML with one fact or curve a line."""
    lines = []
    for key, item in value.items():
        leaf = not isinstance(item, dict) or "provenance" in item or not item
        if leaf:
            lines.append(f"{'  ' * depth}{flow(key)}: {flow(item)}\n")
        else:
            lines.append(f"{'  ' * depth}{flow(key)}:\n{text_of(item, depth + 1)}")
    return "".join(lines)


def write(kind: str, name: str, value: dict[str, Any]) -> None:
    """Replace a bundled profile."""
    (PROFILES / kind / f"{name}.yaml").write_text(text_of(value), encoding="utf-8")


def with_flash1(curves: dict[str, Any]) -> dict[str, Any]:
    """The first FlashAttention in Triton beside the second: no kernel of it runs with today's compilers."""
    attention = {key: curve for key, curve in curves["attention"].items() if not key.startswith("flash1")}
    for key, curve in list(attention.items()):
        backend, way, sizes = key.split()
        if backend == "flash":
            form = {**curve["form"], "unit_s": float(f"{curve['form']['unit_s'] * FLASH1[way]:.5g}")}
            known = {k: v for k, v in curve.items() if k not in FIT_FIELDS}
            provenance = "assumed" if curve["provenance"] == "assumed" else "transferred"
            source = f"{FLASH1[way]} times the time of FlashAttention 2: {FLASH1_SOURCE}"
            attention[f"flash1 {way} {sizes}"] = {**known, "provenance": provenance, "source": source, "form": form}
    return {**curves, "attention": attention}


def rates_of(gpu: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Peak rate of each format of a GPU over another's. [-]"""
    return {
        f: si(fact, "FLOP/s") / si(other["peak_flops_per_s"][f], "FLOP/s")
        for f, fact in gpu["peak_flops_per_s"].items()
    }


def bandwidth_of(gpu: dict[str, Any], other: dict[str, Any]) -> float:
    """Memory bandwidth over another GPU's. [-]"""
    key = "memory_bandwidth_bytes_per_s"
    return si(gpu[key], "B/s") / si(other[key], "B/s")


def b200_curves(h200: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Products and attention as SimuMax timed them; other formats by the H200's ratios, the rest from ``base``.

    How much faster products are between memory-bound kernels than alone, under the power limit, is the H200's too.
    """
    kept = {
        name: curve["sustained"] / curve["alone"]
        for name, curve in (
            ("gemm bf16", h200["gemm"]["bf16"]),
            ("attention_cudnn_fwd bf16", h200["attention"]["cudnn fwd 128/128"]),
            ("attention_cudnn_bwd bf16", h200["attention"]["cudnn bwd 128/128"]),
        )
    }
    curves = fit_published_kernel_curves(
        read_rows(ROOT / "measurements" / "b200-simumax"), num_sms=148, power_shares=kept
    )
    words = f"{SIMUMAX}; the limited state between memory-bound kernels by the H200's"
    made = fitted_gpu_curves(base, {"bf16": 1.0}, curves, words)
    for family in ("gemm", "grouped_gemm"):
        for other in ("fp8", "fp32"):
            if other in base[family]:
                made[family][other] = base[family][other]
    faster = max(r for _, _, r in h200["gemm"]["fp8"]["form"]["tiles"]) / max(
        r for _, _, r in h200["gemm"]["bf16"]["form"]["tiles"]
    )
    for family in ("gemm", "grouped_gemm"):
        known = {k: v for k, v in made[family]["bf16"].items() if k not in FIT_FIELDS}
        source = f"{SIMUMAX}: bf16's, {faster:.3g} times as fast as on the H200"
        made[family]["fp8"] = {**scaled_curve(known, faster, 1.0, 1.0), "provenance": "assumed", "source": source}
    # the few experts' rows that take the small tile were not measured: the H200's share of the large one
    form, own = made["grouped_gemm"]["bf16"]["form"], h200["grouped_gemm"]["bf16"]["form"]
    for curve in (made["grouped_gemm"]["bf16"], made["grouped_gemm"]["fp8"]):
        share = curve["form"]["large_rate"] * own["small_rate"] / own["large_rate"]
        curve["form"] = {**curve["form"], "small_rate": share, "small_k_overhead": form["large_k_overhead"]}
    made["attention"] = {**base["attention"], **made["attention"]}
    made.pop("stream_clock", None)  # no clocks were read: the share of products says how far they fall
    made["chip_spread"] = spread_of(h200)
    return made


def spread_of(h200: dict[str, Any]) -> dict[str, Any]:
    """How far chips of another power-limited GPU differ: as the H200's."""
    return {**h200["chip_spread"], "provenance": "assumed", "source": SPREAD_SOURCE}


def fitted(names: Sequence[str]) -> tuple[DeviceCurveFits, str]:
    """The curves of folders of one GPU, and where they are from."""
    folders = [ROOT / "measurements" / name for name in names]
    return merge_curves(
        [rows_and_curve_fits_of_folder(folder)[1] for folder in folders], folders
    ), "mofa calibrate, measurements/" + ", ".join(names)


def same_processor(gpu: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The curves of a GPU with the same processor, which differs in its memory alone."""
    bandwidth, name = bandwidth_of(gpu, other), other["name"]
    words = f"the {name.split('-')[0].upper()}'s, same processor; memory bandwidth x {bandwidth:.3g}"
    return gpu_curves_transferred_to_other(
        other["curves"], rates=rates_of(gpu, other), bandwidth=bandwidth, sms=1.0, exact=True,
        provenance="transferred", source=f"{words}; see gpus/{name}.yaml",
    )  # fmt: skip


def release(name: str, today: dict[str, Any]) -> dict[str, Any]:
    """Kernels of another release of PyTorch, as one folder has them, fitted as today's are.

    What the power limit leaves of products differs from chip to chip and with what runs between them, more than from
    library to library: it is today's in the profile by the ratio of what both kept in turn on one chip.
    """
    folders = [ROOT / "measurements" / one for one in (name, f"{name}-beside")]
    own, beside = (rows_and_curve_fits_of_folder(folder)[1] for folder in folders)
    source = f"mofa calibrate, measurements/{name}"
    made: dict[str, Any] = {"gemm": {}}
    for dtype, one in own.gemm.items():
        known, kept = today["gemm"][dtype], {}
        for state, key in (("sustained", f"gemm {dtype} between_memory"), ("alone", f"gemm {dtype} alone")):
            kept[state] = known[state] * own.sustained[key] / beside.sustained[key]
        made["gemm"][dtype] = curve_profile_entry(one, source, **kept, clock=known["clock"])
    if own.memory_bound:
        made["stream"] = {key: curve_profile_entry(one, source) for key, one in own.memory_bound.items()}
    return made


def with_te_fp8(h100: dict[str, Any]) -> dict[str, Any]:
    """The H100's curves with Transformer Engine's fp8 products and casts."""
    own, source = fitted(TE_FP8_FOLDERS)
    casts = {key: curve_profile_entry(one, source) for key, one in own.memory_bound.items()}
    casts = {**main_cast(132.0), **casts}
    return {**h100, **product_curves_with_fp8(h100, h100, own, source), "stream": {**h100["stream"], **casts}}


def main_cast(num_sms: float, provenance: str = "read") -> dict[str, Any]:
    """The cast of main parameters to fp8 ones, where it was not measured: as fast as instructions issue."""
    element_s = MAIN_CAST_INSTRUCTIONS / 64.0 / (4.0 * num_sms * HOPPER_CLOCK_HZ)
    form = {"launch_s": 2e-6, "bytes_per_element": 4.0, "bytes_per_s": 4.0 / element_s, "per_row_s": 0.0,
            "per_column_s": 0.0}  # fmt: skip
    return {f"eager {MAIN_CAST}": {"provenance": provenance, "source": MAIN_CAST_SOURCE, "form": form}}


def h100_gpu(h200: dict[str, Any]) -> dict[str, Any]:
    """The H100 by its own kernels; the H200's stand for what was not measured on it, as layers beside collectives.

    Hosts belong to machines, not to GPUs: a typical one stands for both.
    """
    gpu = read("gpus", "h100-sxm")
    curves, source = fitted(H100_FOLDERS)
    base = {**gpu, "curves": same_processor(gpu, h200)}
    behind, _ = fitted(THROTTLED_FOLDERS)
    curves = replace(curves, host_s={}, overlap_slowdown=0.0, clock_powers=curves.clock_powers | behind.clock_powers)
    made = measured_gpu_profile(base, curves, "h100-sxm", source)
    made["curves"]["releases"] = {number: release(name, made["curves"]) for number, name in H100_RELEASES.items()}
    own, source = fitted([H100_TE])
    states = ("sustained", "alone", "clock", "clock_power", "full_load_flops")
    kept = {state: made["curves"]["gemm"]["bf16"][state] for state in states}
    made["curves"]["multi_stream"] = {
        f: {**curve_profile_entry(one, source, **kept), **TE_LIBRARY} for f, one in own.multi_stream.items()
    }
    for measured, measured_in in ((own, source), *(fitted([name]) for name in H100_TE_MORE)):
        made["curves"]["stream"] |= {
            key: memory_bound_profile_entry(key, one, measured_in)
            for key, one in measured.memory_bound.items()
            if key.startswith(OF_TE)
        }
    back = made["curves"]["stream"][SWIGLU_BACK]
    back |= {"source": SWIGLU_BACK_SOURCE, "form": {**back["form"], **SWIGLU_BACK_FORM}}
    made["curves"] |= {name: gpu["curves"][name] for name in OF_LIBRARIES if name in gpu["curves"]}
    return made


def with_own_te(h200: dict[str, Any], h100: dict[str, Any]) -> dict[str, Any]:
    """The H200's curves with Transformer Engine's kernels as they were timed on it.

    What no row of its own tells is the H100's: the experts' SwiGLU back, which was read off traced steps, and what
    adding to an fp32 gradient takes.
    """
    (own, source), (drops, of_drops) = fitted([H200_TE, H200_LOSS]), fitted([H200_CAPACITY])
    states = ("sustained", "alone", "clock", "full_load_flops")
    known = {state: h200["gemm"]["bf16"][state] for state in states}
    several = {"bf16": {**curve_profile_entry(own.multi_stream["bf16"], source, **known), **TE_LIBRARY}}
    stream = {
        key: memory_bound_profile_entry(key, one, source)
        for key, one in own.memory_bound.items()
        if key.startswith(OF_TE) or key.split()[-1] in FP8_CASTS
    }
    moved = same_processor(read("gpus", "h200-sxm"), {**read("gpus", "h100-sxm"), "curves": h100})
    stream |= {key: memory_bound_profile_entry(key, drops.memory_bound[key], of_drops) for key in DROPS}
    stream[SWIGLU_BACK] = moved["stream"][SWIGLU_BACK]
    stream["megatron zero_buffer"] = zero_buffer()
    stream["te wgrad_add"] = {**h100["stream"]["te wgrad_add"], "provenance": "transferred", "source": ADDING}
    products = product_curves_with_fp8(h200, {**h200, "multi_stream": several}, own, source)
    return {**h200, **products, "stream": with_own_draws({**h200["stream"], **stream})}


def zero_buffer() -> dict[str, Any]:
    """How fast one buffer of gradients is zeroed, by the few rows there are: fewer than a fit takes."""
    rows = [row for row in read_rows(ROOT / "measurements" / H200_LOSS) if row.case.op == "zero_buffer"]
    rate = float(np.median([4.0 * row.case.shape_size("params") / row.sample.median_s for row in rows]))
    said = f"median of {len(rows)} buffers of 0.2 to 4 billion numbers on an H200 (measurements/{H200_LOSS})"
    form = {"launch_s": 0.0, "bytes_per_element": 4.0, "bytes_per_s": rate, "per_row_s": 0.0, "per_column_s": 0.0}
    return dict(round_numbers({"provenance": "measured", "source": said, "form": form}))


def with_loss_of_steps(h100: dict[str, Any], h200: dict[str, Any]) -> dict[str, Any]:
    """The H100's curves with Megatron's loss as traced steps have it, and the H200's for what was not timed here."""
    moved = same_processor(read("gpus", "h100-sxm"), {**read("gpus", "h200-sxm"), "curves": h200})["stream"]
    stream = {key: {k: v for k, v in moved[key].items() if k != "clock_share"} for key in (*OWN_DRAWS, *DROPS)}
    for key, element_s in H100_LOSS.items():
        form = {**stream[key]["form"], "bytes_per_s": stream[key]["form"]["bytes_per_element"] / element_s}
        known = {k: v for k, v in stream[key].items() if k not in FIT_FIELDS}
        stream[key] = round_numbers({**known, "provenance": "measured", "source": H100_LOSS_SOURCE, "form": form})
    return {**h100, "stream": {**h100["stream"], **stream}}


def eight_gpus(four: dict[str, Any], gpus: str) -> dict[str, Any]:
    """Collectives over eight GPUs of a node: of small payloads as four GPUs', in more steps, of large ones as SimuMax
    measured them.

    Its times of small payloads hold the host's launches (44 to 83 us, whatever the size), which are counted apart here.
    """
    rows = [
        row for row in read_rows(ROOT / "measurements" / H100_EIGHT) if row.case.shape_size("bytes") >= RATES_FROM_BYTES
    ]
    made = {}
    for key, curve in four["collectives"].items():
        op, group = key.split()
        own = [row for row in rows if row.case.op == op]
        if group == "4" and own:
            factor = four["nvls_factor"]["value"] if op == "all_reduce" else 1.0
            protocols = sorted((start * 7 / 3, rate) for start, rate in curve["form"]["protocols"])
            times = np.array([row.sample.median_s for row in own])
            moved = np.array([row.case.shape_size("bytes") / factor * bus_bytes_per_payload_byte(op, 8) for row in own])
            # start and time a byte with the least relative errors
            start, each = np.linalg.lstsq(np.stack([1 / times, moved / times], axis=1), np.ones(len(own)), rcond=None)[
                0
            ]
            protocols[2:] = [(float(start), float(1 / each))]
            known = {k: v for k, v in curve.items() if k not in FIT_FIELDS}
            form = {"protocols": [list(pair) for pair in protocols], "group": 8}
            said = f"small payloads: starts of four {gpus} times 7/3; large: by SimuMax on 8 H100s, measurements/"
            said += H100_EIGHT
            if factor != 1.0:
                said += f", payloads over nvls_factor {factor:g}"
            made[f"{op} 8"] = round_numbers({**known, "provenance": "transferred", "source": said, "form": form})
    return made


def h100_node() -> dict[str, Any]:
    """Links of the H100's node: two and four GPUs measured, eight made of four."""
    node = read("nodes", "h100-hgx")
    curves, source = fitted(H100_FOLDERS)
    made = measured_node_profile(node, curves, "h100-hgx", source)
    made["intra"] = {**node["intra"], "latency_s": made["intra"]["latency_s"]}  # large payloads: of eight GPUs
    made["collectives"] |= eight_gpus(made, "H100s")
    return {**made, "gpu": node["gpu"]}


def with_shares(curves: dict[str, Any], folders: Sequence[str]) -> dict[str, Any]:
    """Curves with what a lower clock makes of memory-bound kernels; those that were read off steps have it
    in them."""
    behind, _ = fitted(folders)
    stream = with_clock_shares(curves["stream"], behind)
    return {**curves, "stream": {**stream, SWIGLU_BACK: curves["stream"][SWIGLU_BACK]}}


def main() -> None:
    """Fit, transfer, write."""
    curves, source = fitted(FOLDERS)
    known = read("gpus", "h200-sxm")
    known["curves"]["host"] = yaml.safe_load(HOST.read_text(encoding="utf-8"))
    behind, _ = fitted(H200_THROTTLED)
    beside_kernels = overlap_slowdown_fact(curves, source)["overlap_slowdown"]
    curves = replace(curves, clock_powers=curves.clock_powers | behind.clock_powers, overlap_slowdown=0.0)
    h200 = measured_gpu_profile(known, curves, "h200-sxm", source)
    h200["curves"] |= overlap_slowdown_fact(*fitted([H200_OVERLAP])) | held_multiprocessor_facts(*fitted([H200_HELD]))
    first_host = with_modules(h200["curves"]["host"])
    first_host |= host_facts_of_curves({}, *fitted([HOST_OPTIMIZER]))  # of a machine of the kind
    HOST.write_text(HOST_HEAD + text_of(first_host), encoding="utf-8")
    h200["curves"] |= typical_host(first_host)
    node = {**measured_node_profile(read("nodes", "h200-hgx"), curves, "h200-hgx", source), "gpu": "h200-sxm"}
    node["collectives"] |= eight_gpus(node, "H200s")
    write("nodes", "h200-hgx", node)
    h100 = h100_gpu(h200)
    for name in ("layer_issue_s", "layer_back_s", "modules"):  # timed on H100s' hosts
        h100["curves"]["host"][name] = h200["curves"]["host"][name]
    h100["curves"] = with_shares(with_te_fp8(h100["curves"]), THROTTLED_FOLDERS)
    h200["curves"] = with_shares(with_own_te(h200["curves"], h100["curves"]), H200_THROTTLED)
    h100["curves"] = with_loss_of_steps(h100["curves"], h200["curves"])
    write("gpus", "h200-sxm", {**h200, "curves": with_flash1(h200["curves"])})
    write("gpus", "h100-sxm", {**h100, "curves": with_flash1(h100["curves"])})
    write("nodes", "h100-hgx", h100_node())
    h800 = read("gpus", "h800")
    write("gpus", "h800", {**h800, "curves": with_flash1(same_processor(h800, h100))})
    for name in OTHERS:
        gpu = read("gpus", name)
        rates, bandwidth = rates_of(gpu, h200), bandwidth_of(gpu, h200)
        sms = gpu["num_sms"]["value"] / h200["num_sms"]["value"]
        gpu["curves"] = gpu_curves_transferred_to_other(
            h200["curves"], rates=rates, bandwidth=bandwidth, sms=sms, clock=CLOCKS.get(name, 1.0), exact=False,
            provenance="assumed",
            source=f"the H200's by the datasheets' ratios; memory bandwidth x {bandwidth:.3g}; see gpus/h200-sxm.yaml",
        )  # fmt: skip
        if name == "a100-80gb":
            assumed = {**beside_kernels, "provenance": "assumed", "source": A100_OVERLAP_SOURCE}
            gpu["curves"]["overlap_slowdown"] = assumed
            curve = gpu["curves"]["gemm"]["bf16"]
            known = {**scaled_curve(curve, A100_GEMM, 1.0, 1.0), "provenance": "transferred", "source": A100_SOURCE}
            gpu["curves"]["gemm"]["bf16"] = known
            for key, own in h200["curves"]["attention"].items():
                if key.split()[0] == "flash":
                    known = {k: v for k, v in own.items() if k not in FIT_FIELDS}
                    known = {**known, "provenance": "transferred", "source": A100_FLASH_SOURCE}
                    gpu["curves"]["attention"][key] = scaled_curve(known, A100_FLASH, bandwidth, sms)
        if name == "h20":
            gpu["curves"]["stream"] |= main_cast(gpu["num_sms"]["value"], "assumed")
        if name == "b200":
            gpu["curves"] = b200_curves(h200["curves"], gpu["curves"])
            b200 = gpu
        write("gpus", name, {**gpu, "curves": with_flash1(gpu["curves"])})
    gpu = read("gpus", "gb200")
    gpu["curves"] = gpu_curves_transferred_to_other(
        b200["curves"], rates=rates_of(gpu, b200), bandwidth=bandwidth_of(gpu, b200), sms=1.0, exact=False,
        provenance="transferred", source="the B200's by the datasheets' ratios; see gpus/b200.yaml",
    )  # fmt: skip
    gpu["curves"]["chip_spread"] = spread_of(h200["curves"])
    gpu["curves"]["host"] = grace_host(first_host)
    write("gpus", "gb200", {**gpu, "curves": with_flash1(gpu["curves"])})


if __name__ == "__main__":
    main()
