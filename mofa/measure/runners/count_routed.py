"""Counts the tokens that the routers of a job send to each expert, in a job that its own trainer runs.

The counts leave the device without waiting for it, into pinned memory, so that steps take what they take.
"""

from __future__ import annotations

import sys
from typing import Any

ROUTERS = {
    "megatron.core.transformer.moe.router": ("TopKRouter", lambda output: output[1].sum(dim=0)),
    "torchtitan.models.moe.moe": ("TokenChoiceTopKRouter", lambda output: output[2]),
}
"""Module and class of each framework's router, and how its output tells tokens by expert."""
MAX_FORWARDS = 20_000
"""Passes that are counted: 50 steps of 400 micro-batches and layers."""


class RoutingCounter:
    """Counts by router, in the order in which they ran first, one row for each forward pass."""

    def __init__(self) -> None:
        self._watched: set[str] = set()
        self._router_of_pass: list[int] = []
        self._index_of_router: dict[int, int] = {}
        self._host_rows: Any = None

    def start_counting(self) -> None:
        """Count from now on what routers do whose modules are imported."""
        for module, (name, tokens_of) in ROUTERS.items():
            router = getattr(sys.modules.get(module), name, None)
            if router is not None and module not in self._watched:
                self._watched.add(module)
                self._count_passes(router, tokens_of)

    def _count_passes(self, router: Any, tokens_of: Any) -> None:
        forward = router.forward

        def counting(router: Any, *arguments: Any, **options: Any) -> Any:
            output = forward(router, *arguments, **options)
            self._count(router, tokens_of(output).detach())
            return output

        router.forward = counting

    def _count(self, router: Any, tokens: Any) -> None:
        import torch

        if self._host_rows is None:
            self._host_rows = torch.zeros((MAX_FORWARDS, tokens.numel()), dtype=torch.float32, pin_memory=True)
        row = len(self._router_of_pass)
        if row < MAX_FORWARDS:
            self._router_of_pass.append(self._index_of_router.setdefault(id(router), len(self._index_of_router)))
            self._host_rows[row].copy_(tokens, non_blocking=True)

    def tokens_by_router(self) -> list[list[list[int]]]:
        """Tokens by router, pass and expert; waits for the device."""
        if self._host_rows is None:
            return []
        import torch

        torch.cuda.synchronize()
        rows = self._host_rows[: len(self._router_of_pass)].long().tolist()
        passes: list[list[list[int]]] = [[] for _ in self._index_of_router]
        for index, row in zip(self._router_of_pass, rows, strict=True):
            passes[index].append(row)
        return passes
