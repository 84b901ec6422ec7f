"""Which facts move the ETTR of a long run most: each halved and doubled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mofa.plan.goodput_by_scale import Sensitivity
from mofa.plan.result import Plan
from mofa.search.goodput import LongRunObjective
from mofa.specs.base import Fact, Spec
from mofa.specs.faults import CheckpointSpec, FaultSpec

FACTORS: dict[str, tuple[str, ...]] = {
    "failure rate": ("reliability.failures_per_node_day", "reliability.components.mttf_s"),
    "noticing and isolating failures": ("reliability.kinds.detect_s", "reliability.kinds.isolate_s"),
    "restarting processes": ("restart.process_s", "restart.reroute_s"),
    "replacing a node": ("restart.hot_spare_s", "restart.reschedule_s"),
    "setting up and warming up": ("restart.initialise_s", "restart.initialise_per_rank_s", "restart.warm_up_s"),
    "repairing nodes": ("restart.repair_s",),
    "storage write rate": ("storage.write_bytes_per_s",),
    "storage read rate": ("storage.read_bytes_per_s",),
    "bytes of a checkpoint": (),
}
"""Facts that each factor multiplies; a mean time to failure is divided by it."""


def ettr_sensitivities(runs: LongRunObjective, plan: Plan) -> tuple[tuple[Sensitivity, ...], float]:
    """ETTR with each factor halved and doubled, at each one's best interval, the strongest first; and unchanged. [-]"""

    def ettr(faults: FaultSpec, by_bytes: float = 1.0) -> float:
        changed = replace(runs, faults=faults)
        bytes_ = np.array([plan.checkpoint_bytes or 0.0])
        # the whole checkpoint grows as a rank's share does: as storage that is so much slower, and host links
        storage = faults.storage
        if by_bytes != 1.0 and storage is not None:
            slower = {
                name: getattr(storage, name).model_copy(update={"value": getattr(storage, name).value / by_bytes})
                for name in ("write_bytes_per_s", "read_bytes_per_s")
            }
            changed = replace(runs, faults=faults.model_copy(update={"storage": storage.model_copy(update=slower)}))
        return float(changed.long_run_outlook(np.array([plan.step_s]), bytes_ * by_bytes, plan.strategy.dp).ettr[0])

    out = []
    for factor, paths in FACTORS.items():
        if paths:
            low, high = (ettr(_scaled(runs.faults, paths, by)) for by in (0.5, 2.0))
        else:
            low, high = ettr(runs.faults, 0.5), ettr(runs.faults, 2.0)
        out.append(Sensitivity(factor=factor, ettr_halved=low, ettr_doubled=high))
    out.sort(key=lambda item: -item.swing)
    return tuple(out), ettr(runs.faults)


def _scaled(faults: FaultSpec, paths: Sequence[str], by: float) -> FaultSpec:
    raw = faults.model_dump()
    for path in paths:
        _scale(raw, path.split("."), 1 / by if path.endswith("mttf_s") else by)
    return _rebuilt(faults, raw)


def _scale(raw: Any, keys: list[str], by: float) -> None:
    if raw is None:
        return
    if isinstance(raw, (list, tuple)):
        for item in raw:
            _scale(item, keys, by)
    elif keys:
        _scale(raw.get(keys[0]), keys[1:], by)
    else:
        raw["value"] *= by


def _rebuilt(faults: FaultSpec, raw: Mapping[str, Any]) -> FaultSpec:
    """The profile of changed facts, whose values are SI already."""

    def merged(old: Any, new: Any) -> Any:
        if isinstance(old, Fact):
            return old.model_copy(update={"value": new["value"]})
        if isinstance(old, Spec):
            return old.model_copy(
                update={name: merged(getattr(old, name), new[name]) for name in type(old).model_fields}
            )
        if isinstance(old, tuple):
            return tuple(merged(a, b) for a, b in zip(old, new, strict=True))
        return old

    changed = merged(faults, raw)
    assert isinstance(changed, FaultSpec) and isinstance(changed.checkpoint, CheckpointSpec)
    return changed
