"""What stages reserve, played with few rounds of their order: start, two steps, the optimizer between.

Which holes states come in, what is in flight when unsharded gradients are made, what a layer's temporaries leave of a
block: what is reserved follows from the order of requests. So it is played, pool by pool (:mod:`mofa.cost.acts`) on the
same lives as the replay's. Of many micro-batches some rounds stand for all, of which the first step, where it leaves
nothing but its segments, plays those up to two behind every chunk's first backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import inf
from operator import itemgetter

from mofa.cost.acts import GONE_LATE, Course, Lasts, Renewed, Requests, Stretches, course, pool_of
from mofa.cost.heap import NOTHING, Heap, Piece, rounded
from mofa.cost.held import GATHER, LARGE, REDUCE, Stage
from mofa.cost.lead import lag
from mofa.cost.shelf import Pace, Shelf
from mofa.cost.start import Want, broadcast, built
from mofa.cost.unshard import AHEAD


def reserved_bytes(stage: Stage, limit: float = inf) -> int:
    """What a stage reserves after a second step; once that is above a ``limit``, no more is played. [B]"""
    total = 0
    for pool in sorted(stage.pools, reverse=True):  # the large one of what computes, which takes longest, is the last
        total += _Pool(stage, pool, limit - total).reserved()
        if total > limit:
            break
    return total


class _Sent:
    """Outputs and inputs' gradients that PyTorch's schedules let go, and what rings send: :mod:`mofa.replay.sends`."""

    def __init__(self, stage: Stage, heap: Heap) -> None:
        self.stage, self.heap = stage, heap
        self.launched, self.lags = 0.0, False
        self.waiting: deque[tuple[float, Piece]] = deque()
        self.output: tuple[int, int] | None = None
        self.lingering: list[Piece] = []
        self.gradient: list[Piece] = []
        self.shelf: Shelf[Piece] = Shelf()

    def begin(self, *, lags: bool) -> None:
        """A step begins; with a lead only behind the first."""
        self.launched, self.lags, self.output = 0.0, lags, None

    def before(self) -> None:
        """What the device is through with comes back."""
        while self.waiting and self.waiting[0][0] <= self.launched:
            self.heap.give(self.waiting.popleft()[1])

    def after(self, kind: str, c: int, i: int, slots: list[Piece], of: Course, *, first: bool) -> None:
        """A computation is through."""
        stays = self.stage.output_stays
        if not any(of.late):  # else block by block
            self.launched += self.stage.launches[c][kind]
        if kind == "F":
            if stays:
                self.replaced()
                self.output = c, i
            return
        if of.output >= 0 and stays and self.output == (c, i):
            self.lingering = [slots[of.output]]
        elif of.output >= 0:
            self.let_go(slots[of.output], sent=self.stage.ends[c].sends)
        slot = of.first_gradient if first else of.gradient
        gone = [slots[slot]] if slot >= 0 else []
        if stays:
            gone, self.gradient = self.gradient, gone
        for piece in gone:
            self.let_go(piece, sent=True)

    def inside(self, blocks: Stretches, slots: list[Piece], paces: Sequence[Pace]) -> None:
        """Play a pass inside of which something comes back late; ``paces`` are its blocks'."""
        for (requests, launches), pace in zip(blocks, paces, strict=True):
            begin = 0
            for at, (size, slot) in enumerate(requests):
                if size >= 0:
                    continue
                self.heap.play(requests[begin:at], slots)
                if size == GONE_LATE:
                    self.let_go(slots[slot], sent=True)
                else:
                    self.shelf.put(slots[slot])
                begin = at + 1
            self.heap.play(requests[begin:], slots)
            self.launched += launches
            self.before()
            for piece in self.shelf.passed(pace, launches):
                self.heap.give(piece)

    def replaced(self) -> None:
        """The schedule's variable has another output."""
        for piece in self.lingering:
            self.let_go(piece, sent=self.stage.ends[0].sends)
        self.lingering = []

    def end(self) -> None:
        """The schedule's step is through, and the host waits for the gradients' norm."""
        for piece in (*self.lingering, *self.gradient, *(piece for _, piece in self.waiting)):
            self.heap.give(piece)
        self.waiting.clear()
        self.lingering, self.gradient = [], []
        self.shelf.synchronized()

    def let_go(self, piece: Piece, *, sent: bool) -> None:
        behind = lag(self.launched, self.stage.device_per_host) if sent and self.lags else 0.0
        if behind:
            self.waiting.append((self.launched + behind, piece))
        else:
            self.heap.give(piece)


class _Pool:
    """A pool that a stage is played on once."""

    def __init__(self, stage: Stage, pool: int, limit: float) -> None:
        self.stage, self.pool, self.limit = stage, pool, limit
        self.heap = Heap(small=bool(pool & 1))
        self.courses = [
            course(pool, chunk, ends, accumulates=stage.accumulates, tied=stage.tied and c == 0)
            for c, (chunk, ends) in enumerate(zip(stage.chunks, stage.ends, strict=True))
        ]
        self.grads: list[Piece] = []
        self.accumulated: dict[tuple[int, int], list[Piece]] = {}
        self.fetched: dict[int, list[list[Piece]]] = {}
        self.unsharded: dict[int, list[list[Piece]]] = {}
        self.threads: set[str] = set()
        self.taken: set[tuple[int, int, str]] = set()
        self.whole_buckets: list[list[Piece]] | None = None
        self.lingering: dict[int, list[Piece]] = {}
        self.sent = _Sent(stage, self.heap)

    def size(self, nbytes: float, stream: int = 0) -> int:
        """What it is asked for, 0 where another pool is."""
        size = rounded(nbytes) if nbytes else 0
        return size if size and pool_of(size, stream) == self.pool else 0

    def take(self, all_: Iterable[float], stream: int = 0) -> list[Piece]:
        """Blocks for numbers of bytes, none where another pool has them."""
        sizes = [size for nbytes in all_ if (size := self.size(nbytes, stream))]
        slots = [NOTHING] * len(sizes)
        self.heap.play(zip(sizes, range(len(sizes)), strict=True), slots)
        return slots

    def give(self, pieces: list[Piece]) -> None:
        """Let blocks go; the list is empty then."""
        self.heap.play([(0, slot) for slot in range(len(pieces))], pieces)
        pieces.clear()

    def reserved(self) -> int:
        """What it holds after a second step, or as soon as that is above the limit. [B]"""
        self.start()
        for first in (True, False, False) if any(of.shelves for of in self.courses) else (True, False):
            if self.heap.reserved <= self.limit:
                self.step(first=first)
        return self.heap.reserved

    def start(self) -> None:
        """Parameters, which Megatron copies into buffers and lets go, main copies made of another, buffers."""
        s, play = self.stage, self.heap.play
        if s.ends[0].kept:
            self.wanted(built(s.weights, s.rotations))
            return
        sizes = [self.size(w.param) for w in s.weights]
        slots = [NOTHING] * len(sizes)
        for n, (w, size) in enumerate(zip(s.weights, sizes, strict=True)):
            wide = self.take([w.draft])
            play([(size, n)] if size else [], slots)
            self.take([w.transposed])
            self.give(wide)
            self.take(nbytes for behind, nbytes in s.built if behind == n)
        for flat in s.flat_buffers:
            self.take([flat.params, flat.grads])
            play([(0, n) for n in flat.weights if flat.params and sizes[n]], slots)
        for w in (w for of_one in s.optimizers for w in of_one if w.main):
            narrow = self.take([w.main // 2])
            self.take([w.main])
            self.give(narrow)

    def wanted(self, wants: Iterable[Want]) -> None:
        """What comes and goes before there is a computation."""
        kept = {}
        for slot, nbytes, _ in wants:
            if nbytes:
                kept[slot] = self.take([nbytes])
            else:
                self.give(kept.pop(slot))

    def step(self, *, first: bool) -> None:
        """Forwards and backwards, what FSDP does around them, the optimizers."""
        s = self.stage
        self.give(self.grads)
        if first and s.received:
            self.prepare()
        elif first:
            self.take(s.lazy)
        else:
            self.fetch()
        self.compute(first=first)
        for c in list(self.unsharded):
            self.reduce(c)
        self.optimize(first=first)

    def prepare(self) -> None:
        """Each chunk forward once without a backward, then the buffers that it receives in; last those of gradients."""
        s = self.stage
        for c, of in enumerate(self.courses):
            boundary = s.ends[c].boundary
            zeros = self.take([boundary] if s.ends[c].receives else ())
            self.take(s.lazy if not c else ())
            self.gathering(c, of.trial, of.begins[1], of.trial_product, [NOTHING] * of.trial_slots)
            self.give(zeros)
            self.take([boundary] * s.received[c])
        self.take([s.ends[0].boundary] * s.received[-1])

    def bucket(self) -> None:
        """DDP's buckets in front of a forward: one of all of a chunk's gradients until the first behind a backward."""
        if self.whole_buckets is None:
            self.wanted(broadcast(self.stage.weights))
            self.whole_buckets = [self.take([sum(sizes)]) for sizes in self.stage.buckets]
        elif self.whole_buckets and "B" in self.threads:
            for pieces, sizes in zip(self.whole_buckets, self.stage.buckets, strict=True):
                self.give(pieces)
                self.take(sizes)
            self.whole_buckets = []

    def compute(self, *, first: bool) -> None:
        """Computations, until enough rounds are played; what is in flight then is let go."""
        s, play = self.stage, self.heap.play
        passes: dict[tuple[int, int], list[Piece]] = {}
        begun: set[int] = set()
        sent = self.sent
        sent.begin(lags=not first)
        lingers = any(of.lingers for of in self.courses)  # where, the optimizer's first states come around it
        left = s.behind if first and not lingers else len(s.acts)
        idle = self.pool not in (pool_of(1), pool_of(LARGE)) and not any(of.num_slots for of in self.courses)
        lasts = {c: n for n, (_, c, _) in enumerate(s.acts)}
        for n, (kind, c, i) in enumerate(() if idle else s.acts):
            of = self.courses[c]
            sent.before()
            late = of.late[kind == "B"] if sent.lags else ()
            if late:
                slots = passes.pop((c, i)) if kind == "B" else [NOTHING] * of.num_slots
                sent.inside(late, slots, s.paces[c][kind == "B"])
                if kind == "F":
                    passes[c, i] = slots
            elif kind == "F":
                if s.buckets:
                    self.bucket()
                slots = passes[c, i] = [NOTHING] * of.num_slots
                self.awaited(c)
                if s.groups and c not in self.unsharded:
                    self.gathering(c, of.forward, of.begins[0], of.products[0], slots)
                elif of.loss and sent.lingering:  # the next one is in its place before there is a loss
                    play(of.forward[: of.loss], slots)
                    sent.replaced()
                    play(of.forward[of.loss :], slots)
                elif c in self.lingering:
                    self.renew(c, of.renewed[0], slots)
                else:
                    self.begin(kind, of.forward, of.products[0], slots, (c, of.lasting[0]))
            elif c in self.lingering:
                slots = passes.pop((c, i))
                self.renew(c, of.renewed[1], slots)
            elif c in begun:
                slots = passes.pop((c, i))
                play(of.backward, slots)
            else:
                slots = passes.pop((c, i))
                self.begin(kind, of.first, of.products[1], slots, (c, of.lasting[1]))
            if kind == "B" and of.lingers:
                self.lingering[c] = [slots[slot] for slot in of.lingers]
            sent.after(kind, c, i, slots, of, first=kind == "B" and c not in begun)
            if kind == "B" and c not in begun:
                begun.add(c)
                for block, mine in enumerate(of.gradients):
                    self.accumulated[c, block] = [slots[slot] for slot in mine]
            left -= len(begun) == len(self.courses)
            if left < 0 or self.heap.reserved > self.limit:
                break
            if s.unshards and lasts[c] == n:
                self.reduce(c)
        sent.end()
        for (c, _), slots in passes.items():
            play([(0, slot) for slot in self.courses[c].left], slots)
        if not s.groups:
            for pieces in self.accumulated.values():
                self.grads += pieces
            self.accumulated = {}

    def renew(self, c: int, renewed: Renewed, slots: list[Piece]) -> None:
        """Play a pass in which what lingers of the chunk goes."""
        waiting, all_ = renewed
        for slot, piece in zip(waiting, self.lingering.pop(c), strict=True):
            slots[slot] = piece
        self.heap.play(all_, slots)

    def begin(
        self, kind: str, all_: Requests, product: int, slots: list[Piece],
        lasting: tuple[int, Sequence[Lasts]] = (0, ()),
    ) -> None:  # fmt: skip
        """Play a pass of a chunk. At its thread's first product cuBLAS takes its workspace, the product's output being
        there, and what is ``lasting`` is taken where it is the first of its name."""
        done = 0
        for at, nbytes in self.firsts(kind, product, *lasting):
            self.heap.play(all_[done:at], slots)
            self.take([nbytes])
            done = at
        self.heap.play(all_[done:] if done else all_, slots)

    def firsts(self, kind: str, product: int, c: int, lasting: Sequence[Lasts]) -> list[tuple[int, int]]:
        """How many requests are in front of each buffer that a pass takes for good, and its bytes."""
        found: list[tuple[int, int]] = []
        if product >= 0 and kind not in self.threads:
            self.threads.add(kind)
            found.append((product, self.stage.workspace))
        for at, (block, name), size in lasting:
            key = (c, block, name) if block >= 0 else (-1, -1, name)
            if key not in self.taken:
                self.taken.add(key)
                found.append((at, size))
        return sorted(found, key=itemgetter(0))

    def gathering(self, c: int, all_: Requests, begins: Sequence[int], product: int, slots: list[Piece]) -> None:
        """A chunk's first forward, FSDP's groups gathered as their blocks come, if there are any."""
        groups = self.stage.groups[c] if self.stage.groups else ()
        if not groups:
            self.begin("F", all_, product, slots)
            return
        fresh = "F" not in self.threads
        before: list[Piece] = []
        for weights, start, stop in zip(groups, begins, (*begins[1:], len(all_)), strict=True):
            whole = self.whole(weights, GATHER)
            self.give(before)
            before = whole
            self.unsharded.setdefault(c, []).append(self.take(int(2 * n) for n, _ in weights))
            if fresh and start <= product < stop:
                self.begin("F", all_[start:stop], product - start, slots)
            else:
                self.heap.play(all_[start:stop], slots)
        self.give(before)

    def fetch(self) -> None:
        """All groups of all chunks, where the schedule gathers them at a step's beginning."""
        s = self.stage
        for c in list(dict.fromkeys(c for _, c, _ in s.acts))[:AHEAD] if s.unshards else ():
            self.fetched[c] = [self.whole(weights, 0) for weights in s.groups[c]]

    def awaited(self, c: int) -> None:
        """What was fetched for a chunk is copied in front of its first forward."""
        if not self.stage.unshards or c in self.unsharded:
            return
        groups = self.stage.groups[c]
        for weights, whole in zip(
            groups, self.fetched.pop(c, []) or [self.whole(weights, 0) for weights in groups], strict=True
        ):
            self.unsharded.setdefault(c, []).append(self.take(int(2 * n) for n, _ in weights))
            self.give(whole)

    def whole(self, weights: Sequence[tuple[float, float]], stream: int) -> list[Piece]:
        """What a group is gathered in, of its shard's copy."""
        source = self.take([int(2 * sum(share for _, share in weights))], stream)
        made = self.take([int(2 * sum(n for n, _ in weights))], stream)
        self.give(source)
        return made

    def reduce(self, c: int) -> None:
        """Behind a chunk's last backward FSDP reduces its unsharded gradients group by group."""
        before: list[Piece] = []
        for n, (weights, copies) in enumerate(zip(self.stage.groups[c], self.unsharded.pop(c), strict=True)):
            self.give(copies)
            self.give(before)
            before = self.take([int(4 * sum(n for n, _ in weights))])
            self.give(self.accumulated.pop((c, n), []))
            shares = sum(share for _, share in weights)
            summed = self.take([int(4 * shares)], REDUCE)
            if self.stage.stored_bytes < 4.0:  # cast to the parameters' format
                wide, summed = summed, self.take([int(self.stage.stored_bytes * shares)], REDUCE)
                self.give(wide)
            self.grads += summed
        self.give(before)

    def optimize(self, *, first: bool) -> None:
        """The optimizers' steps; states appear in the first, fp32 copies of 16-bit gradients stay to the next step."""
        s = self.stage
        self.grads += self.take(s.inputs_at_end)
        self.grads += self.take(w.widened for of_one in s.optimizers for w in of_one if w.widened)
        for w in (w for of_one in s.optimizers for w in of_one if w.temporary) if s.flat_buffers else ():
            self.give(self.take([w.state]))  # clipping scales each gradient into a temporary
        for of_one in s.optimizers:
            self.take((state for w in of_one for state in (w.state, w.state)) if first else ())
            self.give(self.take(w.temporary for w in of_one))
