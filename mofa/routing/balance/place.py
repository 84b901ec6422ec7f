"""Placements for loads that are known: random ones, of which the one that locks in the least load is kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError
from mofa.routing.balance.flow_density import max_induced_density
from mofa.routing.placement import Placement, placement_dealt_at_random, replica_counts
from mofa.specs.ranges import MOST_LOAD_FACTOR

FloatA = NDArray[np.float64]
SAMPLES = 64


def asymmetric_placement(
    load: FloatA, num_gpus: int, slots: int, *, samples: int = SAMPLES, seed: int = 0
) -> Placement:
    """Replicas by load, dealt out at random; of so many tries the one with the smallest maximum induced density.

    Parameters
    ----------
    load
        Expected tokens of the experts. (E,) [tokens]
    num_gpus, slots
        GPUs of the group and experts that each holds. [-]
    samples
        Tries; they end early where one has the mean itself. [-]
    seed
        Of the tries.

    References
    ----------
    MicroMoE, arXiv 2511.16947, section 6 and appendix B: greedy replica counts, Monte-Carlo placement by equation 3.

    Examples
    --------
    >>> loads = np.array([9.0, 1.0, 1.0, 1.0])
    >>> placed = asymmetric_placement(loads, 4, 2)
    >>> placed.copies.sum(axis=1).tolist(), float(max_induced_density(placed.has_replica, loads))
    ([4, 2, 1, 1], 3.0)
    """
    if samples < 1:
        raise SpecError(f"samples ({samples}) must be at least 1")
    if not np.all(np.isfinite(load) & (load >= 0)):
        raise SpecError("load: is negative or not finite; give tokens of at least 0")
    counts = replica_counts(load, num_gpus * slots, num_gpus)
    rng = np.random.default_rng(seed)
    best: tuple[float, Placement] | None = None
    for _ in range(samples):
        placed = placement_dealt_at_random(load, counts, num_gpus, rng)
        density = float(max_induced_density(placed.has_replica, load))
        if best is None or density < best[0]:
            best = density, placed
        if density <= load.sum() / num_gpus * (1 + 1e-9):
            break
    assert best is not None
    return best[1]


@dataclass(frozen=True)
class PlacementAdaptationRule:
    """When experts are placed anew: how often that is looked at, and from which load of the fullest on.

    Parameters
    ----------
    interval
        Micro-batches between two looks at the placement, and the most that the predicted loads are the mean of. [-]
    threshold
        Maximum over mean of the predicted loads above which experts move. [-]
    samples
        Tries of a new placement. [-]
    """

    interval: int = 10
    threshold: float = 1.01
    samples: int = SAMPLES

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise SpecError(f"interval ({self.interval}) must be at least 1 micro-batch")
        if not 1 <= self.threshold <= MOST_LOAD_FACTOR:
            raise SpecError(
                f"threshold ({self.threshold:g}) must be at least 1, the mean itself, and at most {MOST_LOAD_FACTOR:g}"
            )


def is_placement_check_due(done: int, interval: int) -> bool:
    """Whether a placement is looked at after so many micro-batches: after the first, and every interval from there.

    >>> [done for done in range(8) if is_placement_check_due(done, 3)]
    [1, 4, 7]
    """
    return done >= 1 and (done - 1) % interval == 0


def better_placement(
    placement: Placement, recent: FloatA, slots: int, rule: PlacementAdaptationRule, seed: int = 0
) -> Placement | None:
    """A better placement for the loads of late, or None where the present one will do.

    Parameters
    ----------
    placement
        The present one.
    recent
        Tokens of the experts in the micro-batches of late. (n, E) [tokens]
    slots
        Experts that a GPU holds. [-]
    rule, seed
        When, and the seed of the tries.

    Notes
    -----
    The predicted load is the mean of the recent ones. A new placement must lock in less than the present one.

    References
    ----------
    MicroMoE, arXiv 2511.16947, section 6: start symmetric, predict by a moving average, place anew past a threshold.
    """
    predicted = recent.mean(axis=0)
    mean = predicted.sum() / placement.num_gpus
    present = float(max_induced_density(placement.has_replica, predicted))
    if present <= rule.threshold * mean:
        return None
    new = asymmetric_placement(predicted, placement.num_gpus, slots, samples=rule.samples, seed=seed)
    return new if float(max_induced_density(new.has_replica, predicted)) < present else None
