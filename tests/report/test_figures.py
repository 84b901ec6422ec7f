"""Figures draw, show what they should and leave no global state; files are whole or absent."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from mofa.cost.breakdown import MEMORY_COMPONENTS
from mofa.errors import SpecError
from mofa.report.figures.memory_breakdown import plot_memory_breakdown
from mofa.report.figures.pareto import pareto_front, plot_pareto
from mofa.report.figures.stage_memory import plot_stage_memory
from mofa.report.figures.style import memory_fills
from mofa.report.figures.time_breakdown import plot_time_breakdown
from mofa.report.save import check_writable, save_estimates, save_plan_report, with_replayed_rows, write_file_atomically
from mofa.units import GIB
from tests.report.fake import CAPACITY_BYTES, make_estimate, make_plan, make_report, make_table


def test_the_front_is_what_brute_force_finds() -> None:
    rng = np.random.default_rng(0)
    memory, speed = rng.integers(1, 30, 200).astype(float), rng.integers(1, 30, 200).astype(float)

    def beaten(i: int) -> bool:
        no_worse = (memory <= memory[i]) & (speed >= speed[i])
        return bool((no_worse & ((memory < memory[i]) | (speed > speed[i]))).any())

    front = {(memory[i], speed[i]) for i in range(200) if not beaten(i)}
    found = pareto_front(memory, speed)
    assert {(memory[i], speed[i]) for i in found} == front
    assert len(found) == len(front)


def test_pareto_draws_every_plan_the_front_the_chosen_one_and_the_capacity() -> None:
    report = make_report()
    table = make_table(report).iloc[:-1]
    ax = plot_pareto(table, capacity_bytes=CAPACITY_BYTES, margin_bytes=GIB, chosen=report.plans[0])
    assert np.asarray(ax.collections[0].get_offsets()).shape[0] == len(table)
    labels = ax.get_legend_handles_labels()[1]
    assert labels[0] == "50 plans that fit"
    assert labels[2:] == ["chosen plan", "capacity 79.1 GiB", "limit 78.1 GiB"]


def test_exposed_bars_sum_to_the_step_and_hidden_ones_are_hatched() -> None:
    plans = make_report().plans
    ax = plot_time_breakdown(plans)
    solid = [bar for bars in ax.containers for bar in bars if not bar.get_hatch()]
    hatched = [bar for bars in ax.containers for bar in bars if bar.get_hatch()]
    assert sum(bar.get_width() for bar in solid) == pytest.approx(sum(plan.step_s for plan in plans))
    assert sum(bar.get_width() for bar in hatched) == pytest.approx(3 * 0.75)


def test_memory_bars_sum_to_the_peak() -> None:
    plans = make_report().plans
    ax = plot_memory_breakdown(plans)
    solid = [bar.get_width() for bars in ax.containers if bars.get_label() != "margin" for bar in bars]
    assert sum(solid) * GIB == pytest.approx(sum(plan.memory.peak_bytes for plan in plans))


def test_components_of_memory_are_told_apart_in_colour_and_in_print() -> None:
    """No two have one colour; in grey, two without hatches differ by a tenth of the way from black to white at least,
    and hatches are all different. The legend shows what the bars show."""
    fills = memory_fills((*MEMORY_COMPONENTS, "one more", "another"))
    grey = {}
    for (one, a), (other, b) in combinations(fills.items(), 2):
        apart = np.abs(np.array(to_rgb(a.colour)) - to_rgb(b.colour)).max()
        assert apart > 0.1, (one, other)
        assert not a.hatch or set(a.hatch) != set(b.hatch), (one, other)
    for name, fill in fills.items():
        if not fill.hatch:
            grey[name] = float(np.dot(to_rgb(fill.colour), (0.2126, 0.7152, 0.0722)))
    assert len(grey) >= 2 and np.diff(sorted(grey.values())).min() > 0.1, grey
    assert "/" not in "".join(fill.hatch for fill in fills.values())  # the margin's
    handles, labels = plot_memory_breakdown(make_report().plans).get_legend_handles_labels()
    drawn = dict(zip(labels, handles, strict=True))
    assert drawn["gradients"][0].get_facecolor()[:3] == pytest.approx(to_rgb(fills["gradients"].colour))
    assert drawn["allocator slack"][0].get_hatch() == fills["allocator_slack"].hatch


def test_stage_bars_sum_to_the_stages() -> None:
    plan = make_plan()
    heights = [bar.get_height() for bars in plot_stage_memory(plan).containers for bar in bars]
    assert sum(heights) * GIB == pytest.approx(sum(stage.device_bytes for stage in plan.memory.by_stage))


def test_plots_draw_on_given_axes_and_pyplot_is_not_touched() -> None:
    ax = Figure().subplots()
    assert plot_stage_memory(make_plan(), ax=ax) is ax
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_a_report_is_saved_as_figures_and_tables(tmp_path: Path) -> None:
    """The same result gives the same bytes."""
    report = make_report()
    out = tmp_path / "new" / "out"
    files, again = (save_plan_report(report, folder, make_table(report)) for folder in (out, tmp_path / "again"))
    for first, second in zip(files, again, strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name
    names = {file.name for file in files}
    for figure in ("pareto", "time_breakdown", "memory_breakdown", "stage_memory"):
        assert {f"{figure}.png", f"{figure}.svg"} <= names
    assert {"plans.csv", "feasible.csv", "rejected.csv", "time.csv", "memory.csv", "stages.csv", "plan.json"} <= names
    assert {path.name for path in out.iterdir()} == names
    assert all(file.stat().st_size > 20 for file in files)
    assert len((out / "feasible.csv").read_text().splitlines()) == 51  # the row that doesn't fit is left out


def test_plans_that_were_played_out_are_told_apart_in_the_table() -> None:
    """The row of a replayed plan has the replay's step and memory, so that the chosen plan lies on its own dot."""
    report = make_report()
    plan = report.plans[1].model_copy(update={"costed_by": "replay"})
    table = make_table(report).assign(step_s=1.0, tokens_per_s_per_gpu=10.0, mfu=0.1, device_bytes=5.0)
    told = with_replayed_rows(table, [report.plans[0], plan])
    alike = told["step_s"] != 1.0
    assert told["costed_by"].tolist() == ["replay" if changed else "closed_form" for changed in alike]
    assert alike.sum() == 1
    row = told[alike].iloc[0]
    assert (row["step_s"], row["device_bytes"]) == (plan.step_s, plan.memory.device_bytes)
    assert row["mfu"] == pytest.approx(0.1 * plan.tokens_per_s_per_gpu / 10.0)
    assert "costed_by" not in table.columns or table["costed_by"].tolist() == ["closed_form"] * len(table)
    labels = [text.get_text() for text in plot_pareto(told, capacity_bytes=9e10).get_legend().get_texts()]
    assert "1 of them played out" in labels


def test_an_empty_report_and_several_estimates_are_saved(tmp_path: Path) -> None:
    report = make_report(0)
    save_plan_report(report, tmp_path / "none", make_table(report))
    assert (tmp_path / "none" / "rejected.csv").exists()
    save_estimates([make_estimate("one"), make_estimate("two")], tmp_path / "two")
    assert (tmp_path / "two" / "stage_memory_two.svg").exists()


def test_a_write_that_is_interrupted_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    write_file_atomically(path, b"old")

    def interrupt(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_file_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_places_that_cannot_be_written_are_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="does not exist; make it first"):
        check_writable(tmp_path / "none" / "x.json")
    with pytest.raises(SpecError, match="is a directory"):
        check_writable(tmp_path)
    with pytest.raises(SpecError, match="is a file, not a directory"):
        check_writable(tmp_path / "file", directory=True)
    with pytest.raises(SpecError, match="is a file, not a directory"):
        check_writable(tmp_path / "file" / "sub", directory=True)
    with pytest.raises(SpecError, match="/dev/stdout"):
        check_writable(Path("-"))
