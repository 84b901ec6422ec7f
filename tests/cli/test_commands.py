"""The commands of the README, run as a user runs them: real workloads, real hardware."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mofa
from mofa.cli.main import main
from mofa.plan.result import Estimate, PlanReport
from mofa.plan.step_parts import TIME_COMPONENTS
from tests.cli.conftest import Cli, one_line_of
from tests.report.undrawn import figures_undrawn

HF_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "max_position_embeddings": 8192, "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip
RUN = """\
id: {id}
model: {{base: llama3-8b, num_layers: 8}}
framework: {{name: {framework}}}
hardware: h100-hgx
gpus: 8
strategy: {{tp: 2, recompute: none}}
batch: {{seq_len: 4096, micro: 1, global: 32}}
"""
SIXTEEN = ("llama3-8b", "h100-hgx", "--gpus", "16", "--global-batch", "32", "--set", "workload.model.num_layers=8")
LLAMA_8 = ["plan", "llama3-8b", "h100-hgx", "--gpus", "8"]
UNREFINED = ("--refine-seconds", "0")
"""Where a test asks nothing of layouts, whose search is most of a plan's time (tests/cli/test_layouts.py)."""
STRATEGY = "tp=4 pp=4 vpp=5 micro_batch=1 recompute=selective"


def check_plan(plan: dict[str, Any], num_gpus: int, seq_len: int, global_batch: int) -> None:
    """What the contract promises of every plan, from the JSON alone."""
    assert set(plan["time"]["exposed"]) == set(TIME_COMPONENTS)
    assert math.isclose(math.fsum(plan["time"]["exposed"].values()), plan["step_s"], rel_tol=1e-6)
    assert min(plan["time"]["exposed"].values()) >= 0
    assert all(value >= 0 for value in plan["time"]["hidden"].values())
    memory = plan["memory"]
    assert math.isclose(math.fsum(memory["by_component"].values()), memory["peak_bytes"], rel_tol=1e-6)
    assert memory["peak_bytes"] == memory["device_bytes"]
    assert memory["allocated_bytes"] <= memory["reserved_bytes"] <= memory["device_bytes"]
    assert memory["fits"] == (memory["device_bytes"] + memory["margin_bytes"] <= memory["capacity_bytes"])
    assert len(memory["by_stage"]) == plan["strategy"]["pp"]
    assert math.isclose(max(s["device_bytes"] for s in memory["by_stage"]), memory["device_bytes"], rel_tol=1e-6)
    assert math.isclose(math.fsum(plan["provenance"].values()), 1.0, rel_tol=1e-6)
    s = plan["strategy"]
    assert s["dp"] * s["tp"] * s["cp"] * s["pp"] == num_gpus
    tokens = plan["tokens_per_s_per_gpu"] * num_gpus * plan["step_s"]
    assert math.isclose(tokens, seq_len * global_batch, rel_tol=1e-6)
    assert 0 < plan["mfu"] <= plan["hfu"] < 1
    assert plan["costed_by"] in ("closed_form", "replay")


def check_report(report: dict[str, Any]) -> None:
    """What the contract promises of a search, from the JSON alone."""
    assert {"schema_version", "workload", "cluster", "objective", "space", "searched", "rejected", "nearest_miss",
            "min_gpus", "elapsed_s", "plans"} <= set(report)  # fmt: skip
    assert 0 < report["searched"] <= report["space"]
    assert sum(report["rejected"].values()) <= report["space"]
    assert set(report["nearest_miss"]) <= set(report["rejected"])
    speeds = [plan["tokens_per_s_per_gpu"] for plan in report["plans"]]
    assert speeds == sorted(speeds, reverse=True)
    job, cluster = report["workload"], report["cluster"]
    for plan in report["plans"]:
        check_plan(plan, cluster["num_gpus"] - plan["idle_gpus"], job["seq_len"], job["global_batch"])
        assert plan["memory"]["fits"]
    PlanReport.model_validate(report)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One search with every output on: its report, and the directory of its files, whose figures are not drawn."""
    folder = tmp_path_factory.mktemp("llama")
    arguments = ["plan", *SIXTEEN, "--max", "pp=2", "--max", "cp=1", "--max", "micro_batch=2", *UNREFINED, "--json"]
    arguments += ["--json-file", "a.json", "--csv", "a.csv", "--out", "out", "--jobs", "1"]
    with contextlib.chdir(folder), figures_undrawn(), contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(arguments) == 0
    return {"report": json.loads(out.getvalue()), "stdout": out.getvalue(), "folder": folder}


def test_plan_keeps_the_contract(llama: dict[str, Any]) -> None:
    check_report(llama["report"])
    assert len(llama["report"]["plans"]) == 10
    assert llama["report"]["min_gpus"] is None


def test_plan_writes_what_it_prints(llama: dict[str, Any]) -> None:
    folder = llama["folder"]
    assert (folder / "a.json").read_text() == llama["stdout"]
    rows = list(csv.DictReader((folder / "a.csv").read_text().splitlines()))
    assert [float(row["step_s"]) for row in rows] == [plan["step_s"] for plan in llama["report"]["plans"]]
    names = {path.name for path in (folder / "out").iterdir()}
    for figure in ("pareto", "time_breakdown", "memory_breakdown", "stage_memory"):
        assert {f"{figure}.png", f"{figure}.svg"} <= names
    feasible = list(csv.DictReader((folder / "out" / "feasible.csv").read_text().splitlines()))
    report = llama["report"]
    assert len(feasible) >= report["space"] - sum(report["rejected"].values()) > 0
    shown = float(feasible[0]["tokens_per_s_per_gpu"])
    assert shown > 0 and {row["costed_by"] for row in feasible} <= {"closed_form", "replay"}


def test_the_best_plan_is_estimated_to_the_same_numbers(llama: dict[str, Any], cli: Cli) -> None:
    from mofa.report.phrases import strategy_text
    from mofa.specs.strategy import StrategySpec

    best = llama["report"]["plans"][0]
    text = strategy_text(StrategySpec(**best["strategy"]))
    done = cli("estimate", *SIXTEEN, "--strategy", text, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["strategy"] == best["strategy"]
    assert plan["step_s"] == pytest.approx(best["step_s"], rel=1e-9)
    assert plan["memory"]["device_bytes"] == pytest.approx(best["memory"]["device_bytes"], rel=1e-9)


def test_plan_prints_what_the_issue_asks(cli: Cli) -> None:
    done = cli("plan", "llama3-8b", "h100-hgx", "--gpus", "16", "--tokens", "15T", "--no-replay", *UNREFINED)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert done.stderr == ""
    for words in ("tokens/s/GPU", "TFLOP/s/GPU", "MFU", "peak GiB", "days", "Where the step", "What fills the memory",
                  "Looked at", "rejected", "measured", "megatron"):  # fmt: skip
        assert words in done.stdout, words


def test_deepseek_v3_is_planned(cli: Cli) -> None:
    """On as many GPUs as it was trained on; 16,384 are one of benchmarks/search_speed.py's."""
    one = ("--top", "1", "--without", "fewer_gpus")
    done = cli("plan", "deepseek-v3", "h800-hgx", "--gpus", "2048", "--fast", "--json", *one)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    check_report(report)
    assert report["elapsed_s"] > 0  # how long it takes is benchmarks/search_speed.py's to say
    illegal = sum(n for reason, n in report["rejected"].items() if reason not in ("needless", "memory", "slower"))
    assert (legal := report["space"] - illegal) >= 100_000  # all of them are bounded, and few are costed
    assert report["searched"] <= 0.02 * legal


def test_a_hugging_face_config_is_planned(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "my-hf-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF_LLAMA))
    options = ["--seq-len", "8192", "--global-batch", "1024", "--tokens", "15T", "--no-replay", "--json"]
    few = ["--max", "pp=2", "--top", "2", *UNREFINED]
    done = cli("plan", "./my-hf-model/config.json", "h100-hgx", "--gpus", "512", *options, *few)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    check_report(report)
    assert report["workload"]["num_params"] == 8_030_261_248  # the released Llama-3-8B
    assert report["plans"][0]["days_without_failures"] > 0
    estimate = cli("estimate", "./my-hf-model", "h100-hgx", "--gpus", "512", "--strategy", "tp=2", *options)
    assert json.loads(estimate.stdout)["workload"] == report["workload"]
    said = "absent keys as transformers' LlamaConfig has them: head_dim 128"
    assert said in report["plans"][0]["notes"]
    assert said in json.loads(estimate.stdout)["notes"]
    shown = cli("show", "workload", "./my-hf-model", *options[:4])
    assert said in " ".join(shown.stdout.split())
    assert json.loads(cli("show", "workload", "./my-hf-model", *options[:4], "--json").stdout)["notes"] == [said]
    without = cli("plan", "./my-hf-model/config.json", "h100-hgx", "--gpus", "512")
    assert without.returncode == 2
    assert "--seq-len" in one_line_of(without.stderr)


def test_constraints_hold(cli: Cli) -> None:
    options = ["--fix", "tp=8", "--max", "pp=4", "--without", "vpp", "--top", "20", "--no-replay", "--json", *UNREFINED]
    report = json.loads(cli("plan", "llama3-70b", "h100-hgx", "--gpus", "64", *options).stdout)
    assert len(report["plans"]) == 20
    check_report(report)
    for plan in report["plans"]:
        assert plan["strategy"]["tp"] == 8
        assert plan["strategy"]["pp"] <= 4
        assert plan["strategy"]["vpp"] == 1


def test_numerics_change_only_when_asked(cli: Cli) -> None:
    base = ("plan", "llama3-70b", "h100-hgx", "--gpus", "64", "--no-replay", "--json", "--fix", "tp=8", "--max", "pp=4",
            "--top", "1", *UNREFINED)  # fmt: skip
    plain = json.loads(cli(*base).stdout)
    fp8 = json.loads(cli(*base, "--with", "fp8").stdout)
    assert plain["workload"]["gemm_format"] == "bf16"
    assert fp8["plans"][0]["step_s"] < plain["plans"][0]["step_s"]
    refused = cli("plan", "llama3-70b", "h100-hgx", "--gpus", "64", "--with", "fp7")
    assert refused.returncode == 2
    assert "fp7" in one_line_of(refused.stderr)


def test_the_flops_convention_changes_mfu_and_not_the_time(cli: Cli) -> None:
    base = ["estimate", "llama3-8b", "h100-hgx", "--gpus", "8", "--strategy", "tp=2", "--no-replay", "--json"]
    causal, full = (json.loads(cli(*base, "--flops-convention", name).stdout) for name in ("causal", "full"))
    assert causal["step_s"] == full["step_s"]
    assert causal["mfu"] < full["mfu"]
    assert (causal["flops_convention"], full["flops_convention"]) == ("causal", "full")


def test_nothing_that_fits_is_status_3_with_reasons_and_gpus(cli: Cli) -> None:
    """That the number is the smallest, of models with experts too, is what tests/search/test_fewest_gpus.py holds."""
    done = cli("plan", "llama3-405b", "h800-hgx", "--gpus", "8", "--json")
    assert done.returncode == 3
    report = json.loads(done.stdout)
    check_report(report)
    assert report["plans"] == []
    assert report["min_gpus"] > 8
    assert report["min_gpus"] % 8 == 0
    assert sum(report["rejected"].values()) == report["space"]
    one_line_of(done.stderr)
    enough = cli(
        "plan", "llama3-405b", "h800-hgx", "--gpus", str(report["min_gpus"]), "--no-replay", "--json", *UNREFINED
    )
    assert enough.returncode == 0, enough.stderr
    assert f"{report['min_gpus']:,} GPUs would do" in done.stderr


def test_gpus_that_would_do_include_those_that_stand_by(cli: Cli) -> None:
    """A node stands by, 56 GPUs are left, and tp 8 without a pipeline takes a dp of 8: 64 compute, 72 in all."""
    asked = ("plan", "llama3-70b", "h100-hgx", "--spares", "1", "--fix", "tp=8", "--fix", "pp=1", "--faults", "llama3",
             "--set", "hardware.gpu.memory_bytes=90 GiB", "--tokens", "1T", "--no-replay", "--gpus")  # fmt: skip
    done = cli(*asked, "64", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["min_gpus"] == 8 * 8 + 8
    assert "72 GPUs would do" in one_line_of(done.stderr)
    text = cli(*asked, "64")
    said = " ".join(text.stdout.split())
    assert "The smallest number of GPUs that would do: 72 (the fewest whole nodes" in said
    assert "8 GPUs that stand by included" in said
    assert "72 GPUs would do" in text.stderr
    assert cli(*asked, "72", "--quiet").returncode == 0


def test_estimate_gives_one_plan_object(cli: Cli, tmp_path: Path) -> None:
    arguments = ["estimate", "llama3-70b", "h100-hgx", "--gpus", "64", "--strategy", STRATEGY]
    done = cli(*arguments, "--json-file", "plan.json")
    assert done.returncode == 0, done.stderr
    assert "Memory per pipeline stage" in done.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    check_plan(plan, 64, plan["workload"]["seq_len"], plan["workload"]["global_batch"])
    Estimate.model_validate(plan)
    assert (plan["strategy"]["tp"], plan["strategy"]["dp"], plan["strategy"]["vpp"]) == (4, 4, 5)
    assert [stage["layers_by_chunk"] for stage in plan["memory"]["by_stage"]] == [[4] * 5] * 4
    assert "Layers per chunk, in a micro-batch's order (5 times over the stages): 4 (20 times)." in done.stdout
    assert plan["defaults"] == {
        "strategy": "sp=true dp=4 zero=1", "framework": "megatron", "gemm_format": "bf16", "routing": "balanced",
        "flops_convention": "causal",
    }  # fmt: skip
    assert "sp=true dp=4 zero=1" in done.stdout.partition("Defaults")[2]


def test_an_uneven_split_is_told_chunk_by_chunk(cli: Cli, tmp_path: Path) -> None:
    """32 layers over 6 chunks; the head (525M parameters) weighs as much as 2.4 layers (218M), so the last has 3."""
    arguments = ["estimate", "llama3-8b", "h100-hgx", "--gpus", "8", "--no-replay", "--json-file", "plan.json"]
    done = cli(*arguments, "--strategy", "pp=2 vpp=3 micro_batch=1")
    assert done.returncode == 0, done.stderr
    assert "(3 times over the stages): 5, 6, 6, 6, 6, 3." in done.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    stages = plan["memory"]["by_stage"]
    assert [stage["layers_by_chunk"] for stage in stages] == [[5, 6, 6], [6, 6, 3]]
    assert [stage["num_layers"] for stage in stages] == [17, 15]
    text = "Et*5|(t*6|)*4t*3L"
    launch = f"--pipeline-model-parallel-layout '{text}'"
    assert plan["layout"] == {"text": text, "by": "mofa", "launch": launch, "search": None}
    assert f"Layout: {text} (megatron needs it: --pipeline-model-parallel-layout)." in done.stdout
    assert f"megatron refuses 32 layers over pp 2 x vpp 3 and needs a layout: {launch}" in " ".join(done.stdout.split())


def test_an_estimate_that_does_not_fit_is_status_0(cli: Cli) -> None:
    strategy = "micro_batch=1 recompute=none"
    done = cli("estimate", "llama3-70b", "h100-hgx", "--gpus", "8", "--strategy", strategy, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["memory"]["fits"] is False


@pytest.mark.parametrize("framework", ["megatron", "megatron-local", "torchtitan"])
def test_a_run_file_is_estimated(cli: Cli, tmp_path: Path, framework: str) -> None:
    (tmp_path / "RUN.yaml").write_text(RUN.format(id="one", framework=framework))
    done = cli("estimate", "RUN.yaml", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    check_plan(plan, 8, 4096, 32)
    assert plan["id"] == "one"
    assert plan["strategy"]["framework"] == framework


def test_a_workload_is_no_file_of_runs(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text((Path(__file__).parents[2] / "workloads" / "llama3-8b.yaml").read_text())
    done = cli("estimate", "job.yaml")
    assert done.returncode == 2
    assert "job.yaml: is a workload and no file of runs" in one_line_of(done.stderr)


def test_what_is_wrong_in_a_run_is_told_with_its_file(cli: Cli, tmp_path: Path) -> None:
    for change, says in (
        (("hardware: h100-hgx", "hardware: h100"), "RUN.yaml: h100: no bundled node"),
        (("global: 32", "global: 33"), "RUN.yaml: run one: batch.global (33)"),
        (("num_layers: 8", "num_layer: 8"), "RUN.yaml: run one: model.num_layer is no field"),
    ):
        (tmp_path / "RUN.yaml").write_text(RUN.format(id="one", framework="megatron").replace(*change))
        done = cli("estimate", "RUN.yaml")
        assert done.returncode == 2
        assert says in one_line_of(done.stderr)


@pytest.mark.usefixtures("undrawn")
def test_a_file_of_runs_gives_a_list(cli: Cli, tmp_path: Path) -> None:
    runs = [RUN.format(id=name, framework="megatron") for name in ("one", "two")]
    indented = ["- " + run.replace("\n", "\n  ").rstrip() + "\n" for run in runs]
    (tmp_path / "RUNS.yaml").write_text("runs:\n" + "".join(indented))
    done = cli("estimate", "RUNS.yaml", "--json", "--out", "out", "--csv", "a.csv")
    assert done.returncode == 0, done.stderr
    assert [plan["id"] for plan in json.loads(done.stdout)] == ["one", "two"]
    assert [row["id"] for row in csv.DictReader((tmp_path / "a.csv").read_text().splitlines())] == ["one", "two"]
    assert (tmp_path / "out" / "time_breakdown.svg").exists()


def test_set_changes_one_fact(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "RUN.yaml").write_text(RUN.format(id="one", framework="megatron"))
    base = ("estimate", "RUN.yaml", "--no-replay", "--json")
    before = json.loads(cli(*base).stdout)
    for change, grows in (
        ("workload.model.num_layers=16", True),
        ("hardware.gpu.memory_bandwidth_bytes_per_s=1 TB/s", True),
        ("strategy.recompute=full", True),
    ):
        done = cli(*base, "--set", change)
        assert done.returncode == 0, done.stderr
        assert (json.loads(done.stdout)["step_s"] > before["step_s"]) is grows, change
    changed = cli(*base, "--set", "framework.allocator=expandable")
    assert json.loads(changed.stdout)["framework"]["allocator"] == "expandable"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "llama3-9b", "h100-hgx", "--gpus", "8"], "llama3-8b"),
        (["plan", "llama3-8b", "h100-hxg", "--gpus", "8"], "h100-hgx"),
        (["plan", "no/such/config.json", "h100-hgx", "--gpus", "8"], "no such file"),
        (["plan", "llama3-8b", "h100-hgx", "--gpus", "12"], "whole nodes"),
        (["plan", "llama3-8b", "h100-hgx", "--gpus", "8", "--framework", "megatorn"], "did you mean megatron?"),
        (["plan", "llama3-8b", "h100-hgx", "--gpus", "8", "--tokens", "15 apples"], "apples"),
        ([*LLAMA_8, "--set", "workload.model.num_layrs=4"], "num_layers"),
        ([*LLAMA_8, "--set", "workload.model.num_layers=four"], "whole number"),
        ([*LLAMA_8, "--set", "hardware.gpu.memory_bytes=80"], "unit"),
        ([*LLAMA_8, "--set", "workload.model.attention.num_kv_heads=5"], "num_heads"),
        (["estimate", "llama3-8b", "h100-hgx", "--gpus", "8", "--strategy", "tp=3"], "tp (3)"),
        (["estimate", "llama3-8b", "h100-hgx", "--gpus", "8", "--strategy", "tp=16"], "tp (16)"),
        (["estimate", "llama3-8b", "h100-hgx", "--gpus", "8", "--strategy", "vpp=2"], "vpp (2)"),
        (["estimate", "llama3-8b", "h100-hgx", "--gpus", "8", "--strategy", "ep=2"], "ep (2)"),
        (["estimate", "llama3-8b", "h100-hgx", "--gpus", "8", "--strategy", "micro_batch=7"], "micro_batch (7)"),
        (
            ["plan", "llama3-8b", "h100-hgx", "--gpus", "16384", "--global-batch", "7", "--without", "fewer_gpus"],
            "use a multiple of that",
        ),
        (["estimate", "no-such-run.yaml"], "no such file"),
        (["estimate", "llama3-8b"], "is a workload and no file of runs; name a cluster"),
        ([*LLAMA_8, "--set", "hardware.num_gpus=16"], "num_gpus is set to 16, but the GPUs asked for are 8"),
        ([*LLAMA_8, "--set", "framework.name=torchtitan"], "the framework asked for is megatron"),
        ([*LLAMA_8, "--json-file", "a", "--csv", "./a"], "names the same file"),
        ([*LLAMA_8, "--with", "micro_moe"], "needs experts, and llama3-8b has none"),
        ([*LLAMA_8, "--with", "zbv"], "is searched where the framework runs it"),
        ([*LLAMA_8, "--without", "tp", "--fix", "tp=8"], "but --fix asks for tp=8"),
        ([*LLAMA_8, "--without", "full", "--fix", "recompute=full:2"], "but --fix asks for recompute=full:2"),
        (["show", "hardware", "h100"], "h100"),
        (["show", "workload", "llama"], "llama3"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_status_2(cli: Cli, arguments: list[str], says: str) -> None:
    done = cli(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert says in one_line_of(done.stderr)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("number.yaml", "name: 5\nsource: abc\n", "name (5) must be text"),
        ("empty.yaml", "", "empty"),
        ("bomb.yaml", BOMB, "expand"),
        ("list.yaml", "- 1\n- 2\n", "mapping"),
        ("broken.yaml", "a: [1, 2\n", "YAML"),
        ("misspelt.yaml", "nam: x\nsource: abc\n", "did you mean name?"),
        ("binary.yaml", "\x00\x01\x02", "YAML"),
        ("other.json", json.dumps({"architectures": ["BertForMaskedLM"], "model_type": "bert"}), "bert"),
        ("text.json", json.dumps({**HF_LLAMA, "hidden_size": "wide"}), "hidden_size"),
        ("missing.json", json.dumps({"architectures": ["InternLM2ForCausalLM"]}), "hidden_size is missing"),
    ],
)
def test_a_bad_file_is_one_line_and_status_2(cli: Cli, tmp_path: Path, name: str, content: str, says: str) -> None:
    (tmp_path / name).write_text(content)
    done = cli("plan", name, "h100-hgx", "--gpus", "8", "--seq-len", "4096", "--global-batch", "64")
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    line = one_line_of(done.stderr)
    assert says.lower() in line.lower()
    assert name in line


TELLING = """\
import sys, mofa
from mofa.cli.main import main
find = mofa.find_plans
def telling(*args, **options):
    print("searching", flush=True)
    return find(*args, **options)
mofa.find_plans = telling
sys.exit(main())
"""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_file(tmp_path: Path, kind: signal.Signals) -> None:
    root = Path(mofa.__file__).parent.parent
    arguments = ["plan", "deepseek-v3", "h800-hgx", "--gpus", "16384"]
    arguments += ["--json-file", "a.json", "--csv", "a.csv", "--out", "out"]
    process = subprocess.Popen(
        [sys.executable, "-c", TELLING, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "searching\n"  # however long that takes: now it has seconds to go
    time.sleep(0.2)
    process.send_signal(kind)
    _, error = process.communicate(timeout=120)
    assert process.returncode == (130 if kind is signal.SIGINT else 143)
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_show_models_lists_what_is_bundled(cli: Cli) -> None:
    text = cli("show", "models").stdout
    models = json.loads(cli("show", "models", "--json").stdout)
    names = {model["name"] for model in models}
    assert {"gpt3-175b", "llama3-8b", "llama3-70b", "llama3-405b", "mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b",
            "qwen3-235b-a22b", "deepseek-v2-lite", "deepseek-v3", "kimi-k2", "gpt-oss-120b"} <= names  # fmt: skip
    assert all(name in text for name in names)


def test_show_workload_counts_its_parameters(cli: Cli) -> None:
    workload = json.loads(cli("show", "workload", "deepseek-v3", "--json").stdout)
    assert workload["num_params"] == pytest.approx(671.03e9, rel=1e-3)
    assert workload["num_active_params"] == pytest.approx(37.55e9, rel=1e-3)
    assert workload["num_active_params_without_embedding"] == pytest.approx(36.63e9, rel=1e-3)
    assert "model.attention.kv_lora_rank" in cli("show", "workload", "deepseek-v3").stdout


def test_a_name_of_both_a_gpu_and_a_node_shows_both(cli: Cli) -> None:
    shown = cli("show", "hardware", "gh200").stdout
    assert "node.host_memory_bytes" in shown and "gpu.host_link_bytes_per_s" in shown


def test_show_hardware_says_where_every_number_comes_from(cli: Cli) -> None:
    text = cli("show", "hardware").stdout
    listed = json.loads(cli("show", "hardware", "--json").stdout)
    nodes = {"a100-hgx", "h100-hgx", "h200-hgx", "h800-hgx", "h20-hgx", "b200-hgx", "gb200-nvl72"}
    assert nodes <= {node["name"] for node in listed["nodes"]}
    assert all(name in text for name in nodes)
    for name in ("h100-hgx", "gb200-nvl72", "mi300x"):  # the facts of all others are tests/test_house.py's
        done = cli("show", "hardware", name, "--json")
        assert done.returncode == 0, done.stderr
        facts = list(_facts(json.loads(done.stdout)))
        assert len(facts) > 20
        assert all(fact["provenance"] and fact["source"] for fact in facts)
    shown = cli("show", "hardware", "h100-hgx").stdout
    assert "assumed" in shown
    field = "node.intra.bandwidth_bytes_per_s"  # what is shown can be set
    assert field in shown
    change = f'hardware.{field}="400 GB/s"'
    done = cli("estimate", "llama3-8b", "h100-hgx", "--gpus", "8", "--strategy", "dp=8", "--no-replay", "--set", change)
    assert done.returncode == 0, done.stderr


def _facts(raw: Any) -> Iterator[dict[str, Any]]:
    if isinstance(raw, dict):
        if "value" in raw or "form" in raw:
            yield raw
        for item in raw.values():
            yield from _facts(item)
