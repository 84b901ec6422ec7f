"""What checkpoints of a forward tape surround: the frames of their functions, and what stands behind token chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mofa.blocks.op import Tape
from mofa.blocks.recomputation import is_token_chunk_region


class CheckpointGroup(NamedTuple):
    """A group's first op, what it reads of others and what others read of it."""

    first_op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def checkpoint_groups_by_name(forward: Tape, group_of: Mapping[str, str]) -> dict[str, CheckpointGroup]:
    """The groups whose checkpoint is a function, token chunks apart; ``group_of`` has each op's group."""
    out: dict[str, CheckpointGroup] = {}
    for group in {g for g in group_of.values() if g and not is_token_chunk_region(g)}:
        ops = [op for op in forward.ops if group_of[op.name] == group]
        made = dict.fromkeys(w for op in ops for w in op.writes)
        inputs = tuple(dict.fromkeys(r for op in ops for r in op.reads if r not in made))
        later = {r for op in forward.ops if group_of[op.name] != group for r in op.reads}
        outputs = tuple(w for w in made if w in later or w in forward.outputs)
        out[group] = CheckpointGroup(ops[0].name, inputs, outputs)
    return out


def ops_not_recomputed_after_chunks(forward: Tape, group_of: Mapping[str, str]) -> set[str]:
    """Ops of a full recomputation that read what token chunks made: nothing they make is needed again."""
    made: set[str] = set()
    behind: set[str] = set()
    chunked = any(map(is_token_chunk_region, set(group_of.values())))
    for op in forward.ops if chunked else ():
        chunk = is_token_chunk_region(group_of[op.name])
        if chunk or (group_of[op.name] == "full" and made.intersection(op.reads)):
            made.update(op.writes)
            if not chunk:
                behind.add(op.name)
    return behind
