"""The choice of options against all of them, and what it makes of a real strategy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mofa
from mofa.errors import SpecError
from mofa.search.experts.token_chunks import plan_token_chunks
from mofa.search.layer_options import LayerOptions, choose_layer_options
from tests.search.experts.test_token_chunks import MEGATRON, UNEVEN, cluster


@given(st.integers(0, 10_000), st.floats(0.2, 1.2))
@settings(deadline=None, max_examples=25)
def test_agrees_with_all_choices(seed: int, tightness: float) -> None:
    rng = np.random.default_rng(seed)
    layers, options, stages = 4, 3, 2
    problem = LayerOptions(
        stage=np.sort(rng.integers(0, stages, layers)), layer_s=rng.uniform(1e-3, 9e-3, (layers, options)),
        kept_bytes=rng.uniform(0, 2**30, (layers, options)), live_bytes=rng.uniform(0, 2**30, (layers, options)),
        stage_s=rng.uniform(0, 1e-3, stages), stage_bytes_at_layer_peak=rng.uniform(0, 2**28, stages),
        stage_bytes_outside_layers=rng.uniform(0, 2**29, stages), limit_bytes=0.0,
        micro_batches=int(rng.integers(1, 9)),
    )  # fmt: skip
    every = [np.array(o) for o in np.ndindex(*(options,) * layers)]
    need = sorted(float(problem.stage_bytes(o).max()) for o in every)
    problem = replace(problem, limit_bytes=need[min(int(tightness * len(need)), len(need) - 1)] + 2**20)
    fitting = [problem.step_s(o) for o in every if problem.stage_bytes(o).max() <= problem.limit_bytes]
    found = choose_layer_options(problem)
    assert found is not None and found.optimal
    assert problem.stage_bytes(found.option).max() <= problem.limit_bytes
    assert found.step_s == pytest.approx(min(fitting), rel=1e-6)
    assert found.bound_s == pytest.approx(found.step_s, rel=1e-5) and found.bound_s <= found.step_s


def test_nothing_fits() -> None:
    one = np.ones((1, 1))
    assert choose_layer_options(LayerOptions(np.zeros(1, int), one, one, one, *(np.zeros(1),) * 3, 0.0, 1)) is None


def test_a_joint_choice_is_no_slower_than_one_for_all() -> None:
    """Between what keeping everything needs and what full recomputation in 8 chunks does, some layers can keep."""
    strategy = "pp=4 ep=8 micro_batch=1 recompute=full"
    report = plan_token_chunks(UNEVEN, cluster(88), strategy, framework=MEGATRON, iterations=2, joint=True)
    found = report.joint
    assert found is not None and found.optimal
    assert found.uniform_step_s is not None
    assert found.bound_s <= found.step_s < found.uniform_step_s
    assert len(found.layers) == 8 and {x.stage for x in found.layers} == {0, 1, 2, 3}
    assert {x.recompute for x in found.layers} == {"none", "full"}
    assert all(x.token_chunks == 1 for x in found.layers[:3])  # no experts
    tight = plan_token_chunks(UNEVEN, cluster(60), strategy, framework=MEGATRON, iterations=1, joint=True)
    assert tight.joint is None and tight.joint_asked


def test_only_plain_1f1b() -> None:
    with pytest.raises(SpecError, match="needs schedule 1f1b"):
        plan_token_chunks(
            mofa.load_workload("memfine-model-1"), cluster(120), "pp=4 vpp=2 ep=8", framework=MEGATRON, iterations=1,
            joint=True,
        )  # fmt: skip
