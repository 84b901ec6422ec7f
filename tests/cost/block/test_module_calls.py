"""The host's seconds of calls of modules, by hand: who pays, each way, and what comes on top."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mofa.blocks.backward import Recompute
from mofa.blocks.op import Op, Tape, TimedModuleCall
from mofa.blocks.work import Collective, Gemm, GroupedGemm, MemoryBound
from mofa.cost.block.durations import OpTimingMachine
from mofa.cost.block.host_issue import issue_seconds_array
from mofa.specs.base import Fact
from mofa.specs.host import MODULES, ModuleCallTime, SmallLayerTime
from mofa.specs.scaling import rescaled_host
from tests.blocks.roles import as_named
from tests.blocks.small import EXPERTS, build, context, in_fp8
from tests.cost.toy import cluster, framework, llama, silent_host, with_facts

PRODUCT = Gemm(1, 1, 1)


def fact(us: float) -> dict[str, Any]:
    return {"value": f"{us} us", "provenance": "assumed", "source": "an example"}


def calls_of(each: dict[str, tuple[float, float, float, float]]) -> dict[str, ModuleCallTime]:
    """Microseconds forward and back, of a call and of each member."""
    names = ("forward_s", "backward_s", "forward_each_s", "backward_each_s")
    return {
        name: ModuleCallTime.model_validate(dict(zip(names, map(fact, values), strict=True)))
        for name, values in each.items()
    }


def machine(each: dict[str, tuple[float, float, float, float]], name: str = "megatron") -> OpTimingMachine:
    """A host that takes no time but 5 us an op, 100 a checkpoint, and the modules'."""
    one = silent_host(cluster(1)).on_hosts("shared")
    host = with_facts(one.gpu.curves.host, eager_op_s=5e-6, linear_op_s=5e-6, checkpoint_s=100e-6)
    curves = one.gpu.curves.model_copy(update={"host": host.model_copy(update={"modules": calls_of(each)})})
    gpu = one.gpu.model_copy(update={"curves": curves})
    return OpTimingMachine(one.model_copy(update={"gpu": gpu}), {}, framework(name), 1)


def issued(ops: tuple[Op, ...], each: dict[str, tuple[float, float, float, float]]) -> list[float]:
    """Microseconds of each op."""
    return [float(v) * 1e6 for v in issue_seconds_array(ops, machine(each))[:, 0]]


def op(name: str, work: Any = None, call: TimedModuleCall | None = None, **more: Any) -> Op:
    return as_named(Op(name, "memory_bound", work or MemoryBound(1.0), module_call=call, **more))


def test_the_first_op_of_a_call_pays_for_all_of_it() -> None:
    """Forward 40 once, whatever is launched; an op of no module in between 5; another call of the module 40 again."""
    each = {"norm_linear": (40.0, 60.0, 0.0, 0.0)}
    one, other = TimedModuleCall("norm_linear"), TimedModuleCall("norm_linear")
    ops = (
        op("norm", call=one, launches=2), op("other"), op("fc1", PRODUCT, one), op("norm2", call=other),
    )  # fmt: skip
    assert issued(ops, each) == pytest.approx([40.0, 5.0, 0.0, 40.0])


def test_the_way_back_is_paid_by_what_is_issued_first() -> None:
    """A linear's input gradient 60, its weight's and the norm's nothing; what is made again before it 40 once more."""
    one = TimedModuleCall("norm_linear")
    ops = (
        op("norm~", call=one), op("fc1~", PRODUCT, one), op("fc1.dgrad", PRODUCT, one), op("fc1.wgrad", PRODUCT, one),
        op("norm.backward", call=one),
    )  # fmt: skip
    assert issued(ops, {"norm_linear": (40.0, 60.0, 0.0, 0.0)}) == pytest.approx([40.0, 0.0, 60.0, 0.0, 0.0])


def test_members_cost_each() -> None:
    """Eight experts 100 + 8 x 5 forward, 200 + 8 x 20 back."""
    one = TimedModuleCall("grouped_linear", num_members=8.0)
    product = op("experts.fc1", GroupedGemm(8, 8, 8, 8), one)
    each = {"grouped_linear": (100.0, 200.0, 5.0, 20.0)}
    assert issued((product,), each) == pytest.approx([140.0])
    assert issued((as_named(product, "experts.fc1.dgrad"),), each) == pytest.approx([360.0])


def test_members_cost_less_where_autograd_records_nothing() -> None:
    """Eight experts 100 + 8 x 3 in a checkpoint's first pass; 100 + 8 x 5 where that was not timed."""
    call = TimedModuleCall("grouped_linear", num_members=8.0, is_recorded=False)
    product = op("experts.fc1", GroupedGemm(8, 8, 8, 8), call)
    plain = machine({"grouped_linear": (100.0, 200.0, 5.0, 20.0)})
    assert issue_seconds_array((product,), plain)[0, 0] == pytest.approx(140e-6)
    host = plain.cluster.gpu.curves.host
    third = Fact(value=3e-6, provenance="assumed", source="an example")
    less = host.modules["grouped_linear"].model_copy(update={"forward_each_unrecorded_s": third})
    host = host.model_copy(update={"modules": {"grouped_linear": less}})
    curves = plain.cluster.gpu.curves.model_copy(update={"host": host})
    gpu = plain.cluster.gpu.model_copy(update={"curves": curves})
    timed = replace(plain, cluster=plain.cluster.model_copy(update={"gpu": gpu}))
    assert issue_seconds_array((product,), timed)[0, 0] == pytest.approx(124e-6)


def test_rotations_of_latent_attention_have_their_own_time_or_any_rotation_s() -> None:
    turn = op("q.rope", call=TimedModuleCall("latent_rope"))
    assert issued((turn,), {"rope": (30.0, 20.0, 0.0, 0.0)}) == pytest.approx([30.0])
    timed = {"rope": (30.0, 20.0, 0.0, 0.0), "latent_rope": (97.0, 68.0, 0.0, 0.0)}
    assert issued((turn,), timed) == pytest.approx([97.0])
    assert issued((as_named(turn, "q.rope.backward"),), timed) == pytest.approx([68.0])


@pytest.mark.parametrize("name", ["moe.etp_gather", "moe.etp_gather_weights", "moe.etp_scatter"])
def test_collectives_over_ranks_of_an_expert_are_functions_of_python(name: str) -> None:
    """Which take what any module's collective does, each way."""
    tapes = build(context(llama(moe=EXPERTS), framework("megatron"), tp=2, sp=True, etp=2), moe=True)
    for tape in (tapes.forward, tapes.backward):
        calls = [op.module_call for op in tape.ops if (op.origin or op.name) == name]
        assert calls
        assert all(call is not None and call.module == "collective" for call in calls)


def test_experts_one_after_the_other_have_a_linear_each() -> None:
    """Eight calls of 40 us and 60 back for each of both linears, beside what their kernels' own ops take."""
    each = {"linear": (40.0, 60.0, 0.0, 0.0)}
    assert issued((op("fc1", PRODUCT, TimedModuleCall("linear", num_calls=8.0)),), each) == [320.0]
    fw = framework("megatron", experts="sequential")
    tapes = build(context(llama(moe=EXPERTS), fw), moe=True)
    for name in ("experts.fc1", "experts.fc2"):
        by = next(op.module_call for op in tapes.forward.ops if op.name == name)
        assert by is not None and by.module == "linear" and float(np.max(by.num_calls)) == EXPERTS["num_experts"]


def test_products_of_unknown_shapes_wait_for_a_choice_each_once() -> None:
    """Of eight experts half: 4 x 50 beside 100 forward, 4 x 70 for either gradient beside 200 back, nothing where it is
    made again; in another format 4 x 90; where choices were not timed, what PyTorch's product takes."""
    one = TimedModuleCall("grouped_linear", num_members=8.0)
    product = op("experts.fc1", GroupedGemm(8, 8, 8, 8), one, kernel_choices=4.0)
    each = {"grouped_linear": (100.0, 200.0, 0.0, 0.0), "kernel_choice": (50.0, 70.0, 0.0, 0.0)}
    assert issued((product,), each) == pytest.approx([300.0])
    again, dgrad, wgrad = (as_named(product, f"experts.fc1{end}") for end in ("~", ".dgrad", ".wgrad"))
    assert issued((again, dgrad, wgrad), each) == pytest.approx([100.0, 480.0, 280.0])
    wide = product._replace(module_call=TimedModuleCall("grouped_linear", "fp8-delayed", 8.0))
    assert issued((wide,), {**each, "kernel_choice fp8-delayed": (90.0, 0.0, 0.0, 0.0)}) == pytest.approx([460.0])
    one_gpu = machine({"grouped_linear": each["grouped_linear"]})
    host = with_facts(one_gpu.cluster.gpu.curves.host, gemm_choice_s=30e-6)
    curves = one_gpu.cluster.gpu.curves.model_copy(update={"host": host})
    gpu = one_gpu.cluster.gpu.model_copy(update={"curves": curves})
    untimed = replace(one_gpu, cluster=one_gpu.cluster.model_copy(update={"gpu": gpu}))
    assert issue_seconds_array((product,), untimed)[0, 0] == pytest.approx(220e-6)


def test_a_collective_within_a_module_comes_on_top() -> None:
    """A gather 30 between the cast, which pays 40, and the product."""
    one = TimedModuleCall("linear")
    gather = op("fc1.all_gather", Collective("all_gather", "tp", 1.0), one)
    ops = (op("fc1.cast", call=one), gather, op("fc1", PRODUCT, one))
    each = {"linear": (40.0, 60.0, 0.0, 0.0), "collective": (30.0, 20.0, 0.0, 0.0)}
    assert issued(ops, each) == pytest.approx([40.0, 30.0, 0.0])
    assert issued((op("fc1.dgrad", PRODUCT, one), gather), {"linear": each["linear"]}) == pytest.approx([60.0, 5.0])


def test_python_that_launches_nothing_is_paid_for_and_a_checkpoint_on_top() -> None:
    """A layer's own 70; made again 70 and the checkpoint's 100."""
    layer = Op("layer", "host", None, launches=0, module_call=TimedModuleCall("layer"))
    again = as_named(layer._replace(checkpoints=1.0), "layer~")
    each = {"layer": (70.0, 0.0, 0.0, 0.0)}
    assert issued((layer,), each) == pytest.approx([70.0])
    assert issued((again,), each) == pytest.approx([170.0])


def test_an_absent_first_op_leaves_the_call_to_the_next() -> None:
    one = TimedModuleCall("linear")
    absent = op("fc1.cast", call=one)._replace(present=np.array([False]))
    assert issued((absent, op("fc1", PRODUCT, one)), {"linear": (40.0, 60.0, 0.0, 0.0)}) == pytest.approx([0.0, 40.0])


def test_formats_have_times_of_their_own_and_what_was_not_timed_is_issued_op_by_op() -> None:
    """fp8 90, bf16 40; a norm, of which nothing is known, 2 x 5."""
    each = {"linear": (40.0, 60.0, 0.0, 0.0), "linear fp8-blockwise": (90.0, 120.0, 0.0, 0.0)}
    ops = (
        op("fc1", PRODUCT, TimedModuleCall("linear", "fp8-blockwise")),
        op("fc2", PRODUCT, TimedModuleCall("linear", "fp8-delayed")),
        op("norm", call=TimedModuleCall("norm"), launches=2),
    )  # fmt: skip
    assert issued(ops, each) == pytest.approx([90.0, 40.0, 10.0])


def test_a_slower_host_takes_longer_for_modules_too() -> None:
    host = machine({"linear": (40.0, 60.0, 1.0, 2.0)}).cluster.gpu.curves.host
    slow = host.scaled_to_speed(10e-6, "an example").modules["linear"]
    assert slow.seconds(forward=True) == pytest.approx((80e-6, 2e-6))
    assert slow.seconds(forward=False) == pytest.approx((120e-6, 4e-6))


def test_a_layer_that_was_timed_says_how_fast_modules_are() -> None:
    """A small op twice as slow, a layer three times forward and four times back: modules go by the layer, each way, and
    small ops by themselves. A profile whose layer was not timed goes by the small op alone."""
    silent = machine({"linear": (40.0, 60.0, 1.0, 2.0)}).cluster.gpu.curves.host
    plain = silent.model_copy(update={"layer_issue_s": None, "layer_back_s": None})
    facts = dict.fromkeys(
        ("layer_issue_s", "layer_back_s"), Fact(value=1e-3, provenance="assumed", source="an example")
    )
    host, layer = plain.model_copy(update=facts), SmallLayerTime(3e-3, 4e-3)
    slow = host.scaled_to_speed(10e-6, "an example", layer)
    assert slow.modules["linear"].seconds(forward=True) == pytest.approx((120e-6, 3e-6))
    assert slow.modules["linear"].seconds(forward=False) == pytest.approx((240e-6, 8e-6))
    assert slow.eager_op_s.value == pytest.approx(10e-6)
    assert slow.layer_issue_s is not None and slow.layer_issue_s.value == pytest.approx(3e-3)
    for other in (plain.scaled_to_speed(10e-6, "an example", layer), host.scaled_to_speed(10e-6, "an example")):
        assert other.modules["linear"].seconds(forward=True) == pytest.approx((80e-6, 2e-6))
        assert other.modules["linear"].seconds(forward=False) == pytest.approx((120e-6, 4e-6))


def called(tape: Tape) -> Counter[str]:
    """How often a tape calls each module: what it costs more where that takes a microsecond both ways."""
    free = dict.fromkeys(MODULES, (0.0, 0.0, 0.0, 0.0))
    found = {name: sum(issued(tape.ops, {**free, name: (1.0, 1.0, 0.0, 0.0)})) for name in MODULES}
    return +Counter({name: round(us - sum(issued(tape.ops, free))) for name, us in found.items()})


DENSE = {
    "norm_linear": 2, "linear": 2, "rope": 2, "attention": 1, "self_attention": 1, "swiglu": 1, "bias_dropout_add": 2,
}  # fmt: skip


def test_a_dense_layer_calls_each_module_as_often_forward_as_back() -> None:
    """Norm with qkv and with gate and up, the projection and down, two rotary embeddings; the layer's own Python has no
    way back."""
    found = build(context(llama(), framework("megatron")))
    assert called(found.forward) == {**DENSE, "layer": 1}
    assert called(found.backward) == DENSE


def test_a_layer_of_experts_calls_its_modules() -> None:
    """Over two ranks: the norm ahead of the experts is a module of its own, tokens are sorted there and back. Counts,
    rows and probabilities are sent and rows sent back, of which three have gradients."""
    model = llama(moe=EXPERTS)
    found = build(context(model, framework("megatron"), ep=2), moe=True)
    both = {
        "norm_linear": 1, "linear": 1, "rope": 2, "attention": 1, "self_attention": 1, "bias_dropout_add": 2,
        "norm": 1, "router": 1, "permute": 1, "unpermute": 1, "sort_chunks": 2, "grouped_linear": 2,
        "weighted_swiglu": 1,
    }  # fmt: skip
    own = {"layer": 1, "moe_layer": 1, "experts": 1, "dispatch": 1, "exchange": 4}
    assert called(found.forward) == {**both, **own}
    assert called(found.backward) == {**both, "exchange": 3}


def test_casts_reduce_their_largest_elements_as_calls_of_their_own() -> None:
    """Under tensor parallelism with one scale a tensor: two inputs forward and two gradients back, beside the linears'
    collectives."""
    ctx = in_fp8(context(llama(), framework("megatron"), tp=2, sp=True), "tensorwise")
    found = build(ctx)
    assert called(found.forward)["amax"] == called(found.backward)["amax"] == 2
    assert called(found.forward)["collective"] == 4
    assert called(build(in_fp8(ctx, "blockwise")).forward)["amax"] == 0


def test_older_profiles_take_every_collective_for_one() -> None:
    """Of 30 us forward and 20 back: four of experts forward and three back, two of casts and four of linears."""
    names: tuple[str, ...] = MODULES
    free = {name: (0.0, 0.0, 0.0, 0.0) for name in names if name not in ("exchange", "amax")}
    one = {"collective": (30.0, 20.0, 0.0, 0.0)}
    experts = build(context(llama(moe=EXPERTS), framework("megatron"), ep=2), moe=True)
    casts = build(in_fp8(context(llama(), framework("megatron"), tp=2, sp=True), "tensorwise"))

    def us(ops: tuple[Op, ...]) -> float:
        return sum(issued(ops, {**free, **one})) - sum(issued(ops, free))

    assert us(experts.forward.ops) == pytest.approx(4 * 30.0)
    assert us(experts.backward.ops) == pytest.approx(3 * 20.0)
    assert us(casts.forward.ops) == pytest.approx((2 + 4) * 30.0)


@pytest.mark.parametrize(("recipe", "contexts"), [("blockwise", 1), ("tensorwise", 1), ("delayed", 0)])
def test_fp8_enters_contexts_and_fills_up_experts_rows(recipe: str, contexts: int) -> None:
    """Rows and their probabilities are filled up and results cut, and so are their gradients. Delayed scaling has one
    context around all layers. Padded by the router, rows have no call of their own."""
    ctx = in_fp8(context(llama(moe=EXPERTS), framework("megatron"), ep=2), recipe)
    found = build(ctx, moe=True)
    assert called(found.forward)["fp8_context"] == contexts
    assert called(found.forward)["fp8_padding"] == called(found.backward)["fp8_padding"] == 3
    assert called(found.backward)["fp8_context"] == 0
    filled = build(replace(ctx, framework=ctx.framework.model_copy(update={"router_padding": True})), moe=True)
    assert called(filled.forward)["fp8_padding"] == 0


def test_what_is_computed_again_is_called_again() -> None:
    found = build(context(llama(), framework("megatron")), Recompute("full", reentrant=True))
    twice = {name: 2 * times for name, times in DENSE.items()}
    assert called(found.backward) == {**twice, "layer": 1}


def test_other_frameworks_call_no_modules() -> None:
    found = build(context(llama(), framework("megatron-local")))
    assert all(o.module_call is None for o in (*found.forward.ops, *found.backward.ops))


def test_setting_what_a_small_op_takes_scales_modules_that_were_not_set() -> None:
    """Twice as long an op, twice as long a linear; a norm that was set as well stays."""
    own: dict[str, Any] = {
        "cpu": "one", "eager_op_s": fact(5.0),
        "modules": {"linear": {"forward_s": fact(40.0)}, "norm": {"forward_s": fact(20.0)}},
    }  # fmt: skip
    changed = {
        **own, "eager_op_s": fact(10.0), "modules": {**own["modules"], "norm": {"forward_s": fact(30.0)}},
    }  # fmt: skip
    made = rescaled_host({"curves": {"host": changed}}, {"curves": {"host": own}})["curves"]["host"]
    assert made["modules"]["linear"]["forward_s"]["value"] == "80 us"
    assert made["modules"]["norm"]["forward_s"]["value"] == "30.0 us"


def test_setting_what_a_layer_takes_scales_modules_alone_each_way() -> None:
    """Three times as long a layer forward: calls of modules forward; back as before, as are small ops."""
    own: dict[str, Any] = {
        "cpu": "one", "eager_op_s": fact(5.0), "sync_s": fact(7.0), "layer_issue_s": fact(900.0),
        "layer_back_s": fact(800.0), "modules": {"linear": {"forward_s": fact(40.0), "backward_s": fact(60.0)}},
    }  # fmt: skip
    changed = {**own, "layer_issue_s": fact(2700.0)}
    made = rescaled_host({"curves": {"host": changed}}, {"curves": {"host": own}})["curves"]["host"]
    linear = made["modules"]["linear"]
    assert [linear[way]["value"] for way in ("forward_s", "backward_s")] == ["120 us", "60 us"]
    assert (made["sync_s"]["value"], made["layer_issue_s"]) == ("7 us", fact(2700.0))
