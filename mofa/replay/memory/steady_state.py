"""A rank's forwards and backwards of a step: played op by op, repeated from recordings, or left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mofa.replay.allocator.pools import Block
from mofa.replay.memory import deepspeed
from mofa.replay.memory.fsdp_and_optimizer import awaited, buckets, reduce
from mofa.replay.memory.pass_state import Pass
from mofa.replay.memory.recording import Held, Notes, Routine, Waiting
from mofa.replay.memory.repeated import repeat
from mofa.replay.memory.shared_recordings import Which
from mofa.replay.memory.skipped_rounds import LATER, LONG, Rounds

if TYPE_CHECKING:
    from mofa.replay.memory.dispatcher_retention import Lingering
    from mofa.replay.memory.rank_state import RankState
    from mofa.replay.memory.shared_recordings import Repertoire
    from mofa.replay.memory.stage_outputs import Sends

TRIES = 3
"""Computations of a kind and chunk that are noted down before none is expected to repeat: the first have buffers."""


class Steady:
    """Leads a rank through the computations of its steps; ``play`` plays a kind, chunk and micro-batch op by op."""

    def __init__(
        self, state: RankState, sends: Sends, lingering: Lingering, repertoire: Repertoire,
        play: Callable[[str, int, int], None], *, skip_rounds: bool,
    ) -> None:  # fmt: skip
        self.state, self.sends, self.lingering, self.repertoire = state, sends, lingering, repertoire
        self.play = play
        rank = state.rank
        kinds = len({k for k, _, _ in rank.computations})
        sizes = {kinds * n for n in (1, len(rank.chunks), rank.round_length)}
        self.round_sizes = tuple(sorted(sizes)) if skip_rounds else ()
        self.repeats = skip_rounds and not self.sends.late_inside
        self.routines: dict[Which, Routine] = {}
        self.tries: dict[Which, int] = {}
        self.played: set[tuple[str, int]] = set()
        self.places: dict[object, int] = {}
        self.lasts = {c: n for n, (_, c, _) in enumerate(rank.computations)}

    def compute(self) -> None:
        """All forwards and backwards, but for rounds that would only repeat others."""
        state = self.state
        acts, passes, begun = state.rank.computations, state.passes, state.begun
        num_chunks = len(state.rank.chunks)
        rounds = Rounds(acts, self.round_sizes)
        retries: dict[int, int] = {}
        n = 0
        while n < len(acts):
            self._computation(*acts[n])
            if state.rank.unshards and self.lasts.get(acts[n][1]) == n:
                reduce(state, acts[n][1])
            n += 1
            if len(begun) < num_chunks or not rounds.end(n) or not rounds.same(len(passes)):
                continue
            last = acts[n - 1][2]
            retries[n] = state.a.num_retries
            skipped, period = rounds.repeated(n, self._held(last), state.a.fingerprint)
            if not skipped:
                peaks = state.highest[-1][0], state.a.peak_reserved
                if num_chunks > 1 and self.lingering.possible:
                    skipped, period = rounds.settled(n, peaks, LONG)
                elif state.step == 1:
                    skipped, period = rounds.settled(n, state.a.peak_reserved, rounds.quiet)
                else:
                    skipped, period = rounds.settled(n, peaks, LATER)
            if skipped:
                shift = acts[n + skipped - 1][2] - last
                moved = {(k, j + shift): at for (k, j), at in passes.items()}
                passes.clear()
                passes.update(moved)
                self.sends.moved(shift)
                state.journal.left_out.append((len(state.journal.computations), skipped, period))
                in_period = state.a.num_retries - retries.get(n - period, state.a.num_retries)
                state.a.num_retries += in_period * (skipped // period)
                n += skipped
        self.sends.end()

    def _held(self, last: int) -> object:
        """Equal for two ends of rounds at which the same lies in the same places; ``last`` is the micro-batch of the
        last act."""
        state = self.state
        if state.turned or state.input_grads:  # each waits for the next step's: nothing comes back in this one
            return object()
        passes = [(c, i - last, at.placed(self.places)) for (c, i), at in state.passes.items()]
        found = tuple([block.address for block, _ in deepspeed.waiting(state) if block is not None])
        return self.sends.fingerprint(last), self.lingering.places(), found, *passes

    def _computation(self, kind: str, c: int, i: int) -> None:
        state = self.state
        state.journal.computations.append((state.journal.num_events, kind, c, i))
        if kind == "F" and state.rank.buckets:
            buckets(state)
        if kind == "F" and state.rank.unshards:
            awaited(state, c)
        self.sends.begin(kind)
        self._play(kind, c, i)
        self.sends.after(kind, c, i)

    def _play(self, kind: str, c: int, i: int) -> None:
        state = self.state
        gathers = kind == "F" and state.rank.gathered_params is not None and c not in state.unsharded
        if not self.repeats or gathers or (kind in "BW" and c not in state.begun):  # the first gradients stay
            self.play(kind, c, i)
            self.played.add((kind, c))
            return
        which = kind, c, self.lingering.possible and self.lingering.of(c)
        routine = self.routines.get(which)
        known = routine is None and self.repertoire.knows(state.rank, which)
        if known and (kind, c) in self.played:
            routine = self.routines[which] = self.repertoire.routine(state.rank, which)
        if routine is not None:
            self._repeat(which, routine, i)
        elif not known and self.tries.get(which, 0) < TRIES:
            self._note_down(which, i)
        else:
            self.play(kind, c, i)
        self.played.add((kind, c))

    def _found(self, kind: str, c: int) -> list[Waiting]:
        """What a computation finds, or leaves, of others than its pass, always as much in the same order."""
        state = self.state
        if self.lingering.possible:
            return self.lingering.waiting(c)
        return deepspeed.waiting(state) if kind == "B" else []

    def _leave(self, kind: str, c: int, blocks: list[Block]) -> None:
        """That is there behind a computation that was repeated."""
        state = self.state
        if self.lingering.possible:
            self.lingering.replace(c, blocks)
        else:
            deepspeed.replace(state, blocks)

    def _repeat(self, which: Which, routine: Routine, i: int) -> None:
        """A computation from the notes of an earlier one."""
        state = self.state
        kind, c, _ = which
        at = state.passes.get((c, i))
        if at is None:
            at = state.passes[c, i] = Pass()
            at.held = Held()
        elif at.held is None:  # begun before there were notes
            self.play(kind, c, i)
            return
        if not routine.requests:
            routine = self.routines[which] = routine.to(state.a)
        held = at.held
        found = self._found(kind, c)
        if found:
            held.await_(found)
        start, before, end = repeat(routine, held, state.a, state.journal, state.overflow)
        if found:
            self._leave(kind, c, [held.blocks[slot] for slot in routine.left])
        if state.a.peak_allocated > state.highest[-1][0]:
            state.highest[-1] = (state.a.peak_allocated, start, before, end)
        if kind in "BW" and not state.rank.preallocated:
            del state.passes[c, i]
        else:
            at.place = -1

    def _note_down(self, which: Which, i: int) -> None:
        """A computation op by op, to be repeated later if nothing but its own pass and what lingers is touched."""
        state = self.state
        kind, c, _ = which
        at = state.passes.get((c, i))
        if at is not None and at.held is None:
            self.play(kind, c, i)
            return
        self.tries[which] = self.tries.get(which, 0) + 1
        notes = Notes(state.a, state.journal, at.held if at is not None else None, self._found(kind, c))
        if at is not None:
            at.unfold()
        with state.noting(notes):
            self.play(kind, c, i)
        at = state.passes.get((c, i))
        left = [block for block, _ in self._found(kind, c) if block is not None]
        routine = notes.routine([*at.slots, [at.out]] if at is not None else (), left)
        if routine is not None:
            self.routines[which] = routine
            self.repertoire.keep(routine, state.rank, which)
        if at is not None:
            at.held = notes.held if routine is not None else None
