"""Fit NCCL's times between nodes to the fitting half of public measurements, and score them on the other half.

python scripts/fit_nccl.py           # writes hardware_profiles/nccl.yaml and prints the latencies of networks
python scripts/fit_nccl.py --check   # scores what is written

The points are in reference_runs/collectives/between_nodes.csv. Whole series (a source's table of one collective on one
number of nodes) are dealt to the halves, in turn by a hash, within network, GPU and collective.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray
from scipy.optimize import least_squares

from mofa.blocks.work import CollectiveKind
from mofa.cost.kernels.between_nodes import NcclProtocolConstants, NcclTimeConstants
from mofa.cost.kernels.collectives import Fabric, collective_time
from mofa.cost.kernels.topology import ProcessGroup
from mofa.specs.load import load_cluster
from mofa.specs.nccl import load_nccl_facts

ROOT = Path(__file__).resolve().parent.parent
POINTS = ROOT / "reference_runs" / "collectives" / "between_nodes.csv"
TARGET = ROOT / "hardware_profiles" / "nccl.yaml"
NODES = {"A100": "a100-hgx", "H100": "h100-hgx", "H200": "h200-hgx", "B200": "b200-hgx"}
"""Whose links inside a node the points' GPUs have."""
NETWORKS = ("ib", "roce", "roce-gib", "efa", "tcpxo")
KINDS: dict[str, CollectiveKind] = {
    "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
}  # fmt: skip
LEAST_BYTES = 16 * 1024
"""Smaller messages take what their launch takes. [B]"""
FloatN = NDArray[np.float64]

CHANNEL_BYTES_PER_S = 25.0e9
CHANNEL_SOURCE = (
    "sends between 10 nodes of 1, 2 and 4 H100, one channel a peer: 24.9, 25.2 and 26.3 GB/s (NCCL 2.28.7, "
    "reference_runs/collectives/between_nodes.csv)"
)
HEAD = """# What NCCL's collectives take between nodes, whatever the network (mofa/cost/kernels/between_nodes.py).
# Written by scripts/fit_nccl.py; how far off it is: docs/evidence/collectives_between_nodes.md.
"""
FIRST = {
    "start": 15e-6,
    "LL step": 1e-6, "LL ring share": 0.06, "LL tree share": 0.06,
    "LL128 step": 1.9e-6, "LL128 hop": 1.3e-6, "LL128 tree hop": 3.5e-6, "LL128 ring share": 0.92,
    "LL128 tree share": 0.46,
    "Simple step": 3.4e-6, "Simple hop": 11.3e-6, "Simple tree hop": 9e-6, "Simple tree share": 0.5,
    "nvls start": 25e-6, "nvls hop": 16e-6, "peer": 5e-6,
    "latency ib": 3e-6, "latency roce": 4e-6, "latency roce-gib": 12e-6, "latency efa": 30e-6, "latency tcpxo": 40e-6,
    "share ib": 0.95, "share roce": 0.95, "share roce-gib": 0.85, "share efa": 0.85, "share tcpxo": 0.9,
    "all-to-all ib": 0.88, "all-to-all efa": 0.8,
}  # fmt: skip
"""Where the fit begins: NCCL's own constants (src/graph/tuning.cc of 2.30), and what networks are said to reach. The
fit is drawn to them, weakly."""
MOST = {"ring share": 1.0, "tree share": 1.0, "hop": 40e-6, **dict.fromkeys(NETWORKS, 1.0)}
"""What a parameter is at most, by the end of its name: no share is over one. A latency is far below. [-], [s]"""
DRAW = 0.05
"""Weight of a factor of e away from where the fit begins, over that of an error of as much in one series. [-]"""


@dataclass(frozen=True)
class Batch:
    """Points of one collective on one kind of GPU and network whose nodes have one rate."""

    kind: CollectiveKind
    network: str
    fabric: Fabric
    group: ProcessGroup
    payload_bytes: FloatN
    measured_s: FloatN
    weight: FloatN
    node_bytes_per_s: float
    ranks_per_node: int
    rows: NDArray[np.intp]


@cache
def fabric_of(gpu: str) -> Fabric:
    """The links of a node of such GPUs."""
    return Fabric.from_cluster(load_cluster(NODES[gpu], 8))


def points() -> pd.DataFrame:
    """The points that the model is for, NCCL's own choices of algorithm and protocol."""
    table = pd.read_csv(POINTS)
    chosen = table.forced_algorithm.isna() & table.forced_protocol.isna() & (table.size_bytes >= LEAST_BYTES)
    known = table.network.isin(NETWORKS) & table.collective.isin(list(KINDS)) & table.gpu.isin(list(NODES))
    return table[chosen & known].reset_index(drop=True)


def batches(table: pd.DataFrame) -> Iterator[Batch]:
    """The points in batches; a series weighs as much as another, whatever its number of sizes."""
    table = table.assign(ranks_per_node=table.ranks // table.nodes)
    series = ["source", "nodes", "ranks", "collective", "nccl_version"]
    weight = 1.0 / np.sqrt(table.groupby(series, dropna=False).size_bytes.transform("size"))
    alike = ["collective", "gpu", "network", "node_GBps", "ranks_per_node"]
    for _, part in table.groupby(alike):
        collective, gpu, network, rate, per_node = part[alike].iloc[0]
        ranks = part.ranks.to_numpy()
        inside = np.full_like(ranks, per_node)
        yield Batch(
            KINDS[collective], network, fabric_of(gpu), ProcessGroup(ranks, inside, inside),
            part.size_bytes.to_numpy(dtype=float), part.time_us.to_numpy() * 1e-6, weight[part.index].to_numpy(),
            rate * 1e9, int(per_node), part.index.to_numpy(),
        )  # fmt: skip


def times_of(value: dict[str, float]) -> NcclTimeConstants:
    """Parameters as the model takes them."""
    protocols = (
        NcclProtocolConstants(value["LL step"], 0.0, 0.0, value["LL ring share"], value["LL tree share"]),
        NcclProtocolConstants(value["LL128 step"], value["LL128 hop"], value["LL128 tree hop"],
        value["LL128 ring share"],
                 value["LL128 tree share"]),
        NcclProtocolConstants(value["Simple step"], value["Simple hop"], value["Simple tree hop"], 1.0,
                        value["Simple tree share"]),
    )  # fmt: skip
    return NcclTimeConstants(value["start"], protocols, value["nvls start"], value["nvls hop"], value["peer"])


def predicted_s(batch: Batch, value: dict[str, float]) -> FloatN:
    """What the model says of a batch. [s]"""
    each = batch.node_bytes_per_s / batch.ranks_per_node
    to_all = value.get(f"all-to-all {batch.network}", value["all-to-all ib"])
    fabric = replace(
        batch.fabric, inter_bytes_per_s=each * value[f"share {batch.network}"],
        inter_all_to_all_bytes_per_s=each * to_all, inter_latency_s=value[f"latency {batch.network}"],
        communicator_bytes_per_s=np.inf, above=(), relays=False, between=times_of(value),
    )  # fmt: skip
    return collective_time(batch.kind, batch.payload_bytes, batch.group, fabric).total_s


def fit(table: pd.DataFrame) -> dict[str, float]:
    """The parameters with the least squares of logarithmic errors, far ones counted less."""
    parts = list(batches(table))
    names = list(FIRST)
    first = np.log(list(FIRST.values()))

    def errors(logs: FloatN) -> FloatN:
        value = dict(zip(names, np.exp(logs).tolist(), strict=True))
        each = [np.log(predicted_s(part, value) / part.measured_s) * part.weight for part in parts]
        return np.concatenate([*each, (logs - first) * DRAW])

    most = np.array([np.log(MOST.get(name.split(" ", 1)[-1], np.inf)) for name in names])
    found = least_squares(
        errors, np.minimum(first, most - 1e-3), loss="soft_l1", f_scale=0.05, max_nfev=120, bounds=(-np.inf, most)
    )
    return dict(zip(names, np.exp(found.x).tolist(), strict=True))


def score(table: pd.DataFrame, value: dict[str, float]) -> pd.DataFrame:
    """The points with their errors, predicted over measured less one."""
    error = np.full(len(table), np.nan)
    for part in batches(table):
        error[part.rows] = predicted_s(part, value) / part.measured_s - 1.0
    return table.assign(error=error)


def summary(scored: pd.DataFrame) -> pd.DataFrame:
    """Median and nine in ten of the absolute errors, and the median error, by half, network and collective. [%]"""
    every = scored.assign(collective="all", network="all")
    parts = pd.concat([every, scored.assign(network="all"), scored])
    size = parts.assign(size=parts.error.abs()).groupby(["split", "network", "collective"])
    columns = {
        "points": size["size"].count(), "median": 100 * size["size"].median(),
        "nine in ten": 100 * size["size"].quantile(0.9), "bias": 100 * size["error"].median(),
    }  # fmt: skip
    return pd.DataFrame(columns).round(1)


def written(value: dict[str, float], fitted: pd.DataFrame) -> dict[str, object]:
    """The parameters as hardware_profiles/nccl.yaml holds them."""
    source = (
        f"scripts/fit_nccl.py: {len(fitted)} public points of 2 to {int(fitted.nodes.max())} nodes, the fitting half"
    )

    def fact(number: float, unit: str = "") -> dict[str, object]:
        shown = {"us": f"{number * 1e6:.3g} us", "GB/s": f"{number / 1e9:.3g} GB/s"}.get(unit, float(f"{number:.3g}"))
        return {"value": shown, "provenance": "measured", "source": source}

    times = times_of(value)
    names = ("LL", "LL128", "Simple")
    return {
        "nccl_version": "2.8 to 2.31",
        "start_s": fact(times.start_s, "us"),
        "protocols": [
            {
                "name": name, "step_s": fact(one.step_s, "us"), "hop_s": fact(one.hop_s, "us"),
                "tree_hop_s": fact(one.tree_hop_s, "us"), "ring_share": fact(one.ring_share),
                "tree_share": fact(one.tree_share),
            }
            for name, one in zip(names, times.protocols, strict=True)
        ],
        "nvls_tree_start_s": fact(times.nvls_start_s, "us"),
        "nvls_tree_hop_s": fact(times.nvls_hop_s, "us"),
        "peer_s": fact(times.peer_s, "us"),
        "channel_bytes_per_s": {**fact(CHANNEL_BYTES_PER_S, "GB/s"), "source": CHANNEL_SOURCE},
        "networks": {
            name: {
                key: fact(value[f"{said} {name}"], unit)
                for key, said, unit in (
                    ("latency_s", "latency", "us"), ("efficiency", "share", ""),
                    ("all_to_all_efficiency", "all-to-all", ""),
                )
                if f"{said} {name}" in value
            }
            for name in NETWORKS
        },
    }  # fmt: skip


def written_value() -> dict[str, float]:
    """The parameters that hardware_profiles/nccl.yaml holds."""
    facts = load_nccl_facts()
    low, middle, high = facts.protocols
    value = {
        "start": facts.start_s.value, "nvls start": facts.nvls_tree_start_s.value,
        "nvls hop": facts.nvls_tree_hop_s.value, "peer": facts.peer_s.value, "Simple tree share": high.tree_share.value,
    }  # fmt: skip
    for one in (low, middle, high):
        value[f"{one.name} step"] = one.step_s.value
    for one in (low, middle):
        value |= {f"{one.name} ring share": one.ring_share.value, f"{one.name} tree share": one.tree_share.value}
    for one in (middle, high):
        value |= {f"{one.name} hop": one.hop_s.value, f"{one.name} tree hop": one.tree_hop_s.value}
    for name, network in facts.networks.items():
        value |= {f"latency {name}": network.latency_s.value, f"share {name}": network.efficiency.value}
        if network.all_to_all_efficiency is not None:
            value[f"all-to-all {name}"] = network.all_to_all_efficiency.value
    return value


def main() -> None:
    """Fit, write, score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    table = points()
    if parser.parse_args().check:
        value = written_value()
    else:
        fitted = table[table.split == "fitting"].reset_index(drop=True)
        value = fit(fitted)
        text = yaml.safe_dump(written(value, fitted), sort_keys=False, width=200, default_flow_style=None)
        TARGET.write_text(HEAD + text, encoding="utf-8")
    for name, number in value.items():
        print(f"{name:20} {number:.4g}")
    print(summary(score(table, value)).to_string())


if __name__ == "__main__":
    main()
