"""Options that hide expert parallelism's exchanges behind computing: what Megatron-Core asks of them."""

from __future__ import annotations

from typing import Literal

from mofa.specs.framework_names import Family

ExpertOverlap = Literal["none", "combined"]


def check_expert_overlap_options(
    name: Family,
    overlap: ExpertOverlap,
    experts: str,
    *,
    on_engine: bool,
    delay_wgrad: bool,
    shared_expert_overlap: bool,
) -> None:  # fmt: skip
    """Refuse options that cannot be together, whatever the strategy is; ``on_engine``: layers are Transformer Engine's.

    What depends on the strategy is :mod:`mofa.search.legality.expert_overlap`.

    Raises
    ------
    ValueError
        If another framework has the options, or one is set that needs another (Megatron-Core 0.16.1,
        transformer/transformer_config.py, lines 1886 to 1888 and 1909 to 1912).
    """
    if shared_expert_overlap and not on_engine:
        raise ValueError(f"shared_expert_overlap is modelled for megatron, not for {name}; leave it out")
    if shared_expert_overlap and overlap != "none":
        raise ValueError(f"shared_expert_overlap cannot be with expert_overlap: {overlap}; leave one of them out")
    if overlap != "none" and not on_engine:
        raise ValueError(f"expert_overlap: {overlap} is modelled for megatron, not for {name}; leave it out")
    if delay_wgrad and overlap == "none":
        raise ValueError("delay_wgrad (true) needs expert_overlap: combined; set it or leave delay_wgrad out")
    if overlap != "none" and experts != "grouped":
        raise ValueError(f"expert_overlap: {overlap} is modelled for grouped experts, not for {experts}; use grouped")
