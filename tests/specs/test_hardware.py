"""Hardware profiles: every file loads, every number says where it comes from, datasheet figures by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from mofa.calibrate.measurements import read_rows
from mofa.cost.kernels.compute import attention_s, gemm_s
from mofa.specs.base import Fact, Spec
from mofa.specs.curves import FittedCurve, MemoryBoundCurve
from mofa.specs.hardware import ClusterSpec, GpuSpec, NodeSpec
from mofa.specs.like_profiles import expanded_profile
from mofa.specs.load import load_cluster
from mofa.specs.products import FALLBACK
from mofa.specs.scaling import scaled_memory_bound_bytes_per_s
from mofa.units import GIB

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
PROFILES = Path(__file__).parents[2] / "hardware_profiles"
MEASURED_OR_SCALED = ("a100-80gb", "h100-sxm", "h200-sxm", "h800", "h20", "b200", "gb200")
LIKE = (
    "a100-40gb", "a100-pcie", "h100-pcie", "h100-nvl", "gh200", "l40s", "b300", "gb300", "mi300x", "mi325x", "mi355x",
)  # fmt: skip
"""GPUs whose files say what they are like."""
GPUS = (*MEASURED_OR_SCALED, *LIKE)
NODES = (
    "a100-hgx", "h100-hgx", "h200-hgx", "h800-hgx", "h20-hgx", "b200-hgx", "gb200-nvl72", "a100-40gb-hgx",
    "a100-pcie-pairs", "h100-pcie-pairs", "h100-nvl-pairs", "gh200", "l40s-pcie", "b300-hgx", "gb300-nvl72",
    "mi300x-oam", "mi325x-oam", "mi355x-oam",
)  # fmt: skip


def raw(kind: str, name: str) -> dict[str, Any]:
    data = yaml.load((PROFILES / kind / f"{name}.yaml").read_text(encoding="utf-8"), LOADER)  # noqa: S506
    assert isinstance(data, dict)
    return data


@cache
def gpu(name: str) -> GpuSpec:
    return GpuSpec.model_validate(expanded_profile("gpus", name))


@cache
def node(name: str) -> NodeSpec:
    return NodeSpec.model_validate(expanded_profile("nodes", name))


def facts(value: object, path: str = "") -> Iterator[tuple[str, Fact]]:
    if isinstance(value, Fact):
        yield path, value
    elif isinstance(value, Spec):
        for name in type(value).model_fields:
            yield from facts(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from facts(item, f"{path}.{name}")


def test_the_bundled_profiles_are_all_here() -> None:
    assert {p.stem for p in (PROFILES / "gpus").glob("*.yaml")} >= set(GPUS)
    assert {p.stem for p in (PROFILES / "nodes").glob("*.yaml")} >= set(NODES)


@pytest.mark.parametrize("path", sorted(PROFILES.glob("[gn]*/*.yaml")), ids=lambda p: p.stem)
def test_every_profile_loads_and_every_number_has_a_source(path: Path) -> None:
    spec = gpu(path.stem) if path.parent.name == "gpus" else node(path.stem)
    assert spec.name == path.stem
    found = list(facts(spec))
    assert len(found) > 10
    for where, fact in found:
        assert fact.value > 0 or where.endswith("latency_s"), where
        assert len(fact.source) > 10, where
    if isinstance(spec, GpuSpec):
        assert all(len(curve.source) > 10 for curve in curves_of(spec))


@pytest.mark.parametrize("name", NODES)
def test_a_node_names_a_bundled_gpu_and_makes_a_cluster(name: str) -> None:
    spec = node(name)
    cluster = ClusterSpec(name=name, gpu=gpu(spec.gpu), node=spec, num_gpus=spec.gpus_per_node * 2)
    assert cluster.nic_bandwidth_per_gpu_bytes_per_s <= spec.intra.bandwidth_bytes_per_s.value


@pytest.mark.parametrize("name", GPUS)
def test_curves_cover_the_formats_and_stay_under_the_peak(name: str) -> None:
    spec = gpu(name)
    curves, bandwidth = spec.curves, spec.memory_bandwidth_bytes_per_s.value
    kinds = set(curves.gemm)
    assert kinds - set(FALLBACK) == set(curves.grouped_gemm) == set(spec.peak_flops_per_s)
    assert kinds.intersection(FALLBACK) == set(curves.multi_stream).intersection(FALLBACK)
    for kind in kinds.intersection(FALLBACK):
        assert all(0 < rate < spec.peak_flops_per_s["fp8"].value for _, _, rate in curves.gemm[kind].form.tiles)
    for format_, peak in spec.peak_flops_per_s.items():
        assert all(0 < rate < peak.value for _, _, rate in curves.gemm[format_].form.tiles)
        assert curves.grouped_gemm[format_].form.large_rate < peak.value
        assert curves.gemm[format_].alone <= curves.gemm[format_].sustained <= 1
    assert {key.split()[0] for key in curves.attention} == {"cudnn", "flash", "flash1"}
    # a row's and a column's own cost make a rate a little faster than the datasheet's possible; caches far more
    # reads a row once per copy of its token, from the L2 but for the first; adds while a product's other tiles run
    cached = {"eager gather_copies", "te wgrad_add"}
    rates = {key: _rate_at_widest_row(key, curve) for key, curve in curves.stream.items()}
    assert all(0 < rate < (2.0 if key in cached else 1.1) * bandwidth for key, rate in rates.items())


def _rate_at_widest_row(key: str, curve: MemoryBoundCurve) -> float:
    """Rate over the widest row timed, on the H200 if not on this GPU: a row has a cost beside its bytes. [B/s]"""
    timed = curve if curve.ranges else gpu("h200-sxm").curves.stream.get(key, curve)
    form, (_, widest) = curve.form, timed.ranges.get("width", (0.0, 0.0))
    if not widest:
        return form.bytes_per_s
    moved = form.bytes_per_element * widest
    return moved / (moved / form.bytes_per_s + form.per_row_s)


def curves_of(spec: GpuSpec) -> Iterator[FittedCurve]:
    for family in (spec.curves.gemm, spec.curves.grouped_gemm, spec.curves.attention, spec.curves.stream):
        yield from family.values()


def test_what_is_measured_and_the_same_processor_takes_the_curves_over() -> None:
    kinds = {name: {curve.provenance for curve in curves_of(gpu(name))} for name in GPUS}
    assert all(kinds[name] == {"assumed"} for name in LIKE)
    # fp8 and fp32 experts are scaled, the first FlashAttention by the second's paper
    composed = {"extrapolated"}  # chains of kernels from each of them
    assert kinds["h200-sxm"] == {"measured", "interpolated", "assumed", "transferred"} | composed
    assert kinds["b200"] == {"measured", "assumed"}  # by others
    assert kinds["h100-sxm"] == kinds["h200-sxm"] - composed
    assert all(kinds[name] == {"transferred", "assumed"} for name in ("h800", "a100-80gb", "gb200"))
    assert kinds["h20"] == {"assumed"}
    h800, h100 = gpu("h800").curves, gpu("h100-sxm").curves
    assert h800.gemm["bf16"].form.tiles == h100.gemm["bf16"].form.tiles
    slower = h800.stream["eager mul"].form.bytes_per_s / h100.stream["eager mul"].form.bytes_per_s
    assert slower == pytest.approx(1.0, rel=1e-3)


def test_one_processor_with_two_memories_tells_how_memory_bound_kernels_are_carried_over() -> None:
    """H200 and H100 have 4.8 and 3.35 TB/s: the first's curves by bandwidth alone are far too slow on the second."""
    h200, h100 = (gpu(name).curves.stream for name in ("h200-sxm", "h100-sxm"))
    kernels = [key for key, curve in h100.items() if curve.provenance == "measured" and "h100" in curve.source]
    copy = h200["eager copy"].form.bytes_per_s

    def off(rate: Callable[[float], float]) -> list[float]:
        return [h100[key].form.bytes_per_s / rate(h200[key].form.bytes_per_s) - 1 for key in kernels]

    by_both = off(lambda r: scaled_memory_bound_bytes_per_s(r, copy, 3.35 / 4.8, 1.0))
    by_bandwidth = off(lambda r: r * 3.35 / 4.8)
    assert len(kernels) > 40
    assert median(map(abs, by_both)) < 0.045 < 0.09 < median(map(abs, by_bandwidth))
    assert abs(median(by_both)) < 0.02


def test_another_chips_attention_takes_the_time_of_its_peak() -> None:
    """The H20 has 78 of 132 multiprocessors and 148 of 989.4 TFLOP/s: a long sequence takes 6.7 times as long."""
    times = [
        float(attention_s(1, 32, 8, 65536, 65536 * 65537 / 2, 128, 128, gpu(name), backward=True))
        for name in ("h20", "h200-sxm")
    ]
    assert times[0] / times[1] == pytest.approx(989.4 / 148, rel=0.03)


def test_head_sizes_that_were_not_measured_take_the_nearest_kernel() -> None:
    curves = gpu("h200-sxm").curves
    (backend, way, d_qk, d_v), _ = curves.nearest_attention_curve(("cudnn", "fwd", 80, 80))
    assert (backend, way, d_qk, d_v) == ("cudnn", "fwd", 64, 64)
    assert curves.nearest_attention_curve(("cudnn", "bwd", 192, 128))[1] is curves.attention["cudnn bwd 192/128"]


def test_a_release_of_pytorch_that_was_measured_brings_its_own_products_and_no_other_does() -> None:
    """cuBLAS 12.1 and 13 in turn on one H100: 4.2 % more time of products from 200 us on, more of smaller ones."""
    machines = load_cluster("h100-hgx", 8)
    today, older = machines.gpu, machines.with_pytorch_release_kernels("2.1").gpu
    folders = [PROFILES.parent / "measurements" / name for name in ("h100-torch-2.1", "h100-torch-2.1-beside")]
    of_older, of_today = (
        {
            (row.case.op, *row.case.shape.values()): row.sample.median_s
            for row in read_rows(folder, families=["gemm"])
            if row.case.dtype == "bf16"
        }
        for folder in folders
    )
    long = [key for key in of_older.keys() & of_today.keys() if of_today[key] > 200e-6]
    assert len(long) > 400
    measured = np.median([of_older[key] / of_today[key] for key in long])
    m, n, k = np.array([key[1:] for key in long], dtype=float).T
    told = np.median(gemm_s(m, n, k, older) / gemm_s(m, n, k, today))
    assert measured == pytest.approx(1.042, abs=0.001) and told == pytest.approx(measured, abs=0.01)
    assert 1.15 < float(gemm_s(1024, 1024, 1024, older) / gemm_s(1024, 1024, 1024, today)) < 1.6
    assert older.curves.attention == today.curves.attention and older.curves.gemm["fp8"] == today.curves.gemm["fp8"]
    assert (
        machines.with_pytorch_release_kernels("") is machines
        and machines.with_pytorch_release_kernels("2.6") is machines
    )
    assert load_cluster("a100-hgx", 8).with_pytorch_release_kernels("2.1").gpu.curves.releases == {}


def test_older_products_change_with_the_facts_of_a_gpu() -> None:
    """Half the peak, half the rate, of today's products and of the older release's."""
    slow = load_cluster("h100-hgx", 8, overrides={"gpu.peak_flops_per_s.bf16": "494.7 TFLOP/s"}).gpu
    fast = load_cluster("h100-hgx", 8).gpu
    for of in (slow.curves.releases["2.1"], slow.curves):
        own = fast.curves.releases["2.1"] if of is not slow.curves else fast.curves
        rates = (of.gemm["bf16"].form.tiles[0][2], own.gemm["bf16"].form.tiles[0][2])
        assert rates[0] == pytest.approx(rates[1] / 2, rel=1e-4)


def test_a_curve_without_a_default_and_an_unknown_kernel_name_are_refused() -> None:
    data = raw("gpus", "h200-sxm")
    del data["curves"]["stream"]["default"]
    with pytest.raises(ValidationError, match="default"):
        GpuSpec.model_validate(data)
    data = raw("gpus", "h200-sxm")
    data["curves"]["attention"]["magic fwd 128/128"] = data["curves"]["attention"]["cudnn fwd 128/128"]
    with pytest.raises(ValidationError):
        GpuSpec.model_validate(data)


@pytest.mark.parametrize("name", GPUS)
def test_cuda_reports_a_little_less_than_the_datasheet(name: str) -> None:
    spec = gpu(name)
    assert 0.98 < spec.capacity_bytes.value / spec.memory_bytes.value < 1.0


def test_the_capacity_is_no_more_than_the_memory() -> None:
    data = raw("gpus", "h100-sxm")
    data["capacity_bytes"]["value"] = data["memory_bytes"]["value"]
    assert GpuSpec.model_validate(data).capacity_bytes.value == 80 * GIB
    data["capacity_bytes"]["value"] = "160 GiB"
    with pytest.raises(ValidationError, match=r"capacity_bytes \(160.00 GiB\) .* memory_bytes \(80.00 GiB\)"):
        GpuSpec.model_validate(data)


@pytest.mark.parametrize("name", NODES)
def test_efficiencies_are_marked_assumed_until_measured(name: str) -> None:
    spec = node(name)
    for fact in (spec.intra.efficiency, spec.nic.efficiency, spec.nvls_factor, spec.collective_startup_s):
        assert fact.provenance != "datasheet"


@pytest.mark.parametrize(
    ("name", "bf16_tflops", "fp8_tflops", "capacity_gib"),
    [
        ("a100-80gb", 312, None, 79.25),
        ("h100-sxm", 989.4, 1978.9, 79.10),
        ("h200-sxm", 989.4, 1978.9, 139.80),
        ("h800", 989.4, 1978.9, 79.32),
        ("h20", 148, 296, 95.33),
        ("b200", 2250, 4500, 178.35),
        ("gb200", 2500, 5000, 184.31),
        ("a100-40gb", 312, None, 39.49),
        ("a100-pcie", 312, None, 79.25),
        ("h100-pcie", 756.5, 1513, 79.10),
        ("h100-nvl", 835.5, 1670.5, 93.10),
        ("gh200", 989.4, 1978.9, 94.88),
        ("l40s", 362.05, 733, 44.42),
        ("b300", 2250, 4500, 267.69),
        ("gb300", 2500, 5000, 276.4),
        ("mi300x", 1307.4, 2614.9, 191.7),
        ("mi325x", 1307.4, 2614.9, 255.6),
        ("mi355x", 2516.6, 5033.2, 287.5),
    ],
)
def test_dense_peaks_and_capacity(name: str, bf16_tflops: float, fp8_tflops: float | None, capacity_gib: float) -> None:
    """NVIDIA's datasheets, sparse figures halved; capacity as CUDA reports it."""
    spec = gpu(name)
    assert spec.peak_flops_per_s["bf16"].value == pytest.approx(bf16_tflops * 1e12)
    assert ("fp8" in spec.peak_flops_per_s) == (fp8_tflops is not None)
    if fp8_tflops is not None:
        assert spec.peak_flops_per_s["fp8"].value == pytest.approx(fp8_tflops * 1e12)
    assert spec.capacity_bytes.value == pytest.approx(capacity_gib * GIB)


def test_capacity_without_a_run_takes_the_h200s_ratio() -> None:
    h200, h800 = gpu("h200-sxm"), gpu("h800")
    ratio = h200.capacity_bytes.value / h200.memory_bytes.value
    assert h800.capacity_bytes.value == pytest.approx(h800.memory_bytes.value * ratio, rel=1e-4)
    assert h800.capacity_bytes.provenance == "assumed"


@pytest.mark.parametrize(
    ("name", "link_gb_per_s", "nic_gb_per_s", "num_nics", "domain"),
    [
        ("a100-hgx", 300, 25, 8, 8),
        ("h100-hgx", 450, 50, 8, 8),
        ("h200-hgx", 450, 50, 8, 8),
        ("h800-hgx", 200, 50, 8, 8),
        ("h20-hgx", 450, 50, 8, 8),
        ("b200-hgx", 900, 50, 8, 8),
        ("gb200-nvl72", 900, 50, 4, 72),
        ("a100-pcie-pairs", 32, 25, 2, 8),
        ("h100-pcie-pairs", 64, 50, 2, 8),
        ("l40s-pcie", 32, 25, 2, 8),
        ("gh200", 450, 50, 1, 1),
        ("b300-hgx", 900, 100, 8, 8),
        ("gb300-nvl72", 900, 100, 4, 72),
        ("mi300x-oam", 448, 50, 8, 8),
        ("mi355x-oam", 537.6, 50, 8, 8),
    ],
)
def test_links_are_per_gpu_and_direction(
    name: str, link_gb_per_s: float, nic_gb_per_s: float, num_nics: int, domain: int
) -> None:
    """NVLink 600 | 900 | 400 | 1800 GB/s both ways on the datasheets, halved; InfiniBand ports of 200 and 400 Gb/s."""
    spec = node(name)
    assert spec.intra.bandwidth_bytes_per_s.value == pytest.approx(link_gb_per_s * 1e9)
    source = spec.intra.bandwidth_bytes_per_s.source
    assert "halved" in source or "a direction" in source, source
    assert spec.nic.bandwidth_bytes_per_s.value == pytest.approx(nic_gb_per_s * 1e9)
    assert spec.nic.num_per_node == num_nics
    assert spec.gpus_per_domain == domain


def test_no_reduction_in_the_switch_before_hopper() -> None:
    assert node("a100-hgx").nvls_factor.value == 1.0
    assert node("h100-hgx").nvls_factor.value > 1.0


def test_a_domain_must_hold_whole_nodes() -> None:
    data = raw("nodes", "gb200-nvl72") | {"gpus_per_domain": 70}
    with pytest.raises(ValidationError, match=r"gpus_per_domain \(70\) must be a multiple of gpus_per_node \(4\)"):
        NodeSpec.model_validate(data)


def test_more_than_one_node_must_be_whole_nodes() -> None:
    spec = node("h100-hgx")
    with pytest.raises(ValidationError, match="use 8 or 16"):
        ClusterSpec(name="x", gpu=gpu("h100-sxm"), node=spec, num_gpus=12)


def test_a_misspelt_key_and_a_bare_number_are_refused() -> None:
    with pytest.raises(ValidationError):
        NodeSpec.model_validate(raw("nodes", "h100-hgx") | {"gpu_per_node": 8})
    data = raw("gpus", "h100-sxm")
    data["tdp_w"] = {**data["tdp_w"], "value": 700}
    with pytest.raises(ValidationError, match="has no unit"):
        GpuSpec.model_validate(data)


def test_another_release_s_products_are_its_own() -> None:
    """Also where the profile's own were asked for before: what was looked up of them is not handed on."""
    curves = load_cluster("h100-hgx", 8).gpu.curves
    assert curves.gemm_curve("bf16") == curves.gemm["bf16"]
    release, kernels = next(iter(curves.releases.items()))
    assert kernels.gemm["bf16"] != curves.gemm["bf16"]
    assert curves.with_pytorch_release_kernels(release).gemm_curve("bf16") == kernels.gemm["bf16"]


@pytest.mark.parametrize(("name", "provenance"), [("mine", "transferred"), ("h100-hgx", "measured")])
def test_what_was_measured_on_a_bundled_machine_is_transferred_to_a_copy(
    tmp_path: Path, name: str, provenance: str
) -> None:
    """A copied node says ``measured`` of another's links; under the bundled one's name it is that node."""
    text = (PROFILES / "nodes" / "h100-hgx.yaml").read_text(encoding="utf-8")
    path = tmp_path / "node.yaml"
    path.write_text(text.replace("name: h100-hgx", f"name: {name}", 1), encoding="utf-8")
    copied, own = load_cluster(path, 8), load_cluster("h100-hgx", 8)
    assert copied.node.intra.latency_s.provenance == provenance
    assert copied.node.intra.latency_s.value == own.node.intra.latency_s.value
    assert copied.gpu.curves.gemm["bf16"].provenance == "measured"
    path.write_text(text.replace("name: h100-hgx", "name: mine", 1).replace("1.48 us", "2 us"), encoding="utf-8")
    assert load_cluster(path, 8).node.intra.latency_s.provenance == "transferred"
