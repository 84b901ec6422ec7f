"""Which tensors a block allocates, from which op of its two joined tapes to which."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mofa.blocks.elementwise import BoolK, FloatK, all_true, any_true, where
from mofa.blocks.op import KINDS, OWN_POOLS, Op, Tape, Tensor
from mofa.blocks.roles import PRODUCT_ROLES

NUMBER = {kind: i for i, kind in enumerate(KINDS)}
"""The place of each kind among :data:`mofa.blocks.op.KINDS`."""


class AllocationInterval(NamedTuple):
    """One allocation, alive from one op to another, both counted. (K,) [B]

    Where a view keeps it longer for some candidates, that is an interval behind it, of the view's name; ``since`` is
    where the memory appeared, which is ``start`` but there.
    """

    tensor: str
    kind: int
    start: int
    end: int
    bytes: FloatK
    since: int
    owner: str
    """The tensor whose memory it is."""


_Extension = tuple[int, BoolK, str]
"""Up to where a tensor's memory lives on, for which candidates, and whose name keeps it: its own or a view's."""


class Lifetimes:
    """Intervals of allocation over the joined op list; an op reads and writes where it is present alone."""

    def __init__(self, ops: tuple[Op, ...], tensors: dict[str, Tensor]) -> None:
        self.ops, self.tensors = ops, tensors
        self.birth: dict[str, int] = {}
        self.death: dict[str, int] = {}
        """The last use that all candidates have."""
        self.partly: dict[str, list[tuple[int, BoolK]]] = {}
        """Uses by ops that some candidates do not have, and which do."""
        for i, op in enumerate(ops):
            runs: BoolK = op.present if op.present is True else _plain(op.present)
            for name in (*op.reads, *op.writes):
                if runs is True:
                    self.death[name] = i
                elif runs is not False:
                    self.partly.setdefault(name, []).append((i, runs))
            for name in op.writes:
                self.birth.setdefault(name, i)

    def is_tensor_used(self, name: str) -> bool:
        """Whether any candidate has an op that reads or writes it."""
        return name in self.death or name in self.partly

    def allocation_intervals(self, starts: dict[str, int], end_of: dict[str, int]) -> list[AllocationInterval]:
        """Every allocation; ``starts`` says from where tensors are alive that no op writes, ``end_of`` sets deaths."""
        shares = self.memory_aliases
        death = {**self.death, **end_of}
        extension: dict[str, list[_Extension]] = {
            name: [(i, runs, name) for i, runs in uses] for name, uses in self.partly.items() if name not in end_of
        }
        # a name that is always a view pushes its death to its source; one that sometimes is, extends it there
        for name in sorted(shares, key=lambda n: -self.birth[n]):
            source, mask = shares[name]
            end = death.get(name)
            if mask is True:
                if end is not None:
                    death[source] = max(death.get(source, 0), end)
                extension.setdefault(source, []).extend(extension.pop(name, []))
                continue
            there = extension.setdefault(source, [])
            if end is not None:
                there.append((end, mask, name))
            for later, other, leaf in extension.get(name, []):
                if any_true(both := other & mask):
                    there.append((later, both, leaf))
        result = []
        for name, start in {**starts, **self.birth}.items():
            mask = shares[name][1] if name in shares else False
            if mask is True:
                continue
            tensor, end = self.tensors[name], max(death.get(name, start), start)
            own, kind = self._own_bytes(name, mask), NUMBER[tensor.kind]
            result.append(AllocationInterval(name, kind, start, end, own, start, name))
            leaves = sorted((item for item in extension.get(name, ()) if item[0] > end), key=lambda item: item[0])
            for i, (later, _, leaf) in enumerate(leaves):
                if later > end:  # up to here the memory lives on where any leaf does that ends here or later
                    needed: BoolK = False
                    for _, other, _ in leaves[i:]:
                        needed = needed | other
                    result.append(AllocationInterval(leaf, kind, end + 1, later, where(needed, own, 0.0), start, name))
                    end = later
        return result

    def _own_bytes(self, name: str, shared: BoolK) -> FloatK:
        """What a tensor allocates: nothing where it is another's memory, or the op that writes it does not run."""
        own = where(shared, 0.0, self.tensors[name].bytes)
        birth = self.birth.get(name)
        if birth is None or (op := self.ops[birth]).present is True or not op.reads or name == op.writes[0]:
            return own
        return where(op.present, own, 0.0)

    @cached_property
    def memory_aliases(self) -> dict[str, tuple[str, BoolK]]:
        """Names whose memory is another's, whose, and for which candidates; True where for all.

        A view's outputs all are its source's memory, of an op that is not there the first.
        """
        shares: dict[str, tuple[str, BoolK]] = {}
        for op in self.ops:
            if (op.view is False and op.present is True) or not op.reads:  # most ops
                continue
            for mask, names in ((op.aliases_first_input(), op.writes[:1]), (op.view & op.present, op.writes[1:])):
                mask = _plain(mask) if names else False
                for name in names if mask is not False else ():
                    shares.setdefault(name, (op.reads[0], mask))
        return shares


def _plain(mask: BoolK) -> BoolK:
    """A mask as True or False where it is the same for all candidates."""
    if all_true(mask):
        return True
    return mask if any_true(mask) else False


@dataclass(frozen=True)
class BlockLifetimes:
    """What a block allocates, by its two tapes joined; the others are positions in ``intervals``."""

    ops: tuple[Op, ...]
    first_backward_op: int
    """The first op of the backward tape."""
    intervals: list[AllocationInterval]
    saved: list[int]
    """What is kept from the forward for the backward."""
    alive_at_first_weight_product: list[int]
    """What of it is there yet at the backward's first product with a weight."""
    pools: dict[str, list[int]]
    """What is written on other streams that have memory of their own, by stream."""

    @classmethod
    def from_tapes(cls, forward: Tape, backward: Tape) -> BlockLifetimes:
        """The lives of the tensors of a block's tapes."""
        ops = forward.ops + backward.ops
        boundary, last = len(forward.ops), len(ops) - 1
        lifetimes = Lifetimes(ops, {**forward.tensors, **backward.tensors})
        end_of = dict.fromkeys(forward.outputs, boundary - 1)  # the next block owns the output from here on
        end_of.update(dict.fromkeys((*backward.outputs, *backward.retained_by_dispatcher), last))
        # gathered buffers go when the next block's weights are copied out, the last block's at the end
        end_of.update((name, boundary - 1) for op in forward.ops if op.holds_for_next_block for name in op.reads)
        starts = {**dict.fromkeys(forward.inputs, 0), **dict.fromkeys(backward.inputs, boundary)}
        intervals = lifetimes.allocation_intervals(
            {name: start for name, start in starts.items() if lifetimes.is_tensor_used(name)}, end_of
        )
        return cls(ops, boundary, intervals, *_saved(ops, intervals, boundary), _pools(ops, intervals))


def _saved(ops: tuple[Op, ...], intervals: list[AllocationInterval], boundary: int) -> tuple[list[int], list[int]]:
    products = (i for i, op in enumerate(ops[boundary:], boundary) if op.role in PRODUCT_ROLES)
    first = next(products, boundary)
    saved, longer = (
        [i for i, f in enumerate(intervals) if f.since < boundary and f.start <= op_index <= f.end]
        for op_index in (boundary, first)
    )
    return saved, longer


def _pools(ops: tuple[Op, ...], intervals: list[AllocationInterval]) -> dict[str, list[int]]:
    pools: dict[str, list[int]] = {s: [] for s in dict.fromkeys([op.pool or op.stream for op in ops]) if s in OWN_POOLS}
    stream_of = {w: op.pool or op.stream for op in ops for w in op.writes} if pools else {}
    for i, f in enumerate(intervals if pools else ()):
        if (stream := stream_of.get(f.owner)) in pools:
            pools[stream].append(i)
    return pools
