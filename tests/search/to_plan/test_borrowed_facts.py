"""Plans name the facts that were measured on another GPU than theirs."""

from __future__ import annotations

import pytest

import mofa
from mofa.specs.gpu_facts import UnmeasuredGpuFacts, facts_of_gpu_record, load_unmeasured_gpu_facts

BORROWED = "as measured on another GPU"


def borrowed(node: str, vocab: int, params: str) -> list[str]:
    job = mofa.load_workload("llama3-8b", global_batch=32, overrides={"model.vocab": vocab, "precision.params": params})
    plan = mofa.estimate(
        job, mofa.load_cluster(node, 8), "tp=1", framework=mofa.load_framework("torchtitan"), replay=False
    )
    return [note.split(" for ")[0] for note in plan.notes if BORROWED in note]


@pytest.mark.parametrize(("node", "kind"), [("h100-hgx", "transferred"), ("a100-hgx", "assumed")])
def test_facts_of_another_gpu_are_named(node: str, kind: str) -> None:
    assert borrowed(node, 50257, "bf16") == [f"unaligned products: {kind}", f"optimizer 16 bit: {kind}"]
    assert borrowed(node, 50304, "fp32") == []


def test_the_gpu_that_was_measured_borrows_nothing() -> None:
    assert borrowed("h200-hgx", 50257, "bf16") == []


def test_what_unmeasured_gpus_take_is_the_measured_one_marked_assumed() -> None:
    h200 = mofa.load_cluster("h200-hgx", 8).gpu.curves
    for name in ("unaligned_products", "optimizer_16_bit", "kernel_selection", "layer_kernels"):
        assumed = facts_of_gpu_record(getattr(load_unmeasured_gpu_facts(), name))
        assert [fact.value for fact in assumed] == [fact.value for fact in facts_of_gpu_record(getattr(h200, name))]
        assert {fact.provenance for fact in assumed} == {"assumed"}
    assert set(UnmeasuredGpuFacts.model_fields) > {"multi_stream_starts"}
