"""Seconds of every op of a tape, over all K candidates at once; what each rests on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.op import Attention, Collective, Gemm, Grouped, HostSync, Op, Stream, Tape
from mofa.cost.collectives import TokenSpread, collective_s
from mofa.cost.compute import attention_s, gemm_s, grouped_gemm_s, stream_rate
from mofa.cost.topology import Group
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec

ArrayK = NDArray[np.float64]


@dataclass(frozen=True)
class Machine:
    """What times an op: the cluster, the process groups of the K candidates, the framework's way to issue."""

    cluster: ClusterSpec
    groups: Mapping[str, Group]
    framework: FrameworkSpec
    num_k: int
    spread: TokenSpread | None = None
    """Where copies of a token go, for dispatchers that send a token once to each place."""


def _stack(values: list[object], num_k: int) -> ArrayK:
    out = np.empty((len(values), num_k))
    for row, value in zip(out, values, strict=True):
        row[:] = value  # type: ignore[call-overload]
    return out


def op_seconds(ops: tuple[Op, ...], machine: Machine) -> ArrayK:
    """Device time of each op, 0 where it is not present. (len(ops), K) [s]"""
    gpu, num_k = machine.cluster.gpu, machine.num_k
    out = np.zeros((len(ops), num_k))
    kinds: dict[object, list[int]] = defaultdict(list)
    for i, op in enumerate(ops):
        w = op.work
        if isinstance(w, Gemm):
            kinds["gemm", w.format].append(i)
        elif isinstance(w, Grouped):
            kinds["grouped", w.format, w.wgrad, w.sequential].append(i)
        elif isinstance(w, Attention):
            kinds["attention", w.backward, w.d_qk].append(i)
        elif isinstance(w, Stream):
            kinds["stream"].append(i)
        elif isinstance(w, Collective):
            out[i] = collective_s(
                w.kind, w.payload, machine.groups[w.group], machine.cluster, imbalance=w.imbalance,
                spread=machine.spread,
            )  # fmt: skip
    for key, rows in kinds.items():
        works = [ops[i].work for i in rows]

        def column(name: str, works: list[object] = works) -> ArrayK:  # type: ignore[assignment]
            return _stack([getattr(w, name) for w in works], num_k)

        if key == "stream":
            moved = column("bytes")
            launches = np.maximum(_stack([ops[i].launches for i in rows], num_k), 1.0)
            busy = (moved > 0) | (launches > 1)
            floor = gpu.curves.stream.floor_s.value
            out[rows] = np.where(busy, moved / stream_rate(gpu) + launches * floor, 0.0)
            continue
        assert isinstance(key, tuple)
        if key[0] == "gemm":
            out[rows] = gemm_s(column("m"), column("n"), column("k"), gpu, key[1], column("count"))
        elif key[0] == "grouped":
            out[rows] = grouped_gemm_s(
                column("rows"), column("groups"), column("n"), column("k"), gpu, key[1], wgrad=key[2], sequential=key[3]
            )
        else:
            out[rows] = attention_s(column("flops"), column("q_len"), gpu, backward=key[1], d_qk=key[2])
    for i, op in enumerate(ops):
        if op.present is not True:
            out[i] = np.where(op.present, out[i], 0.0)
    return out


def issue_seconds(ops: tuple[Op, ...], machine: Machine) -> ArrayK:
    """Host time to issue each op. (len(ops), K) [s]"""
    host = machine.cluster.gpu.curves.host
    out = np.zeros((len(ops), machine.num_k))
    for i, op in enumerate(ops):
        if isinstance(op.work, HostSync) or not np.any(op.launches):
            continue
        each: ArrayK | float = host.eager_op_s.value
        if op.compiled:
            each = host.compiled_op_s.value
        elif np.any(op.dtensor):
            each = np.where(op.dtensor, host.dtensor_op_s.value, each)
        out[i] = np.where(op.present, op.launches * each, 0.0)
    return out


def tape_flops(tape: Tape, num_k: int) -> ArrayK:
    """Matrix and attention FLOPs of a tape on one rank. (K,) [FLOP]"""
    total = np.zeros(num_k)
    for op in tape.ops:
        if isinstance(op.work, (Gemm, Grouped, Attention)):
            total = total + np.where(op.present, op.work.flops, 0.0)
    return total
