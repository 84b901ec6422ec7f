"""Executes the program of a block on a rank's allocator: what it takes, frees, keeps and hands on."""

from __future__ import annotations

from functools import cached_property, partial

from mofa.cost.memory.persistent_buffers import PYTORCH_WORKSPACE
from mofa.replay.allocator.caching import Allocator
from mofa.replay.allocator.pools import Block, OutOfDeviceMemory
from mofa.replay.allocator.timeline import BUFFERS, GRADIENTS, Instruction, off_tape_instruction
from mofa.replay.memory.dispatcher_retention import BLOCKS, DispatcherRetention
from mofa.replay.memory.pass_state import Allocation, Slots
from mofa.replay.memory.rank_state import RankState
from mofa.replay.memory.received_inputs import ReceivedInputs
from mofa.replay.memory.shared_recordings import SharedRecordings
from mofa.replay.memory.stage_outputs import DeferredFrees
from mofa.replay.rank.description import Rank, RankBlock
from mofa.replay.rank.program import (
    BORROW,
    CACHE,
    CLAIM,
    DROP_CARRIED,
    FREE,
    FREE_AT_END,
    FREE_REDUCED,
    FREE_SENT,
    GIVE_BACK,
    HOLD,
    KEEP,
    LASTING,
    NEW,
    PRODUCT,
    RENEW,
    REPLACED,
    SHELVE,
    SUM,
    BlockProgram,
    Packed,
)

WITHOUT_SLOT = frozenset((PRODUCT, LASTING, BORROW, GIVE_BACK, REPLACED, RENEW))
"""Instructions that do nothing to a slot of their block."""
FORWARDS = ("forward", "trial forward")
"""Phases that the thread of forwards runs; the others are those of autograd's thread."""


class BlockExecutor:
    """Runs blocks of a rank and holds what outlives them; :mod:`mofa.replay.memory.executor` puts steps together."""

    def __init__(self, rank: Rank, allocator: Allocator, recordings: SharedRecordings | None) -> None:
        self.state = RankState(rank, allocator)
        self.rank = rank
        self.recordings = recordings or SharedRecordings()
        self.handed_on: dict[str, Allocation] = {}
        self.cache: list[Allocation] = []
        self.first = True
        self.taken: set[tuple[int, str]] = set()
        self.borrowed: dict[tuple[int, str], Allocation] = {}
        self.lasts = False
        self.received = 0
        self.freed_at_end: list[Allocation] = []
        self.retained = DispatcherRetention(partial(self.recordings.block_programs_by_chunk, rank))
        self.sends = DeferredFrees(self.state)
        self.received_inputs = ReceivedInputs(self.state)

    @cached_property
    def programs(self) -> list[list[BlockProgram]]:
        """The programs of the rank's blocks, per chunk."""
        return self.recordings.block_programs_by_chunk(self.rank)

    # -- computations
    def take_cublas_workspace(self, thread: str) -> None:
        """cuBLAS takes a workspace for each thread that launches products, the main one and autograd's, at its first.

        From torch's allocator since its pull request 86167 of autumn 2022, after the DeepSpeed that is played here.
        """
        if thread in self.state.threads:
            return
        self.state.threads.add(thread)
        start = self.state.num_events_and_allocated_bytes()
        if not self.rank.deepspeed:
            self.state.allocate(
                PYTORCH_WORKSPACE,
                off_tape_instruction(BUFFERS, "cuBLAS's workspace", f"first {thread}: workspace of cuBLAS"),
            )
            self.state.note_peak_since(start)

    def take_persistent_buffer(self, instruction: Instruction, index: int) -> None:
        """Take a buffer, where it is the first of its name on the rank, or of the block with this index.

        It stays for good, or until it is given back.
        """
        key = index if instruction.slot else -1, instruction.name
        if key not in self.taken:
            self.taken.add(key)
            allocation = self.state.allocate(instruction.size, instruction)
            if instruction.code == BORROW:
                self.borrowed[key] = allocation

    def give_back_persistent_buffer(self, instruction: Instruction, index: int) -> None:
        """Free a buffer that was taken until now, if it was: no later pass does either."""
        allocation = self.borrowed.pop((index if instruction.slot else -1, instruction.name), None)
        if allocation is not None:
            self.state.free_allocation(allocation)
            if self.state.notes is not None:
                self.state.notes.clean = False

    def take_first_forward_buffers(self) -> None:
        """Take what the first forward keeps for good."""
        if self.state.step == 1 and not self.lasts:
            self.lasts = True
            for nbytes in self.rank.first_forward_buffers:
                self.state.allocate(nbytes, off_tape_instruction(BUFFERS, "buffer kept for good", "first forward"))

    def run_block(
        self, code: BlockProgram, instructions: Packed, slots: Slots, phase: str, rank_block: RankBlock, index: int = 0
    ) -> None:
        """Run a block's program. This is the innermost loop: what is rare is in functions of its own."""
        start = self.state.journal.num_events, self.state.a.allocated
        self.state.journal.new_passages.append((start[0], phase, rank_block.name))
        take, free = self.state.allocate_rounded, self.state.free
        did, sizes = self.state.journal.new_instructions.append, self.state.journal.new_sizes.append
        carried, self.handed_on = self.handed_on, {}
        for instruction, kind, slot, size, pool in instructions:
            if kind == NEW:
                try:
                    block = take(size, pool)
                except OutOfDeviceMemory as full:
                    block = self.state.note_out_of_memory(full, instruction, self.state.journal.num_events)
                slots[slot] = block
                did(instruction)
                sizes(block.size)
                continue
            old = slots[slot]
            if kind == FREE:
                if old is not None:
                    did(instruction)
                    sizes(-old.size)
                    free(old)
                    slots[slot] = None
            elif kind in WITHOUT_SLOT:
                self.run_off_slot_instruction(kind, instruction, phase, index, code)
            elif kind == SUM:
                if old is None and self.received:
                    slots[slot], _ = self.state.allocate(self.received, instruction)
                    self.received = 0
            elif kind == CLAIM:
                slots[slot] = self.take_over_tensor_of_previous_block(
                    carried.pop(code.claims[slot], None), instruction, size
                )
            elif kind == DROP_CARRIED:
                carried = self.free_tensors_of_previous_block(carried, code)
            elif kind == KEEP:
                if old is not None:
                    self.keep_first_gradient(old, instruction, slots, index, rank_block)
            elif old is not None:
                self.hand_over_slot(kind, (old, instruction), code.holds.get(slot, ""))
                slots[slot] = None
        for allocation in carried.values():
            self.state.free_allocation(allocation)
        self.sends.after_block(phase, rank_block)
        self.state.note_peak_since(start)

    def run_off_slot_instruction(
        self, kind: int, instruction: Instruction, phase: str, index: int, code: BlockProgram
    ) -> None:  # fmt: skip
        """What an instruction takes or lets go that is in none of the block's slots."""
        if kind == PRODUCT:
            self.take_cublas_workspace("forward" if phase in FORWARDS else "backward")
        elif kind in (LASTING, BORROW):
            self.take_persistent_buffer(instruction, index)
        elif kind == GIVE_BACK:
            self.give_back_persistent_buffer(instruction, index)
        elif kind == REPLACED:
            self.sends.drop_replaced_output()
            if (
                self.state.notes is not None and self.rank.keeps_last_output
            ):  # another pass's output goes, if there is one
                self.state.notes.clean = False
        elif kind == RENEW:
            received = code.input_slot if phase == "forward" and index % BLOCKS == 0 else -1
            for gone in self.retained.release_retained_of_layer(index):
                if gone[1].slot != received or not self.received_inputs.is_held_by_graph(gone[0]):
                    self.state.free_allocation(gone)

    def take_over_tensor_of_previous_block(
        self, carried: Allocation | None, instruction: Instruction, size: int
    ) -> Block:
        """The memory of a tensor that the previous block handed on, by its new name; new memory where it did not."""
        taken = (
            self.state.allocate(size, instruction)
            if carried is None
            else self.state.rename_allocation(carried, instruction)
        )
        return taken[0]

    def free_tensors_of_previous_block(
        self, carried: dict[str, Allocation], code: BlockProgram
    ) -> dict[str, Allocation]:
        """Free what the block before handed on, but what this block takes over later: gradients being reduced."""
        later = {name: allocation for name, allocation in carried.items() if name in code.claims.values()}
        for name, allocation in carried.items():
            if name not in later:
                self.state.free_allocation(allocation)
        return later

    def hand_over_slot(self, kind: int, allocation: Allocation, name: str) -> None:
        """Who has a tensor from here on that leaves its slot: the next block by a name, or who frees it later."""
        if kind == HOLD:
            self.handed_on[name] = allocation
        elif kind == CACHE:
            self.cache.append(allocation)
        elif kind == FREE_AT_END:
            self.freed_at_end.append(allocation)
        elif kind == SHELVE:
            self.sends.shelve(allocation)
        elif kind in (FREE_REDUCED, FREE_SENT):
            self.sends.free_allocation_once_device_passed(allocation, sent=kind == FREE_SENT)

    def free_slots(self, instructions: tuple[Instruction, ...], slots: Slots) -> None:
        """Free what is left in slots."""
        for instruction in instructions:
            block = slots[instruction.slot]
            if block is not None:
                self.state.free_allocation((block, instruction))
                slots[instruction.slot] = None

    def keep_first_gradient(
        self, block: Block, instruction: Instruction, slots: Slots, index: int, rank_block: RankBlock
    ) -> None:
        """Keep the first micro-batch's gradient as the parameter's; under FSDP's pipelines as an fp32 copy."""
        if self.rank.grads_always or not self.first:
            return
        as_gradient = instruction._replace(group=GRADIENTS)
        if self.rank.gathered_params is not None:
            self.state.accumulators.setdefault(index, []).append(
                self.state.allocate(2 * (instruction.size or block.size), as_gradient)
            )
        elif not (self.rank.tied and rank_block.trace.name == "embedding"):
            self.state.grads.append(self.state.rename_allocation((block, instruction), as_gradient))
            slots[instruction.slot] = None
