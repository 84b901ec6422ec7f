"""What of Megatron's layers on Transformer Engine is timed (:mod:`mofa.measure.runners.layer_segments`)."""

from __future__ import annotations

from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.models.gpt.fine_grained_callables import TransformerLayerNode
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.utils import ScheduleNode
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.module.grouped_linear import GroupedLinear

from mofa.measure.runners.layer_segments import HostPartTimers, LayerParts, Replace

MODULES = {
    "TransformerLayer": "layer",
    "SelfAttention": "attention",
    "MLASelfAttention": "attention",
    "TEDotProductAttention": "core",
    "TELinear": "linear",
    "TEColumnParallelLinear": "linear",
    "TERowParallelLinear": "linear",
    "TELayerNormColumnParallelLinear": "norm_linear",
    "MLP": "mlp",
    "SharedExpertMLP": "shared_experts",
    "MoELayer": "moe",
    "TopKRouter": "router",
    "TEGroupedMLP": "experts",
    "TEColumnParallelGroupedLinear": "grouped",
    "TERowParallelGroupedLinear": "grouped",
}
"""Part of a module, by its class."""
METHODS = {
    "attention": ("get_query_key_value_tensors",),
    "moe": ("route", "preprocess", "dispatch", "routed_experts_compute", "combine"),
}
"""Methods of a part's module that are timed too, as parts called as they are; those that it has."""
BACKWARDS = {
    "_Linear": "linear_back",
    "_LayerNormLinear": "norm_linear_back",
    "_GroupedLinear": "grouped_back",
    "FusedAttnFunc": "core_back",
    "CheckpointFunction": "checkpoint_back",
    "_CheckpointFunction": "checkpoint_back",
}
"""Part of an autograd function's way back, by its class; others are ``bk.`` and their class."""
NODES = {"forward": "node", "backward": "node_back", "backward_dw": "node_dw"}
"""Parts of the nodes of a schedule that runs exchanges beside computing, by their methods."""


def _put(clocks: HostPartTimers, replace: Replace) -> None:
    replace(schedules, "backward_step", clocks.with_pass_timed("backward", schedules.backward_step))
    for cls in (ScheduleNode, TransformerLayerNode):
        for method, part in NODES.items():
            if method in vars(cls):
                timed = clocks.with_part_timed(
                    part, vars(cls)[method], is_forward=False, of_kind=lambda node, *_: node.name
                )
                replace(cls, method, timed)
    plan = TransformerModelChunkSchedulePlan
    replace(plan, "__init__", clocks.with_pass_timed("forward", plan.__init__))
    replace(plan, "run", staticmethod(clocks.with_part_timed("pair", plan.run, is_forward=False)))
    for cls in (TransformerEngineBaseModule, GroupedLinear):
        replace(cls, "backward_dw", clocks.with_part_timed("weight_gradients", cls.backward_dw, is_forward=False))


PARTS = LayerParts(MODULES, METHODS, BACKWARDS, ("CheckpointFunction", "_CheckpointFunction"), _put)
