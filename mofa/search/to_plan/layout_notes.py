"""The layout of a plan's pipeline, and that the framework needs one where it has no split of its own."""

from __future__ import annotations

from mofa.cost.stages import Stages
from mofa.plan.launch_layout import LaunchLayout
from mofa.specs.framework import FrameworkSpec
from mofa.specs.model import ModelSpec


def launch_layout(stages: Stages, framework: FrameworkSpec) -> LaunchLayout | None:
    """The layout that was costed; None without a pipeline."""
    if stages.pp == 1:
        return None
    return LaunchLayout.from_layout(stages.split.layout, stages.split.made_by, framework.name)


def layout_notes(stages: Stages, model: ModelSpec, framework: FrameworkSpec) -> tuple[str, ...]:
    """Notes on a layout without which the framework does not run, and on what of one is not modelled."""
    layout, notes = launch_layout(stages, framework), []
    if layout is None:
        return ()
    if layout.by == "mofa":
        chunks = f"pp {stages.pp}" + (f" x vpp {stages.vpp}" if stages.vpp > 1 else "")
        needs = f" and needs a layout: {layout.launch}" if layout.launch else ", and no option says another split"
        notes.append(f"{framework.name} refuses {model.num_layers} layers over {chunks}{needs}")
    if model.num_mtp_layers and stages.rank_with_predictions != stages.rank_with_head:
        notes.append(
            "layout: what the multi-token-prediction layers hand on is counted as one residual stream, not "
            f"{1 + model.num_mtp_layers}, and shapes that are sent beside it are not"
        )
    return tuple(notes)
