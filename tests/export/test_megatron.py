"""Jobs exported to Megatron-LM: said whole, taken by Megatron's own classes, and read back as they were."""

from __future__ import annotations

import json
import os
import re
import subprocess
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import mofa
from mofa.errors import SpecError
from mofa.export.megatron import COMMIT
from mofa.export.megatron.launch_script import megatron_job_files
from mofa.export.megatron.megatron_table import DUMPED_AS, MEGATRON
from mofa.export.megatron.read_megatron import split_launch_command
from mofa.export.read_job import read_job
from mofa.export.shell import read_shell_script
from mofa.measure.expand import ExpandedRun
from mofa.measure.megatron_te_job import megatron_te_job
from mofa.search.one_plan import plan_in_closed_form
from mofa.specs.framework_names import RANK_ORDERS
from mofa.specs.run import RunBatch, RunSpec
from tests.export.frameworks import ARGUMENTS, megatron_configs, validated, wheel
from tests.export.jobs import assert_comes_back, job_of
from tests.export.random_plans import Drawn, drawn_plans

RECORDED = json.loads(ARGUMENTS.read_text())
WORKLOADS = ["llama3-8b", "llama3-70b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3", "mixtral-8x7b", "gpt3-175b",
             "kimi-k2", "memfine-model-2"]  # fmt: skip
OPTIONS: dict[str, list[Any]] = {
    "allocator": ["native", "expandable"], "dispatcher": ["alltoall", "allgather", "deepep"],
    "experts": ["grouped", "sequential"], "attention": ["fused", "flash"], "permute_fusion": [True, False],
    "data_parallel": ["distributed-optimizer", "ddp"], "overlap_param_gather": [True, False],
    "cross_entropy_fusion": ["none", "native", "te"], "grads": ["", "fp32", "bf16"], "tp_overlap": [True, False],
    "vocab_divisor": [64, 128], "fused_swiglu": [True, False], "rank_order": [*RANK_ORDERS, RANK_ORDERS[0]],
}  # fmt: skip
STRATEGIES: dict[str, list[Any]] = {
    "tp": [1, 1, 2, 4], "pp": [1, 1, 2, 4], "vpp": [1, 1, 2], "cp": [1, 1, 2], "cp_kind": ["ring", "allgather", "a2a"],
    "ep": [1, 2, 4, 8], "etp": [1], "sp": [True, True, False],
    "recompute": ["none", "full", "full:1", "selective:mlp", "selective:moe_act+layernorm", "selective:core_attn"],
}  # fmt: skip
NUMBER = 50


@pytest.fixture(scope="module")
def plans() -> list[Drawn]:
    """Fifty random plans."""
    plans_drawn = drawn_plans("megatron", WORKLOADS, OPTIONS, STRATEGIES, seed=26)
    return list(islice(plans_drawn, NUMBER))


def test_arguments_are_megatrons_own() -> None:
    """Name, kind, default and stored name of every argument of the table, as Megatron's own parser has them."""
    assert RECORDED["commit"] == COMMIT
    known = RECORDED["arguments"]
    for argument in MEGATRON.arguments.values():
        if argument.name.startswith("$"):
            continue
        own = known[argument.name]
        kind = {"flag": "_StoreTrueAction", "off": "_StoreFalseAction"}.get(argument.kind, "_StoreAction")
        assert own["action"] == kind, argument
        assert own["dest"] == argument.dump_name, argument
        assert own["nargs"] == ("+" if argument.kind == "texts" else 0 if kind != "_StoreAction" else None), argument
        default = [own["default"]] if argument.kind == "texts" and isinstance(own["default"], str) else own["default"]
        assert (str(default) if argument.kind == "text" and default is not None else default) == argument.default
        assert {"int": "int", "float": "float"}.get(argument.kind) in (None, own["type"]), argument
        assert all(alias in known for alias in argument.aliases), argument


def test_arguments_that_are_not_modelled_are_megatrons_too() -> None:
    stored = {own["dest"].replace("_", "-") for own in RECORDED["arguments"].values()}
    for dumped, name in DUMPED_AS.items():
        assert RECORDED["arguments"][name]["dest"] == dumped
    other = {name for name in MEGATRON.unmodelled if name in RECORDED["arguments"]}
    other = {name for name in other if RECORDED["arguments"][name]["dest"] != name.replace("-", "_")}
    assert other == set(DUMPED_AS.values())
    assert [
        name for name in MEGATRON.unmodelled if name not in {*RECORDED["arguments"], *stored, "use-custom-fsdp"}
    ] == []


@pytest.mark.parametrize("number", range(NUMBER))
def test_a_plan_comes_back_as_it_was(plans: list[Drawn], number: int, tmp_path: Path) -> None:
    """Exported, read and estimated anew: the same strategy, layout, step and memory."""
    workload, _, framework, _ = plans[number]
    file = tmp_path / "job.sh"
    file.write_text(megatron_job_files(job_of(plans[number], "megatron"))["megatron.sh"])
    job = read_job("megatron", file)
    assert_comes_back(job, plans[number])
    assert job.workload.precision.fp8_recipe == workload.precision.fp8_recipe
    assert framework.grads_bytes_per_param == job.framework.grads_bytes_per_param


@pytest.mark.filterwarnings("ignore::UserWarning")  # of core_attn, and of latent attention's fused rotation
def test_megatrons_configuration_takes_every_plan(plans: list[Drawn]) -> None:
    """Its own class with its own checks, on the values that its arguments.py would hand it."""
    folder = wheel("megatron_core-0.16.1")
    with megatron_configs(folder) as classes:
        for drawn in plans:
            values = MEGATRON.write_arguments(job_of(drawn, "megatron"))
            config = configuration(values, classes)
            s = drawn.plan.strategy
            assert config.tensor_model_parallel_size == s.tp
            assert config.num_layers == drawn.workload.model.num_layers
            if "pipeline-model-parallel-layout" in values:
                layout = config.pipeline_model_parallel_layout
                assert layout.virtual_pipeline_model_parallel_size == s.vpp
                layout.validate_layer_layout(config.num_layers, config.mtp_num_layers)


def _gpt_oss(rope_scale: float) -> Drawn:
    """gpt-oss-120b on eight nodes: sinks, alternating windows, biases everywhere."""
    workload = mofa.load_workload("gpt-oss-120b", global_batch=256, overrides={"model.rope_scale": rope_scale})
    cluster, facts = mofa.load_cluster("h100-hgx", 64), mofa.load_framework("megatron")
    strategy = {"tp": 1, "pp": 2, "ep": 8, "micro_batch": 1, "recompute": "full"}
    return Drawn(workload, cluster, facts, plan_in_closed_form(workload, cluster, strategy, facts))


def test_gpt_oss_is_exported_but_for_yarn(tmp_path: Path) -> None:
    """Megatron-LM 0.16.1 has arguments for its sinks, windows and biases; YaRN it has for latent attention alone."""
    drawn = _gpt_oss(1.0)
    values = MEGATRON.write_arguments(job_of(drawn, "megatron"))
    with megatron_configs(wheel("megatron_core-0.16.1")) as classes:
        config = configuration(values, classes)
    assert (config.softmax_type, config.window_size, config.window_attn_skip_freq) == ("learnable", (127, 0), 2)
    assert config.add_bias_linear and not config.bias_dropout_fusion
    file = tmp_path / "job.sh"
    file.write_text(megatron_job_files(job_of(drawn, "megatron"))["megatron.sh"])
    job = read_job("megatron", file)
    assert_comes_back(job, drawn)
    assert job.workload.model.model_copy(update={"name": "", "source": ""}) == drawn.workload.model.model_copy(
        update={"name": "", "source": ""}
    )
    assert RECORDED["arguments"]["position-embedding-type"]["choices"].count("yarn") == 0
    with pytest.raises(SpecError, match=r"rope_scale \(1.3466\) .* position-embedding-type has no YaRN"):
        MEGATRON.write_arguments(job_of(_gpt_oss(1.3466), "megatron"))


def test_a_fused_router_and_a_capacity_come_back(tmp_path: Path) -> None:
    workload = mofa.load_workload(
        "qwen3-30b-a3b", overrides={"routing": {"capacity_factor": 1.0, "pad_to_capacity": True}}
    )
    cluster = mofa.load_cluster("h100-hgx", 8)
    facts = mofa.load_framework({"name": "megatron", "router_fusion": True, "cuda_graphs": "local"})
    drawn = Drawn(workload, cluster, facts, plan_in_closed_form(workload, cluster, {"ep": 8}, facts))
    text = megatron_job_files(job_of(drawn, "megatron"))["megatron.sh"]
    assert "--moe-router-fusion" in text and "--moe-pad-expert-input-to-capacity" in text
    file = tmp_path / "job.sh"
    file.write_text(text)
    job = read_job("megatron", file)
    assert job.framework.router_fusion and str(job.framework.graphs) == "local"
    assert_comes_back(job, drawn)


def test_all_that_no_argument_says_is_named_at_once() -> None:
    workload = mofa.load_workload(
        "llama3-8b", global_batch=64,
        overrides={"model.parallel_branches": True, "model.logit_softcap": True, "model.mlp.activation": "geglu"},
    )  # fmt: skip
    cluster, facts = mofa.load_cluster("h100-hgx", 8), mofa.load_framework("megatron")
    plan = plan_in_closed_form(workload, cluster, {"tp": 1, "pp": 1, "micro_batch": 1}, facts)
    with pytest.raises(SpecError) as error:
        MEGATRON.write_arguments(job_of(Drawn(workload, cluster, facts, plan), "megatron"))
    line = str(error.value)
    assert "\n" not in line and line.count("export to megatron") == 1
    assert all(name in line for name in ("parallel_branches (true)", "logit_softcap (true)", "activation (geglu)"))


def configuration(values: dict[str, Any], classes: dict[str, Any]) -> Any:
    """Megatron's configuration of arguments, put together as its arguments.py does."""
    known = RECORDED["arguments"]
    given = {known[name]["dest"]: value for name, value in values.items() if not name.startswith("$")}
    latent = given.get("multi_latent_attention", False)
    kind = classes["MLATransformerConfig" if latent else "TransformerConfig"]
    fields = {name for name in kind.__dataclass_fields__ if name in {own["dest"] for own in known.values()}}
    arguments = {own["dest"]: own["default"] for own in known.values()} | given
    config = {name: arguments[name] for name in fields}
    config["persist_layer_norm"] = True
    config["num_moe_experts"] = arguments["num_experts"]
    config["fp8_param"] = arguments["fp8_param_gather"]
    config["batch_p2p_comm"] = not arguments["overlap_p2p_comm"]
    if arguments["position_embedding_type"] != "rope":
        config["apply_rope_fusion"] = False
    if arguments["swiglu"]:
        config |= {"gated_linear_unit": True, "bias_activation_fusion": arguments["bias_swiglu_fusion"]}
    if not arguments["group_query_attention"]:
        config["num_query_groups"] = None
    if arguments["expert_tensor_parallel_size"] is None:
        config["expert_tensor_parallel_size"] = arguments["tensor_model_parallel_size"]
    layers = arguments["moe_layer_freq"]
    if isinstance(layers, str):
        from mofa.export.megatron.patterns import evaluate_list_expression

        config["moe_layer_freq"] = evaluate_list_expression(layers)
    if isinstance(arguments["window_size"], str):
        config["window_size"] = tuple(int(size) for size in arguments["window_size"].split(","))
    config["moe_router_load_balancing_type"] = "none"
    config["cp_comm_type"] = arguments["cp_comm_type"][0]
    config["cuda_graph_scope"] = []
    chunks = arguments["num_virtual_stages_per_pipeline_rank"]
    if arguments["pipeline_model_parallel_layout"] is None and chunks:
        config["virtual_pipeline_model_parallel_size"] = chunks
    config |= {"params_dtype": None, "pipeline_dtype": True, "hetereogenous_dist_checkpoint": False}
    if arguments["rope_type"] is None:
        config.pop("rope_type", None)
    if not latent:
        config = {name: value for name, value in config.items() if name in kind.__dataclass_fields__}
    return kind(**config)


SHARED_FIELDS = ("num_layers", "hidden_size", "ffn_hidden_size", "gated_linear_unit", "add_bias_linear",
                 "normalization", "hidden_dropout", "attention_dropout", "tensor_model_parallel_size",
                 "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
                 "sequence_parallel", "num_attention_heads",
                 "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
                 "moe_router_score_function", "moe_router_enable_expert_bias", "moe_router_num_groups",
                 "moe_router_group_topk", "moe_token_dispatcher_type", "moe_grouped_gemm", "moe_permute_fusion",
                 "moe_router_fusion",
                 "moe_router_pre_softmax", "moe_shared_expert_gate", "moe_router_dtype", "apply_rope_fusion",
                 "cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "fp8", "fp8_recipe", "fp8_param",
                 "fp8_amax_history_len", "fp8_amax_compute_algo", "recompute_granularity", "recompute_method",
                 "recompute_num_layers", "recompute_modules", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
                 "qk_pos_emb_head_dim", "v_head_dim", "qk_layernorm", "window_size", "softmax_type",
                 "gradient_accumulation_fusion")  # fmt: skip
"""Fields of Megatron's configuration that mofa's own runs of it set too."""


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_job_is_configured_as_mofas_own_runs_are(plans: list[Drawn]) -> None:
    """What ``mofa measure`` tells Megatron-Core of a plan, which predictions were fitted to, the export says too."""
    folder = wheel("megatron_core-0.16.1")
    compared = 0
    with megatron_configs(folder) as classes:
        for drawn in plans:
            measured = measured_config(drawn)
            if measured is None:
                continue
            config = configuration(MEGATRON.write_arguments(job_of(drawn, "megatron")), classes)
            for name in SHARED_FIELDS:
                if name in measured:
                    assert getattr(config, name) == measured[name], (name, drawn.plan.strategy)
            compared += 1
    assert compared >= 10


def measured_config(drawn: Drawn) -> dict[str, Any] | None:
    """The configuration of a plan as ``mofa measure`` runs it; None where it cannot."""
    workload, cluster, framework, plan = drawn
    s = plan.strategy
    run = RunSpec.model_construct(
        id="x", gpus=cluster.num_gpus, precision=workload.precision, optimizer=workload.optimizer,
        routing=workload.routing, strategy={},
        batch=RunBatch.model_construct(seq_len=workload.batch.seq_len, global_=workload.batch.global_batch,
                                         micro=s.micro_batch),
    )  # fmt: skip
    micro_batches = workload.batch.global_batch // (s.dp * s.micro_batch)
    expanded = ExpandedRun(run, workload.model, framework, s, micro_batches, cluster.gpu)
    try:
        config: dict[str, Any] = megatron_te_job(expanded)["config"]
    except SpecError:
        return None
    return config


def test_a_log_is_read_as_the_script_it_comes_from(plans: list[Drawn], tmp_path: Path) -> None:
    """Megatron's dump of all arguments says the same job."""
    for drawn in plans[:10]:
        values = MEGATRON.write_arguments(job_of(drawn, "megatron"))
        known = RECORDED["arguments"]
        dumped = {own["dest"]: own["default"] for own in known.values()}
        dumped |= {known[name]["dest"]: value for name, value in values.items() if not name.startswith("$")}
        dumped["world_size"] = drawn.cluster.num_gpus
        lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in dumped.items()]
        file = tmp_path / "run.log"
        file.write_text("------------------------ arguments ------------------------\n" + "\n".join(lines))
        job = read_job("megatron", file)
        facts = job.framework.model_copy(update={"allocator": drawn.framework.allocator})
        again = plan_in_closed_form(job.workload, drawn.cluster, dict(job.strategy), facts)
        assert again.step_s == drawn.plan.step_s
        assert again.memory.by_component == drawn.plan.memory.by_component


REFUSED = [
    ("--use-megatron-fsdp", "use-megatron-fsdp"), ("--fp16", "fp16"), ("--squared-relu", "squared-relu"),
    ("--enable-cuda-graph", "enable-cuda-graph"), ("--optimizer muon", "optimizer"),
    ("--fp8-format hybrid --fp8-recipe mxfp8", "fp8-recipe"), ("--recompute-granularity full", "recompute-method"),
    ("--cp-comm-type a2a+p2p --context-parallel-size 2", "cp-comm-type"), ("--num-layers $LAYERS", "num-layers"),
    ("--num-layers many", "num-layers"), ("--attention-backend unfused", "attention-backend"),
]  # fmt: skip
BASE = """#!/bin/bash
LAYERS=4
ARGS=(--hidden-size 2048 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 # a comment
  --micro-batch-size 1 --global-batch-size 8 --swiglu --bf16 --vocab-size 32000 --tokenizer-type NullTokenizer
  --position-embedding-type rope --normalization RMSNorm --disable-bias-linear --hidden-dropout 0 \\
  --attention-dropout 0)
torchrun --nproc_per_node=2 pretrain_gpt.py --num-layers 4 ${ARGS[@]} """


@pytest.mark.parametrize(("more", "named"), REFUSED)
def test_what_is_not_modelled_is_refused_by_name(more: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    file.write_text(BASE.replace("LAYERS=4\n", "") + more + "\n")
    with pytest.raises(SpecError, match=named) as error:
        read_job("megatron", file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
MXFP8 = f"--fp8-format e4m3 --fp8-recipe mxfp8 {OVERLAPPED}"
SHARED = "--fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag"


@pytest.mark.parametrize("fp8_params", [False, True])
def test_mxfp8_is_read_and_written(fp8_params: bool, tmp_path: Path) -> None:
    """Its parameters come with the gradients' buffer, or not at all (Megatron-Bridge, training/mixed_precision.py)."""
    file = tmp_path / "job.sh"
    file.write_text(BASE + f"{MXFP8} {SHARED if fp8_params else ''}\n")
    job = read_job("megatron", file)
    assert job.workload.precision.gemm == "fp8-mxfp8"
    assert job.framework.fp8_params == fp8_params
    machines = mofa.load_cluster("b200-hgx", 2)
    plan = plan_in_closed_form(job.workload, machines, dict(job.strategy), job.framework)
    drawn = Drawn(job.workload, machines, job.framework, plan)
    values = MEGATRON.write_arguments(job_of(drawn, "megatron"))
    assert (values["fp8-format"], values["fp8-recipe"]) == ("e4m3", "mxfp8")
    assert bool(values.get("reuse-grad-buf-for-mxfp8-param-ag")) == bool(values.get("fp8-param-gather")) == fp8_params
    again = tmp_path / "again.sh"
    again.write_text(megatron_job_files(job_of(drawn, "megatron"))["megatron.sh"])
    assert_comes_back(read_job("megatron", again), drawn)


@pytest.mark.parametrize(
    "more",
    ["--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"],
)
def test_half_of_mxfp8s_parameters_is_refused(more: str, tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    file.write_text(BASE + f"{MXFP8} {more}\n")
    with pytest.raises(SpecError, match="reuse-grad-buf-for-mxfp8-param-ag"):
        read_job("megatron", file)


def test_a_job_of_somebody_is_estimated(tmp_path: Path) -> None:
    """Plain arguments, with what is not read named."""
    file = tmp_path / "job.sh"
    file.write_text(BASE + "--lr 1e-4 --save checkpoints\n")
    job = read_job("megatron", file)
    assert (job.num_gpus, job.workload.model.vocab, job.workload.model.num_layers) == (2, 32001, 4)
    assert job.framework.permute_fusion and not job.framework.overlap_grad_reduce
    assert "--lr" in job.notes[-1] and "--save" in job.notes[-1]
    assert mofa.estimate(job.workload, mofa.load_cluster("h100-hgx", 2), dict(job.strategy), framework=job.framework,
                         replay=False).step_s > 0  # fmt: skip


FAKE_TORCHRUN = """#!/usr/bin/env bash
printf '%s\\0' "$CUDA_DEVICE_MAX_CONNECTIONS" "$@" > "$WORDS"
"""


def _words_by_bash(script: Path, folder: Path) -> list[str]:
    """What bash hands to torchrun, behind the variable that Megatron-LM asks for."""
    (folder / "bin").mkdir(exist_ok=True)
    fake, words = folder / "bin" / "torchrun", folder / "words"
    fake.write_text(FAKE_TORCHRUN)
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}", "WORDS": str(words)}
    subprocess.run(["bash", str(script)], check=True, env=environment)
    return words.read_text().split("\0")[:-1]


def test_bash_reads_a_script_as_it_is_read_here(plans: list[Drawn], tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    for drawn in plans[:8]:
        script.write_text(megatron_job_files(job_of(drawn, "megatron"))["megatron.sh"])
        connections, *words = _words_by_bash(script, tmp_path)
        launcher, arguments = split_launch_command(read_shell_script(script.read_text()))
        assert [*launcher[1:], words[len(launcher) - 1], *arguments] == words
        assert connections == "1"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no folder of Megatron-LM core_v0.16.1")
def test_megatron_itself_validates_every_script(plans: list[Drawn], tmp_path: Path, monkeypatch: Any) -> None:
    """Its parser reads what bash hands it, its checks pass, and its configuration is made of it."""
    script = tmp_path / "job.sh"
    with validated(Path(os.environ["MEGATRON_LM"])) as configured:
        for drawn in plans:
            script.write_text(megatron_job_files(job_of(drawn, "megatron"))["megatron.sh"])
            connections, *words = _words_by_bash(script, tmp_path)
            monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
            first = next(i for i, word in enumerate(words) if word.endswith("pretrain_gpt.py"))
            arguments, config = configured(words[first + 1 :], drawn.cluster.num_gpus)
            assert (config.virtual_pipeline_model_parallel_size or 1) == drawn.plan.strategy.vpp
            log = tmp_path / "run.log"  # as _print_args writes it
            lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in vars(arguments).items()]
            dump = "\n".join(f"[default0]:{line}" for line in sorted(lines))
            log.write_text(re.sub(r"<class '(torch\.\w+)'>", r"\1", dump))  # a stand-in's name is its class's
            job = read_job("megatron", log)
            facts = job.framework.model_copy(update={"allocator": drawn.framework.allocator})
            again = plan_in_closed_form(job.workload, drawn.cluster, dict(job.strategy), facts)
            assert again.step_s == drawn.plan.step_s
            assert again.memory.by_component == drawn.plan.memory.by_component


CONDITIONAL = """#!/bin/bash
DTYPE="fp8"
EXTRA=()
if [[ "$DTYPE" == "fp8" ]]; then
  EXTRA+=("--fp8-format hybrid" "--fp8-recipe delayed")
elif [[ "$DTYPE" == "fp4" ]]; then
  EXTRA+=(--fp4-format e2m1)
else
  EXTRA+=(--fp16)
fi
if [ -n "$WANDB_API_KEY" ]; then
  LOGS+=(--wandb-project x)
fi
N=$((2 * 4))
cat <<EOF
torchrun other.py --num-layers 1 '
EOF
"""


def test_a_script_with_branches_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    body = BASE.removeprefix("#!/bin/bash\n").replace("--nproc_per_node=2", "--nproc_per_node $N")
    file.write_text(CONDITIONAL + body + "${EXTRA[*]} ${LOGS[@]}\n")
    job = read_job("megatron", file)
    assert (job.workload.precision.gemm, job.num_gpus) == ("fp8-delayed", 8)
    assert "--wandb-project" in job.notes[-1]


@pytest.mark.parametrize(
    "branch", ['if [ "$1" = x ]; then TP=2; fi', "for TP in 1 2; do true; done; TP=$TP", "TP=$(nproc)", "f() { TP=2; }"]
)
def test_what_a_shell_would_find_out_is_no_guess(branch: str, tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    file.write_text(f"{branch}\n{BASE} --tensor-model-parallel-size $TP\n")
    with pytest.raises(SpecError, match=r"TP|nproc") as error:
        read_job("megatron", file)
    assert "\n" not in str(error.value)


ENDLESS = {
    "doubled": "A=x\n" + "A=$A$A\n" * 60,
    "chained": "\n".join(f"V{i + 1}=$V{i}$V{i}$V{i}$V{i}" for i in range(40)),
    "long array": "A=(" + "x " * 110_000 + ")",
    "long word": "A='" + "x" * 500_000 + "'\n" + "B=$A$A$A$A$A$A\n" * 9,
    "many quotes": "'a'\"b\"" * 30_000,
    "nested ifs": "if [ x = x ]\n" * 20_000,
    "nested defaults": "${A:-" * 9_000,
    "open brackets": "$(" * 100_000,
    "empty lines": "\n" * 900_000,
}


@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS)
def test_a_script_that_would_take_for_ever_does_not(text: str, tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    uses = " --num-layers $A --hidden-size ${A[@]} --seq-length $V40 $B"
    file.write_text(f"{text}\ntorchrun pretrain_gpt.py{uses}\n"[: 2**20])
    with pytest.raises(SpecError) as error:
        read_job("megatron", file)
    assert "\n" not in str(error.value)


def test_files_that_are_too_large_or_no_job_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    for text, says in (
        ("#" * 2**27, "larger than 64 MiB"),
        ("echo hello\n", "no arguments"),
        ("A='x\n", "quote"),
        ("", "no arg"),
    ):
        file.write_text(text)
        with pytest.raises(SpecError, match=says):
            read_job("megatron", file)
    with pytest.raises(SpecError, match="no such file"):
        read_job("megatron", tmp_path / "none.sh")
    with pytest.raises(SpecError, match="did you mean megatron"):
        read_job("megatrn", file)
