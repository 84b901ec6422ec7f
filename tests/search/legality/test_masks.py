"""What each framework can run: every check rejects what the framework rejects, by hand, and lets the rest through."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mofa.cost.stages import split_layers
from mofa.errors import MofaError, StrategyError
from mofa.search.legality.masks import CHECKS, JobAndMachines, check_strategies
from mofa.search.one_strategy import checked_strategy_row
from mofa.search.space import combinations_table, default_space, with_first_option_set
from mofa.specs.model import ModelSpec
from mofa.specs.strategy import StrategySpec
from tests.cost.toy import EXPERTS, cluster, framework, llama, mla_moe, moe_llama, workload

TWELVE = {"kind": "gqa", "num_heads": 12, "num_kv_heads": 4, "head_dim": 64}
WINDOWED = llama(num_layers=8, attention={**TWELVE, "window": 128})
REASONS = tuple(c.reason for c in CHECKS)
DENSE, DEEP, MOE = llama(num_layers=8), llama(num_layers=16), moe_llama(num_layers=8)
BIASED = moe_llama(num_layers=8, moe={**EXPERTS, "expert_bias": True})
HALVES = {"data_parallel": "hsdp", "dp_replicate": 2}


def verdict(
    model: ModelSpec, name: str = "megatron", *, gpus: int = 16, batch: int = 64, seq_len: int = 1024, **fields: Any
) -> str:
    """The first reason against a strategy, "" where there is none."""
    spec = framework(name, **fields.pop("options", {}))
    job = workload(model, seq_len=seq_len, global_batch=batch)
    titan = name == "torchtitan"
    defaults: dict[str, Any] = {
        "sp": fields.get("tp", 1) > 1,
        "zero": 3 if titan else 1,
        "cp_kind": "allgather" if titan else "ring",
    }
    if titan and fields.get("pp", 1) > 1:
        defaults["zero"] = 2
    fields = {**defaults, **fields}
    used = fields.get("tp", 1) * fields.get("cp", 1) * fields.get("pp", 1)
    fields.setdefault("dp", max(gpus // used, 1))
    if fields.get("vpp", 1) > 1:
        fields.setdefault("schedule", "interleaved")
    strategy = StrategySpec(framework=name, **fields)
    try:
        checked_strategy_row(job, cluster(gpus), spec, strategy)
    except StrategyError as error:
        text = str(error)
        rows = [c for c in CHECKS if _says(c.message, job, gpus, spec, strategy) in text]
        assert "; " in text or ":" in text
        return rows[0].reason if rows else text
    return ""


def _says(message: Any, job: Any, gpus: int, spec: Any, strategy: StrategySpec) -> str:
    import numpy as np

    from mofa.schedules import SCHEDULE_NAMES
    from mofa.specs.strategy import BALANCING, CP_KINDS, RecomputeSpec, StrategyTable

    mode = RecomputeSpec.parse(strategy.recompute)
    values = {
        n: np.array([getattr(strategy, n)])
        for n in ("tp", "sp", "pp", "vpp", "cp", "ep", "etp", "dp", "micro_batch", "zero")
    }
    row = StrategyTable(
        **values, cp_kind=np.array([CP_KINDS.index(strategy.cp_kind)]), recompute=np.array([0]),
        recompute_layers=np.array([-1]),
        schedule=np.array([SCHEDULE_NAMES.index(strategy.schedule)]),
        balancing=np.array([BALANCING.index(strategy.balancing)]), layout=np.array([0]), options=np.array([0]),
        recompute_modes=(mode,), layouts=(strategy.layout,),
    )  # fmt: skip
    return str(message(JobAndMachines(job, cluster(gpus), spec), row)) or "nothing at all"


def test_there_is_a_reason_for_each_check() -> None:
    assert len(set(REASONS)) == len(REASONS)


@pytest.mark.parametrize(
    ("reason", "model", "name", "fields"),
    [
        ("multi_token_prediction", mla_moe(), "torchtitan", {}),
        ("gpus", DENSE, "megatron", {"tp": 4, "cp": 3, "dp": 1}),
        ("gpus", DENSE, "megatron", {"tp": 8, "pp": 4, "dp": 1}),
        ("heads", DENSE, "megatron", {"tp": 16}),  # 8 heads
        ("heads", llama(attention=TWELVE), "megatron", {"tp": 8}),
        ("heads", llama(), "torchtitan", {"tp": 8}),  # 4 key-value heads: a rank's part is no whole head
        ("widths", llama(mlp={"ffn_hidden": 1530}), "megatron", {"tp": 4}),
        ("widths", moe_llama(moe={**EXPERTS, "expert_hidden": 130}), "megatron", {"tp": 4, "etp": 4}),
        ("widths", llama(vocab=32002), "torchtitan", {"tp": 4}),
        ("experts", MOE, "megatron", {"ep": 16}),
        ("experts", moe_llama(moe={"num_experts": 6, "top_k": 2, "expert_hidden": 256}), "megatron", {"ep": 4}),
        ("experts", DENSE, "megatron", {"ep": 2}),
        ("expert_grid", MOE, "megatron", {"pp": 4, "ep": 8}),  # 4 ranks a stage
        ("expert_tensor_parallel", MOE, "torchtitan", {"tp": 4, "ep": 2, "etp": 2}),
        ("expert_tensor_parallel", MOE, "torchtitan", {"tp": 4, "ep": 1, "etp": 1}),
        ("expert_parallel", MOE, "torchtitan", {"tp": 4, "ep": 4, "etp": 1, "pp": 4, "dp": 1}),
        ("expert_tensor_parallel", BIASED, "megatron", {"tp": 2, "etp": 2}),
        ("expert_grid", MOE, "torchtitan", {"ep": 8, "gpus": 8, "options": HALVES}),  # each of two replicas has 4 ranks
        ("expert_parallel", MOE, "torchtitan", {"tp": 2, "ep": 2, "etp": 1, "gpus": 4, "options": HALVES}),
        ("rank_order", MOE, "megatron", {"pp": 2, "ep": 2, "options": {"rank_order": "tp-cp-ep-pp-dp"}}),
        ("dispatcher", MOE, "megatron", {"options": {"dispatcher": "deepep"}}),
        ("dispatcher", MOE, "torchtitan", {"tp": 2, "ep": 2, "etp": 2, "options": {"dispatcher": "deepep"}}),
        ("sequence_parallel", MOE, "megatron", {"tp": 2, "sp": False}),
        ("sequence_parallel", DENSE, "megatron", {"tp": 2, "sp": False, "options": {"tp_overlap": True}}),
        ("tp_overlap", mla_moe(), "megatron", {"tp": 2, "ep": 2, "options": {"tp_overlap": True}}),
        ("context_parallel", DENSE, "megatron-local", {"cp": 2}),
        ("context_parallel", WINDOWED, "megatron", {"cp": 2}),
        ("context_parallel", WINDOWED, "torchtitan", {"cp": 2}),
        ("context_parallel", llama(num_layers=8, attention={**TWELVE, "sinks": True}), "megatron",
         {"cp": 2, "cp_kind": "allgather"}),
        ("context_parallel", DENSE, "megatron", {"cp": 8, "cp_kind": "a2a"}),  # 4 key-value heads
        ("context_parallel", DENSE, "megatron", {"tp": 2, "cp": 4, "cp_kind": "a2a"}),  # 2 of a rank
        ("context_parallel", DENSE, "torchtitan", {"cp": 2, "cp_kind": "a2a"}),
        ("sequence", DENSE, "megatron", {"cp": 2, "seq_len": 1022}),  # halves of both ends: multiples of 4
        ("sequence", DENSE, "megatron", {"tp": 4, "seq_len": 1022}),
        ("layers", DENSE, "megatron", {"pp": 16}),
        ("layers", DENSE, "megatron", {"pp": 4, "vpp": 4}),
        ("batch", DENSE, "megatron", {"micro_batch": 3}),
        ("batch", DENSE, "megatron", {"batch": 24}),
        ("tied_embeddings", llama(num_layers=8, tied_embeddings=True), "torchtitan", {"pp": 2}),
        ("schedule", DENSE, "megatron", {"pp": 2, "schedule": "gpipe"}),
        ("schedule", DENSE, "torchtitan", {"pp": 1, "schedule": "gpipe"}),
        ("schedule", DENSE, "megatron", {"pp": 2, "vpp": 2, "schedule": "1f1b"}),
        ("schedule", DENSE, "megatron", {"pp": 2, "vpp": 2, "schedule": "zbv"}),
        ("interleaving", DENSE, "megatron", {"pp": 4, "vpp": 2, "batch": 4 * 6}),  # 6 micro-batches in 4 stages
        ("interleaving", DENSE, "megatron", {"pp": 4, "vpp": 2, "batch": 8}),  # 2
        ("interleaving", DEEP, "torchtitan", {"pp": 4, "vpp": 2, "batch": 4 * 9}),  # 9 in 2 rounds
        ("interleaving", DEEP, "torchtitan", {"pp": 4, "vpp": 2, "batch": 36, "schedule": "interleaved-zb"}),
        ("schedule", DEEP, "megatron-2022", {"pp": 4, "vpp": 2, "options": {"deepspeed": "zero1"}}),
        ("schedule", DEEP, "megatron-2022", {"pp": 4, "vpp": 2, "options": {"splits_layers": "greedy"}}),
        ("layout", DENSE, "megatron", {"pp": 2, "layout": "Et*4|t*3L"}),
        ("layout", DENSE, "megatron", {"pp": 2, "layout": "decoder-first-pipeline-num-layers:8"}),
        ("layout", DENSE, "megatron", {"pp": 4, "layout": "Et*4||t*3|tL"}),
        ("layout", DENSE, "megatron-2022", {"pp": 2, "layout": "Et*4|t*4L"}),
        ("layout", DENSE, "torchtitan", {"pp": 2, "layout": "decoder-first-pipeline-num-layers:4"}),
        ("recompute", DENSE, "megatron", {"recompute": "ops"}),
        ("recompute", DENSE, "megatron", {"recompute": "selective:moe_act"}),
        ("recompute", DENSE, "torchtitan", {"recompute": "selective"}),
        ("recompute", DENSE, "megatron-local", {"recompute": "selective:layernorm"}),
        ("recompute", DENSE, "torchtitan", {"recompute": "every:9"}),  # of 8 layers
        ("recompute", DENSE, "torchtitan", {"recompute": "every:7", "pp": 2}),  # of 5 with the embedding or the head
        ("recompute", DENSE, "torchtitan", {"recompute": "ops", "pp": 2, "vpp": 2, "schedule": "interleaved-zb"}),
        ("zero", DENSE, "megatron", {"zero": 2}),
        ("zero", DENSE, "torchtitan", {"zero": 1}),
        ("zero", DENSE, "torchtitan", {"tp": 2, "zero": 0, "options": {"data_parallel": "ddp"}}),
    ],
)  # fmt: skip
def test_what_is_rejected(reason: str, model: ModelSpec, name: str, fields: dict[str, Any]) -> None:
    assert verdict(model, name, **fields) == reason


@pytest.mark.parametrize(
    ("model", "name", "fields"),
    [
        (DENSE, "megatron", {}),
        (DENSE, "megatron", {"tp": 8}),  # 4 key-value heads, each on two ranks
        (DENSE, "megatron", {"tp": 2, "sp": False}),
        (DENSE, "megatron", {"cp": 2, "seq_len": 1020}),
        (DENSE, "megatron", {"pp": 8}),
        (llama(num_layers=9), "megatron", {"pp": 8}),
        (DENSE, "megatron", {"pp": 4, "vpp": 2, "batch": 16}),
        (DENSE, "megatron", {"pp": 4, "batch": 24}),  # 1F1B takes any number
        (DENSE, "megatron", {"recompute": "full"}),
        (DENSE, "megatron", {"recompute": "full:1"}),
        (DENSE, "megatron", {"recompute": "selective:layernorm"}),
        (DENSE, "megatron", {"zero": 0}),
        (DENSE, "torchtitan", {"recompute": "every:8"}),
        (llama(vocab=32002), "megatron", {"tp": 4}),  # padded
        (MOE, "megatron", {"ep": 8, "etp": 1}),
        (BIASED, "megatron", {"tp": 2, "ep": 8, "etp": 1}),
        (MOE, "megatron", {"ep": 2, "etp": 1, "options": {"dispatcher": "deepep"}}),
        (MOE, "torchtitan", {"ep": 4, "options": HALVES}),
        (MOE, "megatron", {"tp": 4, "ep": 8, "etp": 2}),
        (MOE, "megatron", {"tp": 2, "etp": 1, "ep": 8}),
        (mla_moe(), "megatron", {"recompute": "selective:mla_up_proj"}),
        (DENSE, "megatron-local", {"recompute": "selective"}),
        (DENSE, "megatron", {"pp": 8, "vpp": 4, "layout": "E|(t|)*8(|)*22L", "batch": 16}),
        (DENSE, "torchtitan", {"pp": 8, "vpp": 1}),  # the head alone on the last
        (DENSE, "torchtitan", {}),
        (DENSE, "torchtitan", {"recompute": "ops"}),
        (DENSE, "torchtitan", {"recompute": "every:2"}),
        (DENSE, "torchtitan", {"pp": 2}),
        (DENSE, "torchtitan", {"pp": 2, "schedule": "gpipe"}),
        (DENSE, "torchtitan", {"pp": 2, "vpp": 2, "schedule": "zbv"}),
        (DEEP, "torchtitan", {"pp": 4, "vpp": 2, "batch": 4 * 7, "schedule": "interleaved-zb"}),  # in one round
        (DEEP, "torchtitan", {"pp": 4, "vpp": 2, "batch": 4 * 7}),
        (DEEP, "torchtitan", {"pp": 4, "vpp": 2, "batch": 4 * 10}),  # 2 rounds of 5
        (DEEP, "torchtitan", {"pp": 4, "vpp": 2, "batch": 4 * 2}),  # 2 in one round
        (DENSE, "torchtitan", {"zero": 0, "options": {"data_parallel": "ddp"}}),
        (WINDOWED, "megatron", {"cp": 2, "cp_kind": "allgather"}),
        (WINDOWED, "megatron", {"cp": 2, "cp_kind": "a2a"}),
        (DENSE, "megatron", {"tp": 2, "cp": 2, "cp_kind": "a2a"}),
        (llama(num_layers=8, attention={**TWELVE, "sinks": True}), "megatron", {"cp": 2, "cp_kind": "a2a"}),
        (MOE, "torchtitan", {"tp": 4, "ep": 4, "etp": 1}),
        (MOE, "torchtitan", {"tp": 4, "ep": 4, "etp": 4}),
        (MOE, "torchtitan", {"tp": 4, "etp": 4}),
        (MOE, "torchtitan", {"ep": 4, "etp": 1}),
    ],
)  # fmt: skip
def test_what_is_let_through(model: ModelSpec, name: str, fields: dict[str, Any]) -> None:
    assert verdict(model, name, **fields) == ""


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("tp=16", ("tp (16)", "num_heads (8)", "num_kv_heads (4)")),
        ("cp=2 micro_batch=3", ("global_batch (64)", "dp (8)", "micro_batch (3)")),
        ("pp=16", ("pp (16)", "8 layers")),
        ("ep=2", ("ep (2)", "llama")),
        ("pp=4 vpp=2 micro_batch=8", ("vpp (2)", "micro-batches (2)", "pp (4)")),
        ("zero=2", ("zero (2)",)),
        ("pp=3", ("gpus (16)", "pp (3)")),
        ("dp=3", ("dp (3)", "16")),
        ("recompute=ops", ("ops", "megatron")),
        ("recompute=full:9 pp=4", ("full:9", "pp (4)")),
    ],
)
def test_messages_name_values(text: str, values: tuple[str, ...]) -> None:
    """One line that says what is wrong, with its values, and what to do."""
    job = workload(DENSE, global_batch=64)
    with pytest.raises(MofaError) as caught:
        checked_strategy_row(job, cluster(16), framework("megatron"), text)
    message = str(caught.value)
    assert "\n" not in message
    for value in values:
        assert value in message


def test_ddp_beside_other_parallelism_is_named() -> None:
    job, ddp = workload(DENSE, global_batch=64), framework("torchtitan", data_parallel="ddp")
    with pytest.raises(MofaError, match="DDP runs with tp, pp and cp 1 alone"):
        checked_strategy_row(job, cluster(16), ddp, "pp=2")
    with pytest.raises(MofaError, match="leave zero out"):
        checked_strategy_row(job, cluster(16), ddp, "zero=3")


def test_a_vocabulary_that_is_not_padded_is_named() -> None:
    job = workload(llama(num_layers=8, vocab=1001), global_batch=64)
    with pytest.raises(MofaError, match=r"tp \(2\) must divide .* the vocabulary \(1001\)"):
        checked_strategy_row(job, cluster(16), framework("torchtitan"), "tp=2")
    checked_strategy_row(job, cluster(16), framework("megatron"), "tp=2")


@pytest.mark.parametrize("name", ["megatron", "megatron-local", "torchtitan"])
@pytest.mark.parametrize("model", [DENSE, MOE, mla_moe()], ids=lambda m: m.name)
def test_a_row_is_counted_under_the_first_reason(model: ModelSpec, name: str) -> None:
    """In the order of the list, each with how far it missed; what passes missed nothing."""
    job = JobAndMachines(workload(model), cluster(16), framework(name))
    space = with_first_option_set(default_space(job.workload, job.cluster, job.framework))
    table = combinations_table(space, job.cluster, job.framework)
    found = check_strategies(job, table)
    shorts = [c.shortfall(job, table) for c in CHECKS]
    assert all((s >= 0).all() and s.shape == (len(table),) for s in shorts)
    for i in range(0, len(table), 97):
        failed = [j for j, s in enumerate(shorts) if s[i] > 0]
        assert found.reason[i] == (failed[0] if failed else -1)
        assert found.shortfall[i] == (shorts[failed[0]][i] if failed else 0.0)


def test_checks_end_where_no_row_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that one check rejects is seen by none behind it, so that none is asked about no rows."""
    job = JobAndMachines(workload(llama()), cluster(8), framework("megatron"))
    row = checked_strategy_row(job.workload, job.cluster, job.framework, "tp=8")
    row = replace(row, tp=row.tp * 3)
    rejected = int(check_strategies(job, row).reason[0])
    assert rejected >= 0

    def never(*_: Any) -> Any:
        raise AssertionError("asked about no rows")

    behind = [replace(check, shortfall=never) if i > rejected else check for i, check in enumerate(CHECKS)]
    monkeypatch.setattr("mofa.search.legality.masks.CHECKS", behind)
    assert check_strategies(job, row).reason.tolist() == [rejected]


def test_how_far_a_row_missed() -> None:
    """12 GPUs over 8: 4 more are needed; 64 sequences over 24: 8 more; 32 ranks on 16 GPUs: 16 too many."""
    from tests.cost.toy import table as rows

    job = JobAndMachines(workload(DENSE, global_batch=64), cluster(16), framework("megatron"))
    base = rows(job.workload, job.cluster, job.framework, ["dp=16"])

    def changed(**values: int) -> Any:
        from dataclasses import replace

        import numpy as np

        return replace(base, **{n: np.array([v]) for n, v in values.items()})

    shortfall = {c.reason: c.shortfall for c in CHECKS}
    assert shortfall["batch"](job, changed(dp=24)).tolist() == [8]
    assert shortfall["gpus"](job, changed(tp=8, pp=4)).tolist() == [16]
    assert shortfall["gpus"](job, changed(cp=3)).tolist() == [2]
    assert shortfall["layers"](job, changed(pp=16)).tolist() == [6]  # two may hold the embedding or the head alone
    assert shortfall["interleaving"](job, changed(pp=4, vpp=2, dp=4, micro_batch=8)).tolist() == [2]


def test_the_message_of_an_interval_longer_than_the_layers() -> None:
    with pytest.raises(MofaError, match=r"every:999: no stage of pp \(1\) has so many of the 8 layers"):
        checked_strategy_row(workload(DENSE), cluster(8), framework("torchtitan"), "recompute=every:999")


@pytest.mark.parametrize(
    ("gpus", "options", "text", "zero"),
    [
        (1, {}, "zero=3", 0), (1, {}, "micro_batch=1", 0), (4, {}, "tp=4", 0), (2, {}, "pp=2 zero=2", 0),
        (2, {}, "cp=2", 3), (4, {}, "pp=2", 2),
        (4, {"data_parallel": "hsdp", "dp_replicate": 4}, "micro_batch=1", 0),
        (4, {"data_parallel": "hsdp", "dp_replicate": 2}, "micro_batch=1", 3),
    ],
)  # fmt: skip
def test_torchtitan_shards_nothing_over_one_rank(gpus: int, options: dict[str, Any], text: str, zero: int) -> None:
    """ZeRO's stage is what happens, asked for or not."""
    row = checked_strategy_row(workload(DENSE), cluster(gpus), framework("torchtitan", **options), text)
    assert int(row.zero[0]) == zero


@pytest.mark.parametrize("splits", ["greedy", "greedy-embeddings"])
def test_what_deepspeed_splits_is_what_passes(splits: str) -> None:
    """Every row of a space that passes has a split (8 layers over 3 stages of 2 chunks of up to 2 have none), and one
    that is refused for its chunks says so."""
    spec = framework("megatron-2022", splits_layers=splits)
    table = {}
    for layers in (5, 8, 13):
        job = JobAndMachines(workload(llama(num_layers=layers), seq_len=1024, global_batch=48), cluster(24), spec)
        for pp, vpp in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 4)):
            asked = {"pp": pp, "vpp": vpp, "schedule": "interleaved" if vpp > 1 else "1f1b"}
            try:
                checked_strategy_row(job.workload, job.cluster, spec, asked)
            except StrategyError as error:
                table[layers, pp, vpp] = str(error)
            else:
                split_layers(job.workload.model, pp, vpp, spec.name, splits=splits)
    assert f"splits_layers: {splits} (1f1b alone, vpp 1)" in table[8, 3, 2]
    assert (8, 2, 1) not in table


def _pipeline_groups(sizes: dict[str, int], order: str) -> set[tuple[int, ...]]:
    """Ranks of every pipeline, of ranks numbered in an order, as Megatron-Core's RankGenerator has them."""
    axes = [name for name in reversed(order.split("-")) if name in sizes]
    ranks = np.arange(np.prod(list(sizes.values()))).reshape([sizes[axis] for axis in axes])
    return {tuple(group.tolist()) for group in np.moveaxis(ranks, axes.index("pp"), -1).reshape(-1, sizes["pp"])}


@pytest.mark.parametrize(
    ("tp", "cp", "pp", "ep", "etp"),
    [
        (*degrees, ep, etp)
        for degrees in ((1, 1, 2), (2, 1, 2), (2, 2, 2), (1, 2, 4), (2, 2, 1), (4, 1, 2))
        for ep, etp in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
        if etp <= degrees[0]
    ],
)
def test_rank_orders_are_refused_as_megatron_asserts(tp: int, cp: int, pp: int, ep: int, etp: int) -> None:
    """parallel_state.py of 0.16.1: both grids have the same pipelines and, unless pp comes last, as many data-parallel
    ranks."""
    order, dp = "tp-cp-ep-pp-dp", 16 // (tp * cp * pp)
    dense, experts = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}, {"tp": etp, "ep": ep, "pp": pp}
    experts["dp"] = dp * tp * cp // (ep * etp)
    accepted = _pipeline_groups(dense, order) == _pipeline_groups(experts, order)
    accepted &= pp == 1 or experts["dp"] == dp
    said = verdict(MOE, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, options={"rank_order": order})
    assert said == ("" if accepted else "rank_order")
    assert verdict(MOE, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp) == ""


def test_without_experts_context_parallelism_is_refused_beside_a_pipeline_numbered_first() -> None:
    """Megatron's grid of experts, which it makes anyway, has etp of tp and no context parallelism."""
    options = {"rank_order": "tp-cp-ep-pp-dp"}
    assert verdict(DENSE, tp=2, pp=2, options=options) == verdict(DENSE, tp=2, cp=2, options=options) == ""
    assert verdict(DENSE, cp=2, pp=2, options=options) == "rank_order"
