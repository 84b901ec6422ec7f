"""Process groups on nodes and domains: by hand, and against a count of every rank of every group."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mofa.cost.kernels.topology import (
    IntK,
    NodeSizes,
    fewest_ranks_per_node_or_domain,
    gpus_of_domain_used_by_job,
    process_groups,
)
from mofa.specs.framework_names import RANK_ORDERS, RankOrder

HGX = NodeSizes(gpus_per_node=8, gpus_per_domain=8)
NVL72 = NodeSizes(gpus_per_node=4, gpus_per_domain=72)


def counted(size: int, stride: int, block: int, world: int) -> int:
    """The slow twin: lay out every group, count its ranks in every block, take the fewest."""
    fewest = size
    for base in range(0, world, size * stride):
        for offset in range(stride):
            blocks = [(base + offset + i * stride) // block for i in range(size)]
            fewest = min(fewest, min(blocks.count(b) for b in set(blocks)))
    return fewest


def _array(value: int) -> IntK:
    return np.array([value], dtype=np.int64)


@given(
    size=st.integers(1, 24),
    stride=st.integers(1, 24),
    block=st.sampled_from([4, 8, 72]),
    repeats=st.integers(1, 3),
)
def test_fewest_ranks_equals_the_count_of_every_rank(size: int, stride: int, block: int, repeats: int) -> None:
    whole = np.lcm(size * stride, block) * repeats
    world = int(whole) if whole > block else block
    got = int(fewest_ranks_per_node_or_domain(_array(size), _array(stride), _array(block), _array(world))[0])
    twin = counted(size, stride, block, world) if world % (size * stride) == 0 else got
    assert got <= twin, "the closed form may only be on the slow side"
    if block % stride == 0 or stride >= block:
        assert got == twin


@given(
    tp=st.sampled_from([1, 2, 3, 4, 6, 8, 16]),
    cp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 3, 8]),
    dp=st.sampled_from([1, 2, 8, 12, 64]),
    ep=st.sampled_from([1, 2, 8, 32]),
    etp=st.sampled_from([1, 2, 8]),
)
def test_sizes_and_bounds_hold_for_every_group(tp: int, cp: int, pp: int, dp: int, ep: int, etp: int) -> None:
    for node in (HGX, NVL72):
        groups = process_groups(tp, cp, pp, dp, ep, etp, node)
        world = tp * cp * pp * dp
        assert int(groups["world"].size) == world
        assert int(groups["mp"].size) == tp * pp
        assert int(groups["edp"].size) == max(tp * cp * dp // (ep * etp), 1)
        for name, group in groups.items():
            assert 1 <= int(group.ranks_per_node) <= int(group.size), name
            assert int(group.ranks_per_node) <= node.gpus_per_node, name
            assert int(group.ranks_per_domain) <= node.gpus_per_domain, name
            assert bool(group.crosses_domains) == (int(group.num_domains) > 1), name


def test_columns_equal_scalars() -> None:
    columns = {
        "tp": [1, 2, 8, 4],
        "cp": [1, 4, 1, 2],
        "pp": [16, 1, 8, 2],
        "dp": [128, 8, 4, 12],
        "ep": [64, 8, 1, 4],
        "etp": [1, 1, 8, 2],
    }
    together = process_groups(**{name: np.array(c) for name, c in columns.items()}, node=HGX)
    for i in range(4):
        alone = process_groups(**{name: c[i] for name, c in columns.items()}, node=HGX)
        for name, group in alone.items():
            assert int(together[name].size[i]) == int(group.size), name
            assert int(together[name].ranks_per_domain[i]) == int(group.ranks_per_domain), name
            assert int(together[name].ranks_per_node[i]) == int(group.ranks_per_node), name


def test_llama3_405b_lies_as_its_paper_says() -> None:
    """TP 8 inside the node, CP 1, PP 16, DP 64 on 8192 H100 (arXiv 2407.21783, table 4): only tp stays inside."""
    groups = process_groups(8, 1, 16, 64, 1, 1, HGX)
    assert [int(groups[name].ranks_per_domain) for name in ("tp", "pp", "dp", "dp_cp")] == [8, 1, 1, 1]
    assert int(groups["world"].size) == 8192


def test_deepseek_v3_experts_span_eight_nodes() -> None:
    """PP 16, EP 64 "spanning 8 nodes", 2048 H800 (arXiv 2412.19437, section 3.2)."""
    groups = process_groups(1, 1, 16, 128, 64, 1, HGX)
    assert int(groups["ep"].num_domains) == 8
    assert int(groups["ep"].ranks_per_node) == 8
    assert int(groups["edp"].size) == 2
    assert int(groups["pp"].ranks_per_domain) == 1


def test_expert_groups_count_etp_then_ep() -> None:
    groups = process_groups(4, 1, 1, 16, 8, 2, HGX)
    assert int(groups["etp"].ranks_per_node) == 2
    assert int(groups["ep"].ranks_per_node) == 4
    assert int(groups["edp"].size) == 4
    assert int(groups["edp"].ranks_per_node) == 1


def test_an_nvl72_job_uses_64_of_72() -> None:
    groups = process_groups(8, 1, 1, 128, 64, 1, NVL72)
    assert int(groups["dp"].ranks_per_domain) == 8
    assert not bool(groups["ep"].crosses_domains)
    assert int(groups["tp"].ranks_per_node) == 4
    assert not bool(groups["tp"].crosses_domains)


@pytest.mark.parametrize(("world", "gpus"), [(8, 72), (72, 72), (144, 72), (128, 64), (1000, 40), (4 * 1009, 72)])
def test_domain_divides_the_job(world: int, gpus: int) -> None:
    assert int(gpus_of_domain_used_by_job(np.array(world), NVL72)) == gpus


def test_hybrid_sharding_shards_the_near_ranks() -> None:
    groups = process_groups(1, 1, 1, 16, 1, 1, HGX, dp_shard=8)
    assert (int(groups["dp_shard_cp"].size), int(groups["dp_shard_cp"].ranks_per_node)) == (8, 8)
    assert (int(groups["dp_replicate"].size), int(groups["dp_replicate"].ranks_per_node)) == (2, 1)
    assert (int(groups["edp_shard"].size), int(groups["edp_replicate"].size)) == (8, 2)


def test_a_job_smaller_than_a_node_stays_inside() -> None:
    for group in process_groups(2, 1, 1, 3, 1, 1, HGX).values():
        assert not bool(group.crosses_domains)


def test_sizes_that_do_not_divide_are_floored() -> None:
    assert int(process_groups(1, 1, 1, 2, 64, 8, HGX)["edp"].size) == 1


def laid_out(order: RankOrder, sizes: dict[str, int], names: set[str], block: int) -> tuple[int, int]:
    """The slow twin: the ranks as an array with an axis for each degree, the slowest first; a group is what varies
    along some axes. Its size, and its fewest ranks in any block that it touches."""
    axes = [name for name in reversed(order.split("-")) if name in sizes]
    ranks = np.arange(np.prod(list(sizes.values()))).reshape([sizes[axis] for axis in axes])
    along = [i for i, axis in enumerate(axes) if axis in names]
    groups = np.moveaxis(ranks, along, range(-len(along), 0)).reshape(-1, int(np.prod([sizes[n] for n in names])))
    fewest = min(int(np.unique(group // block, return_counts=True)[1].min()) for group in groups)
    return groups.shape[1], fewest


@pytest.mark.parametrize("order", RANK_ORDERS)
@pytest.mark.parametrize(
    ("tp", "cp", "pp", "dp", "ep", "etp"),
    [(1, 1, 4, 8, 1, 1), (2, 1, 2, 8, 2, 1), (2, 2, 4, 4, 2, 2), (4, 1, 8, 2, 1, 4), (8, 1, 4, 4, 4, 2),
     (1, 4, 2, 8, 4, 1), (16, 1, 2, 2, 8, 2)],
)  # fmt: skip
def test_groups_are_those_of_the_rank_order(
    order: RankOrder, tp: int, cp: int, pp: int, dp: int, ep: int, etp: int
) -> None:
    """Against Megatron's definition (parallel_state.py, RankGenerator), of both of its grids."""
    groups = process_groups(tp, cp, pp, dp, ep, etp, HGX, rank_order=order)
    dense = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    experts = {"tp": etp, "ep": ep, "dp": tp * cp * dp // (etp * ep), "pp": pp}
    wanted = {
        "tp": (dense, {"tp"}), "cp": (dense, {"cp"}), "dp": (dense, {"dp"}), "pp": (dense, {"pp"}),
        "tp_cp": (dense, {"tp", "cp"}), "dp_cp": (dense, {"dp", "cp"}), "tp_dp_cp": (dense, {"tp", "dp", "cp"}),
        "dp_shard_cp": (dense, {"dp", "cp"}), "mp": (dense, {"tp", "pp"}), "world": (dense, set(dense)),
        "etp": (experts, {"tp"}), "ep": (experts, {"ep"}), "edp": (experts, {"dp"}), "etp_ep": (experts, {"tp", "ep"}),
    }  # fmt: skip
    for name, (grid, axes) in wanted.items():
        size, fewest = laid_out(order, grid, axes, 8)
        assert (int(groups[name].size), int(groups[name].ranks_per_node)) == (size, fewest), name


def test_a_pipeline_before_data_parallelism_stays_near() -> None:
    near = process_groups(2, 1, 4, 8, 1, 1, HGX, rank_order="tp-cp-ep-pp-dp")
    assert not bool(near["pp"].crosses_domains) and int(near["dp"].ranks_per_node) == 1
    far = process_groups(2, 1, 4, 8, 1, 1, HGX)
    assert int(far["pp"].ranks_per_node) == 1 and int(far["dp"].ranks_per_node) == 4
    shards = process_groups(1, 1, 2, 16, 1, 1, HGX, dp_shard=4, rank_order="tp-cp-ep-pp-dp")
    assert [int(shards[name].ranks_per_node) for name in ("dp_shard_cp", "dp_replicate", "edp_shard")] == [4, 1, 4]
