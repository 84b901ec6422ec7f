"""Stands in for a runner: waits at the gate like a real one and leaves the result that its job asks for."""

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    gpu = int(sys.stdin.readline().split()[1])
    (Path(sys.argv[2]) / f"gpu{rank}").write_text(str(gpu))
    if job["does"] == "crash":
        raise RuntimeError("broken on purpose")
    if job["does"] == "hang" or (job["does"] == "oom" and rank):
        time.sleep(60)
    time.sleep(job.get("seconds", 0.2))
    memory = {
        "allocated_bytes": 1, "reserved_bytes": 3, "peak_allocated_bytes": 2, "peak_reserved_bytes": 3,
        "device_bytes": 4, "device_total_bytes": 5, "alloc_retries": 0,
    }  # fmt: skip
    environment = {
        "gpu": "Fake GPU", "cpu": "Fake CPU", "cpu_cores": 2, "python": "3.11", "torch": "0", "cuda": "0", "cudnn": 0,
        "nccl": "0", "framework": "0", "allocator": os.environ["PYTORCH_ALLOC_CONF"], "settings": {},
    }  # fmt: skip
    if job.get("beginning_steps"):
        (Path(sys.argv[2]) / f"beginning{rank}.json.gz").write_text(f"{job['beginning_steps']} steps")
    if job.get("layer_segments"):
        (Path(sys.argv[2]) / f"segments{rank}.csv").write_text("part\n")
    outcome = "ok" if job["does"] == "idle" else job["does"]
    result = {"rank": rank, "outcome": outcome, "memory": memory, "environment": environment, "phase_of_end": "x"}
    if outcome == "ok":
        result |= {"step_times_s": [0.1, 0.1 + rank, 0.3], "warmup_times_s": [1.0], "facts": {"layers": [["0"]]}}
        result["host_issues_s"] = [9e-6, 5e-6 + rank * 1e-6, 1e-6]
        result |= {"layer_issues_s": [1e-3, 2e-3 + rank * 1e-3], "layer_backs_s": [3e-3, 4e-3]}
        result |= {"memory_ready": memory, "memory_whole": memory}
        result |= {"device_busy_s": 0.05 if job["does"] == "idle" else 1.0, "device_computing_s": 0.04}
    else:
        result |= {"error": "OutOfMemoryError: no room", "tried_bytes": 7}
    temporary = Path(sys.argv[2]) / f"rank{rank}.json.tmp"
    temporary.write_text(json.dumps(result))
    temporary.rename(temporary.with_suffix(""))


if __name__ == "__main__":
    main()
