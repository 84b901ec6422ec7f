"""The search space: which values each degree takes, what constraints leave, no strategy twice."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mofa.blocks.frameworks.recompute import selective_modes_to_search, why_recomputing_module_saves_nothing
from mofa.cost.estimate import estimate_table
from mofa.errors import SpecError
from mofa.schedules import SCHEDULE_NAMES
from mofa.search.space import (
    FEWER_GPUS,
    OPTIONS,
    SOLVED,
    WITH,
    WITHOUT,
    StrategySpace,
    combinations_table,
    constrain_space,
    default_space,
)
from mofa.specs.framework import FrameworkSpec
from mofa.specs.load import load_cluster, load_workload
from mofa.specs.model import ModelSpec
from mofa.specs.strategy import COLUMNS, CP_KINDS, RECOMPUTE_MODULES, StrategyTable
from mofa.specs.workload import OLD_FP8
from tests.cost.toy import cluster, framework, llama, mla_moe, moe_llama, table, workload

FRAMEWORKS = ("megatron", "megatron-local", "torchtitan")
DENSE, MOE, MLA = llama(num_layers=8), moe_llama(num_layers=8), mla_moe()


def space(
    model: ModelSpec = DENSE, name: str = "megatron", gpus: int = 16, seq_len: int = 4096, batch: int = 48
) -> StrategySpace:
    return default_space(workload(model, seq_len=seq_len, global_batch=batch), cluster(gpus), framework(name))


def rows(found: StrategySpace, model: ModelSpec = DENSE, name: str = "megatron", gpus: int = 16) -> StrategyTable:
    return combinations_table(found, cluster(gpus), framework(name))


def constrained(found: StrategySpace, **given: Any) -> StrategySpace:
    return constrain_space(found, **{"fix": {}, "maximum": {}, "with_": (), "without": (), **given})


def test_values_by_hand() -> None:
    """16 GPUs in domains of 8, 8 layers, sequences of 4096, 48 of them."""
    found = space()
    assert found.tp == (1, 2, 4, 8)
    assert found.cp == (1, 2, 4)  # down to 1024 tokens a rank
    assert found.pp == (1, 2, 4, 8)
    assert set(found.vpp) >= {1, 2, 4}
    assert (found.ep, found.etp) == ((1,), (1,))
    assert found.micro_batch == (1, 2, 3, 4, 6, 8, 12, 16)
    assert [(str(spec), layers) for spec, layers in found.recompute] == [
        ("none", -1), ("selective:mlp", -1), ("full", SOLVED), ("full", -1),
    ]  # fmt: skip
    assert space(MOE).ep == (1, 2, 4, 8)
    assert space(MOE).etp == (1, 2, 4, 8)


def test_a_bound_of_etp_holds_where_etp_follows_tp() -> None:
    """torchtitan's etp is 1 or tp, and the space has one number for both."""
    found = space(MOE, "torchtitan")
    assert rows(found, MOE, "torchtitan").etp.max() == 8
    for bound in (1, 2, 4):
        bounded = constrained(found, maximum={"etp": bound})
        kept = rows(bounded, MOE, "torchtitan")
        assert kept.etp.max() == bound and kept.tp.max() == 8
        every = rows(found, MOE, "torchtitan")
        assert len(kept) == int((every.etp <= bound).sum())


@pytest.mark.parametrize(
    ("model", "name", "attention", "modules"),
    [
        (DENSE, "megatron", "fused", ["mlp"]),
        (MOE, "megatron", "fused", ["moe", "moe_act", "layernorm+moe_act"]),
        (MLA, "megatron", "fused", ["mla_up_proj", "moe", "moe_act", "layernorm+moe_act", "mla_up_proj+moe_act",
                                    "layernorm+mla_up_proj+mlp+moe_act",
                                    "layernorm+mla_up_proj+mlp+moe_act+shared_experts"]),
        (DENSE, "megatron-local", "unfused", ["core_attn", "mlp", "core_attn+mlp"]),
        (DENSE, "megatron-local", "sdpa", ["mlp"]),
    ],
)  # fmt: skip
def test_modules_are_recomputed_alone_and_together(
    model: ModelSpec, name: str, attention: str, modules: list[str]
) -> None:
    """Attention's core alone where it is unfused: fused kernels keep what they need anyway."""
    spec = framework(name).model_copy(update={"attention": attention})
    found = selective_modes_to_search(spec, model)
    assert sorted("+".join(one.modules) for one in found) == sorted(modules)


DEGREES = "tp=2 pp=16 ep=32 etp=1 micro_batch=1"


def test_every_set_that_is_left_out_is_beaten() -> None:
    """DeepSeek-V3: a set that is tried takes no longer and no more memory, by a thousandth at most, or ``full:n`` does.

    Of 128 sets those with experts' whole layers are left to ``moe`` alone and to ``full:n``.
    """
    job, machines, spec = load_workload("deepseek-v3"), load_cluster("h800-hgx", 2048), framework("megatron")
    modules = ("moe_act", "layernorm", "mla_up_proj", "mlp", "shared_experts")
    sets = ["+".join(sorted(some)) for n in range(1, 6) for some in itertools.combinations(modules, n)]
    tried = [mode.text.removeprefix("selective:") for mode in selective_modes_to_search(spec, job.model)]
    tried = [some for some in tried if some in sets]
    asked = ["none", *(f"selective:{some}" for some in sets)]
    found = table(job, machines, spec, [f"{DEGREES} recompute={text}" for text in asked])
    costed = estimate_table(job, machines, spec, found)
    step_s, device = (
        dict(zip(["none", *sets], values, strict=True)) for values in (costed.step_s, costed.device_bytes)
    )
    for some in sets:
        beaten = [
            step_s[kept] <= step_s[some] * 1.001 and device[kept] <= device[some] * 1.001 for kept in ("none", *tried)
        ]
        assert any(beaten), some


def test_a_norm_before_experts_or_latents_saves_memory() -> None:
    """What :func:`why_recomputing_module_saves_nothing` leaves out takes as much memory: Transformer Engine's norm is
    part of a linear."""
    for model, saves in ((DENSE, False), (MOE, True), (MLA, True)):
        job, machines, spec = workload(model), cluster(8), framework("megatron")
        found = table(job, machines, spec, ["recompute=none", "recompute=selective:layernorm"])
        kept, recomputed = estimate_table(job, machines, spec, found).allocated_bytes
        assert (why_recomputing_module_saves_nothing(spec, "layernorm", model) is None) == saves
        assert (1.0 - recomputed / kept > 1e-3) == saves


def test_fused_attention_recomputed_saves_nothing() -> None:
    """What :func:`selective_modes_to_search` leaves out takes as much memory; unfused attention saves its scores."""
    for attention, saves in (("fused", False), ("unfused", True)):
        job, machines = workload(DENSE), cluster(8)
        spec = framework("megatron-local" if attention == "unfused" else "megatron")
        spec = spec.model_copy(update={"attention": attention})
        found = table(job, machines, spec, ["recompute=none", "recompute=selective"])
        kept, recomputed = estimate_table(job, machines, spec, found).device_bytes
        assert (1.0 - recomputed / kept > 0.05) == saves
        assert saves or recomputed == pytest.approx(kept, rel=1e-3)


def test_what_frameworks_offer() -> None:
    """Megatron's local spec has no context parallelism; torchtitan recomputes ops or layers, etp is 1 or tp."""
    assert space(name="megatron-local").cp == (1,)
    titan = space(MOE, "torchtitan")
    assert [str(spec) for spec, _ in titan.recompute] == ["none", "ops", "every:2", "full"]
    assert all(layers != SOLVED for _, layers in titan.recompute)
    table = rows(titan, MOE, "torchtitan")
    assert np.all((table.etp == 1) | (table.etp == table.tp))
    assert np.all(table.cp_kind[table.cp > 1] == 1)
    replicas = np.array([chosen.dp_replicate or 1 for chosen in table.option_sets])[table.options]
    sharded = table.dp // np.maximum(np.minimum(replicas, table.dp), 1) * table.cp > 1
    assert np.array_equal(table.zero, np.where(sharded, np.where(table.pp > 1, 2, 3), 0)) and set(replicas) == {1, 2}
    assert np.all(rows(space()).zero == 1)


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("model", [DENSE, MOE, mla_moe()], ids=lambda m: m.name)
def test_no_strategy_twice(name: str, model: ModelSpec) -> None:
    table = rows(space(model, name), model, name)
    assert not pd.DataFrame({c: getattr(table, c) for c in COLUMNS}).duplicated().any()
    assert np.array_equal(table.dp, np.maximum(16 // (table.tp * table.cp * table.pp), 0))
    found = space(model, name).sp
    assert np.array_equal(table.sp, table.tp > 1) if found == (True,) else not np.any(table.sp & (table.tp == 1))
    several = [SCHEDULE_NAMES.index(name) for name in ("interleaved", "zbv")]
    assert np.array_equal(np.isin(table.schedule, several), table.vpp > 1)


def test_the_space_changes_no_numerics() -> None:
    assert space().schedule == ("1f1b", "interleaved")
    assert space(name="torchtitan").schedule == ("1f1b", "interleaved", "zbv")
    assert constrained(space(name="torchtitan"), without=("zbv",)).schedule == ("1f1b", "interleaved")


README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def claimed(line: str) -> list[str]:
    """What README's list of what is searched names in code behind the first words of a line."""
    _, _, said = README.partition("<!-- searched -->")[2].partition("<!-- /searched -->")[0].partition(f"- {line}")
    assert said, line
    return re.findall(r"`([^`]+)`", said.partition("\n- ")[0])


def test_the_readme_says_what_is_searched() -> None:
    of_megatron, of_torchtitan = space(MOE), space(MOE, "torchtitan")
    degrees = [name for name in vars(of_megatron) if isinstance(getattr(of_megatron, name), tuple)]
    named = {"cp_kind", "recompute", "schedule", "balancing", "options"}  # of which the next lines tell the values
    assert claimed("Degrees") == [name for name in degrees if name not in named]
    kinds = claimed("Context parallelism")
    assert [CP_KINDS[kind] for kind in of_megatron.cp_kind] == kinds
    assert [CP_KINDS[kind] for kind in of_torchtitan.cp_kind] == kinds[1:2]
    schedules = claimed("Schedules")[:3]
    assert schedules == list(of_torchtitan.schedule) and list(of_megatron.schedule) == schedules[:2]
    assert set(claimed("Schedules")[3:]) - {"--fix"} == {*SCHEDULE_NAMES} - {*schedules}
    h800 = load_cluster("h800-hgx", 16)
    searched_sets = [*of_megatron.options, *of_torchtitan.options, *default_space(
        workload(MOE, seq_len=4096, global_batch=48), h800, framework("megatron")).options]  # fmt: skip
    options = {name for chosen in searched_sets for name in chosen.chosen_options}
    dispatchers = ["alltoall", *dict.fromkeys(chosen.dispatcher for chosen in searched_sets if chosen.dispatcher)]
    assert options == set(OPTIONS)
    others = ["dp_replicate", "overlap_param_gather", "--fix", "--without"]
    assert claimed("Options") == ["tp_overlap", "dispatcher", *dispatchers, *others]
    assert (
        set(of_torchtitan.options[-1].chosen_options) == {"dp_replicate"}
        and space(mla_moe()).options[-1].tp_overlap is None
    )
    said = claimed("Recomputation")
    spaces = space(), of_megatron, space(mla_moe()), of_torchtitan
    searched = {str(spec) for one in spaces for spec, _ in one.recompute}
    sets = {mode.removeprefix("selective:") for mode in searched if mode.startswith("selective")}
    assert searched - {f"selective:{some}" for some in sets} < set(said)
    named_sets = {text for text in said if set(text.split("+")) <= set(RECOMPUTE_MODULES)}
    assert sets == named_sets - {"core_attn", "layernorm"}  # of which README says where they save nothing
    unfused = framework("megatron-local").model_copy(update={"attention": "unfused"})
    assert any(mode.modules == ("core_attn",) for mode in selective_modes_to_search(unfused, DENSE))


def test_the_readme_says_on_how_many_gpus() -> None:
    """Whole nodes below the cluster, as --without says."""
    assert claimed("Numbers of GPUs") == ["--faults", f"--without {FEWER_GPUS}"] and FEWER_GPUS in WITHOUT


def test_the_readme_says_what_only_a_word_or_an_option_brings() -> None:
    assert claimed("With `--with`") == [word for word in WITH if word != OLD_FP8]
    for option in claimed("Where you set it"):
        name, _, value = option.partition("=")
        if name == "schedule":
            assert value in SCHEDULE_NAMES and value not in (*space().schedule, *space(name="torchtitan").schedule)
        elif name == "zero":
            assert space().zero is None and space(name="torchtitan").zero is None
        elif not name.startswith("--"):
            assert name.removeprefix("framework.") in FrameworkSpec.model_fields


def test_fix() -> None:
    found = constrained(space(), fix={"tp": 4, "recompute": "full:3", "cp_kind": "allgather", "sp": False, "zero": 0})
    table = rows(found)
    assert set(table.tp) == {4}
    assert set(table.recompute_layers) == {3} and [str(m) for m in table.recompute_modes] == ["full"]
    assert not np.any(table.sp) and not np.any(table.zero)
    assert set(table.cp_kind[table.cp > 1]) == {1}
    whole = constrained(space(), fix={"recompute": "full"})
    assert set(rows(whole).recompute_layers) == {-1}


def test_max() -> None:
    table = rows(constrained(space(), maximum={"tp": 2, "pp": 4, "micro_batch": 3}))
    assert set(table.tp) == {1, 2} and set(table.pp) == {1, 2, 4} and set(table.micro_batch) == {1, 2, 3}


@pytest.mark.parametrize("word", ["tp", "pp", "vpp", "cp", "ep", "etp"])
def test_without_a_degree(word: str) -> None:
    table = rows(constrained(space(MOE), without=(word,)), MOE)
    assert set(getattr(table, word)) == {1}
    assert len(table) < len(rows(space(MOE), MOE))


@pytest.mark.parametrize(
    ("word", "left"),
    [("recompute", {"none"}), ("full", {"none", "selective"}), ("selective", {"none", "full"})],
)
def test_without_recomputation(word: str, left: set[str]) -> None:
    found = constrained(space(), without=(word,))
    assert {spec.kind for spec, _ in found.recompute} == left


def test_without_sequence_parallelism() -> None:
    assert not np.any(rows(constrained(space(), without=("sp",))).sp)


def test_sequence_parallelism_is_searched_where_the_framework_runs_both() -> None:
    """Megatron-Core needs it with experts and with overlapped tensor parallelism, torchtitan always has it."""
    both, overlapped = space(), framework("megatron").model_copy(update={"tp_overlap": True})
    job, machines = workload(DENSE, seq_len=4096, global_batch=48), load_cluster("h100-hgx", 16)
    assert both.sp == (True, False)
    assert space(MOE).sp == space(name="torchtitan").sp == default_space(job, machines, overlapped).sp == (True,)
    table = rows(both)
    split = {bool(sp) for sp in table.sp[table.tp == 2]}
    needs_it = np.array([options.tp_overlap is True for options in table.option_sets])[table.options]
    assert split == {True, False} and np.all(table.sp[needs_it])
    apart = [name for name in vars(table) if name in COLUMNS and name != "sp"]
    with_it, without = (
        pd.DataFrame({c: getattr(table, c)[some] for c in apart})
        for some in (table.sp & ~needs_it, (table.tp > 1) & ~table.sp)
    )
    assert len(without) and with_it.equals(without)
    assert np.all(rows(constrained(both, fix={"sp": True})).sp == (rows(constrained(both, fix={"sp": True})).tp > 1))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"with_": ("fp9",)}, ("--with", "fp9", "fp8")),
        ({"without": ("gp",)}, ("--without", "gp", "tp")),
        ({"maximum": {"tp": 0}}, ("--max", "tp", "0")),
        ({"maximum": {"dp": 4}}, ("--max", "dp")),
        ({"fix": {"schedule": "2f2b"}}, ("--fix", "2f2b", "1f1b")),
        ({"fix": {"framework": "megatron"}}, ("--fix", "--framework")),
    ],
)
def test_constraints_that_say_nothing(given: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(SpecError) as caught:
        constrained(space(), **given)
    for word in words:
        assert word in str(caught.value)
