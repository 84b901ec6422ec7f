"""Bridges, shared PCIe links, meshes and tiers: collectives by hand, and in nodes as their files have them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mofa
from mofa.cost.kernels.collectives import Fabric, all_to_all_time, collective_s
from mofa.cost.kernels.topology import ProcessGroup, process_groups
from mofa.errors import SpecError
from mofa.specs.hardware import ClusterSpec
from mofa.specs.load import load_cluster

GB = 1e9


def of_node(text: str, folder: Path, gpus: int = 8) -> ClusterSpec:
    path = folder / "node.yaml"
    path.write_text(f"name: x\nsource: a test\n{text}", encoding="utf-8")
    return load_cluster(path, gpus)


def groups(cluster: ClusterSpec, tp: int) -> dict[str, ProcessGroup]:
    return process_groups(tp, 1, 1, cluster.num_gpus // tp, 1, 1, cluster.node)


def all_gather_s(cluster: ClusterSpec, group: ProcessGroup) -> float:
    return float(collective_s("all_gather", 8 * GB, group, cluster))


def test_pairs_take_their_bridge_and_rings_beyond_leave_them_once() -> None:
    cluster = load_cluster("a100-pcie-pairs", 8)
    fabric = Fabric.from_cluster(cluster)
    assert fabric.bridge is not None
    pair, four = (groups(cluster, tp)["tp"] for tp in (2, 4))
    bridge, card = 0.77 * 300 * GB, 0.55 * 32 * GB
    assert all_gather_s(cluster, pair) == pytest.approx(4 * GB / bridge, rel=1e-2)
    # 6 GB a rank, out of a pair by two cards
    assert all_gather_s(cluster, four) == pytest.approx(6 * GB / (2 * card), rel=1e-2)


def test_a_switch_s_uplink_is_shared_by_the_groups_that_cross_it() -> None:
    """Each half of an L40S node has one uplink: a group of 8 crosses it once, four groups of two four times."""
    cluster = load_cluster("l40s-pcie", 8)
    inside, whole = (groups(cluster, tp)["tp"] for tp in (4, 8))
    across = groups(cluster, 4)["dp"]  # ranks 0 and 4, 1 and 5, ...
    card = 0.55 * 32 * GB
    assert all_gather_s(cluster, inside) == pytest.approx(6 * GB / card, rel=1e-2)
    assert all_gather_s(cluster, whole) == pytest.approx(7 * GB / card, rel=1e-2)
    assert all_gather_s(cluster, across) == pytest.approx(4 * 4 * GB / card, rel=1e-2)
    all_to_all = float(collective_s("all_to_all", 8 * GB, whole, cluster))
    assert all_to_all == pytest.approx(4 * GB / (0.5 * 32 * GB / 4), rel=1e-2)  # half of what four cards send


def test_two_gpus_of_a_mesh_have_one_link_of_seven() -> None:
    cluster = load_cluster("mi300x-oam", 8)
    times = [all_gather_s(cluster, groups(cluster, tp)["tp"]) for tp in (2, 8)]
    assert times[0] == pytest.approx(4 * GB / (0.7 * 64 * GB), rel=1e-2)
    assert times[1] == pytest.approx(7 * GB / (0.7 * 448 * GB), rel=1e-2)


TIERS = """like: h100-hgx
nic:
  tiers:
  - {name: leaf, gpus: 64, oversubscription: 32}
  - {name: spine, gpus: 256, oversubscription: 8}
"""


@pytest.mark.parametrize(("gpus", "slower"), [(64, 1.0), (128, 32 / 8), (512, 256 / 32)])
def test_a_group_crosses_the_tiers_that_its_ranks_span(tmp_path: Path, gpus: int, slower: float) -> None:
    """A group has a rank a node: within a leaf its NIC; beyond, a 32nd of what its 8 NICs there carry; above the spine,
    a 256th of what its 32 do."""
    tiered, flat = of_node(TIERS, tmp_path, gpus), load_cluster("h100-hgx", gpus)
    times = [float(collective_s("all_gather", 8 * GB, groups(c, 8)["dp"], c)) for c in (tiered, flat)]
    assert times[0] / times[1] == pytest.approx(slower, rel=0.01)


def test_what_leaves_a_tier_in_an_all_to_all_has_its_share(tmp_path: Path) -> None:
    tiered, flat = of_node(TIERS, tmp_path, 128), load_cluster("h100-hgx", 128)
    world = process_groups(1, 1, 1, 128, 128, 1, tiered.node)["ep"]
    times = [float(collective_s("all_to_all", 8 * GB, world, c)) for c in (tiered, flat)]
    # 64 of 128 peers at a 32nd of the rate, where 120 have the NIC's
    assert times[0] / times[1] == pytest.approx(32.0 * 64 / 120, rel=0.02)


def test_rails_are_reached_over_the_fast_link(tmp_path: Path) -> None:
    fabric = Fabric.from_cluster(of_node("like: h100-hgx\nnic: {rail_optimised: true}\n", tmp_path, 16))
    assert fabric.relays and not Fabric.from_cluster(load_cluster("h100-hgx", 16)).relays
    group = process_groups(1, 1, 1, 16, 16, 1, load_cluster("h100-hgx", 16).node)["ep"]
    relayed, direct = (
        all_to_all_time(8 * GB, group, f) for f in (fabric, Fabric.from_cluster(load_cluster("h100-hgx", 16)))
    )
    assert float(relayed.intra_s) == pytest.approx(float(direct.intra_s) * 2.0, rel=1e-6)  # 7 + 8 x 7/8 parts
    assert float(relayed.inter_s) == float(direct.inter_s)


def test_a_node_of_one_gpu_has_no_link_inside() -> None:
    cluster = load_cluster("gh200", 4)
    group = groups(cluster, 1)["dp"]
    assert int(group.ranks_per_domain) == 1 and bool(np.all(group.crosses_domains))


@pytest.mark.parametrize(("node", "strategy"), [("a100-pcie-pairs", "tp=4 pp=2"), ("mi300x-oam", "tp=2 ep=4 etp=1")])
def test_a_step_is_played_as_it_is_costed(node: str, strategy: str) -> None:
    """Closed form and replay read one network."""
    model = "llama3-8b" if "ep" not in strategy else "qwen3-30b-a3b"
    job = mofa.load_workload(model, global_batch=32, overrides={"model.num_layers": 4})
    steps = [
        mofa.estimate(job, load_cluster(node, 16), f"{strategy} micro_batch=1", replay=replay).step_s
        for replay in (False, True)
    ]
    assert steps[0] == pytest.approx(steps[1], rel=0.05)


def test_what_does_not_run_on_rocm_is_refused_by_name() -> None:
    job = mofa.load_workload("llama3-8b")
    with pytest.raises(SpecError, match="mi300x: megatron-2022 does not run on ROCm; use one of fsdp1, megatron"):
        mofa.estimate(job, load_cluster("mi300x-oam", 8), "tp=2", framework=mofa.load_framework("megatron-2022"))


def test_fp8_by_blocks_is_refused_on_ada() -> None:
    job = mofa.load_workload("llama3-8b", overrides={"precision.gemm": "fp8-blockwise"})
    with pytest.raises(SpecError, match="l40s: Transformer Engine has no fp8-blockwise there; use fp8-delayed or"):
        mofa.estimate(job, load_cluster("l40s-pcie", 8), "tp=2")
