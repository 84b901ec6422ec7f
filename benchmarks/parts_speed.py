"""What the parts take that everything else calls: ``python benchmarks/parts_speed.py [--smoke]``.

The caching allocator of the replay, in events a second, and the loads of every expert-parallel degree under uneven
routing of 256 experts, in milliseconds. CPU seconds of this process, the best of several tries.
"""

from __future__ import annotations

import platform
import random
import sys
import time
from collections.abc import Callable
from functools import partial

from mofa.replay.allocator.caching import Allocator
from mofa.replay.allocator.pools import Block
from mofa.routing.rank_load import routing_loads
from mofa.specs.load import load_workload
from mofa.specs.routing import RoutingSpec

DEGREES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROUTINGS = (
    RoutingSpec(),
    RoutingSpec(kind="zipf", s=0.8),
    RoutingSpec(kind="dirichlet", alpha=0.3),
    RoutingSpec(kind="lognormal", sigma=1),
)


def best_s(action: Callable[[], object], tries: int) -> float:
    """CPU seconds of the quickest of several tries."""
    found = []
    for _ in range(tries):
        start = time.process_time()
        action()
        found.append(time.process_time() - start)
    return min(found)


def allocate(events: int) -> None:
    """Half as many requests of 512 B to 256 MiB, of which 300 are alive at a time, and as many frees."""
    rng = random.Random(0)
    a, live = Allocator(), list[Block]()
    for _ in range(events // 2):
        size = int(2 ** rng.uniform(9, 28))
        live.append(a.malloc(size))
        if len(live) > 300:
            j = size % len(live)
            live[j], live[-1] = live[-1], live[j]
            a.free(live.pop())


def main() -> None:
    """Time each part and print it."""
    smoke = "--smoke" in sys.argv[1:]
    tries, events = (1, 2_000) if smoke else (5, 40_000)
    print(f"Python {platform.python_version()}; CPU seconds, the best of {tries}")
    print(f"allocator: {events / best_s(lambda: allocate(events), tries):,.0f} events a second")
    model = load_workload("deepseek-v3").model
    for routing in ROUTINGS:
        taken = best_s(partial(routing_loads, routing, model, DEGREES), tries)
        print(f"loads of 256 experts, {routing.kind}, ep 1 to 256: {taken * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
