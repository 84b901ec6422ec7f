"""torchtitan's heads before 0.2.2 by hand: gathered for their norms, and keys copied for queries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mofa.blocks.build import BlockTapes, CostedLayerKind, layer_tapes
from mofa.blocks.frameworks.torchtitan.layer import PRIMITIVES
from mofa.blocks.op import Tape
from mofa.blocks.work import Attention, Collective
from mofa.errors import SpecError
from mofa.specs.load import load_framework
from tests.blocks.ops import moved, one
from tests.blocks.small import context, framework, llama

S, B, TP, HEADS, KEYS, D = 256, 2, 4, 8, 4, 64
TOKENS = S * B
MODEL = llama(attention={"kind": "gqa", "num_heads": HEADS, "num_kv_heads": KEYS, "head_dim": D, "qk_norm": True})


def layer(tp: int = TP, **options: Any) -> BlockTapes:
    spec = framework("torchtitan", compile=False, **options)
    return layer_tapes(
        context(MODEL, spec, seq_len=S, micro_batch=B, tp=tp, sp=tp > 1), PRIMITIVES, CostedLayerKind(False)
    )


def gathers(tape: Tape) -> dict[str, float]:
    return {op.name: float(np.asarray(op.work.payload).reshape(-1)[0]) for op in tape.ops
            if isinstance(op.work, Collective) and op.work.kind == "all_gather" and op.name[1:].startswith(
                ("_norm.", ".own_heads"))}  # fmt: skip


def test_norms_over_heads_ran_on_all_heads_of_every_rank() -> None:
    """Queries and keys are gathered in 16 bits forward, and their gradients from attention's part."""
    now, then = layer(), layer(shards_head_norms=False)
    queries, keys = 2 * TOKENS * HEADS * D, 2 * TOKENS * KEYS * D
    assert gathers(now.forward) == gathers(now.backward) == {}
    assert gathers(then.forward) == {"q_norm.all_gather": queries, "k_norm.all_gather": keys}
    assert gathers(then.backward) == {"q.own_heads.backward": queries, "k.own_heads.backward": keys}
    for name in ("q_norm", "k_norm", "rope"):
        assert moved(one(then.forward, name)) == TP * moved(one(now.forward, name))
        assert moved(one(then.backward, f"{name}.backward")) == TP * moved(one(now.backward, f"{name}.backward"))
    attention = [one(tapes.forward, "attn.core").work for tapes in (now, then)]
    assert attention[0] == attention[1]


def test_without_tensor_parallelism_nothing_is_gathered() -> None:
    now, then = layer(1), layer(1, shards_head_norms=False)
    assert [op.name for op in now.forward.ops] == [op.name for op in then.forward.ops]
    assert moved(one(now.forward, "rope")) == moved(one(then.forward, "rope"))


def test_keys_were_copied_for_every_query_head() -> None:
    """A rank's keys and values, 2 bytes an element, read once and written for each query; where norms were whole, all
    ranks' keys."""
    few, many = 2 * TOKENS * KEYS // TP * D, 2 * TOKENS * HEADS // TP * D
    found = layer(repeats_keys=True)
    assert moved(one(found.forward, "k.repeat")) == moved(one(found.forward, "v.repeat")) == few + many
    assert moved(one(found.backward, "v.repeat.backward")) == few + many
    work = one(found.forward, "attn.core").work
    assert isinstance(work, Attention)
    assert work.kv_heads == work.heads
    whole = layer(repeats_keys=True, shards_head_norms=False)
    assert moved(one(whole.forward, "k.repeat")) == TP * (few + many)
    assert gathers(whole.backward)["k.own_heads.backward"] == TP * many


def test_megatron_has_no_such_heads() -> None:
    for option in ({"shards_head_norms": False}, {"repeats_keys": True}):
        with pytest.raises(SpecError, match="modelled for torchtitan"):
            load_framework("megatron", option)
