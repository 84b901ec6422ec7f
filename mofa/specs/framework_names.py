"""Names of the frameworks, apart from what they do, so that a command line may list them without loading it."""

from __future__ import annotations

from typing import Literal, get_args

Family = Literal["fsdp1", "megatron", "megatron-2022", "megatron-local", "torchtitan"]
FRAMEWORK_NAMES: tuple[Family, ...] = get_args(Family)
RankOrder = Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]
RANK_ORDERS: tuple[RankOrder, ...] = get_args(RankOrder)
"""How ranks are numbered over the nodes, what varies fastest first; the first is every framework's default."""
