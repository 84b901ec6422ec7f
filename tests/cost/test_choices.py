"""How often experts' numbers of tokens are new to a library, and need kernels that nothing has used: against draws that
are counted, an LRU cache, and products that were timed."""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import brentq

from mofa.cost import choices
from mofa.cost.choices import ALIKE, POOL, new_kernels, unseen_share, wandering

ROOT = Path(__file__).parents[2]

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


def test_popularity_that_wanders_makes_more_numbers_new() -> None:
    """Against draws whose mean moves with each."""
    rng, seen, new = np.random.default_rng(0), [set() for _ in range(100)], 0
    for n in range(96):
        for held in seen:
            mean = UNEVEN[n % len(UNEVEN)]
            number = int(rng.normal(mean, np.sqrt(mean + (0.18 * mean) ** 2)))
            new += n >= 64 and number not in held
            held.add(number)
    found = np.mean([unseen_share(UNEVEN, 64.0 + n, 0.18) for n in range(32)])
    assert found == pytest.approx(new / 3200, abs=0.03)
    assert found > unseen_share(UNEVEN, 80.0) + 0.05


def test_popularity_wanders_no_further_than_experts_differ() -> None:
    rng = np.random.default_rng(0)
    assert wandering(rng.poisson(2000.0, 64).astype(float)) < 0.03
    assert wandering(2000.0 * np.geomspace(0.3, 3.0, 64)) == choices.SPREAD


def test_a_small_cache_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "REMEMBERED", 6 * 100)
    found = unseen_share(UNEVEN, np.inf)
    assert found == pytest.approx(counted(UNEVEN, 2000, 20000, 100), abs=0.05)
    assert found > 0.3


def test_more_experts_than_are_told_apart() -> None:
    many = np.tile(UNEVEN, 64)
    assert unseen_share(many, 200.0) == pytest.approx(unseen_share(UNEVEN, 200.0), rel=0.05)


def loaded(means: np.ndarray, draws: int, watched: int, seed: int) -> float:
    """Kernels that a number loads behind the first ``draws``: each of two products a way has one kernel from change to
    change, which are ``ALIKE`` of the number apart in the mean, drawn from the way's pool."""
    rng = np.random.default_rng(seed)
    held: list[set[int]] = [set(), set()]
    changes = np.cumsum(rng.exponential(ALIKE, (4, 4000)), axis=1)  # in the number's logarithm
    kernels = rng.integers(0, int(POOL), changes.shape)
    found = 0
    for n in range(draws + watched):
        number = np.log(max(rng.poisson(means[n % len(means)]), 1))
        for product in range(4):
            kernel = int(kernels[product, np.searchsorted(changes[product], number)])
            found += n >= draws and kernel not in held[product % 2]
            held[product % 2].add(kernel)
    return found / watched


@pytest.mark.parametrize("means", [EVEN, UNEVEN, np.geomspace(200.0, 8000.0, 64)])
@pytest.mark.parametrize("draws", [0, 64, 512])
def test_new_kernels_are_as_many_as_are_counted(means: np.ndarray, draws: int) -> None:
    found = np.mean([new_kernels(means, draws + n) for n in range(32)])
    counts = [loaded(means, draws, 32, seed) for seed in range(30)]
    assert found == pytest.approx(np.mean(counts), rel=0.2, abs=0.05)


def test_new_kernels_of_products_that_were_timed() -> None:
    """Products that take more than a millisecond load a kernel: expected of each, with the distance to the nearest
    numbers before it and what is left of the pool, as many as were counted, of each model's experts too."""
    raw = json.loads((ROOT / "measurements" / "h200-host-second" / "products.json").read_text())
    left = {"fwd": POOL, "dgrad": POOL}
    counted: dict[int, float] = {}
    expected: dict[int, float] = {}
    for series in (one for one in raw["products"] if one["way"] != "wgrad"):
        numbers, way = np.array(series["m"], dtype=float), series["way"]
        model = max(series["n"], series["k"])
        model = {12800: 6400}.get(model, model if model < 14336 else 14336)
        for i, took_us in enumerate(series["new"]):
            apart = [
                np.abs(side - numbers[i]).min(initial=np.inf)
                for side in (numbers[:i][numbers[:i] <= numbers[i]], numbers[:i][numbers[:i] >= numbers[i]])
            ]
            alone = np.prod(-np.expm1(-np.array(apart) / (ALIKE * numbers[i])))
            expected[model] = expected.get(model, 0.0) + left[way] / POOL * alone
            counted[model] = counted.get(model, 0.0) + (took_us > 1000)
            left[way] -= took_us > 1000
        left[way] -= sum(took_us > 1000 for took_us in series["new_in_a_busy_queue"])
    assert counted == {2048: 130, 6400: 42, 14336: 15}
    assert [round(one) for one in expected.values()] == pytest.approx([130, 42, 15], rel=0.15)


def changes_apart(series: list[tuple[int, str]]) -> float:
    """Mean distance of one change of kernel to the next, as a share of the number (maximum likelihood)."""
    pairs = [((b[0] - a[0]) / b[0], a[1] != b[1]) for a, b in itertools.pairwise(series) if b[0] > a[0]]
    apart, changed = np.array([d for d, _ in pairs]), np.array([c for _, c in pairs])
    over = np.geomspace(0.003, 0.3, 200)[:, None]
    return float(over[np.argmax(np.where(changed, np.log(-np.expm1(-apart / over)), -apart / over).sum(axis=1)), 0])


def pool_of(draws: int, found: int) -> float:
    """The pool of which so many draws find so many."""
    return float(brentq(lambda pool: -pool * np.expm1(-draws / pool) - found, found / 2, 1e5))


def test_kernels_that_were_named_change_as_often_and_are_as_many() -> None:
    """What was fitted to times against the names of the kernels of other models' products."""
    raw = json.loads((ROOT / "measurements" / "h200-products" / "kernels.json").read_text())
    series = {}
    for one in (one for one in raw["products"] if one["way"] != "wgrad"):
        names = [one["kernels"][at] for at in one["which"] if "splitKreduce" not in one["kernels"][at]]
        series[one["n"], one["k"], one["way"]] = sorted(
            pair for pair in zip(one["m"], names, strict=True) if 256 <= pair[0] <= 4096
        )
    assert len(series) == 34
    assert np.mean([changes_apart(one) for one in series.values()]) == pytest.approx(ALIKE, rel=0.2)
    pools = []
    for way, (n, k) in itertools.product(("fwd", "dgrad"), ((1024, 512), (2048, 1024), (2816, 1408), (1536, 768),
                                                            (5760, 2880), (12800, 6400), (28672, 14336))):  # fmt: skip
        hidden = next(one[1] for one in series if one[0] == n and one[2] == way and (one[1], k, way) in series)
        drawn = [name for key in ((n, hidden, way), (hidden, k, way)) for name, _ in itertools.groupby(
            name for _, name in series[key])]  # fmt: skip
        pools.append(pool_of(len(drawn), len(set(drawn))))
    assert np.mean(pools) == pytest.approx(POOL, rel=0.2)
