"""A job as torchtitan 0.2.2 reads it: a TOML, the model's sizes in a Python module, a script that starts it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from mofa.export.file_header import as_comment, header_lines
from mofa.export.job import ExportJob
from mofa.export.slurm import FIRST_STEPS, STEPS_A_LOG, slurm_script, steps_comment_text
from mofa.export.torchtitan import VERSION
from mofa.export.torchtitan.model_settings import DEEPSEEK, LLAMA3, MODEL, QWEN3
from mofa.export.torchtitan.torchtitan_table import TORCHTITAN

TOML, MODULE, SCRIPT, SLURM = "torchtitan.toml", "mofa_model", "torchtitan.sh", "torchtitan.slurm"
FLAVOR = "plan"
"""The model's name in the registry that the module adds to."""
ARGUMENT_CLASSES = {LLAMA3: "TransformerModelArgs", QWEN3: "Qwen3ModelArgs", DEEPSEEK: "DeepSeekV3ModelArgs"}
"""Class of each model's arguments, in models/NAME/model/args.py."""


def torchtitan_job_files(job: ExportJob) -> dict[str, str]:
    """The files of a job on torchtitan 0.2.2 by name.

    Raises
    ------
    SpecError
        If a choice of the job has no setting.
    """
    values = TORCHTITAN.write_arguments(job)
    head = as_comment(header_lines(job, f"torchtitan {VERSION}"))
    settings = {n: value for n, value in values.items() if not n.startswith(("$", "args.")) and value is not None}
    return {
        TOML: head + settings_as_toml(settings, steps_comment_text(job)),
        f"{MODULE}.py": head + model_module_text(values),
        SCRIPT: torchrun_script_text(job, values, f'-m torchtitan.train --job.config_file "$HERE/{TOML}"', head),
        SLURM: slurm_script(job, SCRIPT, "torchtitan"),
    }


def settings_as_toml(settings: Mapping[str, Any], steps_take: str) -> str:
    """Settings by section, then what is no part of a plan."""
    sections: dict[str, list[str]] = {
        "job": ['dump_folder = "./outputs"'],
        "model": ['name = "mofa"', f'flavor = "{FLAVOR}"'],
    }
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, []).append(f"{key} = {_toml(value)}")
    sections["training"] += [
        "# Not of the plan, and yours to choose: mock is random tokens, else a dataset of torchtitan with a tokenizer",
        'dataset = "mock"',
        f"steps = {FIRST_STEPS} # to see how fast it is{steps_take}",
    ]
    sections["optimizer"] += ["# Not of the plan", "lr = 3e-4"]
    sections["lr_scheduler"] = ["# Not of the plan", f"warmup_steps = {FIRST_STEPS // 5}"]
    sections["metrics"] = ["# Not of the plan", f"log_freq = {STEPS_A_LOG}"]
    sections["experimental"] = ["# Registers the model's sizes", f'custom_import = "{MODULE}"']
    return "\n" + "\n\n".join("\n".join([f"[{name}]", *lines]) for name, lines in sections.items()) + "\n"


def _toml(value: Any) -> str:
    """A value of TOML: of these JSON's writing is the same."""
    return json.dumps(value)


def model_module_text(values: Mapping[str, Any]) -> str:
    """A Python module that registers the model as ``mofa``, with random tokens where the dataset is ``mock``."""
    name = values[MODEL.name]
    kind = ARGUMENT_CLASSES[name]
    imports = f"from torchtitan.models.{name}.model.args import {kind}\n"
    if any(key.startswith("args.moe_args.") for key in values):
        imports = f"from torchtitan.models.moe import MoEArgs\n{imports}"
    return f'''
import dataclasses

import torch
{imports}from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

MODELS = {{
    "{FLAVOR}": {_call(kind, values)},
}}
SPEC = get_train_spec("{name}")


class MockTokens(BaseDataLoader):
    """Endless batches of random tokens, a few made once and given in turn."""

    def __init__(self, job_config, dp_rank):
        training = job_config.training
        shape = (training.local_batch_size, training.seq_len + 1)
        generator = torch.Generator().manual_seed(dp_rank)
        vocab = MODELS[job_config.model.flavor].vocab_size
        self.batches = [torch.randint(vocab, shape, generator=generator) for _ in range(4)]

    def __iter__(self):
        while True:
            for tokens in self.batches:
                yield {{"input": tokens[:, :-1].contiguous()}}, tokens[:, 1:].contiguous()

    def state_dict(self):
        return {{}}

    def load_state_dict(self, state_dict):
        pass


def build_dataloader(*, dp_world_size, dp_rank, tokenizer, job_config, **options):
    if job_config.training.dataset == "mock":
        return MockTokens(job_config, dp_rank)
    return SPEC.build_dataloader_fn(
        dp_world_size=dp_world_size, dp_rank=dp_rank, tokenizer=tokenizer, job_config=job_config, **options
    )


def build_tokenizer(job_config):
    return None if job_config.training.dataset == "mock" else SPEC.build_tokenizer_fn(job_config)


register_train_spec(
    "mofa",
    dataclasses.replace(
        SPEC,
        model_args=MODELS,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=build_tokenizer,
        state_dict_adapter=None,
    ),
)
'''


def _call(kind: str, values: Mapping[str, Any]) -> str:
    """The call that makes a model's arguments."""
    lines, experts = [], []
    for name, value in values.items():
        if name == MODEL.name or not name.startswith("args."):
            continue
        if name.startswith("args.moe_args."):
            experts.append(f"            {name.removeprefix('args.moe_args.')}={value!r},")
        else:
            lines.append(f"        {name.removeprefix('args.')}={value!r},")
    if experts:
        lines += ["        moe_args=MoEArgs(", *experts, "        ),"]
    return "\n".join([f"{kind}(", *lines, "    )"])


def torchrun_script_text(job: ExportJob, values: Mapping[str, Any], program: str, head: str) -> str:
    """A shell script that starts a program of torchtitan's by torchrun."""
    environment = [f"export {n[1:]}={shlex.quote(str(value))}" for n, value in values.items() if n[0] == "$" and value]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            head + "set -euo pipefail",
            "",
            'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"',
            'export PYTHONPATH="$HERE:${PYTHONPATH:-}"',
            f"NODES={job.num_nodes}",
            f"GPUS_PER_NODE={job.gpus_per_node}",
            "",
            "# What the prediction rests on",
            *environment,
            "unset CUDA_DEVICE_MAX_CONNECTIONS",
            "",
            'torchrun --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NODES" --node-rank "${NODE_RANK:-0}" \\',
            '  --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \\',
            f'  {program} "$@"',
            "",
        ]
    )
