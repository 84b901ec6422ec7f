"""Machines, models and jobs for tests: facts are changed by name, whatever the curves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np

from mofa.cost.kernels.toy_gpu import toy_gpu
from mofa.search.one_strategy import checked_strategy_row
from mofa.specs.base import Fact, Spec
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.load import load_cluster
from mofa.specs.model import ModelSpec
from mofa.specs.strategy import COLUMNS, RecomputeSpec, StrategyTable
from mofa.specs.workload import WorkloadSpec
from tests.blocks.small import EXPERTS, LATENT, llama
from tests.blocks.small import framework as uncached

S = TypeVar("S", bound=Spec)
__all__ = ["EXPERTS", "LATENT", "framework", "llama"]
WINDOWED = {"kind": "gqa", "num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "window": 128, "window_every": 2}


@cache
def framework(name: str, **options: Any) -> FrameworkSpec:
    """A bundled framework with options changed."""
    return uncached(name, **options)


def with_facts(spec: S, **values: float) -> S:
    """The same facts with other values."""
    return spec.model_copy(update={n: getattr(spec, n).model_copy(update={"value": v}) for n, v in values.items()})


def alike(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with GPUs and hosts of which none is slower than another."""
    steady = cluster.gpu.curves.power_limit
    if steady is not None:
        steady = steady.model_copy(update={"clock_swing": None})
    curves = cluster.gpu.curves.model_copy(update={"chip_spread": None, "host_spread": None, "power_limit": steady})
    return cluster.model_copy(update={"gpu": cluster.gpu.model_copy(update={"curves": curves})})


def silent_host(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with a host that issues everything in no time."""
    host = cluster.gpu.curves.host
    names = [name for name in type(host).model_fields if isinstance(getattr(host, name), Fact)]
    silent = with_facts(host, **dict.fromkeys(names, 0.0)).model_copy(update={"modules": {}, "fused_optimizer": None})
    curves = cluster.gpu.curves.model_copy(update={"host": silent})
    return cluster.model_copy(update={"gpu": cluster.gpu.model_copy(update={"curves": curves})})


def faster_links(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """The cluster with links of ``factor`` times the bandwidth, timed from the links alone."""
    node = cluster.node
    intra = with_facts(node.intra, bandwidth_bytes_per_s=node.intra.bandwidth_bytes_per_s.value * factor)
    nic = with_facts(node.nic, bandwidth_bytes_per_s=node.nic.bandwidth_bytes_per_s.value * factor)
    changed: dict[str, Any] = {"intra": intra, "nic": nic}
    if "collectives" in type(node).model_fields:
        changed["collectives"] = {}
    return cluster.model_copy(update={"node": node.model_copy(update=changed)})


def silent_network(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster whose collectives take no time worth a mention."""
    fast = faster_links(cluster, 1e9)
    node = with_facts(fast.node, collective_startup_s=0.0)
    node = node.model_copy(
        update={"intra": with_facts(node.intra, latency_s=0.0), "nic": with_facts(node.nic, latency_s=0.0)}
    )
    return fast.model_copy(update={"node": node})


def with_host(cluster: ClusterSpec, **facts: Any) -> ClusterSpec:
    """The cluster with other facts of its hosts."""
    curves = cluster.gpu.curves
    host = curves.host.model_copy(update=facts)
    gpu = cluster.gpu.model_copy(update={"curves": curves.model_copy(update={"host": host})})
    return cluster.model_copy(update={"gpu": gpu})


def fast_hosts(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster on hosts that issue everything in a hundredth of the time: its devices never wait for them."""
    host = cluster.gpu.curves.host
    fast = host.scaled_to_speed(host.eager_op_s.value / 100.0, "fast, for a test")
    return with_host(cluster, **{name: getattr(fast, name) for name in type(fast).model_fields})


def toy(machines: ClusterSpec) -> ClusterSpec:
    """The cluster with the GPU of round numbers, whose clock does not depend on what runs."""
    return machines.model_copy(update={"gpu": toy_gpu()})


@cache
def cluster(num_gpus: int = 8, node: str = "h100-hgx", memory_gib: float | None = None) -> ClusterSpec:
    """A bundled cluster on shared hosts, the profile's own, with as much memory a GPU as asked."""
    out = load_cluster(node, num_gpus).on_hosts("shared")
    if memory_gib is not None:
        out = out.model_copy(update={"gpu": with_facts(out.gpu, capacity_bytes=memory_gib * 2.0**30)})
    return out


def workload(model: ModelSpec, *, seq_len: int = 1024, global_batch: int = 64, **facts: Any) -> WorkloadSpec:
    """A training job of a model."""
    return WorkloadSpec.model_validate(
        {
            "name": model.name, "source": "a small job for tests", "model": model,
            "batch": {"seq_len": seq_len, "global_batch": global_batch}, **facts,
        }
    )  # fmt: skip


def moe_llama(**changes: Any) -> ModelSpec:
    return llama(**{"name": "moe", "num_layers": 4, "moe": EXPERTS, **changes})


def mla_moe(**changes: Any) -> ModelSpec:
    """Latent attention, one dense layer before experts with a shared one, a prediction layer."""
    moe = {**EXPERTS, "shared_hidden": 256, "first_k_dense": 1}
    return llama(
        **{"name": "mla-moe", "num_layers": 5, "attention": LATENT, "moe": moe, "num_mtp_layers": 1, **changes}
    )


def windowed(**changes: Any) -> ModelSpec:
    return llama(**{"name": "windowed", "num_layers": 4, "attention": WINDOWED, **changes})


def table(job: WorkloadSpec, machines: ClusterSpec, spec: FrameworkSpec, strategies: Sequence[str]) -> StrategyTable:
    """Checked strategies, by their text, as one table."""
    return joined([checked_strategy_row(job, machines, spec, text) for text in strategies])


def joined(rows: Sequence[StrategyTable]) -> StrategyTable:
    """Tables under one another."""
    modes: tuple[RecomputeSpec, ...] = tuple(dict.fromkeys(m for row in rows for m in row.recompute_modes))
    layouts = tuple(dict.fromkeys(text for row in rows for text in row.layouts))
    indexed = {
        "recompute": [modes.index(row.recompute_modes[int(i)]) for row in rows for i in row.recompute],
        "layout": [layouts.index(row.layout_text_of_row(i)) for row in rows for i in range(len(row))],
    }
    columns = {name: np.concatenate([getattr(row, name) for row in rows]) for name in COLUMNS if name not in indexed}
    columns |= {name: np.array(values, dtype=np.int64) for name, values in indexed.items()}
    (chosen,) = {row.common_options for row in rows}
    columns["options"] = np.zeros_like(columns["tp"])
    return StrategyTable(**columns, recompute_modes=modes, layouts=layouts, option_sets=(chosen,))
