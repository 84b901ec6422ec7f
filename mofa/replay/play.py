"""One rank's training steps played through the allocator: what is allocated and reserved when, and at the peak why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mofa.blocks.op import KINDS
from mofa.replay.allocator import Allocator, Block, OutOfDeviceMemory
from mofa.replay.lives import Deed, Life
from mofa.replay.rounds import Rounds

GROUPS = ("parameters", "gradients", "optimizer_states", "buffers", "activations", "weight_copies", "temporaries")
_GROUP = tuple(
    {"activation": 4, "weight_copy": 5, "grad": 1, "state": 2, "buffer": 3, "scratch": 6}[kind] for kind in KINDS
)
_PARAMETERS, _GRADIENTS, _STATES, _BUFFERS, _ACTIVATIONS, _COPIES, _TEMPORARIES = range(len(GROUPS))
WORKSPACE = 32 * 2**20
"""PyTorch's default on Hopper, per handle and stream (CUDABlas, ``:4096:8``); 8.1 MiB on older GPUs. [B]"""
_COMPUTE, _GATHER, _REDUCE = 0, 1, 2


@dataclass(frozen=True)
class Piece:
    """Something of a model that runs as one on a rank: an embedding, a layer, a head."""

    name: str
    life: Life


@dataclass(frozen=True)
class Weight:
    """A parameter tensor on one rank: bytes of itself, its main copy, each of its states and temporaries. [B]"""

    name: str
    param: int
    main: int
    state: int
    temporary: int
    whole_params: float


@dataclass(frozen=True)
class Rank:
    """What one rank holds and does.

    ``chunks`` are its pieces per virtual stage, ``steps`` the computations of a step as (kind, chunk, micro-batch).
    ``receives`` and ``sends`` say whether a chunk's input comes from and its output goes to another rank. [B]
    """

    weights: tuple[Weight, ...]
    chunks: tuple[tuple[Piece, ...], ...]
    computations: tuple[tuple[str, int, int], ...]
    num_micro_batches: int
    receives: tuple[bool, ...]
    sends: tuple[bool, ...]
    turns: tuple[bool, ...]
    first_chunks: frozenset[int]
    """Whether a chunk's output goes to another chunk of the rank; which chunk is the model's first, if any."""
    boundary_bytes: int
    buffers: tuple[int, ...]
    lazy_buffers: tuple[int, ...]
    """Those there from the start, and those that the first forward takes. [B]"""
    grads_always: bool
    contiguous: bool
    preallocated: bool
    round_length: int = 1
    """Forwards in a round of the schedule's steady state. [-]"""
    tied: bool = False
    """Whether the embedding and the head are one weight, here: it has one gradient."""
    gathered_params: tuple[tuple[tuple[float, ...], ...], ...] | None = None
    """Under pipelines the weights of FSDP's groups per chunk: gathered for the step, reduced at its end. [params]"""
    shard_ranks: float = 1.0


@dataclass(frozen=True)
class Moment:
    """An instant: what ran, and the bytes alive by group. [B]"""

    step: int
    where: str
    allocated: int
    reserved: int
    alive: dict[str, int]


@dataclass(frozen=True)
class MemoryPlayed:
    """What playing the steps gave. ``curve`` is (where, allocated, reserved) after every op of the last step. [B]"""

    peak: Moment
    peak_reserved: int
    between_steps: int
    ready: int
    first_step_peak: int
    retries: int
    out_of_memory: Moment | None
    missing_bytes: int
    curve: tuple[tuple[str, int, int], ...]


@dataclass
class _Pass:
    """A chunk's forward of one micro-batch that waits for its backward."""

    slots: list[dict[str, Block]]
    out: Block | None


class Player:
    """Plays a rank's steps; :func:`play` is the way in."""

    def __init__(self, rank: Rank, capacity: int | None, expandable: bool, skip_rounds: bool) -> None:
        self.rank = rank
        self.a = Allocator(capacity, expandable=expandable)
        self.alive = [0] * len(GROUPS)
        self.group: dict[int, int] = {}
        self.step = 0
        self.place = ("start", "", "")
        self.peak: Moment | None = None
        self.failed: Moment | None = None
        self.missing = 0
        self.curve: list[tuple[str, int, int]] = []
        self.record = False
        self.grads: list[Block] = []
        self.held: dict[str, Block] = {}
        self.cache: list[Block] = []
        self.passes: dict[tuple[int, int], _Pass] = {}
        self.first = True
        self.accumulators: dict[int, list[Block]] = {}
        self.begun: set[int] = set()
        kinds = len({k for k, _, _ in rank.computations})
        sizes = {kinds * n for n in (1, len(rank.chunks), rank.round_length)}
        self.threads: set[str] = set()
        self.turned: dict[tuple[int, int], Block] = {}
        self.input_grads: dict[tuple[int, int], Block] = {}
        self.rounds = tuple(sorted(sizes)) if skip_rounds else ()

    # -- memory
    def new(self, nbytes: int, group: int, stream: int = _COMPUTE) -> Block:
        """Allocate; where the device is full, say so once and play on without end."""
        try:
            block = self.a.malloc(nbytes, stream)
        except OutOfDeviceMemory as full:
            if self.failed is None:
                self.failed = self.moment()
                self.missing = full.reserved + full.size - full.capacity
            self.a.capacity = None
            block = self.a.malloc(nbytes, stream)
        self.alive[group] += block.size
        self.group[id(block)] = group
        if self.peak is None or self.a.allocated > self.peak.allocated:
            self.peak = self.moment()
        return block

    def drop(self, block: Block) -> None:
        self.alive[self.group.pop(id(block))] -= block.size
        self.a.free(block)

    @property
    def where(self) -> str:
        """What runs."""
        phase, piece, op = self.place
        return f"{phase} of {piece}: {op}" if piece else phase

    @where.setter
    def where(self, text: str) -> None:
        self.place = (text, "", "")

    def regroup(self, block: Block, group: int) -> None:
        self.alive[self.group[id(block)]] -= block.size
        self.alive[group] += block.size
        self.group[id(block)] = group

    def moment(self) -> Moment:
        return Moment(
            self.step, self.where, self.a.allocated, self.a.reserved, dict(zip(GROUPS, self.alive, strict=True))
        )

    # -- a step
    def start(self) -> None:
        """Parameters, then what the framework keeps beside them."""
        r = self.rank
        params = [self.new(w.param, _PARAMETERS) for w in r.weights]
        if r.contiguous:  # copied into one buffer, the tensors are let go
            total = sum(w.param for w in r.weights)
            self.new(total, _PARAMETERS)
            self.new(2 * total, _GRADIENTS)
            for block in params:
                self.drop(block)
        for w in self.in_optimizer():
            if w.main:
                self.new(w.main, _STATES)
        for nbytes in r.buffers:
            self.new(nbytes, _BUFFERS)
        self.ready = self.a.allocated

    def run_step(self) -> None:
        """Forwards and backwards of all micro-batches, then the optimizer."""
        r = self.rank
        self.step += 1
        for block in self.grads:
            self.drop(block)
        self.grads = []
        self.begun = set()
        if r.preallocated and self.step == 1:
            for c in range(len(r.chunks)):
                for ways in (r.receives[c], r.sends[c]):
                    for _ in range(r.num_micro_batches if ways else 0):
                        self.new(r.boundary_bytes, _BUFFERS)
        gathered = self.gather()
        self.compute()
        self.reduce(gathered)
        self.optimize()

    def compute(self) -> None:
        """All forwards and backwards, but for rounds that would only repeat the one before them."""
        acts = self.rank.computations
        rounds = Rounds(acts, self.rounds)
        n = 0
        while n < len(acts):
            self.computation(*acts[n])
            n += 1
            if len(self.begun) < len(self.rank.chunks) or not rounds.end(n):
                continue
            last = acts[n - 1][2]
            flying = tuple((k, i - last) for k, i in self.passes)
            if not rounds.same(flying):
                continue
            skipped = rounds.skip(n, self.state(last), (self.a.peak_allocated, self.a.peak_reserved, flying))
            if skipped:
                shift = acts[n + skipped - 1][2] - acts[n - 1][2]
                self.passes = {(k, j + shift): at for (k, j), at in self.passes.items()}
                n += skipped

    def computation(self, kind: str, c: int, i: int) -> None:
        if kind == "F":
            self.forward(c, i)
        elif kind == "B" or (kind == "W" and c in self.rank.first_chunks):
            self.backward(c, i)
        elif kind == "W":
            self.backward_weights(c, i)
        elif c not in self.rank.first_chunks:  # the first stage has no input to differentiate by: W does it all
            self.backward(c, i, hold=True)

    def state(self, last: int) -> tuple[object, ...]:
        """What decides how the allocator answers: its free blocks, and where the waiting activations lie, by
        micro-batch counted from the last one."""
        waiting = tuple(
            (k, i - last, tuple(b.address for slots in at.slots for b in slots.values()))
            for (k, i), at in self.passes.items()
        )
        return (self.a.fingerprint(), waiting)

    def gather(self) -> list[list[list[Block]]]:
        """Under pipelines FSDP gathers each group once a step, and the weights stay."""
        groups = self.rank.gathered_params
        if groups is None:
            return []
        self.where = "gather of parameters"
        out: list[list[list[Block]]] = []
        before: Block | None = None
        for chunk in groups:
            mine = []
            for weights in chunk:
                params = sum(weights)
                source = self.new(int(2 * params / self.rank.shard_ranks), _BUFFERS, _GATHER)
                whole = self.new(int(2 * params), _BUFFERS, _GATHER)
                self.drop(source)
                mine.append([self.new(int(2 * n), _COPIES) for n in weights])
                if before is not None:
                    self.drop(before)
                before = whole
            out.append(mine)
        if before is not None:
            self.drop(before)
        return out

    def reduce(self, gathered: list[list[list[Block]]]) -> None:
        """At the end of a pipeline FSDP reduces the unsharded gradients group by group."""
        groups = self.rank.gathered_params
        if groups is None:
            return
        self.where = "reduction of gradients"
        previous: Block | None = None
        for c, chunk in enumerate(groups):
            for g, weights in enumerate(chunk):
                params = sum(weights)
                for block in gathered[c][g]:
                    self.drop(block)
                buffer = self.new(int(4 * params), _BUFFERS)
                if previous is not None:
                    self.drop(previous)
                previous = buffer
                self.grads.append(self.new(int(4 * params / self.rank.shard_ranks), _GRADIENTS, _REDUCE))
                for block in self.accumulators.pop(c * 10_000 + g, ()):
                    self.drop(block)
        if previous is not None:
            self.drop(previous)

    def in_optimizer(self) -> tuple[Weight, ...]:
        """The weights in the order of the optimizer: Megatron's buffers hold them from the last to the first."""
        return self.rank.weights[::-1] if self.rank.contiguous else self.rank.weights

    def optimize(self) -> None:
        self.where = "optimizer step"
        if self.rank.contiguous:  # clipping scales each gradient into a temporary (utils.py:1212)
            for w in self.in_optimizer():
                self.drop(self.new(w.state, _TEMPORARIES))
        if self.step == 1:
            for w in self.in_optimizer():
                self.new(w.state, _STATES)
                self.new(w.state, _STATES)
        temporaries = [self.new(w.temporary, _TEMPORARIES) for w in self.in_optimizer() if w.temporary]
        for block in temporaries:
            self.drop(block)

    # -- computations
    def workspace(self, thread: str) -> None:
        """cuBLAS takes a workspace for each thread that launches products: the main one and autograd's."""
        if thread not in self.threads:
            self.threads.add(thread)
            self.where = f"first {thread}: workspace of cuBLAS"
            self.new(WORKSPACE, _BUFFERS)

    def forward(self, c: int, i: int) -> None:
        r = self.rank
        x: Block | None = None
        if self.step == 1 and "forward" not in self.threads:
            for nbytes in r.lazy_buffers:
                self.new(nbytes, _BUFFERS)
        self.workspace("forward")
        if r.receives[c] and not r.preallocated:
            self.where = f"receive of micro-batch {i}"
            x = self.new(r.boundary_bytes, _ACTIVATIONS)
        at = _Pass([], None)
        for piece in r.chunks[c]:
            slots: dict[str, Block] = {}
            if x is not None:
                slots["x"] = x
            self.run(piece, "forward", piece.life.forward, slots, piece.life.cached)
            x = slots.pop(piece.life.out, None)
            at.slots.append(slots)
        for block in self.held.values():
            self.drop(block)
        self.held = {}
        for block in self.cache:
            self.drop(block)
        self.cache = []
        at.out = x
        if r.turns[c] and x is not None:  # the next stage is here: its input buffer becomes this tensor for good
            self.replace(self.turned, c, i, x)
            at.out = None
        if r.sends[c] and not r.preallocated and x is not None:
            self.drop(x)
            at.out = None
        self.passes[c, i] = at

    def replace(self, where: dict[tuple[int, int], Block], c: int, i: int, block: Block) -> None:
        """Keep a tensor until the next step's takes its place."""
        old = where.get((c, i))
        where[c, i] = block
        if old is not None:
            self.drop(old)

    def backward_weights(self, c: int, i: int) -> None:
        """The weights' gradients that were put off, then all that was kept for them goes."""
        self.first = c not in self.begun
        self.begun.add(c)
        at = self.passes.pop((c, i))
        for n in range(len(at.slots) - 1, -1, -1):
            piece, slots = self.rank.chunks[c][n], at.slots[n]
            self.run(piece, "weights", piece.life.of_weights(), slots, frozenset(), c * 10_000 + n)
            for block in slots.values():
                self.drop(block)

    def backward(self, c: int, i: int, hold: bool = False) -> None:
        r = self.rank
        at = self.passes[c, i]
        self.workspace("backward")
        dy: Block | None = None
        if at.out is not None:
            self.drop(at.out)
        if r.sends[c] and not r.preallocated:
            self.where = f"receive of gradients of micro-batch {i}"
            dy = self.new(r.boundary_bytes, _ACTIVATIONS)
        if not hold:
            self.first = c not in self.begun
            self.begun.add(c)
        for n in range(len(at.slots) - 1, -1, -1):
            piece, slots = r.chunks[c][n], at.slots[n]
            deeds, needed = piece.life.of_inputs() if hold else (piece.life.backward, frozenset())
            kept = (set(slots) | needed) if hold else set()
            if dy is not None and piece.life.given:
                slots[piece.life.given] = dy
            self.run(piece, "backward", deeds, slots, frozenset(kept), c * 10_000 + n)
            dy = slots.pop(piece.life.back, None) if piece.life.back else None
            for name in [name for name in slots if name not in kept]:
                self.drop(slots.pop(name))
        if dy is not None and hold:  # stays as the received tensor's gradient (stage_backward_input)
            self.replace(self.input_grads, c, i, dy)
        elif dy is not None:
            self.drop(dy)
        for block in self.held.values():
            self.drop(block)
        self.held = {}
        if not hold:
            del self.passes[c, i]

    def run(
        self, piece: Piece, phase: str, deeds: Iterable[Deed], slots: dict[str, Block], stay: frozenset[str],
        index: int = 0,
    ) -> None:  # fmt: skip
        """Play a tape. ``stay`` are names whose memory outlives its last reader: autocast's cache, deferred weights."""
        carried = self.held
        self.held = {}
        for deed in deeds:
            self.place = (phase, piece.name, deed.op)
            temporaries = self.temporaries(deed) if deed.scratch and not deed.scratch_last else []
            for item in deed.new:
                block = carried.pop(deed.claim, None) if deed.claim else None
                slots[item.name] = block or self.new(item.bytes, _GROUP[item.kind], item.stream)
            if deed.scratch:
                for block in temporaries or self.temporaries(deed):
                    self.drop(block)
            if deed.grads:
                self.keep(deed, slots, index, piece.life.name == "embedding")
            for name in deed.hold:
                if name in slots:
                    self.held[name] = slots.pop(name)
            for name in deed.free:
                if name not in slots:
                    continue
                if name in stay:
                    if phase == "forward":
                        self.cache.append(slots.pop(name))
                    continue
                self.drop(slots.pop(name))
            if deed.frees_held:
                for block in carried.values():
                    self.drop(block)
                carried = {}
            if self.record:
                self.curve.append((self.where, self.a.allocated, self.a.reserved))
        for block in carried.values():
            self.drop(block)

    def temporaries(self, deed: Deed) -> list[Block]:
        return [self.new(item.bytes, _TEMPORARIES, item.stream) for item in deed.scratch]

    def keep(self, deed: Deed, slots: dict[str, Block], index: int, embedding: bool) -> None:
        """The first micro-batch's gradients become the parameters'; under FSDP's pipelines as fp32 copies."""
        if self.rank.grads_always or not self.first:
            return
        for name in deed.grads:
            block = slots.get(name)
            if block is None:
                continue
            if self.rank.gathered_params is not None:
                self.accumulators.setdefault(index, []).append(self.new(2 * block.size, _GRADIENTS))
            elif not (self.rank.tied and embedding):
                self.regroup(slots.pop(name), _GRADIENTS)
                self.grads.append(block)


def play(
    rank: Rank, *, capacity: int | None = None, expandable: bool = False, num_steps: int = 3, skip_rounds: bool = True
) -> MemoryPlayed:  # fmt: skip
    """Play the start and ``num_steps`` steps of a rank.

    Optimizer states appear at the first step's end, so that the second differs; from the third on steps repeat. Rounds
    of a step are skipped once the allocator's state repeats, as they would change nothing.

    Parameters
    ----------
    capacity
        What the device has for the allocator; None is without end. [B]
    skip_rounds
        Whether rounds that repeat are left out; they change nothing but the curve's length.
    """
    player = Player(rank, capacity, expandable, skip_rounds)
    player.start()
    first = 0
    for step in range(num_steps):
        if step == 1:
            assert player.peak is not None
            first = player.peak.allocated
            player.peak = None
        player.record = step == num_steps - 1
        player.run_step()
    assert player.peak is not None
    return MemoryPlayed(
        player.peak, player.a.peak_reserved, player.a.allocated, player.ready, first, player.a.num_retries,
        player.failed, player.missing, tuple(player.curve),
    )  # fmt: skip
