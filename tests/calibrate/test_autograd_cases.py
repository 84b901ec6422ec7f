"""The host's microbenchmarks: which ops there are, and in which runs."""

from mofa.calibrate.shapes import AUTOGRAD_CALLS, AUTOGRAD_CHAINS, FAMILIES, cases


def test_every_chain_goes_both_ways_and_no_op_comes_twice() -> None:
    ops = [case.op for case in cases("autograd")]
    assert len(ops) == len(set(ops)) == 2 * len(AUTOGRAD_CHAINS) + len(AUTOGRAD_CALLS)
    assert {f"{name}_bwd" for name in AUTOGRAD_CHAINS} <= set(ops)


def test_a_quick_run_leaves_them_out() -> None:
    assert "autograd" in FAMILIES
    assert cases("autograd", quick=True) == []
    assert cases("autograd", full=False) == cases("autograd")


def test_a_case_names_the_same_ops_as_the_bench() -> None:
    import ast
    from pathlib import Path

    source = Path(__file__).parents[2] / "mofa/calibrate/bench/torch_autograd.py"
    tables = {
        node.target.id: {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Dict)
    }
    assert tables["_CHAINS"] == set(AUTOGRAD_CHAINS)
    assert tables["_COLLECTIVES"] | tables["_OPTIMIZERS"] == set(AUTOGRAD_CALLS)
