"""Rows to Megatron's experts and back by hand: by PyTorch's ops, and with a padded map of the router."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mofa
from mofa.blocks.build import BlockTapes
from mofa.blocks.fp8 import FP8_RECIPES
from mofa.blocks.op import Tape
from mofa.blocks.work import Collective, HostSync
from mofa.errors import SpecError
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.load import load_framework
from mofa.specs.run import RunSpec
from mofa.specs.run_files import resolve_run
from tests.blocks.ops import moved, one
from tests.blocks.small import build, context, framework, kept, llama

S, B, H, F = 256, 2, 512, 256
TOKENS, EXPERTS, TOP = S * B, 8, 2
ROWS = TOKENS * TOP
MOE = llama(moe={"num_experts": EXPERTS, "top_k": TOP, "expert_hidden": F})


def layer(*, ep: int = 1, recipe: str = "", **options: Any) -> BlockTapes:
    ctx = context(MOE, framework("megatron", **options), seq_len=S, micro_batch=B, ep=ep)
    fp8 = FP8_RECIPES.get(recipe)
    return build(replace(ctx, fp8=fp8, gemm_format=fp8.product if fp8 else "bf16"), moe=True)


def payloads(tape: Tape) -> list[float]:
    return [float(np.asarray(op.work.payload).reshape(-1)[0]) for op in tape.ops
            if isinstance(op.work, Collective) and op.work.kind == "all_to_all"]  # fmt: skip


def test_eager_rows_are_added_by_index() -> None:
    """Out by index, 4 bytes an element; onto zeros by atomics, 6, and the zeros; back the same the other way."""
    found = layer(permute_fusion=False)
    there, back = one(found.forward, "moe.permute"), one(found.forward, "moe.unpermute")
    assert (moved(there), there.work.like) == (4 * ROWS * H, "permute")  # type: ignore[union-attr]
    assert (moved(back), back.work.like) == (6 * ROWS * H + 2 * TOKENS * H, "unpermute")  # type: ignore[union-attr]
    gradient = one(found.backward, "moe.permute.backward")
    assert (moved(gradient), gradient.work.like) == (6 * ROWS * H, "index_add")  # type: ignore[union-attr]
    assert moved(one(found.backward, "moe.unpermute.backward")) == 4 * ROWS * H


def test_what_eager_rows_keep() -> None:
    """Places of 8 bytes, the mask and the scores turned by expert; chunks cut and joined keep nothing."""
    held = {n: b for n, b in kept(layer(permute_fusion=False)).items() if n.startswith("moe.")}
    assert held == {
        "moe.row_ids": 8 * ROWS, "moe.mask": TOKENS * EXPERTS, "moe.turned_scores": 4 * TOKENS * EXPERTS,
        "moe.sorted": 2 * ROWS * H, "moe.sorted_weights": 4 * ROWS,
    }  # fmt: skip


def test_the_host_waits_for_the_size_of_each_selection() -> None:
    """``masked_select`` twice ahead of the rows, and the splits of the exchange, or of the experts."""
    for ep, last in ((1, "moe.end_sync0"), (4, "moe.sync0")):
        ops = layer(ep=ep, permute_fusion=False).forward.ops
        waits = [op.name for op in ops if isinstance(op.work, HostSync)]
        assert waits == ["moe.rows_sync", "moe.weights_sync", last]
        assert [op.name for op in layer(ep=ep).forward.ops if isinstance(op.work, HostSync)] == [last]


def test_a_padded_map_fills_up_each_experts_rows_where_they_are_sent() -> None:
    """15 / 2 rows more for each expert on every rank: they are exchanged, and nothing is copied to pad."""
    filled = ROWS + 7.5 * EXPERTS
    found = layer(ep=4, recipe="blockwise", router_padding=True)
    assert payloads(found.forward) == [2 * filled * H, 4 * filled, 2 * filled * H]
    plain = layer(ep=4, recipe="blockwise")
    assert payloads(plain.forward) == [2 * ROWS * H, 4 * ROWS, 2 * ROWS * H]
    assert {op.name for op in plain.forward.ops} - {op.name for op in found.forward.ops} == {
        "experts.pad", "experts has experts.padded", "experts.unpad"
    }  # fmt: skip
    experts = one(found.forward, "experts.fc1").work
    assert float(np.asarray(experts.rows).reshape(-1)[0]) == filled  # type: ignore[union-attr]
    names = [op.name for op in found.forward.ops]
    assert names.index("moe.pad_map") < names.index("moe.count") < names.index("moe.sync0") < names.index("moe.permute")
    assert one(found.forward, "moe.pad_map").launches == 9


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"framework": {"name": "megatron", "router_padding": True}}, "refuses it without fp8"),
        (
            {"framework": {"name": "megatron", "router_padding": True, "dispatcher": "allgather"},
             "precision": {"gemm": "fp8-blockwise"}},
            "all-to-all dispatcher",
        ),
        ({"framework": {"name": "megatron", "attention": "flash"}, "model": "gpt-oss-120b"}, "no sinks"),
    ],
)  # fmt: skip
def test_what_megatron_refuses(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    run = {"id": "run", "model": "qwen3-30b-a3b", "hardware": "h100-hgx", "gpus": 8, "strategy": {"ep": 8},
           "batch": {"seq_len": 4096, "micro": 1, "global": 8}, **changes}  # fmt: skip
    workload, cluster, spec, strategy = resolve_run(spec_from_mapping(RunSpec, run, "case"), tmp_path)
    with pytest.raises(SpecError, match=line):
        mofa.estimate(workload, cluster, strategy, framework=spec, over_time=False)


def test_other_frameworks_have_no_such_option() -> None:
    with pytest.raises(SpecError, match="permute_fusion"):
        load_framework("megatron-local", {"permute_fusion": False})
    with pytest.raises(SpecError, match="router_padding"):
        load_framework("torchtitan", {"router_padding": True})
    with pytest.raises(SpecError, match="replaces permute_fusion"):
        load_framework("megatron", {"routed_copies": "index", "permute_fusion": False})
