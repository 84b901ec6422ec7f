"""How long scheduling one micro-batch takes on this machine: the solver's own processor time, warm."""

from __future__ import annotations

import numpy as np

from mofa.routing.balance.simulate import Setup, draw_inputs, play
from mofa.search.balance import ordered_shares
from mofa.specs.routing import RoutingSpec

CASES = ((32, 8, 4), (64, 16, 8), (128, 32, 16), (256, 64, 32), (256, 64, 8))
"""Experts, GPUs of the merged group, ep."""
MICRO_BATCHES, TOKENS_PER_GPU = 200, 8192


def main() -> None:
    """Print median and 99th percentile for each case and solver."""
    print("experts  GPUs  ep  solver  routing   median ms  99th percentile ms")
    for experts, gpus, ep in CASES:
        for solver in ("lp", "flow"):
            for s in (0.5, 0.9):
                setup = Setup(experts, gpus, ep, solver=solver)  # type: ignore[arg-type]
                shares = ordered_shares(RoutingSpec(kind="zipf", s=s), experts)
                every = np.broadcast_to(shares, (MICRO_BATCHES, *shares.shape))
                warm = play(draw_inputs(every, TOKENS_PER_GPU, gpus), setup).warm_solve_s * 1e3
                times = f"{np.median(warm):9.3f}  {np.quantile(warm, 0.99):18.3f}"
                print(f"{experts:7}  {gpus:4}  {ep:2}  {solver:6}  zipf:{s:<4g} {times}")


if __name__ == "__main__":
    main()
