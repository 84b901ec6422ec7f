"""The compiled longest path against its reference, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mofa.cost.block.host_clock import NEVER, ClockAdvance
from mofa.cost.step_time import compiled_path
from mofa.cost.step_time.compiled_path import BLOCK, c_library
from mofa.cost.step_time.critical_path import (
    ComputationDurations,
    DataParallelOncePerStep,
    critical_path_and_host_waits_s,
)
from mofa.cost.step_time.dependency_levels import Once
from mofa.schedules import SCHEDULES, Runtime
from tests.compile_part import compiled_anew


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        compiled_anew(compiled_path, tmp_path_factory.mktemp("compiled"), patch)
        yield
    c_library.cache_clear()


@pytest.mark.parametrize("has_host", [False, True])
@pytest.mark.parametrize("num_plans", [1, 3, BLOCK, 2 * BLOCK + 1])
@pytest.mark.parametrize(
    ("schedule", "runtime", "pp", "vpp", "once"),
    [("interleaved", "megatron", 4, 3, "Megatron"), ("interleaved", "pytorch", 4, 2, ""), ("zbv", "pytorch", 3, 2, ""),
     ("1f1b", "megatron", 3, 1, "Megatron"), ("interleaved", "pytorch", 4, 3, "FSDP of chunks"),
     ("zbv", "pytorch", 3, 2, "FSDP of chunks"), ("1f1b", "pytorch", 3, 1, "FSDP of pieces")],
)  # fmt: skip
def test_as_by_level(
    schedule: str, runtime: Runtime, pp: int, vpp: int, once: Once, num_plans: int, has_host: bool
) -> None:
    """Of random durations, with and without the host's clocks, gathers and rounds that are left out."""
    assert c_library() is not None
    rng, shape = np.random.default_rng(num_plans), (num_plans, pp, vpp)
    forward_s, backward_s, weights_s = rng.uniform(1, 2, (3, *shape))
    kinds = len(SCHEDULES[schedule].computation_kinds)
    clocks = rng.uniform(0, 3, (kinds, 4, *shape))
    clocks[:, 2][rng.random((kinds, *shape)) < 0.5] = NEVER
    given = ComputationDurations(
        forward_s, 2 * backward_s, weights_s, rng.uniform(0, 0.5, num_plans), 0.1,
        DataParallelOncePerStep(*rng.uniform(0, 1, (3, *shape)), once, rng.uniform(0, 1, shape)) if once else None,
        tuple(ClockAdvance(*of_kind) for of_kind in clocks) if has_host else None,
        ClockAdvance(*rng.uniform(1, 4, (4, *shape))) if once == "FSDP of pieces" else None,
        lead_s=rng.uniform(-2, 2, shape[:2]),
    )  # fmt: skip
    num_micro_batches = rng.choice([2 * pp, 8 * pp], num_plans)
    plan = schedule, runtime, pp, vpp
    compiled, waited_s = critical_path_and_host_waits_s(plan, given, num_micro_batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_path, "c_library", lambda: None)
        by_level, by_level_waited_s = critical_path_and_host_waits_s(plan, given, num_micro_batches)
    assert np.array_equal(compiled, by_level) and np.array_equal(waited_s, by_level_waited_s)
    assert has_host or not waited_s.any()
