"""NCCL's collectives over several domains: by hand, against public measurements, and beside those inside a node."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mofa.blocks.work import CollectiveKind
from mofa.cost.kernels.between_nodes import (
    GroupSpan,
    NcclProtocolConstants,
    NcclTimeConstants,
    channels_per_peer,
    nvls_tree_all_reduce_s,
    ring_collective_s,
)
from mofa.cost.kernels.collectives import Fabric, collective_s
from mofa.cost.kernels.topology import ProcessGroup
from mofa.specs.load import load_cluster
from scripts.fit_nccl import LEAST_BYTES, points, score, summary, written_value

SIZES = 2.0 ** np.arange(12, 33)
KINDS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def group(ranks: int, per_domain: int) -> ProcessGroup:
    inside = np.full(len(SIZES), per_domain)
    return ProcessGroup(np.full(len(SIZES), ranks), inside, inside)


def times(kind: CollectiveKind, node: str, ranks: int, per_domain: int) -> NDArray[np.float64]:
    """Of messages of 4 KiB to 4 GiB. [s]"""
    cluster = load_cluster(node, max(ranks, 8))
    return collective_s(kind, SIZES, group(ranks, per_domain), Fabric.from_cluster(cluster))


@pytest.mark.parametrize("node", ["h100-hgx", "h200-hgx", "h800-hgx", "b200-hgx", "a100-hgx"])
@pytest.mark.parametrize("kind", KINDS)
def test_leaving_a_node_is_no_faster_than_staying(kind: CollectiveKind, node: str) -> None:
    """16 ranks of two nodes, of which each sends as much as 8 of one: it was up to a fifth faster for 4 to 32 MiB."""
    assert (times(kind, node, 16, 8) >= times(kind, node, 8, 8)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_more_nodes_and_more_bytes_take_longer(kind: CollectiveKind) -> None:
    few, many, most = (times(kind, "h100-hgx", 8 * nodes, 8) for nodes in (2, 8, 64))
    assert (np.diff(few) > 0).all()
    assert (few < many).all() and (many < most).all()


def test_a_ring_by_hand() -> None:
    """LL: 7 hops of 1 us inside and one of 3 + 2 us between, 100 us of bytes at a quarter of the rate; Simple: 7 of
    4 us and one of 3 + 10, all of the rate. Twice for an all-reduce."""
    two = NcclTimeConstants(
        5e-6, (NcclProtocolConstants(1e-6, 2e-6, 0.0, 0.25, 1.0), NcclProtocolConstants(4e-6, 10e-6, 0.0, 1.0, 1.0))
    )
    span = GroupSpan(np.array([9, 9]), np.array([2, 2]), 0.0, 3e-6)
    loads = np.array([1e-6, 100e-6])
    assert ring_collective_s(loads, 1, span, two) == pytest.approx(
        [5e-6 + 7e-6 + 5e-6 + 4e-6, 5e-6 + 28e-6 + 13e-6 + 100e-6]
    )
    assert ring_collective_s(loads, 2, span, two)[0] == pytest.approx(5e-6 + 2 * 12e-6 + 4e-6)


def test_two_domains_send_half_of_what_a_ring_does() -> None:
    span = GroupSpan(np.array([16, 32]), np.array([2, 4]), 0.0, 0.0)
    assert nvls_tree_all_reduce_s(
        np.array([1.0, 1.0]), np.array([4.0, 4.0]), span, NcclTimeConstants()
    ) == pytest.approx([2.0, 4.0])


def test_stages_of_deep_pipelines_have_one_channel() -> None:
    """Half the rate of a port of 400 Gbit/s, as measured between ten nodes."""
    assert list(channels_per_peer(np.array([2, 8, 9, 16]), np.array([1, 1, 1, 1]))) == [2, 2, 1, 1]
    shallow, deep = (times("send_recv", "h100-hgx", stages, 1)[-1] for stages in (8, 16))
    assert deep / shallow == pytest.approx(0.949 * 50e9 / 25e9, rel=0.01)


def test_the_half_that_was_not_fitted() -> None:
    """Public points of 2 to 32 nodes: the medians and nine in ten of the absolute errors that the page tells."""
    scored = score(points(), written_value())
    assert (scored.size_bytes >= LEAST_BYTES).all()
    judged = scored[scored.split == "judging"].error.abs()
    assert len(judged) > 500
    assert judged.median() < 0.10 and judged.quantile(0.9) < 0.35
    table = summary(scored)
    page = Path("docs/evidence/collectives_between_nodes.md").read_text(encoding="utf-8")
    for kind in ("all_gather", "all_reduce", "alltoall", "reduce_scatter"):
        row = table.loc[("judging", "all", kind)]
        said = f"| {kind} | {row.points:.0f} | {row['median']:.1f} % | {row['nine in ten']:.1f} % | {row.bias:+.1f} % |"
        assert said in page
