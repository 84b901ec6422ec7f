"""Measured and published runs with the errors of their predictions, for reports to name those like a job."""

from __future__ import annotations

import csv
from functools import lru_cache

from pydantic import Field

from mofa.specs.base import Spec
from mofa.specs.files import data_dir
from mofa.specs.framework_traits import Layers
from mofa.specs.residuals import Circumstances, Experts, Nodes, Pace, Products

FILE = "scored_runs.csv"
"""Beside the hardware profiles; python scripts/scored_runs.py writes it."""


class ScoredRun(Spec):
    """One configuration that was measured and predicted: a row of ``docs/accuracy.md`` whose step says something."""

    id: str
    source: str = Field(description="Whose it is: ``measured`` are ours, else the group of a published table.")
    model: str
    framework: str
    gpu: str
    num_gpus: int = Field(ge=1)
    strategy: str = Field(description="In short, as accuracy.md has it.")
    split: str = Field(description="fitting: something may have been learned from it; judging: nothing was.")
    nodes: Nodes
    layers: Layers
    experts: Experts
    pace: Pace
    products: Products
    measured_s: float = Field(gt=0, description="A step of it. [s]")
    step_error: float = Field(description="Predicted over measured step - 1. [-]")
    memory_error: float | None = Field(default=None, description="The same of its peak allocated memory. [-]")

    @property
    def circumstances(self) -> Circumstances:
        """What its residual goes by."""
        return Circumstances(
            nodes=self.nodes, layers=self.layers, experts=self.experts, pace=self.pace, products=self.products
        )


COLUMNS = tuple(ScoredRun.model_fields)


@lru_cache(maxsize=1)
def load_scored_runs() -> tuple[ScoredRun, ...]:
    """All bundled runs with their errors, in the order of ``docs/accuracy.md``.

    Examples
    --------
    >>> {run.split for run in load_scored_runs()} == {"fitting", "judging"}
    True
    """
    text = (data_dir("hardware_profiles") / FILE).read_text(encoding="utf-8")
    return tuple(
        ScoredRun.model_validate({name: value for name, value in row.items() if value != ""}, strict=False)
        for row in csv.DictReader(text.splitlines())
    )
