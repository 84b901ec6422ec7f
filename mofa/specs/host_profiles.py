"""Hosts by themselves: what `mofa calibrate host` writes, and plans take in place of a GPU's typical host."""

from __future__ import annotations

from pathlib import Path

from mofa.specs.files import find_bundled_or_user_file, load_yaml
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.host import HostIssueTimes


def load_host_profile(name_or_path: str | Path) -> HostIssueTimes:
    """A host's profile: a bundled one by its name, or a file.

    Raises
    ------
    SpecError
        If there is no such host, or what the file holds is wrong.

    Examples
    --------
    >>> round(load_host_profile("xeon-8480c").eager_op_s.value * 1e6, 2)
    5.4
    """
    path, where = find_bundled_or_user_file(name_or_path, "hosts", "mofa calibrate host writes one")
    return spec_from_mapping(HostIssueTimes, load_yaml(path, where), where)
