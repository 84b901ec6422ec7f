"""The goodput command and the options about long runs, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mofa.faults.calculator import GoodputCalculation
from mofa.faults.closed_forms.two_levels import two_level_ettr
from mofa.faults.level_calculator import LevelCalculation
from mofa.plan.goodput_by_scale import GoodputReport
from mofa.plan.result import Estimate, PlanReport
from tests.cli.conftest import Cli, one_line_of

CALCULATOR = ("goodput", "--mtbf", "6h", "--checkpoint", "5min", "--restart", "10min")
TWO = ("goodput", "--mtbf", "6h", "--checkpoint", "1s,60s", "--restart", "1min,10min")
ONE = ("estimate", "llama3-8b", "h100-hgx", "--nodes", "8", "--strategy", "tp=2", "--no-replay")
SMALL = ("goodput", "llama3-8b", "h100-hgx", "--gpus", "64..128", "--faults", "llama3")


def test_the_plain_calculator(cli: Cli) -> None:
    done = cli(*CALCULATOR, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    GoodputCalculation.model_validate(found)
    minutes = {name: value / 60 for name, value in found["interval_s"].items()}
    assert minutes == pytest.approx({"young": 60, "daly": 55, "daly_higher_order": 56.713, "exact": 56.714}, abs=1e-3)
    assert found["ettr"] == pytest.approx(500 / 610.22, abs=2e-5)
    mc = found["ettr_monte_carlo"]
    assert abs(mc["mean"] - found["ettr"]) < 3.5 * mc["standard_error"]
    assert 0 < mc["standard_error"] < 2e-4
    text = cli(*CALCULATOR, "--runs", "100")
    assert text.returncode == 0
    assert "3402.84 s" in text.stdout and "Where the wall clock goes" in text.stdout


def test_weibull_failures_in_the_calculator(cli: Cli) -> None:
    for shape in ("0.6", "2"):
        found = json.loads(cli(*CALCULATOR, "--shape", shape, "--runs", "2000", "--json").stdout)
        GoodputCalculation.model_validate(found)
        mc = found["ettr_monte_carlo"]
        assert abs(mc["mean"] - found["ettr"]) < 3.5 * mc["standard_error"]
        assert (found["ettr"] > 0.8194) == (shape == "0.6")


def test_levels_in_the_calculator(cli: Cli) -> None:
    """First order: 172 and 2312 s; the best pattern is no worse, and the simulation finds its ETTR."""
    levels = ("goodput", "--mtbf", "3.093h", "--checkpoint", "1s,60s", "--restart", "1min,10min", "--runs", "1000")
    found = LevelCalculation.model_validate_json(cli(*levels, "--shares", "0.75,0.25", "--json").stdout)
    assert [round(level.first_order_s or 0) for level in found.levels] == [172, 2312]
    assert found.levels[1].every * found.at_interval_s == pytest.approx(2312, rel=0.1)
    mc = found.ettr_monte_carlo
    assert mc is not None and mc.standard_error is not None
    assert found.ettr == pytest.approx(mc.mean, abs=3.5 * mc.standard_error + 1e-4)
    first = two_level_ettr(172.3, 13, (1.0, 60.0), found.mtbf_s, (60.0, 600.0), 0.75)
    assert found.ettr >= float(first) - 1e-9
    text = cli(*levels, "--shares", "0.75,0.25").stdout
    assert "Levels of checkpoints" in text and "every" in text


def test_limits_of_the_calculator(cli: Cli) -> None:
    free = json.loads(
        cli("goodput", "--mtbf", "1h", "--checkpoint", "0s", "--restart", "0s", "--runs", "50", "--json").stdout
    )
    assert free["interval_s"]["exact"] == 0 and free["ettr"] == 1.0
    hopeless = json.loads(cli("goodput", "--mtbf", "1min", "--checkpoint", "1h", "--restart", "1h", "--json").stdout)
    assert hopeless["ettr"] < 1e-3 and hopeless["ettr_monte_carlo"] is None
    asked = json.loads(cli(*CALCULATOR, "--checkpoint-interval", "30min", "--runs", "200", "--json").stdout)
    assert asked["at_interval_s"] == 1800 and asked["ettr"] < 0.8194


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("goodput",), "--mtbf"),
        (("goodput", "--mtbf", "0h", "--checkpoint", "5min", "--restart", "10min"), "--mtbf: is 0 s"),
        (("goodput", "--mtbf", "-6h", "--checkpoint", "5min", "--restart", "10min"), "--mtbf: is -21600 s"),
        (("goodput", "--mtbf", "6", "--checkpoint", "5min", "--restart", "10min"), "no unit"),
        (("goodput", "--mtbf", "6h", "--checkpoint", "5 parsecs", "--restart", "10min"), "--checkpoint"),
        (("goodput", "--mtbf", "6h", "--restart", "10min"), "--checkpoint: is missing"),
        (("goodput", "--mtbf", "6h", "--checkpoint", "5min", "--restart", "-1s"), "--restart"),
        ((*CALCULATOR, "--checkpoint-interval", "60d"), "--checkpoint-interval: is 5.184e+06 s, longer than the run"),
        ((*CALCULATOR, "--days", "0"), "--days: is 0 d"),
        ((*CALCULATOR, "--shape", "0"), "--shape: is 0; give a Weibull shape from 0.1 to 10"),
        (("goodput", "--log", ".", "--log-nodes", "4"), "--log .: is a folder"),
        (("plan", "llama3-8b", "h100-hgx", "--gpus", "8", "--spares", "1"), "--spares: 1 spares of 8 GPUs"),
        (("estimate", "llama3-8b", "h100-hgx", "--gpus", "8", "--strategy", "tp=2", "--spares", "1"),
         "--spares: 1 spares of 8 GPUs"),
        (("plan", "llama3-8b", "h100-hgx", "--gpus", "8", "--checkpoint-interval", "1h"),
         "--checkpoint-interval: has no effect without failures"),
        (("estimate", "llama3-8b", "h100-hgx", "--gpus", "8", "--checkpoint-mode", "peer"),
         "--checkpoint-mode: has no effect without failures"),
        ((*SMALL, "--shape", "0.7"), "--shape"),
        ((*CALCULATOR, "--days", "nan"), "days"),
        ((*CALCULATOR, "--runs", "1"), "--runs"),
        ((*CALCULATOR, "--faults", "llama3"), "one of --mtbf, --log and --faults"),
        ((*CALCULATOR, "--weak"), "--weak"),
        (("goodput", "--faults", "lama3", "--gpus", "1K", "--checkpoint", "1s", "--restart", "1s"), "mean llama3"),
        (("goodput", "--faults", "llama3", "--checkpoint", "1s", "--restart", "1s"), "--gpus: is missing"),
        (("goodput", "--log", "none.csv", "--nodes", "4"), "no such file"),
        (("goodput", "--log", "none.csv"), "--log-nodes: is missing"),
        (("plan", "llama3-8b", "h100-hgx", "--gpus", "64", "--log", "none.csv"), "--log-nodes: is missing"),
        (("plan", "llama3-8b", "h100-hgx", "--gpus", "64", "--log", "x.csv", "--log-nodes", "4"), "name a profile"),
        (("plan", "llama3-8b", "h100-hgx", "--gpus", "64", "--log-days", "4"), "--log-days: belongs to --log"),
        ((*SMALL, "--log", "none.csv", "--log-nodes", "4"), "no such file"),
        ((*SMALL, "--set", "faults.restart.repair_s=-2 h"), "at least 0"),
        ((*SMALL, "--set", "faults.restart.repairs_s=2 h"), "did you mean repair_s"),
        ((*SMALL, "--set", "fault.restart.repair_s=2 h"), "mean faults"),
        (("goodput", "llama3-8b", "h100-hgx", "--gpus", "64"), "--faults: is missing"),
        (("goodput", "llama3-8b", "h100-hgx", "--faults", "llama3"), "--gpus"),
        (("goodput", "llama3-8b", "h100-hgx", "--faults", "rsc-1", "--gpus", "64"), "no storage"),
        (("goodput", "llama3-8b", "h100-hgx", "--faults", "llama3", "--gpus", "1K..3K"), "power of two"),
        (("goodput", "llama3-8b", "h100-hgx", "--faults", "llama3", "--gpus", "many"), "no number of GPUs"),
        (("goodput", "llama3-8b", "h100-hgx", "--faults", "llama3", "--gpus", "64", "--mtbf", "1h"), "--mtbf"),
        ((*SMALL, "--replan", "--strategy", "tp=2"), "--strategy"),
        ((*SMALL, "--runs", "10"), "--runs"),
        ((*CALCULATOR, "--nodes", "4"), "--log-nodes"),
        ((*SMALL, "--storage", "0 B/s"), "--storage: is 0 B/s; give 1 to 1e+33 B/s"),
        ((*SMALL, "--storage", "2 TB/s, 0.5 B/s"), "--storage: is 0.5 B/s; give 1 to 1e+33 B/s"),
        ((*SMALL, "--storage", "1e20 PB/s"), "--storage: is 1e+35 B/s; give 1 to 1e+33 B/s"),
        (("plan", "llama3-8b", "h100-hgx", "--gpus", "64", "--storage", "1e-320 B/s"), "give 1 to 1e+33 B/s"),
        ((*ONE, "--storage", "0.9 B/s"), "--storage: is 0.9 B/s; give 1 to 1e+33 B/s"),
        ((*ONE, "--price", "1e9"), "--price: is 1e+09 USD; give 0 to 1e+06 USD"),
        ((*ONE, "--price", "nan"), "--price: is nan USD; give 0 to 1e+06 USD"),
        ((*ONE, "--jobs", "99999999999"), "--jobs: must be at most 1024"),
        ((*ONE, "--faults", "llama3", "--checkpoint-interval", "1e-320 s"), "give 1e-15 to 1e+12 s"),
        (("goodput", "--log", "none.csv", "--nodes", "4", "--log-days", "1e-320"), "give 0.001 to 1e+06 d"),
        (("goodput", "--log", "none.csv", "--nodes", "9" * 400), "give 1 to 1,048,576 nodes"),
        ((*SMALL, "--log", "none.csv", "--log-nodes", "4", "--log-days", "1e-320"), "give 0.001 to 1e+06 d"),
        ((*TWO, "--shares", "0.5,0.4"), "--shares: sum to 0.9"),
        ((*TWO, "--shares", "0.5"), "--shares: 2 checkpoints, 2 restarts and 1 shares"),
        ((*TWO, "--shares", "half,half"), "are no numbers"),
        ((*TWO, "--shares", "1.5,-0.5"), "--shares: is 1.5"),
        (TWO, "--shares: is missing"),
        ((*TWO, "--shares", "0.5,0.5", "--persist", "1s"), "--persist: belongs to one level"),
        ((*TWO, "--shares", "0.5,0.5", "--checkpoint-interval", "90d"), "--checkpoint-interval: is 7.776e+06 s"),
        (("goodput", "--mtbf", "6h", "--checkpoint", "9s,2s", "--restart", "1s,1s", "--shares", "0.5,0.5"),
         "--checkpoint: a level takes longer"),
        (("goodput", "--mtbf", "6h", "--checkpoint", "0s,2s", "--restart", "1s,1s", "--shares", "0.5,0.5"),
         "--checkpoint: the first level takes 0 s"),
        ((*SMALL, "--storage", "fast"), "--storage"),
        ((*SMALL, "--spares", "8"), "leave nothing"),
        (("plan", "llama3-8b", "h100-hgx", "--gpus", "64", "--objective", "days"), "--objective days"),
        (("plan", "llama3-8b", "h100-hgx", "--gpus", "64", "--faults", "llama3", "--objective", "usd"), "no price"),
        (("plan", "llama3-8b", "h100-hgx", "--gpus", "64", "--faults", "llama3", "--spares", "8"), "leave nothing"),
        (("plan", "llama3-8b", "h100-hgx", "--gpus", "64", "--faults", "llama3", "--spares", "-1"), "--spares"),
        (("plan", "llama3-8b", "h100-hgx", "--gpus", "64", "--faults", "llama3", "--price", "-2"), "--price"),
        (("plan", "llama3-8b", "h100-hgx", "--gpus", "64", "--faults", "none.yaml"), "no such file"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(cli: Cli, arguments: tuple[str, ...], said: str) -> None:
    done = cli(*arguments)
    assert done.returncode == 2, done.stderr
    assert said in one_line_of(done.stderr)


def test_a_rate_out_of_a_log(cli: Cli, tmp_path: Path) -> None:
    rows = "".join(f"n{i % 7},{i * 86400},gpu\n" for i in range(20))
    (tmp_path / "log.csv").write_text("node,time,kind\n" + rows)
    log = ("goodput", "--log", "log.csv", "--log-nodes", "16", "--log-days", "20")
    done = cli(*log, "--json")
    assert done.returncode == 0, done.stderr
    rate = json.loads(done.stdout)
    assert rate["schema_version"] == "2.0"
    assert rate["rate_per_node_day"] == pytest.approx(20 / 320)
    assert rate["low_per_node_day"] < 20 / 320 < rate["high_per_node_day"]
    assert rate["kinds"] == {"gpu": 1.0} and rate["weibull_shape"] is None
    said = cli(*log).stdout
    assert "20 failures in 320.0 node-days" in said and "gpu 100.0%" in said and "exponential" in said
    job = cli(*log, "--gpus", "64", "--checkpoint", "1min", "--restart", "5min", "--runs", "100", "--json")
    assert json.loads(job.stdout)["mtbf_s"] == pytest.approx(86400 * 320 / 20 / 8)


def test_a_fact_of_the_profile_is_changed(cli: Cli) -> None:
    estimate = ("estimate", "llama3-8b", "h100-hgx", "--gpus", "64", "--strategy", "tp=2 pp=2", "--faults", "llama3",
                "--no-replay", "--json")  # fmt: skip
    found = [json.loads(cli(*estimate, *more).stdout)["long_run"]["mtbf_s"]
             for more in ((), ("--set", "faults.reliability.failures_per_node_day=3.79e-2"))]  # fmt: skip
    assert found[0] == pytest.approx(10 * found[1])
    unasked = json.loads(cli(*estimate[:7], "--no-replay", "--json", "--set", "faults.power.pue=1.3").stdout)
    assert unasked["ettr"] is None and "no reliability" in unasked["unknown"]["ettr"]


def test_a_log_goes_into_plans(cli: Cli, tmp_path: Path) -> None:
    """Its rate is the plan's, and few failures leave the length of the run less certain than many."""
    bands = {}
    for count in (3, 300):
        rows = "".join(f"n{i % 16},{i * 86400 * 30 / count},node\n" for i in range(count))
        (tmp_path / "log.csv").write_text("node,time,kind\n" + rows)
        done = cli("estimate", "llama3-8b", "h100-hgx", "--gpus", "64", "--strategy", "tp=2 pp=2", "--tokens", "1T",
                   "--faults", "llama3", "--log", "log.csv", "--log-nodes", str(10 * count), "--log-days", "30",
                   "--no-replay", "--json")  # fmt: skip
        assert done.returncode == 0, done.stderr
        plan = json.loads(done.stdout)
        assert plan["long_run"]["mtbf_s"] == pytest.approx(86400 * 300 / 8)
        assert any(f"{count} counted, in the band" in note for note in plan["notes"])
        bands[count] = plan["days"]["p90"] - plan["days"]["p10"]
    assert bands[3] > bands[300] > 0


def test_what_a_log_contradicts_is_told_by_its_option(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("node,time,kind\na,0,gpu\nb,86400,gpu\nc,172800,gpu\n")
    short = cli("goodput", "--log", "log.csv", "--log-nodes", "256", "--log-days", "1")
    few = cli("goodput", "--log", "log.csv", "--log-nodes", "2")
    assert (short.returncode, few.returncode) == (2, 2)
    assert "--log-days: 1 are shorter than the log's 2 days" in one_line_of(short.stderr)
    assert "--log-nodes: 2 are fewer than the 3" in one_line_of(few.stderr)


def test_where_nothing_failed_no_error_is_claimed(cli: Cli) -> None:
    never = ("goodput", "--mtbf", "1e9h", "--checkpoint", "5min", "--restart", "10min", "--runs", "1000")
    mc = json.loads(cli(*never, "--json").stdout)["ettr_monte_carlo"]
    assert (mc["failures"], mc["standard_error"]) == (0, None)
    assert "none failed, below 0.003 failures a run with 95 % confidence" in " ".join(cli(*never).stdout.split())


@pytest.mark.parametrize(
    "text",
    ["", "node,time,kind\n", "node,time,kind\nn,soon,gpu\n", "node,time,kind\nn,nan,gpu\n",
     "node,time,kind\na,2,gpu\nb,1,gpu\n", "node,time,kind,until\na,1,gpu,9\na,5,gpu,10\n"],
)  # fmt: skip
def test_bad_logs_are_one_line(cli: Cli, tmp_path: Path, text: str) -> None:
    (tmp_path / "log.csv").write_text(text)
    done = cli("goodput", "--log", "log.csv", "--nodes", "4")
    assert done.returncode == 2
    one_line_of(done.stderr)


def test_goodput_against_scale(cli: Cli, tmp_path: Path) -> None:
    done = cli(*SMALL, "--json", "--out", "out", "--csv", "goodput.csv")
    assert done.returncode == 0, done.stderr
    report = GoodputReport.model_validate(json.loads(done.stdout))
    assert [point.num_gpus for point in report.points] == [64, 128]
    small, large = report.points
    assert small.strategy is not None and large.strategy is not None
    assert large.strategy.dp == 2 * small.strategy.dp
    only_large = large.variants.keys() - small.variants.keys()  # where no node can stand by, the point says so
    assert all(name.endswith(", spares") for name in only_large)
    assert bool(only_large) == (small.why is not None)
    for name, found in large.variants.items():
        if name in only_large:
            continue
        assert found.ettr < small.variants[name].ettr or found.spares, name
    assert small.variants["blocking"].ettr < small.variants["async"].ettr
    swings = [item.swing for item in report.sensitivity]
    assert swings == sorted(swings, reverse=True) and swings[0] > 0
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"ettr.png", "throughput.svg", "tornado.png", "goodput.json", "goodput.csv"} <= files


def long_run(plan: dict[str, Any]) -> None:
    """What the contract promises of a plan with all its figures."""
    ledger = plan["long_run"]["ledger"]
    assert sum(ledger.values()) == pytest.approx(1.0)
    assert plan["ettr"] == ledger["productive"]
    days = plan["days"]
    assert plan["days_without_failures"] < days["p10"] <= days["p50"] <= days["p90"]
    assert plan["unknown"] == {}


def test_plans_carry_their_long_run(cli: Cli) -> None:
    options = ("--gpus", "64", "--tokens", "100B", "--faults", "llama3", "--price", "2", "--top", "2", "--json")
    few = ("--max", "cp=1", "--max", "pp=2", "--max", "vpp=1", "--max", "micro_batch=1", "--refine-seconds", "0")
    done = cli("plan", "llama3-8b", "h100-hgx", *options, *few)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    PlanReport.model_validate(report)
    assert report["objective"] == "effective_tokens_per_s_per_gpu"
    for plan in report["plans"]:
        long_run(plan)
        assert plan["effective_tokens_per_s_per_gpu"] == pytest.approx(
            plan["tokens_per_s_per_gpu"] * plan["ettr"] * (64 - plan["spare_gpus"]) / 64
        )
        hours = plan["days_without_failures"] / plan["ettr"] * 24 * 64
        assert plan["gpu_hours"] == pytest.approx(hours)
        assert plan["usd"] == pytest.approx(2 * hours)
        assert plan["kwh"] == pytest.approx(plan["long_run"]["watts_per_gpu"] * hours / 1000)
    speeds = [plan["effective_tokens_per_s_per_gpu"] for plan in report["plans"]]
    assert speeds == sorted(speeds, reverse=True)


def test_levels_of_checkpoints_are_chosen_for_plans(cli: Cli) -> None:
    """Computing waits for storage where nothing writes behind it, so that it is written to more rarely."""
    arguments = ("plan", "llama3-8b", "h100-hgx", "--gpus", "64", "--top", "1", "--no-replay", "--json", "--fix",
                 "recompute=none", "--max", "cp=1", "--max", "vpp=1", "--max", "pp=4", "--max", "micro_batch=1",
                 "--without", "tp_overlap", "--refine-seconds", "0", "--faults", "llama3",
                 "--storage", "20 GB/s", "--spares", "0",
                 "--set", "faults.reliability.failures_per_node_day=0.5")  # fmt: skip
    found = {}
    for mode in ("blocking", "two-level", "three-level", "memory", "peer"):
        plan = json.loads(cli(*arguments, "--checkpoint-mode", mode).stdout)["plans"][0]
        found[mode] = plan["ettr"], [(x["where"], x["every"] > 1) for x in plan["long_run"]["levels"]]
        assert sum(plan["long_run"]["ledger"].values()) == pytest.approx(1)
    assert found["blocking"][1] == [("storage", False)]
    assert found["two-level"][1] == [("host", False), ("storage", True)]
    assert [where for where, _ in found["three-level"][1]] == ["host", "peers", "storage"]
    assert found["three-level"][1][2][1]
    assert found["blocking"][0] < found["two-level"][0] < found["memory"][0]
    assert found["two-level"][0] < found["three-level"][0] < found["peer"][0]


def test_replicas_go_on_where_they_can(cli: Cli) -> None:
    scaled = (*SMALL, "--recovery", "replica", "--json")
    assert "megatron restarts all replicas together" in one_line_of(cli(*scaled).stderr)
    hsdp = ("--framework", "torchtitan", "--set", "framework.data_parallel=hsdp", "--set", "framework.dp_replicate=8")
    report = GoodputReport.model_validate_json(cli(*scaled, *hsdp, "--strategy", "recompute=full").stdout)
    for point in report.points:
        found = point.variants["replicas go on"]
        assert found.recovery == "replica" and found.ettr > point.variants["async"].ettr
    said = one_line_of(cli(*SMALL, "--recovery", "replica", "--checkpoint-mode", "memory").stderr)
    assert "use blocking or async" in said


def test_spares_are_of_the_gpus(cli: Cli) -> None:
    options = ("--gpus", "72", "--strategy", "tp=2", "--tokens", "1T", "--faults", "rsc-1", "--storage", "100 GB/s",
               "--spares", "1", "--checkpoint-mode", "peer", "--json")  # fmt: skip
    done = cli("estimate", "llama3-8b", "h100-hgx", *options)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    Estimate.model_validate(plan)
    assert plan["spare_gpus"] == 8
    assert plan["strategy"]["dp"] * plan["strategy"]["tp"] == 64
    assert plan["long_run"]["ledger"]["waiting"] > 0
    assert plan["unknown"] == {"usd": "no price given"}


def test_nothing_is_assumed_unasked(cli: Cli) -> None:
    done = cli("estimate", "llama3-8b", "h100-hgx", "--gpus", "64", "--strategy", "tp=2", "--tokens", "1T", "--json")
    plan = json.loads(done.stdout)
    for figure in (
        "ettr",
        "checkpoint_interval_s",
        "effective_tokens_per_s_per_gpu",
        "days",
        "gpu_hours",
        "usd",
        "kwh",
    ):
        assert plan[figure] is None
        assert "no reliability given" in plan["unknown"][figure]
    assert plan["days_without_failures"] > 0


def test_profiles_are_shown(cli: Cli) -> None:
    assert "megascale" in cli("show", "faults").stdout
    assert "0.0065" in cli("show", "faults", "rsc-1").stdout
    assert json.loads(cli("show", "faults", "delta", "--json").stdout)["name"] == "delta"


def test_a_price_alone_gives_dollars_and_gpu_hours_without_failures(cli: Cli) -> None:
    plan = json.loads(cli(*ONE, "--price", "2.5", "--json").stdout)
    assert plan["gpu_hours"] == pytest.approx(plan["days_without_failures"] * 24 * 64)
    assert plan["usd"] == pytest.approx(2.5 * plan["gpu_hours"])
    assert plan["ettr"] is None
    text = cli(*ONE, "--price", "2.5").stdout
    assert "A run of each without failures" in text
    assert f"{plan['usd']:,.0f}" in text


def test_spares_stand_outside_and_a_batch_that_does_not_divide_is_said(cli: Cli) -> None:
    faults = ("--faults", "llama3")
    outside = json.loads(cli(*ONE, *faults, "--spares", "1 outside", "--json").stdout)
    assert (outside["cluster"]["num_gpus"], outside["strategy"]["dp"], outside["spare_gpus"]) == (72, 32, 8)
    none = json.loads(cli(*ONE, *faults, "--spares", "outside", "--json").stdout)
    assert (none["cluster"]["num_gpus"], none["spare_gpus"]) == (64, 0)
    assert "storage: that of llama3, writes 2 TB/s (measured)" in " ".join(none["notes"])
    inside = cli(*ONE, *faults, "--spares", "1")
    assert "no factor 7 as the 56 GPUs that compute have; 1,008 or 1,064 would divide" in one_line_of(inside.stderr)
    assert "write it as 2, outside" in one_line_of(cli(*ONE, *faults, "--spares", "many").stderr)


def test_what_does_not_fit_says_so_in_its_row_and_by_check(cli: Cli) -> None:
    big = ("estimate", "llama3-70b", "h100-hgx", "--gpus", "64", "--strategy", "tp=2", "--no-replay", "--quiet")
    assert cli(*big).returncode == 0
    done = cli(*big, "--check")
    assert done.returncode == 3
    assert "NO, 237.58 GiB over" in done.stdout
    assert "does not fit, 237.58 GiB over the limit of 65.39 GiB" in one_line_of(done.stderr)
    assert cli(*ONE, "--quiet", "--check").returncode == 0
