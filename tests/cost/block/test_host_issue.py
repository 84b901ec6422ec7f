"""The host's time to issue ops, by hand: on the way forward, back, and once more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mofa.blocks.op import Op
from mofa.blocks.work import Attention, Collective, Gemm, MemoryBound
from mofa.cost.block.durations import OpTimingMachine, device_seconds_array
from mofa.cost.block.host_issue import issue_seconds_array
from mofa.specs.load import load_cluster
from tests.blocks.roles import as_named
from tests.cost.toy import alike, cluster, framework, with_facts

FACTS = {
    "eager_op_s": 5.0, "linear_op_s": 9.0, "backward_op_s": 3.0, "model_op_s": 10.0, "function_s": 30.0,
    "guarded_call_s": 70.0, "shard_hook_s": 200.0, "dtensor_op_s": 14.0,
    "dtensor_hook_s": 11.0, "redistribute_s": 150.0, "selective_op_s": 20.0, "gemm_choice_s": 200.0,
    "grad_hook_s": 22.0, "loop_function_s": 12.0, "loop_guarded_s": 40.0, "view_s": 2.0,
    "listing_s": 3.0, "compiled_op_s": 8.0, "compiled_call_s": 13.0, "compiled_module_s": 160.0,
    "compiled_node_s": 53.0, "compiled_attention_s": 85.0, "compiled_model_op_s": 4.0, "packed_s": 6.0,
    "unpacked_s": 7.0, "checkpoint_s": 300.0,
}  # fmt: skip


def issued(*ops: Op, name: str = "torchtitan") -> list[float]:
    """Microseconds of each op."""
    one = cluster(1)
    host = with_facts(one.gpu.curves.host, **{name: value * 1e-6 for name, value in FACTS.items()})
    gpu = one.gpu.model_copy(update={"curves": one.gpu.curves.model_copy(update={"host": host})})
    machine = OpTimingMachine(one.model_copy(update={"gpu": gpu}), {}, framework(name), 1)
    return [float(v) * 1e6 for v in issue_seconds_array(ops, machine)[:, 0]]


def op(name: str, work: Any = None, **more: Any) -> Op:
    return as_named(Op(name, "memory_bound", work or MemoryBound(1.0), **more))


def test_forward_ops_pay_for_the_models_python() -> None:
    """An op of three launches 3 (5 + 10); a product 9 + 10; on distributed tensors 14 + 11 + 10."""
    assert issued(op("rope", launches=3), op("wq", Gemm(1, 1, 1)), op("add", dtensor=True)) == pytest.approx(
        [45.0, 19.0, 35.0]
    )


def test_ops_without_a_kernel_cost_where_python_dispatches_each() -> None:
    """A product with five views: plain as without; distributed 6 (14 + 11) + (9 - 5) + 10; under a mode 6 x 20 more. A
    change of layout with one turn 2 (14 + 11) + 10 + 150."""
    product = op("wq", Gemm(1, 1, 1), view_calls=5.0)
    moved = op("leave", Collective("reduce_scatter", "tp", 1.0), view_calls=1.0, dtensor=True)
    found = issued(product, product._replace(dtensor=True), product._replace(selective=True), moved)
    assert found == pytest.approx([19.0, 164.0, 139.0, 210.0])


def test_backward_ops_pay_for_the_engine_and_repeated_ones_for_python_again() -> None:
    """A node of two kernels 2 x 5 + 3, a product's input gradient 9 + 3, its weight's 9; once more forward 5 + 10."""
    found = issued(
        op("norm~"), op("norm.backward", launches=2), op("wq.dgrad", Gemm(1, 1, 1)), op("wq.wgrad", Gemm(1, 1, 1))
    )
    assert found == pytest.approx([15.0, 13.0, 12.0, 9.0])


def test_functions_of_python_and_hooks() -> None:
    """Two functions around a product 19 + 60, one around a compiled one 15 + 30 + 70; a hook whatever it issues."""
    product = op("fc1", Gemm(1, 1, 1), autograd_functions=2.0)
    activation = op("act", autograd_functions=1.0, guarded_calls=1.0)
    assert issued(product, activation, op("fsdp.weights.copy_out", launches=2)) == pytest.approx([79.0, 115.0, 200.0])


def test_a_compiled_module_is_called_once() -> None:
    """A module 160 and two launches of 8 + 4, then launches alone, with attention's own 85; back a node of 53; a
    compiled loss is a function: 13 + 8. Eager ops in between begin another."""
    kernels = (
        op("wq", compiled=True, launches=2),
        op("attn.core", Attention(1.0, 1.0, 1.0, 1.0, 1.0, 1.0), compiled=True),
    )
    assert issued(*kernels) == pytest.approx([184.0, 97.0])
    assert issued(kernels[0], op("mid.add"), kernels[0]) == pytest.approx([184.0, 15.0, 184.0])
    assert issued(op("wq.dgrad", compiled=True), op("wq.wgrad", compiled=True)) == pytest.approx([65.0, 12.0])
    product = op("wq.dgrad", compiled=True)
    assert issued(product, op("wq.accumulate"), product) == pytest.approx([65.0, 5.0, 12.0])  # added behind the module
    assert issued(op("loss.max", compiled=True)) == pytest.approx([21.0])


def test_saved_tensors_go_through_a_checkpoint_s_hooks() -> None:
    """Two of a product 19 + 2 x 6, once more 19 + 2 x 7; of a compiled part among experts too; back nothing."""
    product = op("wq", Gemm(1, 1, 1), hooked_tensors=2.0)
    assert issued(product, op("moe.act", compiled=True, hooked_tensors=1.0)) == pytest.approx([31.0, 178.0])
    again = issued(as_named(product, "wq~"), as_named(product, "wq.dgrad"))
    assert again == pytest.approx([33.0, 12.0])


def test_a_checkpoint_that_is_a_function_begins_with_an_engine_of_its_own() -> None:
    """A repeated norm 15 + 300."""
    assert issued(op("norm~", checkpoints=1.0), op("norm.backward"), name="megatron-local")[0] == pytest.approx(315.0)


def test_the_host_writes_down_where_large_gradients_lie() -> None:
    """100 million elements of one rank's: 200 + 95.4 x 3; a small group's hardly anything."""
    copied = op("efsdp.reduce_copy_in", listed_elements=1e8)
    assert issued(copied, copied._replace(listed_elements=1e5)) == pytest.approx([486.1, 200.3], abs=0.1)


def test_products_of_unknown_shapes_are_chosen_for_once() -> None:
    """Half of four products 15 + 3 x 15 + 4 + 2 x 200; once more as if they were known."""
    product = op("fc1", Gemm(1, 1, 1), launches=4, kernel_choices=2.0)
    assert issued(product, as_named(product, "fc1~")) == pytest.approx([464.0, 64.0])


def test_every_node_of_autograd_pays_for_the_engine() -> None:
    """Seven kernels of seven nodes 7 (5 + 3), of one 7 x 5 + 3."""
    turned = op("q.rope.backward", launches=7, autograd_nodes=7.0)
    assert issued(turned, turned._replace(autograd_nodes=1.0)) == pytest.approx([56.0, 38.0])


def test_views_that_a_tensor_is_cut_into_cost_a_call_each() -> None:
    assert issued(op("sort", split_views=8.0)) == pytest.approx([15.0 + 16.0])


def test_experts_in_turn_pay_for_each_and_find_their_code_in_caches() -> None:
    """Forward of four experts 4 (15 + 4 + 12) + 18 and 4 (15 + 12 + 40) + 18 + 30, the first one's code in no cache;
    back 4 (5 + 4 + 3 + 12) + 18. Once more as forward."""
    product = op("experts.fc1", Gemm(1, 1, 1), launches=4, autograd_functions=4.0, expert_loops=4.0)
    activation = op("experts.activation", launches=4, autograd_functions=4.0, guarded_calls=4.0, expert_loops=4.0)
    back, again = as_named(product, "experts.fc1.dgrad"), as_named(product, "experts.fc1~")
    assert issued(product, activation) == pytest.approx([142.0, 316.0])
    assert issued(again, back) == pytest.approx([142.0, 114.0])


def test_megatron_adds_gradients_in_hooks() -> None:
    """Four additions 4 (5 + 22); of a weight whose addition has no kernel of its own the hook alone counts so too."""
    four, norm = op("fc1.accumulate", launches=4.0), op("norm.accumulate", launches=0)
    assert issued(four, norm, name="megatron-local") == pytest.approx([108.0, 27.0])
    assert issued(four, norm, op("fc1.wgrad.backward")) == pytest.approx([20.0, 0.0, 8.0])


def test_absent_ops_are_not_issued() -> None:
    absent = op("fc1", autograd_functions=2.0)._replace(present=np.array([False]))
    assert issued(absent) == [0.0]


def test_all_wait_for_the_slowest_host() -> None:
    """Hosts that spread by a tenth: the slowest of four takes 1 + 0.1 sqrt(3) 3/5 times as long; of one, as it is."""
    spread = {}
    for num in (1, 4):
        machines = cluster(num)
        curves = machines.gpu.curves
        fact = curves.overlap_slowdown.model_copy(update={"value": 0.1})
        gpu = machines.gpu.model_copy(update={"curves": curves.model_copy(update={"host_spread": fact})})
        apart = machines.model_copy(update={"gpu": gpu})
        ops = (op("wq", Gemm(64, 64, 64)), op("fc1.accumulate", launches=2.0))
        every = [
            issue_seconds_array(ops, OpTimingMachine(some, {}, framework("megatron-local"), 1))[:, 0]
            for some in (apart, alike(apart))
        ]
        spread[num] = every[0] / every[1]
        assert apart.sync_s == pytest.approx(apart.slowest_host_factor * curves.host.sync_s.value)
    assert spread[1] == pytest.approx([1.0, 1.0])
    assert spread[4] == pytest.approx([1.0 + 0.1 * 3.0**0.5 * 0.6] * 2)


def test_all_wait_for_the_slowest_gpu() -> None:
    """Four GPUs whose products spread by 2 %: the slowest is 1.05 standard deviations behind; copies don't spread."""
    four = cluster(4)
    curves = four.gpu.curves
    spread = curves.overlap_slowdown.model_copy(update={"value": 0.02})
    gpus = [
        four.gpu.model_copy(update={"curves": curves.model_copy(update={"chip_spread": value})})
        for value in (None, spread)
    ]
    ops = (op("wq", Gemm(8192, 8192, 8192)), op("copy", MemoryBound(1e9)))
    alike, apart = (
        device_seconds_array(ops, OpTimingMachine(four.model_copy(update={"gpu": gpu}), {}, framework("megatron"), 1))[
            :, 0
        ]
        for gpu in gpus
    )
    assert apart / alike == pytest.approx([1 + 0.02 * 1.05, 1.0], rel=1e-3)


def test_gpus_that_meet_in_a_layer_wait_for_whichever_clock_is_low() -> None:
    """Chips 1 % apart and clocks that swing by 0.12 of the quarter that they lack: 3.2 % together, in layers 2.2 % more
    than chips alone; times 0.577 for two, 1.039 for four. At the full clock nothing swings."""
    nodes = load_cluster("h100-hgx", 4)
    curves = nodes.gpu.curves
    assert curves.power_limit is not None and curves.power_limit.clock_swing is not None
    assert curves.power_limit.clock_swing.value == 0.12
    chips = curves.overlap_slowdown.model_copy(update={"value": 0.01})
    gpu = nodes.gpu.model_copy(update={"curves": curves.model_copy(update={"chip_spread": chips})})
    nodes = nodes.model_copy(update={"gpu": gpu})
    machine = OpTimingMachine(nodes, {}, framework("megatron"), 3, meeting_gpus=np.array([1, 2, 4]))
    more = (0.01**2 + 0.03**2) ** 0.5 - 0.01
    assert machine.slowdown_by_clock_swings(0.75) == pytest.approx([0.0, more * 3**-0.5, more * 0.6 * 3**0.5])
    assert machine.slowdown_by_clock_swings(1.0) == pytest.approx([0.0, 0.0, 0.0])
    assert OpTimingMachine(nodes, {}, framework("megatron"), 1).slowdown_by_clock_swings(0.75) == 0.0


def test_parts_of_a_shaped_op_take_their_own_time() -> None:
    """An embedding's gradient by its elements and width, and 4 GB besides at the default rate."""
    one = load_cluster("h200-hgx", 1)
    form = one.gpu.curves.memory_bound_curve_like("", False).form
    plain, added = (
        op("grad", MemoryBound(1e9 + more, "embedding_bwd", 4e6, 4096.0, 0.0, ((more, ""),))) for more in (0.0, 4e9)
    )
    seconds = device_seconds_array((plain, added), OpTimingMachine(one, {}, framework("megatron"), 1))[:, 0]
    assert seconds[1] - seconds[0] == pytest.approx(4e9 / form.bytes_per_s)
