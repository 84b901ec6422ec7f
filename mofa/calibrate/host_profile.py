"""`mofa calibrate host`: what this machine's host takes to issue work, as a profile that plans take with ``--host``."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mofa.calibrate.fits.fitted_curves import DeviceCurveFits
from mofa.calibrate.fits.folder import bundled_gpu_and_node_of_device, rows_and_curve_fits_of_folder
from mofa.calibrate.fits.profile import host_facts_of_curves
from mofa.calibrate.fits.te_host_facts import small_layer_host_facts
from mofa.calibrate.run_cases import Progress, measure_cases, why_gpu_cannot_be_timed
from mofa.errors import SpecError
from mofa.specs.copied_facts import mark_all_as_transferred
from mofa.specs.files import profile_as_yaml
from mofa.specs.host import SmallLayerTime, layer_time_factors_by_fact
from mofa.specs.like_profiles import expanded_profile
from mofa.specs.scaling import slowed_host
from mofa.units import parse_quantity

CPU_INFO = Path("/proc/cpuinfo")
SOURCE = "mofa calibrate host"
FALLBACK_GPU = "h100-sxm"
"""Whose typical host gives what is not timed, on a GPU that no bundled profile knows."""


def measure_host(progress: Progress | None = None) -> dict[str, Any]:
    """Time this machine's host on one GPU, in about a minute: the mapping of a :class:`mofa.specs.host.HostIssueTimes`.

    What is not timed is the typical host's of the nearest bundled GPU, as much longer as a small op takes here. Modules
    of Transformer Engine go by a small layer of it where it is installed.

    Raises
    ------
    SpecError
        Without torch or a GPU: nearly all that a host does in training is to launch work on one.
    """
    refuse_without_gpu()
    with TemporaryDirectory(prefix="mofa-host-") as scratch:
        folder = Path(scratch)
        measure_cases(folder, families=["host"], device="cuda", gpus=1, progress=progress)
        _, curves = rows_and_curve_fits_of_folder(folder)
    return host_profile_mapping(curves, processor_name(), _layer_pace())


def refuse_without_gpu() -> None:
    """Refuse a machine on which no host's launches can be timed, and say what would do."""
    lacking = why_gpu_cannot_be_timed()
    if lacking is not None:
        raise SpecError(
            f"{SOURCE}: {lacking}, and one GPU of any kind is needed, since a host's work is to launch on it; run the "
            "same command on the GPU machine, or say --host-issue where you know what a small op takes"
        )


def host_profile_mapping(curves: DeviceCurveFits, cpu: str, layer: SmallLayerTime | None = None) -> dict[str, Any]:
    """A host's profile of what was timed.

    Parameters
    ----------
    curves
        Fitted rows of the family ``host``. [s]
    cpu
        Name of the processor.
    layer
        What a small layer of Transformer Engine takes, where that was timed. [s]
    """
    try:
        gpu, _ = bundled_gpu_and_node_of_device(curves.gpu, Path(SOURCE))
    except SpecError:
        gpu = FALLBACK_GPU
    base = mark_all_as_transferred(expanded_profile("gpus", gpu)["curves"]["host"], gpu)
    source = f"{SOURCE}, on {curves.gpu}"
    made = host_facts_of_curves(base, curves, source)
    if layer is not None:
        ahead, back = (parse_quantity(base[name]["value"], "s") for name in ("layer_issue_s", "layer_back_s"))
        by_name = layer_time_factors_by_fact(layer.issue_s / ahead, layer.back_s / back)
        modules = slowed_host({"modules": base.get("modules", {})}, 1.0, f"as a small layer, {source}", by_name)
        made = {**made, **modules, **small_layer_host_facts(layer, f"{source}: a small layer of Transformer Engine")}
    return {**made, "cpu": cpu}


def processor_name(info: Path = CPU_INFO) -> str:
    """The processor's name as the system has it; ``unknown processor`` where it says none."""
    try:
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next((name for name in names if name), "unknown processor")


def host_profile_yaml(facts: dict[str, Any]) -> str:
    """A host's profile as YAML."""
    head = "# What this host takes to issue work, by mofa calibrate host; mofa plan takes it with --host.\n"
    return head + profile_as_yaml(facts)


def _layer_pace() -> SmallLayerTime | None:
    """A small layer of Transformer Engine on this host; None where it is not installed."""
    try:
        from mofa.host_pace import TransformerEngineLayer

        return SmallLayerTime(*TransformerEngineLayer().forward_and_backward_s())
    except ImportError:
        return None
