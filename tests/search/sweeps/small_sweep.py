"""A sweep whose points take a third of a second: as few rows as leave something to choose."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "models": "llama3-8b",
    "clusters": "h100-hgx",
    "gpus": [8, 16],
    "global_batch": [32, 64],
    "tokens": "1T",
    "prices": 2.5,
    "search": {"fast": True, "fix": {"tp": 2, "pp": 2, "vpp": 1, "cp": 1, "micro_batch": 1, "recompute": "none"}},
}
