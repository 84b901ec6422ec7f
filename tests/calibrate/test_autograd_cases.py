"""The host's microbenchmarks: which ops there are, and in which runs."""

import ast
from pathlib import Path

from mofa.calibrate.shapes.families import FAMILIES, all_cases_of_family
from mofa.calibrate.shapes.host_ops import AUTOGRAD_CALLS, AUTOGRAD_CHAINS


def test_every_chain_goes_both_ways_and_no_op_comes_twice() -> None:
    ops = [case.op for case in all_cases_of_family("autograd")]
    assert len(ops) == len(set(ops)) == 2 * len(AUTOGRAD_CHAINS) + len(AUTOGRAD_CALLS)
    assert {f"{name}_bwd" for name in AUTOGRAD_CHAINS} <= set(ops)


def test_a_quick_run_leaves_them_out() -> None:
    assert "autograd" in FAMILIES
    assert all_cases_of_family("autograd", quick=True) == []
    assert all_cases_of_family("autograd", full=False) == all_cases_of_family("autograd")


def tables_of(bench: str) -> dict[str, set[str]]:
    """Keys of the dictionaries at the top of a module that imports torch, which is not at hand here."""
    source = Path(__file__).parents[2] / "mofa/calibrate/bench" / bench
    return {
        node.target.id: {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Dict)
    }


def test_a_case_names_the_same_ops_as_the_bench() -> None:
    tables = tables_of("torch_autograd.py")
    assert tables["_CHAINS"] == set(AUTOGRAD_CHAINS)
    assert tables["_COLLECTIVES"] | tables["_OPTIMIZERS"] == set(AUTOGRAD_CALLS)


def test_a_sequence_names_the_same_ops_as_the_bench_and_is_no_part_of_a_quick_run() -> None:
    found = all_cases_of_family("sequence")
    assert {case.op for case in found} == tables_of("torch_sequence.py")["_OPS"]
    assert len({case.identity for case in found}) == len(found)
    assert all_cases_of_family("sequence", quick=True) == []
