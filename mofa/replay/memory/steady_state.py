"""A rank's forwards and backwards of a step: played op by op, repeated from recordings, or left out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING
from weakref import WeakMethod

from mofa.replay.allocator.pools import Block, BlockSlots
from mofa.replay.memory import deepspeed
from mofa.replay.memory.fsdp_and_optimizer import allocate_ddp_buckets, copy_out_gathered_groups, reduce_chunk_gradients
from mofa.replay.memory.pass_state import ChunkPass
from mofa.replay.memory.recording import PassBlocks, RecordedBlockEnd, Recorder, Recording, RetainedBlock
from mofa.replay.memory.repeated import repeat_recording
from mofa.replay.memory.shared_recordings import Which
from mofa.replay.memory.skipped_rounds import (
    STEADY_FORWARDS_OF_LATER_STEP,
    STEADY_FORWARDS_WITH_RETENTION,
    MicroBatchShifts,
    RoundSkipper,
)

if TYPE_CHECKING:
    from mofa.replay.memory.dispatcher_retention import DispatcherRetention
    from mofa.replay.memory.rank_state import RankState
    from mofa.replay.memory.received_inputs import ReceivedInputs
    from mofa.replay.memory.shared_recordings import SharedRecordings
    from mofa.replay.memory.stage_outputs import DeferredFrees

TRIES = 3
"""Computations of a kind and chunk that are noted down before none is expected to repeat: the first have buffers."""


PlayComputation = Callable[[str, int, int], None]
"""Plays a kind, chunk and micro-batch op by op."""


def without_reference_cycle(play: PlayComputation) -> PlayComputation:
    """The same method without keeping its object, which keeps what calls it. With no cycle, what was played is gone
    with its last reader, though the cycle collector is off meanwhile."""
    method = WeakMethod(play)

    def call(kind: str, chunk: int, micro_batch: int) -> None:
        if (bound := method()) is not None:
            bound(kind, chunk, micro_batch)

    return call


class SteadyStatePlayer:
    """Leads a rank through the computations of its steps; ``play`` plays a kind, chunk and micro-batch op by op."""

    def __init__(
        self, state: RankState, sends: DeferredFrees, retained: DispatcherRetention, received_inputs: ReceivedInputs,
        recordings: SharedRecordings, play: PlayComputation, *, skip_rounds: bool,
    ) -> None:  # fmt: skip
        self.state, self.sends, self.retained, self.recordings = state, sends, retained, recordings
        self.received_inputs, self.play = received_inputs, without_reference_cycle(play)
        rank = state.rank
        kinds = len({k for k, _, _ in rank.computations})
        sizes = {kinds * n for n in (1, len(rank.chunks), rank.round_length)}
        self.round_sizes = tuple(sorted(sizes)) if skip_rounds else ()
        self.repeats = skip_rounds and not (sends.reduces or sends.shelves or rank.pairs_passes)
        self.recordings_of: dict[Which, Recording] = {}
        self.tries: dict[Which, int] = {}
        self.played: set[tuple[str, int]] = set()
        self.places: dict[object, int] = {}
        self.pieces = [{rank_block.name: rank_block for rank_block in chunk} for chunk in rank.chunks]
        self.lasts = {c: n for n, (_, c, _) in enumerate(rank.computations)}

    @cached_property
    def micro_batch_shifts(self) -> MicroBatchShifts:
        """By how many micro-batches later rounds repeat earlier ones: the same in every step."""
        return MicroBatchShifts(self.state.rank.computations, self.round_sizes)

    def play_computations(self) -> None:
        """All forwards and backwards, but for rounds that would only repeat others."""
        state = self.state
        computations, passes, begun = state.rank.computations, state.passes, state.begun
        num_chunks = len(state.rank.chunks)
        steady_rounds = RoundSkipper(computations, self.round_sizes, self.micro_batch_shifts)
        retries: dict[int, int] = {}
        n = 0
        while n < len(computations):
            self._computation(*computations[n])
            if state.rank.reduces_by_chunk and self.lasts.get(computations[n][1]) == n:
                reduce_chunk_gradients(state, computations[n][1])
            n += 1
            if (
                len(begun) < num_chunks
                or (state.rank.pairs_passes and computations[n - 1][0] == "B")  # played by the forward behind it
                or not steady_rounds.is_round_end(n)
                or not steady_rounds.has_unchanged_in_flight(len(passes))
            ):
                continue
            last = computations[n - 1][2]
            retries[n] = state.a.num_retries
            skipped, period = steady_rounds.num_to_skip(n, self._places_held(last), state.a.state_fingerprint)
            if not skipped:
                peaks = state.highest[-1][0], state.a.peak_reserved
                if num_chunks > 1 and self.retained.may_retain:
                    skipped, period = steady_rounds.num_rounds_to_skip_once_settled(
                        n, peaks, STEADY_FORWARDS_WITH_RETENTION
                    )
                elif state.step == 1:
                    skipped, period = steady_rounds.num_rounds_to_skip_once_settled(
                        n, state.a.peak_reserved, steady_rounds.num_quiet_forwards
                    )
                else:
                    skipped, period = steady_rounds.num_rounds_to_skip_once_settled(
                        n, peaks, STEADY_FORWARDS_OF_LATER_STEP
                    )
            if skipped:
                shift = computations[n + skipped - 1][2] - last
                moved = {(k, j + shift): chunk_pass for (k, j), chunk_pass in passes.items()}
                passes.clear()
                passes.update(moved)
                self.sends.shift_micro_batches(shift)
                state.journal.skipped_rounds.append((len(state.journal.computations), skipped, period))
                in_period = state.a.num_retries - retries.get(n - period, state.a.num_retries)
                state.a.num_retries += in_period * (skipped // period)
                n += skipped
        self.sends.on_step_end()

    def _places_held(self, last: int) -> object:
        """A fingerprint of the end of a round: equal where the same lies in the same places.

        ``last`` is the micro-batch of the last computation.
        """
        state = self.state
        if state.turned or state.input_grads:  # each waits for the next step's: nothing comes back in this one
            return object()
        passes = [
            (
                c,
                i - last,
                place if (place := chunk_pass.place) >= 0 else chunk_pass.identity_number_of_addresses(self.places),
            )
            for (c, i), chunk_pass in state.passes.items()
        ]
        gradients = tuple([block.address for block, _ in deepspeed.live_bf16_gradients(state) if block is not None])
        received = self.received_inputs.block_addresses()
        return self.sends.fingerprint(last), self.retained.retained_addresses(), received, gradients, *passes

    def _computation(self, kind: str, chunk: int, micro_batch: int) -> None:
        state = self.state
        state.journal.computations.append((state.journal.num_events, kind, chunk, micro_batch))
        if kind == "F" and state.rank.buckets:
            allocate_ddp_buckets(state)
        if kind == "F" and state.rank.reduces_by_chunk:
            copy_out_gathered_groups(state, chunk)
        if self.sends.possible:
            self.sends.before_computation(kind, chunk)
        self._play(kind, chunk, micro_batch)
        if self.sends.possible:
            self.sends.after_computation(kind, chunk, micro_batch)

    def _play(self, kind: str, chunk: int, micro_batch: int) -> None:
        state = self.state
        gathers = kind == "F" and state.rank.gathered_params is not None and chunk not in state.unsharded
        if not self.repeats or gathers or (kind in "BW" and chunk not in state.begun):  # the first gradients stay
            self.play(kind, chunk, micro_batch)
            self.played.add((kind, chunk))
            return
        retains = self.retained.may_retain and self.retained.chunk_retains_tensors(chunk)
        which = kind, chunk, retains, self.received_inputs.which_are_present(), self.sends.defers_sent_blocks
        recording = self.recordings_of.get(which)
        known = recording is None and self.recordings.has_recording(state.rank, which)
        if known and (kind, chunk) in self.played:
            recording = self.recordings_of[which] = self.recordings.recording(state.rank, which)
        if recording is not None:
            self._repeat(which, recording, micro_batch)
        elif not known and self.tries.get(which, 0) < TRIES:
            self._note_down(which, micro_batch)
        else:
            self.play(kind, chunk, micro_batch)
        self.played.add((kind, chunk))

    def _blocks_outside(self, kind: str, chunk: int) -> list[RetainedBlock]:
        """Blocks outside its pass that a computation finds or leaves; always as many, in one order."""
        state, received = self.state, self.received_inputs.input_and_gradient()
        if self.retained.may_retain:
            return [*self.retained.retained_blocks(chunk), *received]
        return [*(deepspeed.live_bf16_gradients(state) if kind == "B" else ()), *received]

    def _leave(self, kind: str, chunk: int, blocks: list[Block | None]) -> None:
        """Put these blocks in place behind a computation that was repeated."""
        if self.state.rank.keeps_received_inputs:
            self.received_inputs.replace_blocks(*blocks[-2:])
            blocks = blocks[:-2]
        left = [block for block in blocks if block is not None]
        if self.retained.may_retain:
            self.retained.replace_retained_blocks(chunk, left)
        elif kind == "B" and self.state.rank.deepspeed:
            deepspeed.replace_gradient_blocks(self.state, left)

    def _repeat(self, which: Which, recording: Recording, micro_batch: int) -> None:
        """Repeat a computation from a recording."""
        state = self.state
        kind, c, *_ = which
        chunk_pass = state.passes.get((c, micro_batch))
        if chunk_pass is None:
            chunk_pass = state.passes[c, micro_batch] = ChunkPass()
            chunk_pass.recorded = PassBlocks(state.a.new_block_slots())
        elif chunk_pass.recorded is None:  # begun before there were notes
            self.play(kind, c, micro_batch)
            return
        if not recording.requests:
            recording = self.recordings_of[which] = recording.for_allocator(state.a)
        recorded = chunk_pass.recorded
        outside = self._blocks_outside(kind, c)
        if outside:
            recorded.append_retained(outside)
        passed = partial(self._passed, c) if recording.block_ends else None
        start, before, end = repeat_recording(
            recording, recorded, state.a, state.journal, state.note_out_of_memory, passed
        )
        if outside:
            self._leave(kind, c, [recorded.blocks[slot] if slot >= 0 else None for slot in recording.retained_slots])
        if state.a.peak_allocated > state.highest[-1][0]:
            state.highest[-1] = (state.a.peak_allocated, start, before, end)
        if kind in "BW" and not state.rank.preallocated:
            del state.passes[c, micro_batch]
        else:
            chunk_pass.place = -1

    def _passed(self, chunk: int, passed: RecordedBlockEnd, blocks: BlockSlots) -> None:
        """A piece is through in a computation that is repeated."""
        for slot in passed.sent:
            self.sends.free_once_sent(blocks[slot])
        self.sends.after_block(passed.phase, self.pieces[chunk][passed.name])

    def _note_down(self, which: Which, micro_batch: int) -> None:
        """Play a computation and record it; it can be repeated if it touched only its pass and what is retained."""
        state = self.state
        kind, c, *_ = which
        chunk_pass = state.passes.get((c, micro_batch))
        if chunk_pass is not None and chunk_pass.recorded is None:
            self.play(kind, c, micro_batch)
            return
        self.tries[which] = self.tries.get(which, 0) + 1
        recorder = Recorder(
            state.a,
            state.journal,
            chunk_pass.recorded if chunk_pass is not None else None,
            self._blocks_outside(kind, c),
        )
        if chunk_pass is not None:
            chunk_pass.restore_slots()
        with state.recording_into(recorder):
            self.play(kind, c, micro_batch)
        chunk_pass = state.passes.get((c, micro_batch))
        left = [block for block, _ in self._blocks_outside(kind, c)]
        recording = recorder.finished_recording(
            [*chunk_pass.slots, [chunk_pass.out]] if chunk_pass is not None else (), left
        )
        if recording is not None:
            self.recordings_of[which] = recording
            self.recordings.add_recording(recording, state.rank, which)
        if chunk_pass is not None:
            chunk_pass.recorded = recorder.recorded if recording is not None else None
