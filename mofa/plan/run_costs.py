"""What a plan takes of GPUs: for a million tokens, and for the run, with failures where these are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mofa.plan.result import Plan

MILLION = 1e6
HOURS_PER_DAY = 24.0


def gpu_seconds_per_million_tokens(plan: Plan) -> float:
    """What a million tokens take of the GPUs that compute; where failures are counted, of all with these. [GPU s]

    Parameters
    ----------
    plan
        One strategy, costed.

    Returns
    -------
    float
        Seconds of one GPU. [GPU s]

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> gpu_seconds_per_million_tokens(SimpleNamespace(effective_tokens_per_s_per_gpu=None, tokens_per_s_per_gpu=1e4))
    100.0
    """
    rate = plan.effective_tokens_per_s_per_gpu
    return MILLION / (plan.tokens_per_s_per_gpu if rate is None else rate)


def days_of_run(plan: Plan) -> float | None:
    """Days of the whole run, the median with failures where these are counted; None where no tokens are given. [d]

    Parameters
    ----------
    plan
        One strategy, costed.

    Returns
    -------
    float or None
        Days. [d]

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> days_of_run(SimpleNamespace(days=None, days_without_failures=12.5))
    12.5
    """
    return plan.days_without_failures if plan.days is None else plan.days.p50


def gpu_hours_of_run(plan: Plan, num_gpus: int) -> float | None:
    """GPU-hours of the run on so many GPUs, those that idle or stand by included. [h]

    Parameters
    ----------
    plan
        One strategy, costed.
    num_gpus
        All GPUs. [-]

    Returns
    -------
    float or None
        Hours of one GPU; None where no tokens are given. [h]

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> gpu_hours_of_run(SimpleNamespace(days=None, days_without_failures=12.5, gpu_hours=None), 8)
    2400.0
    """
    days = days_of_run(plan)
    if plan.gpu_hours is not None or days is None:
        return plan.gpu_hours
    return days * HOURS_PER_DAY * num_gpus
