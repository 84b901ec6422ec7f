"""``mofa export`` and ``mofa estimate --from``: files out, jobs in, and one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mofa
from mofa.cli.main import main
from mofa.errors import SpecError

STRATEGY = ("llama3-8b", "h100-hgx", "--gpus", "8", "--strategy", "tp=2 recompute=full", "--no-replay")
TITAN = ("llama3-8b", "h100-hgx", "--gpus", "8", "--framework", "torchtitan", "--strategy", "tp=2 recompute=full",
         "--no-replay")  # fmt: skip
Captured = pytest.CaptureFixture[str]


def _json(capsys: Captured, *arguments: str) -> dict[str, object]:
    assert main(["estimate", *arguments, "--no-replay", "--json"]) == 0
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize(
    ("to", "job", "framework", "options"),
    [
        ("megatron", "megatron.sh", "megatron", STRATEGY), ("torchtitan", "torchtitan.toml", "torchtitan", TITAN),
        ("torchtitan-0.3", "mofa_job.py", "torchtitan", TITAN),
    ],
)  # fmt: skip
def test_a_job_goes_out_and_comes_back(
    to: str, job: str, framework: str, options: tuple[str, ...], tmp_path: Path, capsys: Captured
) -> None:
    assert main(["export", *options, "--to", to, "--out", str(tmp_path / "job")]) == 0
    assert job in capsys.readouterr().err
    back = _json(capsys, "--from", framework, str(tmp_path / "job" / job), "h100-hgx")
    plain = _json(capsys, *options[:-1])
    assert back["step_s"] == plain["step_s"]
    assert back["strategy"] == plain["strategy"]
    assert any("read from" in note for note in back["notes"] if isinstance(note, str))  # type: ignore[attr-defined]


def test_the_json_of_a_plan_is_exported(tmp_path: Path, capsys: Captured) -> None:
    """Of a search the best, or the one asked for; the head says what was predicted."""
    file = tmp_path / "plan.json"
    search = ["plan", "llama3-8b", "h100-hgx", "--gpus", "8", "--fix", "cp=1 vpp=1 pp=2 micro_batch=1", "--no-replay"]
    assert main([*search, "--top", "2", "--refine-seconds", "0", "--quiet", "--json-file", str(file)]) == 0
    capsys.readouterr()
    plans = json.loads(file.read_text())["plans"]
    for number in (1, 2):
        assert main(["export", str(file), "--to", "megatron", "--number", str(number)]) == 0
        text = capsys.readouterr().out
        assert f"step {plans[number - 1]['step_s']:.6g} s" in text
        assert f"--tensor-model-parallel-size {plans[number - 1]['strategy']['tp']}\n" in text
        assert "# == megatron.slurm" in text


def test_a_search_is_exported(tmp_path: Path, capsys: Captured) -> None:
    few = ["--fix", "tp=2 pp=1 cp=1 micro_batch=1", "--with", "fp8-delayed", "--no-replay", "--quiet"]
    assert (
        main(
            ["export", "llama3-8b", "h100-hgx", "--gpus", "8", *few, "--to", "megatron-bridge", "--out", str(tmp_path)]
        )
        == 0
    )
    recipe = (tmp_path / "mofa_recipe.py").read_text()
    assert "tensor_model_parallel_size=2" in recipe and "fp8_recipe='delayed'" in recipe


def test_under_a_plan_stands_how_to_run_it(capsys: Captured) -> None:
    assert main(["estimate", *STRATEGY]) == 0
    assert "mofa export plan.json --to megatron (or megatron-bridge)" in capsys.readouterr().out
    assert main(["estimate", "llama3-8b", "h100-hgx", "--gpus", "8", "--framework", "fsdp1", "--strategy",
                 "recompute=full", "--no-replay"]) == 0  # fmt: skip
    assert "mofa export" not in capsys.readouterr().out


OLMO_2 = {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 100352,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-06, "rope_theta": 500000, "tie_word_embeddings": False,
    "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip


def test_a_plan_says_that_its_framework_cannot_run_the_model(tmp_path: Path, capsys: Captured) -> None:
    """Norms behind sublayers, as OLMo 2 has them, are planned, and no Megatron-Core runs them."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(OLMO_2))
    few = (
        "h100-hgx",
        "--gpus",
        "8",
        "--fix",
        "tp=1",
        "--fix",
        "pp=1",
        "--fix",
        "cp=1 micro_batch=1",
        "--fast",
        "--top",
        "1",
        "--quiet",
    )
    assert main(["plan", str(config), "--seq-len", "4K", "--global-batch", "64", *few]) == 0
    said = capsys.readouterr().err
    assert said.startswith("mofa: No job is written for megatron: ") and "norm_placement" in said
    assert said.count("\n") == 1
    assert main(["plan", "llama3-8b", *few[:4], "tp=2", *few[5:]]) == 0
    assert not capsys.readouterr().err


def test_from_python(tmp_path: Path) -> None:
    job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    search = mofa.find_plans(job, machines, fix={"tp": 2, "pp": 1, "cp": 1}, top=1, replay=False)
    exported = mofa.export(search, to="megatron", out=tmp_path)
    assert (tmp_path / "megatron.sh").read_text() == exported.files["megatron.sh"]
    assert mofa.export(search.report, to="megatron").files == exported.files
    with pytest.raises(SpecError, match="has 1 plans"):
        mofa.export(search, to="megatron", number=2)
    with pytest.raises(SpecError, match="give workload, cluster"):
        mofa.export(search.report.plans[0], to="megatron")
    with pytest.raises(SpecError, match="is one plan"):
        mofa.export(search.report.plans[0], to="megatron", number=2)
    with pytest.raises(SpecError, match="is no plan"):
        mofa.export("plan", to="megatron")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*STRATEGY], "--to"),
        ([*STRATEGY, "--to", "megatrn"], "did you mean megatron"),
        ([*STRATEGY, "--to", "torchtitan"], "framework.name (megatron)"),
        ([*STRATEGY, "--to", "megatron", "--fix", "tp=2"], "--fix"),
        ([*STRATEGY, "--to", "megatron", "--number", "0"], "--number"),
        (
            [*STRATEGY, "--to", "megatron", "--set", "framework.process_groups=eager"],
            "framework.process_groups (eager)",
        ),
        ([*STRATEGY, "--to", "megatron", "--set", "framework.grouped_alignment=1", "--out", "x/y.json/z"], "x"),
        (["none.json", "--to", "megatron"], "no such file"),
        (["plan.json:2", "--to", "megatron", "--number", "1"], "--number: is 1, but plan.json:2 names plan 2"),
        (["plan.json:1", "--to", "megatron", "--number", "2"], "--number: is 2, but plan.json:1 names plan 1"),
        ([":2", "--to", "megatron"], ":2: the plan's file is missing"),
        (["plan.json", "--to", "megatron", "--gpus", "8"], "--gpus"),
        (["old.json", "--to", "megatron"], "says no job"),
        (["empty.json", "--to", "megatron"], "is no result of mofa"),
        (["text.json", "--to", "megatron"], "is no JSON"),
        (["broken.json", "--to", "megatron"], "run the plan again"),
        (["llama3-8b", "h100-hgx", "--to", "megatron"], "--gpus"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_2(
    arguments: list[str], says: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {"old.json": '{"schema_version": "2.9", "plans": []}', "empty.json": "{}", "text.json": "plan", "x": "",
             "plan.json": "{}", "broken.json": '{"schema_version": "2.10", "job": {}, "plans": []}'}  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert main(["export", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("mofa: ")
    assert says in err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(texts)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--from", "megatron", "job.sh"], "name a node type"),
        (["--from", "megatron", "job.sh", "h100-hgx", "--strategy", "tp=2"], "--strategy"),
        (["--from", "megatron", "job.sh", "h100-hgx", "--framework", "torchtitan"], "--framework"),
        (["--from", "mega", "job.sh", "h100-hgx"], "megatron"),
        (["--from", "megatron", "none.sh", "h100-hgx"], "no such file"),
        (["--from", "torchtitan", "job.sh", "h100-hgx"], "is no TOML"),
        (["--from", "megatron", "job.sh", "h100-hgx", "--gpus", "3"], "gpus (3)"),
    ],
)
def test_a_job_that_cannot_be_read_is_one_line_and_status_2(
    arguments: list[str], says: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", *STRATEGY, "--to", "megatron", "--out", "."]) == 0
    (tmp_path / "megatron.sh").rename(tmp_path / "job.sh")
    capsys.readouterr()
    assert main(["estimate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert says in err


def test_a_job_is_changed_by_set_and_gpus(tmp_path: Path, capsys: Captured) -> None:
    assert main(["export", *STRATEGY, "--to", "megatron", "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    job = ("--from", "megatron", str(tmp_path / "megatron.sh"), "h100-hgx")
    plain = _json(capsys, *job)
    more = _json(capsys, *job, "--gpus", "16")
    changed = _json(capsys, *job, "--set", "workload.model.num_layers=16", "--set", "framework.attention=flash")
    assert more["strategy"]["dp"] == 2 * plain["strategy"]["dp"]  # type: ignore[index]
    assert changed["workload"]["num_layers"] == 16 and changed["framework"]["attention"] == "flash"  # type: ignore[index]
