"""The measured and published runs that are most like a job."""

from __future__ import annotations

from math import log2

from mofa.plan.plan_analysis import NearRun
from mofa.search.to_plan.step_band import step_circumstances
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.scored_runs import ScoredRun, load_scored_runs
from mofa.specs.workload import WorkloadSpec

NEAREST = 12
"""Runs that a report names. [-]"""


def nearest_measured_runs(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, host_idle_fraction: float
) -> tuple[NearRun, ...]:
    """The runs that differ least from a job in what residuals go by, then in their number of GPUs.

    Parameters
    ----------
    workload, cluster, framework
        The job, its GPUs, its framework.
    host_idle_fraction
        Share of its step that the device waits for its host. [-]

    Returns
    -------
    tuple of NearRun
        The nearest first. Traits are the model, the GPU, the framework and the circumstances of
        :class:`~mofa.specs.residuals.Circumstances`; each counts alike. Of as many differences the run whose number of
        GPUs is by the smaller factor another comes first.
    """
    circumstances = step_circumstances(workload, cluster, framework, host_idle_fraction)
    own = {"GPU": cluster.gpu.name, "framework": framework.name, **circumstances.model_dump()}

    def differences(run: ScoredRun) -> tuple[str, ...]:
        traits = {"GPU": run.gpu, "framework": run.framework, **run.circumstances.model_dump()}
        model = () if is_run_of_model(run.model, workload.model.name) else ("model",)
        return (*model, *(name for name, value in own.items() if traits[name] != value))

    ranked = sorted(
        ((run, differences(run)) for run in load_scored_runs()),
        key=lambda item: (len(item[1]), abs(log2(item[0].num_gpus / cluster.num_gpus)), item[0].id),
    )
    return tuple(
        NearRun(
            id=run.id, source=run.source, model=run.model, gpu=run.gpu, num_gpus=run.num_gpus, strategy=run.strategy,
            measured_s=run.measured_s, error=run.step_error, memory_error=run.memory_error,
            is_judging=run.split == "judging", differs_in=differs,
        )
        for run, differs in ranked[:NEAREST]
    )  # fmt: skip


def is_run_of_model(named: str, model: str) -> bool:
    """Whether a run's model is a job's, as its source spells it, or the same with something said behind it.

    Examples
    --------
    >>> is_run_of_model("DeepSeekV3 (w/o MTP)", "deepseek-v3"), is_run_of_model("llama3-70b", "llama3-8b")
    (True, False)
    """
    return _letters(named).startswith(_letters(model))


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
