"""Hosts of measured runs: whose speed counts, what it changes, what it was learned from."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from mofa.errors import SpecError
from mofa.measure.records import RunRecord, write_record
from mofa.measure.results import interquartile_range_s
from mofa.specs.load import load_cluster
from mofa.validate.hosts import (
    HOSTS,
    machine_identity,
    read_machine_hosts,
    small_layer_time_of_run,
    small_op_s_of_run,
    unexplained_step_spread,
)
from mofa.validate.reference import measured_reference_runs, reference_of_record, why_step_time_not_scored
from mofa.validate.routing_counts import with_routing_counts
from mofa.validate.score import score_run
from tests.committed import MEASURED, measured_records

MACHINES = read_machine_hosts(MEASURED)


@pytest.fixture(scope="module")
def records() -> dict[str, RunRecord]:
    return {record.run.id: record for record in measured_records()}


def on_host(record: RunRecord, op_s: float | None, id: str | None = None, cpu: str | None = None) -> RunRecord:
    environment = record.environment.model_copy(
        update={"host_issue_s": op_s, "cpu": cpu if cpu is not None else record.environment.cpu}
    )
    run = record.run.model_copy(update={"id": id if id is not None else record.run.id})
    return record.model_copy(update={"environment": environment, "run": run})


def test_a_record_s_own_speed_goes_before_its_machine_s(records: dict[str, RunRecord]) -> None:
    old = on_host(records["mc1-qwen30b-2l"], None)
    (machine,) = [m for m in MACHINES if (m.host, m.cpu, m.cpu_cores) == machine_identity(old)]
    found = small_op_s_of_run(old, MACHINES)
    assert found is not None
    assert found[0] == machine.host_op_s.value
    assert small_op_s_of_run(on_host(old, 7e-6), MACHINES) == (7e-6, "measured after the run")
    assert small_op_s_of_run(on_host(old, None, cpu="another"), MACHINES) is None


def test_a_machine_s_median_over_runs_goes_before_one_run_s_own(records: dict[str, RunRecord]) -> None:
    one = records["mc1-phimoe-2l-full-skewed"]
    (machine,) = [m for m in MACHINES if m.host == one.environment.host]
    there = [r.environment.host_issue_s for r in records.values() if r.environment.host == machine.host]
    measured = [value for value in there if value is not None]
    assert machine.runs == len(measured) >= 3
    assert machine.host_op_s.value == pytest.approx(statistics.median(measured), rel=5e-3)
    found = small_op_s_of_run(one, MACHINES)
    assert found is not None and found[0] == machine.host_op_s.value != one.environment.host_issue_s


def test_a_slower_host_takes_longer_for_all_it_does() -> None:
    cluster = load_cluster("h200-hgx", 1)
    profile = cluster.gpu.curves.host
    slow = cluster.with_host_speed(2 * profile.eager_op_s.value).gpu.curves.host
    assert slow.dtensor_op_s.value == pytest.approx(2 * profile.dtensor_op_s.value)
    assert slow.sync_s.value == pytest.approx(2 * profile.sync_s.value)
    assert slow.cpu == profile.cpu
    assert cluster.with_host_speed(None) is cluster


def test_repeats_are_predicted_each_on_its_own_host(records: dict[str, RunRecord], tmp_path: Path) -> None:
    """One configuration on a fast and on a slow host; the error is the median of theirs."""
    folder = tmp_path / "measured"
    fast = on_host(records["tt1-qwen06b-host-bound"], 5.4e-6)
    slow = on_host(records["tt1-qwen06b-host-bound"], 10.8e-6, id="tt1-qwen06b-host-bound-again")
    for record in (fast, slow):
        write_record(record, folder)
    (reference,), left_out = measured_reference_runs(folder, tmp_path)
    assert [item.id for item in left_out] == [slow.run.id]
    run = score_run(reference)
    first, second = run.repeats
    assert first.step_time is not None
    assert second.step_time is not None
    assert run.step_time is not None
    # this run is bound by its host through and through
    assert second.step_time.predicted == pytest.approx(2 * first.step_time.predicted, rel=0.15)
    assert run.step_time.error == pytest.approx((first.step_time.error + second.step_time.error) / 2)
    assert run.step_time.measured == fast.measured.step_time_s
    assert run.predicted_step_s == run.step_time.predicted


def test_repeats_are_predicted_each_with_its_own_tokens(records: dict[str, RunRecord], tmp_path: Path) -> None:
    """Of one configuration on one host the earlier steps take longer: more numbers of tokens are new."""
    folder = tmp_path / "measured"
    late = records["mc2-ep2-dsmoe16b-4l-full-skewed"]
    warmup, steps = late.measured.warmup_times_s, late.measured.step_times_s
    measured = late.measured.model_copy(update={"warmup_times_s": warmup[:4], "step_time_spread_s": 0.0})
    elsewhere = late.environment.model_copy(update={"host": "host-0"})  # together they would be told by all their steps
    early = late.model_copy(
        update={
            "run": late.run.model_copy(update={"id": f"{late.run.id}-again"}),
            "measured": measured,
            "environment": elsewhere,
        }
    )
    for record in (late, early):
        write_record(record, folder)
    (reference,), _ = measured_reference_runs(folder, tmp_path)
    first, second = (reference.run_of_repeat(repeat) for repeat in reference.repeats)
    assert first.run == reference.run
    assert first.run.routing.steps_before == len(warmup) + len(steps) // 2
    assert second.run.routing.steps_before == 4 + len(steps) // 2
    of_late, of_early = score_run(reference).repeats
    assert of_late.step_time is None  # its quartiles lie far apart
    assert of_early.step_time is not None
    assert of_early.step_time.predicted > score_run(first).predicted_step_s


def test_a_host_timed_among_the_steps_goes_before_its_machine_s(records: dict[str, RunRecord]) -> None:
    """A record from before is predicted as its machine, one that timed its host among its steps by their mean."""
    one = records["mc1-phimoe-2l-full-skewed"]
    environment = one.environment.model_copy(update={"host_issues_s": [8e-6, 10e-6, 12e-6]})
    assert small_op_s_of_run(one.model_copy(update={"environment": environment}), MACHINES) == (
        pytest.approx(10e-6), "timed among its steps",
    )  # fmt: skip


def test_a_host_timed_among_the_steps_stands_for_its_repeats(records: dict[str, RunRecord], tmp_path: Path) -> None:
    """Of a configuration that its host bounds; repeats that timed it less well keep their memory."""
    folder = tmp_path / "measured"
    steady = {"step_times_s": [0.5, 0.5, 0.5], "step_time_s": 0.5, "step_time_spread_s": 0.0}
    for id in ("mc1-qwen05b-24l-1k-full-third", "mc1-qwen05b-24l-1k-full-fifth"):
        record = records[id]
        write_record(record.model_copy(update={"measured": record.measured.model_copy(update=steady)}), folder)
    (reference,), _ = measured_reference_runs(folder, tmp_path)
    timed, plain = reference.repeats
    assert (timed.step_s, plain.step_s) == (0.5, None)
    assert f"as that of {timed.id} was" in plain.notes[0]
    assert timed.host_op_s == pytest.approx(statistics.fmean(records[timed.id].environment.host_issues_s))


def with_layer(record: RunRecord, *ranks: tuple[list[float], list[float]]) -> RunRecord:
    """A record whose ranks timed a layer, forward and back."""
    timed = [
        record.measured.ranks[0].model_copy(update={"rank": i, "layer_issues_s": ahead, "layer_backs_s": back})
        for i, (ahead, back) in enumerate(ranks)
    ]
    return record.model_copy(update={"measured": record.measured.model_copy(update={"ranks": timed})})


def test_a_layer_is_the_slowest_rank_s_by_medians(records: dict[str, RunRecord]) -> None:
    """One rank's layer takes 3 ms and back, the other's 2.5: outliers count for nothing."""
    one = records["te1-olmoe-6l"]
    assert small_layer_time_of_run(one) is None
    two = with_layer(one, ([1e-3, 1e-3, 9e-3], [2e-3, 2e-3, 2e-3]), ([1e-3, 1.2e-3, 1.3e-3], [0.1e-3, 1.3e-3, 9e-3]))
    assert small_layer_time_of_run(two) == (1e-3, 2e-3)


def test_a_layer_beside_the_steps_goes_before_small_ops_alone(records: dict[str, RunRecord], tmp_path: Path) -> None:
    """Of repeats whose host may bound them the one that timed a layer is scored, at that pace; where the device is
    known to be busy all are."""
    folder = tmp_path / "measured"
    steady = {"step_times_s": [0.5, 0.5, 0.5], "step_time_s": 0.5, "step_time_spread_s": 0.0}
    plain = records["te1-olmoe-6l"]
    plain = plain.model_copy(update={"measured": plain.measured.model_copy(update=steady)})
    run = plain.run.model_copy(update={"id": "te1-olmoe-6l-again"})
    timed = with_layer(plain, ([2e-3] * 3, [1e-3] * 3)).model_copy(update={"run": run})
    for record in (plain, timed):
        write_record(record, folder)
    (reference,), _ = measured_reference_runs(folder, tmp_path)
    first, second = reference.repeats
    assert (first.step_s, second.step_s) == (None, 0.5)
    assert "no layer was timed on its host among its steps, as that of te1-olmoe-6l-again was" in first.notes[0]
    assert (first.layer, second.layer) == (None, (2e-3, 1e-3))
    assert "a layer 2.00 ms and 1.00 ms" in second.notes[0]
    modules = [
        reference.run_of_repeat(one).resolved_specs()[1].gpu.curves.host.module_call_time("linear", "bf16")
        for one in (first, second)
    ]
    before, after = (module.seconds(forward=True)[0] for module in modules if module is not None)
    assert after != before
    busy = plain.measured.ranks[0].model_copy(update={"device_busy_s": 0.499})
    bound = plain.model_copy(update={"measured": plain.measured.model_copy(update={"ranks": [busy]})})
    assert why_step_time_not_scored(bound, (bound, timed)) is None


def test_machines_are_learned_from_fitting_runs_alone(records: dict[str, RunRecord]) -> None:
    for machine in (m for m in MACHINES if m.configurations):
        assert machine.host_op_s.value == pytest.approx(statistics.median(machine.configurations.values()), rel=0.01)
        for run_id in machine.configurations:
            assert records[run_id].split == "fitting"
            assert "fitting" in machine.host_op_s.source


def test_a_broken_file_of_hosts_is_one_line(tmp_path: Path) -> None:
    (tmp_path / HOSTS).write_text("machines: [{cpu: x}]\n")
    with pytest.raises(SpecError, match="no file of hosts"):
        read_machine_hosts(tmp_path / "measured")
    (tmp_path / HOSTS).unlink()
    assert read_machine_hosts(tmp_path / "measured") == ()


def with_pace(record: RunRecord, steps_s: list[float], *ranks: dict[str, list[float]]) -> RunRecord:
    """A record of these steps, whose ranks timed small additions within them."""
    timed = [record.measured.ranks[0].model_copy(update={"rank": i, **told}) for i, told in enumerate(ranks)]
    apart = interquartile_range_s(steps_s)
    measured = {"ranks": timed, "step_times_s": steps_s, "step_time_s": statistics.median(steps_s)}
    return record.model_copy(
        update={"measured": record.measured.model_copy(update={**measured, "step_time_spread_s": apart})}
    )


READ = {
    "layer_issues_s": [1e-3, 1.5e-3, 1e-3, 1.5e-3], "layer_ops_s": [2e-6, 4e-6, 2e-6, 4e-6],
    "layer_backs_s": [2e-3, 4e-3, 2e-3, 4e-3], "layer_back_ops_s": [2e-6, 4e-6, 2e-6, 4e-6],
    "host_issues_s": [8e-6, 16e-6], "cpu_ops_at_issues_s": [2e-6, 4e-6],
}  # fmt: skip
"""A quiet and a busy core's readings: of two microseconds an addition, and of four."""


def test_a_pace_within_steps_is_what_the_layer_takes_at_it(records: dict[str, RunRecord]) -> None:
    """Additions of 3 us lie midway between a quiet and a busy core's; the slowest rank is one of both ways."""
    one = records["te1-olmoe-6l"]
    within = {"step_ops_s": [3e-6, 3e-6, 9e-6], "step_back_ops_s": [2e-6, 3e-6, 3e-6]}
    slow = with_pace(one, [0.5, 0.5, 0.5], {**READ, **within})
    assert small_layer_time_of_run(slow) == pytest.approx((1.25e-3, 3e-3))
    assert small_op_s_of_run(slow, MACHINES) == (pytest.approx(12e-6), "timed within its steps")
    quiet = {"step_ops_s": [2e-6] * 3, "step_back_ops_s": [2e-6] * 3}
    assert small_layer_time_of_run(
        with_pace(one, [0.5] * 3, {**READ, **quiet}, {**READ, **within})
    ) == small_layer_time_of_run(slow)


def test_what_a_pace_explains_does_not_spread_steps(records: dict[str, RunRecord]) -> None:
    """Steps that are as slow as the additions within them are steady; the same steps at one pace are not."""
    one = records["te1-olmoe-6l"]
    steps_s = [0.4, 0.5, 0.6, 0.7]
    paced = with_pace(one, steps_s, {**READ, "step_ops_s": [2e-6, 2.5e-6, 3e-6, 3.5e-6], "step_back_ops_s": [2e-6] * 4})
    even = with_pace(one, steps_s, {**READ, "step_ops_s": [2e-6] * 4, "step_back_ops_s": [2e-6, 2e-6, 2.1e-6, 2.0e-6]})
    assert unexplained_step_spread(paced) == pytest.approx(0.0, abs=1e-9)
    assert unexplained_step_spread(even) > 0.1
    assert why_step_time_not_scored(paced) is None
    assert "quartiles" in str(why_step_time_not_scored(even))


def test_a_pace_within_steps_goes_before_one_between_them(records: dict[str, RunRecord]) -> None:
    """A repeat whose layer was timed between its steps alone keeps its memory."""
    one = records["te1-olmoe-6l"]
    within = {**READ, "step_ops_s": [3e-6] * 3, "step_back_ops_s": [3e-6] * 3}
    best = with_pace(one, [0.5] * 3, within)
    best = best.model_copy(update={"run": best.run.model_copy(update={"id": "te1-olmoe-6l-again"})})
    between = with_layer(with_pace(one, [0.5] * 3, {}), ([2e-3] * 3, [1e-3] * 3))
    assert "its pace was not timed within its steps, as that of te1-olmoe-6l-again was" in str(
        why_step_time_not_scored(between, (between, best))
    )
    assert why_step_time_not_scored(best, (between, best)) is None


def test_tokens_that_were_drawn_do_not_drift(records: dict[str, RunRecord], tmp_path: Path) -> None:
    """Their experts' popularity stays; a router that learns moves it in a run's first steps."""
    drawn = records["te1-gptoss-2l-skewed-quiet"]
    learned = records["te1-gptoss-2l-skewed"]
    assert not with_routing_counts(drawn, tmp_path).routing.drifts
    assert with_routing_counts(learned, tmp_path).routing.drifts


def test_experts_padded_to_a_capacity_get_that_many_rows_whatever_was_counted(
    records: dict[str, RunRecord], tmp_path: Path
) -> None:
    one = records["te1-gptoss-2l-skewed"]
    padded = one.run.routing.model_copy(update={"capacity_factor": 1.0, "pad_to_capacity": True})
    record = one.model_copy(update={"run": one.run.model_copy(update={"routing": padded})})
    assert with_routing_counts(one, tmp_path).routing.kind == "counts"
    assert with_routing_counts(record, tmp_path).routing == padded


def test_a_record_scales_its_gradients_as_its_median_step_did(records: dict[str, RunRecord], tmp_path: Path) -> None:
    one = records["te1-olmoe-6l"]
    for norms, share in (([0.5, 0.6, 3.0], 0.0), ([0.5, 2.0, 3.0], 1.0), ([], 0.2)):
        record = one.model_copy(update={"measured": one.measured.model_copy(update={"grad_norms": norms})})
        _, _, framework, _ = reference_of_record(record, MEASURED, MACHINES, tmp_path).resolved_specs()
        assert framework.clipped_steps == share
