"""What of torchtitan's layers is timed (:mod:`mofa.measure.runners.layer_segments`)."""

from __future__ import annotations

import torch
import torchtitan.models.deepseek_v3.model.model as deepseek_v3
import torchtitan.models.llama3.model.model as llama3
import torchtitan.models.moe.moe as moe
import torchtitan.models.moe.utils as moe_utils
import torchtitan.models.qwen3.model.model as qwen3

from mofa.measure.runners.layer_segments import HostPartTimers, LayerParts, Replace

MODULES = {
    "TransformerBlock": "layer",
    "Attention": "attention",
    "ScaledDotProductAttentionWrapper": "core",
    "Linear": "linear",
    "RMSNorm": "norm",
    "FeedForward": "mlp",
    "MoE": "moe",
    "TokenChoiceTopKRouter": "router",
    "TokenReorderer": "reorder",
    "GroupedExperts": "experts",
}
"""Part of a module, by its class."""


def _put(clocks: HostPartTimers, replace: Replace) -> None:
    replace(torch.autograd, "backward", clocks.with_pass_timed("backward", torch.autograd.backward))
    functions = [(models, "apply_rotary_emb") for models in (llama3, qwen3, deepseek_v3)]
    functions += [(moe_utils, "_permute"), (moe_utils, "_unpermute"), (moe, "_run_experts_grouped_mm")]
    for owner, name in functions:
        replace(owner, name, clocks.with_part_timed(name.removeprefix("_"), getattr(owner, name), is_forward=True))


PARTS = LayerParts(MODULES, {}, {}, (), _put)
