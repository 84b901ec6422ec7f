"""Where the copies of a token go, under uniform routing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.op import FloatK
from mofa.cost.kernels.topology import ProcessGroup

ArrayK = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenSpread:
    """Where the copies of a token go, on average over tokens. (K,)"""

    remote_domains: FloatK
    """Distinct fast domains other than the token's own. [-]"""
    ranks: FloatK
    """Distinct ranks, the token's own included where it is one. [-]"""


def token_spread(
    group: ProcessGroup, *, num_experts: int, top_k: int, num_groups: int = 1, top_groups: int = 1
) -> TokenSpread:
    """Distinct places that a token's copies go to, under uniform routing.

    Parameters
    ----------
    group
        The expert-parallel group; it holds the experts in order, the same number on every rank.
    num_experts, top_k
        Routed experts, and how many of them a token takes.
    num_groups, top_groups
        Node-limited routing: experts lie in ``num_groups`` equal groups, a token takes experts of ``top_groups`` only.

    Notes
    -----
    A place with e experts is missed with the hypergeometric probability of drawing none of its experts: of
    ``n = num_experts * top_groups / num_groups`` eligible ones, ``prod_{i<top_k} (n - e - i) / (n - i)``. How many of
    the place's own expert groups are eligible is hypergeometric in turn; a place smaller than an expert group is
    eligible with probability ``top_groups / num_groups``. Places that cut an expert group are counted by the whole
    groups they hold. The expected number of distinct places is their number times the chance to be hit. Real routers
    are less even, which hits fewer places.

    References
    ----------
    DeepSeek-V3, arXiv 2412.19437, section 2.1.2: at most 4 nodes a token.

    Examples
    --------
    DeepSeek-V3 over 8 nodes: each holds one expert group, 4 of 8 are eligible, its 8 experts fall into 3.64 of them.

    >>> group = ProcessGroup(size=np.array(64), ranks_per_domain=np.array(8), ranks_per_node=np.array(8))
    >>> spread = token_spread(group, num_experts=256, top_k=8, num_groups=8, top_groups=4)
    >>> print(f"{spread.remote_domains:.2f} {spread.ranks:.2f}")
    3.18 7.36
    """
    per_rank = num_experts / group.size
    rank_hit = _hit_probability(per_rank, num_experts, top_k, num_groups, top_groups)
    domain_hit = _hit_probability(
        np.minimum(per_rank * group.ranks_per_domain, num_experts), num_experts, top_k, num_groups, top_groups
    )
    return TokenSpread(remote_domains=(group.num_domains - 1) * domain_hit, ranks=group.size * rank_hit)


def _hit_probability(num_held: ArrayK, num_experts: int, top_k: int, num_groups: int, top_groups: int) -> ArrayK:
    """Chance that any of a token's experts is among the ``num_held`` ones of a place."""
    per_group = num_experts / num_groups
    eligible = per_group * top_groups
    whole_groups = np.maximum(np.floor(num_held / per_group + 1e-9), 1.0)
    in_each = np.minimum(num_held, per_group)
    hit = np.zeros_like(np.asarray(num_held, dtype=np.float64))
    for chosen in range(1, top_groups + 1):
        missed = np.ones_like(hit)
        for i in range(top_k):
            missed = missed * np.maximum(eligible - chosen * in_each - i, 0.0) / max(eligible - i, 1.0)
        hit = hit + _hypergeometric(chosen, num_groups, whole_groups, top_groups) * (1.0 - missed)
    return hit


def _hypergeometric(chosen: int, total: int, marked: ArrayK, draws: int) -> ArrayK:
    """Chance that ``draws`` of ``total`` things, without replacement, hold exactly ``chosen`` of the ``marked``."""
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, total + 1)))])

    def log_choose(n: NDArray[np.int64], k: int) -> ArrayK:
        m = np.clip(n, k, total)
        return np.asarray(log_factorial[m] - log_factorial[k] - log_factorial[m - k])

    m = np.asarray(marked).astype(np.int64)
    rest = draws - chosen
    possible = (m >= chosen) & (total - m >= rest)
    log_draws = log_factorial[total] - log_factorial[draws] - log_factorial[total - draws]
    return np.where(possible, np.exp(log_choose(m, chosen) + log_choose(total - m, rest) - log_draws), 0.0)
