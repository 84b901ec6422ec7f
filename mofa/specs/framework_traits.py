"""What each framework is and does, whatever its options: the record that other rooms ask instead of its name.

Options and measured facts are fields of :class:`mofa.specs.framework.FrameworkSpec`; what its layers launch, keep and
send is in :mod:`mofa.blocks.frameworks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mofa.schedules import Runtime
from mofa.specs.layouts.framework_split import MEGATRON_SPLIT, TORCHTITAN_SPLIT, SplitRule

Layers = Literal["transformer-engine", "megatron", "pytorch"]
"""Whose modules a framework's layers are made of: Transformer Engine's, Megatron's own, or plain PyTorch's."""


@dataclass(frozen=True)
class FrameworkTraits:
    """What a framework does in every run."""

    layers: Layers
    is_megatron_core: bool = False
    """Its pipelines are Megatron-Core's, which hold tensors beside passes (:mod:`mofa.cost.memory.stage_inputs`)."""
    has_pytorch_pipelines: bool = False
    """Its pipelines are ``torch.distributed.pipelining``'s: buffers of what stages receive are made beforehand."""
    fp8_recipes: tuple[str, ...] = ()
    """How fp8 products can be scaled, of those that are modelled."""
    has_torchao: bool = False
    """Linears in fp8 are torchao's, else Transformer Engine's."""
    has_narrow_moments: bool = False
    """Its optimizer can hold moments in bf16."""
    has_experts: bool = True
    """Layers with experts are modelled."""
    has_windows: bool = True
    """Attention within a window is modelled."""
    has_deepspeed: bool = False
    """DeepSpeed's pipeline engine may run it."""
    schedules_replicas: bool = False
    """Tokens can be scheduled over replicas of experts (MicroMoE)."""
    reads_rows_by_index: bool = False
    """Experts can gather their tokens by index (MoEBlaze)."""
    adds_gradients_in_place: bool = True
    """Autograd adds gradients in place, as since PyTorch's pull request 88339 of November 2022."""
    chains_optimizers: bool = True
    """Split experts have an optimizer of their own, behind which all parameters are gathered once more."""
    makes_weight_gradients_first: bool = False
    """Autograd makes a linear's weight gradient before its input's, whatever the options."""
    makes_rotation_tables: bool = False
    """Each model part registers a table of all positions' rotations."""
    draws_weights_wide: bool = False
    """Weights are drawn in fp32 and cast to what they are held in."""
    leaves_lone_ranks_whole: bool = False
    """A model whose shard group is one rank is not wrapped: nothing is sharded."""
    gathers_for_ring: bool = False
    """Asked for a ring of context parallelism it gathers: its rotate method is never set in training."""
    needs_sequence_parallel: bool = False
    """Tensor parallelism runs with sequence parallelism alone."""
    replicas_go_on: bool = False
    """Replicas go on where one fails (torchft)."""
    runs_on_rocm: bool = True
    """It runs on AMD's GPUs: Megatron-Core on ROCm's Transformer Engine and torchtitan are backends of AMD's Primus
    (rocm.docs.amd.com, projects/primus), what is plain PyTorch runs too. Megatron of 2022 has CUDA kernels of its own.
    """
    exported_to: tuple[str, ...] = ()
    """What ``mofa export --to`` takes for its plans."""
    has_one_shard_group: bool = False
    """All ranks are one group that shards everything: no other parallelism."""

    @property
    def has_fp8(self) -> bool:
        """Whether fp8 products are modelled."""
        return bool(self.fp8_recipes)

    @property
    def takes_layouts(self) -> bool:
        """Whether an option says which layers each chunk of a pipeline holds."""
        return self.is_megatron_core or self.has_pytorch_pipelines

    @property
    def split_rule(self) -> SplitRule:
        """How layers are split over chunks without a layout."""
        return TORCHTITAN_SPLIT if self.has_pytorch_modules else MEGATRON_SPLIT

    @property
    def has_pytorch_modules(self) -> bool:
        """Whether layers are plain PyTorch modules, which PyTorch itself shards."""
        return self.layers == "pytorch"

    @property
    def has_context_parallelism(self) -> bool:
        """Whether attention runs over context-parallel ranks: Megatron's own layers have none."""
        return self.layers != "megatron"

    @property
    def runtime(self) -> Runtime:
        """Whose code runs its pipelines."""
        return "pytorch" if self.has_pytorch_modules else "megatron"


TE_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
"""Of Transformer Engine."""
TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise-gw-hp")
"""Of torchao's Float8Linear (torchao/float8/config.py, ``Float8LinearRecipeName``)."""
TRAITS: Mapping[str, FrameworkTraits] = {
    "fsdp1": FrameworkTraits("pytorch", fp8_recipes=("delayed",), has_one_shard_group=True),
    "megatron": FrameworkTraits(
        "transformer-engine", is_megatron_core=True, fp8_recipes=TE_RECIPES, has_narrow_moments=True,
        schedules_replicas=True, reads_rows_by_index=True, exported_to=("megatron", "megatron-bridge"),
    ),
    "megatron-2022": FrameworkTraits(
        "megatron", has_experts=False, has_windows=False, has_deepspeed=True, adds_gradients_in_place=False,
        chains_optimizers=False, runs_on_rocm=False,
    ),
    "megatron-local": FrameworkTraits("megatron", is_megatron_core=True),
    "torchtitan": FrameworkTraits(
        "pytorch", fp8_recipes=TORCHAO_RECIPES, has_torchao=True, has_pytorch_pipelines=True,
        makes_weight_gradients_first=True,
        makes_rotation_tables=True, draws_weights_wide=True, leaves_lone_ranks_whole=True, gathers_for_ring=True,
        needs_sequence_parallel=True,
        replicas_go_on=True, exported_to=("torchtitan", "torchtitan-0.3"),
    ),
}  # fmt: skip
"""By :data:`mofa.specs.framework.FRAMEWORK_NAMES`."""
