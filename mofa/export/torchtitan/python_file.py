"""A job as torchtitan 0.3.0 reads it: a Python config, and a script that starts it."""

from __future__ import annotations

import pprint
from collections.abc import Mapping
from typing import Any

from mofa.export.file_header import as_comment, header_lines
from mofa.export.job import ExportJob
from mofa.export.slurm import FIRST_STEPS, STEPS_A_LOG, slurm_script, steps_comment_text
from mofa.export.torchtitan import EXPERIMENTAL_VERSION, VERSION
from mofa.export.torchtitan.model_settings import DEEPSEEK, LLAMA3, MODEL
from mofa.export.torchtitan.python_table import BACKEND, IMPLEMENTATION, POLICY, TORCHTITAN_PYTHON
from mofa.export.torchtitan.toml_files import torchrun_script_text

MODULE, FUNCTION, SCRIPT, SLURM = "mofa_job", "plan", "torchtitan.sh", "torchtitan.slurm"
SIZES = "SIZES"
"""The name under which the file has the model's sizes."""
_CLASSES = {"training": "TrainingConfig", "parallelism": "ParallelismConfig", "compile": "CompileConfig"}
_GROUPED = """    layers = {builder}(
        n_layers=SIZES["n_layers"],
        dim=SIZES["dim"],
        n_heads=SIZES["n_heads"],
        n_kv_heads=SIZES["n_kv_heads"],
{more}        fuse_qkv=False,
        attn_backend="flex",
        rope={rope}.Config(dim={head}, max_seq_len={rows}, theta=500000.0),
    )
"""


def torchtitan_python_job_files(job: ExportJob) -> dict[str, str]:
    """The files of a job on torchtitan 0.3.0 by name.

    Raises
    ------
    SpecError
        If a choice of the job has no setting.
    """
    values = TORCHTITAN_PYTHON.write_arguments(job)
    head = as_comment([
        *header_lines(job, f"torchtitan {EXPERIMENTAL_VERSION}"),
        f"Predicted with facts of torchtitan {VERSION}, which mofa read and measured; settings below keep to it.",
    ])  # fmt: skip
    launch = f"-m torchtitan.train --module {MODULE} --config {FUNCTION}"
    return {
        f"{MODULE}.py": head + _config_text(job, values),
        SCRIPT: torchrun_script_text(job, values, launch, head),
        SLURM: slurm_script(job, SCRIPT, "torchtitan"),
    }


def _config_text(job: ExportJob, values: Mapping[str, Any]) -> str:
    """The Python config: the model's sizes and its builder, a loader of random tokens, the settings."""
    name = values[MODEL.name]
    policy = values[POLICY.name]
    sections = {section: _section(values, section) for section in _CLASSES}
    sections["training"] += (
        f"            steps={FIRST_STEPS},  # not of the plan: to see how fast it is{steps_comment_text(job)}\n"
    )
    settings = "".join(
        f"        {section}={kind}(\n{sections[section]}        ),\n" for section, kind in _CLASSES.items()
    )
    return f'''
from dataclasses import dataclass

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models import {name} as model
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer

{SIZES} = {pprint.pformat(_sizes(values), sort_dicts=False)}


class NoTokenizer(BaseTokenizer):
    """For random tokens; another one for text."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config=None, **_):
        super().__init__()
        self.eos_id = 0

    def encode(self, *_, **__):
        return []

    def decode(self, *_, **__):
        return ""

    def get_vocab_size(self):
        return {SIZES}["vocab_size"]


class MockTokens(BaseDataLoader):
    """Endless batches of random tokens, a few made once and given in turn."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **_):
        generator = torch.Generator().manual_seed(dp_rank)
        shape = (local_batch_size, seq_len + 1)
        self.batches = [torch.randint({SIZES}["vocab_size"], shape, generator=generator) for _ in range(4)]

    def __iter__(self):
        while True:
            for tokens in self.batches:
                yield {{"input": tokens[:, :-1].contiguous()}}, tokens[:, 1:].contiguous()

    def state_dict(self):
        return {{}}

    def load_state_dict(self, state_dict):
        pass


def model_config():
{_layers_text(job, name, values)}    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
{_experts_text(values)}{_model_text(job, name)}

def model_spec():
    spec = model.model_registry("debugmodel")
    spec.flavor = "{FUNCTION}"
    spec.model = model_config()
    spec.state_dict_adapter = None
    return spec


def {FUNCTION}() -> Trainer.Config:
    optimizer = default_adamw(lr=3e-4)  # the rate is not of the plan
    optimizer.implementation = "{values[IMPLEMENTATION.name]}"
    return Trainer.Config(
        model_spec=model_spec(),
        loss=CrossEntropyLoss.Config(global_vocab_size={SIZES}["vocab_size"]),
        optimizer=optimizer,
{settings}        activation_checkpoint={"None" if policy == "none" else f"{policy}()"},
        # Not of the plan, and yours to choose: data, tokenizer, learning rate, checkpoints, logs
        dataloader=MockTokens.Config(),
        tokenizer=NoTokenizer.Config(),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps={FIRST_STEPS // 5}),
        metrics=MetricsProcessor.Config(log_freq={STEPS_A_LOG}),
    )
'''


def _section(values: Mapping[str, Any], section: str) -> str:
    prefix = f"{section}."
    return "".join(
        f"            {name.removeprefix(prefix)}={value!r},\n"
        for name, value in values.items()
        if name.startswith(prefix) and value is not None
    )


def _sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """The model's sizes by name, those of experts in a dictionary of their own."""
    sizes: dict[str, Any] = {}
    for name, value in values.items():
        key = name.removeprefix("args.")
        if key.startswith("moe_args."):
            sizes.setdefault("moe_args", {})[key.removeprefix("moe_args.")] = value
        elif key != name and key not in ("attn_type", "fuse_qkv"):
            sizes[key] = value
    return sizes


def _layers_text(job: ExportJob, name: str, values: Mapping[str, Any]) -> str:
    """The statement that builds the layers' configs by torchtitan's own builders."""
    rows = job.workload.batch.seq_len
    if name == LLAMA3:
        more = f"        hidden_dim={job.model.mlp.ffn_hidden},\n"
        head = 'SIZES["dim"] // SIZES["n_heads"]'
        return _GROUPED.format(
            builder="model._build_llama3_layers", more=more, rope="model.ComplexRoPE", head=head, rows=rows
        )
    if name == DEEPSEEK:
        return f"""    experts = SIZES["moe_args"]
    layers = model._build_dsv3_layers(
        n_layers=SIZES["n_layers"],
        n_dense_layers=SIZES["n_dense_layers"],
        dim=SIZES["dim"],
        n_heads=SIZES["n_heads"],
        q_lora_rank=SIZES["q_lora_rank"],
        kv_lora_rank=SIZES["kv_lora_rank"],
        qk_nope_head_dim=SIZES["qk_nope_head_dim"],
        qk_rope_head_dim=SIZES["qk_rope_head_dim"],
        v_head_dim=SIZES["v_head_dim"],
        mscale=1.0,
        dense_hidden_dim=SIZES["inter_dim"],
        moe_hidden_dim=SIZES["moe_inter_dim"],
        num_experts=experts["num_experts"],
        num_shared_experts=experts["num_shared_experts"] or 1,
        router_top_k=experts["top_k"],
        router_score_func=experts["score_func"],
        attn_backend="flex",
        moe_comm_backend=SIZES["moe_comm_backend"],
        non_blocking_capacity_factor=None,
        rope=model.ComplexRoPE.Config(dim=SIZES["qk_rope_head_dim"], max_seq_len={rows}, theta=10000.0),
    )
"""
    more = '        head_dim=SIZES["head_dim"],\n'
    if BACKEND.name in values:
        more += """        moe_hidden_dim=SIZES["moe_inter_dim"],
        num_experts=SIZES["moe_args"]["num_experts"],
        top_k=SIZES["moe_args"]["top_k"],
        moe_comm_backend=SIZES["moe_comm_backend"],
"""
    else:
        more += '        hidden_dim=SIZES["hidden_dim"],\n'
    builder = "model._build_qwen3_moe_layers" if BACKEND.name in values else "model._build_qwen3_layers"
    built = _GROUPED.format(
        builder=builder, more=more, rope="model.CosSinRoPE", head='SIZES["head_dim"]', rows=rows
    )  # fmt: skip
    return ('    experts = SIZES["moe_args"]\n' if BACKEND.name in values else "") + built


def _experts_text(values: Mapping[str, Any]) -> str:
    """Statements that give experts and routers what the builders do not take."""
    if BACKEND.name not in values:
        return ""
    return """        if layer.moe is None:
            continue
        layer.moe.load_balance_coeff = experts["load_balance_coeff"]
        layer.moe.router.score_func = experts["score_func"]
        layer.moe.router.route_norm = experts["route_norm"]
        layer.moe.router.gate.bias = experts["gate_bias"]
        layer.moe.router.num_expert_groups = experts.get("num_expert_groups")
        layer.moe.router.num_limited_groups = experts.get("num_limited_groups")
        if not experts["num_shared_experts"]:
            layer.moe.shared_experts = None
"""


def _model_text(job: ExportJob, name: str) -> str:
    """The statement that returns the model's config: that of the smallest flavour with other sizes."""
    tied = "True" if job.model.tied_embeddings else "False"
    more = ", mtp_layers=[]" if name == DEEPSEEK else ""
    kind = {LLAMA3: "Llama3Model", DEEPSEEK: "DeepSeekV3Model"}.get(name, "Qwen3Model")
    norm = "model._qwen3_norm(dim)" if kind == "Qwen3Model" else (
        "model.RMSNorm.Config(normalized_shape=dim, param_init=model._NORM_INIT)"
    )  # fmt: skip
    init = "model._LINEAR_INIT" if kind == "Qwen3Model" else "model._output_linear_init(dim)"
    embedding = "model._EMBEDDING_SKIP_INIT" if job.model.tied_embeddings else "model._EMBEDDING_INIT"
    return f"""    dim, vocab = SIZES["dim"], SIZES["vocab_size"]
    return model.{kind}.Config(
        dim=dim,
        vocab_size=vocab,
        enable_weight_tying={tied},
        tok_embeddings=model.Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init={embedding}),
        norm={norm},
        lm_head=model.Linear.Config(in_features=dim, out_features=vocab, param_init={init}),
        layers=layers{more},
    )
"""
