"""Why not another strategy: the plan's with one choice changed at a time, costed in closed form or refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from mofa.errors import SpecError
from mofa.plan.plan_analysis import StrategyChange
from mofa.plan.result import Plan
from mofa.schedules import default_schedule
from mofa.search.one_plan import plan_in_closed_form
from mofa.search.space import searched_option_sets
from mofa.search.space_constraints import SpaceConstraints
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import FrameworkOptions, StrategySpec
from mofa.specs.strategy_defaults import default_zero_stage, needs_sequence_parallel
from mofa.specs.workload import WorkloadSpec

OF_FRAMEWORKS = ("zero", "recompute")
"""Fields of which a framework has few values: what it does not have says nothing of the plan."""
BESIDE_DATA = ("tp", "pp", "cp")
"""Degrees whose change the data parallelism makes up for."""


def strategy_changes(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, strategy: StrategySpec,
    constraints: SpaceConstraints | None = None, option_sets: Sequence[FrameworkOptions] | None = None,
) -> tuple[StrategyChange, ...]:  # fmt: skip
    """The strategy with every choice one step up and one down, on as many GPUs.

    Parameters
    ----------
    workload, cluster, framework
        The job, the GPUs that compute, the framework of the plan.
    strategy
        The plan's.
    constraints
        What the user asked of the search: a change against that is left out.
    option_sets
        Sets of the framework's options that are searched; all that keep the numerics where absent.

    Returns
    -------
    tuple of StrategyChange
        In the order tp, pp, cp, ep, vpp, micro_batch, zero, recompute. Values that the framework has not are left out.
        Each takes the options with which it fits and is fastest, as the search would.
    """
    constraints = constraints or SpaceConstraints()
    if option_sets is None:
        option_sets = searched_option_sets(workload, cluster, framework)
    base = plan_in_closed_form(workload, cluster, strategy, framework)
    out = []
    for field, value, changes in _changes(strategy, moe=workload.model.moe is not None):
        changes |= _follow(framework, strategy, field, changes)
        if "sp" in changes:
            changes["sp"] = changes["sp"] and constraints.allows({"sp": True})
        if not constraints.allows({name: new for name, new in changes.items() if name != "sp"}):
            continue
        raw = {**strategy.model_dump(), **changes}
        splits = [raw["sp"]]
        if changes.get("sp") and constraints.allows({"sp": False}):
            splits += [] if needs_sequence_parallel(framework, moe=workload.model.moe is not None) else [False]
        plans: list[tuple[StrategySpec, Plan]] = []
        refused: list[tuple[StrategySpec, str]] = []
        for options, sp in product(_option_sets_of(raw, strategy, option_sets), splits):
            changed: StrategySpec | None = None
            try:
                changed = StrategySpec.model_validate(raw | {"sp": sp} | options._asdict())
                plans.append((changed, plan_in_closed_form(workload, cluster, changed, framework)))
            except (SpecError, ValueError) as error:
                refused.append((changed or strategy, str(error).removeprefix("strategy: ").splitlines()[0]))
        if plans:
            best, plan = min(plans, key=lambda pair: (not pair[1].memory.fits, pair[1].step_s))
            out.append(_costed(field, value, best, plan, base))
        elif field not in OF_FRAMEWORKS:
            refused_strategy, why = refused[0]
            out.append(StrategyChange(field=field, value=value, strategy=refused_strategy, refused=why))
    return tuple(out)


def _option_sets_of(
    changed: Mapping[str, Any], strategy: StrategySpec, searched: Sequence[FrameworkOptions]
) -> list[FrameworkOptions]:
    """Searched sets of options, without what says nothing of a changed strategy.

    Overlap of tensor parallelism needs tp, a dispatcher experts on several ranks. What gathering at once needs says
    :func:`mofa.search.space.gathers_at_once_without_gain`.
    """
    sets = []
    for options in searched:
        if changed["tp"] == 1:
            options = options._replace(tp_overlap=None)
        if changed["ep"] == 1 and options.dispatcher != strategy.dispatcher:
            options = options._replace(dispatcher=None)
        if changed["pp"] == 1 or changed["vpp"] > 1:
            options = options._replace(overlap_param_gather=None)
        sets.append(options)
    return list(dict.fromkeys(sets))


def _costed(field: str, value: str, strategy: StrategySpec, plan: Plan, base: Plan) -> StrategyChange:
    more = {name: seconds - base.time.exposed[name] for name, seconds in plan.time.exposed.items()}
    sign = 1.0 if plan.step_s >= base.step_s else -1.0
    most = max(more, key=lambda name: sign * more[name])
    return StrategyChange(
        field=field, value=value, strategy=strategy, step_change=plan.step_s / base.step_s - 1.0,
        device_bytes=plan.memory.device_bytes, fits=plan.memory.fits,
        most_changed=most if more[most] else None, most_changed_s=more[most] if more[most] else None,
    )  # fmt: skip


def _changes(strategy: StrategySpec, *, moe: bool) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Which field, its value, and all fields that change with it."""
    for field in BESIDE_DATA:
        degree = getattr(strategy, field)
        for new, dp in ((degree // 2, strategy.dp * 2), (degree * 2, strategy.dp // 2)):
            if new and dp and degree * strategy.dp == new * dp:
                more = {"sp": new > 1} if field == "tp" and (strategy.sp or degree == 1) else {}
                if field == "pp":
                    more = {"layout": ""} | ({"vpp": 1, "schedule": default_schedule(1)} if new == 1 else {})
                yield field, str(new), {field: new, "dp": dp, **more}
    if moe:
        for new in _half_and_double(strategy.ep):
            yield "ep", str(new), {"ep": new}
    if strategy.pp > 1:
        for new in _half_and_double(strategy.vpp):
            yield "vpp", str(new), {"vpp": new, "schedule": default_schedule(new), "layout": ""}
    for new in _half_and_double(strategy.micro_batch):
        yield "micro_batch", str(new), {"micro_batch": new}
    for new in (strategy.zero - 1, strategy.zero + 1):
        if 0 <= new <= 3:
            yield "zero", str(new), {"zero": new}
    for mode in ("none", "selective", "full"):
        if mode != strategy.recompute:
            yield "recompute", mode, {"recompute": mode}


def _follow(
    framework: FrameworkSpec, strategy: StrategySpec, field: str, changes: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """Fields that torchtitan ties to a changed degree: its sharding to the pipeline, its experts' split to tp."""
    if not framework.traits.has_pytorch_modules or field == "zero":
        return {}
    changed = strategy.model_copy(update=changes)
    zero = int(default_zero_stage(framework, changed.dp, changed.cp, changed.pp))
    return {"zero": zero, **({"etp": changed.tp} if field == "tp" and changed.ep == 1 else {})}


def _half_and_double(degree: int) -> tuple[int, ...]:
    return (degree * 2,) if degree == 1 else (degree // 2, degree * 2)
