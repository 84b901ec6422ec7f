"""What find_plans and estimate refuse, from Python: one line that says what, and what to do."""

from __future__ import annotations

from typing import Any

import pytest

import mofa
from mofa.errors import SpecError
from tests.cost.toy import cluster, framework, llama, moe_llama, workload

JOB = workload(llama(num_layers=4))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"fix": {"tp": "8"}}, "tp ('8') must be a whole number"),
        ({"fix": {"tp": 0}}, "tp (0) must be greater than or equal to 1"),
        ({"fix": {"sp": "yes"}}, "sp ('yes') must be true or false"),
        ({"fix": {"micro_batch": 2.5}}, "micro_batch (2.5) must be a whole number"),
        ({"fix": {"foo": 8}}, "foo is no field of a strategy"),
        ({"fix": {"recompute": "zzz"}}, "recompute ('zzz') must be none"),
        ({"fix": {"cp_kind": "x"}}, "cp_kind ('x') must be ring, allgather or a2a"),
        ({"fix": {"balancing": "x"}}, "balancing ('x') must be none or micro_moe"),
        ({"maximum": {"foo": 8}}, "foo is no degree"),
        ({"maximum": {"tp": 0}}, "tp (0) must be a whole number of at least 1"),
        ({"maximum": {"tp": True}}, "tp (True) must be a whole number"),
        ({"with_": "fp8"}, "give a list"),
        ({"top": 0}, "top (0) must be a whole number of at least 1"),
        ({"jobs": 0}, "jobs (0) must be a whole number of at least 1"),
        ({"jobs": 2.0}, "jobs (2.0) must be a whole number of at least 1"),
        ({"flops_convention": "x"}, "must be causal or full"),
        ({"framework": "megatron"}, "load one by mofa.load_framework"),
    ],
)
def test_what_a_search_refuses(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        mofa.find_plans(JOB, cluster(8), **{"framework": framework("megatron"), "replay": False, **asked})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_megatron_of_2022_has_no_experts() -> None:
    job, facts = workload(moe_llama()), framework("megatron-2022")
    with pytest.raises(SpecError, match=r"moe has experts, of which Megatron-LM v3\.0 has Switch's alone"):
        mofa.find_plans(job, cluster(8), framework=facts)
    with pytest.raises(SpecError, match="use framework megatron"):
        mofa.estimate(job, cluster(8), "dp=8", framework=facts)


def test_names_are_not_loaded() -> None:
    for call in (mofa.find_plans, lambda job, machines: mofa.estimate(job, machines, "tp=1")):
        with pytest.raises(SpecError, match=r"load one by mofa\.load_workload"):
            call("llama3-8b", cluster(8))  # type: ignore[operator, arg-type]
        with pytest.raises(SpecError, match=r"load one by mofa\.load_cluster"):
            call(JOB, "h100-hgx")  # type: ignore[operator, arg-type]
    with pytest.raises(SpecError, match="int is no name and no path"):
        mofa.load_workload(3)  # type: ignore[arg-type]
