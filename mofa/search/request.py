"""Check the arguments of a search or an estimate: facts of the right kind, constraints, conventions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from mofa.cost.model_flops import FlopsConvention
from mofa.errors import SpecError
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.overrides import strategy_from_fields
from mofa.specs.workload import WorkloadSpec

BOUNDED = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "micro_batch")
"""Columns that hold a whole number of at least 1; the only ones that have an upper bound."""


def checked_framework_or_default(workload: object, cluster: object, framework: object) -> FrameworkSpec:
    """The framework, the workload's own or ``megatron`` where absent.

    Parameters
    ----------
    workload, cluster, framework
        Specs, or what a caller gave in their place.

    Returns
    -------
    FrameworkSpec
        The framework that runs the job.

    Raises
    ------
    SpecError
        If one of them is no spec, such as a name that is still to be loaded, or the framework has no such model.

    Examples
    --------
    >>> checked_framework_or_default("llama3-8b", None, None)
    Traceback (most recent call last):
    mofa.errors.SpecError: workload: str is no WorkloadSpec; load one by mofa.load_workload
    """
    if not isinstance(workload, WorkloadSpec):
        raise SpecError(f"workload: {type(workload).__name__} is no WorkloadSpec; load one by mofa.load_workload")
    if not isinstance(cluster, ClusterSpec):
        raise SpecError(f"cluster: {type(cluster).__name__} is no ClusterSpec; load one by mofa.load_cluster")
    if framework is None:
        from mofa.specs.load import load_framework

        return load_framework(workload.framework or "megatron")
    if not isinstance(framework, FrameworkSpec):
        raise SpecError(f"framework: {type(framework).__name__} is no FrameworkSpec; load one by mofa.load_framework")
    if not framework.traits.has_experts and workload.model.moe is not None:
        raise SpecError(
            f"{framework.name}: {workload.model.name} has experts, of which Megatron-LM v3.0 has Switch's alone (one a "
            "token, all on every rank), which are not modelled; use framework megatron or megatron-local"
        )
    return framework


def check_constraints(fix: Mapping[str, object], maximum: Mapping[str, int], top: int, convention: str) -> None:
    """Refuse constraints with unknown names or values of a wrong type.

    Parameters
    ----------
    fix
        Values, or several of them, by column of strategies.
    maximum
        The most of a degree by its name. [-]
    top
        How many plans are wanted. [-]
    convention
        How FLOPs of causal attention are counted.

    Raises
    ------
    SpecError
        If a name is unknown, or a value is not of its column's type.

    Examples
    --------
    >>> check_constraints({"tp": 8}, {"pp": 4}, 10, "causal")
    >>> check_constraints({}, {"recompute": 1}, 10, "causal")
    Traceback (most recent call last):
    mofa.errors.SpecError: --max: recompute is no degree; use one of tp, pp, vpp, cp, ep, etp, dp, micro_batch
    """
    for name, given in fix.items():
        if isinstance(given, tuple) and (not given or name in ("dp", "zero", "layout")):
            raise SpecError(f"--fix: {name} takes one value, not {len(given)}; give one of them")
        for value in given if isinstance(given, tuple) else (given,):
            strategy_from_fields({name: value}, "--fix")
    strategy_from_fields({name: value for name, value in fix.items() if not isinstance(value, tuple)}, "--fix")
    for name, bound in maximum.items():
        if name not in BOUNDED:
            raise SpecError(f"--max: {name} is no degree; use one of {', '.join(BOUNDED)}")
        if isinstance(bound, bool) or not isinstance(bound, int) or bound < 1:
            raise SpecError(f"--max: {name} ({bound!r}) must be a whole number of at least 1; correct it")
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise SpecError(f"top ({top!r}) must be a whole number of at least 1; correct it")
    if convention not in get_args(FlopsConvention):
        raise SpecError(
            f"flops_convention ({convention!r}) must be {' or '.join(get_args(FlopsConvention))}; choose one"
        )
