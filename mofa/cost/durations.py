"""Seconds of every op of a tape, over all K candidates at once; what each rests on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.op import Attention, Collective, Gemm, Grouped, HostSync, Op, Stream, Tape
from mofa.cost.collectives import TokenSpread, collective_s
from mofa.cost.compute import attention_s, gemm_s, grouped_gemm_s
from mofa.cost.topology import Group
from mofa.specs.curves import PoweredCurve
from mofa.specs.framework import PYTORCH_MODULES, FrameworkSpec
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

    def shares_world(self, group: str) -> NDArray[np.bool_]:
        """Where a group's communicator is that of all ranks: PyTorch's device mesh makes none for a dimension that
        spans them (device_mesh.py), Megatron makes one for every group. (K,)"""
        if self.framework.name not in PYTORCH_MODULES or "world" not in self.groups:
            return np.zeros(self.num_k, dtype=bool)
        return np.broadcast_to(self.groups[group].size == self.groups["world"].size, (self.num_k,))


def _stack(values: list[object], num_k: int) -> ArrayK:
    out = np.empty((len(values), num_k))
    for row, value in zip(out, values, strict=True):
        row[:] = value  # type: ignore[call-overload]
    return out


def op_seconds(ops: tuple[Op, ...], machine: Machine) -> ArrayK:
    """Device time of each op, 0 where it is not present. (len(ops), K) [s]"""
    gpu, num_k = machine.cluster.gpu, machine.num_k
    out = np.zeros((len(ops), num_k))
    kinds: dict[Any, list[int]] = defaultdict(list)
    for i, op in enumerate(ops):
        w = op.work
        if isinstance(w, Gemm):
            kinds["gemm", w.format].append(i)
        elif isinstance(w, Grouped):
            kinds["grouped", w.format, w.wgrad, w.sequential].append(i)
        elif isinstance(w, Attention):
            kinds["attention", w.backward, w.d_qk, w.d_v, w.backend].append(i)
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
            out[rows] = _stream_seconds([ops[i] for i in rows], machine)
            continue
        assert isinstance(key, tuple)
        if key[0] == "gemm":
            out[rows] = gemm_s(column("m"), column("n"), column("k"), gpu, key[1], column("count"))
        elif key[0] == "grouped":
            out[rows] = grouped_gemm_s(
                column("rows"), column("groups"), column("n"), column("k"), gpu, key[1], wgrad=key[2], sequential=key[3]
            )
        else:
            out[rows] = attention_s(
                column("batch"), column("heads"), column("groups"), column("q_len"), column("pairs"), key[2], key[3],
                gpu, backward=key[1], backend=key[4],
            )  # fmt: skip
    for i, op in enumerate(ops):
        if op.present is not True:
            out[i] = np.where(op.present, out[i], 0.0)
    _throttle(out, ops, kinds, machine)
    return out


def _throttle(out: ArrayK, ops: tuple[Op, ...], kinds: dict[Any, list[int]], machine: Machine) -> None:
    """The clock that the power limit leaves depends on the share of products and attention: in place.

    Assumes that the limit acts on the mean over a phase of a block; times come in as between memory-bound kernels.
    """
    curves = machine.cluster.gpu.curves
    powered = [(key, rows) for key, rows in kinds.items() if key != "stream"]
    work = sum((out[rows].sum(axis=0) for _, rows in powered), np.zeros(machine.num_k))
    whole = out[[i for i, op in enumerate(ops) if op.stream == "compute"]].sum(axis=0)
    share = work / np.maximum(whole, 1e-12)
    for key, rows in powered:
        if key[0] == "attention":
            curve: PoweredCurve = curves.attention_near((key[4], "bwd" if key[1] else "fwd", key[2], key[3]))[1]
        else:
            curve = curves.grouped_gemm[key[1]] if key[0] == "grouped" and not key[3] else curves.gemm[key[1]]
        if curve.sustained != curve.alone:
            out[rows] *= curve.sustained / curve.kept(np.minimum(share, 1.0))


def _stream_seconds(ops: list[Op], machine: Machine) -> ArrayK:
    """Memory-bound ops: a launch for each kernel, and their bytes over the rate of the measured op that they are like.

    Where the op gives its elements and width, the measured op's whole form counts: bytes, rows and columns.
    """
    num_k, curves = machine.num_k, machine.cluster.gpu.curves
    works = [op.work for op in ops if isinstance(op.work, Stream)]
    like = [curves.stream_like(w.like, op.compiled).form for w, op in zip(works, ops, strict=True)]
    moved = _stack([w.bytes for w in works], num_k)
    launches = np.maximum(_stack([op.launches for op in ops], num_k), 1.0)
    busy = (moved > 0) | (launches > 1)
    extra = np.zeros_like(moved)
    for i, (work, form) in enumerate(zip(works, like, strict=True)):
        if work.width > 0:
            moved[i] = work.elements * form.bytes_per_element
            extra[i] = work.elements * (form.per_row_s / work.width) + form.per_column_s * work.width
    rate = np.array([[form.bytes_per_s] for form in like])
    launch_s = curves.stream_like("", False).form.launch_s
    return np.where(busy, moved / rate + extra + launches * launch_s, 0.0)


def issue_seconds(ops: tuple[Op, ...], machine: Machine) -> ArrayK:
    """Host time to issue each op. (len(ops), K) [s]

    Eager: a small op's issue for each launch, a product's for its first; in the backward pass what autograd's engine
    adds for each op. Compiled: each kernel's launch, and the call of the region at its first op. Ops on distributed
    tensors pay their dispatch instead.
    """
    host = machine.cluster.gpu.curves.host
    small, product, engine = host.eager_op_s.value, host.linear_op_s.value, host.backward_op_s.value
    out = np.zeros((len(ops), machine.num_k))
    inside = False
    for i, op in enumerate(ops):
        same = isinstance(op.launches, int | float)  # of all candidates: no array to look through
        if isinstance(op.work, HostSync) or not (op.launches if same else np.any(op.launches)):
            continue
        if op.compiled:
            call_s = 0.0 if inside else host.compiled_call_s.value
            each: ArrayK | float = op.launches * host.compiled_op_s.value + call_s
        else:
            first = product - small if isinstance(op.work, (Gemm, Grouped, Attention)) else 0.0
            if op.name.endswith(AUTOGRAD):
                first = first + engine
            kernel = small if op.dtensor is False else np.where(op.dtensor, host.dtensor_op_s.value, small)
            each = op.launches * kernel + first
        inside = op.compiled
        if not same:
            each = np.where(np.asarray(op.launches) > 0, each, 0.0)
        out[i] = each if op.present is True else np.where(op.present, each, 0.0)
    return out


AUTOGRAD = (".backward", ".dgrad", ".dleft", ".dright")
"""Ends of the names of ops that begin a node of the backward pass: a weight gradient shares its input gradient's."""


def tape_flops(tape: Tape, num_k: int) -> ArrayK:
    """Matrix and attention FLOPs of a tape on one rank. (K,) [FLOP]"""
    total = np.zeros(num_k)
    for op in tape.ops:
        if isinstance(op.work, (Gemm, Grouped, Attention)):
            total = total + np.where(op.present, op.work.flops, 0.0)
    return total
