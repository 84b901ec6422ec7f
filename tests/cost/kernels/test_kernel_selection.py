"""How often experts' numbers of tokens are new to a library, and need kernels that nothing has used: against draws that
are counted, an LRU cache, and products that were timed."""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mofa import load_cluster
from mofa.cost.kernels import kernel_selection
from mofa.cost.kernels.kernel_selection import (
    expected_first_use_kernels,
    expert_popularity_drift,
    heuristic_cache_miss_rate,
)
from mofa.specs.shared_facts import load_shared_facts

ROOT = Path(__file__).parents[3]
SELECTION = load_cluster("h200-hgx", 8).gpu.curves.kernel_selection
Named = dict[tuple[int, int, str], list[tuple[int, str]]]

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
    found = np.mean([heuristic_cache_miss_rate(means, draws + n) for n in range(32)])
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
    found = np.mean([heuristic_cache_miss_rate(UNEVEN, 64.0 + n, 0.18) for n in range(32)])
    assert found == pytest.approx(new / 3200, abs=0.03)
    assert found > heuristic_cache_miss_rate(UNEVEN, 80.0) + 0.05


def test_popularity_wanders_no_further_than_experts_differ() -> None:
    rng = np.random.default_rng(0)
    assert expert_popularity_drift(rng.poisson(2000.0, 64).astype(float)) < 0.03
    assert (
        expert_popularity_drift(2000.0 * np.geomspace(0.3, 3.0, 64))
        == load_shared_facts().routing.popularity_spread.value
    )


def test_a_small_cache_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_selection, "REMEMBERED", 6 * 100)
    found = heuristic_cache_miss_rate(UNEVEN, np.inf)
    assert found == pytest.approx(counted(UNEVEN, 2000, 20000, 100), abs=0.05)
    assert found > 0.3


def test_more_experts_than_are_told_apart() -> None:
    many = np.tile(UNEVEN, 64)
    assert heuristic_cache_miss_rate(many, 200.0) == pytest.approx(heuristic_cache_miss_rate(UNEVEN, 200.0), rel=0.05)


MODELS = {
    "granite": (1536, 512), "olmoe": (2048, 1024), "dsmoe": (2048, 1408), "qwen": (2048, 768), "gptoss": (2880, 2880),
    "phimoe": (4096, 6400), "mixtral": (4096, 14336),
}  # fmt: skip
"""Hidden width and an expert's own of the models whose kernels were named."""


def ways_of(hidden: int, inner: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (2 * inner, hidden), (hidden, inner)


@pytest.fixture(scope="module")
def named() -> dict[tuple[int, int, str], list[tuple[int, str]]]:
    """Numbers of rows and the kernel of each, in their order, by width, length of the sums and way."""
    raw = json.loads((ROOT / "measurements" / "h200-products" / "kernels.json").read_text())
    return {
        (one["n"], one["k"], one["way"]): sorted(zip(one["m"], kernels_of(one), strict=True))
        for one in raw["products"] if one["way"] != "wgrad"
    }  # fmt: skip


def kernels_of(series: dict[str, Any]) -> list[str]:
    """The kernels of a series without what adds up split sums behind some."""
    return [name for at in series["which"] if "splitKreduce" not in (name := series["kernels"][at])]


def played(named: Named, hidden: int, inner: int, means: np.ndarray, steps: int, seed: int) -> np.ndarray:
    """Kernels loaded in each step by 2 micro-batches of experts with such means, each with the kernel of the nearest
    number that was named. (steps,)"""
    rng, spread = np.random.default_rng(seed), expert_popularity_drift(means)
    series = [named[n, k, way] for way in ("fwd", "dgrad") for n, k in ((2 * inner, hidden), (hidden, inner))]
    logs = [np.log([m for m, _ in one]) for one in series]
    held: tuple[set[str], set[str]] = (set(), set())
    found = np.zeros(steps)
    for step in range(steps):
        moved = means * (1.0 + spread * rng.standard_normal(means.shape))
        numbers = np.maximum(rng.normal(np.tile(moved, 2), np.sqrt(np.maximum(np.tile(moved, 2), 1.0))), 1.0)
        for product, one in enumerate(series):
            nearest = np.searchsorted((logs[product][1:] + logs[product][:-1]) / 2, np.log(numbers))
            kernels = {one[at][1] for at in nearest} - held[product // 2]
            found[step] += len(kernels)
            held[product // 2].update(kernels)
    return found


def test_new_kernels_are_as_many_as_those_that_were_named(named: Named) -> None:
    """Behind a warm-up of four steps, for experts of few and of many tokens."""
    counted, expected = [], []
    for hidden, inner in MODELS.values():
        for mean, apart, experts in ((400.0, 0.8, 16), (1500.0, 0.6, 16), (4000.0, 0.3, 8)):
            means = mean * np.exp(apart * np.random.default_rng(1).standard_normal(experts))
            runs = [played(named, hidden, inner, means, 24, seed)[4:].sum() for seed in range(8)]
            each = [(step + 0.5) * 2 * experts for step in range(4, 24)]
            of = [
                expected_first_use_kernels(
                    means, draws, ways_of(hidden, inner), SELECTION, expert_popularity_drift(means)
                )
                for draws in each
            ]
            counted.append(float(np.mean(runs)))
            expected.append(2 * experts * sum(of))
    assert np.array(expected) == pytest.approx(np.array(counted), rel=0.6)
    assert sum(expected) == pytest.approx(sum(counted), rel=0.1)


def test_new_kernels_of_products_that_were_timed() -> None:
    """Series that nothing was read off: what takes more than a millisecond loads a kernel."""
    raw = json.loads((ROOT / "measurements" / "h200-products" / "products.json").read_text())
    for series in (one for one in raw["products"] if one["way"] != "wgrad"):
        out = series["n"] if series["way"] == "fwd" else series["k"]
        numbers = np.array(series["m"], dtype=float)
        expected = sum(
            expected_first_use_kernels(numbers, draws + 0.5, ((out,),), SELECTION) for draws in range(len(numbers))
        )
        assert expected == pytest.approx(sum(took_us > 1000 for took_us in series["new"]), rel=0.2)


def test_what_loads_a_kernel_is_its_first_use() -> None:
    raw = json.loads((ROOT / "measurements" / "h200-products" / "kernels.json").read_text())
    used: set[str] = set()
    first, later = [], []
    for series in raw["products"]:
        for name, took_us in zip(kernels_of(series), series["host_us"], strict=True):
            (later if name in used else first).append(took_us)
            used.add(name)
    assert len(first) == 716
    assert min(first) > 1000 > max(later)


@pytest.mark.parametrize("low", [0.15, 0.4, 1.0, 2.0, 4.0, 8.0])
def test_kernels_resemble_as_the_numbers_that_were_named_do(named: Named, low: float) -> None:
    """Of pairs of numbers the share that has one kernel, near each other and far, by the waves of the one."""
    near, expected, far, waves = [], [], [], []
    for (n, k, way), pairs in named.items():
        numbers, kernels = np.array([m for m, _ in pairs], dtype=float), np.array([name for _, name in pairs])
        of = numbers * (n if way == "fwd" else k) / SELECTION.wave_outputs.value
        here = (of >= low) & (of < max(2.5 * low, 2.0))
        same = kernels[here][:, None] == kernels
        apart = np.abs(np.log(numbers[here][:, None] / numbers))
        close, beyond = (apart > 0) & (apart < 0.05), (apart > 0.1) & (apart < np.log(SELECTION.far_reach.value))
        near += same[close].tolist()
        alike = SELECTION.alike_share.value * of[here][:, None] ** -SELECTION.alike_exponent.value
        expected += np.exp(-apart / alike)[close].tolist()
        far += same[beyond].tolist()
        waves += of[here].tolist()
    assert np.mean(near) == pytest.approx(np.mean(expected), rel=0.25)
    assert np.mean(far) == pytest.approx(np.mean(SELECTION.far_share.value * np.log2(1.0 + np.array(waves))), abs=0.015)


def changes_apart(series: list[tuple[int, str]]) -> float:
    """Mean distance of one change of kernel to the next, as a share of the number (maximum likelihood)."""
    pairs = [((b[0] - a[0]) / b[0], a[1] != b[1]) for a, b in itertools.pairwise(series) if b[0] > a[0]]
    apart, changed = np.array([d for d, _ in pairs]), np.array([c for _, c in pairs])
    over = np.geomspace(0.003, 0.3, 200)[:, None]
    return float(over[np.argmax(np.where(changed, np.log(-np.expm1(-apart / over)), -apart / over).sum(axis=1)), 0])


def test_kernels_that_were_named_change_as_often(named: Named) -> None:
    series = [[pair for pair in one if 256 <= pair[0] <= 4096] for one in named.values()]
    assert len(series) == 34
    assert np.mean([changes_apart(one) for one in series]) == pytest.approx(SELECTION.unchanged_share.value, rel=0.1)
