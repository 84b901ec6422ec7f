"""A rank's forwards and backwards of a step: played op by op, repeated from notes, or left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mofa.replay import deepspeed
from mofa.replay.edges import awaited, buckets, reduce
from mofa.replay.passes import Pass
from mofa.replay.pools import Block
from mofa.replay.repeat import repeat
from mofa.replay.repertoire import Which
from mofa.replay.rounds import LATER, LONG, Rounds
from mofa.replay.routine import Held, Notes, Routine, Waiting

if TYPE_CHECKING:
    from mofa.replay.player import Player

TRIES = 3
"""Computations of a kind and chunk that are noted down before none is expected to repeat: the first have buffers."""


class Steady:
    """Leads a player through the computations of its steps."""

    def __init__(self, player: Player, *, skip_rounds: bool) -> None:
        self.player = player
        rank = player.rank
        kinds = len({k for k, _, _ in rank.computations})
        sizes = {kinds * n for n in (1, len(rank.chunks), rank.round_length)}
        self.round_sizes = tuple(sorted(sizes)) if skip_rounds else ()
        self.repeats = skip_rounds and not player.sends.late_inside
        self.routines: dict[Which, Routine] = {}
        self.tries: dict[Which, int] = {}
        self.played: set[tuple[str, int]] = set()
        self.places: dict[object, int] = {}
        self.lasts = {c: n for n, (_, c, _) in enumerate(rank.computations)}

    def compute(self) -> None:
        """All forwards and backwards, but for rounds that would only repeat others."""
        player = self.player
        acts, passes, begun = player.rank.computations, player.passes, player.begun
        num_chunks = len(player.rank.chunks)
        rounds = Rounds(acts, self.round_sizes)
        retries: dict[int, int] = {}
        n = 0
        while n < len(acts):
            self._computation(*acts[n])
            if player.rank.unshards and self.lasts.get(acts[n][1]) == n:
                reduce(player, acts[n][1])
            n += 1
            if len(begun) < num_chunks or not rounds.end(n) or not rounds.same(len(passes)):
                continue
            last = acts[n - 1][2]
            retries[n] = player.a.num_retries
            skipped, period = rounds.repeated(n, self._held(last), player.a.fingerprint)
            if not skipped:
                peaks = player.highest[-1][0], player.a.peak_reserved
                if num_chunks > 1 and player.lingering.possible:
                    skipped, period = rounds.settled(n, peaks, LONG)
                elif player.step == 1:
                    skipped, period = rounds.settled(n, player.a.peak_reserved, rounds.quiet)
                else:
                    skipped, period = rounds.settled(n, peaks, LATER)
            if skipped:
                shift = acts[n + skipped - 1][2] - last
                moved = {(k, j + shift): at for (k, j), at in passes.items()}
                passes.clear()
                passes.update(moved)
                player.sends.moved(shift)
                player.journal.left_out.append((len(player.journal.computations), skipped, period))
                in_period = player.a.num_retries - retries.get(n - period, player.a.num_retries)
                player.a.num_retries += in_period * (skipped // period)
                n += skipped
        player.sends.end()

    def _held(self, last: int) -> object:
        """Equal for two ends of rounds at which the same lies in the same places; ``last`` is the micro-batch of the
        last act."""
        player = self.player
        if player.turned or player.input_grads:  # each waits for the next step's: nothing comes back in this one
            return object()
        passes = [(c, i - last, at.placed(self.places)) for (c, i), at in player.passes.items()]
        found = tuple([block.address for block, _ in deepspeed.waiting(player) if block is not None])
        return player.sends.state(last), player.lingering.places(), found, *passes

    def _computation(self, kind: str, c: int, i: int) -> None:
        player = self.player
        player.journal.computations.append((player.journal.num_events, kind, c, i))
        if kind == "F" and player.rank.buckets:
            buckets(player)
        if kind == "F" and player.rank.unshards:
            awaited(player, c)
        player.sends.begin(kind)
        self._play(kind, c, i)
        player.sends.after(kind, c, i)

    def _play(self, kind: str, c: int, i: int) -> None:
        player = self.player
        gathers = kind == "F" and player.rank.gathered_params is not None and c not in player.unsharded
        if not self.repeats or gathers or (kind in "BW" and c not in player.begun):  # the first gradients stay
            player.play(kind, c, i)
            self.played.add((kind, c))
            return
        which = kind, c, player.lingering.possible and player.lingering.of(c)
        routine = self.routines.get(which)
        known = routine is None and player.repertoire.knows(player.rank, which)
        if known and (kind, c) in self.played:
            routine = self.routines[which] = player.repertoire.routine(player.rank, which)
        if routine is not None:
            self._repeat(which, routine, i)
        elif not known and self.tries.get(which, 0) < TRIES:
            self._note_down(which, i)
        else:
            player.play(kind, c, i)
        self.played.add((kind, c))

    def _found(self, kind: str, c: int) -> list[Waiting]:
        """What a computation finds, or leaves, of others than its pass, always as much in the same order."""
        player = self.player
        if player.lingering.possible:
            return player.lingering.waiting(c)
        return deepspeed.waiting(player) if kind == "B" else []

    def _leave(self, kind: str, c: int, blocks: list[Block]) -> None:
        """That is there behind a computation that was repeated."""
        player = self.player
        if player.lingering.possible:
            player.lingering.replace(c, blocks)
        else:
            deepspeed.replace(player, blocks)

    def _repeat(self, which: Which, routine: Routine, i: int) -> None:
        """A computation from the notes of an earlier one."""
        player = self.player
        kind, c, _ = which
        at = player.passes.get((c, i))
        if at is None:
            at = player.passes[c, i] = Pass()
            at.held = Held()
        elif at.held is None:  # begun before there were notes
            player.play(kind, c, i)
            return
        if not routine.requests:
            routine = self.routines[which] = routine.to(player.a)
        held = at.held
        found = self._found(kind, c)
        if found:
            held.await_(found)
        start, before, end = repeat(routine, held, player.a, player.journal, player.overflow)
        if found:
            self._leave(kind, c, [held.blocks[slot] for slot in routine.left])
        if player.a.peak_allocated > player.highest[-1][0]:
            player.highest[-1] = (player.a.peak_allocated, start, before, end)
        if kind in "BW" and not player.rank.preallocated:
            del player.passes[c, i]
        else:
            at.place = -1

    def _note_down(self, which: Which, i: int) -> None:
        """A computation op by op, to be repeated later if nothing but its own pass and what lingers is touched."""
        player = self.player
        kind, c, _ = which
        at = player.passes.get((c, i))
        if at is not None and at.held is None:
            player.play(kind, c, i)
            return
        self.tries[which] = self.tries.get(which, 0) + 1
        notes = Notes(player.a, player.journal, at.held if at is not None else None, self._found(kind, c))
        if at is not None:
            at.unfold()
        with player.noting(notes):
            player.play(kind, c, i)
        at = player.passes.get((c, i))
        left = [block for block, _ in self._found(kind, c) if block is not None]
        routine = notes.routine([*at.slots, [at.out]] if at is not None else (), left)
        if routine is not None:
            self.routines[which] = routine
            player.repertoire.keep(routine, player.rank, which)
        if at is not None:
            at.held = notes.held if routine is not None else None
