"""The command line by itself: options reach the API, output goes where asked, errors are one line and a status."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

import mofa
from mofa.cli.command_groups import PANELS
from mofa.cli.main import main
from mofa.cli.parse import parse_degree_limits, parse_fixed, split_words
from mofa.errors import SpecError, StrategyError
from mofa.report.phrases import strategy_text
from mofa.schedules import SCHEDULE_NAMES, SCHEDULES
from mofa.search.space import WITH, WITHOUT, constrain_space, default_space
from mofa.specs.files import did_you_mean
from mofa.specs.framework_names import FRAMEWORK_NAMES
from mofa.specs.overrides import STRATEGY_KEYS
from mofa.specs.unmodelled import NOT_MODELLED, OTHER_NAMES, normalised_word
from tests.cli.conftest import Cli, FakeApi, one_line_of
from tests.report.fake import make_plan

PLAN = ["plan", "toy", "toy-hgx", "--gpus", "64"]
ESTIMATE = ["estimate", "toy", "toy-hgx", "--gpus", "64", "--strategy", "tp=2 pp=4 micro_batch=1"]

Captured = pytest.CaptureFixture[str]


def test_plan_prints_the_plans(fake: FakeApi, capsys: Captured) -> None:
    assert main(PLAN) == 0
    out, err = capsys.readouterr()
    assert "The 3 best plans" in out
    assert err == ""


@pytest.mark.usefixtures("undrawn")
def test_json_is_all_that_is_on_standard_output(fake: FakeApi, capsys: Captured, tmp_path: Path) -> None:
    assert main([*PLAN, "--json", "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["schema_version"] == "2.15"
    assert err == f"wrote {len(list((tmp_path / 'out').iterdir()))} files to {tmp_path / 'out'}\n"


def test_files_hold_what_is_printed(fake: FakeApi, capsys: Captured, tmp_path: Path) -> None:
    json_file, csv_file = tmp_path / "a.json", tmp_path / "a.csv"
    assert main([*PLAN, "--json", "--json-file", str(json_file), "--csv", str(csv_file)]) == 0
    assert json_file.read_text() == capsys.readouterr().out
    rows = list(csv.DictReader(csv_file.read_text().splitlines()))
    assert [float(row["step_s"]) for row in rows] == [8.0, 9.0, 10.0]


def test_nothing_that_fits_is_status_3_with_the_json(fake: FakeApi, capsys: Captured) -> None:
    fake.num_plans = 0
    assert main([*PLAN, "--json"]) == 3
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["plans"] == []
    assert report["min_gpus"] == 128
    assert one_line_of(err) == "mofa: toy-moe on 64 x toy: nothing fits; 128 GPUs would do"


def test_plan_hands_on_every_option(fake: FakeApi, capsys: Captured) -> None:
    options = (
        "--seq-len 8K --global-batch 1K --tokens 15T --framework torchtitan --top 3 --fix tp=8 --max pp=8 "
        "--with fp8 --without vpp --flops-convention full --set workload.model.num_layers=4 --set hardware.gpu.name=x "
        "--set framework.compile=true --set strategy.micro_batch=2"
    )
    assert main([*PLAN, *options.split()]) == 0
    assert fake.calls["load_workload"] == (
        ("toy",), {"seq_len": 8192, "global_batch": 1024, "tokens": "15T", "overrides": {"model.num_layers": 4}}
    )  # fmt: skip
    assert fake.calls["load_cluster"] == (("toy-hgx", 64), {"overrides": {"gpu.name": "x"}})
    assert fake.calls["load_framework"] == (("torchtitan",), {"overrides": {"compile": True}})
    kwargs = fake.calls["find_plans"][1]
    assert kwargs["fix"] == {"tp": 8, "micro_batch": 2}
    assert kwargs["maximum"] == {"pp": 8}
    assert kwargs["with_"] == ["fp8"]
    assert kwargs["without"] == ["vpp"]
    assert kwargs["top"] == 3
    assert kwargs["flops_convention"] == "full"


def test_the_framework_is_the_workloads_else_megatron(fake: FakeApi, capsys: Captured) -> None:
    main(PLAN)
    assert fake.calls["load_framework"][0] == ("megatron",)


def test_several_pairs_in_one_option() -> None:
    assert parse_fixed(["tp=8 pp=4", "sp=true"]) == {"tp": 8, "pp": 4, "sp": True}
    assert parse_fixed(["tp=4,8 layout=Et,tL"]) == {"tp": (4, 8), "layout": "Et,tL"}
    assert parse_degree_limits(["tp=8 pp=4", "dp=2"]) == {"tp": 8, "pp": 4, "dp": 2}
    assert split_words(["fp8 bf16_moments", "fp8"]) == ["fp8", "bf16_moments"]


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--fix", "tpp=8", "did you mean tp?"),
        ("--fix", "mbs=2", "did you mean micro_batch?"),
        ("--fix", "TP=2", "did you mean tp?"),
        ("--fix", "dp_size=2", "did you mean dp?"),
        ("--fix", "gbs=8", "it is an option: --global-batch"),
        ("--global-batch", "4Mtok", 'write it as 1024, 1K or "4M tokens"'),
        ("--seq-len", "8.0001K", "--seq-len: '8.0001K' is no whole number; write it as 8192 or 8K"),
        ("--objective", "cheap", "--objective: cheap is unknown; use one of tokens, days, usd, kwh"),
        ("--objective", "kw", "--objective: kw is unknown; did you mean kwh?"),
        ("--fix", "schedule=1f1bb", "zbv or interleaved-zb; did you mean 1f1b?"),
        ("--tpo", "3", "--tpo: is no option of mofa plan; did you mean --top?"),
        ("--checkpoint", "5", "did you mean --checkpoint-mode or --checkpoint-interval?"),
        ("--checkpoint-mode", "sync", "did you mean blocking?"),
        ("--weak", "1", "--weak: is no option of mofa plan; it belongs to goodput"),
        ("--precision", "fp8", "write --with fp8"),
        ("--model", "x", "workload and cluster are written without options"),
        ("--quiet=yes", "8", "--quiet: takes no value"),
        ("--with", "", "a word is missing"),
        ("--fix", "tp=4..8", "write several values by --fix, as tp=4,8"),
        ("--memory-limit", "70gb", "did you mean GB?"),
        ("--nodes", "2", "give one of them"),
        ("--fix", "tp", "field=value"),
        ("--fix", "tp=eight", "tp"),
        ("--fix", "tp=0", "tp"),
        ("--fix", "recompute=lots", "recompute"),
        ("--fix", "tp=2 tp=4", "twice"),
        ("--max", "recompute=full", "is no degree"),
        ("--max", "pp=-1", "pp"),
        ("--set", "model.num_layers=4", "workload"),
        ("--set", "workload.model.num_layers", "assignment"),
        ("--top", "0", "--top: must be at least 1"),
        (
            "--top",
            "1000",
            "--top: 1,000 plans are more than 200, and each is costed in detail; take fewer, and --out DIR",
        ),
        ("--top", "many", "--top: must be a whole number"),
        ("--gpus", "0", "--gpus"),
        ("--gpus", "64.5", "--gpus"),
        ("--gpus", "99999999999999999999", "--gpus: must be at most 1,099,511,627,776; write it as 64"),
        ("--flops-convention", "half", "half"),
        ("--colour", "red", "--colour"),
        ("--csv", "no/such/dir/x.csv", "does not exist"),
    ],
)
def test_a_bad_option_is_one_line_and_status_2(
    fake: FakeApi, capsys: Captured, option: str, value: str, says: str
) -> None:
    assert main([*PLAN, option, value]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in one_line_of(err)
    assert "find_plans" not in fake.calls


def test_fix_and_set_that_disagree_are_refused(fake: FakeApi, capsys: Captured) -> None:
    assert main([*PLAN, "--fix", "tp=8", "--set", "strategy.tp=4"]) == 2
    assert "keep one" in one_line_of(capsys.readouterr().err)
    assert main([*ESTIMATE[:5], "--strategy", "tp=8", "--set", "strategy.tp=4"]) == 2
    assert "keep one" in one_line_of(capsys.readouterr().err)


def test_estimate_prints_one_plan_object(fake: FakeApi, capsys: Captured) -> None:
    assert main([*ESTIMATE, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["step_s"] == 8.0
    assert plan["workload"]["num_params"] == 100_000_000_000
    assert fake.calls["estimate"][0][2] == {"tp": 2, "pp": 4, "micro_batch": 1}


def test_an_estimate_that_does_not_fit_is_status_0(fake: FakeApi, capsys: Captured) -> None:
    fake.device_gib = 100.0
    assert main([*ESTIMATE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["fits"] is False
    assert main(ESTIMATE) == 0
    assert "Does not fit" in capsys.readouterr().out


def test_an_illegal_strategy_is_status_2(fake: FakeApi, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise StrategyError("strategy: ep (8) with tp (2) needs sp;\nset sp=true")

    monkeypatch.setattr(mofa, "estimate", refuse, raising=False)
    assert main(ESTIMATE) == 2
    assert one_line_of(capsys.readouterr().err) == "mofa: strategy: ep (8) with tp (2) needs sp; set sp=true"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["estimate", "toy", "toy-hgx", "--strategy", "tp=2"], "--gpus: is missing"),
        (["estimate", "toy", "toy-hgx", "--gpus", "8"], "--strategy: is missing"),
        (["estimate", "toy", "--gpus", "8"], "name a cluster after the workload"),
        (["plan", "toy"], "cluster: is missing"),
        (["plan", "toy", "toy-hgx"], "--gpus: is missing"),
        (["plan", "toy", "toy-hgx", "--gpus"], "--gpus: its value is missing"),
        (["plan", "toy", "toy-hgx", "surplus", "--gpus", "8"], "surplus: nothing is expected here"),
        (["plna"], "plna: is no command; did you mean plan?"),
        (["show"], "use one of models, hardware, gpus, faults"),
    ],
)
def test_what_is_missing_is_said(fake: FakeApi, capsys: Captured, arguments: list[str], says: str) -> None:
    assert main(arguments) == 2
    assert says in one_line_of(capsys.readouterr().err)


def test_an_interruption_is_status_130_and_no_file(
    fake: FakeApi, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mofa, "find_plans", interrupt, raising=False)
    assert main([*PLAN, "--json-file", str(tmp_path / "a.json"), "--out", str(tmp_path / "out")]) == 130
    assert list(tmp_path.iterdir()) == []
    assert "interrupted" in capsys.readouterr().err


def test_a_bug_is_one_line_too(fake: FakeApi, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(mofa, "find_plans", fail, raising=False)
    assert main(PLAN) == 1
    assert "internal error: ZeroDivisionError" in one_line_of(capsys.readouterr().err)


def test_schema_is_json_and_covers_what_is_printed(capsys: Captured) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["schema_version"] == "2.15"
    assert {"PlanReport", "Estimate", "Plan"} <= set(schema["$defs"])


def test_a_printed_strategy_is_read_back() -> None:
    from mofa.specs.overrides import parse_strategy

    strategy = make_plan(vpp=2, schedule="interleaved", cp=2, dp=4).strategy
    fields = strategy.model_dump()
    assert all(fields[name] == value for name, value in parse_strategy(strategy_text(strategy)).items())


def test_every_command_has_help(capsys: Captured) -> None:
    names = [name for panel in PANELS.values() for name in panel]
    assert {"plan", "estimate", "goodput", "schema", "trace", "measure", "validate", "attribute"} <= set(names)
    for arguments in (
        [],
        ["--help"],
        *([name, "--help"] for name in names),
    ):
        assert main(arguments) == 0
        assert "Usage: mofa" in capsys.readouterr().out


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from mofa.cli.main import main; main(['--help']); "
        "bad = {'numpy', 'pandas', 'matplotlib', 'scipy', 'ortools', 'torch', 'pydantic', 'yaml'} & set(sys.modules); "
        "print(sorted(bad), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() in ("[]", "['pydantic']")  # typer itself may load pydantic


def test_the_package_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "mofa", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"mofa {mofa.__version__}"


def test_version(process: Cli) -> None:
    done = process("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("mofa")


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m mofa.cli.main schema | head -1", shell=True, capture_output=True, text=True, check=True
    )
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("where", "status", "says"),
    [
        (">&-", 0, ""),  # closed: what is said is lost
        (
            "> /dev/full", 2,
            "mofa: standard output: no space left on its device; free some or write elsewhere\n",
        ),
    ],
)  # fmt: skip
def test_an_output_that_takes_nothing_is_no_traceback(where: str, status: int, says: str) -> None:
    done = subprocess.run(
        f"{sys.executable} -m mofa.cli.main schema {where}", shell=True, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (status, says)


def test_errors_of_specs_are_status_2(fake: FakeApi, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise SpecError("x.yaml: model.hiden is no field here; did you mean hidden?")

    monkeypatch.setattr(mofa, "load_workload", refuse, raising=False)
    assert main(PLAN) == 2
    assert "did you mean hidden?" in one_line_of(capsys.readouterr().err)


def test_a_plan_without_failures_does_not_load_scipys_statistics() -> None:
    """Half a second of every command, which faults and fits alone need."""
    code = (
        "import sys, mofa; from mofa.cli.main import main; "
        "main(['estimate', 'llama3-8b', 'h100-hgx', '--gpus', '8', '--strategy', 'tp=2', '--quiet']); "
        "print(sorted({'scipy.stats', 'scipy.optimize', 'ortools', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(("call", "frozen"), [("main()", True), ("main(['--version'])", False)])
def test_only_a_process_of_its_own_skips_the_last_collection(call: str, frozen: bool) -> None:
    """Who calls the command line with arguments goes on, and needs its cycles collected."""
    script = (
        "import atexit, gc, sys\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"  # runs after what is registered later
        "sys.argv = ['mofa', '--version']\n"
        f"from mofa.cli.main import main\n{call}\n"
    )
    root = Path(mofa.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.splitlines()[-1] == str(frozen)


@pytest.mark.parametrize("word", [word for method in NOT_MODELLED for word in method.words])
def test_what_is_not_modelled_is_refused_by_name(word: str) -> None:
    assert "not modelled" in did_you_mean(word, WITH)


def test_no_word_is_both_modelled_and_not() -> None:
    words = {word for method in NOT_MODELLED for word in method.words}
    known = {normalised_word(name) for name in (*WITH, *WITHOUT, *STRATEGY_KEYS, *FRAMEWORK_NAMES, *SCHEDULES)}
    assert not words & known
    assert not words & {name for names in OTHER_NAMES.values() for name in names}


def test_several_values_are_searched_alone() -> None:
    job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    space = default_space(job, machines, mofa.load_framework("megatron"))
    fixed = {"tp": (4, 8), "recompute": ("full", "none"), "tp_overlap": (True, False)}
    chosen = constrain_space(space, fix=fixed, maximum={}, with_=(), without=())
    assert chosen.tp == (4, 8)
    assert [str(mode) for mode, _ in chosen.recompute] == ["full", "none"]
    assert {options.tp_overlap for options in chosen.options} == {True, False}
    with pytest.raises(SpecError, match="zero takes one value, not 2"):
        mofa.find_plans(job, machines, fix={"zero": (1, 2)})
    assert constrain_space(space, fix={"sp": (False, True)}, maximum={}, with_=(), without=()).sp == (False, True)


def test_nodes_and_a_batch_in_tokens_and_a_memory_limit(cli: Cli) -> None:
    wanted = ("plan", "llama3-8b", "h100-hgx", "--nodes", "1", "--fix", "tp=4,8 pp=1 cp=1 micro_batch=1", "--top", "2")
    done = cli(*wanted, "--global-batch", "4M tokens", "--memory-limit", "70GB", "--no-replay", "--json")
    report = json.loads(done.stdout)
    assert report["cluster"]["num_gpus"] == 8
    assert report["workload"]["global_batch"] == 512
    assert {plan["strategy"]["tp"] for plan in report["plans"]} <= {4, 8}
    assert all(plan["memory"]["capacity_bytes"] == 70e9 for plan in report["plans"])
    assert "100 GB is more than the 79.10 GiB" in one_line_of(cli(*wanted, "--memory-limit", "100 GB").stderr)
    says = "3,145,728 tokens are 314.57 sequences of 10,000; write 315"
    assert says in one_line_of(cli(*wanted, "--seq-len", "10000", "--global-batch", "3M tokens").stderr)


def test_commands_are_grouped_and_their_words_are_not_cut(capsys: Captured) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert [title for title in ("Plan:", "Describe:", "Calibrate:", "Develop:") if f"\n{title}\n" not in out] == []
    assert out.count("...") == 1  # of the line of usage
    names = [name for panel in PANELS.values() for name in panel]
    files = (Path(mofa.__file__).parent / "cli" / "commands").glob("[a-z]*.py")
    assert sorted(names) == sorted(file.stem for file in files)


def test_help_names_what_can_be_written(capsys: Captured) -> None:
    assert main(["plan", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.replace("-\n", "-").split()).replace("- ", "-")
    words = [*(word for word in WITH if word != "fp8"), *WITHOUT, *FRAMEWORK_NAMES, "mofa show strategy"]
    assert [word for word in words if word not in out] == []


def test_every_field_of_a_strategy_is_shown_with_its_values(cli: Cli) -> None:
    fields = {field["name"]: field for field in json.loads(cli("show", "strategy", "--json").stdout)}
    assert tuple(fields) == STRATEGY_KEYS
    assert all(field["values"] and field["default"] and field["meaning"] for field in fields.values())
    assert fields["cp_kind"]["values"] == "ring, allgather, a2a"
    assert [row["name"] for row in json.loads(cli("show", "schedules", "--json").stdout)] == list(SCHEDULE_NAMES)
    assert [row["name"] for row in json.loads(cli("show", "frameworks", "--json").stdout)] == list(FRAMEWORK_NAMES)
    options = {row["name"]: row for row in json.loads(cli("show", "frameworks", "megatron", "--json").stdout)}
    assert options["dispatcher"]["values"] == "alltoall, allgather, deepep"
