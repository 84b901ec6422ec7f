"""Megatron-LM's arguments about CUDA graphs, and what they need besides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mofa.export.arguments import Argument, FieldRow, GivenArguments
from mofa.export.job import ExportJob
from mofa.specs.cuda_graphs import CudaGraphs

IMPLEMENTATION = Argument("cuda-graph-impl", "text", "none")
SCOPE = Argument("cuda-graph-scope", "texts", [])
WARM_UP = Argument("cuda-graph-warmup-steps", "int", 3)
RANDOM_STATES = Argument("te-rng-tracker", "flag", False)
REGISTERS = Argument("$NCCL_GRAPH_REGISTER", "text", "")
WORDS = {"none": "none", "local": "local", "te": "transformer_engine"}
"""Mofa's word to Megatron's."""


def _write(job: ExportJob) -> Mapping[str, Any]:
    """The graphs with the random states that they need (Megatron-LM, training/arguments.py); with expandable segments
    NCCL registers no buffers of theirs (megatron_core 0.16.1, transformer/cuda_graphs.py)."""
    graphs = job.framework.graphs
    if not graphs.captures_any:
        return {}
    return {
        IMPLEMENTATION.name: WORDS[graphs.implementation],
        **({SCOPE.name: list(graphs.scope)} if graphs.scope else {}),
        RANDOM_STATES.name: True,
        **({REGISTERS.name: "0"} if job.framework.allocator == "expandable" else {}),
    }


def _read(given: GivenArguments) -> Mapping[str, Any]:
    said = given[IMPLEMENTATION.name]
    word = next((own for own, theirs in WORDS.items() if theirs == said), None)
    if word is None:
        raise given.refusal(f"{IMPLEMENTATION.name} ({said})", f"use one of {', '.join(WORDS.values())}")
    parts = [part for text in given[SCOPE.name] or [] for part in str(text).replace(",", " ").split()]
    text = word + (f":{'+'.join(parts)}" if word != "none" and parts and parts != ["full"] else "")
    try:
        return {"framework.cuda_graphs": str(CudaGraphs.parse(text))}
    except ValueError as error:
        raise given.refusal(f"{SCOPE.name} ({' '.join(parts)}) is not modelled", str(error)) from None


GRAPH_ROWS = (
    FieldRow(
        ("framework.cuda_graphs",), (IMPLEMENTATION, SCOPE, WARM_UP, RANDOM_STATES, REGISTERS), _write, _read
    ),
)  # fmt: skip
