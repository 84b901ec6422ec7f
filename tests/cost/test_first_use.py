"""Kernels that are loaded: what the device waits for, where the host loses its lead; by hand, and played."""

from __future__ import annotations

import numpy as np
import pytest

from mofa.blocks.op import HostSync, Op, Stream, Tape
from mofa.cost.first_use import LIKELY, idle_s, loading

LOAD_S = 2.0


def op(name: str, loads: object = 0.0, rounds: float = 4.0) -> Op:
    return Op(name, "grouped_gemm", Stream(1.0), (), (name,), loads=loads, rounds=rounds)  # type: ignore[arg-type]


def tape(*ops: Op) -> Tape:
    return Tape(ops, {}, (), ())


def idle(loads: float, device_s: float, host_s: float) -> float:
    found, took, _ = loading(tape(op("a", loads)), [device_s], [host_s], LOAD_S)
    return float(idle_s(found, took))


def test_nothing_changes_where_nothing_is_loaded() -> None:
    given = tape(op("a"), op("b", np.zeros(3)))
    seconds, issue = [1.0, 1.0], [1.0, 1.0]
    found = loading(given, seconds, issue, LOAD_S)
    assert found[0] is given
    assert found[1:] == (seconds, issue)


@pytest.mark.parametrize("ahead", [-3.0, 0.0, 0.5, 2.0, 5.0, 100.0])
def test_the_device_waits_for_what_the_host_s_lead_leaves_of_a_load(ahead: float) -> None:
    """The mean over where in the loop it is; a host that is late has no lead."""
    leads = np.linspace(0.0, 1.0, 100001) * max(ahead, 0.0)
    assert idle(1.0, 10.0 + ahead, 10.0) == pytest.approx(np.maximum(LOAD_S - leads, 0.0).mean(), rel=1e-3)
    assert idle(0.3, 10.0 + ahead, 10.0) == pytest.approx(0.3 * idle(1.0, 10.0 + ahead, 10.0))


def test_the_host_loses_its_lead_where_a_load_is_likely() -> None:
    loads = np.array([0.0, 0.9 * LIKELY, 1.1 * LIKELY])
    found, _, issue = loading(tape(op("a", loads)), [4.0], [1.0], LOAD_S)
    waits, _, loaded, _ = found.ops
    assert isinstance(waits.work, HostSync)
    assert np.asarray(waits.present).tolist() == [False, False, True]
    assert loaded.work is None
    assert issue[2] == pytest.approx(LOAD_S * loads)


def test_a_load_in_any_layer_of_a_pass_takes_the_lead_from_before_them() -> None:
    """Two loops of 0.4 loads each are likelier to have loaded than not, one is not."""
    one, two = (op("a", 0.4)._replace(loops_met=met) for met in (1.0, 2.0))
    assert [isinstance(loading(tape(x), [4.0], [1.0], LOAD_S)[0].ops[0].work, HostSync) for x in (one, two)] == [
        False,
        True,
    ]


def test_what_is_computed_again_has_its_kernels() -> None:
    again = op("a~", 1.0)
    assert [one.name for one in loading(tape(again), [1.0], [1.0], LOAD_S)[0].ops] == ["a~"]


def test_a_loop_loads_ahead_of_all_its_ops_and_others_ahead_of_themselves() -> None:
    ops = op("x", rounds=1.0), op("a", 0.2), op("b", 0.1), op("y", 0.3, rounds=1.0)
    found, took, _ = loading(tape(*ops), [1.0] * 4, [1.0] * 4, LOAD_S)
    assert [one.name for one in found.ops] == ["x", "a.loads", "a.loaded", "a", "b", "y.loads", "y.loaded", "y"]
    assert float(idle_s(found, took)) == pytest.approx(0.6 * LOAD_S)
