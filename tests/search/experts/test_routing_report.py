"""``mofa show routing``: its numbers, its text, and what is wrong in one line."""

from __future__ import annotations

import json

import pytest

import mofa
from mofa.cli.main import main
from mofa.search.experts.routing_report import describe_routing
from mofa.specs.routing import RoutingSpec
from tests.cli.conftest import one_line_of

V3 = mofa.load_workload("memfine-model-1")


def test_the_presets_statistics() -> None:
    """moe.md A.8: the fullest expert has 7.7 (layer 4) to 31.5 (layer 15) times the mean."""
    report = describe_routing(V3.model_copy(update={"routing": RoutingSpec.parse("memfine-iteration-7")}), 32, 3)
    assert report.experts.largest == pytest.approx(31.5, abs=0.05)
    assert [g.group for g in report.by_layer] == list(range(3, 16))  # as the model counts them; three are dense
    assert len(report.by_layer) == 13 and len(report.by_iteration) == 3 and len(report.by_rank) == 32
    assert report.ranks.largest == max(g.largest for g in report.by_layer) == max(g.largest for g in report.by_rank)
    dropped = [c.dropped_fraction for c in report.capacity]
    assert dropped == sorted(dropped, reverse=True) and 0 < dropped[-1] < dropped[0] < 1
    assert report.capacity[0].rerun_fraction == 1.0


def test_the_nearest_is_the_distribution_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "routing", "memfine-model-1", "--ep", "8", "--routing", "zipf:0.7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"][0]["routing"].startswith("zipf:0.7")
    assert main(["show", "routing", "memfine-model-1", "--ep", "8", "--routing", "zipf:0.7"]) == 0
    assert "Nearest distributions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("memfine-model-1", "--ep", "3"), "ep (3) must divide num_experts (256)"),
        (("llama3-8b", "--ep", "2"), "has no experts"),
        (("memfine-model-1", "--ep", "8", "--routing", "zipf:-1"), "--routing zipf:-1"),
        (("memfine-model-1", "--ep", "8", "--trace", "none.csv"), "no such file"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str) -> None:
    assert main(["show", "routing", *arguments]) == 2
    assert says in one_line_of(capsys.readouterr().err)
