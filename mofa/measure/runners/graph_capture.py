"""CUDA graphs of a Megatron-Core run, captured when Megatron-LM's training loop captures them.

``local`` graphs are captured by the schedule itself at the end of the first step (``create_cudagraphs`` of
core/transformer/cuda_graphs.py). Transformer Engine's are captured before the step behind the eager ones
(``cuda_graph_warmup_steps``), and so is the graph of a full iteration (training/training.py, ``train``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

MegatronJob = dict[str, Any]


def captures_graphs(plan: MegatronJob) -> bool:
    """Whether a run captures anything."""
    return bool(plan["config"].get("cuda_graph_impl", "none") != "none")


def captures_full_iteration(plan: MegatronJob) -> bool:
    """Whether forward and backward of all micro-batches are one graph."""
    return "full_iteration" in plan["config"].get("cuda_graph_scope", [])


def captures_router(plan: MegatronJob) -> bool:
    """Whether a router's hooks are not called when its graph runs."""
    return captures_graphs(plan) and "moe_router" in plan["config"]["cuda_graph_scope"]


class StaticGraphBatches:
    """Batches as the graph of a full iteration copies them into static buffers: one mapping for each micro-batch."""

    def __init__(self, batch: Callable[[], tuple[Any, Any, Any]]) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        tokens, labels, positions = self._batch()
        return {"tokens": tokens, "labels": labels, "positions": positions}


def forward_step_with_static_batches(loss: Callable[[Any], Any]) -> Callable[[Any, Any], tuple[Any, Any]]:
    """A forward step that takes its batch out of :class:`StaticGraphBatches`."""

    def forward_step(batches: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
        batch = next(batches)
        return model(batch["tokens"], batch["positions"], None, labels=batch["labels"]), loss

    return forward_step


@contextlib.contextmanager
def side_stream_for_wrapping(plan: MegatronJob) -> Iterator[None]:
    """A side stream on which to wrap modules, where something is captured: gradients are then handed to parameters'
    hooks on it, and no capture waits for the default stream (training/training.py, ``get_model``)."""
    if not captures_graphs(plan):
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def schedule_in_full_graph(schedule: Callable[..., Any], plan: MegatronJob) -> Callable[..., Any]:
    """The schedule, in one graph from the step behind the eager ones where a full iteration is captured."""
    if not captures_full_iteration(plan):
        return schedule
    return FullCudaGraphWrapper(schedule, cuda_graph_warmup_steps=plan["config"]["cuda_graph_warmup_steps"])


class TransformerEngineGraphs:
    """Transformer Engine's graphs of a run, captured before the step behind the eager ones."""

    def __init__(self, plan: MegatronJob, config: Any, chunks: list[Any], optimizer: Any) -> None:
        self._wanted = plan["config"].get("cuda_graph_impl") == "transformer_engine"
        self._eager_steps = plan["config"].get("cuda_graph_warmup_steps", 0)
        self._chunks = chunks
        self._gathers_ahead = plan["ddp"]["overlap_param_gather"]
        self._steps = 0
        if self._wanted:
            ranks = parallel_state.get_data_parallel_world_size()
            init_num_microbatches_calculator(
                torch.distributed.get_rank(), None, plan["micro_batch"] * plan["num_micro_batches"] * ranks,
                plan["micro_batch"], ranks,
            )  # fmt: skip
            self._helper = TECudaGraphHelper(chunks, config, plan["seq_len"], plan["micro_batch"], [optimizer])

    def capture_if_due(self) -> None:
        """Capture once, when the eager steps are done."""
        if self._wanted and self._steps == self._eager_steps:
            if self._gathers_ahead:
                for chunk in self._chunks:
                    chunk.disable_forward_pre_hook(param_sync=False)
            self._helper.create_cudagraphs()
            if self._gathers_ahead:
                for chunk in self._chunks:
                    chunk.enable_forward_pre_hook()
                self._helper.cuda_graph_set_manual_hooks()
        self._steps += 1


def modules_with_pace_hooks(plan: MegatronJob, modules: list[Any]) -> tuple[Any, ...]:
    """Modules where the host's pace is sampled: hooks of what a graph holds are not called, nor those of layers whose
    parts are called one by one (models/common/model_chunk_schedule_plan.py)."""
    if captures_full_iteration(plan):
        return ()
    if captures_graphs(plan) or plan["config"].get("overlap_moe_expert_parallel_comm"):
        names = ("embedding", "output_layer")
        return tuple(getattr(m.module, name) for m in modules for name in names if hasattr(m.module, name))
    return tuple(x for m in modules for x in m.module.decoder.layers)
