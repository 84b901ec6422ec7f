"""Megatron-LM's arguments of forwards beside backwards, which hide exchanges of experts' tokens."""

from __future__ import annotations

from mofa.export.arguments import Argument, FieldRow, switch_row, translated_row

EXPERT_OVERLAP_ROWS: tuple[FieldRow, ...] = (
    translated_row(
        "framework.expert_overlap", Argument("overlap-moe-expert-parallel-comm", "flag", False),
        {"none": False, "combined": True},
    ),
    switch_row("framework.delay_wgrad", Argument("delay-wgrad-compute", "flag", False)),
    switch_row("framework.shared_expert_overlap", Argument("moe-shared-expert-overlap", "flag", False)),
)  # fmt: skip
