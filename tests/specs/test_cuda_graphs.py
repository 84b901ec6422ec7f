"""The text of CUDA graphs, and which frameworks have them."""

from __future__ import annotations

import pytest

from mofa.errors import SpecError
from mofa.specs.cuda_graphs import CudaGraphs
from mofa.specs.load import load_framework


@pytest.mark.parametrize("text", ["none", "local", "local:full_iteration", "te", "te:attn", "te:attn+mlp+moe_router"])
def test_a_text_is_read_and_written_alike(text: str) -> None:
    assert str(CudaGraphs.parse(text)) == text
    assert load_framework("megatron", {"cuda_graphs": text}).cuda_graphs == text


def test_parts_are_written_in_order() -> None:
    assert load_framework("megatron", {"cuda_graphs": "te:moe_router+attn"}).cuda_graphs == "te:attn+moe_router"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("cuda", "no way to capture a step"),
        ("te:full_iteration", "te captures no full_iteration"),  # megatron_core 0.16.1, transformer_config.py: 1739
        ("local:attn", "local captures no attn"),
        ("none:attn", "none captures no attn"),
        ("te:", "te captures no nothing"),
        ("te:attn+attn", "names a part twice"),
    ],
)
def test_what_megatron_does_not_capture_is_refused_by_name(text: str, line: str) -> None:
    with pytest.raises(SpecError, match=line):
        load_framework("megatron", {"cuda_graphs": text})


@pytest.mark.parametrize("name", ["torchtitan", "megatron-local", "megatron-2022", "fsdp1"])
def test_graphs_are_modelled_on_transformer_engine_alone(name: str) -> None:
    with pytest.raises(SpecError, match=r"cuda_graphs \(te\) is modelled for megatron"):
        load_framework(name, {"cuda_graphs": "te"})
