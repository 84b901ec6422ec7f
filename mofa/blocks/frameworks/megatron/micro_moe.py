"""What token scheduling over replicas adds to a layer with experts (MicroMoE, arXiv 2511.16947)."""

from __future__ import annotations

from mofa.blocks.context import Context
from mofa.blocks.elementwise import any_true
from mofa.blocks.op import Op, TapeBuilder
from mofa.blocks.work import Collective, HostSync, MemoryBound
from mofa.specs.strategy import MERGED_GROUPS


def schedule_tokens_over_replicas(b: TapeBuilder, ctx: Context, scores: str) -> None:
    """Token scheduling over replicas, where it is on (MicroMoE, sections 5.3 and 5.4).

    All GPUs of the merged group learn each other's loads. The host solves for the tokens of each replica and goes on to
    the dispatch.

    The host solves after the permutation instead of beside it, which the paper overlaps.
    """
    spec = ctx.model.moe
    assert spec is not None
    if not any_true(ctx.schedules_replicas):
        return
    own = 4.0 * spec.num_experts
    gathered = b.tensor("moe.loads", own * ctx.ep * MERGED_GROUPS, grad=False)
    on_host = b.tensor("moe.loads_on_host", own, grad=False)
    b.add(
        Op("moe.gather_loads", "ep", Collective("all_gather", "ep", own * ctx.ep * MERGED_GROUPS), (scores,),
           (gathered,), present=ctx.schedules_replicas, stream="ep")
    )  # fmt: skip
    b.add(
        Op("moe.read_loads", "memory_bound", MemoryBound(own * ctx.ep * MERGED_GROUPS), (gathered,), (on_host,),
           present=ctx.schedules_replicas)
    )  # fmt: skip
    b.add(Op("moe.schedule", "host", HostSync(ctx.schedule_s), present=ctx.schedules_replicas))
