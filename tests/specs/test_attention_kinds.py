"""Each attention kind: parameters and tensors by hand, and closed form against replay on each framework that has it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

import mofa
from mofa.blocks.frameworks import PRIMITIVES
from mofa.specs.attention import ATTENTION_KINDS
from mofa.specs.attention.record import AttentionKind
from tests.blocks.small import LATENT, llama


class Small(NamedTuple):
    """Sizes beside a hidden width of 512, and what follows from them, without the norm in front."""

    sizes: dict[str, Any]
    split_params: int
    """Parameters that tensor parallelism splits."""
    whole_params: int
    """Parameters that each of its ranks has whole."""
    packed_tensors: int
    """Tensors of Megatron, where products of one input are packed."""
    tensors: int
    """Tensors of torchtitan."""


SMALL = {
    "gqa": Small(
        {"num_heads": 8, "num_kv_heads": 4, "head_dim": 64}, 512 * (512 + 2 * 256) + 512 * 512, 0, 2, 4
    ),
    "mla": Small(
        {size: n for size, n in LATENT.items() if size != "kind"},
        128 * 8 * (32 + 16) + 64 * 8 * (32 + 32) + 8 * 32 * 512, 512 * 128 + 128 + 512 * (64 + 16) + 64, 7, 7,
    ),
}  # fmt: skip
HAVING = [
    (kind, name)
    for kind, record in ATTENTION_KINDS.items()
    for name, primitives in PRIMITIVES.items()
    if all(getattr(primitives, step) is not None for step in record.primitives)
]


OPTIONS = (
    "num_heads", "num_kv_heads", "d_qk", "d_v", "d_rope", "window", "window_every", "chunked", "nope_every", "sinks",
    "softcap", "qkv_bias", "out_bias", "qk_norm", "qk_norm_kind",
)  # fmt: skip
"""What other rooms ask of every kind's sizes."""


@pytest.mark.parametrize("name", SMALL)
def test_every_kind_has_what_others_ask(name: str) -> None:
    """By name, and each is told where a new kind is written (:class:`mofa.specs.attention.record.AttentionKind`)."""
    sizes = llama(attention={"kind": name, **SMALL[name].sizes}).attention
    assert [option for option in OPTIONS if not hasattr(sizes, option)] == []
    assert [option for option in OPTIONS if f"``{option}``" not in (AttentionKind.__doc__ or "")] == []


def test_every_kind_is_counted() -> None:
    assert tuple(SMALL) == tuple(ATTENTION_KINDS)


@pytest.mark.parametrize("name", SMALL)
def test_parameters_and_tensors_are_those_counted_by_hand(name: str) -> None:
    small = SMALL[name]
    model = llama(attention={"kind": name, **small.sizes})
    record, sizes = model.attention_kind, model.attention
    assert record.params(sizes, 512, 1) == (small.split_params, small.whole_params)
    assert record.num_tensors(sizes, 1, True) == small.packed_tensors
    assert record.num_tensors(sizes, 1, False) == small.tensors


@pytest.mark.parametrize(("name", "framework"), HAVING)
def test_closed_form_and_replay_agree(name: str, framework: str) -> None:
    model = llama(num_layers=4, hidden=2048, attention={"kind": name, **SMALL[name].sizes})
    job = mofa.load_workload("llama3-8b", global_batch=16).model_copy(update={"model": model})
    closed, played = (
        mofa.estimate(
            job, mofa.load_cluster("h100-hgx", 8), "micro_batch=1 recompute=full",
            framework=mofa.load_framework(framework), replay=replay,
        )
        for replay in (False, True)
    )  # fmt: skip
    assert closed.step_s == pytest.approx(played.step_s, rel=0.03)
    assert closed.memory.allocated_bytes == pytest.approx(played.memory.allocated_bytes, rel=0.02)
