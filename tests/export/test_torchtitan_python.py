"""Jobs exported to torchtitan 0.3.0: its own classes run the Python config, and it is read back as it was."""

from __future__ import annotations

import importlib
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mofa.errors import SpecError
from mofa.export.read_job import read_job
from mofa.export.torchtitan.python_file import torchtitan_python_job_files
from mofa.export.torchtitan.python_table import TORCHTITAN_PYTHON
from tests.export.frameworks import torchtitan_python, wheel
from tests.export.jobs import assert_comes_back, job_of
from tests.export.random_plans import Drawn, drawn_plans

WORKLOADS = ["llama3-8b", "llama3-70b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v2-lite"]
OPTIONS: dict[str, list[Any]] = {
    "allocator": ["native", "expandable"], "compile": [True, False], "data_parallel": ["fsdp", "ddp"],
    "optimizer": ["fused", "foreach", "for-loop"], "dispatcher": ["alltoall", "deepep"],
}  # fmt: skip
STRATEGIES: dict[str, list[Any]] = {
    "tp": [1, 1, 2, 4], "pp": [1, 1, 2, 4], "cp": [1, 1, 2], "ep": [1, 2, 4], "sp": [True],
    "recompute": ["none", "full", "ops"], "layout": ["", "", "pipeline-parallel-first-stage-less-layers:2"],
}  # fmt: skip
NUMBER = 50


@pytest.fixture(scope="module")
def plans() -> list[Drawn]:
    """Fifty random plans."""
    return list(islice(drawn_plans("torchtitan", WORKLOADS, OPTIONS, STRATEGIES, seed=30), NUMBER))


@pytest.mark.parametrize("number", range(NUMBER))
def test_a_plan_comes_back_as_it_was(plans: list[Drawn], number: int, tmp_path: Path) -> None:
    """Exported, read and estimated anew: the same strategy, layout, step and memory."""
    for name, text in torchtitan_python_job_files(job_of(plans[number], "torchtitan-0.3")).items():
        (tmp_path / name).write_text(text)
    job = read_job("torchtitan", tmp_path / "mofa_job.py")
    assert_comes_back(job, plans[number])


POLICIES = {"none": "NoneType", "full": "FullAC.Config", "ops": "SelectiveAC.Config"}


def test_torchtitans_own_classes_run_every_config(plans: list[Drawn]) -> None:
    """The file is run with torchtitan's own modules: builders of layers, configuration classes and their checks."""
    folder = wheel("torchtitan-0.3.0")
    laid_out = 0
    with torchtitan_python(folder):
        for drawn in plans:
            text = torchtitan_python_job_files(job_of(drawn, "torchtitan-0.3"))["mofa_job.py"]
            namespace: dict[str, Any] = {"__name__": "mofa_job"}
            exec(compile(text, "mofa_job.py", "exec"), namespace)
            config, model, s = namespace["plan"](), drawn.workload.model, drawn.plan.strategy
            assert config.parallelism.tensor_parallel_degree == s.tp
            assert config.parallelism.pipeline_parallel_degree == s.pp
            assert config.training.seq_len == drawn.workload.batch.seq_len
            parts = config.parallelism.module_fqns_per_model_part
            if parts is not None:
                assert len(parts) == s.pp * s.vpp and parts[0][0] == "tok_embeddings" and parts[-1][-1] == "lm_head"
                assert all(hasattr(config.model_spec.model, name.split(".")[0]) for part in parts for name in part)
                laid_out += 1
            assert type(config.activation_checkpoint).__qualname__ == POLICIES[s.recompute]
            built = config.model_spec.model
            assert (built.dim, len(built.layers), built.vocab_size) == (model.hidden, model.num_layers, model.vocab)
            for number, layer in enumerate(built.layers):
                assert (layer.moe is not None) == model.is_moe_layer(number)
                assert type(layer.attention.inner_attention).__qualname__ == "ScaledDotProductAttention.Config"
            last = built.layers[-1]
            if model.moe is not None:
                assert last.moe.num_experts == model.moe.num_experts
                assert last.moe.router.top_k == model.moe.top_k
                assert last.moe.routed_experts.inner_experts.hidden_dim == model.moe.expert_hidden
                assert (last.moe.shared_experts is not None) == (model.moe.shared_hidden > 0)
            else:
                assert last.feed_forward.w1.out_features == model.mlp.ffn_hidden
    assert laid_out


def test_settings_have_torchtitans_names_and_defaults() -> None:
    folder = wheel("torchtitan-0.3.0")
    with torchtitan_python(folder):
        configs = importlib.import_module("torchtitan.config.configs")
        sections = {"training": configs.TrainingConfig(), "parallelism": configs.ParallelismConfig(),
                    "compile": configs.CompileConfig()}  # fmt: skip
        for argument in TORCHTITAN_PYTHON.arguments.values():
            section, _, name = argument.name.partition(".")
            if section in sections:
                assert getattr(sections[section], name) == argument.default, argument


CONFIG = """from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

BATCH = 2


def llama3_8b():
    config = Trainer.Config(
        model_spec=model_registry("8B", attn_backend="sdpa"),
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(local_batch_size=BATCH, seq_len=8192, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
    )
    config.training.global_batch_size = 64
    return config
"""


def test_a_config_of_somebody_is_read(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(CONFIG)
    job = read_job("torchtitan", file, 8)
    assert (job.workload.model.num_layers, job.workload.batch.global_batch) == (32, 64)
    assert (job.strategy["micro_batch"], job.strategy["recompute"]) == (2, "full")
    assert any("fuse_qkv" in note for note in job.notes)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('attn_backend="sdpa"', 'attn_backend="flex"', "attn_type"),
        ('"8B"', '"9B"', "model.flavor"),
        ('"8B"', "flavour()", "would have to be computed"),
        ("local_batch_size=BATCH", "local_batch_size=batch()", "training.local_batch_size"),
        ("default_adamw(lr=3e-4)", "muon()", "optimizer"),
        ("FullAC.Config()", "MemoryBudgetAC.Config()", "activation_checkpoint"),
        ("tensor_parallel_degree=2", "enable_fsdp_symm_mem=True", "enable_fsdp_symm_mem"),
        ("config = Trainer.Config(", "config = x(", "0 calls"),
        ("def llama3_8b", "def def", "is no Python"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(old: str, new: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(CONFIG.replace(old, new))
    with pytest.raises(SpecError, match=named) as error:
        read_job("torchtitan", file, 8)
    assert "\n" not in str(error.value)


def test_nothing_of_a_config_is_run(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text("raise SystemExit(1)\n" + CONFIG)
    assert read_job("torchtitan", file, 8).strategy["recompute"] == "full"
