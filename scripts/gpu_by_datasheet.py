"""Give a GPU's profile the curves of another GPU, scaled by the ratios of their datasheets.

    python scripts/gpu_by_datasheet.py hardware_profiles/gpus/NAME.yaml --like h100-sxm

The file has the facts of the datasheet; curves that it has already are replaced. Rates of products go by peaks, of
memory-bound kernels by bandwidth and multiprocessors, host times stay. All of it is marked ``assumed``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml
from bundled_profiles import PROFILES, bandwidth_of, rates_of, read, text_of

from mofa.specs.scaling import gpu_curves_transferred_to_other


def main() -> None:
    """Read both, scale, write."""
    parser = argparse.ArgumentParser(description="Curves of a GPU by the ratios of datasheets.")
    parser.add_argument("profile", type=Path, help="YAML with the GPU's own facts")
    parser.add_argument("--like", required=True, help="bundled GPU whose curves are scaled")
    options = parser.parse_args()
    for path in (options.profile, PROFILES / "gpus" / f"{options.like}.yaml"):
        if not path.is_file():
            parser.error(f"{path}: no such file; check the path, or take a GPU that `mofa show hardware` lists")
    gpu, like = yaml.safe_load(options.profile.read_text(encoding="utf-8")), read("gpus", options.like)
    bandwidth = bandwidth_of(gpu, like)
    gpu["curves"] = gpu_curves_transferred_to_other(
        like["curves"], rates=rates_of(gpu, like), bandwidth=bandwidth,
        sms=float(gpu["num_sms"]["value"]) / float(like["num_sms"]["value"]), exact=False, provenance="assumed",
        source=f"the {options.like}'s by the datasheets' ratios; memory bandwidth x {bandwidth:.3g}",
    )  # fmt: skip
    options.profile.write_text(text_of(gpu), encoding="utf-8")
    print(f"{options.profile}: {len(gpu['curves'])} groups of curves, the {options.like}'s by the datasheets' ratios")


if __name__ == "__main__":
    main()
