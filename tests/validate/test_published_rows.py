"""Which published rows are usable, by their columns alone, and what becomes of a usable one."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.run import RunSpec
from mofa.specs.run_files import resolve_run
from mofa.units import GIB
from mofa.validate.published import PublishedRun, published_reference_runs
from mofa.validate.published_rows import OWN_NODES, import_published_rows, why_row_is_unusable, write_published_runs

PUBLISHED = Path(__file__).parents[2] / "reference_runs" / "published"
COLUMNS = (
    "id", "source_url_or_repo_path", "date", "model", "params_b", "layers", "hidden", "ffn", "heads", "kv_heads",
    "head_dim", "vocab", "moe_experts", "moe_topk", "moe_ffn", "shared_experts", "attention_type", "seq_len", "gpu",
    "n_gpus", "precision", "framework", "tp", "sp", "pp", "vpp", "cp", "ep", "etp", "dp", "zero_stage", "mbs", "gbs",
    "recompute", "overlap_notes", "measured_step_time_s", "measured_tokens_per_s_per_gpu", "measured_tflops_per_gpu",
    "measured_mfu_pct", "measured_peak_mem_gib", "flops_convention_notes", "notes",
)  # fmt: skip
LLAMA = {
    "id": "bridge-001", "source_url_or_repo_path": "github:somewhere", "model": "LLAMA3_8B", "layers": "32",
    "hidden": "4096", "ffn": "14336", "heads": "32", "kv_heads": "8", "vocab": "128256", "attention_type": "GQA",
    "seq_len": "8192", "gpu": "H100", "n_gpus": "16", "precision": "bf16", "framework": "Megatron-Bridge", "tp": "2",
    "sp": "1", "pp": "1", "cp": "1", "dp": "8", "zero_stage": "1", "mbs": "1", "gbs": "128", "recompute": "none",
    "measured_tokens_per_s_per_gpu": "8192",
}  # fmt: skip


def row(**changes: str) -> dict[str, str]:
    return {**dict.fromkeys(COLUMNS, ""), **LLAMA, **changes}


def usable(tmp_path: Path, **changes: str) -> dict[str, Any]:
    """A row that must be usable, as a published run; own hardware files are those of the repository."""
    runs, unusable = import_published_rows(
        [row(**changes)], PUBLISHED if OWN_NODES.get(row(**changes)["id"].split("-")[0]) else tmp_path
    )
    assert unusable == []
    spec_from_mapping(PublishedRun, runs[0], "row")
    return runs[0]


def test_tokens_per_second_become_the_step_time(tmp_path: Path) -> None:
    """128 x 8192 tokens over 16 GPUs at 8192 tokens/s each: 8 s."""
    assert usable(tmp_path)["measured"] == {"step_s": 8.0}


def test_a_step_time_wins_over_the_rate(tmp_path: Path) -> None:
    assert usable(tmp_path, measured_step_time_s="7.5")["measured"] == {"step_s": 7.5}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id": "nanotron-001", "framework": "nanotron"}, "framework is not modelled: nanotron"),
        ({"id": "korthlayer-001"}, "one layer"),
        ({"gpu": "TPU v4"}, "GPU has no profile: TPU v4"),
        ({"precision": "nvfp4"}, "precision is not modelled: nvfp4"),
        ({"precision": ""}, "precision is not modelled: not given"),
        ({"id": "titan-001", "precision": "mxfp8"}, "precision is not modelled: mxfp8"),
        ({"id": "titan-001", "precision": "fp8", "overlap_notes": "float8nocompile"}, "float8 without compil"),
        ({"model": "LLAMA3_8B [LORA]"}, "LoRA"),
        ({"attention_type": "hybrid Mamba2+GQA"}, "mamba"),
        ({"vocab": ""}, "architecture is not given: vocab"),
        ({"model": "Mystery-8B"}, "activation, norm and positions"),
        ({"mbs": "", "gbs": ""}, "configuration is not given: mbs, gbs"),
        ({"id": "mlperf-001", "pp": "8", "tp": "1", "dp": "2"}, "configuration is not given: vpp"),
        ({"dp": "3"}, "not the number of GPUs"),
        ({"zero_stage": "3"}, "Megatron's FSDP"),
        ({"recompute": "selective(some)"}, "recomputation is not understood"),
        ({"overlap_notes": "cuda_graph=local:full"}, "what its CUDA graphs hold is not understood"),
        ({"measured_tokens_per_s_per_gpu": "", "measured_mfu_pct": "41"}, "neither step time"),
        ({"gpu": "H100 (95 GiB device)"}, "clocks are limited"),
    ],
)
def test_each_rule_gives_its_reason(changes: dict[str, str], words: str) -> None:
    reason = why_row_is_unusable(row(**changes))
    assert reason is not None
    assert words in reason


def test_nothing_measured_or_predicted_decides() -> None:
    """The same row with any numbers in its results is as usable."""
    for value in ("0.001", "1e9"):
        assert why_row_is_unusable(row(measured_tokens_per_s_per_gpu=value)) is None


def test_a_configuration_that_cannot_run_is_refused_in_the_checks_words(tmp_path: Path) -> None:
    runs, unusable = import_published_rows([row(gbs="129")], tmp_path)
    assert runs == []
    assert unusable[0]["reason"].startswith("refused: ")
    assert "129" in unusable[0]["reason"]


def test_blank_recomputation_is_a_group_of_its_own(tmp_path: Path) -> None:
    item = usable(tmp_path, recompute="")
    assert item["group"] == "published-bridge-default-recompute"
    assert "recompute" not in item["run"]["strategy"]
    assert usable(tmp_path)["group"] == "published-bridge"


def test_memory_is_of_the_kind_that_its_source_means(tmp_path: Path) -> None:
    allocated = usable(tmp_path, id="bridgecard-001", measured_peak_mem_gib="60")["measured"]
    assert allocated["allocated_bytes"] == 60 * GIB
    reserved = usable(
        tmp_path, id="titan-001", tp="1", dp="16", zero_stage="3", recompute="full", measured_peak_mem_gib="50"
    )
    assert reserved["measured"]["reserved_bytes"] == 50 * GIB
    assert "allocated_bytes" not in usable(tmp_path, measured_peak_mem_gib="60")["measured"]


def test_ranks_and_reserved_memory_are_read_from_the_notes(tmp_path: Path) -> None:
    ranks = ",".join(["66.5"] * 16)
    notes = f"max reserved 70.88 GiB; per-rank max_allocated GiB: {ranks}"
    measured = usable(tmp_path, id="simumax-001", measured_peak_mem_gib="66.5", notes=notes)["measured"]
    assert measured["reserved_bytes"] == pytest.approx(70.88 * GIB)
    assert measured["ranks_allocated_bytes"] == [66.5 * GIB] * 16


def test_a_power_limited_gpu_says_something_of_memory_alone(tmp_path: Path) -> None:
    item = usable(
        tmp_path, id="titan-001", gpu="B200 (power limited)", tp="1", dp="16", zero_stage="3", recompute="full",
        measured_peak_mem_gib="33",
    )  # fmt: skip
    assert item["measured"] == {"reserved_bytes": 33 * GIB}
    assert item["notes"] == ["memory only: B200 (power limited)"]


def test_out_of_memory_is_an_outcome(tmp_path: Path) -> None:
    item = usable(tmp_path, measured_tokens_per_s_per_gpu="", notes="OOM on A100-80GB")
    assert item["measured"] == {"oom": True}
    assert usable(tmp_path, measured_tokens_per_s_per_gpu="", notes="OOM_on_rank0")["measured"] == {"oom": True}
    assert usable(tmp_path, notes="iteration of the real BLOOM run")["measured"] == {"step_s": 8.0}


def test_fsdp1(tmp_path: Path) -> None:
    """MPT: LayerNorm, GELU, learned positions, tied embeddings, biases; SHARD_GRAD_OP keeps parameters gathered."""
    mpt = {
        "id": "foundry-001", "model": "MPT-7b", "kv_heads": "32", "ffn": "16384", "vocab": "50368", "tp": "1",
        "dp": "16", "zero_stage": "3", "recompute": "full", "framework": "llm-foundry/Composer FSDP",
    }  # fmt: skip
    run = usable(tmp_path, **mpt)["run"]
    assert run["framework"] == {
        "name": "fsdp1", "pytorch": "2.1", "compile": False, "attention": "flash1", "optimizer": "for-loop",
        "fused_qkv": True, "cross_entropy_fusion": True, "loss_metrics": 2,
    }  # fmt: skip
    assert run["model"]["tied_embeddings"]
    assert run["model"]["mlp"]["bias"]
    assert usable(tmp_path, **{**mpt, "zero_stage": "2"})["run"]["framework"]["reshard_after_forward"] is False
    assert "shards no gradients" in str(why_row_is_unusable(row(**{**mpt, "zero_stage": "1"})))


def test_overlap_of_tensor_parallelism_is_the_recipes(tmp_path: Path) -> None:
    """LLAMA2-70B's of the launcher has it, GPT3-175B's has not; one of MLPerf's rows says so itself."""
    h100 = {"gpu": "H100", "precision": "fp8", "n_gpus": "64", "tp": "4", "pp": "4", "vpp": "1", "dp": "4"}
    for source, model, notes, has in (
        ("nemo-001", "GPT3-175B", "", False),
        ("nemo-002", "LLAMA2-70B", "", True),
        ("nemo-003", "GPT3-20B", "", True),
        ("mlmllama-002", "Llama3-70B", "", True),
        ("bridge-002", "LLAMA3.1_405B", "", True),
        ("mlperf-001", "GPT3-175B", "TP comm overlap (userbuffers)", True),
        ("mlperf-002", "GPT3-175B", "", False),
    ):
        run = usable(tmp_path, **h100, id=source, model=model, overlap_notes=notes)["run"]
        assert run["framework"].get("tp_overlap", False) is has
    run = usable(tmp_path, **{**h100, "tp": "1", "dp": "16"}, id="nemo-003", model="GPT3-20B")
    assert "tp_overlap" not in run["run"]["framework"] and "switches" not in run


def test_what_a_row_of_megatrons_says_of_itself_is_read(tmp_path: Path) -> None:
    fp8 = {"id": "mlperf-001", "precision": "fp8"}
    for notes, said in (
        ("fp8 params", {"fp8_params": True}),
        ("fp8 primary weights", {"fp8_params": True}),
        ("bf16 gradients", {"grads": "bf16"}),
        ("grads in bf16", {"grads": "bf16"}),
        ("TP overlap", {"tp_overlap": True}),
        ("tp_comm_overlap=off", {}),
        ("no TP-comm overlap", {}),
        ("bf16 run, fp8 attention off", {}),
    ):
        for column in ("notes", "overlap_notes"):
            framework = usable(tmp_path, **fp8, **{column: f"median of 3 runs; {notes}"})["run"]["framework"]
            assert framework == {"name": "megatron", **said}, notes
    current = usable(tmp_path, **{**fp8, "precision": "fp8-cs"}, notes="fp8 params")["run"]["framework"]
    assert current["fp8_params"]
    alone = usable(tmp_path, id="mlperf-001", tp="1", dp="16", notes="fp8 params, TP overlap")["run"]["framework"]
    assert alone == {"name": "megatron"}  # nothing to overlap, and no product in fp8


def test_gradients_of_deepspeed(tmp_path: Path) -> None:
    bloom = {
        "id": "bloom-001", "model": "BLOOM-176B", "params_b": "176", "layers": "70", "hidden": "14336",
        "ffn": "57344", "heads": "112", "kv_heads": "112", "vocab": "250680", "seq_len": "2048", "gpu": "A100 80GB",
        "n_gpus": "384", "tp": "4", "sp": "0", "pp": "12", "dp": "8", "mbs": "2", "gbs": "2048", "recompute": "full",
        "measured_peak_mem_gib": "59",
    }  # fmt: skip
    late = usable(tmp_path, **bloom, notes="BF16 optimizer with fp32 grad accumulation")
    assert late["run"]["framework"]["grads_bytes_per_param"] == 6
    assert late["measured"]["device_bytes"] == 59_000 * 2**20  # thousands of nvidia-smi's MiB
    assert usable(tmp_path, **bloom)["run"]["framework"]["grads_bytes_per_param"] == 2


def test_gpt_of_2022(tmp_path: Path) -> None:
    """Korthikanti's 22B: LayerNorm, GELU, dropout, learned positions, biases, unfused attention, no sp where 0."""
    item = usable(
        tmp_path, id="korth-001", model="GPT-22B", layers="48", hidden="6144", ffn="24576", heads="64", kv_heads="64",
        vocab="51200", seq_len="2048", gpu="A100 80GB", n_gpus="8", precision="fp16", tp="8", sp="0", dp="1", mbs="4",
        gbs="4", recompute="selective(core attention)", zero_stage="", measured_step_time_s="1.42",
    )  # fmt: skip
    model = item["run"]["model"]
    assert (model["norm"], model["positions"], model["max_positions"], model["dropout"]) == (
        "layernorm", "learned", 2048, 0.1
    )  # fmt: skip
    assert model["mlp"] == {"activation": "gelu", "ffn_hidden": 24576, "bias": True}
    assert item["run"]["framework"] == {"name": "megatron-2022", "data_parallel": "ddp"}
    assert item["run"]["strategy"] == {"tp": 8, "pp": 1, "sp": False, "recompute": "selective"}


def test_gpt_of_mlperf_has_no_dropout_and_bf16_gradients(tmp_path: Path) -> None:
    """training_results_v3.1, custom.yaml, and v4.0, distributed_fused_adam.yaml; NeMo's own GPT-3 keeps its dropout."""
    gpt = {
        "model": "GPT3-175B", "layers": "96", "hidden": "12288", "ffn": "49152", "heads": "96", "kv_heads": "96",
        "vocab": "51200", "seq_len": "2048", "precision": "fp8", "tp": "4", "pp": "8", "vpp": "6", "n_gpus": "256",
        "dp": "8", "gbs": "2048", "recompute": "", "framework": "NeMo (MLPerf v4.1)",
    }  # fmt: skip
    mlperf, nemo, copied = (
        usable(tmp_path, id=f"{source}-001", mbs=mbs, **gpt)["run"]
        for source, mbs in (("mlperf", "2"), ("nemo", "1"), ("nemo", "2"))
    )
    assert "dropout" not in mlperf["model"] and "dropout" not in copied["model"]
    assert nemo["model"]["dropout"] == 0.1
    assert mlperf["framework"] == {"name": "megatron", "fp8_params": True, "grads": "bf16"}
    assert copied["framework"]["fp8_params"] and copied["framework"]["tp_overlap"]
    assert "cross_entropy_fusion" not in nemo["framework"] and "fp8_params" not in nemo["framework"]


def test_losses_are_fused_where_nemos_recipe_says_so(tmp_path: Path) -> None:
    llama = {"model": "LLAMA2-7B", "precision": "fp8", "tp": "1", "n_gpus": "8", "dp": "8", "recompute": ""}
    nemo, launcher = (usable(tmp_path, id=f"{s}-001", **llama)["run"]["framework"] for s in ("nemo", "nemolauncher"))
    assert nemo["cross_entropy_fusion"] == "native"
    assert "cross_entropy_fusion" not in launcher
    bridge = usable(tmp_path)["run"]["framework"]
    assert (bridge["cross_entropy_fusion"], bridge["loss_copies_logits"], bridge["grads"]) == ("te", False, "bf16")


def test_nemo_of_2024_disables_cudnns_attention_but_for_gpt3_175b(tmp_path: Path) -> None:
    """NVTE_FUSED_ATTN of NeMo-Framework-Launcher's conf/config.yaml and examples/training/gpt/h100."""
    fp8 = {"precision": "fp8", "recompute": ""}
    found = {
        (source, model): usable(tmp_path, id=f"{source}-001", model=model, vpp="1", **fp8)["run"]["framework"]
        for source, model in (("nemo", "LLAMA3-8B"), ("nemolauncher", "LLAMA3-8B"), ("nemo", "GPT3-175B"))
    }
    assert [framework["attention"] for framework in found.values()] == ["flash", "flash", "fused"]


def test_fp8_is_scaled_as_the_row_or_its_recipe_says(tmp_path: Path) -> None:
    for changes, recipe in (
        ({"precision": "fp8"}, "fp8"),
        ({"precision": "fp8-cs(current scaling)"}, "fp8-tensorwise"),
        ({"precision": "fp8(delayed scaling era)"}, "fp8-delayed"),
        ({"precision": "fp8", "notes": "from recipe LLAMA31_405B_PRETRAIN_CONFIG_H100_FP8_CS_V2"}, "fp8-tensorwise"),
        ({"precision": "fp8", "model": "Qwen3_8B"}, "fp8-tensorwise"),
    ):
        assert usable(tmp_path, **changes)["run"]["precision"]["gemm"] == recipe


def test_context_parallelism_of_simumax_exchanges_heads(tmp_path: Path) -> None:
    ring, heads = (usable(tmp_path, id=f"{s}-001", cp="2", dp="4")["run"]["strategy"] for s in ("bridge", "simumax"))
    assert "cp_kind" not in ring and heads["cp_kind"] == "a2a"


def test_tokens_are_dropped_and_padded_where_the_model_says_so(tmp_path: Path) -> None:
    """Every expert gets its capacity; Megatron-Bridge's experts are whole on a rank where no column says otherwise."""
    moe = {
        "model": "Mixtral-8x7B (tokendrop)", "layers": "32", "vocab": "32000", "moe_experts": "8", "moe_topk": "2",
        "moe_ffn": "14336", "ep": "8", "tp": "2", "dp": "8",
    }  # fmt: skip
    run = usable(tmp_path, **moe)["run"]
    assert run["routing"] == {"capacity_factor": 1.0, "pad_to_capacity": True} and run["strategy"]["etp"] == 1


def test_switches_of_runs_that_nothing_was_learned_from_are_told(tmp_path: Path) -> None:
    assert usable(tmp_path, model="LLAMA3_70B")["switches"] == ["tp_overlap"]
    assert "switches" not in usable(tmp_path, tp="1", dp="16")
    deepseek = {
        "model": "DeepSeek-V3-4L", "layers": "4", "hidden": "7168", "heads": "128", "kv_heads": "128", "ffn": "",
        "vocab": "129280", "moe_experts": "256", "moe_topk": "8", "moe_ffn": "2048", "ep": "8", "tp": "1", "pp": "2",
    }  # fmt: skip
    assert usable(tmp_path, **deepseek)["switches"] == ["layout"]


def test_gpt_oss_in_micro_batches_that_no_recipe_has_is_left_out() -> None:
    """Whatever it gave: its columns alone say so."""
    oss = {
        "model": "GPT OSS 120B", "layers": "36", "hidden": "2880", "heads": "64", "kv_heads": "8", "vocab": "201088",
        "moe_experts": "128", "moe_topk": "4", "moe_ffn": "2880", "ep": "8", "tp": "1", "dp": "16", "recompute": "",
    }  # fmt: skip
    assert "not that of any version of its recipe" in str(why_row_is_unusable(row(**oss, mbs="4")))
    assert why_row_is_unusable(row(**oss, mbs="1")) is None


def test_a_bundled_model_must_agree_with_the_row(tmp_path: Path) -> None:
    moe = {
        "model": "Mixtral-8x7B", "layers": "32", "vocab": "32000", "moe_experts": "8", "moe_topk": "2",
        "moe_ffn": "14336", "ep": "8", "etp": "1", "tp": "1", "dp": "16",
    }  # fmt: skip
    assert usable(tmp_path, **moe)["run"]["model"] == {"base": "mixtral-8x7b", "num_layers": 32}
    _, unusable = import_published_rows([row(**{**moe, "moe_topk": "4"})], tmp_path)
    assert "moe_topk (4)" in unusable[0]["reason"]


def test_a_model_of_fewer_layers_is_what_its_source_made_of_it(tmp_path: Path) -> None:
    """SimuMax's DeepSeek-V3 of four layers: one is dense (its summary's notes), and none predicts further tokens."""
    reduced = {
        "model": "DeepSeek-V3-4L", "layers": "4", "hidden": "7168", "heads": "128", "kv_heads": "128",
        "vocab": "129280", "moe_experts": "256", "moe_topk": "8", "moe_ffn": "2048", "gpu": "B200", "n_gpus": "8",
        "ep": "8", "tp": "1", "dp": "8", "gbs": "32", "seq_len": "4096", "measured_step_time_s": "0.6032",
    }  # fmt: skip
    run = spec_from_mapping(RunSpec, usable(tmp_path, **reduced, id="simumax-001")["run"], "row")
    model = resolve_run(run, tmp_path)[0].model
    assert [model.is_moe_layer(i) for i in range(4)] == [False, True, True, True]
    assert model.moe is not None
    assert (model.num_mtp_layers, model.moe.num_experts, model.moe.shared_hidden) == (0, 256, 2048)
    other = spec_from_mapping(RunSpec, usable(tmp_path, **reduced, id="bridge-001")["run"], "row")
    assert resolve_run(other, tmp_path)[0].model.num_mtp_layers == 1


def test_a_row_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    runs, unusable = import_published_rows([row(), row(id="bridge-002")], tmp_path)
    assert len(runs) == 1
    assert unusable == [{"id": "bridge-002", "group": "published-bridge", "gpu": "H100",
                         "reason": "the same row as bridge-001"}]  # fmt: skip


def test_a_table_is_written_and_read_back(tmp_path: Path) -> None:
    table, folder = tmp_path / "table.csv", tmp_path / "published"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows([row(), row(id="bridge-002", gpu="TPU v4"), row(id="bridge-003", pp="2", tp="1")])
    assert write_published_runs(table, folder) == (2, 1)
    references, left_out = published_reference_runs(folder)
    assert [r.id for r in references] == ["bridge-001", "bridge-003"]
    assert references[0].outcome.step_s == 8.0
    assert [(item.id, item.reason) for item in left_out] == [("bridge-002", "GPU has no profile: TPU v4")]


def test_an_unnamed_gpu_is_the_one_of_its_repositorys_logs(tmp_path: Path) -> None:
    """pytorch/ao prints logs of an H100 of 95 GiB, whose clock nobody gives: memory alone. torchtitan's own do not."""
    llama = {
        "id": "titan-050", "model": "Llama3-8B", "gpu": "H100", "n_gpus": "8", "tp": "1", "dp": "8", "zero_stage": "3",
        "recompute": "full", "framework": "torchtitan", "measured_peak_mem_gib": "40", "measured_step_time_s": "1.3",
    }  # fmt: skip
    ao = usable(tmp_path, **llama, source_url_or_repo_path="github:pytorch/ao:docs/source/workflows/training.md")
    assert "step_s" not in ao["measured"]
    assert ao["measured"]["reserved_bytes"] == 40 * GIB
    titan = usable(tmp_path, **llama, source_url_or_repo_path="github:pytorch/torchtitan:benchmarks/llama3.md")
    assert titan["measured"]["step_s"] == 1.3


def test_bloom_as_its_readme_says(tmp_path: Path) -> None:
    """ALiBi, a norm behind the embedding, Megatron's dropout of 0.1; embeddings count as layers with the BF16 optimizer
    (bigscience, train/tr11-176B-ml/README.md and chronicles-prequel.md)."""
    row = {
        "model": "BLOOM-176B", "params_b": "176", "layers": "70", "hidden": "14336", "ffn": "57344", "heads": "112",
        "kv_heads": "112", "vocab": "250680", "seq_len": "2048", "gpu": "A100 80GB", "n_gpus": "384", "tp": "4",
        "sp": "0", "pp": "12", "dp": "8", "mbs": "2", "gbs": "2048", "recompute": "full",
        "attention_type": "MHA (ALiBi)", "measured_peak_mem_gib": "59",
    }  # fmt: skip
    late = usable(tmp_path, id="bloom-001", **row, notes="BF16 optimizer with fp32 grad accumulation")["run"]
    assert late["model"]["positions"] == "alibi"
    assert late["model"]["embedding_norm"]
    assert late["model"]["dropout"] == 0.1
    assert "max_positions" not in late["model"]
    assert (late["framework"]["deepspeed"], late["framework"]["splits_layers"]) == ("bf16", "greedy-embeddings")
    early = usable(tmp_path, id="bloom-002", **row, zero_stage="1")["run"]["framework"]
    assert (early["deepspeed"], early["splits_layers"]) == ("zero1", "greedy")
    whole = usable(tmp_path, id="bloom-003", **row, zero_stage="0")["run"]["framework"]
    assert whole["deepspeed"] == "zero0"
    assert usable(tmp_path, id="bloom-128", **row)["run"]["framework"]["splits_layers"] == "greedy-embeddings"


def test_layers_that_stand_over_a_table(tmp_path: Path) -> None:
    """NLAYERS=72 stands over one section's tables; in another the lab book tweaked layers from row to row."""
    columns = {
        "model": "BLOOM-dev-181B", "params_b": "181", "layers": "", "hidden": "14336", "ffn": "57344", "heads": "64",
        "kv_heads": "64", "vocab": "", "seq_len": "2048", "gpu": "A100 80GB", "n_gpus": "384", "tp": "4", "sp": "0",
        "pp": "12", "dp": "8", "mbs": "2", "gbs": "2048", "recompute": "full", "attention_type": "MHA (ALiBi)",
        "measured_peak_mem_gib": "44", "id": "bloom-001",
    }  # fmt: skip
    model = usable(tmp_path, **columns, notes='section "GBS Variations"; at iteration 2')["run"]["model"]
    assert (model["num_layers"], model["vocab"]) == (72, 250_000)
    elsewhere = row(**columns, notes='section "Choosing the fastest 3D Topology"')
    assert import_published_rows([elsewhere], PUBLISHED)[1][0]["reason"].startswith("architecture is not given: layers")


def test_torchtitan_runs_as_its_script_says(tmp_path: Path) -> None:
    """run_train.sh maps pages; the loss of torchao 0.10's logs (April 2025) is not compiled; cuDNN's attention, which
    runs on B200, is computed again until December 2025; embedding and head are the root's until July 2025."""
    titan = {
        "model": "Llama3-8B", "layers": "32", "hidden": "4096", "ffn": "14336", "heads": "32", "kv_heads": "8",
        "vocab": "128256", "seq_len": "8192", "gpu": "A100 80GB", "n_gpus": "8", "precision": "bf16", "tp": "1",
        "pp": "1", "dp": "8", "zero_stage": "3", "mbs": "1", "gbs": "8", "recompute": "selective(per-op SAC)",
        "overlap_notes": "torch.compile; FSDP2", "measured_peak_mem_gib": "30.89", "sp": "", "attention_type": "GQA",
    }  # fmt: skip
    early = usable(tmp_path, id="titan-001", **titan, notes="torch 2.7 dev / torchao 0.10")["run"]["framework"]
    late = usable(tmp_path, id="titan-002", **titan, notes="torch 2.9 dev")["run"]["framework"]
    assert late == {"name": "torchtitan", "allocator": "expandable", "compile": True}
    assert early == late | {"compile_loss": False, "ends_apart": False}
    june = usable(tmp_path, id="titan-004", **titan, date="2025-06-04")["run"]["framework"]
    assert june == late | {"ends_apart": False}
    assert usable(tmp_path, id="titan-005", **titan, date="2025-08")["run"]["framework"] == late
    titan["gpu"] = "B200 (power limited)"
    blackwell = usable(tmp_path, id="titan-003", **titan, notes="torch 2.9 dev")["run"]["framework"]
    assert blackwell == late | {"saves_attention": False}


BLOOM = {
    "id": "bloom-001", "model": "BLOOM-dev-182B", "framework": "Megatron-DeepSpeed", "gpu": "A100 80GB", "layers": "72",
    "hidden": "14336", "ffn": "57344", "heads": "64", "kv_heads": "64", "vocab": "250000",
    "attention_type": "MHA (ALiBi)",
    "seq_len": "2048", "n_gpus": "384", "tp": "8", "sp": "0", "pp": "6", "dp": "8", "mbs": "2", "gbs": "2048",
    "recompute": "full", "measured_step_time_s": "130", "measured_tokens_per_s_per_gpu": "",
}  # fmt: skip


def test_readings_that_contradict_each_other_are_not_used() -> None:
    """Twice the micro-batch cannot take less: both readings go, both step times stay. Another width says nothing."""
    rows = [
        row(**{**BLOOM, "measured_peak_mem_gib": "65"}),
        row(**{**BLOOM, "id": "bloom-002", "mbs": "4", "measured_peak_mem_gib": "56"}),
        row(
            **{**BLOOM, "id": "bloom-003", "mbs": "4", "hidden": "13824", "ffn": "55296", "measured_peak_mem_gib": "50"}
        ),
    ]
    runs, unusable = import_published_rows(rows, PUBLISHED)
    assert unusable == []
    assert [sorted(run["measured"]) for run in runs] == [["step_s"], ["step_s"], ["device_bytes", "step_s"]]
    assert "its memory is not used: bloom-002 contradicts it" in runs[0]["notes"]


def test_out_of_memory_against_a_reading_in_proportion_is_not_used() -> None:
    """A sixth more layers on a stage take at most a sixth more, and that fits: one of the two is wrong. More layers, a
    smaller micro-batch that was read, or another width deny nothing."""
    short = {**BLOOM, "id": "bloom-002", "notes": "OOM on A100-80GB", "measured_step_time_s": ""}
    ran = row(**{**BLOOM, "layers": "72", "mbs": "2", "measured_peak_mem_gib": "60"})
    runs, unusable = import_published_rows([ran, row(**{**short, "layers": "84", "mbs": "2"})], PUBLISHED)
    assert unusable == []
    assert runs[1]["measured"] == {"oom": True, "oom_denied_by": "bloom-001"}
    assert "by the reading of bloom-001 it takes at most 71 GB" in runs[1]["notes"][-1]
    assert "device_bytes" not in runs[0]["measured"]
    assert "its memory is not used: bloom-002 contradicts it" in runs[0]["notes"]
    for changes in ({"layers": "96"}, {"mbs": "4"}, {"hidden": "13824", "ffn": "55296"}):
        other = row(**{**short, "layers": "84", "mbs": "2", **changes})
        runs, unusable = import_published_rows([ran, other], PUBLISHED)
        assert unusable == []
        assert runs[0]["measured"]["device_bytes"] == 60 * 1000 * 2**20
        assert runs[1]["measured"] == {"oom": True}


def test_the_fullest_gpu_of_a_node_takes_the_norm() -> None:
    """The lab book: "Mem = max memory used by the first (last) nodes", so the first rank of each group, by default."""
    runs, _ = import_published_rows([row(**BLOOM)], PUBLISHED)
    assert not {"norms_gradients", "optimizer_rank"}.intersection(runs[0]["run"]["framework"])


def test_runs_that_would_hang_block_their_launches() -> None:
    """The lab book: 320 GPUs and more always hang without CUDA_LAUNCH_BLOCKING=1; of fewer nothing is said."""
    small = row(**{**BLOOM, "id": "bloom-002", "n_gpus": "8", "pp": "1", "dp": "1", "layers": "6", "gbs": "512"})
    runs, _ = import_published_rows([row(**BLOOM), small], PUBLISHED)
    assert [run["run"]["framework"]["launch_blocking"] for run in runs] == [True, False]


def test_nemo_1_stores_the_other_half_of_a_bf16_parameter(tmp_path: Path) -> None:
    """Two moments of 4 bytes and the 16 bits that bf16 leaves out."""
    assert usable(tmp_path, id="nemo-001", vpp="1")["run"]["framework"]["states_bytes_per_param"] == 2 * 4 + 2
    assert "states_bytes_per_param" not in usable(tmp_path)["run"]["framework"]
