"""Facts that a user changes: which are refused, and what moves with them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from mofa.errors import SpecError
from mofa.specs.load import load_cluster, load_framework, load_workload


def _refused(load: Callable[[], object]) -> str:
    with pytest.raises(SpecError) as caught:
        load()
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("megatron", {"shards_params": True}),
        ("torchtitan", {"shards_params": False}),
        ("fsdp1", {"fused_rope": True}),
        ("torchtitan", {"fused_swiglu": True}),
        ("torchtitan", {"scatters_pipeline_sends": True}),
        ("megatron-local", {"fused_qkv": True}),
        ("torchtitan", {"loss_metrics": 2}),
        ("megatron", {"fused_softmax": True}),
    ],
)
def test_a_fact_that_the_framework_does_not_read_is_refused(name: str, options: dict[str, object]) -> None:
    """It would change nothing, or what no framework does."""
    said = _refused(lambda: load_framework(name, options))
    assert next(iter(options)) in said and "leave it out" in said


def test_overrides_are_a_mapping() -> None:
    no_mapping: Any = ["model.num_layers=4"]
    for load in (
        lambda: load_workload("llama3-8b", overrides=no_mapping),
        lambda: load_cluster("h100-hgx", 8, overrides=no_mapping),
        lambda: load_framework("megatron", overrides=no_mapping),
    ):
        assert "give a mapping" in _refused(load)


def test_a_changed_datasheet_fact_moves_the_curves_with_it() -> None:
    """Half the bandwidth and half the peak: copies and products at half their rate, assumed; kernels that issue bounds
    as well lose less."""
    before = load_cluster("h100-hgx", 8).gpu.curves
    after = load_cluster(
        "h100-hgx",
        8,
        {"gpu.memory_bandwidth_bytes_per_s": "1.675 TB/s", "gpu.peak_flops_per_s.bf16": "494.7 TFLOP/s"},
    ).gpu.curves
    slower = {key: curve.form.bytes_per_s / before.stream[key].form.bytes_per_s for key, curve in after.stream.items()}
    assert slower["eager copy"] == pytest.approx(0.5, rel=1e-3)
    assert 0.5 < slower["default"] < slower["eager router_topk"] < 1
    rates = [curves.gemm["bf16"].form.tiles[0][2] for curves in (after, before)]
    assert rates[0] == pytest.approx(rates[1] / 2, rel=1e-3)
    assert after.gemm["fp8"].form.tiles == before.gemm["fp8"].form.tiles
    assert after.gemm["bf16"].provenance == "assumed"
    assert load_cluster("h100-hgx", 8, {"gpu.memory_bytes": "96 GiB"}).gpu.curves == before


def test_a_changed_link_moves_the_measured_collectives_with_it() -> None:
    """Twice the bandwidth and a latency 2 us longer: rates twice, starts by as many steps as the collective has."""
    before = load_cluster("h100-hgx", 8).node
    longer_s = before.intra.latency_s.value + 2e-6
    changes = {"node.intra.bandwidth_bytes_per_s": "900 GB/s", "node.intra.latency_s": f"{longer_s * 1e6:.6g} us"}
    after = load_cluster("h100-hgx", 8, changes).node
    assert set(after.collectives) == set(before.collectives)
    for key, steps in (("all_gather 8", 7), ("all_reduce 8", 6), ("all_to_all 4", 3), ("send_recv 2", 1)):
        new, old = (node.collectives[key].form.protocols for node in (after, before))
        assert [rate for _, rate in new] == pytest.approx([2 * rate for _, rate in old], rel=1e-3)
        assert [start for start, _ in new] == pytest.approx([start + steps * 2e-6 for start, _ in old], rel=1e-3)
        assert after.collectives[key].provenance == "assumed"
    slower = load_cluster("h100-hgx", 8, {"node.intra.all_to_all_efficiency": "0.385"}).node.collectives
    assert slower["all_to_all 8"].form.protocols[-1][1] == pytest.approx(
        before.collectives["all_to_all 8"].form.protocols[-1][1] / 2, rel=1e-3
    )
    assert slower["all_gather 8"] == before.collectives["all_gather 8"]
    assert load_cluster("h100-hgx", 8, {"node.nic.bandwidth_bytes_per_s": "800 Gbit/s"}).node.collectives == (
        before.collectives
    )


def test_a_field_is_said_once() -> None:
    said = _refused(lambda: load_workload("llama3-8b", seq_len=4096, overrides={"batch.seq_len": 8192}))
    assert "batch.seq_len is set to 8192 and to 4096" in said
    assert load_workload("llama3-8b", seq_len=4096, overrides={"batch.seq_len": 4096}).batch.seq_len == 4096


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("megatron", "loss_parallel", False),
        ("megatron-local", "compile_loss", False),
        ("megatron-local", "grouped_alignment", 64),
        ("torchtitan", "chunk_overlap", True),
        ("torchtitan", "accumulation_bytes_per_param", 20),
        ("torchtitan", "reduced_bytes_per_param", 2),
    ],
)
def test_what_a_framework_does_not_read_is_refused(name: str, field: str, value: float) -> None:
    with pytest.raises(SpecError, match=field):
        load_framework(name, overrides={field: value})


def test_states_of_deepspeed_are_given() -> None:
    with pytest.raises(SpecError, match="states_bytes_per_param"):
        load_framework("megatron-2022", overrides={"deepspeed": "zero1", "states_bytes_per_param": 8})


def test_a_host_s_speed_scales_all_that_it_does() -> None:
    """One op's time says how fast the host is; what is set beside it stays as it is set."""
    path = "gpu.curves.host."
    bundled = load_cluster("h200-hgx", 8).gpu.curves
    ratio = 4e-6 / bundled.host.eager_op_s.value
    set_ = load_cluster("h200-hgx", 8, {f"{path}eager_op_s": "4 us", f"{path}sync_s": "1 us"}).gpu.curves
    assert set_.host.eager_op_s.value == 4e-6 and set_.host.sync_s.value == 1e-6
    assert set_.host.function_s.value == pytest.approx(ratio * bundled.host.function_s.value, rel=1e-5)
    assert "set by the user" in set_.host.function_s.source
    assert bundled.hosts is not None and set_.hosts is None  # it stands for itself
    one = load_cluster("h200-hgx", 8, {f"{path}sync_s": "1 us"}).gpu.curves
    assert one.host.function_s == bundled.host.function_s and one.hosts is None
    other = load_cluster("h200-hgx", 8, {"gpu.memory_bandwidth_bytes_per_s": "5 TB/s"}).gpu.curves
    assert other.host == bundled.host and other.hosts == bundled.hosts
    both = {"gpu.memory_bandwidth_bytes_per_s": "5 TB/s", f"{path}eager_op_s": "4 us"}
    faster = load_cluster("h200-hgx", 8, both).gpu.curves
    assert faster.stream == other.stream != bundled.stream  # beside a datasheet's fact both count
    assert faster.host.function_s.value == set_.host.function_s.value
    for name, value, word in (("eager_op_s", "-4 us", "eager_op_s"), ("no_op_s", None, "no_op_s")):
        with pytest.raises(SpecError, match=word):
            load_cluster("h200-hgx", 8, {f"{path}eager_op_s": "3 us", f"{path}{name}": value})


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("gpu.curves.gemm", "write its entries, each by its name, which is one of bf16, fp8, fp32"),
        ("gpu.curves.gemm.bf16.form", "write its fields, which are tiles, k_overhead, floor_s"),
        ("gpu.curves.stream", "write its entries, each by its name"),
        ("gpu.peak_flops_per_s", "write its entries, each by its name, which is one of bf16"),
        ("node.nic", "write its fields, which are name, num_per_node"),
    ],
)
def test_what_a_mapping_holds_is_said_of_it_and_not_of_the_one_around_it(path: str, says: str) -> None:
    with pytest.raises(SpecError, match=re.escape(f"{path} (3) must be a mapping; {says}")):
        load_cluster("h100-hgx", 8, {path: 3})
