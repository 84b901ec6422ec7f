"""Types of a pipeline schedule: per rank, the order of its computations, sends and receives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

Compute = Literal["F", "B", "I", "W"]
"""Forward; backward of inputs and weights; backward of inputs alone; of weights alone."""
Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
SENDS: frozenset[Kind] = frozenset({"SEND_F", "SEND_B"})
RECEIVES: frozenset[Kind] = frozenset({"RECV_F", "RECV_B"})
ANSWERS: dict[Kind, tuple[Kind, int]] = {
    "SEND_F": ("RECV_F", 1), "RECV_F": ("SEND_F", -1), "SEND_B": ("RECV_B", -1), "RECV_B": ("SEND_B", 1),
}  # fmt: skip
"""The other side of a transfer, and by how many stages it is further on."""
Placement = Literal["loop", "v"]
Runtime = Literal["megatron", "pytorch"]
"""Whose code runs a pipeline: Megatron-Core's (DeepSpeed's counts as the same) or ``torch.distributed.pipelining``."""


class Action(NamedTuple):
    """One computation of a stage on a micro-batch, or the send of its result, or the receive of its input.

    ``stage`` counts along the model over all ranks: stage 0 has the embedding. ``SEND_F`` names the stage that sends,
    ``RECV_F`` the one that receives.
    """

    kind: Kind
    stage: int
    micro_batch: int

    @property
    def effective_kind(self) -> Kind | None:
        """What a computation does: stage 0 has no input to differentiate by, so that W is its whole backward and I
        nothing.

        Examples
        --------
        >>> Action("W", 0, 3).effective_kind, Action("I", 0, 3).effective_kind, Action("I", 1, 3).effective_kind
        ('B', None, 'I')
        """
        if self.stage == 0 and self.kind in ("I", "W"):
            return "B" if self.kind == "W" else None
        return self.kind

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"


def ranks_of_stages(pp: int, vpp: int, placement: Placement) -> tuple[int, ...]:
    """The rank of each of a model's pp x vpp stages, along the model.

    Examples
    --------
    >>> ranks_of_stages(2, 2, "loop"), ranks_of_stages(2, 2, "v")
    ((0, 1, 0, 1), (0, 1, 1, 0))
    """
    positions = (divmod(stage, pp) for stage in range(pp * vpp))
    return tuple(pp - 1 - place if placement == "v" and turn % 2 else place for turn, place in positions)


def sends_to_other_rank(ranks: tuple[int, ...]) -> tuple[bool, ...]:
    """For every stage, by the ranks of all, whether the model's next stage is on another rank.

    Examples
    --------
    >>> sends_to_other_rank((0, 1, 1, 0))
    (True, False, True, False)
    """
    return (*(rank != following for rank, following in pairwise(ranks)), False)


@dataclass(frozen=True)
class Order:
    """Computations per rank, in order; ``placement`` says where stages are: round and round, or there and back."""

    pp: int
    vpp: int
    num_micro_batches: int
    ranks: tuple[tuple[Action, ...], ...]
    placement: Placement = "loop"

    @property
    def num_stages(self) -> int:
        """Stages along the model, over all ranks."""
        return self.pp * self.vpp

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        return self._ranks_of_stages[stage]

    @cached_property
    def _ranks_of_stages(self) -> tuple[int, ...]:
        return ranks_of_stages(self.pp, self.vpp, self.placement)

    @cached_property
    def sends_to_other_rank(self) -> tuple[bool, ...]:
        """For every stage, whether the model's next stage is on another rank."""
        return sends_to_other_rank(self._ranks_of_stages)

    def computations_of(self, rank: int) -> tuple[tuple[str, int, int], ...]:
        """A rank's computations as (kind, chunk, micro-batch); one object however often it is asked for."""
        known = self._computations.get(rank)
        if known is None:
            known = tuple((a.kind, self.chunk_of(a.stage), a.micro_batch) for a in self.ranks[rank])
            self._computations[rank] = known
        return known

    @cached_property
    def _computations(self) -> dict[int, tuple[tuple[str, int, int], ...]]:
        return {}

    def chunk_of(self, stage: int) -> int:
        """The number of a stage among its rank's chunks."""
        return stage // self.pp


class Exchange(NamedTuple):
    """Sends and receives launched together on a stream; the next computation waits for them where ``blocking``."""

    ops: tuple[Action, ...]
    stream: str = "p2p"
    blocking: bool = True


Item = Action | Exchange


@dataclass(frozen=True)
class Program:
    """An order with its sends and receives: per rank, what it launches, in order."""

    order: Order
    ranks: tuple[tuple[Item, ...], ...]


def one_f_one_b_after_warmup(
    warmup: int, total: int, forward: Callable[[int], Action], backward: Callable[[int], Action]
) -> list[Action]:
    """``warmup`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    out = [forward(i) for i in range(warmup)]
    for i in range(warmup, total):
        out += [forward(i), backward(i - warmup)]
    return out + [backward(i) for i in range(total - warmup, total)]
