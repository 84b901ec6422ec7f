"""Facts that a user sets: each has a range that means something."""

from __future__ import annotations

import pytest

from mofa.errors import SpecError
from mofa.specs.load import load_cluster, load_framework
from mofa.specs.memory_limit import with_memory_limit


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("gpu.curves.stream_clock", 100, "value (100) must be at least 0.1 and at most 4"),
        ("gpu.curves.chip_spread", 50, "value (50) must be at least 0 and at most 1"),
        ("gpu.curves.step_jitter", 2, "value (2) must be at least 0 and at most 1"),
        ("gpu.curves.host_spread", 2, "value (2) must be at least 0 and at most 1"),
        ("gpu.curves.host_swing", 2, "value (2) must be at least 0 and at most 1"),
        ("gpu.curves.overlap_slowdown", 1.5, "value (1.5) must be at least 0 and at most 1"),
        ("gpu.curves.hosts.slow", 1e9, "give 1 to 1000"),
        ("gpu.curves.layer_kernels.te_norm_forward", 1e-9, "value (1e-09) must be at least 0.001 and at most 1000"),
        ("node.nvls_factor", 50, "value (50) must be at least 1 and at most 2"),
    ],
)  # fmt: skip
def test_facts_of_hardware_have_physical_ranges(path: str, value: object, words: str) -> None:
    with pytest.raises(SpecError) as error:
        load_cluster("h100-hgx", 8, {path: value})
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("params_bytes_per_param", 0, "params_bytes_per_param (0)"), ("grads_bytes_per_param", 0.1, "(0.1)"),
        ("states_bytes_per_param", 1e6, "(1000000.0)"), ("accumulation_bytes_per_param", -1, "(-1)"),
    ],
)  # fmt: skip
def test_facts_of_frameworks_have_physical_ranges(path: str, value: object, words: str) -> None:
    with pytest.raises(SpecError) as error:
        load_framework("megatron", {path: value})
    assert words in str(error.value)


@pytest.mark.parametrize("limit", ["1e-320GB", "0 B", "-1 GB", "1 B", "500 MB"])
def test_a_limit_of_memory_has_room_for_the_context(limit: str) -> None:
    with pytest.raises(SpecError, match=r"--memory-limit: .* that the CUDA context alone takes of it; give .* to 79"):
        with_memory_limit(load_cluster("h100-hgx", 8), limit)
