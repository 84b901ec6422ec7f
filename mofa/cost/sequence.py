"""What torchtitan's stages reserve, played with few rounds of their order: start, two steps, the optimizer between.

PyTorch's FSDP under pipelines makes a chunk's unsharded gradients in its first backward, among whatever is in flight
then, and the optimizer's states come in holes of the first step: what is reserved follows from the order of requests.
So it is played, and what changes little is left out: rounds behind the second one after all chunks had a backward, and
from a rank's first backward on of most layers what is not kept (:class:`mofa.cost.acts.Script`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from mofa.blocks.tapes import label
from mofa.cost.acts import ACCUMULATE, CLAIM, DROP, HOLD, TAKE, Acts, Script, Weight, script
from mofa.cost.blockcost import base_mode, full_mode
from mofa.cost.freelist import SMALL, FreeList, rounded
from mofa.cost.heap import Heap, Piece
from mofa.cost.moments import ROUNDS
from mofa.cost.rows import Rows
from mofa.orders import order_of
from mofa.orders.interleaved import rounds
from mofa.specs.params import layer_tensors

BUCKET = 100 * 2**20
"""Bytes of a DDP bucket (torchtitan: bucket_cap_mb=100)."""
COMPUTE, GATHER, REDUCE = range(3)
"""The streams that have pools."""
Slots = dict[int, Piece]


def plays(rows: Rows) -> bool:
    """Whether the order of requests is known here: torchtitan's without autocast, whose weights' gradients come with
    their inputs'."""
    return (
        rows.framework.name == "torchtitan" and rows.mode.precision != "autocast"
        and rows.schedule in ("1f1b", "gpipe", "interleaved") and not rows.workload.model.num_mtp_layers
        and rows.framework.allocator != "expandable"
        and not (rows.workload.model.tied_embeddings and rows.layout.stages.pp == 1)
    )  # fmt: skip


def stage_played_bytes(
    rows: Rows, row: int, stage: int, workspace: int, made: dict[str, Script] | None = None
) -> float:
    """What a stage of a candidate reserves after a second step; ``workspace`` is taken by each of two threads. [B]

    ``made`` are scripts by their tape's name, of the candidate's other stages.
    """
    return float(_Stage(rows, row, stage, workspace, {} if made is None else made).reserved())


class _Stage:
    """A stage of a candidate, to be played once."""

    def __init__(self, rows: Rows, row: int, stage: int, workspace: int, made: dict[str, Script]) -> None:
        stages, static = rows.layout.stages, rows.static
        k, grid = int(rows.k[row]), int(rows.grid[row])
        rank = int(rows.layout.shown.stage[stage])
        head = rank == stages.head_stage
        self.workspace, self.num_micro_batches = workspace, int(rows.num_micro_batches[row])
        self.acts, self.behind = _acts(rows, row, rank)
        fsdp = rows.framework.shards_params and rows.mode.precision == "mixed"
        self.pipelined = fsdp and rows.mode.pipelined
        self.gathers = fsdp and not self.pipelined
        """Whether layers are gathered one by one, each beside the last: then all are played whole."""
        self.ranks = tuple(
            float(of[grid, 0]) if fsdp else 1.0 for of in (rows.shards.dense_ranks, rows.shards.expert_ranks)
        )
        self.weights = [_weights(rows, k, kind) for kind in range(len(stages.kinds) + 2)]
        self.layers = len(stages.kinds)
        self.chunks = _chunks(rows, row, rank, self.weights, made)
        last = len(self.chunks) - 1
        self.receives = [stages.pp > 1 and not (rank == 0 and c == 0) for c in range(last + 1)]
        self.sends = [stages.pp > 1 and not (head and c == last) for c in range(last + 1)]
        self.boundary = rounded(float(rows.costs.boundary[k]))
        params = float(static.params[grid, stage])
        if self.pipelined:
            params -= float(rows.shards.whole(2.0)[grid, stage])
        held = float((rows.shards.sharded(1.0) if fsdp else rows.shards.whole(1.0))[grid, stage])
        share = np.array(list(_tensors(rows, grid, stage, self.chunks, self.weights, self.ranks))) / held
        self.params, self.states, self.scratch = (
            (total * share).tolist()
            for total in (params, static.states[grid, stage] / 2.0, static.step_scratch[grid, stage])
        )
        kept = float((rows.costs.persistent_head if head else rows.costs.persistent)[k])
        self.lazy = [kept, workspace]
        whole = float(static.buffers[grid, stage])
        self.buffers = [*_rope_tables(rows), *(min(BUCKET, whole - n) for n in np.arange(0.0, whole, BUCKET))]
        # what is there while it is played
        self.pools = (Heap(), Heap(), Heap())
        self.small = FreeList(small=True)
        self.first_step = True
        self.passes: dict[tuple[int, int], tuple[list[Slots], Piece | None]] = {}
        self.carried: dict[str, Piece] = {}
        self.grads: list[Piece] = []
        self.accumulated: dict[tuple[int, int], list[Piece]] = {}

    def reserved(self) -> int:
        """What is reserved after a second step. [B]"""
        for size in (*self.params, *self.buffers):
            self._good(size)
        for _ in range(self.num_micro_batches * (sum(self.receives) + sum(self.sends))):
            self._good(self.boundary)
        self._step()
        self.first_step = False
        self._step()
        for size, number in self._small():
            self.small.take(size, number)
        return sum(pool.reserved for pool in self.pools) + self.small.reserved

    def _good(self, nbytes: float) -> None:
        """Allocate for good."""
        if nbytes > SMALL:
            self.pools[COMPUTE].take(rounded(nbytes))
        elif nbytes:
            self.small.take(rounded(nbytes), 1)

    def _small(self) -> Iterator[tuple[int, int]]:
        """What is kept in the small pool when most is in flight."""
        flying, most = Counter[int](), Counter[int]()
        for kind, c, _ in self.acts:
            flying[c] += 1 if kind == "F" else -1
            if flying.total() > most.total():
                most = flying.copy()
        for c, number in most.items():
            for one, _ in self.chunks[c]:
                yield from ((size, number * n) for size, n in one.small)

    def _step(self) -> None:
        pool = self.pools[COMPUTE]
        _give_all(self.grads)
        gathered = self._gather() if self.pipelined else {}
        for size in self.lazy if self.first_step else ():
            self._good(size)
        begun: set[int] = set()
        left = self.behind
        for kind, c, i in self.acts:
            if kind == "F":
                self._forward(c, i, whole=not begun or self.gathers)
            else:
                if self.first_step and not begun:
                    self._good(self.workspace)
                self._backward(c, i, first=c not in begun)
                begun.add(c)
            left -= len(begun) == len(self.chunks)
            if left < 0:
                break
        for blocks, out in self.passes.values():
            for slots in blocks:
                _give_all(list(slots.values()))
            _give_all([out] if out is not None else [])
        self.passes.clear()
        if self.pipelined:
            self._reduce(gathered)
        for size in self.states if self.first_step else ():
            self._good(size)
            self._good(size)
        _give_all([pool.take(rounded(size)) for size in self.scratch if size > SMALL])

    def _gather(self) -> dict[tuple[int, int], list[Piece]]:
        """Under pipelines FSDP gathers each group once a step, and the weights stay."""
        out: dict[tuple[int, int], list[Piece]] = {}
        before: list[Piece] = []
        for c, chunk in enumerate(self.chunks):
            for n, (_, kind) in enumerate(chunk):
                weights = self.weights[kind]
                source = self._take(2.0 * sum(n / self.ranks[expert] for n, expert in weights), GATHER)
                whole = self._take(2.0 * sum(n for n, _ in weights), GATHER)
                _give_all(source)
                out[c, n] = [piece for n, _ in weights for piece in self._take(2.0 * n, COMPUTE)]
                _give_all(before)
                before = whole
        _give_all(before)
        return out

    def _reduce(self, gathered: dict[tuple[int, int], list[Piece]]) -> None:
        """At the end of a pipeline FSDP reduces the unsharded gradients group by group."""
        before: list[Piece] = []
        for (c, n), copies in gathered.items():
            weights = self.weights[self.chunks[c][n][1]]
            _give_all(copies)
            buffer = self._take(4.0 * sum(n for n, _ in weights), COMPUTE)
            _give_all(before)
            before = buffer
            self.grads += self._take(4.0 * sum(n / self.ranks[expert] for n, expert in weights), REDUCE)
            _give_all(self.accumulated.pop((c, n), []))
        _give_all(before)

    def _take(self, nbytes: float, pool: int) -> list[Piece]:
        """A block, none where it is small."""
        return [self.pools[pool].take(rounded(nbytes))] if nbytes > SMALL else []

    def _forward(self, c: int, i: int, *, whole: bool) -> None:
        """A chunk's forward, of which all layers but the last keep what they keep, or are played ``whole``."""
        chunk = self.chunks[c]
        x: Piece | None = None
        blocks: list[Slots] = []
        for n, (one, kind) in enumerate(chunk):
            slots: Slots = {}
            if one.x >= 0 and n > 0:
                slots[one.x] = x if x is not None else self.pools[COMPUTE].take(one.sizes[one.x])
            self._run(one, one.forward if whole or self._at_end(chunk, n, kind) else one.kept_forward, slots, None)
            x = slots.pop(one.out, None)
            blocks.append(slots)
        _give_all(list(self.carried.values()))
        self.carried = {}
        if x is not None and not self.sends[c]:
            x.heap.give(x)
            x = None
        self.passes[c, i] = blocks, x

    def _backward(self, c: int, i: int, *, first: bool) -> None:
        """A chunk's backward, and its gradients where it is the first."""
        chunk = self.chunks[c]
        blocks, out = self.passes.pop((c, i))
        _give_all([out] if out is not None else [])
        dy: Piece | None = None
        for n in reversed(range(len(chunk))):
            (one, kind), slots = chunk[n], blocks[n]
            if dy is not None and one.given >= 0:
                slots[one.given] = dy
            elif dy is not None:
                dy.heap.give(dy)
            gradients = self.accumulated.setdefault((c, n), []) if first else None
            whole = self._at_end(chunk, n, kind) or first or self.gathers
            self._run(one, one.backward if whole else one.kept_backward, slots, gradients)
            dy = slots.pop(one.back, None)
            _give_all(list(slots.values()))
        _give_all([dy] if dy is not None else [])
        _give_all(list(self.carried.values()))
        self.carried = {}

    def _at_end(self, chunk: list[tuple[Script, int]], n: int, kind: int) -> bool:
        """Whether a piece is the last layer of a chunk, the embedding or the head."""
        return kind >= self.layers or n == len(chunk) - 1 or chunk[n + 1][1] > self.layers

    def _run(self, one: Script, acts: Acts, slots: Slots, gradients: list[Piece] | None) -> None:
        """Play a block's acts."""
        carried, self.carried = self.carried, {}

        def other(act: int, slot: int) -> None:
            if act in (TAKE, CLAIM):
                claimed = carried.pop(one.claims[slot], None) if act == CLAIM else None
                slots[slot] = claimed or self.pools[one.pools[slot]].take(one.sizes[slot])
            elif act == HOLD and slot in slots:
                self.carried[one.holds[slot]] = slots.pop(slot)
            elif act == DROP:
                later = one.claims.values()
                _give_all([carried.pop(name) for name in list(carried) if name not in later])
            elif act == ACCUMULATE and gradients is not None:
                if self.pipelined:  # in fp32, for all micro-batches
                    gradients.append(self.pools[COMPUTE].take(2 * one.sizes[slot]))
                elif slot in slots:
                    self.grads.append(slots.pop(slot))

        self.pools[COMPUTE].play(acts, slots, other)
        _give_all(list(carried.values()))


def _give_all(pieces: list[Piece]) -> None:
    """Let blocks go; the list is empty then."""
    for piece in pieces:
        piece.heap.give(piece)
    pieces.clear()


def _acts(rows: Rows, row: int, rank: int) -> tuple[list[tuple[str, int, int]], int]:
    """Computations of a step: kind, chunk, micro-batch; and how many are played behind the last chunk's first backward:
    a forward and a backward of each chunk and micro-batch of two rounds."""
    stages, num = rows.layout.stages, int(rows.num_micro_batches[row])
    each = rounds(stages.pp, num) if stages.vpp > 1 else stages.pp
    walked = num if rows.schedule == "gpipe" else min(num, ROUNDS * each)
    order = order_of(rows.schedule, rows.framework.name, stages.pp, stages.vpp, walked)
    acts = [(a.kind, a.stage // stages.pp, a.micro_batch) for a in order.ranks[rank]]
    return [(str(kind), c, i) for kind, c, i in acts], 4 * each * stages.vpp


def _weights(rows: Rows, k: int, kind: int) -> list[Weight]:
    """The weights of a kind of layer, of the embedding or of the head."""
    all_ = rows.costs.weights
    return [
        (float(all_.params[w, k]), bool(all_.expert[w]))
        for w in np.flatnonzero(all_.kind == kind)
        for _ in range(round(float(all_.numbers[w, k])))
    ]


def _tensors(
    rows: Rows, grid: int, stage: int, chunks: list[list[tuple[Script, int]]], weights: list[list[Weight]],
    ranks: tuple[float, ...],
) -> Iterator[float]:  # fmt: skip
    """A rank's part of every parameter tensor. What no op of a tape names (norms) is spread over the layers in as many
    tensors as these have more. [params]"""
    model, kinds = rows.workload.model, rows.layout.stages.kinds
    more = [max(layer_tensors(model, any(expert for _, expert in of), packed=False)[0]
                - sum(not expert for _, expert in of), 1) for of in weights[: len(kinds)]]  # fmt: skip
    pieces = [kind for chunk in chunks for _, kind in chunk]
    rest = float(rows.shards.whole(1.0)[grid, stage]) - sum(n for kind in pieces for n, _ in weights[kind])
    each = rest / max(sum(kind < len(kinds) for kind in pieces), 1)
    for kind in pieces:
        yield from (n / ranks[expert] for n, expert in weights[kind])
        if kind < len(kinds):
            yield from [max(each, 0.0) / more[kind] / ranks[False]] * more[kind]


def _chunks(
    rows: Rows, row: int, rank: int, weights: list[list[Weight]], made: dict[str, Script]
) -> list[list[tuple[Script, int]]]:  # fmt: skip
    """The pieces of every chunk, in order, and of what kind they are."""
    stages, table, tapes, k = rows.layout.stages, rows.table, rows.costs.tapes, int(rows.k[row])
    spec, number = table.recompute_modes[int(table.recompute[row])], int(table.recompute_layers[row])
    embedding, head = len(stages.kinds), len(stages.kinds) + 1

    def piece(name: str, kind: int) -> tuple[Script, int]:
        if name not in made:
            made[name] = script(tapes[name], k, weights[kind])
        return made[name], kind

    chunks: list[list[tuple[Script, int]]] = []
    seen = 0
    for c, layers in enumerate(stages.layers[rank]):
        pieces = [piece("embedding", embedding)] if rank == 0 and c == 0 else []
        for j, kind in enumerate(layers):
            seen += 1
            whole = spec.kind == "full" and (number < 0 or j < number)
            whole = whole or (spec.kind == "every" and seen % (spec.layers or 1) == 0)
            name = label(stages.kinds[kind], full_mode(spec) if whole else base_mode(spec))
            ahead = pieces[0][0].size_of("fsdp.gathered") if rank == 0 and c == 0 and j == 0 else 0
            if ahead:  # the first layer's backward gathers the embedding ahead, not a layer
                pieces.append((script(tapes[name], k, weights[kind], {"fsdp.next@": ahead}), kind))
            else:
                pieces.append(piece(name, kind))
        if rank == stages.head_stage and c == stages.vpp - 1:
            pieces.append(piece("head", head))
        chunks.append(pieces)
    return chunks


def _rope_tables(rows: Rows) -> list[float]:
    """torchtitan registers the rotation of every position for each model part: complex, or cosine and sine of the whole
    head where queries and keys are normed (Qwen3). [B]"""
    a = rows.workload.model.attention
    if rows.workload.model.positions != "rope":
        return []
    width = a.qk_rope_head_dim if a.kind == "mla" else 2 * a.d_qk if a.qk_norm else a.d_qk
    return [4.0 * rows.workload.batch.seq_len * width] * rows.layout.stages.vpp
