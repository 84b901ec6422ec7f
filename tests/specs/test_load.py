"""Files of users: what is right is read, what is wrong is one line that says where, what and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mofa.errors import SpecError, StrategyError
from mofa.specs.load import (
    bundled_names,
    complete_strategy,
    data_dir,
    load_cluster,
    load_framework,
    load_workload,
    load_yaml,
    parse_set_options,
    parse_strategy,
)
from mofa.specs.overrides import with_overrides
from mofa.specs.run_files import load_runs, resolve_run
from tests.specs.test_huggingface import LLAMA

LLAMA_YAML = (data_dir("workloads") / "llama3-8b.yaml").read_text()
RUN = """\
id: r1
model: {base: llama3-8b, num_layers: 4}
framework: megatron
hardware: h100-hgx
gpus: 16
strategy: {tp: 2, pp: 2}
batch: {seq_len: 4096, micro: 2, global: 64}
"""


def _file(folder: Path, text: str | bytes, name: str = "x.yaml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def _refused(call: Callable[[], object]) -> str:
    with pytest.raises(SpecError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 700
    assert ";" in text, "says what to do"
    return text


@pytest.mark.parametrize("name", bundled_names("workloads"))
def test_every_bundled_workload_loads(name: str) -> None:
    workload = load_workload(name)
    assert workload.name == workload.model.name == name


def test_the_workloads_of_the_issue_are_bundled() -> None:
    assert set(bundled_names("workloads")) == {
        "gpt3-175b", "llama3-8b", "llama3-70b", "llama3-405b", "mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b",
        "qwen3-235b-a22b", "deepseek-v2-lite", "deepseek-v3", "kimi-k2", "gpt-oss-120b", "memfine-model-1",
        "memfine-model-2",
    }  # fmt: skip


def test_batches_are_the_published_ones() -> None:
    """Tokens per step: GPT-3 3.2M (Table 2.1), Llama 3.1 405B 16M (Table 4), Kimi K2 67M (section 2.5)."""
    for name, tokens in (("gpt3-175b", 3.2e6), ("llama3-405b", 16.8e6), ("kimi-k2", 67e6), ("deepseek-v3", 62.9e6)):
        batch = load_workload(name).batch
        assert batch.seq_len * batch.global_batch == pytest.approx(tokens, rel=0.02)


def test_options_and_overrides_replace_the_files() -> None:
    workload = load_workload("llama3-8b", seq_len=4096, tokens="1T", overrides={"model.num_layers": 2})
    assert (workload.batch.seq_len, workload.tokens, workload.model.num_layers) == (4096, 1e12, 2)
    assert load_workload("llama3-8b", overrides={"precision.gemm": "fp8"}).precision.gemm == "fp8"


def test_hugging_face_file_or_folder(tmp_path: Path) -> None:
    path = _file(tmp_path, json.dumps(LLAMA), "config.json")
    by_file, by_folder = (load_workload(p, seq_len=8192, global_batch=16, tokens="1T") for p in (path, tmp_path))
    assert by_file.model == by_folder.model
    assert (by_file.name, by_file.batch.global_batch) == (tmp_path.name, 16)
    assert "--seq-len and --global-batch" in _refused(lambda: load_workload(path))
    assert "give --global-batch" in _refused(lambda: load_workload(path, seq_len=1))
    assert "no such file" in _refused(lambda: load_workload(tmp_path / "nowhere" / "config.json", seq_len=1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "written twice"),
        ('{"a": NaN}', "no finite number"),
        ("[1]", "holds a list"),
        ("{", "line 1"),
        ("", "empty"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "absurd number"),
    ],
)
def test_broken_json(tmp_path: Path, text: str, message: str) -> None:
    path = _file(tmp_path, text, "config.json")
    assert message in _refused(lambda: load_workload(path, seq_len=1, global_batch=1))


BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("\n  \n", "the file is empty"),
        ("# only this\n", "nothing but comments"),
        ("- a\n", "holds a list"),
        ("just text", "holds a text"),
        ("a: [1\n", "line 2"),
        ("a: 1\nb: 2\na: 3\n", "line 3: key 'a' is written twice"),
        ("a: {b: 1, b: 2}\n", "key 'b' is written twice"),
        (b"a: \xff\xfe\n", "byte 3 is not UTF-8"),
        ("a: \x00\n", "cannot read"),
        ("#" * (2**20 + 1), "larger than 1 MiB"),
        ("a: " + "[" * 40 + "]" * 40, "nested more than 32 levels"),
        ("[" * 10_000, "nest"),  # PyYAML 6.0.4 has a limit of its own, which comes first there
        (BOMB, "aliases expand"),
        ("a: &a [*a]\n", "refers to itself"),
        ("a: *nowhere\n", "undefined alias"),
        ("a: !!python/object/apply:os.system [x]\n", "a tag (!) that is not read here"),
        ("a: 1\n---\nb: 1\n", "a second document begins"),
        ("? [1, 2]\n: 3\n", "a key is no text"),
        ("a: " + "9" * 5000, "cannot read"),
        ("a: 2026-99-99", "cannot read"),
    ],
)
def test_broken_yaml(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = _file(tmp_path, text)
    assert message in _refused(lambda: load_yaml(path, "x.yaml"))


def test_honest_aliases_are_copied() -> None:
    raw = load_yaml_text("a: &a {b: 1}\nc: *a\n")
    raw["a"]["b"] = 2
    assert raw["c"] == {"b": 1}


def load_yaml_text(text: str) -> dict[str, Any]:
    from mofa.specs.files import parse_yaml

    value = parse_yaml(text, "x")
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_layers:", "num_layrs:", "x.yaml: model.num_layrs is no field here; did you mean num_layers?"),
        ("num_heads: 32", "num_heads: 6", "model.attention.num_heads (6) must be a multiple of num_kv_heads (8)"),
        ("num_heads:", "num_headz:", "model.attention.num_headz is no field here; did you mean num_heads?"),
        ("  seq_len: 8192", "  num_layers: 8", "batch.num_layers is no field here; did you mean model.num_layers?"),
        (
            "    kind: gqa",
            "    kv_lora_rank: 8\n    kind: gqa",
            "model.attention.kv_lora_rank is no field here; use one of",
        ),
        ("kind: gqa", "kind: gpa", "model.attention.kind (gpa) must be one of gqa, mla"),
        ("    kind: gqa\n", "", "model.attention.kind must be one of gqa, mla"),
        ("num_layers: 32", "num_layers: '32'", "model.num_layers ('32') must be a whole number"),
        ("num_layers: 32", "num_layers: .nan", "model.num_layers (nan) must be a whole number"),
        ("num_layers: 32", "num_layers: -1", "model.num_layers (-1) must be greater than or equal to 1"),
        ("num_layers: 32", "num_layers: 999999999", "model.num_layers (999999999) must be less than or equal to 1024"),
        ("num_layers: 32", "num_layers: true", "model.num_layers (True) must be a whole number"),
        ("num_layers: 32", "num_layers:", "model.num_layers is empty"),
        ("tokens: 15T", "tokens: T", "tokens: 'T' is no quantity"),
        ("tokens: 15T", "tokens: 15 GB", "tokens: 'GB' is no unit"),
        ("tokens: 15T", "tokens: -15T", "tokens ('-15T') must be greater than or equal to 1"),
        ("name: llama3-8b", "name: 8", "name (8) must be text"),
        ("  seq_len: 8192\n", "", "batch.seq_len is missing"),
        ("    ffn_hidden: 14336\n", "    {}\n", "model.mlp.ffn_hidden is missing, and the model has no moe"),
        ("tokens: 15T", "framework: megatronn", "framework (megatronn) is unknown; did you mean megatron?"),
        ("tokens: 15T", "precision: {gemm: fp9}", "precision.gemm ('fp9') must be bf16, fp8-delayed, fp8-t"),
        ("tokens: 15T", "precision: 8", "precision (8) must be a mapping"),
        ("tokens: 15T", "routing: {kind: zipf}", "routing.kind: zipf needs s"),
        ("tokens: 15T", "routing: {kind: zipf, s: .inf}", "routing.s (inf) must be a finite number"),
    ],
)
def test_broken_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, message: str) -> None:
    assert old in LLAMA_YAML
    _file(tmp_path, LLAMA_YAML.replace(old, new, 1))
    monkeypatch.chdir(tmp_path)
    assert message in _refused(lambda: load_workload("x.yaml"))


def test_a_name_that_no_file_may_have_is_refused_with_the_system_s_reason() -> None:
    assert "cannot be read (File name too long)" in _refused(lambda: load_workload("x" * 10_000))


@pytest.mark.parametrize("ref", ["llama3-9b", "", "\0", "a\nb", "./nowhere.yaml", "../x"])
def test_unknown_workloads(ref: str) -> None:
    assert "no " in _refused(lambda: load_workload(ref))


def test_a_close_name_is_suggested() -> None:
    assert "did you mean deepseek-v3?" in _refused(lambda: load_workload("deepsek-v3"))


def test_override_merges_and_marks_facts_as_assumed() -> None:
    fact = {"value": "80 GiB", "provenance": "datasheet", "source": "page"}
    assert with_overrides({"m": fact}, {"m": "96 GiB"}, "x")["m"] == {
        "value": "96 GiB",
        "provenance": "assumed",
        "source": "set by the user",
    }
    assert with_overrides({"a": {"kind": "p", "b": 1}}, {"a": {"kind": "q"}}, "x") == {"a": {"kind": "q"}}
    assert "single value" in _refused(lambda: with_overrides({"a": 1}, {"a.b": 2}, "x"))
    assert "no dotted path" in _refused(lambda: with_overrides({"a": 1}, {"a..b": 2}, "x"))


def test_cluster_memory_set_by_the_user() -> None:
    before = load_cluster("h100-hgx", 16)
    after = load_cluster("h100-hgx", 16, {"gpu.memory_bytes": "96 GiB"})
    assert after.gpu.memory_bytes.value == 96 * 2**30
    assert (after.gpu.memory_bytes.provenance, after.gpu.memory_bytes.source) == ("assumed", "set by the user")
    share = before.gpu.capacity_bytes.value / before.gpu.memory_bytes.value
    assert after.gpu.capacity_bytes.value == pytest.approx(share * 96 * 2**30)
    assert after.gpu.capacity_bytes.provenance == "assumed"


def test_a_capacity_by_its_earlier_name(tmp_path: Path) -> None:
    """Files and options of users that call the GPU's fact ``usable_memory_bytes`` mean the same."""
    given: dict[str, object] = {"gpu.capacity_bytes": "70 GiB", "gpu.memory_bytes": "96 GiB"}
    earlier: dict[str, object] = {"gpu.usable_memory_bytes": "70 GiB", "gpu.memory_bytes": "96 GiB"}
    assert load_cluster("h100-hgx", 8, earlier) == load_cluster("h100-hgx", 8, given)
    profiles = data_dir("hardware_profiles")
    (tmp_path / "nodes").mkdir()
    (tmp_path / "gpus").mkdir()
    node = _file(tmp_path / "nodes", (profiles / "nodes" / "h20-hgx.yaml").read_text(), "h20-hgx.yaml")
    text = (profiles / "gpus" / "h20.yaml").read_text()
    _file(tmp_path / "gpus", text.replace("\ncapacity_bytes:", "\nusable_memory_bytes:"), "h20.yaml")
    assert load_cluster(node, 8) == load_cluster("h20-hgx", 8)
    assert load_cluster(node, 8, given) == load_cluster("h20-hgx", 8, given)
    _file(tmp_path / "gpus", f"{text}\nusable_memory_bytes: 70 GiB\n", "h20.yaml")
    assert "usable_memory_bytes" in _refused(lambda: load_cluster(node, 8))


def test_cluster_errors() -> None:
    assert "not whole nodes; use 8 or 16" in _refused(lambda: load_cluster("h100-hgx", 12))
    assert "did you mean h100-hgx?" in _refused(lambda: load_cluster("h100-hgk", 8))
    assert "num_gpus (0)" in _refused(lambda: load_cluster("h100-hgx", 0))
    assert "has no unit" in _refused(lambda: load_cluster("h100-hgx", 8, {"gpu.memory_bytes": 96}))
    said = _refused(lambda: load_cluster("h100-hgx", 8, {"gpu.capacity_bytes": "160 GiB"}))
    assert "gpu.capacity_bytes (160.00 GiB) must be at most memory_bytes (80.00 GiB); correct one" in said
    smaller = load_cluster("h100-hgx", 8, {"gpu.memory_bytes": "40 GiB"}).gpu  # scales the capacity, no contradiction
    assert 0.98 < smaller.capacity_bytes.value / smaller.memory_bytes.value < 1.0
    assert "did you mean memory_bytes?" in _refused(lambda: load_cluster("h100-hgx", 8, {"gpu.memory_byte": "9 GiB"}))
    said = _refused(lambda: load_cluster("h100-hgx", 8, {"intra.bandwidth_bytes_per_s": "400 GB/s"}))
    assert said.endswith("intra is no field here; did you mean node.intra?")
    said = _refused(lambda: load_cluster("h100-hgx", 8, {"efficiency": 0.5}))  # of both links
    assert said.endswith("efficiency is no field here; use one of name, gpu, node, num_gpus")


def test_a_users_node_finds_its_gpu_beside_it_or_bundled(tmp_path: Path) -> None:
    profiles = data_dir("hardware_profiles")
    (tmp_path / "nodes").mkdir()
    (tmp_path / "gpus").mkdir()
    node = (profiles / "nodes" / "h100-hgx.yaml").read_text()
    path = _file(tmp_path / "nodes", node)
    assert load_cluster(path, 8).gpu == load_cluster("h100-hgx", 8).gpu
    gpu_name = load_cluster("h100-hgx", 8).node.gpu
    other = (profiles / "gpus" / "h20.yaml").read_text()
    _file(tmp_path / "gpus", other, f"{gpu_name}.yaml")
    assert load_cluster(path, 8).gpu == load_cluster("h20-hgx", 8).gpu
    bad = _file(tmp_path / "nodes", node.replace(f"gpu: {gpu_name}", "gpu: h1000"), "bad.yaml")
    assert "gpu (h1000) is unknown" in _refused(lambda: load_cluster(bad, 8))
    said = _refused(lambda: load_cluster("h100-hgx", 8, {"node.gpu": "h20"}))
    assert "node.gpu (h20) cannot be set" in said


def test_frameworks() -> None:
    assert load_framework("torchtitan", {"compile": True}).compile is True
    assert load_framework({"name": "megatron", "allocator": "expandable"}).allocator == "expandable"
    assert "did you mean compile?" in _refused(lambda: load_framework({"name": "megatron", "compil": True}))
    assert "did you mean megatron?" in _refused(lambda: load_framework("megatorn"))
    assert "name is missing" in _refused(lambda: load_framework({"version": "1"}))


def test_strategy_text() -> None:
    assert parse_strategy("tp=4 pp=4 vpp=5 micro_batch=1 recompute=selective") == {
        "tp": 4,
        "pp": 4,
        "vpp": 5,
        "micro_batch": 1,
        "recompute": "selective",
    }
    assert parse_strategy("sp=off, cp_kind=allgather,ep=8") == {"sp": False, "cp_kind": "allgather", "ep": 8}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no field=value"),
        ("tp", "no field=value"),
        ("tp=", "no field=value"),
        ("ppp=2", "did you mean pp?"),
        ("microbatch=2", "did you mean micro_batch?"),
        ("tp=2 tp=4", "given twice"),
        ("tp=x", "tp ('x') must be a whole number"),
        ("tp=2.5", "must be a whole number"),
        ("tp=0", "greater than or equal to 1"),
        ("zero=4", "less than or equal to 3"),
        ("sp=maybe", "sp ('maybe') must be true or false"),
        ("recompute=half", "must be none | selective"),
        ("recompute=selective:foo", "'foo' is unknown"),
        ("recompute=full:0", "at least 1"),
        ("schedule=zero-bubble", "must be 1f1b"),
        ("framework=megatron", "no field of a strategy"),
    ],
)
def test_broken_strategy_text(text: str, message: str) -> None:
    assert message in _refused(lambda: parse_strategy(text))


def test_set_items() -> None:
    got = parse_set_options(
        ["workload.model.num_layers=4", 'hardware.gpu.memory_bytes="96 GiB"', "framework.compile=true", "strategy.tp=4"]
    )
    assert got == {
        "workload": {"model.num_layers": 4},
        "hardware": {"gpu.memory_bytes": "96 GiB"},
        "framework": {"compile": True},
        "strategy": {"tp": 4},
    }


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("workload.model.num_layers", "no assignment"),
        ("workload=4", "no assignment"),
        ("workload.x=", "no assignment"),
        ("wrkload.x=1", "did you mean workload?"),
        ("workload.x=[1, 2]", "no single value"),
        ("workload.x='", "valid YAML"),
        ("workload.x=" + "a" * 2000, "longer than 1000"),
        ("strategy.tpp=4", "did you mean tp?"),
        ("strategy.tp=four", "whole number"),
    ],
)
def test_broken_set_items(item: str, message: str) -> None:
    assert message in _refused(lambda: parse_set_options([item]))


def test_a_path_is_set_once() -> None:
    assert "set twice" in _refused(lambda: parse_set_options(["workload.a=1", "workload.a=2"]))


def test_strategy_defaults_are_the_frameworks() -> None:
    megatron, torchtitan = load_framework("megatron"), load_framework("torchtitan")
    strategy = complete_strategy({"tp": 4, "pp": 2, "vpp": 2}, 64, megatron, moe=True)
    assert (strategy.dp, strategy.sp, strategy.etp, strategy.zero, strategy.schedule) == (8, True, 4, 1, "interleaved")
    assert complete_strategy({"tp": 4}, 64, megatron).etp == 1
    assert complete_strategy({}, 8, torchtitan).zero == 3
    assert complete_strategy({"pp": 2}, 8, torchtitan).zero == 2
    assert complete_strategy({"tp": 2, "sp": False}, 8, megatron).sp is False


def test_degrees_must_divide_the_gpus() -> None:
    megatron = load_framework("megatron")
    with pytest.raises(StrategyError, match=r"gpus \(8\) must be a multiple of tp \(3\)"):
        complete_strategy({"tp": 3}, 8, megatron)
    with pytest.raises(StrategyError, match=r"dp \(3\) must be gpus \(8\)"):
        complete_strategy({"tp": 2, "dp": 3}, 8, megatron)


def test_a_routing_file_that_is_set_is_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bundled workload's routing the folder is the package's, where no file of the user's is."""
    (tmp_path / "counts.csv").write_text("iteration,layer,expert,tokens\n0,0,0,1\n")
    monkeypatch.chdir(tmp_path)
    asked = {"routing.kind": "counts", "routing.file": "counts.csv"}
    file = load_workload("mixtral-8x7b", overrides=asked).routing.file
    assert file is not None and Path(file).samefile(tmp_path / "counts.csv")


def test_a_record_is_read_as_its_run(tmp_path: Path) -> None:
    """What mofa measure writes: the run, and what came of it."""
    record = (
        "run:\n" + "".join(f"  {line}\n" for line in RUN.splitlines()) + "measured: {outcome: ok}\nsplit: judging\n"
    )
    assert load_runs(_file(tmp_path, record, "r.yaml")) == load_runs(_file(tmp_path, RUN))
    broken = _file(tmp_path, record.replace("seq_len: 4096", "seq_len: x"), "b.yaml")
    assert "run.batch.seq_len ('x') must be a whole number" in _refused(lambda: load_runs(broken))


def test_every_reference_run_is_read_as_its_run() -> None:
    """Measured records, the plans that they come from, and published runs with their source beside them."""
    folder = Path(__file__).parents[2] / "reference_runs"
    files = [path for name in ("measured", "plans", "published") for path in sorted((folder / name).glob("*.yaml"))]
    assert len(files) > 200
    assert all(run.id for path in files for run in load_runs(path))
    assert load_runs(folder / "published" / "korth.yaml")[0].framework["name"] == "megatron-2022"


def test_a_run_resolves(tmp_path: Path) -> None:
    (run,) = load_runs(_file(tmp_path, RUN))
    workload, cluster, framework, strategy = resolve_run(run, tmp_path)
    assert (workload.model.num_layers, workload.model.hidden, workload.batch.global_batch) == (4, 4096, 64)
    assert (cluster.num_gpus, framework.name) == (16, "megatron")
    assert (strategy.tp, strategy.pp, strategy.dp, strategy.micro_batch) == (2, 2, 4, 2)


def test_runs_are_a_list_of_runs(tmp_path: Path) -> None:
    item = "- " + RUN.replace("\n", "\n  ").rstrip() + "\n"
    runs = load_runs(_file(tmp_path, "runs:\n" + item + item.replace("id: r1", "id: r2")))
    assert [run.id for run in runs] == ["r1", "r2"]
    twice = _file(tmp_path, "runs:\n" + item + item)
    assert "runs[1].id (r1) is also runs[0]'s" in _refused(lambda: load_runs(twice))
    broken = _file(tmp_path, "runs:\n" + item.replace("seq_len: 4096", "seq_len: x"))
    assert "runs[0].batch.seq_len ('x') must be a whole number" in _refused(lambda: load_runs(broken))


def test_a_model_of_a_run_by_name_dotted_whole_or_file(tmp_path: Path) -> None:
    base = "model: {base: llama3-8b, num_layers: 4}"

    def model(text: str) -> Any:
        return resolve_run(load_runs(_file(tmp_path, RUN.replace(base, text)))[0], tmp_path)[0].model

    assert model("model: llama3-8b") == load_workload("llama3-8b").model
    assert model("model: {base: mixtral-8x7b, moe.num_experts: 4}").moe.num_experts == 4
    assert model("model: {base: mixtral-8x7b, moe: {num_experts: 4}}").moe.top_k == 2
    whole = load_workload("llama3-8b").model
    assert model("model: " + whole.model_dump_json()) == whole
    _file(tmp_path, json.dumps(LLAMA), "config.json")
    assert model("model: ./config.json").num_layers == 32


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("id: r1", "id: a/b", "id ('a/b') must match"),
        ("num_layers: 4", "num_layrs: 4", "model.num_layrs is no field here; did you mean num_layers?"),
        ("{base: llama3-8b, num_layers: 4}", "7", "model (7) must be text"),
        ("base: llama3-8b", "base: llama9", "no bundled workload"),
        ("micro: 2", "micr: 2", "batch.micr is no field here; did you mean micro?"),
        ("gpus: 16", "gpus: many", "gpus ('many') must be a whole number"),
        ("gpus: 16", "gpus: 12", "not whole nodes"),
        ("framework: megatron", "framework: {nme: megatron}", "framework: name is missing"),
        ("tp: 2", "tpp: 2", "strategy: tpp is no field of a strategy; did you mean tp?"),
        ("tp: 2", "micro_batch: 4", "micro_batch (4) differs from batch.micro (2)"),
        ("global: 64", "global: 60", "batch.global (60) must be a multiple of dp (4) x micro_batch (2) = 8"),
    ],
)
def test_broken_runs(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = _file(tmp_path, RUN.replace(old, new))
    assert message in _refused(lambda: [resolve_run(run, tmp_path) for run in load_runs(path)])
