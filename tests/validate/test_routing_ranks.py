"""The emptiest and the fullest rank of a stage under uneven routing, beside what every rank of real runs held."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

import mofa
from mofa.errors import SpecError
from mofa.measure.records import read_record
from mofa.plan.result import Plan
from mofa.report.plan_text import print_expert_rank_memory
from mofa.units import format_bytes
from mofa.validate.reference import reference_of_file
from mofa.validate.score import score_run
from tests.committed import read_yaml, yaml_text

RECORDS = Path(__file__).parents[2] / "reference_runs" / "measured"
RUNS = {
    "tt2-ep2-olmoe-8l-16k-skewed": (0.002, 0.02),
    "tt4-pp2-ep2-dsv2lite-12l-skewed": (0.002, 0.02),
    "mc4-ep4-qwen30b-6l-skewed": (0.01, 0.03),
}
"""Records, and what predicted allocated and reserved memory of a rank is off by at most. [-]"""
ZIPF = {"routing": {"kind": "zipf", "s": 0.5}}


@pytest.mark.parametrize("name", RUNS)
def test_both_ends_of_routing_as_measured(name: str, tmp_path: Path) -> None:
    """Ranks whose experts get the fewest tokens hold what was measured of them, as do those with the most."""
    allocated_bar, reserved_bar = RUNS[name]
    path = RECORDS / f"{name}.yaml"
    run = reference_of_file(path, tmp_path)
    assert run is not None
    job, machines, framework, strategy = run.resolved_specs()
    plan = mofa.estimate(job, machines, strategy, framework=framework)
    measured = sorted(read_record(path).measured.ranks, key=lambda rank: rank.rank)
    per_stage = len(measured) // strategy.pp
    compared = 0
    for rank in measured:
        stage = plan.memory.by_stage[rank.rank // per_stage]
        assert stage.ranks is not None
        tokens = stage.ranks.tokens_over_mean
        own = tokens[rank.rank % per_stage // strategy.etp % strategy.ep]
        ends = {min(tokens): stage.ranks.emptiest, max(tokens): stage.ranks.fullest}
        if own in ends:
            assert ends[own].tokens_over_mean == own
            assert ends[own].allocated_bytes == pytest.approx(rank.peak_allocated_bytes, rel=allocated_bar)
            assert ends[own].reserved_bytes == pytest.approx(rank.peak_reserved_bytes, rel=reserved_bar)
            compared += 1
    assert compared == 2 * strategy.pp
    assert max(map(abs, score_run(run).ranks_allocated_errors)) <= allocated_bar  # those between the two as well


def of_zipf(strategy: str, *, replay: bool, **changes: object) -> Plan:
    job = mofa.load_workload("mixtral-8x7b", global_batch=16, overrides={**ZIPF, **changes})
    return mofa.estimate(job, mofa.load_cluster("h200-hgx", 8), strategy, replay=replay)


@pytest.mark.parametrize("replay", [False, True])
def test_of_a_distribution_the_ends_are_quantiles(replay: bool) -> None:
    """The emptiest rank holds less on every stage, by what its experts keep; the stage is of the one that reserves
    most."""
    plan = of_zipf("pp=2 ep=4 micro_batch=1", replay=replay)
    for stage in plan.memory.by_stage:
        assert stage.ranks is not None
        few, many = stage.ranks.emptiest, stage.ranks.fullest
        assert 0 < few.tokens_over_mean < 1 < many.tokens_over_mean
        assert few.allocated_bytes < many.allocated_bytes
        assert many.allocated_bytes == stage.allocated_bytes
        outside = stage.device_bytes - stage.reserved_bytes
        for rank in (few, many):
            assert rank.allocated_bytes <= rank.reserved_bytes
            assert rank.device_bytes == pytest.approx(rank.reserved_bytes + outside)
        assert stage.ranks.tokens_over_mean == ()


def test_ranks_that_are_alike_are_not_told_apart() -> None:
    """One rank has all experts, routing is balanced, or rows are padded to one number."""
    assert of_zipf("pp=2 ep=1 micro_batch=1", replay=False).memory.by_stage[0].ranks is None
    alike = {"routing": {"kind": "balanced"}}
    assert of_zipf("pp=2 ep=4 micro_batch=1", replay=False, **alike).memory.by_stage[0].ranks is None
    padded = {"routing": {"kind": "zipf", "s": 0.5, "rank_capacity_factor": 2.0}}
    assert of_zipf("pp=2 ep=4 micro_batch=1", replay=False, **padded).memory.by_stage[0].ranks is None


def test_the_estimate_prints_both() -> None:
    memory = of_zipf("pp=2 ep=4 micro_batch=1", replay=False).memory
    written = io.StringIO()
    print_expert_rank_memory(Console(width=120, file=written), memory)
    text = written.getvalue()
    assert "Ranks with the fewest and the most tokens" in text
    assert text.count("emptiest") == text.count("fullest") == 2
    ranks = memory.by_stage[0].ranks
    assert ranks is not None and format_bytes(ranks.emptiest.device_bytes) in text


def test_layers_beyond_any_number_are_refused_in_a_line(tmp_path: Path) -> None:
    """Found by scripts/fuzz: a name of a layer that is no finite number ended as an internal error."""
    text = read_yaml(RECORDS / "tt2-ep2-olmoe-8l-16k-skewed.yaml")
    text["measured"]["facts"]["layers"] = [[[float("inf")]] for _ in text["measured"]["tokens_per_expert"]]
    path = tmp_path / "record.yaml"
    path.write_text(yaml_text(text))
    with pytest.raises(SpecError, match=r"measured\.facts\.layers do not name layers"):
        reference_of_file(path, tmp_path)
