"""The search for a split equals trying all of them, within memory, and is the same each time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mofa.cost.step_time.longest_paths import FormulaPaths, LongestPaths
from mofa.schedules.order import ranks_of_stages
from mofa.search.layout_search.layer_moves import LayerMoves, neighbouring_splits
from mofa.search.layout_search.shortest_split import shortest_split
from mofa.search.layout_search.split_problem import ALL, ChunkLayers, LayerSplitProblem, SplitTable
from mofa.specs.layouts.pipeline_layout import PipelineLayout

RECOMPUTED = {"none": (0, 0), "two at most": (0, 2), "all": (ALL, ALL)}


def random_problem(
    seed: int, schedule: str, pp: int, vpp: int, num_micro_batches: int, *, num_layers: int = 6, num_kinds: int = 2,
    num_predictions: int = 1, recomputed: tuple[int, int] = (0, 0), runtime: str = "megatron",
) -> LayerSplitProblem:  # fmt: skip
    """Layers of random times and bytes; later chunks keep fewer micro-batches."""
    random, chunks = np.random.default_rng(seed), pp * vpp
    pipeline = (
        FormulaPaths(pp, num_micro_batches, forwards_first=schedule == "gpipe")
        if vpp == 1
        else LongestPaths(schedule, runtime, pp, vpp, num_micro_batches, 0.02, 0.1)  # type: ignore[arg-type]
    )
    computations = pipeline.num_computations
    layer_s = random.uniform(0.5, 2.0, (computations, 1, num_kinds, 2)) * np.array([1.0, 1.3])
    chunk_s, prediction_s = np.zeros((computations, chunks)), np.full((computations, chunks), 0.7)
    chunk_s[:, 0], chunk_s[:, -1] = 0.1, random.uniform(0.5, 2.0)
    layer_s = np.repeat(layer_s, chunks, axis=1)
    if vpp == 1:  # both of a stage that waited
        layer_s, chunk_s, prediction_s = (
            np.concatenate([of, of.sum(axis=0, keepdims=True)]) for of in (layer_s, chunk_s, prediction_s)
        )
    in_flight = np.arange(chunks, 0, -1.0)[:, None, None]
    layer_bytes = (in_flight * np.array([1.0, 0.3]) + 2.0) * random.uniform(0.8, 1.2, (1, num_kinds, 1))
    problem = LayerSplitProblem(
        kinds=tuple(sorted(random.integers(0, num_kinds, num_layers).tolist())),
        ranks=ranks_of_stages(pp, vpp, "v" if schedule == "zbv" else "loop"), chunk_s=chunk_s, layer_s=layer_s,
        prediction_s=prediction_s * (num_predictions > 0), bytes_without_layers=np.ones(pp), layer_bytes=layer_bytes,
        prediction_bytes=np.full(chunks, 3.0) * (num_predictions > 0), limit_bytes=1e9,
        num_predictions=num_predictions, first_prediction_chunk=pp * (vpp - 1), least_layers=(0,) * chunks,
        least_recomputed=recomputed[0], most_recomputed=recomputed[1], schedule_clock=pipeline,
    )  # fmt: skip
    peaks = problem.bytes_by_rank(problem.all_splits()).max(axis=1)
    return replace(problem, limit_bytes=float(np.quantile(peaks, 0.3)))


def splits_of(table: SplitTable) -> list[ChunkLayers]:
    """The splits of a table, one by one."""
    return [table.split_of_row(row) for row in range(len(table))]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "num_micro_batches", "recomputed"),
    [
        ("interleaved", 2, 2, 6, "none"), ("interleaved", 3, 2, 12, "two at most"), ("interleaved", 2, 3, 24, "all"),
        ("1f1b", 3, 1, 7, "two at most"), ("1f1b", 4, 1, 3, "none"), ("gpipe", 3, 1, 5, "none"),
        ("zbv", 2, 2, 8, "none"),
    ],
)  # fmt: skip
def test_search_equals_trying_every_split(
    schedule: str, pp: int, vpp: int, num_micro_batches: int, recomputed: str, seed: int
) -> None:
    problem = random_problem(
        seed, schedule, pp, vpp, num_micro_batches, num_kinds=1 + seed % 2, num_predictions=int(schedule != "zbv"),
        recomputed=RECOMPUTED[recomputed], runtime="pytorch" if schedule == "zbv" else "megatron",
    )  # fmt: skip
    fitting = problem.splits_that_fit(problem.all_splits())
    shortest_s = float(problem.pipeline_steps_s(fitting).min())
    found = shortest_split(problem, problem.even_split())
    assert found.splits[0] in splits_of(fitting)
    assert found.steps_s[0] == pytest.approx(shortest_s, rel=1e-9)
    assert found.bound_s <= shortest_s * (1.0 + 1e-9)
    assert found.gap_fraction < 0.02
    every_s = problem.pipeline_steps_s(problem.all_splits())
    assert (
        0.5 * every_s.min() < problem.least_pipeline_step_s <= every_s.min() * (1.0 + 1e-9)
    )  # whether or not they fit
    assert shortest_split(problem, problem.even_split()) == found


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_are_of_no_use_are_not_searched_for(seed: int) -> None:
    """The heaviest rank bounds all steps: where none is below what is of use, no chunk is moved."""
    problem = random_problem(seed, "interleaved", 2, 2, 6)
    shortest_s = float(problem.pipeline_steps_s(problem.splits_that_fit(problem.all_splits())).min())
    start = problem.even_split()
    found = shortest_split(problem, start, closes=False)
    beaten = shortest_split(problem, start, closes=False, beaten_from_s=0.5 * shortest_s)
    assert beaten.num_tried == 0 and beaten.splits in ((), (start,))
    assert 0.5 * shortest_s < beaten.bound_s or not beaten.splits
    assert shortest_split(problem, start, closes=False, beaten_from_s=1.01 * shortest_s) == found


@pytest.mark.parametrize("seed", range(4))
def test_a_search_ends_at_the_gap_that_is_asked_for(seed: int) -> None:
    problem = random_problem(seed, "interleaved", 2, 3, 24)
    start = problem.even_split()
    closed, near = (shortest_split(problem, start, gap_fraction=gap) for gap in (0.0, 0.02))
    assert near.work <= closed.work and near.gap_fraction <= 0.02
    assert closed.steps_s[0] <= near.steps_s[0] <= closed.steps_s[0] / (1.0 - 0.02)
    assert near.bound_s <= closed.steps_s[0] * (1.0 + 1e-9)


def test_contents_that_do_not_fit_are_learned() -> None:
    """Memory that is not linear in layers: a rank may hold no more than two layers, whatever the program knows."""
    problem = replace(random_problem(5, "interleaved", 2, 2, 6, num_layers=4), limit_bytes=1e9)

    def over_bytes(split: ChunkLayers) -> np.ndarray:
        layers = np.bincount(problem.chunk_places[0], split.layers)
        return np.asarray(layers - 2.0)

    found = shortest_split(problem, problem.even_split(), over_bytes=over_bytes)
    fitting = [split for split in problem.all_splits() if np.all(over_bytes(split) <= 0)]
    assert found.steps_s[0] == pytest.approx(float(problem.pipeline_steps_s(fitting).min()), rel=1e-9)
    assert all(np.all(over_bytes(split) <= 0) for split in found.splits)


def test_nothing_is_found_where_nothing_fits() -> None:
    problem = replace(random_problem(1, "interleaved", 2, 2, 6), limit_bytes=2.0)
    assert shortest_split(problem, problem.even_split()).splits == ()


def test_every_split_is_a_layout_that_megatron_takes() -> None:
    problem = random_problem(2, "interleaved", 2, 2, 6, num_layers=3)
    for split in problem.all_splits():
        layout = split.layout(problem.num_predictions)
        layout.check_against_model(2, 2, problem.num_layers, problem.num_predictions)
        assert layout == PipelineLayout.of_chunks(layout.chunks)


def test_a_descent_ends_where_no_move_helps() -> None:
    problem = random_problem(3, "interleaved", 2, 3, 12)
    end, _ = LayerMoves(problem).improved_split_and_num_tried(problem.even_split())
    steps_s = problem.pipeline_steps_s(problem.splits_that_fit(neighbouring_splits(problem, end)))
    assert steps_s.min() >= problem.pipeline_step_s(end) * (1.0 - 1e-9)


def neighbours_by_loops(problem: LayerSplitProblem, split: ChunkLayers) -> list[ChunkLayers]:
    """What :func:`neighbouring_splits` makes of arrays, a split at a time."""
    out = []
    filled = [p for p, layers in enumerate(split.layers) if layers]
    for source in filled:
        if split.layers[source] == problem.least_layers[source]:
            continue
        empties = source == filled[-1] and split.layers[source] == 1
        last = (filled[-2] if len(filled) > 1 else 0) if empties else filled[-1]
        for target in range(problem.num_chunks):
            if source != target:
                layers = list(split.layers)
                layers[source] -= 1
                layers[target] += 1
                chunk = max(split.prediction_chunk, last, target) if problem.num_predictions else split.prediction_chunk
                out.append(ChunkLayers(tuple(layers), chunk, split.recomputed))
    if problem.num_predictions:
        chunks = range(max(filled[-1], problem.first_prediction_chunk), problem.num_chunks)
        out += [replace(split, prediction_chunk=p) for p in chunks if p != split.prediction_chunk]
    if split.recomputed != ALL:
        numbers = (split.recomputed - 1, split.recomputed + 1)
        out += [
            replace(split, recomputed=n) for n in numbers if problem.least_recomputed <= n <= problem.most_recomputed
        ]
    return out


@pytest.mark.parametrize("recomputed", RECOMPUTED)
@pytest.mark.parametrize("num_predictions", [0, 1])
def test_neighbours_are_those_of_loops(num_predictions: int, recomputed: str) -> None:
    problem = random_problem(
        4, "interleaved", 2, 2, 6, num_predictions=num_predictions, recomputed=RECOMPUTED[recomputed]
    )
    problem = replace(problem, least_layers=(1, 0, 0, 0))
    for split in problem.all_splits():
        assert splits_of(neighbouring_splits(problem, split)) == neighbours_by_loops(problem, split)


def test_what_is_remembered_of_moves_changes_no_descent() -> None:
    problem = random_problem(6, "interleaved", 2, 3, 12, recomputed=(0, 2))
    known = LayerMoves(problem)
    for split in problem.all_splits()[::7]:
        for most_tried in (10, 200, 10**6):
            alone = LayerMoves(problem).improved_split_and_num_tried(split, most_tried)
            assert known.improved_split_and_num_tried(split, most_tried) == alone
