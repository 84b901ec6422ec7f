"""Files of GPUs and nodes as they are read: filled in from what they are like, copies marked and rescaled."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from mofa.specs.copied_curves import rescale_copied_curves
from mofa.specs.copied_facts import Folder, with_copied_facts_transferred
from mofa.specs.earlier_names import with_current_gpu_names
from mofa.specs.files import bundled_dir, bundled_names, find_bundled_or_user_file, read_text, yaml_mapping
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.hardware import GpuSpec
from mofa.specs.like_profiles import expand_like
from mofa.specs.limited_reads import is_plain_file
from mofa.specs.workload_template import refuse_unfilled


@lru_cache(maxsize=64)
def profile_mapping_of_text(text: str, folder: Folder, where: str) -> dict[str, Any]:
    """What a GPU's or a node's file says, whole; not to be changed, as runs on other numbers of GPUs read it too.

    Raises
    ------
    SpecError
        If it is no mapping, has values that are still to be written, or is like no bundled profile.
    """
    raw = yaml_mapping(text, where)
    if folder == "gpus":
        raw = with_current_gpu_names(raw)
    refuse_unfilled(raw, where)
    if "like" in raw:
        return expand_like(raw, folder, where)
    if folder == "gpus" and text != _bundled_text(raw.get("name")):
        raw = rescale_copied_curves(raw)
    return with_copied_facts_transferred(raw, folder)


def load_gpu(name_or_path: str | Path) -> GpuSpec:
    """A GPU by itself: a bundled one by its name, or a file.

    Raises
    ------
    SpecError
        If there is no such GPU, or what the file holds is wrong.

    Examples
    --------
    >>> load_gpu("h100-sxm").num_sms.value
    132.0
    """
    path, where = find_bundled_or_user_file(name_or_path, "gpus", "mofa show hardware lists them")
    return spec_from_mapping(GpuSpec, profile_mapping_of_text(read_text(path, where), "gpus", where), where)


def find_gpu_file(name: str, folder: Path) -> Path | None:
    """The file of a GPU that a node's file in this folder names: in ``gpus`` beside it, in it, or bundled."""
    if "/" in name or "\0" in name:
        return None
    places = (folder.parent / "gpus", folder, bundled_dir("gpus"))
    return next((place / f"{name}.yaml" for place in places if is_plain_file(place / f"{name}.yaml")), None)


def is_gpu_file(path: str | Path) -> bool:
    """Whether a file is a GPU's: it has peaks, or is like a bundled GPU and no node.

    Raises
    ------
    SpecError
        If there is such a file and it is no YAML mapping.
    """
    if "\0" in str(path) or not Path(path).is_file():
        return False
    raw = yaml_mapping(read_text(path, str(path)), str(path))
    return "peak_flops_per_s" in raw or ("gpu" not in raw and raw.get("like") in bundled_names("gpus"))


def _bundled_text(name: object) -> str | None:
    """Text of the bundled GPU of this name, which is no copy of itself."""
    if not isinstance(name, str) or name not in bundled_names("gpus"):
        return None
    return (bundled_dir("gpus") / f"{name}.yaml").read_text(encoding="utf-8-sig")
