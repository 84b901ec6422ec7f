"""The bundled residuals: what the margin and the bands rest on."""

from __future__ import annotations

import statistics
from collections import defaultdict

import pytest

import mofa
from mofa.errors import SpecError
from mofa.search.to_plan.builder import margin_bytes
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.residuals import LEVELS, Circumstances, MemoryAndStepResiduals, load_residuals
from tests.committed import measured_records

STEP = load_residuals().step
DENSE = Circumstances(
    nodes="one node", layers="pytorch", products="bf16", experts="dense", pace="device-bound"
)  # fmt: skip


def test_residuals_are_measured_and_say_by_what() -> None:
    found = load_residuals()
    assert "fitting half" in found.device_memory.source and "scripts/residuals.py" in found.device_memory.source
    for fact in (found.device_memory, *(fact for group in STEP.groups for fact in (group.low, group.high))):
        assert fact.provenance == "measured"
    for group in STEP.groups:
        assert f"{group.runs} runs, {group.families} families" in group.low.source
        assert "fitting halves" in group.low.source and "step_residuals.csv" in group.low.source


def test_the_margin_is_the_residual_of_the_capacity() -> None:
    machines = mofa.load_cluster("h100-hgx", 8)
    capacity = machines.gpu.capacity_bytes.value
    graphs = mofa.load_framework("megatron", {"cuda_graphs": "local"})
    most = load_residuals().graphs_memory["local"].value
    assert margin_bytes(machines, graphs) == pytest.approx(capacity - capacity / (1.0 + most))
    assert margin_bytes(machines, mofa.load_framework("megatron")) == load_residuals().device_memory.value * capacity


def test_groups_lie_inside_each_other() -> None:
    """A wider group has more runs, of as many families at least; but of those that rows with a blank stand in for."""
    assert [item.path for item in STEP.stand_ins] == [("several nodes", "transformer-engine")]
    for group in STEP.groups:
        if group.path:
            wider = STEP.narrowest_group_of_path(group.path[:-1])
            assert wider.path == group.path[: len(wider.path)]
            if any(group.path == item.path for item in STEP.stand_ins):
                continue
            assert group.runs < wider.runs and group.families <= wider.families
            assert group.few >= wider.few


def test_nothing_measured_is_wider_than_any_group() -> None:
    assert STEP.unmeasured_low.value <= min(group.low.value for group in STEP.groups)
    assert STEP.unmeasured_high.value >= max(group.high.value for group in STEP.groups)


def test_the_narrowest_group_counts() -> None:
    group = STEP.narrowest_group_of_circumstances(DENSE)
    assert group.path == DENSE.levels_in_order[: len(group.path)]
    longer = [other for other in STEP.groups if other.path == DENSE.levels_in_order[: len(other.path)]]
    assert group == max(longer, key=lambda other: len(other.path))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"gpu": "h800"}, "GPU h800"),
        ({"framework": "another"}, "another"),
        ({"nodes": 10_000}, "10000 nodes with pytorch layers"),
        ({}, None),
    ],
)
def test_what_was_never_measured_is_told(change: dict[str, object], what: str | None) -> None:
    step = {"gpu": "h100-sxm", "framework": "torchtitan", "nodes": 1, **change}
    told = STEP.unmeasured_text(DENSE, **step)  # type: ignore[arg-type]
    assert len(told) == (what is not None)
    assert all(str(what) in words for words in told)


def test_products_never_measured_with_such_layers_are_told() -> None:
    fp8 = DENSE.model_copy(update={"layers": "megatron", "products": "fp8"})
    told = STEP.unmeasured_text(fp8, gpu="h200-sxm", framework="megatron-local", nodes=1)
    assert told == ("fp8 with megatron layers",)


def test_a_file_without_the_group_of_all_runs_is_one_line() -> None:
    raw = load_residuals().model_dump(mode="json")
    raw["step"]["groups"] = [group for group in raw["step"]["groups"] if group["path"]]
    with pytest.raises(SpecError, match="lacks the group of all runs"):
        spec_from_mapping(MemoryAndStepResiduals, raw, "residuals.yaml")


def test_levels_are_those_of_the_path() -> None:
    assert dict(zip(LEVELS, DENSE.levels_in_order, strict=True)) == DENSE.model_dump()


def test_the_profile_s_host_is_the_middle_one_of_those_that_were_timed() -> None:
    """Half of the machines that runs of the fitting half say something of are faster."""
    curves = mofa.load_cluster("h200-hgx", 1).gpu.curves
    assert curves.hosts is not None
    by_machine: dict[str, list[float]] = defaultdict(list)
    for record in measured_records():
        seen = record.environment
        if record.split == "fitting" and "H200" in seen.gpu and seen.host and seen.host_issue_s is not None:
            by_machine[seen.host].append(seen.host_issue_s)
    times = [statistics.median(values) for values in by_machine.values()]
    typical = curves.host.eager_op_s.value
    assert len(times) > 10
    assert 0.35 < sum(op_s < typical for op_s in times) / len(times) < 0.65
    inside = [curves.hosts.fast.value <= op_s / typical <= curves.hosts.slow.value for op_s in times]
    assert sum(inside) / len(inside) > 0.75
