"""Write the bundled GPU and node profiles: the H200's from the committed measurements, the others' curves from its own.

python scripts/bundled_profiles.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mofa.calibrate.check import fit_folder
from mofa.calibrate.profile import gpu_profile, merged, node_profile
from mofa.specs.scaling import transferred_curves
from mofa.units import parse_quantity

ROOT = Path(__file__).resolve().parent.parent
PROFILES = ROOT / "hardware_profiles"
FOLDERS = ("h200-1gpu", "h200-2gpu", "h200-4gpu")
SAME_PROCESSOR = ("h100-sxm", "h800")
OTHERS = ("a100-80gb", "h20", "b200", "gb200")
WIDTH = 4000


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


def si(fact: dict[str, Any], unit: str) -> float:
    """A fact's value."""
    return parse_quantity(fact["value"], unit)


def main() -> None:
    """Fit, transfer, write."""
    folders = [ROOT / "measurements" / name for name in FOLDERS]
    curves = merged([fit_folder(folder)[1] for folder in folders], folders)
    source = "mofa calibrate, measurements/" + ", ".join(FOLDERS)
    h200 = gpu_profile(read("gpus", "h200-sxm"), curves, "h200-sxm", source)
    write("gpus", "h200-sxm", h200)
    node = node_profile(read("nodes", "h200-hgx"), curves, "h200-hgx", source)
    write("nodes", "h200-hgx", {**node, "gpu": "h200-sxm"})
    for name in (*SAME_PROCESSOR, *OTHERS):
        gpu = read("gpus", name)
        same = name in SAME_PROCESSOR
        rates = {
            f: si(fact, "FLOP/s") / si(h200["peak_flops_per_s"][f], "FLOP/s")
            for f, fact in gpu["peak_flops_per_s"].items()
        }
        bandwidth = si(gpu["memory_bandwidth_bytes_per_s"], "B/s") / si(h200["memory_bandwidth_bytes_per_s"], "B/s")
        sms = gpu["num_sms"]["value"] / h200["num_sms"]["value"]
        words = "the H200's, same processor" if same else "the H200's by the datasheets' ratios"
        gpu["curves"] = transferred_curves(
            h200["curves"], rates=rates, bandwidth=bandwidth, sms=sms, exact=same,
            provenance="transferred" if same else "assumed",
            source=f"{words}; memory bandwidth x {bandwidth:.3g}; see gpus/h200-sxm.yaml",
        )  # fmt: skip
        write("gpus", name, gpu)


if __name__ == "__main__":
    main()
