"""torchtitan's settings of how a job runs: batches, degrees, recomputation, numerics, compilation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mofa.export.arguments import Argument, FieldRow, GivenArguments, rows_if_present, same_value_row, translated_row
from mofa.export.environment import ALLOCATOR_ROW, BLOCKING_ROW, NVLS_ROW
from mofa.export.job import ExportJob
from mofa.export.torchtitan.model_settings import MODEL, QWEN3, job_has_experts, torchtitan_model_name
from mofa.schedules import SCHEDULE_NAMES, SCHEDULES, default_schedule
from mofa.specs.layouts.module_names import OUTPUT, ModuleNamesError, module_names_by_chunk, parse_module_names
from mofa.specs.layouts.pipeline_layout import parse_layout
from mofa.units import is_whole_number

TP = Argument("parallelism.tensor_parallel_degree", "int", 1)
PP = Argument("parallelism.pipeline_parallel_degree", "int", 1)
CP = Argument("parallelism.context_parallel_degree", "int", 1)
EP = Argument("parallelism.expert_parallel_degree", "int", 1)
ETP = Argument("parallelism.expert_tensor_parallel_degree", "int", 1)
REPLICAS = Argument("parallelism.data_parallel_replicate_degree", "int", 1)
SHARDS = Argument("parallelism.data_parallel_shard_degree", "int", -1)
RESHARD = Argument("parallelism.fsdp_reshard_after_forward", "text", "default")
SCHEDULE = Argument("parallelism.pipeline_parallel_schedule", "text", "1F1B")
PARTS = Argument("parallelism.module_fqns_per_model_part", "texts")
MICRO_BATCH = Argument("parallelism.pipeline_parallel_microbatch_size", "int", 1)
STAGE_LAYERS = Argument("parallelism.pipeline_parallel_layers_per_stage", "int")
LESS_FIRST = Argument("parallelism.pipeline_parallel_first_stage_less_layers", "int", 1)
LESS_LAST = Argument("parallelism.pipeline_parallel_last_stage_less_layers", "int", 1)
LOCAL_BATCH = Argument("training.local_batch_size", "int", 8)
GLOBAL_BATCH = Argument("training.global_batch_size", "int", -1)
DTYPE = Argument("training.dtype", "text", "float32")
AC_MODE = Argument("activation_checkpoint.mode", "text", "selective")
AC_OPTION = Argument("activation_checkpoint.selective_ac_option", "text", "2")
COMPILE = Argument("compile.enable", "flag", False)
COMPONENTS = Argument("compile.components", "texts", ["model", "loss"])
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


# --- data parallelism


def replicas_and_shards(job: ExportJob) -> tuple[int, int]:
    """Replicas and shards of the data-parallel ranks.

    Raises
    ------
    SpecError
        If its kind does not fit the degrees.
    """
    s, framework = job.strategy, job.framework
    kind, replicas = framework.data_parallel, framework.dp_replicate
    if kind == "ddp":
        if s.tp * s.cp * s.pp > 1:
            raise job.refusal("framework.data_parallel (ddp) with tp, cp or pp", "replicas go alone; use fsdp")
        if s.dp == 1:
            raise job.refusal("framework.data_parallel (ddp) on one GPU", "torchtitan wraps no lone replica; use fsdp")
        return s.dp, 1
    if kind == "hsdp":
        if s.dp % replicas:
            raise job.refusal(f"framework.dp_replicate ({replicas})", f"it must divide dp ({s.dp})")
        return replicas, s.dp // replicas
    if replicas != 1:
        raise job.refusal(f"framework.dp_replicate ({replicas})", "fsdp has one shard group; use data_parallel: hsdp")
    return 1, s.dp


def _write_degrees(job: ExportJob) -> Mapping[str, Any]:
    replicas, shards = replicas_and_shards(job)
    return {REPLICAS.name: replicas, SHARDS.name: shards}


def given_replicas_and_shards(given: GivenArguments) -> tuple[int, int]:
    """Replicas and shards of a job's data-parallel ranks.

    Raises
    ------
    SpecError
        If shards follow from GPUs that nothing says, or do not fit them.
    """
    replicas, shards = given[REPLICAS.name], given[SHARDS.name]
    for setting in (REPLICAS, TP, PP, CP):
        if given[setting.name] < 1:
            raise given.refusal(f"{setting.name} is {given[setting.name]}", "write a number of ranks of at least 1")
    others = given[TP.name] * given[PP.name] * given[CP.name] * replicas
    if shards < 0:
        if given.num_gpus is None:
            raise given.refusal(f"{SHARDS.name} is {shards}, what other degrees leave of the GPUs", "give --gpus")
        shards = given.num_gpus // others
    return replicas, max(shards, 1)


def num_gpus_of_degrees(given: GivenArguments) -> int | None:
    """GPUs that the degrees say; None where shards are what is left. [-]"""
    if given[SHARDS.name] < 0:
        return None
    return int(given[REPLICAS.name] * given[SHARDS.name] * given[TP.name] * given[PP.name] * given[CP.name])


def _read_degrees(given: GivenArguments) -> Mapping[str, Any]:
    replicas, shards = given_replicas_and_shards(given)
    if replicas > 1 and shards * given[CP.name] * given[TP.name] * given[PP.name] == 1:
        return {"framework.data_parallel": "ddp", "framework.dp_replicate": 1}
    kind = "hsdp" if replicas > 1 else "fsdp"
    return {"framework.data_parallel": kind, "framework.dp_replicate": replicas}


def _write_reshard(job: ExportJob) -> Mapping[str, Any]:
    s = job.strategy
    _, shards = replicas_and_shards(job)
    sharded = shards * s.cp > 1
    if job.framework.data_parallel == "ddp" or not sharded:
        if s.zero:
            raise job.refusal(f"strategy.zero ({s.zero})", "nothing is sharded where a shard group is one rank; use 0")
        return {}
    if s.zero not in (2, 3):
        raise job.refusal(f"strategy.zero ({s.zero})", "FSDP shards gradients too, 2, or all, 3; use one of them")
    if not job.framework.reshard_after_forward and s.pp == 1:
        return {RESHARD.name: "never"}
    default = 3 if s.pp == 1 else 2
    return {RESHARD.name: "default" if s.zero == default else "always" if s.zero == 3 else "never"}


def _read_reshard(given: GivenArguments) -> Mapping[str, Any]:
    _, shards = given_replicas_and_shards(given)
    if shards * given[CP.name] == 1:
        return {"strategy.zero": 0}
    stages = {"default": 3 if given[PP.name] == 1 else 2, "always": 3, "never": 2}
    if given[RESHARD.name] not in stages:
        raise given.refusal(f"{RESHARD.name} ({given[RESHARD.name]}) is unknown", f"use {', '.join(stages)}")
    if given[RESHARD.name] == "never" and given[PP.name] == 1:
        return {"strategy.zero": 3, "framework.reshard_after_forward": False}
    return {"strategy.zero": stages[given[RESHARD.name]], "framework.reshard_after_forward": True}


def _write_dtype(job: ExportJob) -> Mapping[str, Any]:
    s = job.strategy
    _, shards = replicas_and_shards(job)
    mixed = shards > 1 or s.cp > 1 or (s.tp == 1 and s.pp == 1)
    params = job.workload.precision.params
    return {DTYPE.name: DTYPES[params or ("fp32" if mixed else "bf16")]}


def _read_dtype(given: GivenArguments) -> Mapping[str, Any]:
    own = {word: kind for kind, word in DTYPES.items()}
    if (word := given[DTYPE.name]) not in own:
        raise given.refusal(f"{DTYPE.name} ({word}) is unknown", f"use {' or '.join(own)}")
    return {"precision.params": own[word]}


# --- batches


def _write_batch(job: ExportJob) -> Mapping[str, Any]:
    s = job.strategy
    local = s.micro_batch * (job.num_micro_batches if s.pp > 1 else 1)
    micro = {MICRO_BATCH.name: s.micro_batch} if s.pp > 1 else {}
    return {LOCAL_BATCH.name: local, GLOBAL_BATCH.name: job.workload.batch.global_batch, **micro}


def _read_batch(given: GivenArguments) -> Mapping[str, Any]:
    local, batch = given[LOCAL_BATCH.name], given[GLOBAL_BATCH.name]
    replicas, shards = given_replicas_and_shards(given)
    if batch < 0:
        batch = local * replicas * shards
    if given[PP.name] == 1:
        return {"strategy.micro_batch": local, "batch.global_batch": batch}
    if batch != local * replicas * shards:
        raise given.refusal(
            f"{GLOBAL_BATCH.name} ({batch}) over several pipelines' passes is not modelled",
            f"what is: {LOCAL_BATCH.name} x dp = {local * replicas * shards}",
        )
    return {"strategy.micro_batch": given[MICRO_BATCH.name], "batch.global_batch": batch}


# --- the pipeline


def _write_schedule(job: ExportJob) -> Mapping[str, Any]:
    s = job.strategy
    return {SCHEDULE.name: SCHEDULES[s.schedule].pytorch_name} if s.pp > 1 else {}


def _read_schedule(given: GivenArguments) -> Mapping[str, Any]:
    if given[PP.name] == 1:
        return {"strategy.schedule": default_schedule(1)}
    names = {SCHEDULES[name].pytorch_name.lower(): name for name in SCHEDULE_NAMES}
    if (name := names.get(str(given[SCHEDULE.name]).lower())) is None:
        known = ", ".join(SCHEDULES[name].pytorch_name for name in SCHEDULE_NAMES)
        raise given.refusal(f"{SCHEDULE.name} ({given[SCHEDULE.name]}) is not modelled", f"what is: {known}")
    return {"strategy.schedule": name}


def _write_layout(job: ExportJob, output: str) -> Mapping[str, Any]:
    s, layout = job.strategy, job.layout
    own = s.vpp == (2 if SCHEDULES[s.schedule].has_several_chunks else 1)
    if layout is None or (layout.by == "framework" and own):
        return {}
    parts = module_names_by_chunk(parse_layout(layout.text))
    return {PARTS.name: [[output if name == OUTPUT else name for name in part] for part in parts]}


def _read_layout(given: GivenArguments, output: str) -> Mapping[str, Any]:
    if given[PP.name] == 1:
        return {"strategy.layout": "", "strategy.vpp": 1}
    several = SCHEDULES[_read_schedule(given)["strategy.schedule"]].has_several_chunks
    parts, pp = given[PARTS.name], given[PP.name]
    if parts is not None:
        if len(parts) % pp:
            raise given.refusal(f"{PARTS.name} has {len(parts)} parts", f"{PP.name} is {pp}; write a multiple of it")
        try:
            named = [[OUTPUT if name == output else name for name in part] for part in parts]
            text = parse_module_names(json.dumps(named)).text
        except (ModuleNamesError, TypeError) as error:
            raise given.refusal(f"{PARTS.name} cannot be read", str(error)) from None
        return {"strategy.layout": text, "strategy.vpp": len(parts) // pp}
    first, last, each = given[LESS_FIRST.name], given[LESS_LAST.name], given[STAGE_LAYERS.name]
    vpp = 2 if several else 1
    if each is not None:
        chunks = -(-(given.required_value("args.n_layers") + first + last) // each)
        if chunks % pp:
            raise given.refusal(f"{STAGE_LAYERS.name} ({each}) makes {chunks} parts", f"{PP.name} is {pp}")
        vpp = chunks // pp
    options = {"pipeline-parallel-first-stage-less-layers": first, "pipeline-parallel-last-stage-less-layers": last}
    layout_text = "+".join(f"{name}:{value}" for name, value in options.items() if value != 1)
    return {"strategy.layout": layout_text, "strategy.vpp": vpp}


def pipeline_modules_row(output: str) -> FieldRow:
    """The parts of a pipeline, where the model's output has this name."""
    return FieldRow(
        ("strategy.layout", "strategy.vpp"), (PARTS, STAGE_LAYERS, LESS_FIRST, LESS_LAST),
        lambda job: _write_layout(job, output), lambda given: _read_layout(given, output),
    )  # fmt: skip


QWEN3_IS_WHOLE = "0.2.2 splits llama3 and deepseek_v3 into stages, and has no pipelines of qwen3"
"""models/qwen3/__init__.py of torchtitan 0.2.2: ``pipelining_fn=None``."""


def _write_pipelined(job: ExportJob) -> Mapping[str, Any]:
    if job.strategy.pp > 1 and torchtitan_model_name(job) == QWEN3:
        raise job.refusal(f"strategy.pp ({job.strategy.pp})", f"{QWEN3_IS_WHOLE}; use 1, or --to torchtitan-0.3")
    return {}


def _read_pipelined(given: GivenArguments) -> Mapping[str, Any]:
    if given[PP.name] > 1 and given[MODEL.name] == QWEN3:
        raise given.refusal(f"{PP.name} is {given[PP.name]}", f"{QWEN3_IS_WHOLE}; write 1")
    return {}


# --- the rest


def _write_sequence_parallel(job: ExportJob) -> Mapping[str, Any]:
    s = job.strategy
    if s.tp > 1 and not s.sp:
        raise job.refusal("strategy.sp (false) with tp", "its tensor parallelism splits the sequence; use true")
    return {}


def _write_recompute(job: ExportJob) -> Mapping[str, Any]:
    mode = job.recompute
    if mode.kind == "full" and mode.layers is None:
        return {AC_MODE.name: "full"}
    if mode.kind == "ops":
        return {AC_MODE.name: "selective", AC_OPTION.name: "op"}
    if mode.kind == "every":
        return {AC_MODE.name: "selective", AC_OPTION.name: str(mode.layers or 2)}
    if mode.kind == "none":
        return {AC_MODE.name: "none"}
    raise job.refusal(f"strategy.recompute ({mode})", "torchtitan has none, full, ops and every:n; use one of them")


def _read_recompute(given: GivenArguments) -> Mapping[str, Any]:
    mode, option = given[AC_MODE.name], str(given[AC_OPTION.name])
    if mode in ("none", "full"):
        return {"strategy.recompute": mode}
    if mode == "selective" and option == "op":
        return {"strategy.recompute": "ops"}
    if mode == "selective" and is_whole_number(option) and int(option):
        return {"strategy.recompute": f"every:{option}"}
    raise given.refusal(f"{AC_MODE.name} ({mode}, {option}) is not modelled", "what is: none, full, selective")


def _write_compile(job: ExportJob) -> Mapping[str, Any]:
    framework = job.framework
    if not framework.compile:
        if not framework.compile_loss:
            raise job.refusal("framework.compile_loss (false) without compile", "it changes nothing; leave it out")
        return {COMPILE.name: False}
    return {COMPILE.name: True, COMPONENTS.name: ["model", "loss"] if framework.compile_loss else ["model"]}


def _read_compile(given: GivenArguments) -> Mapping[str, Any]:
    parts = list(given[COMPONENTS.name])
    if not given[COMPILE.name] or not parts:
        return {"framework.compile": False}
    if "model" not in parts:
        words_ = ", ".join(parts)
        raise given.refusal(f"{COMPONENTS.name} ({words_}) is not modelled", "what is: model, or model and loss")
    return {"framework.compile": True, "framework.compile_loss": "loss" in parts}


_LOSS_PARALLEL = Argument("parallelism.disable_loss_parallel", "flag", False)
LOSS_ROW = FieldRow(
    ("framework.loss_parallel",), (_LOSS_PARALLEL,),
    lambda job: {} if job.framework.loss_parallel else {_LOSS_PARALLEL.name: True},
    lambda given: {"framework.loss_parallel": not given[_LOSS_PARALLEL.name]},
)  # fmt: skip


def _write_optimizer(job: ExportJob) -> Mapping[str, Any]:
    kernels = job.workload.optimizer.implementation or job.framework.optimizer
    return {"optimizer.name": "AdamW", "optimizer.implementation": kernels}


def _read_optimizer(given: GivenArguments) -> Mapping[str, Any]:
    if given["optimizer.name"] != "AdamW":
        raise given.refusal(f"optimizer.name ({given['optimizer.name']}) is not modelled", "what is: AdamW")
    return {"optimizer.name": "adamw", "framework.optimizer": given["optimizer.implementation"]}


_OPTIMIZER_ROW = FieldRow(
    ("optimizer.name", "optimizer.implementation", "framework.optimizer"),
    (Argument("optimizer.name", "text", "AdamW"), Argument("optimizer.implementation", "text", "fused")),
    _write_optimizer, _read_optimizer,
)  # fmt: skip
SHARED_ROWS: tuple[FieldRow, ...] = (
    same_value_row("batch.seq_len", Argument("training.seq_len", "int", 2048)),
    FieldRow(
        ("strategy.micro_batch", "batch.global_batch"), (LOCAL_BATCH, GLOBAL_BATCH, MICRO_BATCH), _write_batch,
        _read_batch,
    ),
    FieldRow(("precision.params",), (DTYPE,), _write_dtype, _read_dtype),
    FieldRow(("framework.data_parallel", "framework.dp_replicate"), (REPLICAS, SHARDS), _write_degrees, _read_degrees),
    FieldRow(("strategy.zero", "framework.reshard_after_forward"), (RESHARD,), _write_reshard, _read_reshard),
    same_value_row("strategy.tp", TP),
    FieldRow(("strategy.sp",), (), _write_sequence_parallel, lambda given: {"strategy.sp": given[TP.name] > 1}),
    same_value_row("strategy.pp", PP),
    FieldRow(("strategy.schedule",), (SCHEDULE,), _write_schedule, _read_schedule),
    same_value_row("strategy.cp", CP),
    FieldRow(
        ("framework.compile", "framework.compile_loss"), (COMPILE, COMPONENTS), _write_compile, _read_compile,
    ),
    ALLOCATOR_ROW,
    BLOCKING_ROW,
    NVLS_ROW,
)  # fmt: skip
TOML_ROWS: tuple[FieldRow, ...] = (
    *SHARED_ROWS,
    pipeline_modules_row(OUTPUT),
    FieldRow(("strategy.pp",), (), _write_pipelined, _read_pipelined),
    _OPTIMIZER_ROW,
    LOSS_ROW,
    translated_row("strategy.cp_kind", Argument("parallelism.context_parallel_rotate_method", "text", "allgather"),
          {"allgather": "allgather", "ring": "alltoall"}),
    *rows_if_present(lambda job: job.model.moe is not None, job_has_experts, (
        same_value_row("strategy.ep", EP),
        same_value_row("strategy.etp", ETP),
        translated_row("framework.dispatcher", Argument("parallelism.expert_parallel_comm_backend", "text", "standard"),
              {"alltoall": "standard", "deepep": "deepep"}),
    )),
    FieldRow(("strategy.recompute",), (AC_MODE, AC_OPTION), _write_recompute, _read_recompute),
    same_value_row("framework.early_stop", Argument("activation_checkpoint.early_stop", "flag", False)),
)  # fmt: skip
"""Settings of a TOML."""
