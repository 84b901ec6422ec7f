"""What Megatron-Core's 1F1B holds of a micro-batch that is through: the input it received, and that one's gradient.

Read in megatron_core 0.16.1, pipeline_parallel/schedules.py, ``forward_backward_pipelining_without_interleaving``. An
input hangs on its output's graph, which goes when the next forward returns (or the next backward takes another output);
its gradient stays in a variable until the next backward returns. Of a step's last micro-batch the chunk itself has both
(``set_input_tensor``), until the next step's first forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mofa.replay.allocator.pools import Block, round_size
from mofa.replay.allocator.timeline import ACTIVATIONS, off_tape_instruction
from mofa.replay.rank.program import GRADIENT, INPUT, BlockProgram

if TYPE_CHECKING:
    from mofa.replay.memory.pass_state import Slots
    from mofa.replay.memory.rank_state import RankState
    from mofa.replay.memory.recording import RetainedBlock


class ReceivedInputs:
    """The input of the latest micro-batch whose backward is through, its gradient, and the input of one under way."""

    def __init__(self, state: RankState) -> None:
        self.state = state
        self._keeps = state.rank.keeps_received_inputs
        self._size = round_size(state.rank.stage_boundary_bytes)
        self.input: Block | None = None
        self.gradient: Block | None = None
        self.under_way: Block | None = None
        self.fresh = True
        """Whether the step has had no forward yet."""
        self.in_first = False
        """Whether its first forward is the latest one."""

    def which_are_present(self) -> tuple[bool, ...]:
        """What a computation finds, by which it goes one way or another; nothing where nothing is kept."""
        return (self.input is not None, self.gradient is not None, self.fresh) if self._keeps else ()

    def input_and_gradient(self) -> list[RetainedBlock]:
        """The input and its gradient, None where there is none, and their rounded size."""
        return [(self.input, self._size), (self.gradient, self._size)] if self._keeps else []

    def replace_blocks(self, received: Block | None, gradient: Block | None) -> None:
        """They are these blocks now."""
        self.input, self.gradient, self.fresh = received, gradient, False

    def block_addresses(self) -> tuple[int, ...]:
        """Their addresses, -1 for none."""
        return tuple(-1 if block is None else block.address for block in (self.input, self.gradient))

    def on_step_begin(self) -> None:
        """A step begins."""
        self.fresh = True

    def on_forward_begin(self) -> None:
        """The chunk is given another input: in a step's first forward what it had goes, with its gradient."""
        if self.fresh:
            self.on_graph_freed()
            self._gradient_goes()
        self.in_first, self.fresh = self.fresh, False

    def is_held_by_graph(self, received: Block) -> bool:
        """Whether an input that the first layer's dispatcher gives up hangs on its graph still."""
        if not self._keeps or self.in_first:
            return False
        self.input = received
        return True

    def on_graph_freed(self) -> None:
        """An output's graph goes, and with it the input."""
        if self.input is not None:
            self.state.free_allocation((self.input, off_tape_instruction(ACTIVATIONS, INPUT, "end of its graph")))
            self.input = None

    def on_backward_begin(self, slots: Slots, first: BlockProgram) -> None:
        """Keep the input of a backward beyond it, unless the first layer's dispatcher does."""
        self.on_graph_freed()
        if all(instruction.slot != first.input_slot for instruction, _ in first.retained_by_dispatcher):
            self.under_way, slots[first.input_slot] = slots[first.input_slot], None

    def on_backward_end(self, gradient: Block) -> None:
        """The backward returns its input's gradient in place of the last one's."""
        self._gradient_goes()
        self.input, self.gradient, self.under_way = self.under_way, gradient, None

    def _gradient_goes(self) -> None:
        if self.gradient is not None:
            self.state.free_allocation(
                (self.gradient, off_tape_instruction(ACTIVATIONS, GRADIENT, "end of the next backward"))
            )
            self.gradient = None
