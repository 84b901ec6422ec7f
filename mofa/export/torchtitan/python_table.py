"""The table of torchtitan 0.3.0's settings, which its Python config is written and read by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mofa.export.arguments import (
    Argument,
    ArgumentTable,
    AssumedArgument,
    FieldRow,
    FixedField,
    GivenArguments,
    UnmodelledArgument,
    rows_if_present,
    same_value_row,
    translated_row,
)
from mofa.export.job import ExportJob
from mofa.export.torchtitan.job_settings import EP, SHARED_ROWS, TP, pipeline_modules_row
from mofa.export.torchtitan.model_settings import MODEL_ROWS, QWEN3, job_has_experts, torchtitan_model_name
from mofa.export.torchtitan.torchtitan_table import ASSUMED, FIXED, TORCHTITAN, UNMODELLED

POLICY = Argument("activation_checkpoint", "text", "SelectiveAC.Config")
"""The class of the policy, ``none`` for none."""
IMPLEMENTATION = Argument("optimizer.implementation", "text", "fused")
BACKEND = Argument("args.moe_comm_backend", "text", "standard")
OUTPUT = "lm_head"
"""The output's name among a model's modules (distributed/pipeline_parallel.py); 0.2.2 calls it output."""
_POLICIES = {"none": "none", "full": "FullAC.Config", "ops": "SelectiveAC.Config"}


def _write_recompute(job: ExportJob) -> Mapping[str, Any]:
    mode = job.recompute
    if mode.kind not in _POLICIES or mode.layers is not None:
        raise job.refusal(f"strategy.recompute ({mode})", "0.3.0 has none, full and ops; use one of them")
    return {POLICY.name: _POLICIES[mode.kind]}


def _read_recompute(given: GivenArguments) -> Mapping[str, Any]:
    own = {word: kind for kind, word in _POLICIES.items()}
    if (word := given[POLICY.name]) not in own:
        raise given.refusal(f"activation_checkpoint ({word}) is not modelled", f"what is: {', '.join(own)}")
    return {"strategy.recompute": own[word]}


def _write_etp(job: ExportJob) -> Mapping[str, Any]:
    s = job.strategy
    own = s.tp if s.ep == 1 else 1
    if s.etp != own:
        raise job.refusal(
            f"strategy.etp ({s.etp}) with tp {s.tp} and ep {s.ep}",
            f"0.3.0 splits experts over tp where ep is 1, and not where it is more; use {own}",
        )
    return {}


def _read_etp(given: GivenArguments) -> Mapping[str, Any]:
    return {"strategy.etp": given[TP.name] if given[EP.name] == 1 else 1}


def _write_optimizer(job: ExportJob) -> Mapping[str, Any]:
    return {IMPLEMENTATION.name: job.workload.optimizer.implementation or job.framework.optimizer}


def _check_head_norms(job: ExportJob) -> Mapping[str, Any]:
    if torchtitan_model_name(job) == QWEN3 and not job.model.attention.qk_norm:
        raise job.refusal(
            "model.attention.qk_norm (false) with experts", "qwen3 of 0.3.0 has norms over heads; use true"
        )
    return {}


PYTHON_ROWS: tuple[FieldRow, ...] = (
    *(row for row in MODEL_ROWS if "framework.experts" not in row.fields),
    FieldRow((), (), _check_head_norms, lambda given: {}),
    *SHARED_ROWS,
    pipeline_modules_row(OUTPUT),
    FieldRow(
        ("optimizer.name", "optimizer.implementation", "framework.optimizer"), (IMPLEMENTATION,), _write_optimizer,
        lambda given: {"optimizer.name": "adamw", "framework.optimizer": given[IMPLEMENTATION.name]},
    ),
    FieldRow(("strategy.recompute",), (POLICY,), _write_recompute, _read_recompute),
    *rows_if_present(lambda job: job.model.moe is not None, job_has_experts, (
        same_value_row("strategy.ep", EP),
        FieldRow(("strategy.etp",), (), _write_etp, _read_etp),
        translated_row("framework.dispatcher", BACKEND, {"alltoall": "standard", "deepep": "deepep"}),
    )),
)  # fmt: skip
_FLOAT8 = "it is an option of fp8 products"
_NOT_IN_0_3 = ("training.mixed_precision_reduce",)
PYTHON_ASSUMED = (
    *(rule for rule in ASSUMED if rule.argument.name not in _NOT_IN_0_3),
    AssumedArgument(Argument("training.disable_cuda_graphs", "flag", False), True, "the host issues every op"),
    AssumedArgument(
        Argument("parallelism.spmd_backend", "text", "spmd_types"), "partial_dtensor",
        "0.2.2, whose facts predictions rest on, had distributed tensors alone",
    ),
    AssumedArgument(Argument("loss", "text", "BaseLoss.Config"), "CrossEntropyLoss.Config", "logits are there at once"),
    AssumedArgument(Argument("args.fuse_qkv", "flag", True), False,
    "queries, keys and values are products of their own"),
)  # fmt: skip
TORCHTITAN_PYTHON: ArgumentTable = replace(
    TORCHTITAN, rows=PYTHON_ROWS, assumed=PYTHON_ASSUMED,
    unmodelled={
        **UNMODELLED,
        "model.converters": UnmodelledArgument(([],), "float8 and MX products are not modelled; leave converters out"),
    },
    fixed={
        **FIXED,
        "precision.gemm": FixedField(("bf16",), "0.3.0's float8 products are not modelled"),
        "framework.fp8_filter": FixedField(("output",), _FLOAT8),
        "framework.fp8_all_gather": FixedField((False,), _FLOAT8),
        "framework.fp8_scales_ahead": FixedField((False,), _FLOAT8),
        "framework.early_stop": FixedField((False,), "0.3.0's checkpoints run to their end, whatever is asked"),
        "framework.experts": FixedField(("grouped",), "0.3.0 runs experts grouped alone"),
        "framework.loss_parallel": FixedField((True,), "0.3.0 splits the loss wherever tp is above 1"),
        "strategy.cp_kind": FixedField(("allgather",), "0.3.0 gathers keys"),
    },
)  # fmt: skip
"""Settings of torchtitan 0.3.0."""
