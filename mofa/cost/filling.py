"""What Megatron's stages reserve, played with a few passes of layers: start, first step, optimizer, second step.

The closed forms of :mod:`mofa.cost.reserve` say of all candidates what no segment is of use to; in which order free
blocks are filled they do not know. Of one candidate this can be said from the same tapes for little more: all that is
kept of layers in flight is allocated by sizes (:mod:`mofa.cost.freelist`), and one layer's forward and backward, the
loss and the embedding's backward op by op beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby

import numpy as np

from mofa.blocks.build import BlockTapes, layer_kind
from mofa.blocks.elementwise import FloatK, where
from mofa.blocks.tapes import label
from mofa.cost.freelist import SMALL, FreeList, Segments, rounded
from mofa.cost.rows import Rows
from mofa.cost.tensors import Module, block_weights, buffers_of, owned, params_of

ROUNDS = 4
"""Turns in which what layers keep is allocated, some of every size in each: layers run one after the other. [-]"""


@dataclass(frozen=True)
class Course:
    """A block's tensors of more than 1 MiB, op by op, and what its forward leaves. [B]

    ``ops`` are the sizes that are there at one op alone, the tensors that it makes and those it lets go, of the forward
    up to ``boundary``. ``kept`` are sizes, the size of the block that each comes to lie in, and how many.
    """

    ops: tuple[tuple[Sequence[int], Sequence[int], Sequence[int]], ...]
    boundary: int
    sizes: tuple[int, ...]
    kept: tuple[tuple[int, int, int], ...]
    small: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, block: BlockTapes, k: int) -> Course:
        """The course of a combination.

        A layer's temporaries are made anew in each layer. What is kept takes the blocks that they left, and they take
        others: so what is kept comes to lie in blocks of a temporary's size, the smallest that it fits in of those that
        are there when most is, for smaller temporaries are cut from these.
        """
        lives, boundary = block.lives, block.lives.boundary
        apart = {i for pool in lives.pools.values() for i in pool}
        made: list[list[int]] = [[] for _ in lives.ops]
        gone: list[list[int]] = [[] for _ in lives.ops]
        sizes: list[int] = []
        spans: list[tuple[int, int]] = []
        kept: list[tuple[int, int]] = []
        small: Counter[int] = Counter()
        for place, (name, _, start, end, nbytes) in enumerate(lives.found):
            size = rounded(_value(nbytes, k))
            across = start < boundary <= end
            if place in apart or size <= SMALL:
                small[size] += across and place not in apart and _value(nbytes, k) > 0
                continue
            if across:  # what a layer is given, the one before made last
                kept.append((len(sizes), boundary - 1 if name in block.forward.inputs else start))
            made[start].append(len(sizes))
            gone[end].append(len(sizes))
            sizes.append(size)
            spans.append((start, end))
        once = [tuple(x for x in (rounded(_value(where(op.present, op.scratch, 0.0), k)),) if x > SMALL)
                for op in lives.ops]  # fmt: skip
        short = _at_peak(spans, sizes, once, boundary)
        places: Counter[tuple[int, int]] = Counter()
        for i, born in kept:
            wider = (sizes[j] for j in short if sizes[j] >= sizes[i] and not spans[j][0] <= born <= spans[j][1])
            places[sizes[i], min(wider, default=0)] += 1
        return cls(
            tuple(zip(once, made, gone, strict=True)), boundary, tuple(sizes),
            tuple((size, into, n) for (size, into), n in places.items()), tuple(small.items()),
        )  # fmt: skip


def _value(quantity: FloatK, k: int) -> float:
    """Of a combination what is said of all, or for all."""
    return float(quantity[k] if isinstance(quantity, np.ndarray) and quantity.size > 1 else quantity)


def _at_peak(
    spans: Sequence[tuple[int, int]], sizes: Sequence[int], once: Sequence[Sequence[int]], boundary: int
) -> list[int]:
    """The forward's temporaries that are there when most is in it."""
    change = [0] * (boundary + 1)
    for (start, end), size in zip(spans, sizes, strict=True):
        if start < boundary:
            change[start] += size
            change[min(end + 1, boundary)] -= size
    alive = [all_ + sum(some) for all_, some in zip(accumulate(change[:boundary]), once, strict=False)]
    peak = max(range(boundary), key=alive.__getitem__, default=0)
    return [i for i, (start, end) in enumerate(spans) if start <= peak <= end < boundary]


class _Pass:
    """A block's forward, and its backward, op by op."""

    def __init__(self, course: Course, pool: FreeList) -> None:
        self.course, self.pool = course, pool
        self.held: dict[int, tuple[Segments, int]] = {}

    def forward(self) -> None:
        """What it keeps stays held."""
        self._play(0, self.course.boundary)

    def backward(self) -> None:
        """Nothing of the block is left."""
        self._play(self.course.boundary, len(self.course.ops))

    def _play(self, first: int, last: int) -> None:
        pool, held, sizes = self.pool, self.held, self.course.sizes
        for once, made, gone in self.course.ops[first:last]:
            scratch = [pool.hold(size) for size in once]
            for i in made:
                held[i] = pool.hold(sizes[i])
            for one in scratch:
                pool.release(one)
            for i in gone:
                pool.release(held.pop(i))


@dataclass(frozen=True)
class Stage:
    """What a stage holds: see :func:`filled_bytes`. ``layers`` are courses with the number of passes in flight, in the
    order of a forward."""

    weights: tuple[tuple[int, int, int], ...]
    fixed: tuple[int, ...]
    layers: tuple[tuple[Course, int], ...]
    others: tuple[tuple[Course, int], ...]
    head: Course | None
    embedding: Course | None
    workspace: int
    copied: bool = True
    """Whether parameters are copied into buffers and let go: under the distributed optimizer."""


def filled_bytes(stage: Stage) -> int:
    """What is reserved after a second step. [B]

    The parameters were made one by one and let go, once copied into one buffer; main copies take their place, and with
    activations the moments, which come at the end of the first step: what they took the second takes again.
    """
    large, small = FreeList(), FreeList(small=True)

    def good(size: int, number: int) -> None:
        (small if size <= SMALL else large).take(size, number)

    for hole, _, number in stage.weights:
        good(hole, number)
    if stage.copied:
        large.empty()
        small.empty()
    stepped = [(state, number) for _, state, number in stage.weights if state]
    for state, number in stepped:
        good(state, number)
    for size in (*stage.fixed, stage.workspace):
        good(size, 1)
    for step in (1, 2):
        later, few = large.copy(), small.copy()
        _step(stage, later, few)
        large.settle(later)
        small.settle(few)
        if step == 1:
            good(stage.workspace, 1)
            for state, number in stepped:
                good(state, 2 * number)
    return large.reserved + small.reserved


def _step(stage: Stage, large: FreeList, small: FreeList) -> None:
    """What a step allocates when most is in flight: all that is kept, but for the last layer's pass, then that one."""
    last = _Pass(stage.layers[-1][0], large) if stage.layers else None
    for turn in range(ROUNDS):
        for n, (course, number) in enumerate(chain(stage.layers, stage.others), start=1):
            passes = number - (n == len(stage.layers))
            some = passes * (turn + 1) // ROUNDS - passes * turn // ROUNDS
            if some > 0:
                for size, into, n in course.kept:
                    large.take(size, n * some, into)
                for size, n in course.small:
                    small.take(size, n * some)
    if last is not None:
        last.forward()
    _through(stage.head, large)
    if last is not None:
        last.backward()
    _through(stage.embedding, large)


def _through(course: Course | None, pool: FreeList) -> None:
    """A block's forward and backward, if the stage has it."""
    if course is not None:
        one = _Pass(course, pool)
        one.forward()
        one.backward()


def fills(rows: Rows) -> bool:
    """Whether this is known of candidates: of Megatron's, whose gradients are there from the start."""
    framework = rows.framework
    return rows.static.grads_always and not framework.deepspeed and framework.allocator != "expandable"


def stage_filled_bytes(rows: Rows, row: int, stage: int, workspace: int) -> float:
    """What a stage of a candidate reserves; ``workspace`` is taken by each of two threads. [B]"""
    return float(filled_bytes(stage_of(rows, row, stage, workspace)))


def stage_of(rows: Rows, row: int, stage: int, workspace: int) -> Stage:
    """What a stage of a candidate holds."""
    lay, costs, k, grid = rows.layout, rows.costs, int(rows.k[row]), int(rows.grid[row])
    modes, tapes = list(costs.blocks), costs.tapes
    first, head = rows.is_first[stage] > 0, rows.is_head[stage] > 0
    layers: list[tuple[Course, int]] = []
    for i, kind in enumerate(lay.stages.kinds):
        for mode, flight in ((rows.full[row], lay.full_in_flight), (rows.base[row], lay.plain_in_flight)):
            if number := round(float(flight[row, i, stage])):
                layers.append((Course.of(tapes[label(kind, modes[int(mode)])], k), number))
    last = round(float(lay.last_in_flight[row, stage]))
    embedding, loss = (
        Course.of(tapes[name], k) if there else None for name, there in (("embedding", first), ("head", head))
    )
    others = [(embedding, last)] if embedding is not None else []
    depth = rows.workload.model.num_mtp_layers
    if loss is not None and depth:
        others += [(course, depth * last) for course in (Course.of(tapes["mtp"], k), layers[-1][0], loss)]
    kept = costs.persistent_head if head else costs.persistent
    copied = bool(rows.table.zero[row] >= 1)
    fixed = (
        rows.static.params[grid, stage] * copied,
        rows.static.grads[grid, stage],
        kept[k],
        rows.static.buffers[grid, stage],
    )
    return Stage(
        tuple(_weights(rows, row, stage)), tuple(rounded(float(x)) for x in fixed if x), tuple(layers), tuple(others),
        loss, embedding, workspace, copied,
    )  # fmt: skip


def _weights(rows: Rows, row: int, stage: int) -> list[tuple[int, int, int]]:
    """A parameter's bytes, those of each of its states, and how many such there are, as the optimizers step them.

    Each has matrices before what is not decayed, of every buffer from the last parameter to the first; experts under
    expert parallelism come behind. The states are those of the first of the ranks that share them out.
    """
    params = params_of(rows, stage, _modules(rows, row, stage), tied=_tied(rows))
    shared = int(rows.table.zero[row]) >= 1
    own = owned(rows, params, stage, 0) if shared else [p.params for p in params]
    apart = bool(rows.table.ep[row] > 1)
    order = [n for one in buffers_of(rows, params, stage) for n in one.members] if shared else range(len(params))
    order = sorted(order, key=lambda n: (apart and params[n].expert, params[n].flat))
    state = rows.framework.states_bytes_per_param / 3.0
    found = (((rounded(2.0 * params[n].params), rounded(state * own[n]) if own[n] else 0)) for n in order)
    return [(hole, held, len(list(some))) for (hole, held), some in groupby(found)]


def _modules(rows: Rows, row: int, stage: int) -> list[list[Module]]:
    """What a stage's chunks are made of, in order."""
    stages, tapes, k = rows.layout.stages, rows.costs.tapes, int(rows.k[row])
    rank = int(rows.layout.shown.stage[stage])
    model, any_mode = rows.workload.model, next(iter(rows.costs.blocks))

    def module(name: str, of: str) -> Module:
        return Module(name, of.split(" ")[0], block_weights(tapes[of].forward.ops, k))

    made: dict[str, Module] = {}
    chunks: list[list[Module]] = []
    for c, layers in enumerate(stages.layers[rank]):
        names = ["embedding"] if rank == 0 and c == 0 else []
        names += [label(stages.kinds[kind], any_mode) for kind in layers]
        if rank == stages.head_stage and c == stages.vpp - 1:
            last = label(layer_kind(model, model.num_layers - 1), any_mode)
            names += [*(["mtp", last, "head"] * model.num_mtp_layers), "head"]
        for of in names:
            if of not in made:
                made[of] = module("block " if " " in of else of, of)
        chunks.append([made[of] for of in names])
    return chunks


def _tied(rows: Rows) -> bool:
    """Whether the embedding and the head are one weight of one stage."""
    return rows.workload.model.tied_embeddings and rows.layout.stages.head_stage == 0
