"""Modules' host times from rows of a bench, by hand, and through the files that hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mofa.calibrate.cases import Case, Sample
from mofa.calibrate.fits.folder import rows_and_curve_fits_of_folder
from mofa.calibrate.fits.profile import measured_gpu_profile, merge_curves
from mofa.calibrate.fits.te_host_facts import (
    LATENT_LAYER,
    MOE_LAYER,
    layer_time_over_small_op,
    module_host_facts,
    module_times_over_small_layer,
)
from mofa.calibrate.fits.te_relative_host_times import HostTimesOverSmallLayer
from mofa.calibrate.measurements import Row, append_row, read_rows
from mofa.specs.host import SmallLayerTime
from mofa.units import parse_quantity
from tests.committed import read_yaml

ROOT = Path(__file__).parents[2]

LAYER_US = 10.0
"""A layer on the machine of these rows, either way: so short that numbers are easily read. [us]"""


def row(op: str, variant: str, us: float, dtype: str = "bf16", **sizes: int) -> Row:
    shape: dict[str, Any] = {"ops": 16, **sizes}
    return Row(
        Case("te_host", op, variant, dtype, "grid", shape), Sample(us * 1e-6, us * 1e-6, us * 1e-6, 9), "H", "one"
    )


def paces(op: str, dtype: str = "bf16", **sizes: int) -> list[Row]:
    """What the host took for a layer each way, and for a small op, of which nothing is made."""
    return [
        row(op, "layer_fwd", LAYER_US, dtype, **sizes), row(op, "layer_bwd", LAYER_US, dtype, **sizes),
        row(op, "small_op", LAYER_US / 160, dtype, **sizes),
    ]  # fmt: skip


def case(op: str, forward: float, backward: float, dtype: str = "bf16", **sizes: int) -> list[Row]:
    """Microseconds of a chain's module, beside the layer."""
    return [
        row(op, "fwd", forward, dtype, **sizes), row(op, "bwd", backward, dtype, **sizes),
        *paces(op, dtype, **sizes),
    ]  # fmt: skip


def model(op: str, layers: int, calls: dict[str, float], **parts: float) -> list[Row]:
    """Microseconds of a model's parts and of its methods' calls, beside the layer."""
    sizes = {"layers": layers, "micro_batches": 1, "parameters": 3}
    rows = [row(op, name, us, **sizes) for name, us in parts.items()]
    rows += [row(op, f"call:{name}", us, **sizes, calls=layers) for name, us in calls.items()]
    return [*rows, *paces(op, **sizes)]


DENSE = {
    "SelfAttention.get_query_key_value_tensors": 400, "TELinear.forward": 140,
    "TELayerNormColumnParallelLinear.forward": 210, "TEDotProductAttention.forward": 280, "bias_swiglu_impl": 98,
}  # fmt: skip
ROWS = [
    *case("column_linear", 100, 150, first=1, fused=1), *case("column_linear", 90, 140, first=1, fused=0),
    *case("norm_linear", 150, 200, first=1, fused=1), *case("rope", 20, 30), *case("attention", 200, 250, groups=2),
    *case("swiglu", 70, 90), *case("bias_dropout_add", 60, 80), *case("silu", 5, 10),
    *case("column_linear", 160, 220, "fp8-blockwise", first=0, fused=1),
    *case("column_linear", 190, 220, "fp8-blockwise", first=1, fused=1),
    *(r for n in (1, 8, 64) for r in case("grouped_linear", 100 + 5 * n, 200 + 12 * n, experts=n, first=1, fused=1)),
    *model("model_dense", 2, DENSE, forward=4000, backward=5000),
    *model("model_dense", 6, DENSE, forward=10000, backward=11984),
]  # fmt: skip
"""A layer takes 1.4 times its chains: forward where it calls them, back as a whole, 1746 of 1247 with 5 plain nodes."""
ENDS, ENDS_BACK = 1000.0, 1508.0
"""What these models take beside their layers, forward and back. [us]"""
BACK = 1746 / (2 * 150 + 2 * 200 + 2 * 30 + 250 + 90 + 2 * 80 + 5 * 10)


def test_modules_are_told_in_layers() -> None:
    """Forward as layers call them, else 1.4 times a chain; back 1.33 times. In fp8 in micro-batches that find weights
    cast, and by themselves the 30 us that the cast takes in the first."""
    found = module_times_over_small_layer(HostTimesOverSmallLayer.from_rows(ROWS))
    assert found["linear"] == pytest.approx({"forward_s": 14.0, "backward_s": 15.0 * BACK})
    assert found["rope"] == pytest.approx({"forward_s": 2.8, "backward_s": 3.0 * BACK})
    assert found["linear fp8-blockwise"] == pytest.approx(
        {"forward_s": 16.0, "backward_s": 22.0 * BACK, "forward_cast_s": 3.0}
    )
    assert found["grouped_linear"] == pytest.approx(
        {"forward_s": 14.0, "forward_each_s": 0.7, "backward_s": 20.0 * BACK, "backward_each_s": 1.2 * BACK}
    )


def test_what_is_left_is_a_module_s_own() -> None:
    """Queries, keys and values 400 - 210; a layer's forward of 1500 less that, two of 140, 210, 28 and 84, 280, 98."""
    found = module_times_over_small_layer(HostTimesOverSmallLayer.from_rows(ROWS))
    assert found["self_attention"] == pytest.approx({"forward_s": 19.0, "backward_s": 5.0 * BACK})
    assert found["layer"] == pytest.approx({"forward_s": 0.8})
    assert "router" not in found


def test_a_head_has_its_own_call_and_the_embedding_the_rest_of_the_ends() -> None:
    """Of 1000 us beside the layers a norm takes 70 and the head's call 300: 630 lie ahead of the first layer. Back the
    head has what norm and embedding leave; together they are the ends."""
    rows = [*ROWS, *case("norm", 50, 100, experts=8), *model("model_dense", 2, {"GPTModel._postprocess": 300})]
    found = module_times_over_small_layer(HostTimesOverSmallLayer.from_rows(rows))
    assert found["head"]["forward_s"] == pytest.approx(30.0)
    assert found["embedding"]["forward_s"] == pytest.approx(63.0)
    for way, ends in (("forward_s", ENDS), ("backward_s", ENDS_BACK)):
        assert sum(found[name][way] for name in ("norm", "head", "embedding")) == pytest.approx(ends / 10)


def test_norms_are_timed_over_heads() -> None:
    """Two norms make a projection 404 us longer, of which the copy of the keys takes 5."""
    queries = {**DENSE, "SelfAttention.get_query_key_value_tensors": 804}
    rows = [*case("norm", 50, 100, experts=8), *model("model_qk_norm", 2, queries)]
    assert module_times_over_small_layer(HostTimesOverSmallLayer.from_rows([*ROWS, *rows]))["norm"][
        "forward_s"
    ] == pytest.approx(19.95)


def test_latent_attention_is_what_its_layer_takes_more() -> None:
    """Its layer with three linears with norms, four without and a norm, less those; a model's ends as a dense one's."""
    known = module_times_over_small_layer(HostTimesOverSmallLayer.from_rows([*ROWS, *case("norm", 50, 100, experts=8)]))
    rows = [*case("norm", 50, 100, experts=8), *model("model_latent", 2, {}, forward=6000, backward=8508)]
    found = module_times_over_small_layer(HostTimesOverSmallLayer.from_rows([*ROWS, *rows]))["latent_attention"]
    for way, layer in (("forward", (6000 - 1000) / 2), ("backward", (8508 - 1508) / 2)):
        others = sum(n * known[name].get(f"{way}_s", 0.0) for name, n in LATENT_LAYER.items())
        assert found[f"{way}_s"] == pytest.approx(layer / 10 - others)


CHAINED = ("norm", "permute", "unpermute", "sort_chunks", "weighted_swiglu", "router_gate", "router_topk")
CALLS = ("RMSNorm.forward", "permute", "unpermute", "sort_chunks_by_idxs", "weighted_bias_swiglu_impl")
EXPERTS = {
    **dict.fromkeys(CALLS, 70), "MoELayer.route": 300, "MoELayer.preprocess": 270, "TEGroupedMLP.forward": 500,
    "MoELayer.dispatch": 20, "MoELayer.combine": 10,
}  # fmt: skip


def test_a_layer_of_experts_is_met_as_a_whole() -> None:
    """What is left of a layer of eight experts of 3240 us is its own Python, of its way back of 4480 us the grouped
    linears'. The counts' 270 - 70, the experts' 500 - 70 - 2 (140 + 8 x 7)."""
    rows = [row for op in CHAINED for row in case(op, 50, 100, experts=8)]
    rows += [
        *model("model_moe8", 1, EXPERTS, forward=ENDS + 3240, backward=ENDS_BACK + 4480),
        *model("model_moe8", 2, EXPERTS, forward=ENDS + 2 * 3240, backward=ENDS_BACK + 2 * 4480),
    ]
    found = module_times_over_small_layer(HostTimesOverSmallLayer.from_rows([*ROWS, *rows]))
    assert found["dispatch"] == pytest.approx({"forward_s": 20.0})
    assert found["experts"] == pytest.approx({"forward_s": 3.8})
    grouped, own = found["grouped_linear"], found["moe_layer"]
    for way, layer in (("forward", 324.0), ("backward", 448.0)):
        others = sum(n * found[name].get(f"{way}_s", 0.0) for name, n in MOE_LAYER.items())
        products = 2 * (grouped[f"{way}_s"] + 8 * grouped[f"{way}_each_s"])
        assert others + products + own.get(f"{way}_s", 0.0) == pytest.approx(layer)


def test_experts_are_met_where_layers_have_several_numbers_of_them() -> None:
    """Forward 40 and 2 each where it is called; back half of what layers of 8 and 64 take beside all else, 50 and 4
    each. In fp8 what its chains take longer than those in bf16. Over two ranks its dispatcher takes 40 longer
    for four collectives, and the way back of the models at least 60 for three."""
    others = sum(
        n * known.get("backward_s", 0.0) for name, n in MOE_LAYER.items() if (known := with_experts([]).get(name))
    )
    rows = []
    for op, n in (("model_moe8", 8), ("model_moe64", 64)):
        back = ENDS_BACK + 10 * others + 2 * (50 + 4 * n)
        rows += model(op, 1, {**EXPERTS, "TEGroupedLinear.forward": 40 + 2 * n}, forward=ENDS + 3240, backward=back)
    for op, n in (("model_ep2_moe8", 4), ("model_ep2_moe64", 32)):
        calls = {**EXPERTS, "TEGroupedLinear.forward": 40 + 2 * n, "MoELayer.dispatch": 60}
        more = 60 if n == 32 else 90
        rows += model(op, 1, calls, backward=ENDS_BACK + 10 * others + 2 * (50 + 4 * n) + more)
    for n in (8, 64):
        rows += case("grouped_linear", 130 + 6 * n, 230 + 15 * n, "fp8-blockwise", experts=n, first=0, fused=1)
        rows += case("grouped_linear", 130 + 10 * n, 230 + 15 * n, "fp8-blockwise", experts=n, first=1, fused=1)
    found = with_experts(rows)
    line = {"forward_s": 4.0, "forward_each_s": 0.2, "backward_s": 5.0, "backward_each_s": 0.4}
    assert found["grouped_linear"] == pytest.approx(line)
    more = {"forward_s": 3.0, "forward_each_s": 0.1, "backward_s": 3.0, "backward_each_s": 0.3}
    expected = {name: line[name] + more[name] for name in line} | {"forward_each_cast_s": 0.4}
    assert found["grouped_linear fp8-blockwise"] == pytest.approx(expected)
    assert found["exchange"] == pytest.approx({"forward_s": 1.0, "backward_s": 2.0})


def with_experts(rows: list[Row]) -> dict[str, dict[str, float]]:
    chains = [row for op in CHAINED for row in case(op, 50, 100, experts=8)]
    models = [] if rows else model("model_moe8", 1, EXPERTS, forward=ENDS + 3240, backward=ENDS_BACK + 4480)
    return module_times_over_small_layer(HostTimesOverSmallLayer.from_rows([*ROWS, *chains, *models, *rows]))


@pytest.mark.parametrize(("more", "share"), [(-500, (1492 - 500) / 1492), (500, 1.0)])
def test_clocks_around_calls_are_no_part_of_them(more: int, share: float) -> None:
    """Where a dense layer takes 500 us less than its calls together, each is as much shorter; where it takes 500 more,
    they are as they were timed."""
    calls = {**DENSE, "fused_apply_rotary_pos_emb": 28, "bias_dropout_add_fused_train": 84}
    together = 400 + 210 + 2 * 140 + 2 * 28 + 280 + 98 + 2 * 84
    assert together == 1492
    rows = [row for n in (2, 4) for row in model("model_dense", n, calls, forward=ENDS + n * (together + more))]
    times = HostTimesOverSmallLayer.from_rows(rows)
    assert times.timer_correction == pytest.approx(share)
    assert times.method_call_time("model_dense", "TELinear.forward") == pytest.approx(14.0 * share)


def test_choices_are_what_new_numbers_of_rows_take_longer() -> None:
    """Eight experts' 8 products 480 us longer forward and 16 back 1440; 32's twice as long each, with kernels that are
    loaded. Products with one scale a tensor are chosen for once, by the recipe that comes first; never below nothing.
    What was not timed with known numbers is left out. All as much longer as modules are in layers."""
    rows = [
        *case("grouped_seen_rows", 200, 300, experts=8, width=1024),
        *case("grouped_new_rows", 680, 1740, experts=8, width=1024),
        *case("grouped_seen_rows", 500, 900, experts=32, width=1024),
        *case("grouped_new_rows", 4340, 12420, experts=32, width=1024),
        *case("grouped_new_rows", 200, 300, experts=4, width=1024),
        *case("grouped_seen_rows", 300, 300, "fp8-delayed", experts=8, width=1024),
        *case("grouped_new_rows", 700, 1900, "fp8-delayed", experts=8, width=1024),
        *case("grouped_seen_rows", 300, 300, "fp8-tensorwise", experts=8, width=1024),
        *case("grouped_new_rows", 310, 290, "fp8-tensorwise", experts=8, width=1024),
        *case("grouped_seen_rows", 300, 300, "fp8-blockwise", experts=8, width=1024),
        *case("grouped_new_rows", 340, 290, "fp8-blockwise", experts=8, width=1024),
    ]
    found = module_times_over_small_layer(HostTimesOverSmallLayer.from_rows([*ROWS, *rows]))
    assert found["kernel_choice"] == pytest.approx({"forward_s": 1.4 * 6.0, "backward_s": BACK * 9.0})
    assert found["kernel_choice fp8-delayed"] == pytest.approx({"forward_s": 1.4 * 5.0, "backward_s": BACK * 10.0})
    assert found["kernel_choice fp8-tensorwise"] == found["kernel_choice fp8-delayed"]
    assert found["kernel_choice fp8-blockwise"] == pytest.approx({"forward_s": 1.4 * 0.5, "backward_s": 0.0})
    assert "kernel_choice" not in module_times_over_small_layer(HostTimesOverSmallLayer.from_rows(ROWS))


def test_two_ranks_say_what_collectives_and_attention_take() -> None:
    """A layer of 1500 us takes 1980 under tensor parallelism, over four collectives 120 each, and back 1746 + 6 x 60.

    Attention's call of 280 us takes 480 as a ring of two steps; back a layer takes 100, 600 and 900 more by kinds.
    """
    rows = [
        *model("model_tp2_dense", 2, {}, forward=ENDS + 2 * 1980, backward=ENDS_BACK + 2 * 2106),
        *model("model_tp2_dense", 4, {}, forward=ENDS + 4 * 1980, backward=ENDS_BACK + 4 * 2106),
    ]
    for kind, call, more in (("p2p", 480, 100), ("a2a", 1080, 600), ("all_gather", 380, 900)):
        for layers in (2, 4):
            backward = 5000 + (layers - 2) * 1746 + layers * more
            rows += model(f"model_cp2_{kind}", layers, {"TEDotProductAttention.forward": call}, backward=backward)
    found = module_times_over_small_layer(HostTimesOverSmallLayer.from_rows([*ROWS, *rows]))
    assert found["collective"] == pytest.approx({"forward_s": 12.0, "backward_s": 6.0})
    attention = found["attention"]
    assert (attention["forward_each_s"], attention["backward_each_s"]) == pytest.approx((10.0, 30.0))
    assert found["exchanged_attention"] == pytest.approx({"forward_s": 80.0, "backward_s": 60.0})
    assert found["gathered_attention"] == pytest.approx({"forward_s": 10.0, "backward_s": 60.0})


def test_rows_of_machines_are_joined_by_their_layers(tmp_path: Path) -> None:
    """A machine twice as slow forward and three times back changes nothing, whatever its small op takes; facts are of
    the host that is asked for, each way."""
    for one, forward, back, small in (("one", 1.0, 1.0, 1.0), ("other", 2.0, 3.0, 1.5)):
        slower = {"bwd": back, "backward": back, "layer_bwd": back, "small_op": small}
        for r in ROWS:
            seconds = slower.get(r.case.variant, forward) * r.sample.median_s
            append_row(tmp_path, r.case, Sample(seconds, seconds, seconds, 9), "H", one)
    rows = list(read_rows(tmp_path))
    found = module_times_over_small_layer(HostTimesOverSmallLayer.from_rows(rows))
    assert found["linear"] == pytest.approx({"forward_s": 14.0, "backward_s": 15.0 * BACK})
    assert layer_time_over_small_op(rows) == pytest.approx((1.5 / 1.25 * 160, 2.0 / 1.25 * 160))
    facts = module_host_facts(
        {"linear": {"forward_s": 14.0, "backward_s": 15.0}}, SmallLayerTime(5e-6, 4e-6), "an example"
    )
    assert facts["linear"]["forward_s"] == {"value": "70 us", "provenance": "measured", "source": "an example"}
    assert facts["linear"]["backward_s"]["value"] == "60 us"


def test_rows_without_a_layer_beside_them_say_nothing() -> None:
    """Small ops do not tell how fast modules' Python runs."""
    rows = [r for r in ROWS if not r.case.variant.startswith("layer")]
    assert module_times_over_small_layer(HostTimesOverSmallLayer.from_rows(rows)) == {}
    assert layer_time_over_small_op(rows) is None


def test_contexts_and_padding_are_calls_of_their_own() -> None:
    """A chain fills up rows and cuts them: half of its line is a call's. Contexts are entered one at a time, and have
    no way back."""
    rows = [r for n in (8, 64) for r in case("fp8_padding", 40 + 2 * n, 60 + n, experts=n)]
    rows += [row("fp8_context", "fwd", 35, "fp8-blockwise"), *paces("fp8_context", "fp8-blockwise")]
    found = module_times_over_small_layer(HostTimesOverSmallLayer.from_rows([*ROWS, *rows]))
    assert found["fp8_context fp8-blockwise"] == pytest.approx({"forward_s": 3.5})
    assert found["fp8_padding"] == pytest.approx(
        {"forward_s": 2.8, "forward_each_s": 0.14, "backward_s": 3.0 * BACK, "backward_each_s": 0.05 * BACK}
    )
    assert not {"fp8_context", "fp8_padding"} & set(
        module_times_over_small_layer(HostTimesOverSmallLayer.from_rows(ROWS))
    )


def test_a_folder_of_modules_joins_one_of_kernels() -> None:
    """The profile has both, with modules by the layer that the second folder timed."""
    folders = [ROOT / "measurements" / name for name in ("h100-1gpu", "h100-te-host-layer")]
    kernels, modules = (rows_and_curve_fits_of_folder(folder)[1] for folder in folders)
    assert kernels.layer_in_small_ops is None and modules.layer_in_small_ops is not None
    base = read_yaml(ROOT / "hardware_profiles" / "gpus" / "h100-sxm.yaml")
    host = measured_gpu_profile(base, merge_curves([kernels, modules], folders), "mine", "here")["curves"]["host"]
    assert host["layer_issue_s"]["source"].startswith("here")
    op_s = parse_quantity(host["eager_op_s"]["value"], "s")
    ahead, _ = modules.layer_in_small_ops
    assert parse_quantity(host["layer_issue_s"]["value"], "s") == pytest.approx(ahead * op_s, rel=1e-3)
    assert host["modules"]["linear"]["forward_s"]["source"].startswith("here")
