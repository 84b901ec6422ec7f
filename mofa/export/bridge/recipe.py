"""A job as a recipe in Python that Megatron-Bridge's ``pretrain`` takes, and a script that starts it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from mofa.export.bridge import VERSION
from mofa.export.bridge.config_fields import bridge_config_fields
from mofa.export.file_header import as_comment, header_lines
from mofa.export.job import ExportJob
from mofa.export.megatron import VERSION as CORE_VERSION
from mofa.export.megatron.megatron_table import MEGATRON
from mofa.export.slurm import FIRST_STEPS, STEPS_A_LOG, slurm_script, steps_comment_text

RECIPE, SCRIPT, SLURM = "mofa_recipe.py", "megatron_bridge.sh", "megatron_bridge.slurm"
_CLASSES = {
    "train": "TrainingConfig", "optimizer": "OptimizerConfig", "ddp": "DistributedDataParallelConfig",
    "rerun_state_machine": "RerunStateMachineConfig", "mixed_precision": "MixedPrecisionConfig",
    "dataset": "MockGPTDatasetConfig", "tokenizer": "TokenizerConfig", "dist": "DistributedInitConfig",
    "rng": "RNGConfig",
}  # fmt: skip
"""Class of each section but the model's."""
_IF_NEEDED = ("dist", "rng")
"""Sections that a recipe has where the plan says something of them."""
_RNG_IMPORT = "    RNGConfig,\n"
FREE_FIELDS: Mapping[str, Mapping[str, str]] = {
    "train": {"train_iters": "", "eval_iters": "0", "eval_interval": "1000"},
    "optimizer": {"lr": "1e-4", "min_lr": "1e-5", "weight_decay": "0.1", "adam_beta2": "0.95", "bf16": "True",
                  "params_dtype": "torch.bfloat16"},
    "dataset": {"random_seed": "1234", "reset_position_ids": "False", "reset_attention_mask": "False",
                "eod_mask_loss": "False", "dataloader_type": '"single"', "split": '"1,1,1"'},
}  # fmt: skip
"""What is no part of a plan, by section."""


def bridge_job_files(job: ExportJob) -> dict[str, str]:
    """The files of a job on Megatron-Bridge by name.

    Raises
    ------
    SpecError
        If a choice of the job has no field.
    """
    values = MEGATRON.write_arguments(job)
    fields = bridge_config_fields(job, values)
    head = as_comment(header_lines(job, f"Megatron-Bridge {VERSION} with Megatron-Core {CORE_VERSION}"))
    environment = [f"export {name[1:]}={shlex.quote(str(v))}" for name, v in values.items() if name.startswith("$")]
    script = "\n".join(
        [
            "#!/usr/bin/env bash",
            head + "set -euo pipefail",
            "",
            'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"',
            f"NODES={job.num_nodes}",
            f"GPUS_PER_NODE={job.gpus_per_node}",
            "",
            "# What the prediction rests on",
            *environment,
            "",
            'torchrun --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NODES" --node-rank "${NODE_RANK:-0}" \\',
            '  --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \\',
            f'  "$HERE/{RECIPE}" "$@"',
            "",
        ]
    )
    return {
        RECIPE: head + bridge_recipe_text(job, fields),
        SCRIPT: script,
        SLURM: slurm_script(job, SCRIPT, "megatron_bridge"),
    }


def bridge_recipe_text(job: ExportJob, fields: Mapping[str, Any]) -> str:
    """The recipe: a function that returns the container, and a call of ``pretrain``."""
    provider = "MLAModelProvider" if job.has_latent_attention else "GPTModelProvider"
    module = "mla_provider" if provider.startswith("MLA") else "gpt_provider"
    needed = {path.partition(".")[0] for path in fields}
    written = [section for section in _CLASSES if section not in _IF_NEEDED or section in needed]
    sections = "".join(
        f"        {section}={_CLASSES[section]}(\n{_lines(fields, section, job)}        ),\n" for section in written
    )
    return f'''
import torch
from megatron.bridge.models.{module} import {provider}
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RerunStateMachineConfig,
{_RNG_IMPORT if "rng" in needed else ""}    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig
from megatron.bridge.training.pretrain import pretrain
from megatron.core.activations import squared_relu
from megatron.core.transformer.enums import AttnBackend
from torch.nn import functional


def recipe() -> ConfigContainer:
    """The plan; data, tokenizer, learning rate, checkpoints and logs are not of it, and yours to choose."""
    return ConfigContainer(
        model={provider}(
{_lines(fields, "model", job)}        ),
{sections}        scheduler=SchedulerConfig(lr_decay_style="cosine", lr_warmup_iters=0),
        logger=LoggerConfig(log_interval={STEPS_A_LOG}),
        checkpoint=CheckpointConfig(save=None, load=None),
    )


if __name__ == "__main__":
    pretrain(recipe(), forward_step)
'''


def _lines(fields: Mapping[str, Any], section: str, job: ExportJob) -> str:
    """Keyword arguments of a section, those of the plan first."""
    of_plan = {path.partition(".")[2]: value for path, value in fields.items() if path.startswith(f"{section}.")}
    lines = [f"            {name}={value!r}," for name, value in of_plan.items()]
    free = dict(FREE_FIELDS.get(section, {}))
    if "train_iters" in free:
        free["train_iters"] = str(FIRST_STEPS)
    if free:
        says = f"to see how fast it is{steps_comment_text(job)}" if "train_iters" in free else ""
        lines += [
            f"            # not of the plan {says}".rstrip(),
            *(f"            {name}={text}," for name, text in free.items()),
        ]
    return "\n".join(lines) + "\n"
