"""What stages reserve, played with few rounds of their order: start, two steps, the optimizer between.

Which holes states come in, what is in flight when unsharded gradients are made, what a layer's temporaries leave of a
block: what is reserved follows from the order of requests. So it is played, pool by pool (:mod:`mofa.cost.acts`) on the
same lives as the replay's. Rounds behind the second one after all chunks had a backward are left out.
"""

from __future__ import annotations

from collections.abc import Iterable

from mofa.cost.acts import Requests, course, pool_of
from mofa.cost.heap import NOTHING, Heap, Piece, rounded
from mofa.cost.held import GATHER, LARGE, REDUCE, Stage


def reserved_bytes(stage: Stage) -> int:
    """What a stage reserves after a second step. [B]"""
    return sum(_Pool(stage, pool).reserved() for pool in stage.pools)


class _Pool:
    """A pool that a stage is played on once."""

    def __init__(self, stage: Stage, pool: int) -> None:
        self.stage, self.pool = stage, pool
        self.heap = Heap(small=bool(pool & 1))
        self.courses = [
            course(pool, chunk, ends, accumulates=stage.accumulates, tied=stage.tied and c == 0)
            for c, (chunk, ends) in enumerate(zip(stage.chunks, stage.ends, strict=True))
        ]
        self.grads: list[Piece] = []
        self.accumulated: dict[tuple[int, int], list[Piece]] = {}

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
        """What it holds after a second step. [B]"""
        self.start()
        self.step(first=True)
        self.step(first=False)
        return self.heap.reserved

    def start(self) -> None:
        """Parameters, which Megatron copies into buffers and lets go, main copies made of another, buffers."""
        s, play = self.stage, self.heap.play
        sizes = [self.size(w.param) for w in s.weights]
        slots = [NOTHING] * len(sizes)
        play([(size, n) for n, size in enumerate(sizes) if size], slots)
        for flat in s.flat_buffers:
            self.take([flat.params, flat.grads])
            play([(0, n) for n in flat.weights if flat.params and sizes[n]], slots)
        for w in (w for of_one in s.optimizers for w in of_one if w.main):
            narrow = self.take([w.main // 2])
            self.take([w.main])
            self.give(narrow)
        self.take(s.buffers)

    def step(self, *, first: bool) -> None:
        """Forwards and backwards, what FSDP does around them, the optimizers."""
        s = self.stage
        self.give(self.grads)
        gathered = self.gather()
        self.take(s.received if first else ())
        self.take(s.lazy if first else ())
        self.compute(first=first)
        self.reduce(gathered)
        self.optimize(first=first)

    def compute(self, *, first: bool) -> None:
        """Computations, until enough rounds are played; what is in flight then is let go."""
        s, play = self.stage, self.heap.play
        passes: dict[tuple[int, int], list[Piece]] = {}
        begun: set[int] = set()
        output: list[Piece] = []
        threads: set[str] = set() if first else {"F", "B"}
        left = s.behind[not first]
        idle = self.pool not in (pool_of(1), pool_of(LARGE)) and not any(of.num_slots for of in self.courses)
        for kind, c, i in () if idle else s.acts:
            of = self.courses[c]
            if kind == "F":
                slots = passes[c, i] = [NOTHING] * of.num_slots
                if output and of.logits >= 0:  # the next one is in its place before there is a loss
                    play(of.forward[: of.loss], slots)
                    self.give(output)
                    play(of.forward[of.loss :], slots)
                else:
                    self.begin(kind, of.forward, of.products[0], slots, threads)
            else:
                slots = passes.pop((c, i))
                if c in begun:
                    play(of.backward, slots)
                else:
                    self.begin(kind, of.first, of.products[1], slots, threads)
                output += [slots[of.logits]] if of.logits >= 0 else []
                if not s.output_stays:
                    self.give(output)
                if c not in begun:
                    begun.add(c)
                    for n, mine in enumerate(of.gradients):
                        self.accumulated[c, n] = [slots[slot] for slot in mine]
            left -= len(begun) == len(self.courses)
            if left < 0:
                break
        self.give(output)
        for (c, _), slots in passes.items():
            play([(0, slot) for slot in self.courses[c].left], slots)
        if not s.groups:
            for pieces in self.accumulated.values():
                self.grads += pieces
            self.accumulated = {}

    def begin(self, kind: str, all_: Requests, product: int, slots: list[Piece], threads: set[str]) -> None:
        """Play a pass; at its thread's first product cuBLAS takes its workspace, the product's output being there."""
        if kind in threads:
            self.heap.play(all_, slots)
            return
        threads.add(kind)
        self.heap.play(all_[:product], slots)
        self.take([self.stage.workspace])
        self.heap.play(all_[product:], slots)

    def gather(self) -> list[list[Piece]]:
        """Under pipelines FSDP gathers each group once a step, and the weights stay."""
        out: list[list[Piece]] = []
        before: list[Piece] = []
        for weights in (weights for chunk in self.stage.groups for weights in chunk):
            source = self.take([int(2 * sum(share for _, share in weights))], GATHER)
            whole = self.take([int(2 * sum(n for n, _ in weights))], GATHER)
            self.give(source)
            out.append(self.take(int(2 * n) for n, _ in weights))
            self.give(before)
            before = whole
        self.give(before)
        return out

    def reduce(self, gathered: list[list[Piece]]) -> None:
        """At the end of a pipeline FSDP reduces the unsharded gradients group by group."""
        before: list[Piece] = []
        copies = iter(gathered)
        for c, chunk in enumerate(self.stage.groups):
            for n, weights in enumerate(chunk):
                self.give(next(copies))
                buffer = self.take([int(4 * sum(n for n, _ in weights))])
                self.give(before)
                before = buffer
                self.grads += self.take([int(4 * sum(share for _, share in weights))], REDUCE)
                self.give(self.accumulated.pop((c, n), []))
        self.give(before)

    def optimize(self, *, first: bool) -> None:
        """The optimizers' steps; states appear in the first."""
        s = self.stage
        for w in (w for of_one in s.optimizers for w in of_one if w.temporary) if s.flat_buffers else ():
            self.give(self.take([w.state]))  # clipping scales each gradient into a temporary
        for of_one in s.optimizers:
            self.take((state for w in of_one for state in (w.state, w.state)) if first else ())
            self.give(self.take(w.temporary for w in of_one))
