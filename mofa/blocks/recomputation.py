"""What of a block is not kept for its backward pass but computed again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from mofa.blocks.chunks import CHUNK
from mofa.blocks.elementwise import BoolK, any_true
from mofa.blocks.op import Op, Tape, TimedModuleCall

OUTSIDE = "data_parallel"
"""The region of ops that no recomputation repeats."""


@dataclass(frozen=True)
class Recompute:
    """What a layer does not keep but computes again in its backward.

    ``full`` keeps the block's input alone. Otherwise ops of a region in ``checkpoint`` keep the region's inputs. A
    region in ``discard`` also gives up its outputs, which later ops would have kept (Megatron's output-discarding
    checkpoint). ``keep_outputs`` are ops whose outputs a full recomputation keeps and does not repeat (op-level
    selective checkpoint). A token chunk is always a checkpoint of its own (:mod:`mofa.blocks.chunks`), also
    where all else is recomputed: what comes after it in the layer is then not repeated. ``early_stop`` ends the
    repetition once the last needed tensor is there. ``reentrant`` is a checkpoint that is a function of Python with a
    backward of its own: up to its end that holds what the group read, what it made again and the gradients it was
    given (Megatron's ``CheckpointFunction``).
    """

    kind: Literal["none", "full", "regions"] = "none"
    checkpoint: frozenset[str] = frozenset()
    discard: frozenset[str] = frozenset()
    keep_outputs: frozenset[str] = frozenset()
    early_stop: bool = False
    reentrant: bool = False

    def group_of_op(self, op: Op) -> str:
        """The recomputed group an op belongs to, empty for none; data parallelism acts outside of the checkpoint."""
        if op.region == OUTSIDE or (not op.region and self.kind != "full"):
            return ""
        if is_token_chunk_region(op.region):
            return op.region
        if self.kind == "full":
            return "full"
        for region in (*self.checkpoint, *self.discard) if op.region else ():
            if is_in_region(op.region, region):
                return region
        return ""

    def discarded_tensor_behind_views(self, name: str, makers: Mapping[str, Op]) -> tuple[str, BoolK]:
        """The discarded tensor that views and absent ops pass on as another, and for which candidates; else none.

        ``makers`` are the forward's ops by what they write.
        """
        shared: BoolK = True
        while self.discard and (op := makers.get(name)) is not None:
            if self.group_of_op(op) in self.discard:
                return name, shared
            if not op.reads or name != op.writes[0] or not any_true(op.aliases_first_input()):
                break
            name, shared = op.reads[0], shared & op.aliases_first_input()
        return "", False


NO_RECOMPUTE = Recompute()


def is_token_chunk_region(region: str) -> bool:
    """Whether a region is a token chunk's, a checkpoint of its own.

    >>> is_token_chunk_region(f"{CHUNK}0"), is_token_chunk_region("moe")
    (True, False)
    """
    return region.startswith(CHUNK)


def is_later_token_chunk_region(region: str) -> bool:
    """Whether a region is a token chunk's behind the first.

    >>> [is_later_token_chunk_region(region) for region in (f"{CHUNK}0", f"{CHUNK}12", "moe")]
    [False, True, False]
    """
    return is_token_chunk_region(region) and region != f"{CHUNK}0"


def is_in_region(region: str, outer: str) -> bool:
    """Whether a region is another or, by a dot, a part of it.

    >>> is_in_region("moe.shared", "moe"), is_in_region("moe_act", "moe")
    (True, False)
    """
    return region == outer or region.startswith(f"{outer}.")


def without_unread_last_ops(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Drop trailing recomputed ops whose outputs nobody reads: the recomputation stops early."""
    alive = list(ops)
    for i in range(len(alive) - 1, -1, -1):
        op = alive[i]
        if not op.repeated:
            continue
        later = {r for other in alive[i + 1 :] for r in other.reads}
        if any(w in later for w in op.writes):
            break
        del alive[i]
    return tuple(alive)


def calls_without_autograd_record(forward: Tape, recompute: Recompute) -> tuple[TimedModuleCall, ...]:
    """Calls with members that autograd records nothing of in a forward pass: it is to run again as a whole.

    A checkpoint that is a function of Python runs without it (Megatron's tensor_parallel/random.py,
    ``CheckpointFunction.forward``), as a token chunk's does; others record as ever and throw away.
    """
    calls = {
        id(call): call for op in forward.ops
        if (call := op.module_call) is not None and any_true(call.num_members)
        and (is_token_chunk_region(op.region) or (recompute.reentrant and recompute.group_of_op(op)))
    }  # fmt: skip
    return tuple(calls.values())


def with_calls_without_autograd_record(forward: Tape, calls: tuple[TimedModuleCall, ...]) -> Tape:
    """A forward pass as it runs where autograd records nothing of these calls."""
    unrecorded = {id(call): replace(call, is_recorded=False) for call in calls}
    ops = tuple(
        op._replace(module_call=unrecorded[id(op.module_call)]) if id(op.module_call) in unrecorded else op
        for op in forward.ops
    )
    return replace(forward, ops=ops)
