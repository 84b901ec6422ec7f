"""The layout of a plan's pipeline, as its framework is told it."""

from __future__ import annotations

import json
from typing import Literal, Self

from pydantic import Field

from mofa.specs.base import Spec
from mofa.specs.framework_traits import TRAITS
from mofa.specs.layouts.module_names import module_names
from mofa.specs.layouts.pipeline_layout import PipelineLayout


class LaunchLayout(Spec):
    """Which modules each virtual chunk of the pipeline holds, and how to launch with it."""

    text: str = Field(
        description="The layout along the model in Megatron's words: E embedding, t layer, m multi-token-prediction "
        "layer, L loss, | between chunks."
    )
    by: Literal["strategy", "framework", "mofa"] = Field(
        description="Who made it: the strategy names it; the framework splits so by itself; or mofa, because the "
        "framework refuses these degrees without a layout."
    )
    launch: str = Field(
        description="What the framework is launched with: --pipeline-model-parallel-layout of Megatron-Core, which "
        "says the virtual stages too; module_fqns_per_model_part of torchtitan. Empty where it has no such option."
    )

    @classmethod
    def of(cls, layout: PipelineLayout, by: Literal["strategy", "framework", "mofa"], framework: str) -> Self:
        """A layout in the words of a framework.

        Examples
        --------
        >>> LaunchLayout.of(PipelineLayout.of_layers([1, 2]), "framework", "megatron").launch
        "--pipeline-model-parallel-layout 'Et|ttL'"
        """
        traits, launch = TRAITS[framework], ""
        if traits.is_megatron_core:
            launch = f"--pipeline-model-parallel-layout '{layout.text}'"
        elif traits.takes_layouts:
            launch = f"parallelism.module_fqns_per_model_part = {json.dumps(module_names(layout))}"
        return cls(text=layout.text, by=by, launch=launch)
