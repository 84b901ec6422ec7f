"""A job as a shell script that starts Megatron-LM's ``pretrain_gpt.py``, and as a Slurm script around it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from mofa.export.arguments import Argument
from mofa.export.file_header import as_comment, header_lines
from mofa.export.job import ExportJob
from mofa.export.megatron import COMMIT, VERSION
from mofa.export.megatron.megatron_table import ASSUMED, MEGATRON
from mofa.export.megatron.model_arguments import MODEL_ROWS, TOKENIZER
from mofa.export.slurm import FIRST_STEPS, STEPS_A_LOG, slurm_script, steps_comment_text

SCRIPT, SLURM = "megatron.sh", "megatron.slurm"
_DATA = (TOKENIZER.name, "vocab-size")


def megatron_job_files(job: ExportJob) -> dict[str, str]:
    """The files of a job on Megatron-LM by name.

    Raises
    ------
    SpecError
        If a choice of the job has no argument.
    """
    values = MEGATRON.write_arguments(job)
    of_model = {argument.name for row in MODEL_ROWS for argument in row.arguments} - set(_DATA)
    assumed = {given.argument.name for given in ASSUMED}
    given = {name: value for name, value in values.items() if not name.startswith("$")}
    model = {name: value for name, value in given.items() if name in of_model}
    rests = {name: value for name, value in given.items() if name in assumed and name not in model}
    plan = {name: value for name, value in given.items() if name not in {*model, *rests, *_DATA}}
    runs_in = f"Megatron-LM core_v{VERSION} (commit {COMMIT[:12]}), pretrain_gpt.py, with Transformer Engine"
    script = "\n".join(
        [
            "#!/usr/bin/env bash",
            as_comment(header_lines(job, runs_in)) + "set -euo pipefail",
            "",
            'MEGATRON_LM="${MEGATRON_LM:-.}" # the folder of Megatron-LM',
            f"NODES={job.num_nodes}",
            f"GPUS_PER_NODE={job.gpus_per_node}",
            "",
            "# What the prediction rests on",
            *(f"export {n[1:]}={shlex.quote(str(value))}" for n, value in values.items() if n.startswith("$")),
            "",
            _array("MODEL_ARGS", model),
            "",
            "# The plan",
            _array("PLAN_ARGS", plan),
            "",
            "# What the prediction rests on, beside the plan",
            _array("PREDICTED_ARGS", rests),
            "",
            "# Not of the plan, and yours to choose: data, tokenizer, learning rate, checkpoints, logs.",
            "# NullTokenizer has a token more than vocab-size says.",
            _array("DATA_ARGS", {name: given[name] for name in _DATA if name in given}, ["--mock-data"]),
            "TRAINING_ARGS=(",
            f'  --train-iters "${{TRAIN_ITERS:-{FIRST_STEPS}}}" # to see how fast it is{steps_comment_text(job)}',
            "  --lr 1e-4",
            "  --min-lr 1e-5",
            "  --weight-decay 0.1",
            "  --adam-beta2 0.95",
            "  --eval-iters 0",
            "  --eval-interval 1000",
            f"  --log-interval {STEPS_A_LOG}",
            "  --log-throughput",
            ")",
            "",
            'torchrun --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NODES" --node-rank "${NODE_RANK:-0}" \\',
            '  --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \\',
            '  "$MEGATRON_LM/pretrain_gpt.py" "${MODEL_ARGS[@]}" "${PLAN_ARGS[@]}" "${PREDICTED_ARGS[@]}" \\',
            '  "${DATA_ARGS[@]}" "${TRAINING_ARGS[@]}" "$@"',
            "",
        ]
    )
    return {SCRIPT: script, SLURM: slurm_script(job, SCRIPT, "megatron")}


def _array(name: str, values: Mapping[str, Any], more: Iterable[str] = ()) -> str:
    lines = [shell_argument_text(MEGATRON.argument_named(key), value) for key, value in values.items()]
    return "\n".join([f"{name}=(", *(f"  {line}" for line in [*lines, *more]), ")"])


def shell_argument_text(argument: Argument, value: Any) -> str:
    """An argument as a shell has it.

    Examples
    --------
    >>> shell_argument_text(Argument("recompute-modules", "texts"), ["mlp", "moe_act"])
    '--recompute-modules mlp moe_act'
    >>> switches = (Argument("no-rope-fusion", "off", True), False), (Argument("bf16", "flag"), True)
    >>> tuple(shell_argument_text(*switch) for switch in switches)
    ('--no-rope-fusion', '--bf16')
    """
    if argument.kind in ("flag", "off"):
        return f"--{argument.name}"
    parts = value if isinstance(value, list) else [value]
    return " ".join([f"--{argument.name}", *(shlex.quote(str(part)) for part in parts)])
