"""Longest paths take as long as the step that the walk gives, and no longer than any other step."""

from __future__ import annotations

import numpy as np
import pytest

from mofa.cost.step_time.bubble import pipeline_s
from mofa.cost.step_time.critical_path import ComputationDurations, DataParallelOncePerStep, critical_path_s
from mofa.cost.step_time.longest_paths import ComputationPath, FormulaPaths, LongestPaths
from mofa.schedules import SCHEDULES, Runtime


def _length_s(path: ComputationPath, seconds: np.ndarray, pipeline: LongestPaths | FormulaPaths) -> float:
    beside_s = pipeline.slowdown * np.sum(path.beside_hops * np.minimum(pipeline.hop_s, seconds.min(axis=0)))
    return float(np.sum(path.counts * seconds) + path.hops * pipeline.hop_s + beside_s)


PIPELINES: list[tuple[str, Runtime, int, int, int]] = [
    ("interleaved", "megatron", 2, 2, 4), ("interleaved", "megatron", 4, 3, 12), ("interleaved", "pytorch", 3, 2, 6),
    ("zbv", "pytorch", 3, 2, 9), ("interleaved-zb", "pytorch", 2, 2, 6),
]  # fmt: skip


@pytest.mark.parametrize("plan", PIPELINES)
@pytest.mark.parametrize("seed", range(4))
def test_a_path_is_as_long_as_the_step_and_bounds_others(plan: tuple[str, Runtime, int, int, int], seed: int) -> None:
    """Of steps whose rounds are all walked; hand-overs take less than any computation."""
    random = np.random.default_rng(seed)
    pipeline = LongestPaths(*plan, 0.05, 0.1)
    some, other = random.uniform(0.2, 2.0, (2, *pipeline.shape))
    if pipeline.num_computations == 3:  # the first stage has no input to differentiate by
        some[1, 0, 0] = other[1, 0, 0] = 0.0
    steps_s = pipeline.steps_s(np.stack([some, other]))
    lengths = [_length_s(path, some, pipeline) for path in pipeline.candidate_longest_paths(some)]
    assert max(lengths) == pytest.approx(steps_s[0], rel=0.01)
    assert max(lengths) <= steps_s[0] * (1.0 + 1e-9)
    for path in (*pipeline.candidate_longest_paths(some), *pipeline.paths_along_ranks()):
        assert _length_s(path, other, pipeline) <= steps_s[1] * (1.0 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_rounds_that_repeat_lie_on_the_path_as_often(seed: int) -> None:
    """A steady state of equal rounds: what the paths say of 100 more of them."""
    random = np.random.default_rng(seed)
    few, many = (LongestPaths("interleaved", "megatron", 4, 2, m, 0.01, 0.0) for m in (40, 440))
    seconds = random.uniform(1.0, 1.1, few.shape)
    longer_s = float(many.steps_s(seconds[None])[0] - few.steps_s(seconds[None])[0])
    lengths = [max(_length_s(path, seconds, of) for path in of.candidate_longest_paths(seconds)) for of in (few, many)]
    assert lengths[1] - lengths[0] == pytest.approx(longer_s, rel=0.01)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 9])
def test_formulas_are_the_longest_of_their_paths(name: str, num_micro_batches: int) -> None:
    random = np.random.default_rng(num_micro_batches)
    forward_s, backward_s = random.uniform(0.5, 2.0, (2, 6, 4))
    rested_s = (forward_s + backward_s) * random.uniform(0.8, 1.0, forward_s.shape)
    schedule = SCHEDULES[name]
    waited_s = forward_s + backward_s if schedule.forwards_first else rested_s
    pipeline = FormulaPaths(4, num_micro_batches, forwards_first=schedule.forwards_first)
    steps_s = pipeline.steps_s(np.stack([forward_s, backward_s, waited_s], axis=1)[..., None])
    given = forward_s, backward_s, np.full(6, float(num_micro_batches))
    np.testing.assert_allclose(steps_s, pipeline_s(schedule, *given, rested_s=waited_s), rtol=1e-12)


def test_one_chunk_a_rank_is_gathered_ahead_and_reduced_behind() -> None:
    """(8 + 4 - 1) micro-batches of 1 + 2 s, a gather of 3 s ahead of them, a reduction of 5 s behind."""
    one = np.ones((1, 4, 1))
    once = DataParallelOncePerStep(3 * one, 3 * one, 5 * one, "FSDP of chunks")
    given = ComputationDurations(one, 2 * one, one, np.zeros(1), once=once)
    assert critical_path_s(("gpipe", "pytorch", 4, 1), given, np.array([8])) == pytest.approx([33.0 + 3.0 + 5.0])
