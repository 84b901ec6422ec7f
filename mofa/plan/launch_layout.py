"""The layout of a plan's pipeline, as its framework is told it, and what a search for it found."""

from __future__ import annotations

import json
from typing import Literal, Self

from pydantic import Field

from mofa.specs.base import Spec
from mofa.specs.framework_traits import TRAITS
from mofa.specs.layouts.module_names import module_names_by_chunk
from mofa.specs.layouts.pipeline_layout import PipelineLayout

LayoutBy = Literal["strategy", "framework", "mofa", "search"]


class LayoutSearch(Spec):
    """A search for the layout with the shortest step, beside the layout that the strategy had before."""

    before: str = Field(description="The layout before the search, in the words of text.")
    before_step_s: float = Field(gt=0, description="The step with it, costed as the plan is. [s]")
    before_recompute: str = Field(description="Recomputation with it; full:n may have another n now.")
    before_fits: bool = Field(description="Whether it fits.")
    pipeline_s: float = Field(
        gt=0,
        description="What devices take for computations and hand-overs of the plan's pipeline, in closed form. [s]",
    )
    bound_s: float = Field(ge=0, description="A lower bound of the same for every layout that fits. [s]")

    @property
    def gap_fraction(self) -> float:
        """By how much the pipeline's time may be above that of the best layout, as a share of it. [-]"""
        return max(1.0 - self.bound_s / self.pipeline_s, 0.0)


class LaunchLayout(Spec):
    """Which modules each virtual chunk of the pipeline holds, and how to launch with it."""

    text: str = Field(
        description="The layout along the model in Megatron's words: E embedding, t layer, m multi-token-prediction "
        "layer, L loss, | between chunks."
    )
    by: LayoutBy = Field(
        description="Who made it: the strategy names it; the framework splits so by itself; mofa, because the "
        "framework refuses these degrees without a layout; or a search for a shorter step."
    )
    launch: str = Field(
        description="What the framework is launched with: --pipeline-model-parallel-layout of Megatron-Core, which "
        "says the virtual stages too; module_fqns_per_model_part of torchtitan. Empty where it has no such option."
    )
    search: LayoutSearch | None = Field(
        default=None, description="What a search for a shorter step found; null where none was made."
    )

    @classmethod
    def from_layout(cls, layout: PipelineLayout, by: LayoutBy, framework: str) -> Self:
        """A layout in the words of a framework.

        Parameters
        ----------
        layout
            Layers of each virtual chunk.
        by
            Who chose it.
        framework
            Its name.

        Returns
        -------
        LaunchLayout
            Its text, and the argument that launches it; empty where the framework takes none.

        Examples
        --------
        >>> LaunchLayout.from_layout(PipelineLayout.of_layers([1, 2]), "framework", "megatron").launch
        "--pipeline-model-parallel-layout 'Et|ttL'"
        """
        traits, launch = TRAITS[framework], ""
        if traits.is_megatron_core:
            launch = f"--pipeline-model-parallel-layout '{layout.text}'"
        elif traits.takes_layouts:
            launch = f"parallelism.module_fqns_per_model_part = {json.dumps(module_names_by_chunk(layout))}"
        return cls(text=layout.text, by=by, launch=launch)
