"""Every allocation from a run's building to the end of its second step, with its address."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

UNIT_BYTES = 512
"""Every address of a block is a multiple of it."""


def innermost_frames_text(frames: list[dict[str, Any]]) -> str:
    """The innermost frames of an allocation outside PyTorch's own machinery."""
    frames_kept = [
        f"{Path(f['filename']).name}:{f['name']}"
        for f in frames
        if "/torch/" not in f["filename"] and f["filename"].endswith(".py")
    ]
    return " < ".join(frames_kept[:3])


class MemoryHistoryOfBeginning:
    """The memory history of building a run and of its first steps.

    Recording begins with the object. Every step goes through :meth:`with_recorded_history`; the last of those to record
    writes the
    file and ends the recording, and later steps are as they would have been.

    Parameters
    ----------
    memory
        ``torch.cuda.memory``, or what stands in for it.
    device
        Index of this process's device.
    path
        File to write.
    num_steps
        Steps to record.
    """

    def __init__(self, memory: Any, device: int, path: Path, num_steps: int = 2) -> None:
        self._memory, self._device, self._path, self._num_steps = memory, device, path, num_steps
        self._starts: list[int] = []
        memory._record_memory_history(context="alloc", stacks="python", max_entries=2_000_000, clear_history=True)

    def with_recorded_history(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step, recorded while the recording goes on."""

        def watched() -> None:
            if len(self._starts) == self._num_steps:
                step()
                return
            self._starts.append(len(self._entries()))
            step()
            if len(self._starts) == self._num_steps:
                self._end()

        return watched

    def _entries(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self._memory._snapshot()["device_traces"][self._device]
        return entries

    def _end(self) -> None:
        content = {"step_starts": self._starts, **memory_history_columns(self._entries())}
        self._memory._record_memory_history(enabled=None)
        with gzip.open(self._path, "wt", compresslevel=9) as file:
            json.dump(content, file, separators=(",", ":"))


def memory_history_columns(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Columns of a memory history, an entry a row, in order.

    ``action`` and ``where`` are indices in ``actions`` and ``places``; streams count as they appear; ``address`` counts
    from the lowest in ``unit_bytes``, so that order and gaps remain, and is -1 for what has none (a snapshot, a
    failure). ``bytes`` is what was asked for, of a segment its whole size.

    Examples
    --------
    >>> segment = {"action": "segment_alloc", "addr": 4096, "size": 2048}
    >>> found = columns([segment, {"action": "alloc", "addr": 5120, "size": 3}])
    >>> found["actions"], found["address"], found["bytes"]
    (['segment_alloc', 'alloc'], [0, 2], [2048, 3])
    """
    lowest = min((e["addr"] for e in entries if e.get("addr")), default=0)
    actions: dict[str, int] = {}
    places: dict[str, int] = {}
    streams: dict[int, int] = {}
    lists: dict[str, list[int]] = {"action": [], "bytes": [], "address": [], "stream": [], "where": []}
    for entry in entries:
        address = entry.get("addr") or 0
        lists["action"].append(actions.setdefault(entry["action"], len(actions)))
        lists["bytes"].append(entry["size"])
        lists["address"].append((address - lowest) // UNIT_BYTES if address else -1)
        lists["stream"].append(streams.setdefault(entry.get("stream", 0), len(streams)))
        lists["where"].append(places.setdefault(innermost_frames_text(entry.get("frames", [])), len(places)))
    return {"unit_bytes": UNIT_BYTES, "actions": list(actions), "places": list(places), **lists}
