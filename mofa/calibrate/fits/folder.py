"""A folder of measurements: its rows, the curves fitted to them, and the bundled profile of its device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mofa.calibrate.fits.fit import fit_curves
from mofa.calibrate.fits.fitted_curves import DeviceCurveFits
from mofa.calibrate.measurements import Row, read_environment, read_rows
from mofa.calibrate.shapes.te_bf16 import GROUPED
from mofa.errors import SpecError
from mofa.specs.hardware import GpuSpec
from mofa.specs.load import load_cluster

BASES: Mapping[str, tuple[str, str]] = {
    "H200": ("h200-sxm", "h200-hgx"), "GH200": ("gh200", "gh200"), "H100 PCIe": ("h100-pcie", "h100-pcie-pairs"),
    "H100 NVL": ("h100-nvl", "h100-nvl-pairs"), "H100": ("h100-sxm", "h100-hgx"), "H800": ("h800", "h800-hgx"),
    "A100 SXM4 40GB": ("a100-40gb", "a100-40gb-hgx"), "A100 PCIe": ("a100-pcie", "a100-pcie-pairs"),
    "A100": ("a100-80gb", "a100-hgx"), "H20": ("h20", "h20-hgx"), "GB200": ("gb200", "gb200-nvl72"),
    "B200": ("b200", "b200-hgx"), "GB300": ("gb300", "gb300-nvl72"), "B300": ("b300", "b300-hgx"),
    "L40S": ("l40s", "l40s-pcie"), "MI300X": ("mi300x", "mi300x-oam"), "MI325X": ("mi325x", "mi325x-oam"),
    "MI355X": ("mi355x", "mi355x-oam"),
}  # fmt: skip
"""Words in the device's name, and the bundled profiles that hold the datasheet facts no measurement gives; of several
whose words are all there the first counts."""


def rows_and_curve_fits_of_folder(folder: Path) -> tuple[list[Row], DeviceCurveFits]:
    """The rows of a folder and the curves fitted to its grid."""
    rows = read_rows(folder)
    environment = read_environment(folder)
    if any(row.gpu != environment["gpu"] for row in rows):
        raise SpecError(
            f"{folder}: environment.json is of {environment['gpu']!r}, the rows are of {rows[0].gpu!r}; "
            "put back the file that belongs to them"
        )
    sms, l2_bytes = int(environment.get("num_sms") or 1), float(environment.get("l2_bytes") or 0.0)
    single = None
    if any(row.case.family == GROUPED for row in rows):
        single = bundled_gpu_of_device(rows[0].gpu, folder).curves.gemm["bf16"].form
    return rows, fit_curves(rows, num_sms=sms, gpu=rows[0].gpu, l2_bytes=l2_bytes, single=single)


def bundled_gpu_of_device(gpu: str, folder: Path) -> GpuSpec:
    """The bundled profile of a device by its name, as the rows of a folder carry it."""
    return load_cluster(bundled_gpu_and_node_of_device(gpu, folder)[1], 1).gpu


def bundled_gpu_and_node_of_device(gpu: str, folder: Path) -> tuple[str, str]:
    """The bundled GPU and node of a device's name, as the rows of a folder carry it."""
    words = {word.upper() for word in gpu.replace("-", " ").split()}
    for name, profiles in BASES.items():
        if words.issuperset(name.upper().split()):
            return profiles
    raise SpecError(
        f"{folder}: no bundled profile knows {gpu!r}, and a profile needs datasheet facts; name the nearest with --base"
    )
