"""Peak memory of a rank: which instant it is, what is alive then, and what the device holds besides."""

from __future__ import annotations

import numpy as np
import pytest

from mofa.cost.breakdown import LIVE_COMPONENTS, MEMORY_COMPONENTS, Breakdown
from mofa.cost.estimate import estimate_table
from mofa.specs.model import ModelSpec
from tests.cost.toy import cluster, framework, llama, mla_moe, table, workload

DEEP = llama(num_layers=16, vocab=4096)
WIDE_VOCABULARY = llama(num_layers=2, vocab=262144)


def costed(
    model: ModelSpec, strategy: str, *, name: str = "megatron", gpus: int = 8, batch: int = 64,
    params: str | None = None, **options: object,
) -> Breakdown:  # fmt: skip
    job = workload(model, global_batch=batch, precision={"params": params})
    machines, spec = cluster(gpus), framework(name, **options)
    return estimate_table(job, machines, spec, table(job, machines, spec, [strategy]), detail=True)


def component(found: Breakdown, name: str) -> float:
    return float(found.memory_bytes[MEMORY_COMPONENTS.index(name), 0])


def instant(found: Breakdown) -> str:
    return found.instant_names[int(found.instant[0])]


def test_the_loss_is_the_peak_of_a_wide_vocabulary() -> None:
    assert instant(costed(WIDE_VOCABULARY, "dp=8 micro_batch=8")).startswith("loss")
    first = costed(DEEP, "pp=4 dp=2 micro_batch=8")  # the first stage keeps the most, and has no loss
    assert first.fullest_stage[0] == 0
    assert "dense block" in instant(first)


@pytest.mark.parametrize("name", ["megatron", "megatron-local", "torchtitan"])
def test_micro_batches_in_flight(name: str) -> None:
    """A stage holds min(m, pp - r) micro-batches: what it keeps grows with the batch up to pp and no further."""
    spec = "pp=4 dp=2 recompute=none"
    held = {m: costed(DEEP, spec, name=name, batch=2 * m) for m in (1, 2, 4, 8, 16)}
    first = {}
    for m, found in held.items():
        assert found.detail is not None
        assert found.detail.in_flight[0].tolist() == [min(m, 4 - r) for r in range(4)]
        row = MEMORY_COMPONENTS.index("activations")
        first[m] = float(found.detail.components_bytes[row, 0, 0])
    assert first[1] < first[2] < first[4]
    if name != "torchtitan":  # it allocates buffers for all micro-batches
        assert first[4] == pytest.approx(first[8]) == pytest.approx(first[16])


def test_activations_of_a_stage_by_hand() -> None:
    """One micro-batch more in flight adds what the layers of the stage keep, which is the same for every one."""
    row = MEMORY_COMPONENTS.index("activations")
    held = []
    for m in (1, 2, 3, 4):
        found = costed(DEEP, "pp=4 dp=2", batch=2 * m)
        assert found.detail is not None
        held.append(float(found.detail.components_bytes[row, 0, 0]))
    steps = np.diff(held)
    np.testing.assert_allclose(steps, steps[0], rtol=1e-6)


def test_gpipe_holds_all() -> None:
    found = costed(DEEP, "pp=4 dp=2 schedule=gpipe recompute=none", name="torchtitan", batch=32)
    assert found.detail is not None
    assert found.detail.in_flight[0].tolist() == [16.0] * 4


def test_whole_recomputation_keeps_the_input_of_each_layer() -> None:
    """2 bytes of every token's hidden state a layer: 16 layers x 4 x 1024 x 512 x 2 B, at the end of the forward."""
    none, full = (costed(DEEP, f"dp=8 micro_batch=4 recompute={mode}") for mode in ("none", "full"))
    inputs = 16 * 4 * 1024 * 512 * 2
    assert inputs <= component(full, "activations") < component(none, "activations")
    assert component(full, "activations") < inputs + component(none, "activations") / 8  # and one layer's at work


def test_gradients_exist_from_the_second_micro_batch_on() -> None:
    """torchtitan at one micro-batch peaks before gradients are there; under accumulation they always are. Megatron's
    buffers are there from the start."""
    one, several = (costed(DEEP, "dp=8 micro_batch=4 recompute=none", name="torchtitan", batch=b) for b in (32, 64))
    assert component(one, "gradients") < component(several, "gradients")
    assert one.allocated_bytes[0] < several.allocated_bytes[0]
    one, several = (costed(DEEP, "dp=8 micro_batch=4", batch=b) for b in (32, 64))
    assert one.allocated_bytes[0] == several.allocated_bytes[0]


def test_the_optimizer_step_is_a_peak_where_activations_are_few() -> None:
    """foreach holds a copy of the parameters while it steps."""
    fused, foreach = (
        costed(llama(num_layers=16, vocab=32768), "dp=1", name="torchtitan", gpus=1, batch=1, optimizer=kind)
        for kind in ("fused", "foreach")
    )
    assert foreach.allocated_bytes[0] >= fused.allocated_bytes[0]


def test_the_native_allocator_holds_more() -> None:
    native, mapped = (costed(DEEP, "dp=8", allocator=kind) for kind in ("native", "expandable"))
    # of equal tensors, but that whole segments leave some a rest of less than 1 MiB (should_split)
    assert mapped.allocated_bytes[0] < native.allocated_bytes[0] < 1.002 * mapped.allocated_bytes[0]
    assert component(native, "allocator_slack") > component(mapped, "allocator_slack") >= 0


def test_the_context_is_a_fact() -> None:
    found = costed(DEEP, "dp=8")
    assert component(found, "cuda_context") == cluster(8).gpu.context_bytes.value
    rest = component(found, "cuda_context") + component(found, "communicators")
    assert found.device_bytes[0] == pytest.approx(found.reserved_bytes[0] + rest)


def test_what_a_stage_holds_sums_to_its_device() -> None:
    for model, strategy in ((DEEP, "pp=4 dp=2"), (mla_moe(num_layers=8), "pp=2 ep=4 etp=1")):
        found = costed(model, strategy)
        assert found.detail is not None
        np.testing.assert_allclose(found.detail.components_bytes.sum(axis=0), found.detail.device_bytes, rtol=1e-9)
        live = found.detail.components_bytes[: len(LIVE_COMPONENTS)].sum(axis=0)
        np.testing.assert_allclose(live, found.detail.allocated_bytes, rtol=1e-9)
        assert int(found.fullest_stage[0]) == int(found.detail.device_bytes[0].argmax())


def test_ddps_buckets_are_gradients() -> None:
    """Both are whole and fp32, and a bucket is there before its gradients are."""
    found = costed(DEEP, "dp=8 micro_batch=8", name="torchtitan", data_parallel="ddp")
    params = component(found, "parameters")
    assert params <= component(found, "gradients") <= 2.01 * params
    assert component(found, "buffers") < 0.5 * params


@pytest.mark.parametrize(("options", "buckets"), [({}, 0.0), ({"data_parallel": "ddp"}, 1.0)], ids=["alone", "ddp"])
@pytest.mark.parametrize("compiled", [False, True])
def test_parameters_in_bf16_under_autocast(options: dict[str, str], buckets: float, compiled: bool) -> None:
    """Parameters, gradients, DDP's buckets and states take half; nothing is cast, and the step is shorter."""
    gpus = 1 + int(buckets)
    how = {"name": "torchtitan", "gpus": gpus, "batch": 8, "compile": compiled, **options}
    spec = f"dp={gpus} micro_batch=2 recompute=none"
    wide, narrow = costed(DEEP, spec, **how), costed(DEEP, spec, params="bf16", **how)  # type: ignore[arg-type]
    params = component(wide, "parameters")
    assert component(narrow, "parameters") == params / 2
    assert component(narrow, "optimizer_states") == params
    assert component(narrow, "gradients") == pytest.approx((1 + buckets) * params / 2)
    assert component(wide, "weight_copies") > 0 == component(narrow, "weight_copies")
    assert component(narrow, "activations") < component(wide, "activations")
    assert narrow.step_s[0] < wide.step_s[0]
