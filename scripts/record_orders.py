"""Record the orders and the sends and receives of PyTorch's pipeline schedules; needs torch, no GPU.

``python scripts/record_orders.py tests/schedules/recorded/orders.json`` with PyTorch 2.11 made the file that tests
read. An entry is [schedule, pp, vpp, micro-batches, computations per rank, the same with sends and receives], each
action as text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed.pipelining.schedules as s

CASES = {
    "interleaved": [(2, 2, 4), (2, 2, 6), (4, 2, 8), (4, 3, 3), (4, 2, 10), (3, 4, 9), (4, 2, 4)],
    "interleaved-zb": [(2, 2, 4), (4, 2, 8), (4, 1, 8), (4, 2, 10), (3, 3, 3)],
    "zbv": [(2, 2, 8), (4, 2, 8), (4, 2, 3), (3, 2, 12), (1, 2, 2)],
}
CLASSES = {
    "interleaved": s.ScheduleInterleaved1F1B, "interleaved-zb": s.ScheduleInterleavedZeroBubble,
    "zbv": s.ScheduleZBVZeroBubble,
}  # fmt: skip


def record(name: str, pp: int, vpp: int, num_micro_batches: int) -> list[Any]:
    """One schedule's actions on every rank."""
    cls: Any = CLASSES[name]
    count = max(1, num_micro_batches // pp)
    me = SimpleNamespace(
        pp_group_size=pp, _n_microbatches=num_micro_batches, n_local_stages=vpp, num_stages=pp * vpp, _num_stages=pp,
        microbatches_per_round=num_micro_batches // count, number_of_rounds=count,
    )  # fmt: skip
    orders = {r: cls._calculate_single_rank_operations(me, r) for r in range(pp)}
    compute = [[str(a) for a in orders[r] if a is not None and a.microbatch_index is not None] for r in range(pp)]
    full = {r: s._add_reduce_grad(s._add_unshard_reshard(acts), num_micro_batches) for r, acts in orders.items()}
    style = "v" if name == "zbv" else "loop"
    ranks = s.generate_stage_to_rank_mapping(pp, pp * vpp, style=style)
    comms = s._add_send_recv(full, lambda i: ranks[i], pp * vpp)
    return [name, pp, vpp, num_micro_batches, compute, [[str(a) for a in comms[r]] for r in range(pp)]]


if __name__ == "__main__":
    rows = [record(name, *case) for name, cases in CASES.items() for case in cases]
    Path(sys.argv[1]).write_text(json.dumps(rows, separators=(",", ":")) + "\n")
