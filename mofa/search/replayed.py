"""What a replay said, as the contract gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mofa.cost.breakdown import LIVE_COMPONENTS
from mofa.search.result import Memory, StageMemory

if TYPE_CHECKING:
    from mofa.replay.replay import MemoryReplayed


def replayed_memory(closed: Memory, played: MemoryReplayed) -> Memory:
    """The memory of a plan with what the replay knows better than the closed form."""
    stages = []
    for r, (stage, rank) in enumerate(zip(closed.by_stage, played.ranks, strict=True)):
        parts = {name: float(rank.peak.alive[name]) for name in LIVE_COMPONENTS}
        parts["allocator_slack"] = float(rank.peak_reserved - rank.allocated)
        parts["cuda_context"] = played.context_bytes
        parts["communicators"] = played.communicator_bytes
        stages.append(
            StageMemory(
                stage=stage.stage,
                num_layers=stage.num_layers,
                recomputed_layers=stage.recomputed_layers,
                in_flight_micro_batches=stage.in_flight_micro_batches,
                instant=rank.peak.where,
                allocated_bytes=float(rank.allocated),
                reserved_bytes=float(rank.peak_reserved),
                device_bytes=played.device_bytes(r),
                by_component=parts,
            )
        )
    fullest = stages[played.fullest]
    return Memory(
        allocated_bytes=fullest.allocated_bytes,
        reserved_bytes=fullest.reserved_bytes,
        device_bytes=fullest.device_bytes,
        margin_bytes=closed.margin_bytes,
        peak_bytes=fullest.device_bytes,
        capacity_bytes=closed.capacity_bytes,
        fits=fullest.device_bytes + closed.margin_bytes <= closed.capacity_bytes,
        by_component=fullest.by_component,
        by_stage=tuple(stages),
    )
