"""Spare nodes and peer copies: how many are needed, and how long a job waits without."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from mofa.errors import SpecError
from mofa.faults.checks import FloatN, check_at_least_zero, checked_share


def binomial_spares(num_nodes: ArrayLike, faulty: ArrayLike, quantile: float = 0.99) -> np.ndarray:
    """Spares that suffice with this probability where each node is faulty at a time independently. [nodes]

    Parameters
    ----------
    num_nodes
        Nodes of the job. [-]
    faulty
        Probability that one of them is faulty at the time. [-]
    quantile
        Probability that the spares suffice. [-]

    References
    ----------
    ByteRobust, arXiv 2509.16293, standby machines: the P99 of a binomial number of simultaneously faulty machines; 2,
    2, 3 and 4 for 128 to 1024 machines, which any probability from 0.001165 to 0.00125 gives.

    Examples
    --------
    >>> binomial_spares(np.array([128, 256, 512, 1024]), 0.0012).tolist()
    [2, 2, 3, 4]
    """
    from scipy import stats  # half a second to load

    p = checked_share("faulty", faulty)
    return np.asarray(stats.binom.ppf(_quantile(quantile), np.asarray(num_nodes), p)).astype(np.int64)


def poisson_spares(failures_per_s: ArrayLike, repair_s: ArrayLike, quantile: float = 0.99) -> np.ndarray:
    """Spares that suffice with this probability where failed nodes take ``repair_s`` to come back. [nodes]

    The nodes in repair are Poisson with mean ``rate * repair_s`` (M/G/infinity), whatever the repair's distribution.

    Examples
    --------
    >>> int(poisson_spares(1 / 11135, 86400.0))  # 7.8 in repair on average
    15
    """
    from scipy import stats

    mean = check_at_least_zero("failures_per_s", failures_per_s, "1/s") * check_at_least_zero("repair_s", repair_s)
    return np.asarray(stats.poisson.ppf(_quantile(quantile), mean)).astype(np.int64)


def _quantile(value: float) -> float:
    if not 0 < value < 1:
        raise SpecError(f"quantile: is {value:g}; give a number between 0 and 1")
    return value


def waiting_share(failures_per_s: ArrayLike, repair_s: ArrayLike, num_spares: ArrayLike) -> FloatN:
    """Share of time that a job waits for a node to come back from repair: Erlang's loss formula. [-]

    With S spares, up to S + 1 nodes are in repair, and in the last case the job stands still and has no failures: the
    loss system M/G/c/c with ``c = S + 1``, whose share of time in state c is ``(a^c / c!) / sum_{k<=c} a^k / k!``,
    ``a = rate * repair_s``, for any distribution of the repair time with that mean. Assumes failures that take a node
    out to be Poisson while the job doesn't wait, and spares not to fail while they stand by.

    Parameters
    ----------
    failures_per_s
        Rate of failures that take a node out, while the job runs or restarts. [1/s]
    repair_s
        Mean time until a node is back. [s]
    num_spares
        Spare nodes; infinite never waits. [-]

    References
    ----------
    Erlang 1917; Sevastyanov 1957 for its insensitivity to the distribution.

    Examples
    --------
    >>> [round(float(waiting_share(1 / 3600, 3600.0, s)), 12) for s in (0, 1)]
    [0.5, 0.2]
    """
    from scipy import special  # a third of a second to load

    a = check_at_least_zero("failures_per_s", failures_per_s, "1/s") * check_at_least_zero("repair_s", repair_s)
    c = check_at_least_zero("num_spares", num_spares, "nodes", finite=False) + 1
    with np.errstate(divide="ignore", invalid="ignore"):
        # Poisson probability of c over that of at most c, by logarithms: both underflow for large c
        upper = special.gammaincc(c + 1, a)
        log_at = c * np.log(a) - a - special.gammaln(c + 1)
        share = np.exp(log_at - np.log(upper))
        heavy = 1 - c / np.where(a > 0, a, 1.0)  # where at most c are all but impossible
    share = np.where(upper > 1e-280, share, np.maximum(heavy, 0.0))
    return np.where((a == 0) | np.isinf(c), 0.0, share)


def all_states_survive_probability(num_nodes: int, copies: int, failed: int) -> float:
    """Probability that every state is left somewhere when nodes fail at once. [-]

    Parameters
    ----------
    num_nodes
        Nodes, in groups of ``copies`` that hold one another's states. [-]
    copies
        Copies of every state, the node's own included. [-]
    failed
        Nodes that fail at once, drawn evenly. [-]

    Notes
    -----
    A state is lost when a whole group fails. The number of ways to choose ``failed`` nodes without a whole group is the
    coefficient of ``x^failed`` in ``((1 + x)^m - x^m)^(N / m)``; for ``m <= failed < 2 m`` this is the published
    ``1 - (N / m) C(N - m, k - m) / C(N, k)``.

    References
    ----------
    Wang et al. 2023, "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints", SOSP,
    doi:10.1145/3600006.3613145, section 4.

    Examples
    --------
    >>> round(all_states_survive_probability(16, 2, 2), 4), all_states_survive_probability(16, 2, 1)
    (0.9333, 1.0)
    """
    if copies < 1 or num_nodes < copies or num_nodes % copies:
        raise SpecError(f"copies: are {copies} of {num_nodes} nodes; let the copies divide the nodes")
    if not 0 <= failed <= num_nodes:
        raise SpecError(f"failed: is {failed} of {num_nodes} nodes; give 0 to {num_nodes}")
    from scipy import special  # a third of a second to load

    groups, total = num_nodes // copies, special.gammaln
    # in logarithms, by inclusion and exclusion over whole groups lost
    log_all = total(num_nodes + 1) - total(failed + 1) - total(num_nodes - failed + 1)
    lost = 0.0
    for j in range(1, min(failed // copies, groups) + 1):
        n, k = num_nodes - j * copies, failed - j * copies
        ways = total(groups + 1) - total(j + 1) - total(groups - j + 1)
        term = np.exp(ways + total(n + 1) - total(k + 1) - total(n - k + 1) - log_all)
        lost += term if j % 2 else -term
        if term < 1e-15:
            break
    return float(np.clip(1 - lost, 0.0, 1.0))


def ettr_of_continuing_replicas(
    mtbf_s: ArrayLike, num_replicas: ArrayLike, stall_s: ArrayLike, return_s: ArrayLike, step_s: ArrayLike,
    checkpointed_ettr: ArrayLike,
) -> FloatN:  # fmt: skip
    """Effective throughput where the other data-parallel replicas go on without the one that failed. [-]

    Parameters
    ----------
    mtbf_s
        Mean time between failures of all replicas together. [s]
    num_replicas
        Data-parallel replicas; with one there is nobody to go on, and checkpoints decide. [-]
    stall_s
        For how long all stand still at a failure and again when the replica comes back, together. [s]
    return_s
        Until the replica is back; it copies its state from another one. [s]
    step_s
        One optimizer step, half of which a failure loses on average. [s]
    checkpointed_ettr
        What holds where all replicas restart together. [-]

    Notes
    -----
    Each replica is up for ``D M`` and down for T on average, independently, so that ``D M / (D M + T)`` of the
    throughput is there. Failures of those that are up stop everybody for ``stall + step / 2``. With all replicas down
    at once, which has the probability ``(T / (D M + T))^D``, the checkpoint is read.

    Examples
    --------
    >>> float(ettr_of_continuing_replicas(3600.0, 1, 10.0, 600.0, 4.0, 0.8))
    0.8
    >>> round(float(ettr_of_continuing_replicas(3600.0, 64, 10.0, 600.0, 4.0, 0.8)), 4)
    0.9941
    """
    mtbf = check_at_least_zero("mtbf_s", mtbf_s, finite=False)
    replicas = np.asarray(num_replicas, dtype=np.float64)
    if np.any(replicas < 1):
        raise SpecError(f"num_replicas: is {replicas.min():g}; give at least 1")
    down, stall = check_at_least_zero("return_s", return_s), check_at_least_zero("stall_s", stall_s)
    each = stall + check_at_least_zero("step_s", step_s) / 2
    with np.errstate(invalid="ignore"):
        up = np.where(np.isinf(mtbf), 1.0, replicas * mtbf / (replicas * mtbf + down))
    running = 1 / (1 + each * up / mtbf)
    none = (1 - up) ** replicas
    alone = checked_share("checkpointed_ettr", checkpointed_ettr)
    return np.where(replicas > 1, (1 - none) * up * running + none * np.minimum(alone, up * running), alone)
