"""`mofa measure` without a GPU: what it refuses, what it skips, and what it writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from mofa.errors import SpecError
from mofa.measure import KeptBesideRecords, read_record, read_records
from mofa.measure.expand import expand_run
from mofa.measure.launch import RunTask
from mofa.measure.runs import machine_self_test, refuse_unfit_machine, task_of_run
from mofa.measure.runs import measure_runs as measure_runs
from mofa.specs.run_files import load_runs

PLANS = sorted((Path(__file__).parents[2] / "reference_runs" / "plans").glob("*.yaml"))
GPU = {"name": "Fake GPU", "ok": True, "error": 0.0, "free_bytes": 140 * 2**30, "total_bytes": 140 * 2**30}
PACKAGES = {"torchtitan": "0.2.2", "megatron": "0.16.1", "transformer_engine": "2.20.2"}
STATE = {"torch": "2.11", "gpus": [GPU] * 4, **PACKAGES}


def raw_run(id: str = "a", framework: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "id": id,
        "model": {"base": "llama3-8b", "num_layers": 4},
        "framework": framework or {"name": "torchtitan"},
        "hardware": "h200-hgx",
        "gpus": 1,
        "strategy": {"recompute": "none"},
        "batch": {"seq_len": 1024, "micro": 1, "global": 4},
        **changes,
    }


def runs_file(folder: Path, *runs: dict[str, Any]) -> Path:
    path = folder / "runs.yaml"
    path.write_text(yaml.safe_dump({"runs": list(runs)}))
    return path


def task_of(folder: Path, raw: dict[str, Any]) -> RunTask:
    (run,) = load_runs(runs_file(folder, raw))
    return task_of_run(expand_run(run), timeout_s=10.0)


@pytest.fixture
def fake_runners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run goes to a runner that needs no GPU and does what the run's id says."""

    def fake(run: Any, **how: Any) -> RunTask:
        task = task_of_run(run, **how)
        environment = {**task.environment, "PYTHONPATH": str(Path(__file__).parent)}
        job = {"does": run.run.id.split("-")[0], "beginning_steps": task.job["beginning_steps"]}
        job["layer_segments"] = task.job["layer_segments"]
        return dataclasses.replace(task, module="fake_runner", job=job, environment=environment)

    monkeypatch.setattr("mofa.measure.runs.task_of_run", fake)
    monkeypatch.setattr("mofa.measure.runs.machine_self_test", lambda: STATE)


@pytest.mark.usefixtures("fake_runners")
def test_records_are_written_resumed_and_failures_reported(tmp_path: Path) -> None:
    path = runs_file(tmp_path, raw_run("ok-1"), raw_run("oom-1"), raw_run("crash-1"))
    said: list[str] = []
    out = tmp_path / "measured"
    first = measure_runs(path, out, parallel=True, logs=tmp_path / "logs", progress=said.append)
    assert sorted(p.name for p in first.written) == ["ok-1.yaml", "oom-1.yaml"]
    assert first.failed == {"crash-1": "RuntimeError: broken on purpose"}
    assert "broken on purpose" in (tmp_path / "logs" / "crash-1.rank0.log").read_text()
    assert read_record(out / "oom-1.yaml").measured.outcome == "oom"
    before = {r.run.id: r for r in read_records(out)}
    again = measure_runs(path, out, progress=said.append)
    assert set(again.skipped) == {"ok-1", "oom-1"}
    assert {r.run.id: r for r in read_records(out)} == before


@pytest.mark.usefixtures("fake_runners")
def test_what_the_host_bounds_is_measured_three_times(tmp_path: Path) -> None:
    path, out = runs_file(tmp_path, raw_run("idle-1"), raw_run("ok-1", gpus=2)), tmp_path / "measured"
    first = measure_runs(path, out, progress=lambda _: None)
    assert sorted(p.stem for p in first.written) == ["idle-1", "idle-1-again", "idle-1-third", "ok-1"]
    records = {r.run.id: r for r in read_records(out)}
    assert records["idle-1"].measured.is_host_bound
    assert not records["ok-1"].measured.is_host_bound
    # the slowest rank's host sets the pace
    assert [records[id].environment.host_issue_s for id in ("idle-1", "ok-1")] == [5e-6, 5.333e-6]
    assert records["ok-1"].environment.host_issues_s == [9e-6, 6e-6, 1e-6]
    assert [rank.layer_issues_s for rank in records["ok-1"].measured.ranks] == [[1e-3, 2e-3], [1e-3, 3e-3]]
    assert [rank.layer_backs_s for rank in records["ok-1"].measured.ranks] == [[3e-3, 4e-3]] * 2
    assert {records[id].split for id in records if id != "ok-1"} == {records["idle-1"].split}
    (out / "idle-1-third.yaml").unlink()  # as if interrupted there
    again = measure_runs(path, out, progress=lambda _: None)
    assert [p.stem for p in again.written] == ["idle-1-third"]
    assert measure_runs(path, out, progress=lambda _: None).written == ()


@pytest.mark.usefixtures("fake_runners")
def test_microbenchmarks_are_measured_once(tmp_path: Path) -> None:
    path, out = runs_file(tmp_path, raw_run("idle-1")), tmp_path / "measured"
    first = measure_runs(path, out, once=True, progress=lambda _: None)
    assert [p.stem for p in first.written] == ["idle-1"]
    assert measure_runs(path, out, once=True, progress=lambda _: None).written == ()


@pytest.mark.usefixtures("fake_runners")
def test_the_history_of_the_beginning_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    path, out = runs_file(tmp_path, raw_run("ok-1", gpus=2)), tmp_path / "measured"
    measure_runs(path, out, progress=lambda _: None)
    assert not (tmp_path / "beginnings").exists()
    three = KeptBesideRecords(beginning_steps=3)
    measure_runs(runs_file(tmp_path, raw_run("ok-2", gpus=2)), out, beside_records=three, progress=lambda _: None)
    files = sorted((tmp_path / "beginnings").iterdir())
    assert [p.name for p in files] == ["ok-2.0.json.gz", "ok-2.1.json.gz"]
    assert files[0].read_text() == "3 steps"


@pytest.mark.usefixtures("fake_runners")
def test_times_of_parts_of_layers_are_kept_where_they_are_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "measured"
    path = runs_file(tmp_path, raw_run("ok-1", framework={"name": "megatron"}))
    measure_runs(path, out, beside_records=KeptBesideRecords(layer_segments=True), progress=lambda _: None)
    assert [p.name for p in (tmp_path / "segments").iterdir()] == ["ok-1.0.csv"]


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (raw_run("ok-1", framework={"name": "megatron-local"}), "of megatron and torchtitan, not of megatron-local"),
        (raw_run("ok-1", framework={"name": "megatron", "cuda_graphs": "local"}), "CUDA graphs"),
        (raw_run("ok-1", framework={"name": "torchtitan", "compile": True}), "without compilation"),
    ],
)
def test_parts_of_layers_are_refused_where_they_cannot_be_timed(
    tmp_path: Path, raw: dict[str, object], line: str
) -> None:
    with pytest.raises(SpecError, match=line):
        measure_runs(
            runs_file(tmp_path, raw), tmp_path / "measured", beside_records=KeptBesideRecords(layer_segments=True)
        )


@pytest.mark.usefixtures("fake_runners")
def test_a_run_that_was_repeated_by_hand_is_not_repeated_again(tmp_path: Path) -> None:
    runs = [raw_run("idle-1"), raw_run("idle-1-traced"), raw_run("idle-2-again")]
    out = tmp_path / "measured"
    measure_runs(runs_file(tmp_path, *runs), out, progress=lambda _: None)
    assert sorted(p.stem for p in out.glob("*.yaml")) == ["idle-1", "idle-1-traced", "idle-2-again"]


@pytest.mark.usefixtures("fake_runners")
def test_a_record_spells_the_run_out(tmp_path: Path) -> None:
    measure_runs(runs_file(tmp_path, raw_run("ok-1")), tmp_path / "measured", progress=lambda _: None)
    record = read_record(tmp_path / "measured" / "ok-1.yaml")
    assert isinstance(record.run.model, dict)
    assert record.run.model["hidden"] == 4096
    assert record.run.strategy["schedule"] == "1f1b"
    assert record.run.framework["data_parallel"] == "fsdp"
    assert expand_run(record.run).run_with_full_specs() == record.run


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (raw_run(framework={"name": "megatron-2022"}), "cannot be measured"),
        (raw_run(framework={"name": "megatron", "activation_offload": "mlp_norm"}), "mlp_norm"),
        (raw_run(precision={"gemm": "fp8"}), r"cannot run precision.gemm \(fp8\); use bf16 or fp8-tensorwise"),
        (raw_run(strategy={"recompute": "selective"}), "cannot run recompute: selective"),
        (raw_run(strategy={"recompute": "none", "cp": 2}, gpus=2, framework={"name": "megatron-local"}), "cp without"),
        (raw_run(framework={"name": "megatron-local", "experts": "grouped"}, model="mixtral-8x7b"), "grouped experts"),
        (
            raw_run(model="deepseek-v2-lite", framework={"name": "megatron-local", "attention": "unfused"}),
            "cannot run MLA with attention: unfused",
        ),
        (raw_run(model="deepseek-v3", framework={"name": "megatron-local"}), "multi-token prediction"),
        (raw_run(strategy={"recompute": "none", "pp": 2, "layout": "Et*20|t*12L"}, gpus=2), "cannot run layout here"),
        (
            raw_run(
                strategy={"recompute": "none", "pp": 2, "layout": "Et*20|t*12L"},
                gpus=2,
                framework={"name": "megatron-local"},
            ),
            "cannot run layout here",
        ),
        (raw_run(model="gpt-oss-120b"), "biases, sinks or a window"),
        (raw_run(model="gpt-oss-120b", framework={"name": "megatron-local"}), "sinks or a window"),
        (
            raw_run(
                model={
                    "base": "llama3-8b",
                    "attention": {"kind": "gqa", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "out_bias": True},
                },
                framework={"name": "megatron-local"},
            ),
            "biases in some linear layers",
        ),
        (
            raw_run(
                model={
                    "base": "llama3-8b",
                    "attention": {
                        "kind": "gqa",
                        "num_heads": 32,
                        "num_kv_heads": 8,
                        "head_dim": 128,
                        "qkv_bias": True,
                        "out_bias": True,
                    },
                    "mlp": {"ffn_hidden": 14336, "bias": True},
                },
                framework={"name": "megatron-local"},
                strategy={"recompute": "selective:mlp"},
            ),
            "MLPs with biases never ends",
        ),
        (
            raw_run(
                model="mixtral-8x7b",
                gpus=4,
                framework={"name": "megatron-local"},
                strategy={"tp": 4, "ep": 1, "etp": 2},
            ),
            "etp",
        ),
        (raw_run(gpus=2, framework={"name": "torchtitan", "data_parallel": "hsdp"}), "dp_replicate"),
    ],
)
def test_a_run_it_cannot_express_is_one_line(tmp_path: Path, raw: dict[str, Any], line: str) -> None:
    with pytest.raises(SpecError, match=line) as caught:
        task_of(tmp_path, raw)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(("a: ", "run a: "))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"torch": None, "gpus": []}, "PyTorch is not installed"),
        ({"gpus": []}, "no GPU is visible"),
        ({"gpus": [{**GPU, "ok": False, "error": 0.5}]}, "GPU 0 multiplies wrongly"),
        ({"gpus": [{**GPU, "free_bytes": 10}]}, "in use"),
        ({"torchtitan": None}, "torchtitan is not installed; pip install torchtitan==0.2.2"),
        ({"gpus": [GPU]}, "more than this machine has"),
        ({"gpus": [GPU, {**GPU, "total_bytes": 80 * 2**30, "free_bytes": 80 * 2**30}]}, "name this machine's hardware"),
    ],
)
def test_a_machine_that_cannot_measure_is_one_line(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    runs = load_runs(runs_file(tmp_path, raw_run(gpus=2)))
    with pytest.raises(SpecError, match=line):
        refuse_unfit_machine({**STATE, **changes}, [expand_run(run) for run in runs])


def test_the_self_test_runs_anywhere() -> None:
    state = machine_self_test()
    assert set(state) >= {"torch", "gpus", "torchtitan", "megatron"}


@pytest.mark.parametrize("path", PLANS, ids=lambda p: p.stem)
def test_every_planned_run_can_be_told_to_its_framework(path: Path) -> None:
    for run in load_runs(path):
        task_of_run(expand_run(run), timeout_s=10.0)


def test_torchtitan_reads_the_batch_as_it_does(tmp_path: Path) -> None:
    one = task_of(tmp_path, raw_run()).job["torchtitan"]["job"]["training"]
    assert (one["local_batch_size"], one["global_batch_size"], one["dtype"]) == (1, 4, "float32")
    pipeline = task_of(tmp_path, raw_run(gpus=2, strategy={"pp": 2, "recompute": "none"})).job["torchtitan"]["job"]
    assert (pipeline["training"]["local_batch_size"], pipeline["training"]["dtype"]) == (4, "bfloat16")


def test_megatron_shards_experts_over_tensor_ranks(tmp_path: Path) -> None:
    raw = raw_run(model={"base": "mixtral-8x7b", "num_layers": 2}, gpus=4, strategy={"tp": 2, "ep": 2, "etp": 2})
    job = task_of(tmp_path, {**raw, "framework": {"name": "megatron-local"}}).job["megatron"]
    assert job["parallel"]["expert_tensor_parallel_size"] == 2
    assert job["parallel"]["expert_model_parallel_size"] == 2


def test_no_other_attention_is_run_than_is_recorded(tmp_path: Path) -> None:
    """Transformer Engine would fall back to one that is not fused where cuDNN does not load."""
    assert task_of(tmp_path, raw_run(framework={"name": "megatron"})).environment["NVTE_UNFUSED_ATTN"] == "0"
    assert "NVTE_UNFUSED_ATTN" not in task_of(tmp_path, raw_run(framework={"name": "megatron-local"})).environment


def test_megatron_has_latent_attention(tmp_path: Path) -> None:
    raw = raw_run(framework={"name": "megatron-local"}, strategy={"recompute": "selective:mla_up_proj+core_attn"})
    job = task_of(tmp_path, raw | {"model": {"base": "deepseek-v2-lite", "num_layers": 2}}).job["megatron"]["config"]
    assert (job["multi_latent_attention"], job["qk_layernorm"], job["rope_type"]) == (True, True, "yarn")
    assert (job["q_lora_rank"], job["kv_lora_rank"], job["qk_head_dim"], job["v_head_dim"]) == (None, 512, 128, 128)
    assert job["recompute_modules"] == ["core_attn", "mla_up_proj"]


def test_megatron_has_the_biases_and_positions_of_gpt3(tmp_path: Path) -> None:
    raw = raw_run(model={"base": "gpt3-175b", "num_layers": 2}, framework={"name": "megatron-local"})
    job = task_of(tmp_path, raw).job["megatron"]
    assert (job["config"]["add_bias_linear"], job["config"]["normalization"]) == (True, "LayerNorm")
    assert (job["positions"], job["tied"], job["config"]["gated_linear_unit"]) == ("learned_absolute", True, False)


@pytest.mark.parametrize("bias", [True, False])
def test_megatron_fuses_a_gelu_with_its_bias_alone(tmp_path: Path, bias: bool) -> None:
    attention = {"kind": "gqa", "num_heads": 32, "num_kv_heads": 1, "head_dim": 128, "qkv_bias": bias, "out_bias": bias}
    mlp = {"activation": "gelu", "ffn_hidden": 16384, "bias": bias}
    raw = raw_run(framework={"name": "megatron-local"}, model={"base": "llama3-8b", "attention": attention, "mlp": mlp})
    assert task_of(tmp_path, raw).job["megatron"]["config"]["bias_activation_fusion"] is bias


def test_megatron_pads_the_vocabulary_and_keeps_the_environment(tmp_path: Path) -> None:
    raw = raw_run(gpus=2, strategy={"tp": 2}, framework={"name": "megatron-local", "allocator": "expandable"})
    task = task_of(tmp_path, raw)
    assert task.job["megatron"]["padded_vocab"] % 256 == 0
    assert task.job["megatron"]["config"]["sequence_parallel"]
    assert task.environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert task.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
