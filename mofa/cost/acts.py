"""A chunk's passes as requests to one pool of the caching allocator: numbered slots taken and let go, in order.

A pool knows nothing of another one, neither of other streams' nor of small tensors. So what a rank asks for is played
pool by pool, and which tensor a block hands on to the next one is known before anything is played.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from mofa.blocks.frameworks.megatron_lasting import Lasting
from mofa.cost.heap import SMALL, rounded
from mofa.cost.lives import Deed, Life, New, in_order, products

TAKE, FREE, CLAIM, HOLD, CACHE, KEEP, DROP, PRODUCT, LOSS, SUM, LATE, RENEW, SENT, LASTING, SHELVE = range(15)
"""Allocate; let go; take over what the block before held, or allocate; hand on to the next block; keep until a
forward's end; add to the parameters' gradients; let go what the block before held and this one does not take over; the
block's first product begins; its loss does; allocate what a gradient becomes that another stage sent, with its first
summand; let go at the end of the backward; let go what lingers of the block's last backward; let go what a stream of
NCCL's uses."""
TAKES = TAKE, CLAIM
OF_POOL = *TAKES, LASTING
EVERYWHERE = DROP, KEEP, PRODUCT, LOSS, SUM, RENEW
"""What matters whatever the pool."""
Act = tuple[int, int, int, int]
"""What is done to which slot, the bytes asked for, and of which pool (:func:`pool_of`)."""
Requests = list[tuple[int, int]]
"""Bytes to be taken, 0 where a slot is let go, and the slot. [B]"""
GONE_LATE, SHELVED = -1, -2
"""In place of the 0 where what is let go comes back only once the device has got that far, or PyTorch's watchdog has
seen that (:mod:`mofa.cost.shelf`)."""
Stretches = tuple[tuple[Requests, float], ...]
"""Requests of each block of a pass, late ones among them, and its launches. [B], [-]"""
Lasts = tuple[int, tuple[int, str], int]
"""How many requests are in front of a buffer that is taken for good where it is the first: its block, -1 where blocks
share it, with its name, and its size. [B]"""
Renewed = tuple[tuple[int, ...], Requests]
"""Slots of what lingers of a chunk, and requests among which it goes. [B]"""


def pool_of(size: int, stream: int = 0) -> int:
    """The pool of a rounded size: twice the stream, and one more where it is small."""
    return stream << 1 | (size <= SMALL)


@dataclass(frozen=True)
class Script:
    """A block's acts on its slots; those of its input and output and of their gradients are -1 where there is none.

    ``sizes`` are by slot, ``holds`` and ``claims`` under which name one is handed on and taken over. [B]
    """

    forward: tuple[Act, ...]
    backward: tuple[Act, ...]
    sizes: tuple[int, ...]
    holds: dict[int, str]
    claims: dict[int, str]
    x: int
    out: int
    given: int
    back: int
    logits: int = -1
    dry: tuple[Act, ...] = ()
    lingers: tuple[tuple[int, int], ...] = ()
    """Slots of what lingers of a backward, and their sizes. [B]"""
    launches: tuple[float, float] = (0.0, 0.0)
    """Kernels of forward and backward. [-]"""
    lasting: tuple[str, ...] = ()
    """Names of what is taken for good, by the slots of their acts."""
    by_pool: dict[int, tuple[tuple[Act, ...], ...]] = field(default_factory=dict, compare=False)

    def asks(self) -> set[int]:
        """The pools that it asks for memory."""
        return {act[3] for acts in (self.forward, self.backward) for act in acts if act[0] in TAKES}

    def on(self, pool: int) -> tuple[tuple[Act, ...], ...]:
        """The acts of forward, backward and trial forward that can matter to a pool."""
        if pool not in self.by_pool:
            all_ = self.forward, self.backward, self.dry
            mine = {slot for acts in all_ for code, slot, _, of in acts if code in TAKES and of == pool}
            mine |= {self.x, self.given}
            self.by_pool[pool] = tuple(
                tuple(a for a in acts if (a[3] == pool if a[0] in OF_POOL else a[1] in mine or a[0] in EVERYWHERE))
                for acts in all_
            )
        return self.by_pool[pool]


class _Slots:
    """Numbers the tensors of a block."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.numbers: dict[str, int] = {}
        self.sizes: list[int] = []
        self.holds: dict[int, str] = {}
        self.claims: dict[int, str] = {}
        self.lasting: dict[str, int] = {}

    def of(self, name: str, nbytes: int = 0) -> int:
        slot = self.numbers.setdefault(name, len(self.numbers))
        if slot == len(self.sizes):
            self.sizes.append(0)
        if nbytes:
            self.sizes[slot] = rounded(nbytes)
        return slot

    def take(self, name: str, item: New, code: int = TAKE) -> Act:
        slot = self.of(name, item.bytes)
        size = self.sizes[slot]
        return code, slot, size, pool_of(size, item.stream)

    def free(self, name: str, code: int = FREE) -> Act:
        return code, self.of(name), 0, 0

    def last(self, one: Lasting) -> Act:
        """A buffer for good; its slot counts names, below 0 where each block has its own."""
        number = self.lasting.setdefault(one.name, len(self.lasting))
        size = rounded(one.bytes)
        return LASTING, ~number if one.each else number, size, pool_of(size)

    def freeing(self, name: str) -> int:
        """How a tensor is let go."""
        late = LATE if name in self.life.late else FREE
        return SENT if name in self.life.sent else SHELVE if name in self.life.shelved else late

    def acts(self, deeds: Iterable[Deed], cached: Collection[str] = ()) -> tuple[Act, ...]:
        out: list[Act] = []
        ends: tuple[str, ...] | None = products(self.life)
        loss = bool(self.life.logits) and deeds is self.life.forward
        for deed in deeds:
            if loss and deed.op.startswith("loss."):
                out.append((LOSS, 0, 0, 0))
                loss = False
            names = [f"scratch of its own {i}" for i in range(len(deed.scratch))]
            scratch = [self.take(name, item) for name, item in zip(names, deed.scratch, strict=True)]
            made = [self.take(item.name, item) for item in deed.new]
            out += [self.last(one) for one in deed.lasting if not one.behind]
            if deed.claim and made:
                made[0] = CLAIM, *made[0][1:]
                self.claims[made[0][1]] = deed.claim
            early = {f"-{name}": self.free(name) for name in deed.free if f"-{name}" in deed.order}
            if deed.sums:
                out.append(self.free(self.life.given, SUM))
            out += in_order(deed, scratch, made, [self.free(name) for name in names], early)
            if ends is not None and deed.op.endswith(ends):
                out.append((PRODUCT, 0, 0, 0))
                ends = None
            out += [self.last(one) for one in deed.lasting if one.behind]
            for name in deed.grads:
                gone_now = name in deed.free and name not in self.life.late
                out += [self.free(name, KEEP), *([self.free(name)] if gone_now else [])]
            for name in deed.hold:
                out.append(self.free(name, HOLD))
                self.holds[self.of(name)] = name
            gone = (name for name in deed.free if name != self.life.logits)
            out += [self.free(name, CACHE if name in cached else self.freeing(name)) for name in gone]
            if deed.frees_held:
                out.append((DROP, 0, 0, 0))
            if deed.renews:
                out.append((RENEW, 0, 0, 0))
        return tuple(out)


def script(life: Life) -> Script:
    """The acts of a block."""
    slots = _Slots(life)
    forward, backward = slots.acts(life.forward, life.cached), slots.acts(life.backward)
    x, out, given, back = (slots.of(name) if name else -1 for name in ("x", life.out, life.given, life.back))
    logits = slots.of(life.logits) if life.logits else -1
    dry = slots.acts(life.dry)
    lingers = tuple((slots.of(name), rounded(nbytes)) for name, nbytes in life.lingers)
    return Script(
        forward, backward, tuple(slots.sizes), slots.holds, slots.claims, x, out, given, back, logits, dry, lingers,
        (life.launches[0], life.launches[1] + life.launches[2]), tuple(slots.lasting),
    )  # fmt: skip


@dataclass(frozen=True)
class Ends:
    """How a chunk's passes begin and end.

    ``boundary`` are the bytes of what stages send each other, ``receives`` whether the input comes from another stage,
    ``sends`` whether the output goes to one. Where it is ``kept``, as PyTorch's schedules do, inputs come in buffers,
    and outputs and inputs' gradients are the schedule's to let go. [B]
    """

    boundary: int
    receives: bool
    sends: bool
    kept: bool = False


@dataclass(frozen=True)
class Course:
    """What a chunk's forward, backward and first backward ask of a pool.

    ``gradients`` are the slots of each block in which the first backward leaves those of its parameters.
    """

    num_slots: int
    forward: Requests
    backward: Requests
    first: Requests
    left: tuple[int, ...]
    """The slots that a forward leaves, for what is never played to its end."""
    gradients: tuple[tuple[int, ...], ...]
    products: tuple[int, int] = (-1, -1)
    """How many requests of a forward and of a first backward are in front of what its first product works in; -1 where
    it has no product of PyTorch's."""
    lasting: tuple[tuple[Lasts, ...], tuple[Lasts, ...]] = ((), ())
    """What a forward and a first backward take for good."""
    loss: int = 0
    """How many of a forward are in front of its loss, 0 where there is none."""
    output: int = -1
    """The slot of what a chunk gives, where the schedule lets it go."""
    gradient: int = -1
    """The same of its input's gradient, by which backward it was: of the others and of the first."""
    first_gradient: int = -1
    trial: Requests = field(default_factory=list)
    """A trial forward, whose slots are its own; ``trial_slots`` are so many, ``trial_product`` is like ``products``."""
    trial_slots: int = 0
    trial_product: int = -1
    begins: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """How many requests of a forward and of a trial forward are in front of each block's."""
    lingers: tuple[int, ...] = ()
    """The slots of what lingers of a backward."""
    renewed: tuple[Renewed, Renewed] = ((), []), ((), [])
    """Forward and backward where such is there, which is put into these slots before."""
    late: tuple[Stretches, Stretches] = ((), ())
    """Forward and backward block by block, where something of their inside comes back late; empty where nothing."""

    @property
    def shelves(self) -> bool:
        """Whether something is left to PyTorch's watchdog."""
        return any(size == SHELVED for one in self.late for requests, _ in one for size, _ in requests)


def course(pool: int, chunk: Sequence[Script], ends: Ends, *, accumulates: str, tied: bool = False) -> Course:
    """A chunk's passes on a pool.

    Parameters
    ----------
    accumulates
        What becomes of the first micro-batch's gradients: ``"there"``, added to what is there already; ``"stay"``,
        they become the parameters'; ``"fp32"``, a copy of twice their size does.
    tied
        Whether the first block's weight is the last one's, whose gradient is the one that stays.
    """
    made = _Course(pool, chunk, ends, accumulates, tied)
    whole = made.forward()
    of_blocks = made.stretches(whole, made.begins, [one.launches[0] for one in chunk])
    forward, renewed = made.without_waiting(whole)
    before, made.product = made.product, -1
    lasting, made.lasting = tuple(made.lasting), []
    begins = made.begins
    left = tuple(slot for slots in (*made.places, [made.out]) for slot in slots if slot >= 0)
    output = made.out if ends.kept else -1
    whole = made.backward(first=False)[0]
    again = made.stretches(whole, made.begins_back, [one.launches[1] for one in reversed(chunk)])
    backward, renewed_again = made.without_waiting(whole)
    lingers = tuple(slot for slots in made.left for slot in slots)
    of_backward, made.product = made.product, -1
    gradient = made.gradient
    late = (of_blocks, again) if made.sends and not lingers else ((), ())
    if accumulates == "there":
        return Course(
            made.num, forward, backward, backward, left, tuple(() for _ in chunk), (before, of_backward),
            (lasting, tuple(made.lasting)), made.loss, output,
            gradient, gradient, lingers=lingers, renewed=(renewed, renewed_again), late=late,
        )  # fmt: skip
    assert not lingers, "gradients of layers with something that lingers are there from the start"
    first, gradients = made.backward(first=True)
    made.stretches(first, made.begins_back, [0.0] * len(chunk))
    trial = _Course(pool, chunk, ends, accumulates, tied)
    return Course(
        made.num, forward, backward, first, left, gradients, (before, made.product),
        (lasting, tuple(made.lasting)), made.loss, output,
        gradient, made.gradient, trial.dry(), trial.num, trial.product,
        (tuple(begins), tuple(trial.begins)), late=late,
    )  # fmt: skip


class _Course:
    """Goes through the blocks of a chunk; ``places`` are where their slots are among the chunk's, -1 for nowhere."""

    def __init__(self, pool: int, chunk: Sequence[Script], ends: Ends, accumulates: str, tied: bool) -> None:
        self.pool, self.chunk, self.ends, self.accumulates, self.tied = pool, chunk, ends, accumulates, tied
        self.num = 0
        self.out = -1
        self.product = -1
        self.block = 0
        self.lasting: list[Lasts] = []
        self.loss, self.gradient = 0, -1
        self.received = False
        self.late: list[int] = []
        self.held: dict[str, int] = {}
        self.cache: list[int] = []
        self.places: list[list[int]] = []
        self.begins: list[int] = []
        self.begins_back: list[int] = []
        self.sends = False
        self.left: list[list[int]] = []
        self.waiting: list[list[int]] = []

    def stretches(self, requests: Requests, begins: Sequence[int], launches: Sequence[float]) -> Stretches:
        """A pass block by block; after it nothing is said of what comes back late any more."""
        stretches = tuple(
            (requests[start:stop], issued)
            for start, stop, issued in zip((0, *begins[1:]), (*begins[1:], len(requests)), launches, strict=True)
        )
        self.sends |= any(size < 0 for size, _ in requests)
        requests[:] = [(max(size, 0), slot) for size, slot in requests]
        return stretches

    def without_waiting(self, requests: Requests) -> tuple[Requests, Renewed]:
        """Requests of a pass that found nothing lingering, and of one that did."""
        waiting, self.waiting = tuple(slot for slots in self.waiting for slot in slots), []
        if not waiting:
            return requests, ((), requests)
        gone = set(waiting)
        before = list(accumulate((slot in gone for _, slot in requests), initial=0))
        self.lasting = [(at - before[at], key, size) for at, key, size in self.lasting]
        self.product -= before[self.product] if self.product >= 0 else 0
        return [(size, slot) for size, slot in requests if slot not in gone], (waiting, requests)

    def take(self, size: int, pool: int, out: Requests) -> int:
        """A slot; -1 where it is another pool's."""
        if pool != self.pool:
            return -1
        out.append((size, self.num))
        self.num += 1
        return self.num - 1

    def forward(self) -> Requests:
        out: Requests = []
        ends = self.ends
        x = self.take(ends.boundary, pool_of(ends.boundary), out) if ends.receives and not ends.kept else -1
        for n, one in enumerate(self.chunk):
            self.block = n
            place, x = self.through(one, 0, x, out)
            self.places.append(place)
        out += [(0, slot) for slot in (*self.held.values(), *self.cache)]
        self.held, self.cache = {}, []
        if x >= 0 and ends.sends and not ends.kept:
            out.append((0, x))
            x = -1
        self.out = x
        return out

    def through(self, one: Script, part: int, x: int, out: Requests) -> tuple[list[int], int]:
        """A block's forward over its input's slot: where it keeps what, and the slot of what it gives."""
        self.begins.append(len(out))
        place = [-1] * len(one.sizes)
        place[one.x] = x
        self.run(one, one.on(self.pool)[part], place, out, None)
        gives = one.logits if one.logits >= 0 else one.out
        if gives < 0:
            return place, -1
        given, place[gives] = place[gives], -1
        return place, given

    def dry(self) -> Requests:
        """A forward of which nothing is kept: what it gives goes last."""
        out: Requests = []
        x = -1
        for one in self.chunk:
            place, x = self.through(one, 2, x, out)
            out += [(0, slot) for slot in place if slot >= 0]
        out += [(0, slot) for slot in (*self.held.values(), x) if slot >= 0]
        self.held = {}
        return out

    def backward(self, *, first: bool) -> tuple[Requests, tuple[tuple[int, ...], ...]]:
        ends = self.ends
        self.left, self.begins_back = [], []
        out: Requests = [(0, self.out)] if self.out >= 0 and not ends.kept else []
        dy = self.take(ends.boundary, pool_of(ends.boundary), out) if ends.sends and not ends.kept else -1
        self.received = ends.sends and ends.kept
        gradients: list[tuple[int, ...]] = []
        for n in reversed(range(len(self.chunk))):
            one, place, self.block = self.chunk[n], self.places[n].copy(), n
            if one.given >= 0:
                place[one.given] = dy
            mine: list[int] = []
            self.begins_back.append(len(out))
            self.run(one, one.on(self.pool)[1], place, out, mine if first and not (self.tied and n == 0) else None)
            gradients.append(tuple(mine))
            dy = -1
            self.left.append([place[slot] for slot, _ in one.lingers if place[slot] >= 0])
            for slot, _ in one.lingers:
                place[slot] = -1
            if one.back >= 0:
                dy, place[one.back] = place[one.back], -1
                if n == 0 and ends.receives and one.back in (slot for slot, _ in one.lingers):
                    dy = self.take(ends.boundary, pool_of(ends.boundary), out)  # a copy: the gradient lingers
            out += [(0, slot) for slot in place if slot >= 0]
        self.left.reverse()
        self.waiting.reverse()
        out += [(0, slot) for slot in self.late]
        self.late = []
        self.gradient = -1
        if ends.kept and ends.receives:
            self.gradient, dy = dy, -1
        out += [(0, slot) for slot in (dy, *self.held.values()) if slot >= 0]
        self.held = {}
        return out, tuple(gradients[::-1])

    def run(
        self, one: Script, acts: tuple[Act, ...], place: list[int], out: Requests, gradients: list[int] | None
    ) -> None:  # fmt: skip
        carried, self.held = self.held, {}
        mine, num = self.pool, self.num
        for code, slot, size, _ in acts:
            if code == TAKE:
                out.append((size, num))
                place[slot] = num
                num += 1
            elif code == FREE:
                if place[slot] >= 0:
                    out.append((0, place[slot]))
                    place[slot] = -1
            elif code == CLAIM:
                place[slot] = carried.pop(one.claims[slot], -1)
                if place[slot] < 0:
                    out.append((size, num))
                    place[slot] = num
                    num += 1
            elif code == SUM:
                if self.received and place[slot] < 0 and pool_of(self.ends.boundary) == mine:
                    out.append((self.ends.boundary, num))
                    place[slot] = num
                    num += 1
                self.received = False
            elif code == RENEW:
                lasting = [num + i for i in range(sum(pool_of(nbytes) == mine for _, nbytes in one.lingers))]
                out += [(0, slot) for slot in lasting]
                self.waiting.append(lasting)
                num += len(lasting)
            elif code == LOSS:
                self.loss = len(out)
            elif code == PRODUCT:
                self.product = len(out) if self.product < 0 else self.product
            elif code == LASTING:
                key = (-1, one.lasting[slot]) if slot >= 0 else (self.block, one.lasting[~slot])
                self.lasting.append((len(out), key, size))
            elif code == DROP:
                for name in [name for name in carried if name not in one.claims.values()]:
                    out.append((0, carried.pop(name)))
            elif code == KEEP and gradients is not None and self.accumulates == "fp32":
                twice = 2 * one.sizes[slot]
                if pool_of(twice) == mine:
                    out.append((twice, num))
                    gradients.append(num)
                    num += 1
            elif place[slot] >= 0:
                if code in (SENT, SHELVE):
                    out.append((GONE_LATE if code == SENT else SHELVED, place[slot]))
                elif code == HOLD:
                    self.held[one.holds[slot]] = place[slot]
                elif code == CACHE:
                    self.cache.append(place[slot])
                elif code == LATE:
                    self.late.append(place[slot])
                elif gradients is None or self.accumulates != "stay":
                    continue
                else:
                    gradients.append(place[slot])
                place[slot] = -1
        out += [(0, slot) for slot in carried.values()]
        self.num = num
