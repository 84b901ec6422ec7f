"""Failure rates: of nodes from components, records and mixtures, and what they mean for a job."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from mofa.errors import SpecError
from mofa.faults.checks import FloatN, check_above_zero, check_at_least_zero, checked_share
from mofa.specs.base import Spec
from mofa.units import SECONDS_PER_DAY


def job_mtbf_s(failures_per_node_day: ArrayLike, num_nodes: ArrayLike) -> FloatN:
    """Mean time between failures of a job, ``1 / (N r_f)``; infinite where nothing fails. [s]

    Examples
    --------
    >>> float(job_mtbf_s(6.5e-3, 2048)) / 3600  # Meta: 1.8 h at 16,384 GPUs
    1.8028846153846154
    """
    rate = check_at_least_zero("failures_per_node_day", failures_per_node_day, "1/(node day)")
    nodes = check_above_zero("num_nodes", num_nodes, "nodes")
    with np.errstate(divide="ignore", over="ignore"):
        return SECONDS_PER_DAY / (rate * nodes)


def failures_per_node_day_of_components(components: Sequence[tuple[float, float]]) -> float:
    """Failures per node-day of parts that fail independently at constant rates. [1/(node day)]

    Parameters
    ----------
    components
        Number in a node [-] and mean time to failure [s] of each kind of part.

    Examples
    --------
    >>> round(failures_per_node_day_of_components([(8, 50_000 * 3600.0)]) * 1000, 2)  # eight GPUs of 50,000 h
    3.84
    """
    rate = 0.0
    for number, mttf_s in components:
        rate += float(check_at_least_zero("num_per_node", number, "")) / float(check_above_zero("mttf_s", mttf_s))
    return rate * SECONDS_PER_DAY


class RateEstimate(Spec):
    """A failure rate out of a record, with its confidence interval."""

    failures: int = Field(ge=0, description="Failures counted. [-]")
    node_days: float = Field(gt=0, description="Time that nodes were watched and up. [node-days]")
    rate_per_node_day: float = Field(ge=0, description="Failures over node-days. [1/(node day)]")
    low_per_node_day: float = Field(ge=0, description="Lower end of the interval. [1/(node day)]")
    high_per_node_day: float = Field(ge=0, description="Upper end of the interval. [1/(node day)]")
    confidence: float = Field(gt=0, lt=1, description="Of the interval. [-]")


def estimate_failure_rate(failures: int, node_days: float, confidence: float = 0.9) -> RateEstimate:
    """Rate and exact (Garwood) interval of a Poisson count.

    ``chi2(a / 2, 2 n) / 2`` to ``chi2(1 - a / 2, 2 n + 2) / 2`` failures, over the node-days.

    References
    ----------
    Garwood 1936, "Fiducial limits for the Poisson distribution", doi:10.1093/biomet/28.3-4.437.

    Examples
    --------
    >>> found = estimate_failure_rate(419, 2048 * 54.0)  # Llama 3
    >>> round(found.rate_per_node_day * 1000, 2), round(found.low_per_node_day * 1000, 2)
    (3.79, 3.49)
    """
    if failures < 0:
        raise SpecError(f"failures: is {failures}; give a count of at least 0")
    days = float(check_above_zero("node_days", node_days, "node-days"))
    if not 0 < confidence < 1:
        raise SpecError(f"confidence: is {confidence:g}; give a number between 0 and 1")
    tail = (1 - confidence) / 2
    from scipy import special  # a third of a second to load

    low = special.gammaincinv(failures, tail) if failures else 0.0  # half the chi-square of twice as many degrees
    high = special.gammaincinv(failures + 1, 1 - tail)
    return RateEstimate(
        failures=failures, node_days=days, rate_per_node_day=failures / days, low_per_node_day=float(low) / days,
        high_per_node_day=float(high) / days, confidence=confidence,
    )  # fmt: skip


def true_over_estimated_rate(failures: ArrayLike, probability: ArrayLike) -> FloatN:
    """True rate over the estimated one that is not exceeded with this probability, given what was counted. [-]

    A Gamma distribution of ``n + 1/2`` over n: what Jeffreys' prior leaves after n failures, half a chi-square of
    ``2 n + 1`` degrees of freedom, which lies between the two of Garwood's interval (:func:`estimate_failure_rate`).

    Parameters
    ----------
    failures
        Counted; at least some. [-]
    probability
        From 0 to 1. [-]

    References
    ----------
    Jeffreys 1946, "An invariant form for the prior probability in estimation problems", doi:10.1098/rspa.1946.0056.

    Examples
    --------
    >>> true_over_estimated_rate(419, np.array([0.05, 0.5, 0.95])).round(3).tolist()  # Llama 3: known to within 8 %
    [0.922, 1.0, 1.083]
    """
    counted = check_above_zero("failures", failures, "")
    from scipy import special  # a third of a second to load

    return np.asarray(special.gammaincinv(counted + 0.5, checked_share("probability", probability)) / counted)


def weibull_scale_s(mean_s: ArrayLike, shape: ArrayLike) -> FloatN:
    """Scale of a Weibull distribution with this mean, ``mean / Gamma(1 + 1 / k)``. [s]

    Examples
    --------
    >>> float(weibull_scale_s(100.0, 1.0)), round(float(weibull_scale_s(100.0, 0.5)), 9)
    (100.0, 50.0)
    """
    from scipy import special  # a third of a second to load

    return check_above_zero("mean_s", mean_s) / special.gamma(1 + 1 / check_above_zero("shape", shape, ""))


def fit_weibull_shape(gaps_s: NDArray[np.float64], censored_s: NDArray[np.float64]) -> float:
    """Maximum-likelihood shape of times between failures of nodes, with those that had not ended. [-]

    Solves ``sum_all(x^k ln x) / sum_all(x^k) - 1 / k = mean_failed(ln x)``: below 1 infant mortality, 1 exponential,
    above 1 wear-out.

    Parameters
    ----------
    gaps_s
        Observed times to failure. (n,) [s]
    censored_s
        Times without failure up to the end of the record. (m,) [s]

    References
    ----------
    Cohen 1965, "Maximum likelihood estimation in the Weibull distribution based on complete and on censored samples",
    doi:10.1080/00401706.1965.10490300.

    Examples
    --------
    >>> x = weibull_scale_s(1.0, 0.7) * (-np.log(1 - (np.arange(2000) + 0.5) / 2000)) ** (1 / 0.7)
    >>> round(fit_weibull_shape(x, np.zeros(0)), 2)
    0.7
    """
    from scipy import optimize

    gaps = check_above_zero("gaps_s", gaps_s)
    if len(gaps) < 2 or np.ptp(gaps) == 0:
        raise SpecError(f"gaps_s: {len(gaps)} of them show no spread; a shape needs at least two different ones")
    rest = np.asarray(censored_s, dtype=np.float64)
    every = np.concatenate([gaps, rest[rest > 0]])
    logs = np.log(every / every.max())  # scaled, so that powers stay within range
    mean = float(np.log(gaps / every.max()).mean())

    def score(shape: float) -> float:
        weight = np.exp(shape * logs)
        return float((weight * logs).sum() / weight.sum() - 1 / shape - mean)

    least, most = 1e-3, 1e3  # beyond, gaps are all but equal or span hundreds of decades
    if score(least) >= 0 or score(most) <= 0:
        return least if score(least) >= 0 else most
    return float(optimize.brentq(score, least, most))


def lemon_rate_factor(lemon_fraction: ArrayLike, lemon_multiple: ArrayLike) -> FloatN:
    """Mean failure rate over that of good nodes, ``1 - f + f m``, where a fraction f fails m times as often. [-]

    References
    ----------
    AIReSim, arXiv 2603.07041: 15 % of servers at five times the rate of the good ones.

    Examples
    --------
    >>> round(35.16 / float(lemon_rate_factor(0.15, 5.0)), 3)  # its job: minutes between interruptions, from all good
    21.975
    """
    f = checked_share("lemon_fraction", lemon_fraction)
    return 1 - f + f * check_above_zero("lemon_multiple", lemon_multiple, "")


def failure_probability(rate_per_day: ArrayLike, number: ArrayLike, days: ArrayLike) -> FloatN:
    """Probability of at least one failure among a number of things, ``1 - exp(-rate number days)``. [-]

    Examples
    --------
    >>> round(float(failure_probability(0.01 / 365, 1024, 30.0)), 3)
    0.569
    """
    return -np.expm1(
        -check_at_least_zero("rate_per_day", rate_per_day, "1/day") * check_at_least_zero("number", number, "")
                     * check_at_least_zero("days", days, "d"))  # fmt: skip
