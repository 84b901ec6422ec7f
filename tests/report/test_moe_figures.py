"""Figures of balanced experts and of token chunks say what they show."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from rich.console import Console

import mofa
from mofa.report.balance import plot_balance, print_balance
from mofa.report.chunks import plot_chunks
from mofa.report.figures.chunk_policies import plot_policy_memory, plot_throughput
from mofa.routing.balance.setup import BalanceSetup
from mofa.search.experts.balance import balance_experts
from mofa.search.experts.token_chunks import plan_token_chunks
from mofa.specs.routing import RoutingSpec


def test_the_density_is_named_as_that_of_its_placement(tmp_path: Path) -> None:
    """Half of the tokens on one of 8 experts: its two replicas on 8 GPUs have 1/4 each, twice the mean, which no
    schedule on the symmetric placement beats and more replicas of it do."""
    rows = [f"{i},0,{e},{700 if e == 0 else 100}" for i in range(12) for e in range(8)]
    (tmp_path / "t.csv").write_text("iteration,layer,expert,tokens\n" + "\n".join(rows) + "\n")
    report = balance_experts(
        BalanceSetup(8, 8, 4), RoutingSpec(), assignments=1400, micro_batches=12, trace=tmp_path / "t.csv"
    )  # fmt: skip
    ratio = report.max_over_mean
    assert ratio["lower_bound"] == ratio["micro_moe"] == pytest.approx(2.0)
    assert ratio["eplb"] < 1.5 and ratio["micro_moe_adaptive"] < 1.5
    labels = plot_balance(report).get_legend_handles_labels()[1]
    assert "maximum induced density,\nsymmetric placement" in labels and "scheduled, symmetric placement" in labels
    text = StringIO()
    print_balance(report, Console(width=200, file=text))
    (line,) = [line for line in text.getvalue().splitlines() if "induced density" in line]
    assert line.split() == ["maximum", "induced", "density,", "symmetric", "placement", "2.0000", "2.0000"]


@pytest.mark.parametrize("iterations", [1, 4])
def test_iterations_are_whole_numbers(iterations: int) -> None:
    report = plan_token_chunks(
        mofa.load_workload("memfine-model-2").model_copy(update={"routing": RoutingSpec.parse("memfine-iteration-7")}),
        mofa.load_cluster("h100-hgx", 32), "ep=32 micro_batch=1 recompute=full",
        framework=mofa.load_framework("megatron"), iterations=iterations,
    )  # fmt: skip

    def ticks(ax: Axes) -> list[float]:
        low, high = ax.get_xlim()
        return [float(x) for x in ax.get_xticks() if low <= x <= high]

    for plot in (plot_chunks, plot_throughput, plot_policy_memory):
        assert ticks(plot(report)) == [float(i) for i in range(iterations)]


def test_every_number_of_chunks_has_its_colour() -> None:
    """Bins that are no powers of two, and layers that none of them fits: red shows through."""
    report = plan_token_chunks(
        mofa.load_workload("memfine-model-2").model_copy(update={"routing": RoutingSpec.parse("memfine-iteration-7")}),
        mofa.load_cluster("h100-hgx", 32), "ep=32 micro_batch=1 recompute=full",
        framework=mofa.load_framework("megatron"), iterations=2, bins=(1, 3, 7),
    )  # fmt: skip
    chosen = [[3] + [0] * (len(report.layers) - 1), [1, *[7] * (len(report.layers) - 1)]]
    (image,) = plot_chunks(report.model_copy(update={"chunks": chosen})).images
    shown = np.ma.masked_invalid(image.get_array())
    assert shown[0].tolist() == [1.0, 0.0]
    assert shown[1:].tolist() == [[None, 2.0]] * (len(report.layers) - 1)
    assert image.get_cmap().N == 3
