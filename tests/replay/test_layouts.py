"""Layouts in closed form and by replay: what the framework makes by itself, and others."""

from __future__ import annotations

import pytest

import mofa
from mofa.plan.result import Plan

GIVEN = [
    ("llama3-8b", 8, "megatron", "pp=4 vpp=2 tp=2", "E|(t*5|)*6ttL"),
    ("llama3-8b", 8, "megatron", "pp=4", "Et*9|t*9|t*9|t*5L"),
    ("llama3-8b", 8, "megatron", "pp=4 vpp=2", "Et*5|(t*5|)*5tt|L"),
    ("llama3-8b", 8, "torchtitan", "pp=2 vpp=2 recompute=full", "E|t*16|t*16|L"),
    ("deepseek-v3", 256, "megatron", "tp=2 pp=8 vpp=2 ep=16 etp=1 recompute=full", "Et*9|(t*4|)*13m|L"),
    ("deepseek-v3", 256, "megatron", "tp=2 pp=8 vpp=2 ep=16 etp=1 recompute=full", "Et*5|(t*4|)*14mL"),
    ("deepseek-v3", 256, "megatron", "tp=2 pp=8 vpp=2 ep=16 etp=1 recompute=full:2", "Et*5|(t*4|)*7|(t*7|)*4m|L|"),
]
ALONE = [
    ("llama3-8b", 8, "megatron", "pp=4 vpp=2 tp=2", "Et*4|(t*4|)*6t*4L"),
    ("llama3-8b", 8, "torchtitan", "pp=4 recompute=full", "Et*8|t*9|t*8|t*7L"),
    ("llama3-8b", 6, "megatron", "pp=3", "Et*11|t*12|t*9L"),
]


def _estimated(name: str, gpus: int, framework: str, strategy: str, *, replay: bool, over_time: bool = False) -> Plan:
    workload, machines = mofa.load_workload(name, global_batch=gpus * 4), mofa.load_cluster("h200-hgx", gpus)
    return mofa.estimate(
        workload, machines, strategy, framework=mofa.load_framework(framework), replay=replay, explain=False,
        over_time=over_time,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "gpus", "framework", "strategy", "layout"), GIVEN)
def test_the_closed_form_agrees_with_the_replay(
    name: str, gpus: int, framework: str, strategy: str, layout: str
) -> None:
    """Steps within 3.5 %, allocated memory within 2 %, as without a layout: chunks without layers, ends alone,
    predictions alone."""
    closed, played = (
        _estimated(name, gpus, framework, f"{strategy} micro_batch=1 layout={layout}", replay=replay)
        for replay in (False, True)
    )
    assert closed.step_s == pytest.approx(played.step_s, rel=0.035)
    assert closed.memory.allocated_bytes == pytest.approx(played.memory.allocated_bytes, rel=0.02)
    for estimate in (closed, played):
        assert estimate.layout is not None
        assert (estimate.layout.text, estimate.layout.by) == (layout, "strategy")
        assert estimate.strategy.layout == layout


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize(("name", "gpus", "framework", "strategy", "layout"), ALONE)
def test_a_layout_that_is_made_without_one_changes_nothing(
    name: str, gpus: int, framework: str, strategy: str, layout: str, replay: bool
) -> None:
    """Whether the framework splits so by itself or needs the layout that is printed."""
    own, given = (
        _estimated(name, gpus, framework, f"{strategy} micro_batch=1{also}", replay=replay, over_time=True)
        for also in ("", f" layout={layout}")
    )
    assert own.layout is not None
    assert own.layout.text == layout
    assert own.layout.by == ("mofa" if "pp=3" in strategy else "framework")
    assert any("needs a layout" in note for note in own.notes) == (own.layout.by == "mofa")
    assert (given.step_s, given.memory, given.time) == (own.step_s, own.memory, own.time)


@pytest.mark.parametrize("strategy", ["pp=8 vpp=4 recompute=full", "pp=16 vpp=2 schedule=zbv recompute=none"])
def test_torchtitans_ends_stand_alone_where_layers_are_few(strategy: str) -> None:
    """32 layers over 32 chunks: of 34 the first two chunks have two, and each end takes one."""
    closed, played = (
        _estimated("llama3-8b", 16, "torchtitan", f"{strategy} micro_batch=1", replay=replay)
        for replay in (False, True)
    )
    assert played.layers_by_chunk == (1, 2, *[1] * 29, 0)
    assert closed.step_s == pytest.approx(played.step_s, rel=0.035)
    assert closed.memory.allocated_bytes == pytest.approx(played.memory.allocated_bytes, rel=0.02)
