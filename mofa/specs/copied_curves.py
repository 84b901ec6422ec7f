"""GPUs made by copying another's file: curves that were copied go with the peaks that were changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from mofa.specs.copied_facts import bundled_profile_mapping
from mofa.specs.curve_ratios import curves_scaled_by_ratios
from mofa.specs.files import bundled_names


def rescale_copied_curves(gpu: dict[str, Any]) -> dict[str, Any]:
    """A GPU's mapping whose curves, where they are a bundled GPU's, are rescaled to the facts above them.

    A copied file keeps the curves of the GPU that it was copied from. With another peak, bandwidth, power or number of
    multiprocessors they are rescaled as those of a file that says ``like``, and ``assumed``; curves that are not that
    GPU's stay.

    Parameters
    ----------
    gpu
        What a GPU's file holds; not changed.

    Returns
    -------
    dict
        The same where no curve is copied, or nothing differs.

    Examples
    --------
    >>> h100 = bundled_profile_mapping("gpus", "h100-sxm")
    >>> peaks = {**h100["peak_flops_per_s"], "bf16": {"value": "494.7 TFLOP/s"}}
    >>> copy = rescale_copied_curves({**h100, "peak_flops_per_s": peaks})
    >>> (tile, own) = (profile["curves"]["gemm"]["bf16"]["form"]["tiles"][-1][2] for profile in (copy, h100))
    >>> round(tile / own, 4)
    0.5
    >>> rescale_copied_curves(h100) is h100
    True
    """
    owner = _owner(gpu)
    if owner is None or not isinstance(gpu.get("peak_flops_per_s"), Mapping):
        return gpu
    like = bundled_profile_mapping("gpus", owner)
    scaled = curves_scaled_by_ratios(gpu, like)
    return gpu if scaled is like["curves"] else {**gpu, "curves": _replaced(gpu["curves"], like["curves"], scaled)}


def _owner(gpu: Mapping[str, Any]) -> str | None:
    """The bundled GPU that most of a GPU's curves are of; one of its own name first."""
    curves = gpu.get("curves")
    if not isinstance(curves, Mapping):
        return None
    own = dict(_forms(curves))
    shared = {
        name: sum(own.get(path) == form for path, form in _bundled_forms(name))
        for name in sorted(bundled_names("gpus"), key=lambda name: name != gpu.get("name"))
        if "like" not in bundled_profile_mapping("gpus", name)
    }
    owner = max(shared, key=shared.__getitem__)
    return owner if shared[owner] else None


@cache
def _bundled_forms(name: str) -> tuple[tuple[str, Any], ...]:
    return tuple(_forms(bundled_profile_mapping("gpus", name)["curves"]))


def _forms(curves: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every fitted form with its path."""
    for key, item in curves.items():
        if isinstance(item, Mapping) and "form" in item:
            yield f"{prefix}{key}", item["form"]
        elif isinstance(item, Mapping):
            yield from _forms(item, f"{prefix}{key}.")


def _replaced(own: Mapping[str, Any], like: Mapping[str, Any], scaled: Mapping[str, Any]) -> dict[str, Any]:
    """A GPU's curves with the scaled ones in place of those that it has of another, and without those that have none:
    of a format that the GPU lacks."""
    made: dict[str, Any] = {}
    for key, item in own.items():
        known = like.get(key)
        if not isinstance(item, Mapping) or not isinstance(known, Mapping):
            made[key] = item
        elif "form" not in item:
            inner = scaled.get(key)
            made[key] = _replaced(item, known, inner) if isinstance(inner, Mapping) else item
        elif item["form"] != known.get("form"):
            made[key] = item
        elif key in scaled:
            made[key] = scaled[key]
    return made
