"""What PyTorch's pipeline schedules hold of a stage's outputs and input gradients, and until when; and what of
DeepSpeed's, and of a ring of context parallelism, comes back late because NCCL has it.

A schedule holds an output until the backward of its micro-batch is through (torch/distributed/pipelining/stage.py,
``backward_one_chunk``). ``Schedule1F1B`` has the latest output and the latest input gradient in variables besides,
until the next one takes their place: the last stage holds one micro-batch's logits through the next one's forward.

NCCL's sends and collectives use their tensors on a stream of their own, which the allocator is told of
(``recordStream``): memory that is let go comes back only once the device has got that far, and the host is ahead of it
by up to as many launches as the device's queue takes. A ring's host gains that lead in backwards and loses it in
forwards, so that both clocks run from pass to pass: in ``te4-tp2-cp2-llama8b-12l-16k-traced`` 480 to 880 MiB wait
behind the first backward, and 96 to 272 at the next loss.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from mofa.cost.allocations.host_lead import host_lead_launches, launches_by_computation_kind
from mofa.cost.allocations.watchdog import Shelf
from mofa.replay.allocator.pools import WAITING, Block
from mofa.replay.allocator.timeline import ACTIVATIONS, off_tape_instruction
from mofa.replay.rank.program import GRADIENT, INPUT

if TYPE_CHECKING:
    from mofa.replay.memory.pass_state import Allocation
    from mofa.replay.memory.rank_state import RankState
    from mofa.replay.rank.description import RankBlock


class DeferredFrees:
    """Frees of a rank that wait: lets go, in time, what its finished backwards leave of their passes."""

    def __init__(self, state: RankState) -> None:
        self.state = state
        rank = state.rank
        self.pipelined = rank.preallocated and any((*rank.sends, *rank.receives))
        self.reduces = bool(rank.deepspeed) and not rank.launch_blocking
        """Whether what tensor parallelism sums comes back late."""
        self.rings = (
            any(rank_block.trace.recorded_on_nccl_stream for chunk in rank.chunks for rank_block in chunk)
            and not rank.launch_blocking
        )
        """Whether blocks send what comes back late."""
        self.shelves = (
            any(rank_block.trace.held_by_watchdog for chunk in rank.chunks for rank_block in chunk)
            and not rank.launch_blocking
        )
        """Whether blocks leave something to PyTorch's watchdog."""
        self.possible = rank.preallocated or self.defers_frees_in_blocks
        """Whether anything comes back late, or is held beyond its backward."""
        self.shelf: Shelf[Allocation] = Shelf()
        self.ring: Shelf[Block] = Shelf(held_s=0.0)
        """What rings let go, until the device has passed its block."""
        self.launched = 0.0
        self.launched_before_exchange = 0.0
        """Kernels launched ahead of the last sends and receives."""
        self.launched_in_computation = 0.0
        self.waiting: deque[tuple[float, Block]] = deque()
        self.output: tuple[int, int] | None = None
        """The pass whose output the schedule has in its variable."""
        self.finished_output: Block | None = None
        """That output, where its backward is through."""
        self.gradient: Block | None = None
        self.launches = [
            launches_by_computation_kind([rank_block.trace for rank_block in chunk]) for chunk in rank.chunks
        ]

    def before_computation(self, kind: str, chunk: int) -> None:
        """A computation begins.

        ``Schedule1F1B`` sends and receives ahead of it: of a forward the input and the last gradient, of a backward the
        last output and its gradient.
        DeepSpeed's host waits for the device where a micro-batch is loaded: a copy to the device that is not
        ``non_blocking``.
        """
        if kind == "F":
            self.synchronize_deepspeed()
        rank = self.state.rank
        if not rank.keeps_last_output or (rank.receives[chunk] if kind == "F" else rank.sends[chunk]):
            self.launched_before_exchange = self.launched
        self.free_passed_by_device()

    def synchronize_deepspeed(self) -> None:
        """DeepSpeed's host waits for the device."""
        if self.reduces:
            self.synchronize_device()

    def count_deepspeed_launches(self, launches: float) -> None:
        """Count kernels that DeepSpeed's host has launched outside of a block."""
        if self.reduces:
            self.launched += launches

    def synchronize_device(self) -> None:
        """The host waits for the device."""
        self.launched = float("inf")
        self.free_passed_by_device()
        self.launched = self.launched_before_exchange = 0.0

    def free_passed_by_device(self) -> None:
        """Give back what the device is through with."""
        while self.waiting and self.waiting[0][0] <= self.launched + self.launched_in_computation:
            self.state.a.free_and_merge(self.waiting.popleft()[1])

    def after_computation(self, kind: str, chunk: int, micro_batch: int) -> None:
        """End a computation."""
        state = self.state
        if not state.rank.preallocated:
            return
        self.launched += self.launches[chunk].get(kind, 0.0)
        self.launched_in_computation = 0.0
        stays = state.rank.keeps_last_output
        if kind == "F" and stays:
            self.drop_replaced_output()
            self.output = chunk, micro_batch
        if kind not in "BW":
            return
        chunk_pass = state.passes.pop((chunk, micro_batch))
        chunk_pass.restore_slots()
        out, (dy,) = chunk_pass.out, chunk_pass.slots[0]
        if out is not None and stays and self.output == (chunk, micro_batch):
            self.finished_output = out
        elif out is not None:
            self.free_output(out, self.output_tensor_name(chunk), sent=state.rank.sends[chunk])
        if stays:
            dy, self.gradient = self.gradient, dy
        if dy is not None:
            self.free_output(dy, GRADIENT, sent=True)

    def after_block(self, phase: str, rank_block: RankBlock) -> None:
        """A block is through, where something of its inside comes back late: as :meth:`free_passed_by_device`."""
        trace = rank_block.trace
        if not (self.pipelined or self.defers_frees_in_blocks):
            return
        forward, inputs, weights = trace.launches
        issued = {"forward": forward, "backward by inputs": inputs, "backward by weights": weights}.get(
            phase, inputs + weights
        )
        block_time = rank_block.forward_and_backward_times[phase != "forward"]
        for allocation in self.shelf.issue_block_and_pop_due(block_time, issued) if self.shelves else ():
            self.state.free_allocation(allocation)
        if (self.defers_sent_blocks or self.pipelined) and self.state.notes is not None:
            self.state.notes.note_block_end(phase, rank_block.name)
        if self.pipelined:
            self.launched_in_computation += issued
            self.free_passed_by_device()
        if self.defers_sent_blocks:
            for block in self.ring.issue_block_and_pop_due(block_time, issued):
                self.state.a.free_and_merge(block)
        if self.reduces:
            self.launched += issued
            self.free_passed_by_device()

    @property
    def defers_sent_blocks(self) -> bool:
        """Whether what a ring sends comes back late; a first step's does at once, whose host compiles and loads."""
        return self.rings and self.state.step > 1

    def free_once_sent(self, block: Block) -> None:
        """Have a block come back when the device has passed the block of the model under way."""
        block.state = WAITING
        self.ring.shelve(block)

    @property
    def defers_frees_in_blocks(self) -> bool:
        """Whether something that blocks let go comes back late."""
        return self.reduces or self.rings or self.shelves

    def shelve(self, allocation: Allocation) -> None:
        """Leave something to the watchdog; a first step's goes at once, whose host compiles and loads."""
        if self.shelves and self.state.step > 1:
            self.shelf.shelve(allocation)
        else:
            self.state.free_allocation(allocation)

    def free_once_device_passed(self, block: Block, *, sent: bool = False) -> None:
        """Free what tensor parallelism has summed, or what was ``sent`` by a ring: at once, or once the device has."""
        if sent and self.defers_sent_blocks:
            self.state.a.allocated -= block.size
            if self.state.notes is not None:
                self.state.notes.note_block_freed_after_send(block)
            self.free_once_sent(block)
            return
        behind = self.host_lead_launches() if self.reduces and not sent else 0.0
        if not behind:
            self.state.free(block)
            return
        self.state.a.allocated -= block.size
        block.state = WAITING
        self.waiting.append((self.launched + behind, block))

    def free_allocation_once_device_passed(self, allocation: Allocation, *, sent: bool = False) -> None:
        """Free as :meth:`free_once_device_passed` does, and write it into the journal."""
        block, instruction = allocation
        self.state.journal.new_instructions.append(instruction)
        self.state.journal.new_sizes.append(-block.size)
        self.free_once_device_passed(block, sent=sent)

    def drop_replaced_output(self) -> None:
        """The schedule's variable has another output."""
        if self.finished_output is not None:
            self.free_output(self.finished_output, self.output_tensor_name(0), sent=self.state.rank.sends[0])
            self.finished_output = None

    def on_step_end(self) -> None:
        """The schedule's step is through, and the host waits for the gradients' norm."""
        self.drop_replaced_output()
        if self.gradient is not None:
            self.free_output(self.gradient, GRADIENT, sent=True)
            self.gradient = None
        self.output = None
        self.shelf.synchronize()
        self.ring.synchronize()
        for block in self.ring.pop_due():
            self.state.a.free_and_merge(block)
        self.synchronize_device()

    def free_output(self, block: Block, name: str, *, sent: bool) -> None:
        """Free a block: at once, or once the device has sent it."""
        state = self.state
        state.journal.new_instructions.append(off_tape_instruction(ACTIVATIONS, name, "end of a backward"))
        state.journal.new_sizes.append(-block.size)
        behind = self.host_lead_launches() if sent else 0.0
        own_send = name == GRADIENT and not state.rank.keeps_last_output
        exchanged = self.launched if own_send else self.launched_before_exchange
        if exchanged + behind <= self.launched:
            state.free(block)
            return
        state.a.allocated -= block.size
        block.state = WAITING
        self.waiting.append((exchanged + behind, block))

    def output_tensor_name(self, chunk: int) -> str:
        """What the output of a chunk is called."""
        return self.state.rank.chunks[chunk][-1].trace.logits.split("#")[0] or INPUT

    def host_lead_launches(self) -> float:
        """Launches that the host is ahead of its device. A first step's makes up no lead, which compiles and loads
        kernels; DeepSpeed's of 2022 does neither: CUDA before 11.7 loads them with the context."""
        leads = self.reduces or self.state.step > 1
        return host_lead_launches(self.launched, self.state.rank.device_over_host_time) if leads else 0.0

    def shift_micro_batches(self, shift: int) -> None:
        """Shift the numbers of micro-batches by those that were left out."""
        if self.output is not None:
            self.output = self.output[0], self.output[1] + shift

    def fingerprint(self, last: int) -> object:
        """Equal for two instants at which the same is held, and is let go alike from then on; ``last`` is the latest
        micro-batch.

        The lag stands for ``launched``: it grows with each computation until the queue is full, so that two instants
        with equal ones have none or a full queue, and all later ones are equal too.
        """
        if not self.possible:
            return None
        blocks = tuple(block.address if block is not None else -1 for block in (self.finished_output, self.gradient))
        output = (self.output[0], self.output[1] - last) if self.output is not None else None
        shelved = tuple((at_s, allocation[0].address) for at_s, allocation in self.shelf.waiting_items())
        sent = tuple((at_s, block.address) for at_s, block in self.ring.waiting_items())
        return (
            blocks,
            output,
            self.host_lead_launches(),
            self.launched - self.launched_before_exchange,
            shelved,
            sent,
            self.ring.clock_state_key(),
            tuple((limit - self.launched, block.address) for limit, block in self.waiting),
        )
