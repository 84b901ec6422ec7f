"""Every row of a table costs what it costs as the only row: tables of random candidates, of frameworks and options.

A tape of many candidates has ops, tensors and sizes that some of them lack; whoever decides for all of them by what
some have, or holds a tensor where its op does not run, is found here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mofa.cost.block.routing_loads import BALANCED, RoutingLoads
from mofa.cost.breakdown import HIDDEN_COMPONENTS, MEMORY_COMPONENTS, TIME_COMPONENTS, Breakdown
from mofa.cost.estimate import estimate_table
from mofa.search.legality.masks import JobAndMachines, check_strategies
from mofa.search.space import SOLVED, combinations_table, constrain_space, default_space, with_first_option_set
from mofa.specs.model import ModelSpec
from mofa.specs.strategy import StrategyTable
from tests.cost.toy import cluster, framework, llama, mla_moe, moe_llama, windowed, workload

GPUS = 16
MODELS = {
    "dense": llama(num_layers=4, vocab=32768),
    "tied": llama(num_layers=4, vocab=32768, tied_embeddings=True),
    "windowed": windowed(vocab=32768),
    "moe": moe_llama(vocab=32768),
    "mla-moe": mla_moe(vocab=32768),
}
DENSE, EXPERTS = ("dense", "windowed", "mla-moe", "moe"), ("moe", "mla-moe")
UNEVEN = RoutingLoads({2: 1.3, 4: 1.6, 8: 2.0}, {2: 1.5, 4: 1.9, 8: 2.5})
TOLERANCE = 1e-9


class Kind(NamedTuple):
    """A framework with options, the models that it is drawn with, and what the job and the search are told."""

    framework: str
    models: tuple[str, ...]
    options: dict[str, Any] = {}
    precision: dict[str, str] = {}
    modes: tuple[str, ...] = ()
    with_: tuple[str, ...] = ()


KINDS = {
    "megatron": Kind("megatron", DENSE, modes=("full", "full:1")),
    "megatron fp8-delayed": Kind("megatron", DENSE, precision={"gemm": "fp8-delayed"}),
    "megatron fp8-tensorwise": Kind("megatron", DENSE, precision={"gemm": "fp8-tensorwise"}),
    "megatron fp8-blockwise": Kind("megatron", DENSE, {"fp8_params": True}, precision={"gemm": "fp8-blockwise"}),
    "megatron latent": Kind(
        "megatron", ("mla-moe",), modes=("selective:mla_up_proj", "selective:core_attn+mla_up_proj")
    ),
    "megatron either": Kind("megatron", EXPERTS, {"routed_copies": "either"}, modes=("full", "selective:moe")),
    "megatron allgather": Kind("megatron", EXPERTS, {"dispatcher": "allgather"}),
    "megatron deepep": Kind("megatron", EXPERTS, {"dispatcher": "deepep"}),
    "megatron sequential": Kind("megatron", ("moe",), {"experts": "sequential"}),
    "megatron chunks": Kind("megatron", EXPERTS, modes=("full",), with_=("token_chunks",)),
    "megatron tp overlap": Kind("megatron", ("dense",), {"tp_overlap": True}),
    "megatron apart": Kind("megatron", ("tied", "moe"), {"fuses_wgrad_accumulation": False}),
    "megatron-local": Kind("megatron-local", DENSE, modes=("selective:core_attn+mlp", "full")),
    "megatron-local unfused": Kind("megatron-local", ("dense", "moe"), {"attention": "unfused"}),
    "torchtitan": Kind("torchtitan", DENSE, modes=("full",)),
    "torchtitan zbv": Kind("torchtitan", ("dense", "mla-moe"), modes=("full", "every:2")),
    "torchtitan compile": Kind("torchtitan", DENSE, {"compile": True}),
    "torchtitan hsdp": Kind("torchtitan", ("dense", "moe"), {"data_parallel": "hsdp", "dp_replicate": 2}),
    "torchtitan sequential": Kind("torchtitan", ("moe",), {"experts": "sequential"}),
}  # fmt: skip


@cache
def legal(name: str, model: str) -> tuple[JobAndMachines, StrategyTable]:
    """The job of a kind and a model, and all strategies that its search would cost."""
    kind = KINDS[name]
    spec: ModelSpec = MODELS[model]
    if kind.framework == "torchtitan":
        spec = spec.model_copy(update={"num_mtp_layers": 0})
    precision = {"precision": kind.precision} if kind.precision else {}
    job = workload(spec, seq_len=4096, global_batch=32, **precision)
    machines, fw = cluster(GPUS), framework(kind.framework, **kind.options)
    default = with_first_option_set(default_space(job, machines, fw))
    asked = [constrain_space(default, fix=fix, maximum={}, with_=kind.with_, without=())
             for fix in ({}, *({"recompute": mode} for mode in kind.modes if _has(mode, spec)))]  # fmt: skip
    modes = tuple(dict.fromkeys(mode for space in asked for mode in space.recompute))
    whole = JobAndMachines(job, machines, fw)
    table = combinations_table(replace(asked[0], recompute=modes), machines, fw)
    return whole, table.select_rows(
        np.flatnonzero((check_strategies(whole, table).reason < 0) & (table.recompute_layers != SOLVED))
    )


def _has(mode: str, model: ModelSpec) -> bool:
    return (model.moe is not None or "moe" not in mode) and (model.moe is None or "mlp" not in mode)


def drawn(table: StrategyTable, seed: int, count: int) -> StrategyTable:
    """Random rows of every mode of recomputation alike."""
    random = np.random.default_rng(seed)
    modes = np.unique(table.recompute)
    rows = [random.choice(np.flatnonzero(table.recompute == random.choice(modes))) for _ in range(count)]
    return table.select_rows(np.unique(rows))


def differences(together: Breakdown, alone: Breakdown, i: int) -> dict[str, float]:
    """What of a row differs from the row alone, over its step or its device's bytes. [-]"""
    step, device = float(alone.step_s[0]), float(alone.device_bytes[0])
    found = {
        "step": together.step_s[i] / step - 1,
        "device": together.device_bytes[i] / device - 1,
        "allocated": together.allocated_bytes[i] / alone.allocated_bytes[0] - 1,
        "reserved": together.reserved_bytes[i] / alone.reserved_bytes[0] - 1,
        "FLOPs": together.hardware_flops[i] / alone.hardware_flops[0] - 1,
    }
    for names, many, one, whole in (
        (TIME_COMPONENTS, together.exposed_s, alone.exposed_s, step),
        (HIDDEN_COMPONENTS, together.hidden_s, alone.hidden_s, step),
        (MEMORY_COMPONENTS, together.memory_bytes, alone.memory_bytes, device),
    ):
        found |= {str(n): (many[k, i] - one[k, 0]) / whole for k, n in enumerate(names)}
    return {name: float(value) for name, value in found.items() if abs(value) > TOLERANCE}


def assert_rows_alone(name: str, model: str, seed: int, count: int) -> None:
    job, table = legal(name, model)
    rows = drawn(table, seed, count)
    loads = UNEVEN if MODELS[model].moe and seed % 2 else BALANCED
    given_ = job.workload, job.cluster, job.framework
    together = estimate_table(*given_, rows, loads)
    for i in range(len(rows)):
        alone = estimate_table(*given_, rows.select_rows(np.array([i])), loads)
        assert not differences(together, alone, i), (name, model, str(rows.row(i, job.framework.name)))


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=2, deadline=None)
@given(data=st.data())
def test_every_row_is_as_alone(name: str, data: st.DataObject) -> None:
    """Memory, step and every component of both, of up to half a dozen candidates at once."""
    model = data.draw(st.sampled_from(KINDS[name].models))
    assert_rows_alone(name, model, data.draw(st.integers(0, 2**32 - 1)), data.draw(st.integers(2, 6)))


def rows_of(name: str, model: str, *wanted: dict[str, Any]) -> tuple[JobAndMachines, StrategyTable]:
    """The first legal row of each kind that is ``wanted``."""
    job, table = legal(name, model)
    picked = [np.flatnonzero(np.all([getattr(table, k) == v for k, v in one.items()], axis=0))[0] for one in wanted]
    return job, table.select_rows(np.array(picked))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("megatron", ({"cp": 2, "cp_kind": 0}, {"cp": 4, "cp_kind": 1})),
        ("megatron", ({"cp": 2, "cp_kind": 0}, {"cp": 4, "cp_kind": 2})),
        ("megatron fp8-blockwise", ({"tp": 1}, {"tp": 2, "sp": True}, {"tp": 4, "sp": True})),
        ("megatron fp8-blockwise", ({"tp": 2, "sp": True, "cp": 2}, {"tp": 1, "cp": 2})),
    ],
)
def test_rows_with_what_others_lack(name: str, wanted: tuple[dict[str, Any], ...]) -> None:
    """Rings beside longer all-gathers; gathers of fp8 blocks, which the watchdog holds once, beside none."""
    job, rows = rows_of(name, "dense", *wanted)
    together = estimate_table(job.workload, job.cluster, job.framework, rows, BALANCED)
    for i in range(len(rows)):
        alone = estimate_table(job.workload, job.cluster, job.framework, rows.select_rows(np.array([i])), BALANCED)
        assert not differences(together, alone, i), str(rows.row(i, job.framework.name))
