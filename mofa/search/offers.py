"""What other numerics would bring to a plan: its strategy costed with each word of ``--with`` that changes them.

And what CUDA graphs would bring to one that its host bounds, and early stops to torchtitan's checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

from mofa.errors import SpecError
from mofa.plan.result import NumericsOffer, Plan
from mofa.search.job_setup import routing_loads_by_ep, with_numerics
from mofa.search.one_strategy import checked_strategy_row
from mofa.search.to_plan.builder import CandidatePlan
from mofa.search.to_plan.step_band import HOST_BOUND
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import StrategySpec
from mofa.specs.workload import FP8_RECIPES, WorkloadSpec

BF16_MOMENTS, BF16_GRADS, CUDA_GRAPHS, EARLY_STOP = "bf16_moments", "bf16_grads", "cuda_graphs", "early_stop"


def numerics_offers(
    workload: WorkloadSpec,
    cluster: ClusterSpec,
    framework: FrameworkSpec,
    strategy: StrategySpec,
) -> tuple[NumericsOffer, ...]:
    """A strategy with each of the numerics that the job does not have yet, beside itself, all in closed form.

    Parameters
    ----------
    workload, cluster, framework
        The job as it is searched.
    strategy
        That fits.

    Returns
    -------
    tuple[NumericsOffer, ...]
        In the order of the words; what the GPU, the framework or the sizes refuse is left out. Graphs come last, for a
        step that its host bounds; early stops, for a strategy that computes layers again.
    """

    def plan_with(words: Sequence[str]) -> Plan:
        job = with_numerics(workload, cluster, framework, words)
        row = checked_strategy_row(*job, strategy)
        return CandidatePlan(*job, row, routing_loads_by_ep(job[0], row), "causal").plan_in_closed_form(banded=False)

    now = plan_with(())
    offers = []
    words = _not_yet(workload, framework)
    if not framework.graphs.captures_any and now.time.exposed["host_idle"] > HOST_BOUND * now.step_s:
        words = (*words, CUDA_GRAPHS)
    if strategy.recompute != "none" and framework.traits.has_pytorch_modules and not framework.early_stop:
        words = (*words, EARLY_STOP)
    for word in words:
        try:
            other = plan_with((word,))
        except SpecError:
            continue
        offers.append(
            NumericsOffer(
                word=word,
                step_change=other.step_s / now.step_s - 1.0,
                device_bytes_change=other.memory.device_bytes - now.memory.device_bytes,
            )
        )
    return tuple(offers)


def _not_yet(workload: WorkloadSpec, framework: FrameworkSpec) -> tuple[str, ...]:
    words: tuple[str, ...] = () if workload.precision.fp8_recipe else FP8_RECIPES
    if workload.precision.moments != "bf16":
        words += (BF16_MOMENTS,)
    return words if framework.grads_bytes_per_param == 2.0 else (*words, BF16_GRADS)
