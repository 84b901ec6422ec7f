"""The least possible load of the fullest GPU: the maximum induced density of a placement, over all subsets of GPUs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatA = NDArray[np.float64]
MAX_GPUS = 16
"""Up to so many GPUs all their subsets are looked at."""


def induced_density(hosts: NDArray[np.bool_], loads: FloatA) -> FloatA:
    """Largest load per GPU that some subset of the GPUs cannot give away.

    Parameters
    ----------
    hosts
        Which GPUs hold which experts, at most 16 GPUs. (E, G)
    loads
        Tokens of the experts. (..., E) [tokens]

    Returns
    -------
    FloatA
        ``max over G' of sum of loads of the experts that only G' holds, over |G'|``; equal to the optimum of the linear
        program of replica loads. (...) [tokens]

    Notes
    -----
    The loads of experts with the same GPUs are added up in a table over all ``2**G`` subsets, and one pass per GPU sums
    every subset's subsets, so that the cost is ``G * 2**G`` per load vector.

    References
    ----------
    MicroMoE, arXiv 2511.16947, equation 3.

    Examples
    --------
    Three GPUs in a row; the expert between the first two has 6 tokens, so those two have 3 each and the third 2.

    >>> hosts = np.array([[True, True, False], [False, False, True]])
    >>> float(induced_density(hosts, np.array([6.0, 2.0])))
    3.0
    """
    num_gpus = hosts.shape[1]
    if num_gpus > MAX_GPUS:
        raise ValueError(f"num_gpus ({num_gpus}) must be at most {MAX_GPUS}; use mofa.routing.balance.flow_density")
    host_sets = hosts @ (1 << np.arange(num_gpus))
    flat = np.atleast_2d(loads.reshape(-1, hosts.shape[0]))
    inside = np.zeros((1 << num_gpus, len(flat)))
    np.add.at(inside, host_sets, flat.T)
    for gpu in range(num_gpus):
        halves = inside.reshape(-1, 2, 1 << gpu, len(flat))
        halves[:, 1] += halves[:, 0]
    subsets = np.arange(1, 1 << num_gpus)
    size = ((subsets[:, None] >> np.arange(num_gpus)) & 1).sum(axis=1)
    return np.asarray((inside[1:] / size[:, None]).max(axis=0).reshape(loads.shape[:-1]))
