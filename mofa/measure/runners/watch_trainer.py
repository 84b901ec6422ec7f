"""Watches a job that its own trainer runs, and leaves at its end what a runner of mofa's would.

``scripts/exported_jobs.py`` says how it gets into a job that is not edited. A rank's file has the peaks of the whole
process, the tokens that its routers sent to each expert, pass by pass, and the pace of its host, read behind the last
step. Step times are in the trainer's own log.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mofa.measure.runners.count_routed import RoutingCounter

FOLDER = "MOFA_WATCHED"
"""Variable of the environment that names the folder for the ranks' files; nothing is watched without it."""


def write_rank_file_at_exit() -> None:
    """Write this rank's file when the process ends, if it is a rank that used a GPU."""
    if FOLDER in os.environ and "RANK" in os.environ:
        device = _Device(int(os.environ["LOCAL_RANK"]))
        threading.Thread(target=device.watch, daemon=True).start()
        atexit.register(_write, Path(os.environ[FOLDER]), int(os.environ["RANK"]), device)


class _Device:
    """The most that was taken of a device and allocated: communicators are gone at a process's end, and a trainer may
    reset the peaks after each step."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._keeps_peaks = False
        self.routing = RoutingCounter()
        self.most_bytes = 0
        self.most_allocated_bytes = 0

    def watch(self) -> None:
        """Look once a second, as long as the process lives."""
        while True:
            time.sleep(1.0)
            self.look()

    def look(self) -> None:
        """What is taken now, once the process uses its device."""
        if (torch := _torch_in_use()) is not None:
            self.routing.start_counting()
            self._keep_peaks(torch)
            free, total = torch.cuda.mem_get_info(self._index)
            self.most_bytes = max(self.most_bytes, total - free)

    def _keep_peaks(self, torch: Any) -> None:
        """Read the peak ahead of each reset from now on."""
        if self._keeps_peaks:
            return
        self._keeps_peaks, reset = True, torch.cuda.reset_peak_memory_stats

        def read_and_reset(*arguments: Any, **options: Any) -> None:
            self.most_allocated_bytes = max(self.most_allocated_bytes, torch.cuda.max_memory_allocated(self._index))
            reset(*arguments, **options)

        torch.cuda.reset_peak_memory_stats = read_and_reset


def _torch_in_use() -> Any:
    """PyTorch, if it was imported and uses a device."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized() else None


def _write(folder: Path, rank: int, device: _Device) -> None:
    if _torch_in_use() is None:
        return
    from mofa import host_pace
    from mofa.measure.runners.common import memory_and_peaks_now, process_environment

    memory = memory_and_peaks_now()
    most_allocated = max(device.most_allocated_bytes, memory["peak_allocated_bytes"])
    memory |= {
        "device_bytes": device.most_bytes, "reserved_bytes": memory["peak_reserved_bytes"],
        "peak_allocated_bytes": most_allocated,
    }  # fmt: skip
    result = {
        "rank": rank, "outcome": "ok", "memory": memory, "memory_whole": memory,
        "host_issues_s": [host_pace.small_op_s() for _ in range(3)],
        "host_backs_s": [host_pace.small_op_backward_s() for _ in range(3)],
        "cpu_ops_at_issues_s": [host_pace.processor_op_s() for _ in range(3)],
    }  # fmt: skip
    if "transformer_engine" in sys.modules:
        layer = host_pace.TransformerEngineLayer()
        layer.forward_and_backward_s()
        ahead, behind = zip(*(layer.forward_and_backward_s() for _ in range(3)), strict=True)
        result |= {"layer_issues_s": ahead, "layer_backs_s": behind}
    result["environment"] = process_environment("")
    if routed := device.routing.tokens_by_router():
        result["routed"] = routed
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
