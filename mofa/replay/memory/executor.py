"""Executes a rank's training steps on an allocator: start, forwards and backwards, reduction, optimizer."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from mofa.replay.allocator.caching import Allocator
from mofa.replay.allocator.pools import Block
from mofa.replay.allocator.timeline import ACTIVATIONS, BUFFERS, Instruction, off_tape_instruction
from mofa.replay.memory import deepspeed
from mofa.replay.memory.block_executor import BlockExecutor
from mofa.replay.memory.dispatcher_retention import BLOCKS
from mofa.replay.memory.fsdp_and_optimizer import (
    free_last_gathered_buffer,
    gather_all_groups,
    gather_group_weights,
    reduce_chunk_gradients,
    step_optimizer,
)
from mofa.replay.memory.paired_passes import BlockRun, block_runs_of_pair
from mofa.replay.memory.pass_state import Allocation, ChunkPass, Slots
from mofa.replay.memory.rank_start import allocate_rank_start
from mofa.replay.memory.shared_recordings import SharedRecordings
from mofa.replay.memory.steady_state import SteadyStatePlayer
from mofa.replay.rank.description import Rank
from mofa.replay.rank.program import GRADIENT, INPUT, BlockProgram
from mofa.replay.rank.routing_drift import StepProgramsOfDrawnTokens


class StepExecutor(BlockExecutor):
    """Plays a rank's steps on an allocator and records them, as :mod:`mofa.replay.memory.rank_memory` asks."""

    def __init__(
        self, rank: Rank, allocator: Allocator, *, skip_rounds: bool = True, recordings: SharedRecordings | None = None
    ) -> None:
        super().__init__(rank, allocator, recordings)
        self.drawn: StepProgramsOfDrawnTokens | None = None
        following = zip(rank.computations, rank.computations[1:], strict=False) if rank.pairs_passes else ()
        self.backward_beside = {
            (c, i): (b, j) for (back, b, j), (kind, c, i) in following if back == "B" and kind == "F"
        }
        """The backward that runs beside each forward, both by chunk and micro-batch."""
        self.played_in_forward = frozenset(self.backward_beside.values())
        self.steady = self._steady(skip_rounds=skip_rounds)

    def _steady(self, *, skip_rounds: bool) -> SteadyStatePlayer:
        beside = self.sends, self.retained, self.received_inputs
        return SteadyStatePlayer(self.state, *beside, self.recordings, self.play_computation, skip_rounds=skip_rounds)

    def programs_of(self, chunk: int, micro_batch: int) -> list[BlockProgram]:
        """The programs of a chunk's blocks in a micro-batch."""
        return self.programs[chunk] if self.drawn is None else self.drawn.block_programs_of_chunk(chunk, micro_batch)

    def draw_tokens(self) -> None:
        """Draw the tokens of the next step. From here on no computation repeats another."""
        if self.drawn is None:
            assert self.rank.routing_drift is not None
            self.drawn = StepProgramsOfDrawnTokens(
                self.rank.routing_drift, self.recordings.block_program, self.programs
            )
            self.steady = self._steady(skip_rounds=False)
            self.state.a.stop_keeping_empty_bins()
        self.drawn.begin_step()

    # -- a step
    def allocate_parameters_and_buffers(self) -> None:
        """Allocate parameters, then the buffers that the framework keeps beside them."""
        self.state.highest.append((0, 0, 0, 0))
        allocate_rank_start(self.state)

    def run_step(self) -> None:
        """Forwards and backwards of all micro-batches, then the optimizer."""
        r = self.rank
        self.state.step += 1
        self.state.journal.steps.append(self.state.journal.num_events)
        self.state.a.peak_allocated = self.state.a.allocated
        self.state.highest.append((0, 0, 0, 0))
        start = self.state.num_events_and_allocated_bytes()
        self.state.journal.computations.append((start[0], "start", 0, 0))
        if self.rank.deepspeed != "bf16":  # whose 16-bit gradients stay until the next backward
            for allocation in self.state.grads:
                self.state.free_allocation(allocation)
            self.state.grads = []
        self.state.begun = set()
        self.state.note_peak_since(start)
        if r.preallocated and self.state.step == 1:
            self.prepare_pipeline()
        else:
            gather_all_groups(self.state)
        self.received_inputs.on_step_begin()
        self.steady.play_computations()
        start = self.state.num_events_and_allocated_bytes()
        if self.state.unsharded:
            self.state.journal.computations.append((start[0], "reduce", 0, 0))
            for c in list(self.state.unsharded):
                reduce_chunk_gradients(self.state, c)
            start = self.state.num_events_and_allocated_bytes()
        self.state.journal.computations.append((start[0], "optimizer", 0, 0))
        step_optimizer(self.state)
        self.state.note_peak_since(start)

    def prepare_pipeline(self) -> None:
        """Before its first step a pipeline runs each chunk forward on zeros, to know what it hands on, and makes the
        buffers that it receives inputs in; then those for gradients (torch/distributed/pipelining/stage.py,
        ``_shape_inference``)."""
        r = self.rank
        if not any((*r.receives, *r.sends)):
            return
        instruction = off_tape_instruction(BUFFERS, "pipeline's receive buffers", "start of the step")
        for c, pieces in enumerate(r.chunks):
            zeros = None if c in r.first_chunks else self.state.allocate(r.stage_boundary_bytes, instruction)
            self.take_first_forward_buffers()
            x = zeros[0] if zeros is not None else None
            for g, (rank_block, code) in enumerate(zip(pieces, self.programs[c], strict=True)):
                gather_group_weights(self.state, c, g)
                slots: Slots = [None] * code.num_slots
                if zeros is None or x is not zeros[0]:
                    slots[code.input_slot] = x
                self.run_block(code, code.shape_inference, slots, "trial forward", rank_block)
                out = code.logits if code.logits >= 0 else code.output_slot
                after, slots[out] = slots[out], None
                self.free_slots(code.free_remaining, slots)
                x = after
            free_last_gathered_buffer(self.state)
            for allocation in self.handed_on.values():
                self.state.free_allocation(allocation)
            self.handed_on = {}
            if x is not None:
                self.state.free_allocation(
                    (x, off_tape_instruction(ACTIVATIONS, self.sends.output_tensor_name(c), "end of a trial forward"))
                )
            if zeros is not None:
                self.state.free_allocation(zeros)
            start = self.state.num_events_and_allocated_bytes()
            for _ in range(r.num_micro_batches if r.receives[c] else 0):
                self.state.allocate(r.stage_boundary_bytes, instruction)
            self.state.note_peak_since(start)
        start = self.state.num_events_and_allocated_bytes()
        for c in range(len(r.chunks)):
            for _ in range(r.num_micro_batches if r.sends[c] else 0):
                self.state.allocate(r.stage_boundary_bytes, instruction)
        self.state.note_peak_since(start)

    def fingerprint_between_steps(self) -> object:
        """A fingerprint of the state between steps: after equal ones, steps go alike."""
        grads = (block for block, _ in self.state.grads)
        until_next_step = (
            block for items in (self.state.turned, self.state.input_grads) for _, block in sorted(items.items())
        )
        addresses = tuple(b.address for b in (*grads, *until_next_step))
        return (
            self.state.a.state_fingerprint(),
            addresses,
            self.retained.retained_addresses(),
            self.received_inputs.block_addresses(),
        )

    def play_computation(self, kind: str, chunk: int, micro_batch: int) -> None:
        """Play a computation op by op."""
        if (chunk, micro_batch) in self.state.passes:
            self.state.passes[chunk, micro_batch].restore_slots()
        if kind == "F" and (chunk, micro_batch) in self.backward_beside:
            self._run(
                block_runs_of_pair(
                    self.run_forward(chunk, micro_batch), self.run_backward(*self.backward_beside[chunk, micro_batch])
                )
            )
        elif kind == "F":
            self._run(self.run_forward(chunk, micro_batch))
        elif kind == "B" and (chunk, micro_batch) in self.played_in_forward:
            return
        elif kind == "B" or (kind == "W" and chunk in self.rank.first_chunks):
            self._run(self.run_backward(chunk, micro_batch))
        elif kind == "W":
            self.run_weight_backward(chunk, micro_batch)
        elif chunk not in self.rank.first_chunks:  # the first stage has no input to differentiate by: W does it all
            self._run(self.run_backward(chunk, micro_batch, hold=True))

    def _run(self, runs: Iterator[BlockRun]) -> None:
        """Run blocks one after the other."""
        for run in runs:
            self.run_block(*run)

    def run_forward(self, chunk: int, micro_batch: int) -> Iterator[BlockRun]:
        """Forward a micro-batch through a chunk, whose blocks are run by the caller."""
        r = self.rank
        x: Block | None = None
        self.take_first_forward_buffers()
        if r.receives[chunk] and not r.preallocated:
            x, _ = deepspeed.gather_received_activation_over_tp(self.state, self.sends, INPUT, "receive of an input")
            if r.keeps_received_inputs:
                self.received_inputs.on_forward_begin()
        chunk_pass = ChunkPass()
        sharded = r.gathered_params is not None and chunk not in self.state.unsharded
        for g, (rank_block, code) in enumerate(zip(r.chunks[chunk], self.programs_of(chunk, micro_batch), strict=True)):
            if sharded:
                gather_group_weights(self.state, chunk, g)
            slots: Slots = [None] * code.num_slots
            if x is not None:
                slots[code.input_slot] = x
            yield BlockRun(code, code.forward, slots, "forward", rank_block, chunk * BLOCKS + g)
            x = None
            given = code.logits if code.logits >= 0 else code.output_slot
            if given >= 0:
                x, slots[given] = slots[given], None
            chunk_pass.slots.append(slots)
        free_last_gathered_buffer(self.state)
        self.received_inputs.on_graph_freed()
        for allocation in self.handed_on.values():
            self.state.free_allocation(allocation)
        self.handed_on = {}
        for allocation in self.cache:
            self.state.free_allocation(allocation)
        self.cache = []
        if (
            x is not None and r.feeds_own_chunk[chunk]
        ):  # the next stage is here: its input buffer becomes this tensor for good
            self.hold_until_next_step(
                self.state.turned,
                chunk,
                micro_batch,
                x,
                off_tape_instruction(ACTIVATIONS, INPUT, "turn of the pipeline"),
            )
        elif x is not None and r.sends[chunk] and not r.preallocated:
            output = x, off_tape_instruction(ACTIVATIONS, INPUT, "send of an output")
            if r.deepspeed:
                chunk_pass.out = deepspeed.keep_rank_part_of_output(self.state, output)[0]
            else:
                self.state.free_allocation(output)
        else:
            chunk_pass.out = x
        self.state.passes[chunk, micro_batch] = chunk_pass

    def hold_until_next_step(
        self, where: dict[tuple[int, int], Block], chunk: int, micro_batch: int, block: Block, instruction: Instruction
    ) -> None:
        """Keep a tensor until the next step's takes its place."""
        old = where.get((chunk, micro_batch))
        where[chunk, micro_batch] = block
        if old is not None:
            self.state.free_allocation((old, instruction))

    def run_weight_backward(self, chunk: int, micro_batch: int) -> None:
        """Compute deferred weight gradients, then free what was kept for them."""
        self.first = chunk not in self.state.begun
        self.state.begun.add(chunk)
        chunk_pass, pieces = self.state.passes[chunk, micro_batch], self.rank.chunks[chunk]
        for n, (code, slots) in enumerate(zip(self.programs[chunk], chunk_pass.slots, strict=True)):
            instructions = code.weights_of_last if n == len(pieces) - 1 else code.weights
            self.run_block(code, instructions, slots, "backward by weights", pieces[n], chunk * BLOCKS + n)
        for code, slots in zip(self.programs[chunk], chunk_pass.slots, strict=True):
            self.free_slots(code.free_remaining, slots)
        chunk_pass.slots, chunk_pass.place = [[None]], -1

    def run_backward(self, chunk: int, micro_batch: int, hold: bool = False) -> Iterator[BlockRun]:
        """Backward a micro-batch through a chunk, whose blocks are run by the caller."""
        r = self.rank
        chunk_pass = self.state.passes[chunk, micro_batch]
        sent = self.take_forward_output(chunk, chunk_pass)
        to_the_end: list[Allocation] = []
        if r.deepspeed and r.sends[chunk]:
            assert sent is not None
            to_the_end = [*deepspeed.regather_output_for_backward(self.state, self.sends), sent]
        elif sent is not None and not r.preallocated:
            self.state.free_allocation(sent)
        dy = self.receive_output_gradient(chunk)
        if not hold:
            self.first = chunk not in self.state.begun or r.deepspeed == "bf16"
            self.state.begun.add(chunk)
        deepspeed.free_bf16_gradients(self.state)
        if r.keeps_received_inputs:
            self.received_inputs.on_backward_begin(chunk_pass.slots[0], self.programs_of(chunk, micro_batch)[0])
        dy = yield from self.run_blocks_backward(chunk, micro_batch, dy, hold=hold)
        for allocation in self.freed_at_end:
            self.state.free_allocation(allocation)
        self.freed_at_end = []
        dy = self.keep_or_free_input_gradient(chunk, micro_batch, dy, hold=hold)
        for allocation in self.handed_on.values():
            self.state.free_allocation(allocation)
        self.handed_on = {}
        if hold:
            self.free_unread_by_weight_backward(chunk, chunk_pass, sent)
        elif r.preallocated:  # until the schedule lets them go (Sends)
            chunk_pass.slots, chunk_pass.place = [[dy]], -1
        else:
            del self.state.passes[chunk, micro_batch]
        deepspeed.add_to_fp32_gradients(self.state)
        for allocation in to_the_end:
            self.state.free_allocation(allocation)

    def take_forward_output(self, chunk: int, chunk_pass: ChunkPass) -> Allocation | None:
        """What a forward left of its output; only a preallocated pipeline leaves it to the pass."""
        out = chunk_pass.out
        if not self.rank.preallocated:
            chunk_pass.out = None
        return (
            None
            if out is None
            else (out, off_tape_instruction(ACTIVATIONS, self.sends.output_tensor_name(chunk), "backward"))
        )

    def receive_output_gradient(self, chunk: int) -> Block | None:
        """The gradient of a chunk's output, where it is received in new memory."""
        r = self.rank
        dy: Block | None = None
        if r.sends[chunk] and not r.preallocated and not r.deepspeed:
            dy, _ = self.state.allocate(
                r.stage_boundary_bytes, off_tape_instruction(ACTIVATIONS, GRADIENT, "receive of a gradient")
            )
        # the buffer that a gradient is received in stays as it is: the first sum with another one is a new tensor
        self.received = (
            r.stage_boundary_bytes if r.sends[chunk] and r.preallocated and not r.defers_weight_gradients else 0
        )
        return dy

    def run_blocks_backward(
        self, chunk: int, micro_batch: int, dy: Block | None, *, hold: bool
    ) -> Generator[BlockRun, None, Block | None]:
        """Run a chunk's blocks from the last to the first; returns the gradient of its input."""
        r, chunk_pass = self.rank, self.state.passes[chunk, micro_batch]
        for n in range(len(chunk_pass.slots) - 1, -1, -1):
            code, slots = self.programs_of(chunk, micro_batch)[n], chunk_pass.slots[n]
            if dy is not None and code.output_gradient_slot >= 0:
                slots[code.output_gradient_slot] = dy
            phase = "backward by inputs" if hold else "backward"
            instructions = code.inputs if hold else code.backward
            yield BlockRun(code, instructions, slots, phase, r.chunks[chunk][n], chunk * BLOCKS + n)
            dy = None
            if code.retained_by_dispatcher:
                self.retained.retain_from_pass(chunk * BLOCKS + n, code, slots)
            if code.input_gradient_slot >= 0:
                dy, slots[code.input_gradient_slot] = slots[code.input_gradient_slot], None
                if (
                    dy is None and n == 0 and r.receives[chunk]
                ):  # it lingers: what is received gets a copy as its gradient
                    dy, _ = self.state.allocate(
                        r.stage_boundary_bytes, off_tape_instruction(ACTIVATIONS, GRADIENT, "gradient of an input")
                    )
            self.free_slots(code.free_after_backward_by_inputs if hold else code.free_remaining, slots)
        return dy

    def keep_or_free_input_gradient(
        self, chunk: int, micro_batch: int, dy: Block | None, *, hold: bool
    ) -> Block | None:
        """Keep or free the gradient of a chunk's input; returns it where the pass still has it."""
        r, instruction = self.rank, off_tape_instruction(ACTIVATIONS, GRADIENT, "end of a backward")
        if dy is not None and hold:  # stays as the received tensor's gradient (stage_backward_input)
            self.hold_until_next_step(self.state.input_grads, chunk, micro_batch, dy, instruction)
        elif dy is not None and r.keeps_received_inputs:
            self.received_inputs.on_backward_end(dy)
            return None
        elif dy is not None and not (r.preallocated and r.receives[chunk]):
            self.state.free_allocation((dy, instruction))
            return None
        return dy

    def free_unread_by_weight_backward(self, chunk: int, chunk_pass: ChunkPass, sent: Allocation | None) -> None:
        """Free what a backward by inputs leaves and the one by weights does not read."""
        if chunk_pass.slots:
            self.free_slots(self.programs[chunk][-1].free_above_last_weight, chunk_pass.slots[-1])
        if (
            sent is not None and not self.rank.sends[chunk]
        ):  # the loss stands for it in what is put off (backward_state)
            self.state.free_allocation(sent)
            chunk_pass.out = None
        chunk_pass.place = -1
