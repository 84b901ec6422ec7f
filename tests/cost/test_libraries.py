"""Which part of a step rests on what was measured under Transformer Engine."""

from __future__ import annotations

from typing import Any

import mofa
from mofa.cost.libraries import has_host_facts_of_library
from mofa.plan.result import Plan
from mofa.report.search_text import library_share_line
from mofa.specs.curves import FittedCurve, GpuCurves
from mofa.specs.hardware import ClusterSpec

UNDER: dict[str, Any] = {"library": "transformer-engine", "provenance": "measured"}


def machines(**curves: Any) -> ClusterSpec:
    """H100s whose curves are changed."""
    cluster = mofa.load_cluster("h100-hgx", 8)
    fields = {name: getattr(cluster.gpu.curves, name) for name in GpuCurves.model_fields}
    changed = cluster.gpu.model_copy(update={"curves": GpuCurves.model_construct(**{**fields, **curves})})
    return cluster.model_copy(update={"gpu": changed})


def own() -> GpuCurves:
    """The H100's curves, none of them marked."""
    curves = mofa.load_cluster("h100-hgx", 8).gpu.curves

    def plain(of: dict[Any, Any]) -> dict[Any, Any]:
        return {key: curve.model_copy(update={"library": None}) for key, curve in of.items()}

    return curves.model_copy(update={name: plain(getattr(curves, name)) for name in ("gemm", "attention", "stream")})


def marked(of: dict[Any, Any], *, provenance: str = "measured") -> dict[Any, Any]:
    return {key: curve.model_copy(update={**UNDER, "provenance": provenance}) for key, curve in of.items()}


def estimated(cluster: ClusterSpec, framework: str = "megatron") -> Plan:
    job = mofa.load_workload("llama3-8b", global_batch=16)
    return mofa.estimate(job, cluster, "tp=2 micro_batch=1", framework=mofa.load_framework(framework), replay=False)


def shares(cluster: ClusterSpec) -> dict[str, float]:
    found = estimated(cluster).library_fraction
    assert found is not None
    return found


def test_a_framework_without_such_a_library_has_none() -> None:
    assert estimated(machines(), "megatron-local").library_fraction is None


def test_products_that_were_measured_under_it_are_counted_by_their_seconds() -> None:
    curves = own()
    plain = {name: getattr(curves, name) for name in ("gemm", "attention", "stream")}
    cluster = machines(**{**plain, "gemm": marked(curves.gemm)})
    plan = estimated(cluster)
    found = plan.library_fraction
    assert found is not None
    whole = plan.time.exposed["gemm"] / plan.step_s
    assert 0.9 * whole < found["gemm"] <= whole  # copies of weights are no products
    assert "attention" not in found and "memory_bound" not in found


def test_one_kind_of_memory_bound_kernel_is_part_of_them() -> None:
    curves = own()
    plain = {name: getattr(curves, name) for name in ("gemm", "attention", "stream")}
    of_swiglu = {key: curve for key, curve in curves.stream.items() if "swiglu" in key}
    some = shares(machines(**{**plain, "stream": {**curves.stream, **marked(of_swiglu)}}))
    every = shares(machines(**{**plain, "stream": marked(curves.stream)}))
    assert 0 < some["memory_bound"] < every["memory_bound"]


def test_a_transferred_curve_is_not_measured() -> None:
    curves = own()
    plain = {name: getattr(curves, name) for name in ("gemm", "attention", "stream")}
    cluster = machines(**{**plain, "gemm": marked(curves.gemm, provenance="transferred")})
    assert "gemm" not in shares(cluster)


def test_host_facts_under_it_are_found() -> None:
    host = mofa.load_cluster("h100-hgx", 8).gpu.curves.host
    plain = host.model_copy(update={"linear_op_s": host.linear_op_s.model_copy(update={"library": None})})
    under = host.model_copy(update={"linear_op_s": host.linear_op_s.model_copy(update=UNDER)})
    assert has_host_facts_of_library(under, "transformer-engine")
    assert has_host_facts_of_library(plain, "transformer-engine") == any(
        getattr(getattr(plain, name), "library", None) is not None for name in type(plain).model_fields
    )


def test_a_curve_says_its_library() -> None:
    curve = FittedCurve(source="a run", **UNDER)
    assert curve.library == "transformer-engine"
    assert FittedCurve(source="a run", provenance="measured").library is None


def test_the_report_says_it() -> None:
    assert library_share_line({}) == (
        "Nothing of the step rests on kernels or hosts that were measured under Transformer Engine."
    )
