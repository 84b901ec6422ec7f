"""Bands of steps: what is fitted, by hand and by simulation; how coverage is counted; what is committed."""

from __future__ import annotations

import re
from dataclasses import replace
from math import exp, log
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mofa.plan.step_band import Band
from mofa.report.accuracy import BAND_COLUMNS, band_rows
from mofa.specs.residuals import STEPS_FILE, Circumstances, load_residuals
from mofa.validate.bands import (
    BORROWED,
    NOT_GROUPED,
    StepResidual,
    band_coverage,
    family_correlation,
    fit_step_residuals,
    lower_decile_of_new_value,
    read_residuals,
    residuals_csv,
    same_family_pair_difference,
    step_residual_of,
)
from mofa.validate.coverage import COVERED, FEWEST_RUNS, NOMINAL_COVERAGE, chance_interval_of_coverage
from mofa.validate.validation_report import RunScore, ValidationReport, compare_with_measured

ROOT = Path(__file__).parents[2]
COMMITTED = read_residuals((ROOT / "hardware_profiles" / STEPS_FILE).read_text())
DENSE = Circumstances(nodes="one node", layers="pytorch", products="bf16", experts="dense", pace="device-bound")
OTHER = DENSE.model_copy(update={"layers": "megatron"})


def residual(value: float, family: str, circumstances: Circumstances = DENSE, *, slow: float | None = None,
             name: str = "") -> StepResidual:  # fmt: skip
    return StepResidual(
        name or f"{family} {value}", "measured", family, "torchtitan", "h100-sxm", 1, circumstances, value,
        value if slow is None else slow,
    )  # fmt: skip


def test_an_end_is_the_order_statistic_of_its_rank() -> None:
    """19 families of one run each: the second smallest has rank 0.1 * 20, the second largest likewise."""
    values = [0.01 * i for i in range(19)]
    group = fit_step_residuals([residual(value, f"f{i}") for i, value in enumerate(values)]).narrowest_group_of_path(())
    assert (group.low.value, group.high.value) == (pytest.approx(0.01), pytest.approx(0.17))


@pytest.mark.parametrize(("runs", "rank"), [(8, 1.0), (9, 1.0), (14, 1.5), (29, 3.0)])
def test_a_tenth_lies_below_the_conformal_rank(runs: int, rank: float) -> None:
    """0.1 (n + 1) of n, and the smallest of fewer than nine."""
    values = np.arange(1.0, runs + 1)
    assert lower_decile_of_new_value(values, np.full(runs, 1 / (runs + 1)), 1 / (runs + 1)) == pytest.approx(rank)


def test_pairs_are_of_one_family_and_alike_in_all_circumstances() -> None:
    """Family a has pairs 0.02, 0.04 and 0.06 apart, b one of 0.01; c's runs differ in their layers, d has one run."""
    items = [residual(value, "a") for value in (0.0, 0.02, 0.06)] + [residual(0.5, "b"), residual(0.51, "b")]
    items += [residual(0.0, "c"), residual(0.9, "c", OTHER), residual(0.3, "d")]
    value, families = same_family_pair_difference(items)
    assert (value, families) == (pytest.approx((0.04 + 0.01) / 2), 2)
    assert fit_step_residuals(items).pair_difference["device-bound"].value == pytest.approx(value, abs=5e-5)
    assert same_family_pair_difference([residual(0.1, "a"), residual(0.2, "b")]) == (0.0, 0)
    assert fit_step_residuals([residual(0.1, "a"), residual(0.2, "b")]).pair_difference == {}


def test_of_equal_runs_a_family_counts_once() -> None:
    """Ten runs of each family that are one give the ends of one run of each."""
    once = [residual(0.01 * i, f"f{i}") for i in range(19)]
    often = [residual(0.01 * i, f"f{i}", name=f"{i} {j}") for i in range(19) for j in range(10)]
    assert family_correlation(often) == 1.0
    few, many = (fit_step_residuals(items).narrowest_group_of_path(()) for items in (once, often))
    assert (many.low.value, many.high.value) == (few.low.value, few.high.value)


@pytest.mark.parametrize("of_family", [0.0, 0.3, 0.8])
def test_the_correlation_is_the_family_s_share_of_the_variance(of_family: float) -> None:
    """Three groups that are apart, 100 families of three runs in each. Ranks of normal values hang together less."""
    rng = np.random.default_rng(2)
    items = []
    for apart, circumstances in enumerate((DENSE, OTHER, DENSE.model_copy(update={"products": "fp8"}))):
        own = rng.normal(0.0, of_family**0.5, 100)[:, None] + rng.normal(0.0, (1.0 - of_family) ** 0.5, (100, 3))
        items += [
            residual(10.0 * apart + x, f"{apart} {i}", circumstances, name=f"{apart} {i} {j}")
            for (i, j), x in np.ndenumerate(own)
        ]
    assert family_correlation(items) == pytest.approx(6.0 / np.pi * np.arcsin(of_family / 2.0), abs=0.08)


@pytest.mark.parametrize(
    ("families", "per_family", "of_family"), [(12, 1, 1.0), (12, 5, 1.0), (30, 3, 0.3), (9, 8, 0.3)]
)
def test_new_families_lie_inside_in_8_of_10_cases(families: int, per_family: int, of_family: float) -> None:
    """Runs are a family's own value and their own; new ones are drawn 300 times with new fits."""
    rng = np.random.default_rng(1)
    inside = []
    for _ in range(300):
        own = rng.normal(0.0, of_family**0.5, families)[:, None]
        own = own + rng.normal(0.0, (1.0 - of_family) ** 0.5, (families, per_family))
        group = fit_step_residuals(
            [residual(x, f"f{i}", name=f"{i} {j}") for (i, j), x in np.ndenumerate(own)]
        ).narrowest_group_of_path(())
        inside.append(group.low.value <= rng.normal() <= group.high.value)
    assert 0.76 < np.mean(inside) < 0.87


def test_a_group_borrows_runs_that_are_distributed_as_the_wider_one() -> None:
    """By hand: 10 runs of its own, and as many as are borrowed from all 50; each new run may lie beyond what was."""
    near = [residual(0.01 * i, f"g{i}", OTHER) for i in range(10)]
    far = [residual(1.0 + i, f"f{i}") for i in range(40)]
    group = fit_step_residuals([*near, *far]).narrowest_group_of_circumstances(OTHER)
    values = np.array([0.01 * i for i in range(10)] + [1.0 + i for i in range(40)])
    own = 10 / (10 + BORROWED)
    shares = np.array([own / 11] * 10 + [0.0] * 40) + (1 - own) / 51
    beyond = own / 11 + (1 - own) / 51
    assert shares.sum() + beyond == pytest.approx(1.0)
    assert group.low.value == pytest.approx(lower_decile_of_new_value(values, shares, beyond), abs=1e-4)
    assert group.high.value == pytest.approx(-lower_decile_of_new_value(-values, shares, beyond), abs=1e-4)


def test_more_runs_of_its_own_leave_less_of_the_wider_group() -> None:
    far = [residual(-1.0 + 0.05 * i, f"f{i}") for i in range(40)]
    lows = []
    for own in (4, 8, 20, 60):
        near = [residual(0.5 + 0.002 * i / own, f"g{i}", OTHER) for i in range(own)]
        group = fit_step_residuals([*far, *near]).narrowest_group_of_circumstances(OTHER)
        assert group.path == ("one node", "megatron") and group.few == (own < 9) and group.runs == own
        lows.append(group.low.value)
    assert lows == sorted(lows) and lows[0] < -0.5 and lows[-1] > 0.49


def test_a_group_of_one_run_is_little_more_than_the_wider_one() -> None:
    """Wider than that, and not as wide as all that was ever seen: what lies beyond one run is half of its share."""
    far = [residual(-1.0 + 0.05 * i, f"f{i}") for i in range(40)]
    found = fit_step_residuals([*far, residual(0.0, "g", OTHER)])
    group, wider = found.narrowest_group_of_circumstances(OTHER), found.narrowest_group_of_path(())
    assert group.path == ("one node", "megatron") and group.few
    assert found.unmeasured_low.value < group.low.value < wider.low.value
    assert wider.high.value < group.high.value < found.unmeasured_high.value


def test_a_group_of_the_same_runs_as_the_wider_one_is_left_out() -> None:
    """So that it doesn't borrow twice."""
    found = fit_step_residuals(
        [residual(0.001 * i, f"f{i}") for i in range(40)] + [residual(0.02 * i, f"g{i}", OTHER) for i in range(5)]
    )
    assert [group.path for group in found.groups] == [(), ("one node", "megatron"), ("one node", "pytorch")]


def test_8_in_10_of_the_fitting_halves_lie_inside_bands_without_their_family() -> None:
    """What is borrowed rests on it, and on no judging run."""
    inside = []
    for family in sorted({item.family for item in COMMITTED}):
        found = fit_step_residuals([item for item in COMMITTED if item.family != family])
        for item in (item for item in COMMITTED if item.family == family):
            group = found.narrowest_group_of_circumstances(item.circumstances)
            inside.append(group.low.value <= item.from_fast and item.from_slow <= group.high.value)
    assert np.mean(inside) == pytest.approx(NOMINAL_COVERAGE, abs=0.04)


def test_families_that_say_nothing_are_not_alike() -> None:
    """One family of two runs, and two of one run each with the same residual: nothing lies between families."""
    other = DENSE.model_copy(update={"pace": "host-bound"})
    items = [residual(0.0, "f0", DENSE, name="0"), residual(0.5, "f0", DENSE, name="1")]
    items += [residual(0.0, f"f{n}", other, name=str(n)) for n in (2, 3)]
    assert family_correlation(items) == 0.0


def test_ends_are_from_a_fast_and_from_a_slow_host() -> None:
    values = [residual(0.01 * i, f"f{i}", slow=0.01 * i - 0.05) for i in range(19)]
    group = fit_step_residuals(values).narrowest_group_of_path(())
    assert (group.low.value, group.high.value) == (pytest.approx(0.01), pytest.approx(0.12))


circumstances = st.builds(
    Circumstances,
    nodes=st.sampled_from(["one node", "several nodes"]), layers=st.sampled_from(["pytorch", "megatron"]),
    products=st.just("bf16"), experts=st.sampled_from(["dense", "experts below half"]),
    pace=st.sampled_from(["device-bound", "host-bound"]),
)  # fmt: skip


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(-0.5, 0.5), st.integers(0, 30), circumstances), min_size=1, max_size=80))
def test_bands_are_ordered_and_never_wider_than_all_that_was_seen(
    drawn: list[tuple[float, int, Circumstances]],
) -> None:
    items = [residual(value, f"f{f}", c, name=str(i)) for i, (value, f, c) in enumerate(drawn)]
    found = fit_step_residuals(items)
    for item in items:
        group = found.narrowest_group_of_circumstances(item.circumstances)
        assert found.unmeasured_low.value <= group.low.value <= group.high.value <= found.unmeasured_high.value
    assert fit_step_residuals(items[::-1]) == found


def test_the_committed_groups_are_those_of_the_committed_residuals() -> None:
    assert fit_step_residuals(COMMITTED) == load_residuals().step
    assert read_residuals(residuals_csv(COMMITTED)) == COMMITTED


def test_nothing_was_learned_from_a_judging_run() -> None:
    fitting = set()
    for path in sorted((ROOT / "reference_runs" / "published").glob("*.yaml")):
        rows = re.split(r"^- run:$", path.read_text(), flags=re.MULTILINE)[1:]
        ids = [(re.search(r"^ {4}id: (\S+)$", row, re.MULTILINE), "\n  split: fitting" in row) for row in rows]
        fitting |= {found.group(1) for found, is_fitting in ids if found is not None and is_fitting}
    for item in COMMITTED:
        if item.source == "measured":
            record = (ROOT / "reference_runs" / "measured" / f"{item.id}.yaml").read_text()
            assert re.search(r"^split: fitting$", record, re.MULTILINE), item.id
        else:
            assert item.id in fitting


def test_families_are_in_one_half() -> None:
    """Published rows of one source and model share a half, so that the halves are independent."""
    for path in sorted((ROOT / "reference_runs" / "published").glob("*.yaml")):
        rows = re.split(r"^- run:$", path.read_text(), flags=re.MULTILINE)[1:]
        halves: dict[str, set[str]] = {}
        for row in rows:
            model, half = (re.search(rf"^  {name}: (.+)$", row, re.MULTILINE) for name in ("model", "split"))
            assert model is not None and half is not None
            halves.setdefault(model.group(1), set()).add(half.group(1))
        assert all(len(half) == 1 for half in halves.values()), path.name


def scored(run_id: str, measured: float, *, low_s: float = 0.9, high_s: float = 1.1, split: str = "judging",
           group: tuple[str, ...] = DENSE.levels_in_order, unmeasured: tuple[str, ...] = (),
           hosts_s: tuple[float, float] | None = None, in_group: str = "published-x") -> RunScore:  # fmt: skip
    """A step predicted as 1 s."""
    band = Band(
        low_s=low_s, high_s=high_s, circumstances=DENSE, group=group, runs=30, families=10, few=False,
        unmeasured=unmeasured, hosts_s=hosts_s,
    )  # fmt: skip
    return RunScore(
        id=run_id, group=in_group, model="m", gpu="h100-sxm", num_gpus=8, framework="torchtitan compile",
        strategy="tp8", step_time=compare_with_measured(measured, 1.0), predicted_step_s=1.0,
        predicted_device_bytes=1e9, fits=True,
        out_of_memory=False, provenance={"measured": 1.0}, weak_fraction=0.0, exposed={"gemm": 1.0}, played_out=True,
        source="by hand", split=split, band=band,
    )  # fmt: skip


def test_a_residual_by_hand() -> None:
    item = step_residual_of(scored("a", 1.2, hosts_s=(0.8, 1.5)))
    assert item is not None
    assert (item.from_fast, item.from_slow) == (pytest.approx(log(1.5), abs=1e-5), pytest.approx(log(0.8), abs=1e-5))
    assert (item.source, item.family, item.framework) == ("published-x", "published-x m", "torchtitan")
    assert step_residual_of(scored("a-traced", 1.2)) is None
    blank = step_residual_of(scored("a", 1.2, in_group="published-x-default-recompute"))
    assert blank is not None and not blank.has_whole_configuration


def test_rows_with_a_blank_stand_in_where_nothing_better_was_measured() -> None:
    """Of the same nodes and layers; there whole rows push them out once they are enough to have a tenth."""
    far = DENSE.model_copy(update={"nodes": "several nodes"})
    near = [residual(0.01 * i, f"f{i}") for i in range(20)]
    blank = [replace(residual(0.5, f"g{i}", far), has_whole_configuration=False) for i in range(5)]
    alone = fit_step_residuals([*near, *blank])
    assert [item.path for item in alone.stand_ins] == [far.levels_in_order[:2]]
    assert (alone.groups[0].runs, alone.narrowest_group_of_path(far.levels_in_order).runs) == (20, 5)
    one = replace(residual(0.4, "h", far), gpu="b200")
    with_one = fit_step_residuals([*near, *blank, one])
    assert (with_one.groups[0].runs, with_one.narrowest_group_of_path(far.levels_in_order).runs) == (21, 6)
    (both,) = with_one.stand_ins
    assert set(both.gpus) == {"b200", blank[0].gpu}  # what either ran on is known
    beside = fit_step_residuals([*near, *blank, *(residual(0.4 + 0.01 * i, f"h{i}", far) for i in range(9))])
    assert beside.stand_ins == () and beside.groups[0].runs == 29


def test_rows_with_a_blank_are_a_group_though_as_many_runs_are_about_them() -> None:
    """Five runs of the pytorch layers of several nodes, and five rows of others that stand in: none is of both."""
    far = DENSE.model_copy(update={"nodes": "several nodes"})
    other = OTHER.model_copy(update={"nodes": "several nodes"})
    items = [residual(0.01 * i, f"f{i}") for i in range(20)] + [residual(0.0, f"h{i}", far) for i in range(5)]
    blank = [replace(residual(-1.0, f"g{i}", other), has_whole_configuration=False) for i in range(5)]
    group = fit_step_residuals([*items, *blank]).narrowest_group_of_path(other.levels_in_order)
    assert (group.path, group.runs) == (other.levels_in_order[:2], 5) and group.low.value < -0.5


def test_a_gpu_of_rows_with_a_blank_is_known_where_they_stand_in_alone() -> None:
    far = DENSE.model_copy(update={"nodes": "several nodes"})
    near = [residual(0.01 * i, f"f{i}") for i in range(5)]
    blank = replace(residual(0.5, "g", far), has_whole_configuration=False, gpu="gb200", num_nodes=16)
    found = fit_step_residuals([*near, blank])
    about = {"gpu": "gb200", "framework": "torchtitan"}
    assert not found.unmeasured_text(far, nodes=16, **about)
    assert found.unmeasured_text(DENSE, nodes=1, **about) == ("GPU gb200",)
    assert found.seen[DENSE.layers].most_nodes.value == 1


def test_without_a_whole_configuration_there_is_no_band() -> None:
    with pytest.raises(ValueError, match="whole"):
        fit_step_residuals([replace(residual(0.5, "g"), has_whole_configuration=False)])


def test_coverage_by_hand() -> None:
    """18 of 24 inside, 4 faster, 2 slower; fitted and profiled runs are not counted."""
    runs = [scored(f"i{i}", 1.0) for i in range(18)] + [scored(f"f{i}", 0.8) for i in range(4)]
    runs += [scored(f"s{i}", 1.2) for i in range(2)] + [scored("fit", 1.2, split="fitting"), scored("x-traced", 1.2)]
    (found,) = band_coverage(runs)
    assert (found.runs, found.inside, found.below, found.above) == (24, 18, 4, 2)
    assert found.share_inside_bands == 0.75 and found.tested and found.holds_share_claimed
    assert (found.median_low, found.median_high, found.median_width) == pytest.approx((-0.1, 0.1, 0.2))


def test_few_runs_are_tested_with_those_of_the_next_wider_group() -> None:
    small = [scored(f"a{i}", 1.0) for i in range(12)]
    beside = [scored(f"b{i}", 1.3, group=(*DENSE.levels_in_order[:4], "host-bound")) for i in range(9)]
    (found,) = band_coverage([*small, *beside])
    assert found.group == ", ".join(DENSE.levels_in_order[:4])
    assert (found.runs, found.inside) == (21, 12)
    assert not found.holds_share_claimed
    assert len(found.bands) == 2


def test_what_was_never_measured_is_tested_apart() -> None:
    found = band_coverage([scored("a", 1.0), scored("b", 1.0, unmeasured=("GPU x",), group=())])
    assert [item.group for item in found] == ["all runs", "not measured"]
    assert not any(item.tested for item in found)


def test_rows_with_a_blank_are_tested_apart_and_nothing_is_claimed_of_them() -> None:
    blank = [scored(f"b{i}", 1.3, in_group="published-x-default-recompute") for i in range(FEWEST_RUNS)]
    found = band_coverage([scored("a", 1.0), *blank])
    assert [(item.group, item.runs, item.inside, item.tested) for item in found] == [
        ("all runs", 1, 1, False), ("recomputation not given", FEWEST_RUNS, 0, False),
    ]  # fmt: skip
    report = ValidationReport(groups={}, false_fits=0, runs=(), elapsed_s=0.0, bands=found)
    assert [row[-1] for row in band_rows(report)] == ["too few to say", "not claimed"]


def test_what_chance_leaves_open_is_the_binomial_s() -> None:
    """As statisticians' tables have it: of 20 at 0.8, at most 11 with 1.0 %, at most 12 with 3.2 %; all with 1.2 %."""
    assert chance_interval_of_coverage(20) == (12 / 20, 19 / 20)
    rng = np.random.default_rng(3)
    for runs in (22, 82):
        low, high = chance_interval_of_coverage(runs)
        drawn = rng.binomial(runs, NOMINAL_COVERAGE, 20_000) / runs
        assert 0.94 < np.mean((low <= drawn) & (drawn <= high)) < 0.985


def test_a_miss_is_told() -> None:
    report = ValidationReport(
        groups={}, false_fits=0, runs=(), elapsed_s=0.0,
        bands=band_coverage([scored(f"s{i}", 1.2) for i in range(FEWEST_RUNS)]),
    )  # fmt: skip
    (row,) = band_rows(report)
    assert len(row) == len(BAND_COLUMNS)
    assert row[3:7] == ["20", "0.0 %", "0", "20"] and row[-2:] == ["60.0 % to 95.0 %", "NO"]


def test_the_committed_table_says_what_bands_hold() -> None:
    """Of docs/accuracy.md: a group is told to be met where it is; all tested runs together are within 70 to 90 %."""
    _, found, section = (ROOT / "docs" / "accuracy.md").read_text().partition("\n## Bands of steps\n")
    assert found
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    tested = inside = 0
    for row in rows:
        runs, share = int(row[3]), float(row[4].removesuffix(" %")) / 100
        if row[0] in map(", ".join, NOT_GROUPED):
            assert row[-1] in ("not claimed", "too few to say")
            continue
        tested, inside = tested + runs, inside + round(share * runs)
        kept = COVERED[0] <= round(share * runs) / runs <= COVERED[1]
        assert row[-1] == (("yes" if kept else "NO") if runs >= FEWEST_RUNS else "too few to say")
    assert COVERED[0] <= inside / tested <= COVERED[1]


def test_the_band_where_nothing_was_measured_is_that_of_all_residuals() -> None:
    """But of rows with a blank, where others were measured."""
    step = load_residuals().step
    used = [
        item
        for item in COMMITTED
        if item.has_whole_configuration or step.stand_in_rows(item.circumstances.levels_in_order)
    ]
    assert exp(step.unmeasured_low.value) == pytest.approx(exp(min(item.from_fast for item in used)), rel=1e-3)
    assert exp(step.unmeasured_high.value) == pytest.approx(exp(max(item.from_slow for item in used)), rel=1e-3)
