"""Write down what exported jobs will take, before they run: one row for each node type and pace of the host.

    python scripts/predict_exported.py reference_runs/blind_exported_third.csv JOB...

A JOB is a folder that ``mofa export`` wrote, named as its record will be. It is read back as ``mofa estimate --from``
reads it, so that the file which runs is the one which was predicted. An existing CSV stays as it is.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from mofa.report.save import write_file_atomically

NODE_TYPES = ("h100-hgx", "h200-hgx")
HOSTS_S = (6e-6, 9.5e-6, 14e-6)
"""Seconds that a small op takes the host: a quick, the usual and a slow one of the hosts that were timed."""
NUM_GPUS = 2
FIELDS = ("id", "hardware", "host_op_s", "step_s", "allocated_bytes", "reserved_bytes", "device_bytes")
JOB_FILES = {"megatron.sh": "megatron", "torchtitan.toml": "torchtitan"}


def predict_job(folder: Path, node_type: str, host_op_s: float) -> dict[str, Any]:
    """One row of the CSV: seconds of a step and bytes of the fullest GPU."""
    name = next(name for name in JOB_FILES if (folder / name).is_file())
    command = [
        sys.executable, "-m", "mofa", "estimate", "--from", JOB_FILES[name], str(folder / name), node_type,
        "--gpus", str(NUM_GPUS), "--host-issue", f"{host_op_s * 1e6:g}us", "--json",
    ]  # fmt: skip
    answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    memory = {field: int(answer["memory"][field]) for field in FIELDS[4:]}
    return {"id": folder.name, "hardware": node_type, "host_op_s": host_op_s, "step_s": answer["step_s"], **memory}


def main() -> int:
    """Predict the jobs of the command line; status 2 where the CSV is there."""
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    out, jobs = Path(sys.argv[1]), [Path(job) for job in sys.argv[2:]]
    if out.exists():
        print(f"{out}: is there, and stays as it was predicted; give another name", file=sys.stderr)
        return 2
    text = io.StringIO()
    rows = csv.DictWriter(text, FIELDS, lineterminator="\n")
    rows.writeheader()
    rows.writerows(predict_job(job, node, host) for job in jobs for node in NODE_TYPES for host in HOSTS_S)
    write_file_atomically(out, text.getvalue().encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
