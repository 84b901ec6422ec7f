"""How often experts' numbers of tokens are new to a library: against draws that are counted, and an LRU cache."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from mofa.cost import choices
from mofa.cost.choices import unseen_share

EVEN, UNEVEN = np.full(8, 400.0), 400.0 * np.geomspace(0.3, 3.0, 8)


def counted(means: np.ndarray, draws: int, watched: int, remembered: int = 10**9, seed: int = 0) -> float:
    """Share of draws behind the first ``draws`` that a cache of so many numbers does not hold."""
    rng = np.random.default_rng(seed)
    held: OrderedDict[int, None] = OrderedDict()
    missed = 0
    for n in range(draws + watched):
        number = int(rng.poisson(means[n % len(means)]))
        missed += n >= draws and number not in held
        held.pop(number, None)
        held[number] = None
        if len(held) > remembered:
            held.popitem(last=False)
    return missed / watched


@pytest.mark.parametrize("means", [EVEN, UNEVEN])
@pytest.mark.parametrize("draws", [0, 64, 512])
def test_new_numbers_are_as_many_as_are_counted(means: np.ndarray, draws: int) -> None:
    """A few draws behind the first ones: what is seen meanwhile is seen by both."""
    found = np.mean([unseen_share(means, draws + n) for n in range(32)])
    assert found == pytest.approx(np.mean([counted(means, draws, 32, seed=n) for n in range(40)]), abs=0.03)


def test_a_small_cache_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "REMEMBERED", 6 * 100)
    found = unseen_share(UNEVEN, np.inf)
    assert found == pytest.approx(counted(UNEVEN, 2000, 20000, 100), abs=0.05)
    assert found > 0.3


def test_more_experts_than_are_told_apart() -> None:
    many = np.tile(UNEVEN, 64)
    assert unseen_share(many, 200.0) == pytest.approx(unseen_share(UNEVEN, 200.0), rel=0.05)
