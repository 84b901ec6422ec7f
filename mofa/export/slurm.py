"""A Slurm script around a job's launch script."""

from __future__ import annotations

from mofa.export.job import ExportJob

FIRST_STEPS = 50
"""Steps of a job as it is written, on random tokens. [-]"""
STEPS_A_LOG = 10
"""Steps between lines of a job's log: each line waits for the device, and the next step's kernels for the host."""


def steps_comment_text(job: ExportJob) -> str:
    """What a comment says of the steps: how many the workload's tokens take."""
    return "" if job.num_steps is None else f"; the workload's tokens take {job.num_steps}"


def slurm_script(job: ExportJob, script: str, name: str) -> str:
    """A Slurm script that starts a shell script once on each node."""
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"#SBATCH --job-name={name}",
            f"#SBATCH --nodes={job.num_nodes}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --gpus-per-node={job.gpus_per_node}",
            "#SBATCH --exclusive",
            f"# Starts {script}, which lies beside it, once on each node: sbatch {name}.slurm",
            "set -euo pipefail",
            'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
            'export MASTER_PORT="${MASTER_PORT:-29500}"',
            'export HERE="$SLURM_SUBMIT_DIR"',
            f"srun bash -c 'NODE_RANK=$SLURM_NODEID bash \"$HERE/{script}\"'",
            "",
        ]
    )
