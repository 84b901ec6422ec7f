"""A block's tapes of one combination as acts on numbered slots: what a stage's pools are asked for, in order.

The same that :mod:`mofa.replay.script` has, of tensors of more than 1 MiB alone and without their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mofa.blocks.build import BlockTapes
from mofa.blocks.elementwise import value, where
from mofa.blocks.op import Attention, Op
from mofa.cost.freelist import SMALL, rounded

FREE, ACCUMULATE, TAKE, CLAIM, HOLD, DROP = 0, -1, -2, -3, -4, -5
"""What is done to a slot instead of taking so many bytes of the computing stream's pool: let go; add to the parameters'
gradients; take of another stream's pool; take over what the block before held, or else take; hand on to the next block;
let go what the block before held and this one does not take over."""
Acts = list[tuple[int, int]]
"""What is done, positive for bytes to be taken, and to which slot. [B]"""
STREAMS = {"fsdp_gather": 1, "fsdp_reduce": 2}
"""Streams with pools of their own: FSDP's. [-]"""
CLAIMS = {
    "fsdp.turn": "fsdp.next", "efsdp.turn": "efsdp.next", "fsdp.turn@": "fsdp.next@", "efsdp.turn@": "efsdp.next@",
    "fsdp.previous": "fsdp.reduce_input",
}  # fmt: skip
"""Marks of FSDP at which a block takes over what the block before it held, under this name."""
Weight = tuple[float, bool]
"""Parameters, and whether they are an expert's. [params]"""


@dataclass(frozen=True)
class Script:
    """A block's acts, whole and of what stays alone: what is kept, handed on, and gradients.

    ``sizes`` and ``pools`` are by slot, ``holds`` and ``claims`` under which name they are handed on and taken over.
    ``x``, ``out``, ``given`` and ``back`` are the slots of a block's input and output, of their gradients the other way
    round, -1 where there is none. ``small`` are sizes of up to 1 MiB that are kept, and how many. [B]
    """

    sizes: tuple[int, ...]
    pools: tuple[int, ...]
    holds: dict[int, str]
    claims: dict[int, str]
    forward: Acts
    backward: Acts
    kept_forward: Acts
    kept_backward: Acts
    x: int
    out: int
    given: int
    back: int
    small: tuple[tuple[int, int], ...]

    def size_of(self, name: str) -> int:
        """Of what is handed on. [B]"""
        return next((self.sizes[slot] for slot, found in self.holds.items() if found == name), 0)


class _Slots:
    """The tensors of a block of more than 1 MiB, by the op at which they come and at which they go."""

    def __init__(
        self, block: BlockTapes, k: int, weights: Sequence[Weight], instead: Mapping[str, int]
    ) -> None:  # fmt: skip
        lives = block.lives
        self.ops, self.boundary = lives.ops, lives.boundary
        self.made: list[list[int]] = [[] for _ in self.ops]
        self.gone: list[list[int]] = [[] for _ in self.ops]
        self.bytes: list[list[int]] = [[] for _ in self.ops]
        self.sizes: list[int] = []
        self.pools: list[int] = []
        self.of: dict[str, int] = {}
        self.stays: set[int] = set()
        self.small: Counter[int] = Counter()
        pools = {w: STREAMS[op.stream] for op in self.ops if not _mark(op, "fsdp.previous")
                 for w in op.writes if op.stream in STREAMS}  # fmt: skip
        copies = {w for op in self.ops if op.name.endswith(".copy_out") for w in op.writes}
        inputs, outputs = _ends(block)
        first, last = (0, self.boundary), (self.boundary - 1, len(self.ops) - 1)
        self.given: dict[str, int] = {}
        self.handed: dict[str, int] = {}
        for name, _, start, end, nbytes in lives.found:
            across, pool = start < self.boundary <= end, pools.get(name, 0)
            own = int(instead.get(name, 0) or value(nbytes, k))
            if own > 0:
                self.bytes[start].append(own)
            size = rounded(own)
            if size <= SMALL:
                self.small[size] += across and not pool and own > 0
                continue
            for part in _pieces(name, size, weights) if name in copies else [size]:
                slot = self.slot(part, pool)
                self.of[name] = slot
                inside = any(start == first[w] and name == inputs[w] for w in (0, 1))
                outside = any(end >= last[w] and name == outputs[w] for w in (0, 1)) and name not in self.handed
                if inside:
                    self.given[name] = slot
                else:
                    self.made[start].append(slot)
                if outside:
                    self.handed[name] = slot
                else:
                    self.gone[end].append(slot)
                if across or inside or outside:
                    self.stays.add(slot)

    def slot(self, size: int, pool: int) -> int:
        self.sizes.append(size)
        self.pools.append(pool)
        return len(self.sizes) - 1


def _ends(block: BlockTapes) -> tuple[list[str], list[str]]:
    """The inputs of the forward and of the backward, and the outputs; empty where there is none."""
    tapes = block.forward, block.backward
    return [(*tape.inputs, "")[0] for tape in tapes], [(*tape.outputs, "")[0] for tape in tapes]


def _mark(op: Op, name: str) -> bool:
    return op.name == name and op.work is None


def script(
    block: BlockTapes, k: int, weights: Sequence[Weight] = (), instead: Mapping[str, int] | None = None
) -> Script:  # fmt: skip
    """The acts of a combination.

    Parameters
    ----------
    weights
        The block's, which FSDP copies out of what it gathered one by one.
    instead
        Bytes of tensors that are others here. [B]
    """
    slots = _Slots(block, k, weights, instead or {})
    held = {name for op in slots.ops if op.name.startswith("fsdp.hold") for name in op.reads}
    holds = {slot: name for name, slot in slots.of.items() if name in held}
    claims: dict[int, str] = {}
    whole: tuple[Acts, Acts] = ([], [])
    kept: tuple[Acts, Acts] = ([], [])
    for i, op in enumerate(slots.ops):
        back = i >= slots.boundary
        made, gone = slots.made[i], slots.gone[i]
        total = int(value(where(op.present, op.scratch, 0.0), k))
        attention = isinstance(op.work, Attention)
        own = [] if attention else slots.bytes[i]
        pool = STREAMS.get(op.stream, 0)
        scratch = [slots.slot(rounded(size), pool) for size in _scratch(total, own) if size > SMALL]
        claim = CLAIMS.get(op.name, "") if op.work is None else ""
        takes = [(CLAIM if claim and n == 0 else _taking(slots, slot), slot) for n, slot in enumerate(made)]
        if claim and made:
            claims[made[0]] = claim
        extra = [(_taking(slots, slot), slot) for slot in scratch]
        adds = op.name.endswith(".accumulate") and bool(value(op.present, k))
        added = [slots.of[name] for name in op.reads if name in slots.of] if adds else []
        acts = whole[back]
        acts += [*takes, *extra] if attention else [*extra, *takes]
        acts += [(FREE, slot) for slot in scratch]
        acts += [(ACCUMULATE, slot) for slot in added]
        acts += [(HOLD if slot in holds else FREE, slot) for slot in gone]
        few = kept[back]
        few += [act for act in takes if act[1] in slots.stays]
        for slot in added:
            brief = slot not in slots.stays
            few += [(_taking(slots, slot), slot)] if brief else []
            few += [(ACCUMULATE, slot), *([(FREE, slot)] if brief else [])]
        few += [(FREE, slot) for slot in gone if slot in slots.stays]
        if op.name.endswith(".copy_out"):
            acts.append((DROP, -1))
    (x, given), (out, ended) = (
        [found.get(name, -1) for name in names]
        for found, names in zip((slots.given, slots.handed), _ends(block), strict=True)
    )
    return Script(
        tuple(slots.sizes), tuple(slots.pools), holds, claims, *whole, *kept, x, out, given, ended,
        tuple((size, number) for size, number in slots.small.items() if number),
    )  # fmt: skip


def _taking(slots: _Slots, slot: int) -> int:
    return TAKE if slots.pools[slot] else slots.sizes[slot]


def _pieces(name: str, size: int, weights: Sequence[Weight]) -> list[int]:
    """FSDP copies what it gathered into a tensor for each weight, and one here for what no op names (norms). [B]"""
    experts = name.startswith("efsdp.")
    chosen = [n for n, expert in weights if expert is experts]
    if not experts and 2 * sum(chosen) < size / 2:  # the experts are in the block's own group
        chosen = [n for n, _ in weights]
    parts = [rounded(2.0 * n) for n in chosen]
    rest = size - sum(parts)
    return [part for part in (*parts, rest) if part > SMALL] if rest >= 0 else [size]


def _scratch(total: int, made: Sequence[int]) -> list[int]:
    """Scratch as tensors: several as large as the output where it is a multiple of it, copies of each output in twice
    its width where there are several, else one. [B]"""
    if len(made) == 1 and total >= 2 * made[0] and total % made[0] < 4096:
        return [made[0]] * (total // made[0])
    if len(made) < 2 or not total:
        return [total]
    sets = max(1, round(total / (2 * sum(made))))
    return [total * size // (sum(made) * sets) for _ in range(sets) for size in made]
