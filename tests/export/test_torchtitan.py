"""Jobs exported to torchtitan: said whole, taken by torchtitan's own classes, and read back as they were."""

from __future__ import annotations

import ast
import dataclasses
import tomllib
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import mofa
from mofa.errors import SpecError
from mofa.export.entry import job_file_makers
from mofa.export.job import ExportJob
from mofa.export.read_job import read_job
from mofa.export.torchtitan.flavours import FLAVOURS
from mofa.export.torchtitan.job_settings import QWEN3_IS_WHOLE
from mofa.export.torchtitan.model_settings import MODELS, QWEN3, torchtitan_model_name
from mofa.export.torchtitan.toml_files import torchtitan_job_files
from mofa.export.torchtitan.torchtitan_table import TORCHTITAN
from mofa.measure.expand import ExpandedRun
from mofa.measure.torchtitan_job import torchtitan_job
from mofa.search.one_plan import plan_in_closed_form
from mofa.specs.run import RunBatch, RunSpec
from tests.export.frameworks import torchtitan_configs, wheel
from tests.export.jobs import assert_comes_back, job_of
from tests.export.random_plans import Drawn, drawn_plans

WORKLOADS = ["llama3-8b", "llama3-70b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v2-lite", "mixtral-8x7b"]
OPTIONS: dict[str, list[Any]] = {
    "allocator": ["native", "expandable"], "compile": [True, False], "loss_parallel": [True, False],
    "early_stop": [True, False],
    "data_parallel": ["fsdp", "ddp"], "optimizer": ["fused", "foreach", "for-loop"],
    "experts": ["grouped", "sequential"], "dispatcher": ["alltoall", "deepep"],
}  # fmt: skip
STRATEGIES: dict[str, list[Any]] = {
    "tp": [1, 1, 2, 4], "pp": [1, 1, 2, 4], "cp": [1, 1, 2], "ep": [1, 2, 4], "sp": [True],
    "recompute": ["none", "full", "ops", "every:2", "every:3"],
    "layout": ["", "", "pipeline-parallel-first-stage-less-layers:2"],
}  # fmt: skip
NUMBER = 50


@pytest.fixture(scope="module")
def plans() -> list[Drawn]:
    """Fifty random plans of models that torchtitan runs so."""
    drawn = drawn_plans("torchtitan", WORKLOADS, OPTIONS, STRATEGIES, seed=26)
    return list(islice((d for d in drawn if d.plan.strategy.pp == 1 or not _is_whole(d)), NUMBER))


def _is_whole(drawn: Drawn) -> bool:
    """Whether torchtitan 0.2.2 has no pipelines of the model."""
    return torchtitan_model_name(job_of(drawn, "torchtitan")) == QWEN3


def test_pipelines_of_models_that_have_none_are_refused(tmp_path: Path) -> None:
    """Exported and read: such a job ends with "does not support pipelining". Which models is what torchtitan says."""
    for name in MODELS:
        source = (wheel("torchtitan-0.2.2") / f"torchtitan/models/{name}/__init__.py").read_text()
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.keyword)]
        pipelined = [ast.unparse(call.value) for call in calls if call.arg == "pipelining_fn"]
        assert pipelined == (["None"] if name == QWEN3 else ["pipeline_llm"])
    workload, cluster = mofa.load_workload("qwen3-30b-a3b", global_batch=64), mofa.load_cluster("h100-hgx", 8)
    facts = mofa.load_framework("torchtitan")

    def job(strategy: str, to: str) -> ExportJob:
        return job_of(Drawn(workload, cluster, facts, plan_in_closed_form(workload, cluster, strategy, facts)), to)

    one, two = (job(f"pp={pp} ep=2 micro_batch=1 recompute=none", "torchtitan") for pp in (1, 2))
    for name, text in torchtitan_job_files(one).items():
        (tmp_path / name).write_text(text)
    toml = tmp_path / "torchtitan.toml"
    text = toml.read_text().replace("local_batch_size = 1\n", "local_batch_size = 8\n")
    toml.write_text(text.replace("pipeline_parallel_degree = 1", "pipeline_parallel_degree = 2"))
    with pytest.raises(SpecError, match=f"pipeline_parallel_degree is 2; {QWEN3_IS_WHOLE}"):
        read_job("torchtitan", toml)
    with pytest.raises(SpecError, match=rf"strategy.pp \(2\) .*{QWEN3_IS_WHOLE}; use 1, or --to torchtitan-0.3"):
        torchtitan_job_files(two)
    assert job_file_makers()["torchtitan-0.3"](job("pp=2 ep=2 micro_batch=1 recompute=none", "torchtitan-0.3"))


@pytest.mark.parametrize("number", range(NUMBER))
def test_a_plan_comes_back_as_it_was(plans: list[Drawn], number: int, tmp_path: Path) -> None:
    """Exported, read and estimated anew: the same strategy, layout, step and memory."""
    for name, text in torchtitan_job_files(job_of(plans[number], "torchtitan")).items():
        (tmp_path / name).write_text(text)
    job = read_job("torchtitan", tmp_path / "torchtitan.toml")
    assert_comes_back(job, plans[number])


def _set(config: Any, path: str, value: Any) -> None:
    section, _, name = path.partition(".")
    part = getattr(config, section)
    fields = {field.name: field for field in dataclasses.fields(part)}
    assert name in fields, path
    setattr(part, name, value)


def test_torchtitans_own_classes_take_every_plan(plans: list[Drawn]) -> None:
    """Each setting is a field of JobConfig, of its type; each argument one of the model's class."""
    folder = wheel("torchtitan-0.2.2")
    with torchtitan_configs(folder) as modules:
        for drawn in plans:
            files = torchtitan_job_files(job_of(drawn, "torchtitan"))
            raw = tomllib.loads(files["torchtitan.toml"])
            config = modules["job_config"].JobConfig()
            for section, settings in raw.items():
                for name, value in settings.items():
                    _set(config, f"{section}.{name}", value)
            made = _run_models(files["mofa_model.py"], modules)
            model = drawn.workload.model
            assert (made.dim, made.n_layers, made.vocab_size) == (model.hidden, model.num_layers, model.vocab)


def _run_models(text: str, modules: dict[str, Any]) -> Any:
    """The model arguments of an exported module, made by torchtitan's own classes."""
    tree = ast.parse(text)
    (node,) = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "MODELS"]
    namespace = {name: value for module in modules.values() for name, value in vars(module).items()}
    exec(compile(ast.Module([node], []), "mofa_model.py", "exec"), namespace)
    return namespace["MODELS"]["plan"]


def test_settings_have_torchtitans_names_and_defaults() -> None:
    folder = wheel("torchtitan-0.2.2")
    with torchtitan_configs(folder) as modules:
        config, moe = modules["job_config"].JobConfig(), modules["moe"].MoEArgs()
        for argument in TORCHTITAN.arguments.values():
            section, _, name = argument.name.partition(".")
            if section == "args":
                if name.startswith("moe_args."):
                    assert getattr(moe, name.removeprefix("moe_args.")) == argument.default or argument.default is None
            elif not argument.name.startswith("$"):
                assert attrgetter(f"{section}.{name}")(config) == argument.default, argument
        for name in TORCHTITAN.unmodelled:
            section, _, rest = name.partition(".")
            known = section == "args" or hasattr(getattr(config, section), rest)
            assert known or name in ONLY_IN_0_3, name


ONLY_IN_0_3 = ("compile.enable_async_tensor_parallel", "parallelism.enable_fsdp_symm_mem", "debug.detect_anomaly")


def test_flavours_are_torchtitans() -> None:
    """Sizes of its models, as its registry says them."""
    folder = wheel("torchtitan-0.2.2")
    for name, flavours in FLAVOURS.items():
        tree = ast.parse((folder / "torchtitan" / "models" / name / "__init__.py").read_text())
        (own,) = [n.value for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Dict)]
        assert [key.value for key in own.keys if isinstance(key, ast.Constant)] == list(flavours)
        for call, sizes in zip(own.values, flavours.values(), strict=True):
            assert isinstance(call, ast.Call)
            said: dict[str, Any] = {}
            for keyword in call.keywords:
                if isinstance(keyword.value, ast.Call):
                    said |= {f"moe_args.{k.arg}": ast.literal_eval(k.value) for k in keyword.value.keywords}
                else:
                    said[str(keyword.arg)] = ast.literal_eval(keyword.value)
            assert {key: said[key] for key in sizes} == sizes
            assert {*said} - {*sizes} <= {"rope_theta", "max_seq_len", "mscale", "attn_mask_type",
                                          "moe_args.route_scale"}  # fmt: skip


def test_a_job_is_configured_as_mofas_own_runs_are(plans: list[Drawn]) -> None:
    """What ``mofa measure`` tells torchtitan of a plan, which predictions were held against, the export says too."""
    compared = 0
    for drawn in plans:
        workload, cluster, framework, plan = drawn
        s = plan.strategy
        batch = RunBatch.model_construct(
            seq_len=workload.batch.seq_len, global_=workload.batch.global_batch, micro=s.micro_batch
        )
        run = RunSpec.model_construct(
            id="x", gpus=cluster.num_gpus, precision=workload.precision, optimizer=workload.optimizer,
            routing=workload.routing, strategy={"zero": s.zero}, batch=batch,
        )  # fmt: skip
        micro_batches = workload.batch.global_batch // (s.dp * s.micro_batch)
        try:
            told = torchtitan_job(ExpandedRun(run, workload.model, framework, s, micro_batches, cluster.gpu))
        except SpecError:
            continue
        values = TORCHTITAN.write_arguments(job_of(drawn, "torchtitan"))
        assert values["args.model"] == told["model"]
        flat = {f"{section}.{name}": v for section, settings in told["job"].items() for name, v in settings.items()}
        skipped = ("training.steps", "optimizer.lr", "debug.seed", "debug.moe_force_load_balance")
        for name, value in flat.items():
            if name not in skipped:
                assert values.get(name, TORCHTITAN.argument_named(name).default) == value or _idle(name, drawn), name
        arguments = dict(told["args"])
        arguments |= {f"moe_args.{k}": v for k, v in arguments.pop("moe_args", {}).items()}
        for name, value in arguments.items():
            if name != "rope_theta" and value is not None:
                assert values[f"args.{name}"] == value, name
        compared += 1
    assert compared >= 12


def _idle(name: str, drawn: Drawn) -> bool:
    """Whether a setting does nothing in a job."""
    s = drawn.plan.strategy
    return (
        (name.startswith("parallelism.pipeline") and s.pp == 1)
        or (name.startswith("parallelism.expert") and drawn.workload.model.moe is None)
        or (name == "compile.components" and not drawn.framework.compile)
        or name == "activation_checkpoint.selective_ac_option"
    )


BASE = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
[metrics]
log_freq = 10
"""


def test_a_job_of_somebody_is_read(tmp_path: Path) -> None:
    """A plain TOML of one of torchtitan's models."""
    file = tmp_path / "job.toml"
    file.write_text(BASE)
    job = read_job("torchtitan", file, 8)
    model = job.workload.model
    assert (model.num_layers, model.hidden, model.mlp.ffn_hidden, model.vocab) == (32, 4096, 14336, 128256)
    assert job.strategy["recompute"] == "every:2" and job.workload.batch.global_batch == 4
    assert "metrics.log_freq" in job.notes[-1]


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("local_batch_size = 1", 'local_batch_size = "1"', "training.local_batch_size"),
        ("[metrics]", "[optimizer]\nearly_step_in_backward = true\n[metrics]", "early_step_in_backward"),
        ("[metrics]", '[model.x]\n[optimizer]\nname = "Muon"\n[metrics]', "optimizer.name"),
        ('mode = "selective"', 'mode = "memory_budget"', "activation_checkpoint.mode"),
        ('flavor = "8B"', 'flavor = "8b"', "did you mean 8B?"),
        ('flavor = "8B"', 'flavor = "8B_flex"', "attn_type"),
        ('name = "llama3"', 'name = "llama9"', "custom_import"),
        ('name = "llama3"', 'name = ["llama3"]', "model.name"),
        ("[training]", "[training", "is no TOML"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(old: str, new: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(BASE.replace(old, new))
    with pytest.raises(SpecError, match=named) as error:
        read_job("torchtitan", file, 8)
    assert "\n" not in str(error.value)


def test_shards_that_are_what_is_left_need_the_gpus(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(BASE)
    with pytest.raises(SpecError, match="--gpus"):
        read_job("torchtitan", file)
