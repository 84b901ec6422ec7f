"""torchtitan's tapes of before August 2025 by hand: what the root gathers, keeps and reduces."""

from __future__ import annotations

from dataclasses import replace

from mofa.blocks.build import embedding_tapes, head_tapes
from mofa.blocks.frameworks.torchtitan.layer import PRIMITIVES
from mofa.blocks.work import Collective
from mofa.cost.block.liveness import block_memory
from tests.blocks.test_torchtitan import D, V, context, moved, ops_named, params, size


def test_ends_of_the_root_are_gathered_in_front_and_reduced_behind() -> None:
    """Until July 2025 one group of both: 2 B a parameter from the lookup to its backward, whose reduction is of both;
    the head gathers and reduces nothing, keeps the last block gathered and leaves its gradients to the end."""
    old = context()
    old = replace(old, framework=old.framework.model_copy(update={"ends_apart": False}))
    table, top = embedding_tapes(old, PRIMITIVES), head_tapes(old, PRIMITIVES)
    group = 2 * V * D + D
    assert float(block_memory(table, 1).saved_kinds[1, 0]) == 2 * group
    assert size(table, "fsdp.reduce_input") == 4 * group
    collectives = [op.name for tape in (table.forward, table.backward) for op in tape.ops if op.stream != "compute"]
    assert {"fsdp.root.all_gather", "fsdp.reduce_scatter"} <= set(collectives)
    assert not [op for op in top.forward.ops + top.backward.ops if isinstance(op.work, Collective)]
    assert float(block_memory(top, 1).saved_kinds[1, 0]) == size(top, "fsdp.last_block") == 2 * params()
    (kept,) = ops_named(top.backward.ops, "fsdp.root.accumulate")
    assert sum(size(top, name) for name in kept.reads) == 2 * V * D
    assert moved(ops_named(head_tapes(context(), PRIMITIVES).backward.ops, "fsdp.reduce_copy_in")[0]) > 0
    piped = replace(old, pipelined=True)
    assert [op.name for op in embedding_tapes(piped, PRIMITIVES).backward.ops] == [
        op.name for op in embedding_tapes(context(pipelined=True), PRIMITIVES).backward.ops
    ]
    tied = replace(old, model=old.model.model_copy(update={"tied_embeddings": True}))
    assert size(embedding_tapes(tied, PRIMITIVES), "fsdp.reduce_input") == 4 * (V * D + D)
