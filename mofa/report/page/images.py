"""The figures of a report by matplotlib, for its Markdown and for slides; those of any search stand beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mofa.report.page.facts import ReportFacts

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def report_figure_axes(facts: ReportFacts) -> dict[str, Axes]:
    """Figures by name: the roofline, the resources, the pipeline, and from the user's own step to the plan's."""
    from mofa.plan.comparison import compare
    from mofa.report.figures.gantt import plot_pipeline
    from mofa.report.figures.resource_changes import plot_resource_changes
    from mofa.report.figures.roofline_plot import plot_roofline
    from mofa.report.figures.waterfall import plot_waterfall

    axes = {
        "roofline": plot_roofline(facts.plan_analysis.roofline),
        "resources": plot_resource_changes(facts.plan_analysis.resources),
    }
    if facts.step is not None:
        axes["pipeline"] = plot_pipeline(facts.step)
    if facts.own is not None:
        names = (facts.own_name, "the plan")
        comparison = compare(facts.own, facts.report, names=names)
        axes["own"] = plot_waterfall(comparison.time, 1, names, comparison.time_unit)
    return axes
