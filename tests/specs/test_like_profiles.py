"""GPUs and nodes that are like another: what is taken over, rescaled and marked, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mofa.errors import SpecError
from mofa.specs.copied_facts import bundled_profile_mapping
from mofa.specs.hardware import GpuSpec
from mofa.specs.like_profiles import expand_like, expanded_profile
from mofa.specs.load import load_cluster
from mofa.specs.profiles import load_gpu

HALF = {"bf16": "494.7 TFLOP/s", "fp8": "989.45 TFLOP/s", "fp32": "33.45 TFLOP/s"}
FACT = {"provenance": "datasheet", "source": "a datasheet"}


def written(folder: Path, name: str, content: dict[str, Any]) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"name": name, **content}), encoding="utf-8")
    return str(path)


def copied(folder: Path, **changes: Any) -> str:
    """A copy of the H100's file under another name, with other facts."""
    return written(folder, "copy", {**bundled_profile_mapping("gpus", "h100-sxm"), "name": "copy", **changes})


def best(gpu: GpuSpec, format_: Any = "bf16") -> float:
    return max(rate for _, _, rate in gpu.curves.gemm[format_].form.tiles)


def test_curves_go_by_peaks_and_bandwidth_and_are_assumed(tmp_path: Path) -> None:
    said = {
        "like": "h100-sxm",
        "source": "a datasheet",
        "peak_flops_per_s": HALF,
        "memory_bandwidth_bytes_per_s": "1.675 TB/s",
    }
    gpu, h100 = load_gpu(written(tmp_path, "half", said)), load_gpu("h100-sxm")
    assert best(gpu) == pytest.approx(best(h100) / 2, rel=1e-4)
    copy, whole = (g.curves.stream["eager copy"].form.bytes_per_s for g in (gpu, h100))
    assert copy == pytest.approx(whole / 2, rel=1e-4)
    assert {curve.provenance for curve in gpu.curves.gemm.values()} == {"assumed"}
    assert gpu.memory_bandwidth_bytes_per_s.provenance == "datasheet"
    assert gpu.num_sms.provenance == "transferred" and "h100-sxm's" in gpu.num_sms.source
    assert gpu.curves.gemm["bf16"].clock == 0.9778  # sqrt(2) x 0.69141: the same power for half the draw


def test_more_memory_alone_leaves_the_curves_transferred(tmp_path: Path) -> None:
    path = written(tmp_path, "big", {"like": "h100-sxm", "source": "a datasheet", "memory_bytes": "96 GiB"})
    gpu, h100 = load_gpu(path), load_gpu("h100-sxm")
    assert gpu.curves.gemm["bf16"].form == h100.curves.gemm["bf16"].form
    assert gpu.curves.gemm["bf16"].provenance == "transferred"
    assert gpu.memory_bytes.value == 96 * 2**30


def test_more_memory_takes_the_capacity_along(tmp_path: Path) -> None:
    """A GPU of twice the memory that left its capacity out had that of the smaller one."""
    h100, memory = load_gpu("h100-sxm"), {"like": "h100-sxm", "source": "a datasheet", "memory_bytes": "96 GiB"}
    gpu = load_gpu(written(tmp_path, "big", memory))
    assert gpu.capacity_bytes.value == pytest.approx(h100.capacity_bytes.value * 96 / 80, rel=1e-5)
    assert gpu.capacity_bytes.provenance == "assumed"
    own = load_gpu(written(tmp_path, "own", {**memory, "capacity_bytes": "90 GiB"}))
    assert own.capacity_bytes.value == 90 * 2**30
    same = load_gpu(written(tmp_path, "same", {"like": "h100-sxm", "source": "a datasheet"}))
    assert same.capacity_bytes.value == h100.capacity_bytes.value
    with pytest.raises(SpecError, match="memory_bytes"):
        load_gpu(written(tmp_path, "odd", {**memory, "memory_bytes": "much"}))


def test_what_was_measured_on_both_counts_in_place_of_peaks_and_power(tmp_path: Path) -> None:
    rate = {"bf16": {"value": 0.7, "provenance": "transferred", "source": "one program on both"}}
    said = {"like": "h100-sxm", "source": "a datasheet", "tdp_w": "350 W", "rates_over_like": rate}
    gpu, h100 = load_gpu(written(tmp_path, "card", said)), load_gpu("h100-sxm")
    assert best(gpu) == pytest.approx(0.7 * best(h100), rel=1e-4)
    assert gpu.curves.gemm["bf16"].clock == h100.curves.gemm["bf16"].clock
    assert gpu.curves.gemm["fp8"].clock < h100.curves.gemm["fp8"].clock  # half the power, and nobody measured fp8


def test_a_format_that_the_gpu_has_not_goes(tmp_path: Path) -> None:
    said = {"like": "h100-sxm", "source": "a datasheet", "peak_flops_per_s": {**HALF, "fp8": None}}
    gpu = load_gpu(written(tmp_path, "old", said))
    assert set(gpu.peak_flops_per_s) == {"bf16", "fp32"} == set(gpu.curves.gemm) == set(gpu.curves.grouped_gemm)


def test_own_curves_stay(tmp_path: Path) -> None:
    own = {**bundled_profile_mapping("gpus", "h100-sxm")["curves"]["gemm"]["fp32"], "source": "own measurements"}
    said = {"like": "h100-sxm", "source": "a datasheet", "tdp_w": "350 W", "curves": {"gemm": {"fp32": own}}}
    gpu = load_gpu(written(tmp_path, "mine", said))
    assert gpu.curves.gemm["fp32"].provenance == "measured" and gpu.curves.gemm["bf16"].provenance == "assumed"


def test_a_copy_with_another_peak_is_not_the_old_gpu(tmp_path: Path) -> None:
    peaks = {format_: {"value": value, **FACT} for format_, value in HALF.items()}
    gpu, h100 = load_gpu(copied(tmp_path, peak_flops_per_s=peaks)), load_gpu("h100-sxm")
    assert best(gpu) == pytest.approx(best(h100) / 2, rel=1e-4)
    assert {c.provenance for c in gpu.curves.gemm.values()} == {"assumed"}
    same = load_gpu(copied(tmp_path))
    assert best(same) == best(h100) and same.curves.gemm["bf16"].provenance == "transferred"


def test_so_is_one_under_the_old_name(tmp_path: Path) -> None:
    raw = bundled_profile_mapping("gpus", "h100-sxm")
    path = tmp_path / "h100-sxm.yaml"
    path.write_text(yaml.safe_dump({**raw, "memory_bandwidth_bytes_per_s": {"value": "1.675 TB/s", **FACT}}))
    copy, whole = (load_gpu(p).curves.stream["eager copy"].form.bytes_per_s for p in (path, "h100-sxm"))
    assert copy == pytest.approx(whole / 2, rel=1e-4)


def test_a_curve_above_its_peak_is_refused_and_one_far_below_is_doubted(tmp_path: Path) -> None:
    raw = bundled_profile_mapping("gpus", "h100-sxm")
    gemm = raw["curves"]["gemm"]["bf16"]
    for factor, says in ((2.0, "curves.gemm.bf16 reaches"), (0.1, "less than a tenth of peak_flops_per_s.bf16")):
        tiles = [[rows, columns, factor * rate] for rows, columns, rate in gemm["form"]["tiles"]]
        own = {**gemm, "form": {**gemm["form"], "tiles": tiles}}
        curves = {**raw["curves"], "gemm": {**raw["curves"]["gemm"], "bf16": own}}
        path = copied(tmp_path, curves=curves)
        if factor > 1.0:
            with pytest.raises(SpecError, match=rf"{says} .* above peak_flops_per_s.bf16 \(989.4 TFLOP/s\); correct"):
                load_gpu(path)
        else:
            assert [doubt for doubt in load_gpu(path).slow_curve_notes if says in doubt]
    assert load_gpu("h100-sxm").slow_curve_notes == ()


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"like": "h100-sxn"}, "like (h100-sxn) is no bundled profile; did you mean"),
        ({"like": 3}, "like (3) must be text"),
        ({"like": "h100-sxm", "tdp_w": "350 W"}, "tdp_w (350 W) is a value alone; add a line source:"),
        ({"like": "h100-sxm", "source": "a sheet", "peak_flops_per_s": {"bf16": "1 TFLOP/s"}}, "flops_per_s.fp8, "),
        ({"like": "h100-sxm", "rates_over_like": {"int8": 3}}, "rates_over_like.int8"),
        ({"like": "h100-sxm", "source": "a sheet", "tdp_w": "???"}, "tdp_w: still ???"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(tmp_path: Path, said: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as error:
        load_gpu(written(tmp_path, "mine", said))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_gpu_needs_a_name_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("like: h100-sxm\n")
    with pytest.raises(SpecError, match="name is missing"):
        load_gpu(path)


def test_a_nodes_collectives_go_by_its_link() -> None:
    said = {"name": "slow", "like": "h100-hgx", "source": "a sheet", "intra": {"bandwidth_bytes_per_s": "225 GB/s"}}
    slow, h100 = expand_like(said, "nodes", "x.yaml"), expanded_profile("nodes", "h100-hgx")
    forms = [node["collectives"]["all_gather 8"] for node in (slow, h100)]
    assert forms[0]["form"]["protocols"][-1][1] == pytest.approx(forms[1]["form"]["protocols"][-1][1] / 2, rel=1e-4)
    assert forms[0]["provenance"] == "assumed"
    assert slow["intra"]["latency_s"]["provenance"] == "transferred"


def test_a_smaller_node_is_a_smaller_domain(tmp_path: Path) -> None:
    said = {"like": "h100-hgx", "source": "a sheet", "gpus_per_node": 4, "nic": {"num_per_node": 4}}
    node = load_cluster(written(tmp_path, "four", said), 8).node
    assert (node.gpus_per_node, node.gpus_per_domain, node.nic.num_per_node) == (4, 4, 4)


def test_a_gpu_beside_its_node_is_read(tmp_path: Path) -> None:
    written(tmp_path, "mine", {"like": "h100-sxm", "source": "a sheet", "memory_bytes": "96 GiB"})
    node = written(tmp_path, "node", {"like": "h100-hgx", "gpu": "mine"})
    cluster = load_cluster(node, 16)
    assert cluster.gpu.name == "mine" and cluster.node.name == "node" and cluster.node.gpus_per_node == 8
    slower = load_cluster(node, 16, {"gpu.peak_flops_per_s.bf16": "494.7 TFLOP/s"})
    assert best(slower.gpu) == pytest.approx(best(cluster.gpu) / 2, rel=1e-4)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"nic": {"tiers": [{"name": "leaf", "gpus": 12, "oversubscription": 1}]}}, "nic.tiers[0].gpus (12) must be"),
        ({"shared": [{"name": "switch", "gpus": 3, "bandwidth_bytes_per_s": "9 GB/s"}]}, "of shared[0].gpus (3)"),
        ({"gpus_per_node": 4}, "nic.num_per_node: missing beside gpus_per_node (4), and h100-hgx has 8 for 8 GPUs"),
        ({"nic": {"protocol": "token ring"}}, "must be infiniband, roce or ethernet"),
    ],
)  # fmt: skip
def test_parts_that_do_not_nest_are_refused(tmp_path: Path, said: dict[str, Any], says: str) -> None:
    path = written(tmp_path, "node", {"like": "h100-hgx", "source": "a sheet", **said})
    with pytest.raises(SpecError) as error:
        load_cluster(path, 8)
    assert says in str(error.value) and "\n" not in str(error.value)
