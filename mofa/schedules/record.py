"""The record of a pipeline schedule: all that other packages may ask about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mofa.schedules.order import Compute, Order, Placement, Program, Runtime


@dataclass(frozen=True, eq=False)
class Schedule:
    """What a pipeline schedule does, whatever the plan.

    A schedule's file ends with its record; ``mofa.schedules.SCHEDULES`` is the list of them.
    """

    name: str
    order: Callable[[Runtime, int, int, int], Order]
    """Makes the order of a runtime's computations from runtime, pp, vpp and the number of micro-batches."""
    program: Callable[[Order, Runtime], Program]
    """Adds a runtime's sends and receives to an order."""
    in_flight: Callable[[int, int, int], list[list[int]]]
    """Micro-batches in flight on each chunk of each rank when the first backward begins, from pp, vpp and m. [-]"""
    pytorch_name: str
    """Its class in ``torch.distributed.pipelining`` without the leading ``Schedule``."""
    chunks_per_rank: int | None
    """Chunks of the model on each rank; None for any number from two on. [-]"""
    placement: Placement = "loop"
    """Placement of a model's chunks: round and round over the ranks (``loop``), or there and back (``v``)."""
    runs_in_megatron: bool = False
    is_searched: bool = False
    """Whether a search tries it where the framework runs it; else only where a strategy is fixed to it."""
    forwards_first: bool = False
    """All forwards come before the first backward: everything is in flight at once."""
    defers_weight_gradients: bool = False
    """Backwards are split: weights' gradients are made later than inputs'."""
    joins_send_and_receive: bool = False
    """A send goes with the receive of the other direction, and computing waits for both."""
    has_closed_form: bool = False
    """Whether its time has a formula (:mod:`mofa.cost.step_time.bubble`); else its critical path is computed."""
    gathers_by_chunk: bool = False
    """Under FSDP, PyTorch gathers weights and reduces gradients chunk by chunk, not once a step."""
    runs_in_equal_rounds: bool = False
    """PyTorch works in equal rounds of about pp micro-batches
    (:func:`mofa.schedules.interleaved.micro_batches_per_round`)."""
    steady_state_unit: Literal["", "micro-batch", "round"] = ""
    """Unit that its steady state repeats, and a replay may skip. ``micro-batch`` is a forward and a backward, ``round``
    pp micro-batches in all chunks; empty without a steady state."""
    pairs_passes: bool = False
    """Whether a forward runs beside the backward of another micro-batch, layer by layer."""
    num_held_stage_inputs: int = 0
    """Tensors of the size of a stage's input that Megatron-Core holds throughout
    (:func:`mofa.cost.rank_rules.held_input_counts`). [-]"""

    @property
    def has_several_chunks(self) -> bool:
        """Whether a rank holds more than one chunk."""
        return self.chunks_per_rank != 1

    @property
    def wraps_around(self) -> bool:
        """Whether the last rank sends to the first, which holds the next chunk."""
        return self.has_several_chunks and self.placement == "loop"

    @property
    def computation_kinds(self) -> tuple[Compute, ...]:
        """The kinds of its computations."""
        return ("F", "I", "W") if self.defers_weight_gradients else ("F", "B")
