"""The pipeline's chart: everything that was played is drawn, and told apart without colour."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_rgb

import mofa
from mofa.replay.time.step import replay_step_time
from mofa.replay.time.time_replayed import ReplayedTime
from mofa.report.figures.gantt import BUBBLE, LOOKS, MAX_COMPUTATIONS, TRANSFER, plot_pipeline
from mofa.search.strategy_estimator import strategy_estimator


def step(framework: str, strategy: str, batch: int = 16) -> ReplayedTime:
    job, machines = mofa.load_workload("llama3-8b", global_batch=batch), mofa.load_cluster("h100-hgx", 8)
    return replay_step_time(strategy_estimator(job, machines, mofa.load_framework(framework), strategy))


def test_looks_differ_in_print() -> None:
    """No two kinds that stand side by side have the same grey and the same hatch."""

    def grey(colour: str) -> float:
        r, g, b = to_rgb(colour)
        return 0.299 * r + 0.587 * g + 0.114 * b

    looks = [LOOKS[kind] for kind in ("F", "B", "W", "O")] + [TRANSFER, BUBBLE]
    for i, (name, colour, hatch) in enumerate(looks):
        for other, its_colour, its_hatch in looks[i + 1 :]:
            assert hatch != its_hatch or abs(grey(colour) - grey(its_colour)) > 0.25, (name, other)


@pytest.mark.parametrize(
    ("framework", "strategy", "kinds"),
    [
        ("megatron", "tp=2 pp=4 micro_batch=1", "FBO"),
        ("torchtitan", "pp=4 vpp=2 dp=2 schedule=zbv micro_batch=1 recompute=none", "FIWO"),
    ],
)
def test_every_computation_is_a_bar(framework: str, strategy: str, kinds: str) -> None:
    played = step(framework, strategy)
    ax = plot_pipeline(played)
    drawn = sum(len(c.get_paths()) for c in ax.collections)
    transfers = sum(len(rank) for rank in played.transfers)
    assert drawn == sum(map(len, played.spans)) + transfers + len(played.spans)  # and a bubble behind every row
    legend = [text.get_text() for text in ax.get_legend().get_texts()]  # type: ignore[union-attr]
    assert legend == [*(LOOKS[kind][0] for kind in kinds), TRANSFER[0], BUBBLE[0]]
    assert {label.get_text() for label in ax.get_yticklabels()} == set("0123")
    assert f"{played.step_s:.3g} s" in ax.get_title("left")


def test_a_long_step_shows_its_beginning() -> None:
    played = step("megatron", "tp=4 pp=2 micro_batch=1", batch=128)
    assert len(played.spans[0]) > MAX_COMPUTATIONS
    ax = plot_pipeline(played, label="a run")
    assert ax.get_title("left").startswith("a run: the first")
    assert ax.get_xlim()[1] < played.step_s


def test_given_axes_are_used() -> None:
    from mofa.report.figures.style import given_or_new_axes

    ax = given_or_new_axes(None)
    assert plot_pipeline(step("megatron", "tp=8 micro_batch=1"), ax=ax) is ax
