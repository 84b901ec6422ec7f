"""What NCCL's log says of the algorithm and protocol that it chose. Plain Python, as the bench needs it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from mofa.calibrate.cases import Case

CHOICES = "nccl_algorithms.json"
TUNED = {"all_reduce": "AllReduce", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter"}
"""Collectives whose algorithm NCCL chooses; the others are sends and receives."""
_LINE = re.compile(r"(AllReduce|AllGather|ReduceScatter): \d+ Bytes -> Algo (\w+) proto (\w+)")


def read_nccl_choices(cases: Sequence[Case], lines: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """The choices of NCCL: per collective and group the payloads from which each choice holds; empty where the log says
    something else.

    Examples
    --------
    >>> case = Case("collective", "all_reduce", "nccl", "bf16", "grid", {"bytes": 4096, "group": 4})
    >>> read_nccl_choices([case], ["NCCL INFO AllReduce: 4096 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..1}"])
    {'all_reduce 4': [{'from_bytes': 4096, 'algorithm': 'TREE', 'protocol': 'LL'}]}
    """
    said = [match.groups() for line in lines if (match := _LINE.search(line))]
    if [name for name, _, _ in said] != [TUNED[case.op] for case in cases]:
        return {}
    chosen: dict[str, list[dict[str, Any]]] = {}
    for case, (_, algorithm, protocol) in zip(cases, said, strict=True):
        steps = chosen.setdefault(f"{case.op} {case.shape_size('group')}", [])
        if not steps or (steps[-1]["algorithm"], steps[-1]["protocol"]) != (algorithm, protocol):
            steps.append({"from_bytes": case.shape_size("bytes"), "algorithm": algorithm, "protocol": protocol})
    return chosen
