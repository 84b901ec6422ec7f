"""The memory history of a run's beginning, from an allocator that stands in for PyTorch's."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from mofa.measure.runners.beginning import MemoryHistoryOfBeginning

BASE = 0x7F0000000000


class _Memory:
    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []
        self.recording = False

    def _record_memory_history(self, enabled: str | None = "all", **_: Any) -> None:
        self.recording = enabled is not None

    def _snapshot(self) -> dict[str, Any]:
        return {"device_traces": [[], list(self.history)]}

    def do(self, action: str, address: int, size: int, stream: int = 0) -> None:
        frames = [
            {"filename": "/lib/torch/nn/linear.py", "name": "forward"},
            {"filename": "/a/model.py", "name": "block"},
        ]
        if self.recording:
            entry = {"action": action, "addr": address, "size": size, "stream": stream, "frames": frames}
            self.history.append(entry)


def test_the_first_two_steps_are_recorded_with_the_building_and_no_more(tmp_path: Path) -> None:
    memory, taken = _Memory(), []
    path = tmp_path / "beginning0.json.gz"
    beginning = MemoryHistoryOfBeginning(memory, 1, path)
    memory.do("segment_alloc", BASE + 4096, 2 << 20, 7)

    def step() -> None:
        taken.append(memory.recording)
        memory.do("segment_alloc", BASE - len(taken) * 8192, 20 << 20, 7)
        memory.do("alloc", BASE - len(taken) * 8192 + 512, 1000, 9)

    watched = beginning.with_recorded_history(step)
    for _ in range(3):
        watched()
    assert taken == [True, True, False]
    with gzip.open(path, "rt") as file:
        found = json.load(file)
    assert found["step_starts"] == [1, 3]
    assert [found["actions"][i] for i in found["action"]] == ["segment_alloc"] * 2 + ["alloc", "segment_alloc", "alloc"]
    # later segments lie below earlier ones, and by how much is kept
    assert [a * found["unit_bytes"] for a in found["address"]] == [20480, 8192, 8704, 0, 512]
    assert found["bytes"] == [2 << 20, 20 << 20, 1000, 20 << 20, 1000]
    assert found["stream"] == [0, 0, 1, 0, 1]
    assert found["places"] == ["model.py:block"]
    assert set(found["where"]) == {0}
