"""A block's allocation trace as a program: allocations and frees on numbered slots, in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mofa.blocks.frameworks.megatron_persistent import Lasting
from mofa.blocks.op import RENEWAL
from mofa.cost.allocations.allocation_trace import Deed, Life, New, in_order
from mofa.replay.allocator.pools import SMALL_SIZE, round_size
from mofa.replay.allocator.timeline import ACTIVATIONS, BUFFERS, GROUP_OF, Act

NEW, FREE, CLAIM, HOLD, CACHE, KEEP, DROP_CARRIED, REPLACED, PRODUCT, FREE_REDUCED, SUM, LATE, RENEW = range(13)
FREE_SENT, LASTING, SHELVE = 13, 14, 15
"""Allocate; free; take over what the block before held, or allocate; hand on to the next block; leave in autocast's
cache; keep as a parameter's gradient; free what the block before held and none took over; the schedule has this
micro-batch's output in place of the last one's; a product begins, its output being there; free
what tensor parallelism has summed; allocate what a gradient becomes that another stage sent, with its first summand;
free at the end of the backward; free what lingered of the block's last backward; free what a stream of NCCL's uses;
take for good, where it is the rank's first of that name; leave to PyTorch's watchdog."""

SCRATCH = "scratch of its own "
INPUT, GRADIENT = "input of a layer", "gradient of a layer's output"


Bound = tuple[tuple[Act, int, int, int, int], ...]
"""Acts with their code, slot, rounded size and pool (:meth:`mofa.replay.allocator.caching.Allocator.take`)."""


def bound(acts: Iterable[Act]) -> Bound:
    """Acts as the innermost loop reads them."""
    return tuple((act, act.code, act.slot, act.size, act.stream << 1 | (act.size <= SMALL_SIZE)) for act in acts)


@dataclass(frozen=True)
class Script:
    """A block's acts. Slots are numbered from 0 to ``num_slots``; -1 is none.

    ``inputs``, ``weights``, ``weights_of_last``, ``loose`` and ``above`` are empty where no schedule asks for them.
    ``claims`` and ``holds`` name what is taken over and handed on, by slot. ``loose`` frees what a backward by
    inputs alone leaves at its end, ``above`` what it lets go where it began with this block, ``rest`` whatever is left.
    """

    num_slots: int
    forward: Bound
    backward: Bound
    inputs: Bound
    weights: Bound
    weights_of_last: Bound
    """The same of a chunk's last block, with no weight behind it."""
    x: int
    out: int
    given: int
    back: int
    claims: dict[int, str]
    holds: dict[int, str]
    loose: tuple[Act, ...]
    above: tuple[Act, ...]
    rest: tuple[Act, ...]
    logits: int = -1
    """A pipeline's output, which the schedule holds."""
    dry: Bound = ()
    """The forward that stages learn shapes by."""
    lingers: tuple[tuple[Act, int], ...] = ()
    """What lets go what lingers of a backward, and the rounded sizes of that. [B]"""


class _Slots:
    def __init__(self, life: Life) -> None:
        self.life = life
        self.index: dict[str, int] = {}
        self.groups: dict[str, int] = {}
        self.claims: dict[int, str] = {}
        self.holds: dict[int, str] = {}

    def of(self, name: str) -> int:
        return self.index.setdefault(name, len(self.index))

    def shown(self, name: str) -> str:
        """What a tensor is called: what blocks hand on has one name for all of them."""
        if name in ("x", self.life.out):
            return INPUT
        if name and name in (self.life.given, self.life.back):
            return GRADIENT
        return name.split("#")[0]

    def shown_in(self, name: str, op: str) -> str:
        return f"scratch of {op}" if name.startswith(SCRATCH) else self.shown(name)

    def freeing(self, name: str) -> int:
        """How a tensor is let go."""
        if name in self.life.reduced:
            return FREE_REDUCED
        if name in self.life.sent:
            return FREE_SENT
        if name in self.life.shelved:
            return SHELVE
        return LATE if name in self.life.late else FREE

    def act(self, code: int, name: str, op: str, item: New | None = None) -> Act:
        shown = self.shown_in(name, op)
        if shown in (INPUT, GRADIENT):
            self.groups[name] = ACTIVATIONS
        elif item is not None:
            self.groups[name] = GROUP_OF[item.kind]
        size, stream = (round_size(item.bytes), item.stream) if item is not None else (0, 0)
        expert = item.expert if item is not None else -1
        return Act(code, self.of(name), size, stream, self.groups.get(name, ACTIVATIONS), shown, op, expert)

    def lasting(self, one: Lasting, op: str) -> Act:
        """A buffer for good; its slot says whether each block has its own."""
        return Act(LASTING, int(one.each), round_size(one.bytes), 0, BUFFERS, one.name, op)

    def acts(self, deeds: Iterable[Deed], freed: frozenset[str] | None, cached: frozenset[str]) -> tuple[Act, ...]:
        """``freed`` are the only names that may be freed; all where None. ``cached`` go to the cache instead."""
        out: list[Act] = []
        items: dict[str, New] = {}
        replaced = not self.life.logits or deeds is not self.life.forward
        awaits_product, at_embedding = self.life.torch_products, self.life.name == "embedding"
        for deed in deeds:
            if not replaced and deed.module == "loss":
                out.append(Act(REPLACED, 0, 0, 0, ACTIVATIONS, "", deed.op))
                replaced = True
            scratch = [self.act(NEW, f"{SCRATCH}{i}", deed.op, item) for i, item in enumerate(deed.scratch)]
            made = []
            out += [self.lasting(one, deed.op) for one in deed.lasting if not one.behind]
            items |= {item.name: item for item in deed.new}
            for i, item in enumerate(deed.new):
                claimed = bool(deed.claim) and i == 0
                made.append(self.act(CLAIM if claimed else NEW, item.name, deed.op, item))
                if claimed:
                    self.claims[self.of(item.name)] = deed.claim
            gone = [self.act(FREE, f"{SCRATCH}{i}", deed.op, item) for i, item in enumerate(deed.scratch)]
            early = {
                f"-{name}": self.act(FREE, name, deed.op)
                for name in deed.free
                if f"-{name}" in deed.order and (freed is None or name in freed)
            }
            if deed.sums:
                out.append(Act(SUM, self.of(self.life.given), 0, 0, ACTIVATIONS, GRADIENT, deed.op))
            out += in_order(deed, scratch, made, gone, early)
            if awaits_product and deed.is_product and not (at_embedding and not deed.role):
                out.append(Act(PRODUCT, 0, 0, 0, ACTIVATIONS, "", deed.op))
                awaits_product = False
            out += [self.lasting(one, deed.op) for one in deed.lasting if one.behind]
            for name in deed.grads:
                out.append(self.act(KEEP, name, deed.op, items.get(name)))
                # it goes when a copy is there
                if name in deed.free and name not in self.life.late and (freed is None or name in freed):
                    out.append(self.act(FREE, name, deed.op))
            for name in deed.hold:
                out.append(self.act(HOLD, name, deed.op))
                self.holds[self.of(name)] = name
            for name in deed.free:
                if name in cached:
                    out.append(self.act(CACHE, name, deed.op))
                elif (freed is None or name in freed) and name != self.life.logits:
                    out.append(self.act(self.freeing(name), name, deed.op))
            if deed.frees_held:
                out.append(Act(DROP_CARRIED, 0, 0, 0, ACTIVATIONS, "", deed.op))
            if deed.renews:
                out.append(Act(RENEW, 0, 0, 0, ACTIVATIONS, "", deed.op))
        return tuple(out)


def script(life: Life) -> Script:
    """The acts of a block: forward, backward, and where a schedule puts weights' gradients off the halves of that."""
    slots = _Slots(life)
    forward = slots.acts(life.forward, None, life.cached)
    backward = slots.acts(life.backward, None, frozenset())
    inputs: tuple[Act, ...] = ()
    weights = of_last = inputs
    left: frozenset[str] = frozenset()
    above = left
    if life.apart:
        deeds, needed = life.of_inputs()
        left = frozenset(item.name for deed in deeds for item in deed.new) | {life.given}
        left, above = left - needed, life.above_weights()
        inputs = slots.acts(deeds, left, frozenset())
        weights, of_last = (slots.acts(life.of_weights(last=last), None, frozenset()) for last in (False, True))
    dry = slots.acts(life.dry, None, frozenset())

    def place(name: str) -> int:
        return slots.of(name) if name else -1

    x, out, given, back = slots.of("x"), place(life.out), place(life.given), place(life.back)
    loose = tuple(slots.act(FREE, name, "end") for name in sorted(left) if name)
    let_go = tuple(slots.act(FREE, name, "end") for name in sorted(above))
    rest = tuple(slots.act(FREE, name, "end") for name in list(slots.index))
    lingers = tuple((slots.act(FREE, name, RENEWAL), round_size(nbytes)) for name, nbytes in life.lingers)
    return Script(
        len(slots.index),
        bound(forward),
        bound(backward),
        bound(inputs),
        bound(weights),
        bound(of_last),
        x,
        out,
        given,
        back,
        slots.claims,
        slots.holds,
        loose,
        let_go,
        rest,
        place(life.logits),
        bound(dry),
        lingers,
    )
