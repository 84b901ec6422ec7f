"""Where the step of a plan goes: seconds exposed, hidden and idle, of the slowest rank and of each stage's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, Self, get_args

from pydantic import Field, model_validator

from mofa.plan.memory import REL_TOL, refuse_negative_parts
from mofa.specs.base import Spec

if TYPE_CHECKING:
    import pandas as pd

TimeComponent = Literal[
    "gemm", "grouped_gemm", "attention", "memory_bound", "recompute", "host_idle", "tp", "cp", "ep", "pp", "dp",
    "bubble", "stragglers", "optimizer",
]  # fmt: skip
TIME_COMPONENTS: tuple[TimeComponent, ...] = get_args(TimeComponent)


class StageTime(Spec):
    """Where the step of one pipeline stage's rank goes."""

    stage: int = Field(ge=0, description="Index of the pipeline stage.")
    exposed: dict[TimeComponent, float] = Field(description="As the plan's; sums to step_s. [s]")
    idle: dict[str, float] = Field(
        description="Seconds in which the device computes nothing, by what it waits for: fill, forward input, backward "
        "input, exchange and drain of the pipeline, communication of a group, host_idle. [s]"
    )


class Time(Spec):
    """Where the step of the slowest rank goes."""

    exposed: dict[TimeComponent, float] = Field(
        description=f"Seconds that the step waits for each of {', '.join(TIME_COMPONENTS)}; sums to step_s. [s]"
    )
    hidden: dict[str, float] = Field(
        default_factory=dict, description="Seconds of communication (tp, cp, ep, pp, dp) behind computing. [s]"
    )
    by_stage: tuple[StageTime, ...] = Field(
        default=(), description="Each pipeline stage's rank, where the plan was played out; else empty."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if missing := [name for name in TIME_COMPONENTS if name not in self.exposed]:
            raise ValueError(f"time.exposed lacks {', '.join(missing)}")
        refuse_negative_parts("time.exposed", self.exposed)
        refuse_negative_parts("time.hidden", self.hidden)
        step_s = math.fsum(self.exposed.values())
        for stage in self.by_stage:
            if not math.isclose(math.fsum(stage.exposed.values()), step_s, rel_tol=REL_TOL):
                raise ValueError(
                    f"time.by_stage: the parts of stage {stage.stage} must sum to the step ({step_s:.9g} s)"
                )
        return self

    def stages_to_frame(self) -> pd.DataFrame:
        """One row per pipeline stage: columns ``<component>_s`` of the step, ``idle_<cause>_s`` of waiting."""
        import pandas as pd

        rows = [
            {"stage": stage.stage, **{f"{name}_s": value for name, value in stage.exposed.items()},
             **{f"idle_{cause.replace(' ', '_')}_s": value for cause, value in stage.idle.items()}}
            for stage in self.by_stage
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def to_frame(self) -> pd.DataFrame:
        """One row per component: component, exposed_s, hidden_s, fraction of the step that is exposed."""
        import pandas as pd

        step_s = math.fsum(self.exposed.values())
        names = [*TIME_COMPONENTS, *(name for name in self.hidden if name not in TIME_COMPONENTS)]
        exposed: dict[str, float] = {str(name): value for name, value in self.exposed.items()}
        rows = [(n, exposed.get(n, 0.0), self.hidden.get(n, 0.0), exposed.get(n, 0.0) / step_s) for n in names]
        return pd.DataFrame(rows, columns=["component", "exposed_s", "hidden_s", "fraction"])
