"""What a published row leaves open and its source, or a rule written before, fills; and what graphs hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from mofa.validate.architecture import Row
from mofa.validate.published import published_reference_runs
from mofa.validate.published_rows import import_published_rows
from mofa.validate.recipes import cuda_graphs_of_row, load_recipes, routing_of_row, why_recipe_of_row_is_unmodelled
from mofa.validate.row_gaps import BY_RULE, layers_by_throughput, step_s_by_throughput, with_filled_columns
from mofa.validate.row_groups import group_of_row, is_group_of_its_own, runs_to_learn_from
from tests.validate.test_published_rows import PUBLISHED, row

BLOOM = {
    "id": "bloom-015", "model": "BLOOM-dev-183B", "framework": "Megatron-DeepSpeed", "gpu": "A100 80GB", "layers": "",
    "hidden": "14400", "ffn": "57600", "heads": "", "kv_heads": "", "vocab": "250000", "attention_type": "MHA (ALiBi)",
    "seq_len": "2048", "precision": "", "tp": "8", "sp": "0", "pp": "12", "dp": "4", "n_gpus": "384", "mbs": "1",
    "gbs": "2048", "recompute": "full", "measured_tokens_per_s_per_gpu": "", "measured_step_time_s": "172.4",
    "measured_tflops_per_gpu": "90.84",
}  # fmt: skip
MLPERF = {
    "id": "mlperf-037", "model": "GPT3-175B", "framework": "NeMo (MLPerf v3.1)", "gpu": "H100 80GB", "layers": "96",
    "hidden": "12288", "ffn": "49152", "heads": "96", "kv_heads": "96", "vocab": "51200", "attention_type": "MHA",
    "seq_len": "2048", "n_gpus": "4096", "precision": "fp8", "tp": "4", "pp": "8", "dp": "128", "gbs": "2048",
}  # fmt: skip


def book(**changes: str) -> Row:
    return row(**{**BLOOM, **changes})


def test_layers_are_what_the_estimator_counted_whatever_the_step_took() -> None:
    """90.84 TFLOP/s x 172.4 s on 384 GPUs are 6.014e18; a layer of 14400 is 96 x 14400^2 x 2048 x 2048 = 8.349e16."""
    layers = 90.84e12 * 172.4 * 384 / (96 * 14400**2 * 2048 * 2048)
    assert layers == pytest.approx(72.02, abs=0.01)
    assert layers_by_throughput(book()) == 72
    slower = book(measured_step_time_s="344.8", measured_tflops_per_gpu="45.42")
    assert layers_by_throughput(slower) == 72


def test_layers_that_the_columns_do_not_say_stay_open() -> None:
    assert layers_by_throughput(book(measured_tflops_per_gpu="91.47")) is None  # 72.52
    assert layers_by_throughput(book(pp="7")) is None  # 72 over 7 stages
    assert layers_by_throughput(book(measured_tflops_per_gpu="")) is None
    assert layers_by_throughput(book(id="korth-001")) is None


def test_rows_that_name_their_layers_give_them_back() -> None:
    """bloom-002 of the lab book, which prints 80 layers, 844.81 s on 80 GPUs and 98.87 TFLOP/s."""
    named = book(n_gpus="80", pp="10", measured_step_time_s="844.81", measured_tflops_per_gpu="98.87")
    assert layers_by_throughput(named) == 80


def test_a_rule_fills_blanks_alone_and_marks_its_row() -> None:
    filled = with_filled_columns(book())
    assert (filled["layers"], filled["heads"], filled["kv_heads"]) == ("72", "96", "96")
    assert "NHEADS=96" in filled[BY_RULE]
    given = with_filled_columns(book(layers="72", heads="64", kv_heads="64"))
    assert given["heads"] == "64"
    assert BY_RULE not in given


def test_what_a_file_of_the_source_says_is_no_rule() -> None:
    read = with_filled_columns(row(**MLPERF, mbs="1"))
    assert read["vpp"] == "12"
    assert BY_RULE not in read
    assert not is_group_of_its_own(group_of_row(read))
    before = with_filled_columns(row(**{**MLPERF, "framework": "NeMo (MLPerf v3.0)"}, mbs="1"))
    assert before["vpp"] == "12"
    assert group_of_row({**before, "recompute": ""}) == "published-mlperf-by-rule-default-recompute"
    assert with_filled_columns(row(**{**MLPERF, "framework": "NeMo (MLPerf v4.1)"}, mbs="1"))["vpp"] == ""


QWEN = {
    "id": "bridge-276", "model": "Qwen3_235B_a22B (tokendrop)", "framework": "Megatron-Bridge/Megatron-Core 25.09",
    "gpu": "GB200", "n_gpus": "64", "precision": "fp8", "tp": "2", "pp": "1", "vpp": "1", "ep": "64", "mbs": "1",
    "gbs": "1024", "recompute": "", "notes": "NeMo container 25.09; first entry of cell",
}  # fmt: skip
PARENTHESES = "; parenthesised entry: alternative quantization granularity (source: 32x32 for weights and activations)"


def test_a_recipe_s_switches_are_read_for_the_degrees_that_it_has() -> None:
    first = with_filled_columns(row(**QWEN))
    assert (cuda_graphs_of_row(first), first["recompute"], first["precision"]) == ("local", "none", "fp8")
    assert BY_RULE not in first and group_of_row(first) == "published-bridge-cuda-graphs"
    second = with_filled_columns(row(**{**QWEN, "notes": "NeMo container 25.09" + PARENTHESES}))
    assert (cuda_graphs_of_row(second), second["precision"]) == ("local", "mxfp8")
    for others in ({"pp": "8", "tp": "1"}, {"framework": "Megatron-Bridge/Megatron-Core 25.11"}, {"gpu": "GB300"}):
        other = with_filled_columns(row(**{**QWEN, **others}))
        assert (cuda_graphs_of_row(other), other["recompute"]) == ("", "")


def test_what_parentheses_meant_a_release_earlier_is_a_rule() -> None:
    nemo = {
        "id": "nemodoc-020", "model": "LLAMA3-70B", "framework": "NeMo 25.07", "gpu": "GB200", "tp": "2", "pp": "4",
        "vpp": "5", "cp": "2", "recompute": "", "precision": "fp8(per-tensor current scaling)",
    }  # fmt: skip
    said = with_filled_columns(row(**nemo, notes="parenthesised alternative (legend not known)"))
    assert (said["precision"], cuda_graphs_of_row(said)) == ("mxfp8", "local")
    assert group_of_row(said) == "published-nemodoc-by-rule-mxfp8-cuda-graphs"
    assert with_filled_columns(row(**nemo, notes="primary value"))["precision"] == nemo["precision"]


def test_experts_of_nemo_s_mixtral_are_padded_to_a_capacity() -> None:
    mixtral = row(id="nemodoc-007", model="Mixtral-8x7B", framework="NeMo 25.02", gpu="B200")
    assert routing_of_row(mixtral) == {"capacity_factor": 1.0, "pad_to_capacity": True}
    assert routing_of_row(row(id="bridge-001", model="Mixtral-8x7B")) == {}


def test_a_rule_reads_no_result() -> None:
    """The same row with other results is filled the same way; only the work that a lab book counted says layers."""
    for rule in load_recipes().filled:
        assert not [name for name in (*rule.where, *rule.columns) if name.startswith("measured_")]
    for tokens in ("1", "1e9"):
        filled = with_filled_columns(row(**MLPERF, mbs="1", measured_tokens_per_s_per_gpu=tokens))
        assert filled["vpp"] == "12"


@pytest.mark.parametrize(
    ("said", "graphs"),
    [
        ("cuda_graph=transformer_engine:['attn', 'moe_router', 'moe_preprocess']; dispatcher=hybridep",
         "te:attn+moe_router+moe_preprocess"),
        ("cuda_graph=transformer_engine:mlp", "te:mlp"),
        ("cuda_graph=local:full_iteration", "local:full_iteration"),
        ("cuda_graph=full_iteration:[]; dispatcher=hybridep", "local:full_iteration"),
        ("HybridEP; full-iteration CUDA graphs; forced balance", "local:full_iteration"),
        ("HybridEP; TE CUDA graphs moe_router+preprocess", "te:moe_router+moe_preprocess"),
        ("mock data, forced routing, no CUDA graphs", ""),
        ("TP comm overlap (userbuffers)", ""),
        ("cuda_graph=transformer_engine:['mamba']", None),
        ("cuda_graph=local:full", None),
    ],
)  # fmt: skip
def test_graphs_are_read_from_a_row(said: str, graphs: str | None) -> None:
    assert cuda_graphs_of_row(row(overlap_notes=said)) == graphs
    assert cuda_graphs_of_row(row(notes=said)) == graphs


def test_a_row_with_graphs_runs_with_them_in_a_group_that_judges_alone(tmp_path: Path) -> None:
    graphs = row(overlap_notes="cuda_graph=local:full_iteration", tp="1", dp="16")
    runs, unusable = import_published_rows([graphs], tmp_path)
    assert unusable == []
    assert runs[0]["run"]["framework"]["cuda_graphs"] == "local:full_iteration"
    assert runs[0]["group"] == "published-bridge-cuda-graphs"


def test_nothing_is_learned_from_groups_of_their_own() -> None:
    """A family is in one half whatever its rows switch on; residuals leave the groups of their own out."""
    runs, left_out = published_reference_runs(PUBLISHED)
    learned = runs_to_learn_from(runs)
    assert {run.split for run in learned} == {"fitting"}
    assert not [run.id for run in learned if is_group_of_its_own(run.group)]
    own = [run for run in runs if is_group_of_its_own(run.group)]
    assert own
    assert all(any("filled by a rule" in note for note in run.notes) for run in own if "-by-rule" in run.group)
    assert len(runs) + len(left_out) == 730


def test_too_close_to_out_of_memory_ran(tmp_path: Path) -> None:
    runs, _ = import_published_rows([row(notes="source note: too close to OOM")], tmp_path)
    assert "step_s" in runs[0]["measured"]


def test_flops_are_a_step_time_where_the_sources_rows_say_how_they_count(tmp_path: Path) -> None:
    """nemo-012, Llama 3 70B, prints 1,524 tokens/s and 734 TFLOP/s: both give 10.75 s."""
    both = row(
        id="nemo-012", model="LLAMA3-70B", layers="80", hidden="8192", ffn="28672", heads="64", kv_heads="8",
        vocab="128256", n_gpus="64", gbs="128", seq_len="8192", measured_tflops_per_gpu="734",
    )  # fmt: skip
    assert step_s_by_throughput(both) == pytest.approx(128 * 8192 / (64 * 1524), rel=1e-3)
    assert step_s_by_throughput({**both, "id": "bridge-001"}) is None
    assert step_s_by_throughput({**both, "moe_experts": "8"}) is None
    assert step_s_by_throughput({**both, "measured_tflops_per_gpu": ""}) is None
    long = row(
        id="nemo-026", model="LLAMA2-7B", ffn="11008", kv_heads="32", vocab="32000", seq_len="524288", n_gpus="512",
        tp="8", cp="16", dp="4", mbs="", gbs="8", recompute="", measured_tokens_per_s_per_gpu="",
        measured_tflops_per_gpu="549", notes='"batch size" column taken as GBS', precision="fp8",
    )  # fmt: skip
    runs, unusable = import_published_rows([long], tmp_path)
    assert unusable == []
    assert runs[0]["run"]["batch"]["micro"] == 1
    assert runs[0]["group"] == "published-nemo-by-rule-default-recompute"
    assert runs[0]["measured"]["step_s"] == pytest.approx(12.9, abs=0.05)


def test_a_recipe_that_is_not_modelled_is_a_reason() -> None:
    """Its card says nothing of graphs; the recipe that it names captures a full iteration with experts."""
    card = row(id="bridgecard-035", model="qwen3-30b-a3b [weak scaling]", gpu="GB300", precision="mxfp8")
    assert why_recipe_of_row_is_unmodelled(card) is not None
    assert why_recipe_of_row_is_unmodelled({**card, "precision": "bf16"}) is None
