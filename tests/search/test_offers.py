"""What other numerics would bring to the best plan."""

from __future__ import annotations

import pytest

import mofa
from mofa.errors import SpecError
from mofa.report.search_text import numerics_offers_line
from mofa.search.entry_points import find_plans
from mofa.search.offers import numerics_offers
from mofa.specs.framework_traits import TE_RECIPES
from mofa.specs.strategy import StrategySpec

FIX = {"tp": 2, "pp": 2, "vpp": 1, "cp": 1}


def test_offers_are_estimates_of_the_same_strategy() -> None:
    job, machines = mofa.load_workload("llama3-8b", global_batch=64), mofa.load_cluster("h100-hgx", 8)
    report = find_plans(job, machines, fix=FIX, top=1, replay=False).report
    of_hopper = [f"fp8-{name}" for name in TE_RECIPES if name != "mxfp8"]  # which multiplies no blocks of 32
    assert [offer.word for offer in report.numerics_offers] == [*of_hopper, "bf16_moments", "bf16_grads"]
    strategy = report.plans[0].strategy
    now = mofa.estimate(job, machines, strategy, replay=False)
    settings = {
        "fp8-blockwise": {"precision.gemm": "fp8-blockwise"}, "bf16_moments": {"precision.moments": "bf16"},
    }  # fmt: skip
    by_word = {offer.word: offer for offer in report.numerics_offers}
    for word, overrides in settings.items():
        other = mofa.estimate(
            mofa.load_workload("llama3-8b", global_batch=64, overrides=overrides), machines, strategy, replay=False
        )
        assert by_word[word].step_change == pytest.approx(other.step_s / now.step_s - 1.0)
        assert by_word[word].device_bytes_change == other.memory.device_bytes - now.memory.device_bytes
    megatron = mofa.load_framework({"name": "megatron", "grads": "bf16"})
    other = mofa.estimate(job, machines, strategy, framework=megatron, replay=False)
    assert by_word["bf16_grads"].device_bytes_change == other.memory.device_bytes - now.memory.device_bytes < 0
    assert "bf16_moments step" in numerics_offers_line(report)
    without = find_plans(job, machines, fix=FIX, top=1, replay=False, offers=False).report
    assert without.numerics_offers == () and without.plans == report.plans


def test_what_the_job_has_is_not_offered() -> None:
    job, machines = mofa.load_workload("llama3-8b", global_batch=64), mofa.load_cluster("h100-hgx", 8)
    with_ = ("fp8-delayed", "bf16_moments", "bf16_grads")
    search = find_plans(job, machines, fix=FIX, top=1, replay=False, with_=with_)
    assert search.report.numerics_offers == ()
    assert (search.framework.grads, search.framework.grads_bytes_per_param) == ("bf16", 2.0)


def test_what_is_refused_is_not_offered() -> None:
    """An A100 has no fp8 products; torchtitan neither, nor other moments or main gradients."""
    job = mofa.load_workload("llama3-8b", global_batch=64)
    a100 = find_plans(job, mofa.load_cluster("a100-hgx", 8), fix=FIX, top=1, replay=False).report
    assert [offer.word for offer in a100.numerics_offers] == ["bf16_moments", "bf16_grads"]
    titan = mofa.load_framework("torchtitan")
    strategy = StrategySpec.model_validate(
        mofa.estimate(job, mofa.load_cluster("h100-hgx", 8), "tp=1", framework=titan, replay=False).strategy
    )
    offers = numerics_offers(job, mofa.load_cluster("h100-hgx", 8), titan, strategy)
    assert strategy.recompute != "none" and [offer.word for offer in offers] == ["early_stop"]
    with pytest.raises(SpecError, match=r"--with bf16_grads: .*torchtitan has none"):
        find_plans(job, mofa.load_cluster("h100-hgx", 8), framework=titan, with_=("bf16_grads",), replay=False)


def test_checkpoints_of_torchtitan_are_offered_an_early_stop() -> None:
    """The last product of a layer is not made again: a step is faster, and takes no more memory."""
    job, machines, titan = (
        mofa.load_workload("llama3-70b"),
        mofa.load_cluster("h100-hgx", 64),
        mofa.load_framework("torchtitan"),
    )
    only = {"recompute": "full", "tp": 8, "micro_batch": 1}
    search = find_plans(job, machines, framework=titan, fix=only, top=1, replay=False)
    offer = search.report.numerics_offers[-1]
    assert offer.word == "early_stop" and -0.08 < offer.step_change < -0.03 and offer.device_bytes_change <= 0.0
    assert "by --with: early_stop step -" in numerics_offers_line(search.report)
    early = find_plans(job, machines, framework=titan, fix=only, top=1, replay=False, with_=("early_stop",))
    assert early.framework.early_stop and all(other.word != "early_stop" for other in early.report.numerics_offers)
    change = early.report.plans[0].step_s / search.report.plans[0].step_s - 1.0
    assert change == pytest.approx(offer.step_change, abs=1e-3)
    with pytest.raises(SpecError, match=r"--with early_stop: .*not of megatron's"):
        find_plans(job, machines, with_=("early_stop",), replay=False)


def test_a_step_that_its_host_bounds_is_offered_graphs() -> None:
    """A small model in small micro-batches; the same numerics, and less than the host takes without."""
    small = {
        "model.num_layers": 16, "model.hidden": 1024, "model.mlp.ffn_hidden": 4096, "model.attention.num_heads": 16,
        "model.attention.head_dim": 64, "model.attention.num_kv_heads": 4, "model.vocab": 32000, "batch.seq_len": 1024,
    }  # fmt: skip
    job = mofa.load_workload("llama3-8b", global_batch=8, overrides=small)
    machines = mofa.load_cluster("h200-hgx", 1)
    search = find_plans(job, machines, fix={"micro_batch": 1}, top=1, replay=False)
    offer = search.report.numerics_offers[-1]
    assert offer.word == "cuda_graphs" and offer.step_change < -0.2 and offer.device_bytes_change > 0
    assert "the same numerics in CUDA graphs, by --with: cuda_graphs step -" in numerics_offers_line(search.report)
    graphed = find_plans(job, machines, fix={"micro_batch": 1}, top=1, replay=False, with_=("cuda_graphs",))
    assert graphed.framework.cuda_graphs == "te"
    assert graphed.report.plans[0].step_s < search.report.plans[0].step_s
    assert all(other.word != "cuda_graphs" for other in graphed.report.numerics_offers)
    assert any(note.startswith("cuda_graphs te: ") and "assumed" in note for note in graphed.report.plans[0].notes)
