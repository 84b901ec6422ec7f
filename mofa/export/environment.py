"""Environment variables of a job, in both directions; ``$NAME`` is their name as an argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mofa.export.arguments import Argument, AssumedArgument, FieldRow, GivenArguments
from mofa.export.job import ExportJob

ALLOCATOR = Argument("$PYTORCH_CUDA_ALLOC_CONF", "text", "", aliases=("$PYTORCH_ALLOC_CONF",))
EXPANDABLE, NATIVE = "expandable_segments:True", "expandable_segments:False"
BLOCKING = Argument("$CUDA_LAUNCH_BLOCKING", "text", "0")
CONNECTIONS = Argument("$CUDA_DEVICE_MAX_CONNECTIONS", "text", "")
THREADS = Argument("$OMP_NUM_THREADS", "text", "1")
"""torchrun sets it to 1 for several ranks where nobody does."""
NVLS = Argument("$NCCL_NVLS_ENABLE", "text", "2")


def write_allocator_setting(job: ExportJob) -> Mapping[str, Any]:
    """PyTorch's setting of the allocator, which is said either way: an environment may have another."""
    return {ALLOCATOR.name: EXPANDABLE if job.framework.allocator == "expandable" else NATIVE}


def read_allocator_setting(given: GivenArguments) -> Mapping[str, Any]:
    """The allocator that PyTorch's setting says; other settings of it are not modelled."""
    settings = [part for part in str(given[ALLOCATOR.name]).replace(" ", "").split(",") if part]
    others = [part for part in settings if not part.startswith("expandable_segments:")]
    if others:
        raise given.refusal(f"{ALLOCATOR.name} ({others[0]}) is not modelled", f"what is: {EXPANDABLE}")
    expandable = any(part.lower() == EXPANDABLE.lower() for part in settings)
    return {"framework.allocator": "expandable" if expandable else "native"}


ALLOCATOR_ROW = FieldRow(("framework.allocator",), (ALLOCATOR,), write_allocator_setting, read_allocator_setting)
BLOCKING_ROW = FieldRow(
    ("framework.launch_blocking",), (BLOCKING,),
    lambda job: {BLOCKING.name: "1"} if job.framework.launch_blocking else {},
    lambda given: {"framework.launch_blocking": str(given[BLOCKING.name]) == "1"},
)  # fmt: skip
NVLS_ROW = FieldRow(
    ("nvls",), (NVLS,), lambda job: {NVLS.name: "2" if job.nvls else "0"},
    lambda given: {"nvls": str(given[NVLS.name]) != "0"},
)  # fmt: skip
"""NCCL's reduction in the switch: 2 is its own default, wherever the hardware has it."""
ENVIRONMENT_ROWS: tuple[FieldRow, ...] = (ALLOCATOR_ROW, BLOCKING_ROW, NVLS_ROW)
ONE_CONNECTION = AssumedArgument(
    CONNECTIONS, "1", "collectives are launched in order with products; Megatron-LM asks for it with tp or cp on Hopper"
)
