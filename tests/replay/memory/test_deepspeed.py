"""DeepSpeed's optimizers by hand: what is there from the start, what a backward leaves, what a step adds."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

import mofa
from mofa.cost.allocations.block_trace import BlockTrace, NewTensor, OpTrace
from mofa.cost.allocations.parameter_tensors import BlockWeight
from mofa.cost.estimate import TableEstimator
from mofa.errors import SpecError
from mofa.replay.allocator.caching import Allocator
from mofa.replay.allocator.timeline import GRADIENTS, off_tape_instruction
from mofa.replay.memory.deepspeed import BUCKET, _part_of, all_gather_output_bytes, optimizer_groups_of
from mofa.replay.memory.rank_memory import play_memory
from mofa.replay.memory.rank_state import RankState
from mofa.replay.memory.skipped_rounds import RoundSkipper
from mofa.replay.memory.stage_outputs import DeferredFrees
from mofa.replay.rank.description import Rank, RankBlock, WeightBytes
from mofa.replay.rank.from_estimator import describe_ranks
from mofa.search.one_strategy import checked_strategy_row
from mofa.specs.implied_facts import DEEPSPEED

MIB = 1 << 20


def _toy(deepspeed: str, ranks: float, num: int = 4, sent: int = 0) -> Rank:
    """A block that keeps 30 MiB and makes a 16-bit gradient of 200 MiB for its one weight."""
    block = BlockTrace(
        "toy",
        (OpTrace("forward", (NewTensor("kept", 30 * MIB, 0, 0), NewTensor("out", 20 * MIB, 0, 0)), free=("x",)),),
        (
            OpTrace("dgrad", (NewTensor("d", 50 * MIB, 0, 0),), free=("out",)),
            OpTrace("wgrad", (NewTensor("dW", 200 * MIB, 0, 2),), free=("kept", "d")),
            OpTrace("w.accumulate", grads=("dW",), free=("dW",)),
        ),
        "out", "", "", frozenset(), (BlockWeight("w", 100.0 * MIB),),
    )  # fmt: skip
    acts = tuple((kind, 0, i) for i in range(num) for kind in "FB")
    weight = WeightBytes("w", 200 * MIB, 0, 0, 0)
    return Rank(
        (weight,), ((RankBlock("block 0", block),),), acts, num, (False,), (sent > 0,), (False,), frozenset({0}), sent,
        (), (), grads_always=False, flat_buffers=(), preallocated=False, deepspeed=deepspeed, optimizer_ranks=ranks,
        sent_bytes=sent // 4,
    )  # fmt: skip


def test_what_is_there_from_the_start() -> None:
    """100 Mi parameters over 2 ranks: 2 bytes flat; of the half 4 bytes of parameters and 8 of moments; the BF16
    optimizer's gradients take 4 bytes of all besides. Without ZeRO the states are whole."""
    assert play_memory(_toy("zero1", 2)).allocated_at_start == (200 + 200 + 400) * MIB
    assert play_memory(_toy("bf16", 2)).allocated_at_start == (200 + 200 + 400 + 400) * MIB
    assert play_memory(_toy("zero0", 1)).allocated_at_start == (200 + 400 + 800) * MIB


def test_states_are_those_that_the_optimizer_names() -> None:
    """One moment fewer of 4 bytes for each of the rank's parameters: 100 Mi halved, or whole."""
    for kind, ranks, moment in (("zero1", 2, 200), ("bf16", 2, 200), ("zero0", 1, 400)):
        adam = _toy(kind, ranks)
        assert (
            play_memory(adam).allocated_at_start - play_memory(replace(adam, moments=("moments",))).allocated_at_start
            == moment * MIB
        )


def test_the_bf16_optimizer_keeps_gradients_and_casts_them() -> None:
    """The 200 MiB gradient of one backward stays until the next; then its 400 MiB copy in fp32 comes beside it."""
    played = play_memory(_toy("bf16", 2))
    assert played.allocated_between_steps == (1200 + 200) * MIB
    assert played.peak_instant.where == "update of the gradients"
    assert played.peak_instant.allocated == (1200 + 200 + 400) * MIB


def test_zero_1_steps_in_copies_of_its_part() -> None:
    """At the step the gradient that the part reaches into stays whole (200); its half is normed in fp64 (400), then
    flattened (100) and made fp32 (200). A gradient alone in its bucket is reduced where it is."""
    played = play_memory(_toy("zero1", 2))
    assert played.peak_instant.where == "optimizer step"
    assert played.peak_instant.allocated == (800 + 200 + 400) * MIB
    assert played.allocated_between_steps == 800 * MIB


def test_a_rank_that_takes_no_norm_has_no_fp64_copy() -> None:
    """As above without the norm: the half looked through in fp32 (200), then flattened (100) and made fp32 (200)."""
    played = play_memory(replace(_toy("zero1", 2), norms_gradients=False))
    assert played.peak_instant.where == "optimizer step"
    assert played.peak_instant.allocated == (800 + 200 + 100 + 200) * MIB


def _several(deepspeed: str, ranks: float, num: int) -> Rank:
    """As many blocks and weights of the toy's."""
    one = _toy(deepspeed, ranks)
    chunks = ((one.chunks[0][0],) * num,)
    return replace(one, weights=one.weights * num, chunks=chunks, launch_blocking=True)


def _optimizer(rank: Rank) -> list[int]:
    """Sizes of what the second step's optimizer allocates and frees. [MiB]"""
    journal = play_memory(rank).journal
    sizes = [
        size // MIB
        for instruction, size in zip(journal.instructions, journal.sizes, strict=True)
        if instruction.op == "optimizer step"
    ]
    return sizes[len(sizes) // 2 :]


def test_zero_1_steps_group_by_group() -> None:
    """Four gradients of 200 MiB over 4 ranks, reduced in a bucket of 800: the first rank's parts (100) lie in the first
    of each half, the others go. Both are looked through, then each normed, flattened and cast: the casts stay."""
    each = [400, -400, 100, 200, -100]
    expected = [800, -800, *[200, -200] * 2, *each, *each, -200, -200, *[400, -400] * 2]
    assert _optimizer(_several("zero1", 4, 4)) == expected


def test_bf16_gradients_are_reduced_in_two_halves() -> None:
    """A copy of 400 MiB for each half of four weights, where one of all would take 800; gathers are each half's too."""
    assert _optimizer(_several("bf16", 2, 4)) == [400, -400] * 4


def test_collectives_have_their_tensors_until_the_device_comes_to_them() -> None:
    """As above where launches don't block: the gathers of both halves are there together before either can go."""
    queued = replace(_several("zero1", 4, 4), launch_blocking=False)
    assert _optimizer(queued)[-4:] == [400, 400, -400, -400]


def test_bf16_gradients_are_copied_to_be_reduced() -> None:
    """A bucket of four of 200 MiB, flat, and its copy in fp16, which a queued collective has longer; one alone is
    copied where it is."""
    blocking = replace(_several("zero1", 4, 4), casts_to_reduce=True)
    assert _optimizer(blocking)[:4] == [800, 800, -800, -800]
    wide = replace(blocking, weights=tuple(w._replace(param_bytes=600 * MIB) for w in blocking.weights))
    assert _optimizer(wide)[:8] == [600, -600] * 4
    assert _optimizer(replace(wide, launch_blocking=False))[:8] == [600] * 4 + [-600] * 4


def test_what_tensor_parallelism_sums_comes_back_late() -> None:
    """The device takes ten times as long as the host: 30 MiB that were summed are not free when a backward begins,
    and are when a forward does, whose micro-batch the host waits to load; in the first step too."""
    toy = _toy("zero1", 2)
    block = replace(toy.chunks[0][0].trace, all_reduced_in_place=frozenset({"kept"}), launches=(10.0, 10.0, 0.0))
    rank = replace(toy, chunks=((RankBlock("block 0", block),),), device_over_host_time=10.0)

    def waits(rank: Rank, step: int) -> list[int]:
        state = RankState(rank, Allocator(None))
        state.step = step
        sends = DeferredFrees(state)
        sends.after_block("forward", rank.chunks[0][0])
        sends.free_once_device_passed(state.allocate(30 * MIB, off_tape_instruction(GRADIENTS, "toy", "test"))[0])
        counts = [len(sends.waiting)]
        sends.before_computation("B", 0)
        counts.append(len(sends.waiting))
        sends.before_computation("F", 0)
        return [*counts, len(sends.waiting)]

    assert waits(rank, 2) == waits(rank, 1) == [1, 1, 0]
    assert waits(replace(rank, launch_blocking=True), 2) == [0, 0, 0]
    assert waits(replace(rank, device_over_host_time=0.9), 2) == [0, 0, 0]
    assert play_memory(rank).peak_reserved >= play_memory(replace(rank, launch_blocking=True)).peak_reserved


def test_a_norm_is_in_a_group_of_its_own() -> None:
    """Five matrices and a norm between them: two, three and the norm."""
    weights = [WeightBytes(str(n), MIB, 0, 0, 0, is_1d=n == 2) for n in range(6)]
    assert optimizer_groups_of(weights) == ((0, 1), (3, 4, 5), (2,))


def test_a_later_part_lies_in_the_smaller_gradients_behind_the_first() -> None:
    """Parts of 120 MiB in gradients of 300, 100 and 80: the first and second in the largest alone, the third in it and
    the next, the fourth in the last two."""
    for q, expected in enumerate(((120,), (120,), (60, 60), (40, 80))):
        state = RankState(replace(_toy("zero1", 4), optimizer_rank=q), Allocator(None))
        grads = [state.allocate(size * MIB, off_tape_instruction(GRADIENTS, "toy", "test")) for size in (300, 100, 80)]
        held, mine = _part_of(state, grads, 120 * MIB)
        assert mine == [size * MIB for size in expected]
        assert len(held) == len(expected)


def test_gathers_come_in_pieces_of_a_bucket() -> None:
    """500 MB parts of 8 ranks: 4 GB in 4 pieces; one rank's part is gathered as well."""
    assert all_gather_output_bytes(500_000_000, 8) == [BUCKET] * 4
    assert all_gather_output_bytes(500_000_000, 1) == [500_000_000]


def test_without_zero_all_gradients_are_cast() -> None:
    """200 of gradients, 400 of fp32 copies and 400 of them flat. The start holds a copy of the parameters beside them
    and their buffer: 600, of which 400 stay to the allocator when the fp32 copies follow."""
    played = play_memory(_toy("zero0", 1))
    assert played.journal.sizes[:5] == [200 * MIB, 200 * MIB, 200 * MIB, -200 * MIB, -200 * MIB]
    assert played.peak_instant.allocated == (1400 + 200 + 400 + 400) * MIB


def _sends(sent_bytes: int) -> list[int]:
    """Sizes of what a sending stage of three forwards and three backwards allocates and frees around them."""
    acts = tuple(("F", 0, i) for i in range(3)) + tuple(("B", 0, i) for i in range(3))
    rank = replace(_toy("zero1", 2, 3, 40 * MIB), computations=acts, sent_bytes=sent_bytes)
    journal = play_memory(rank).journal
    around = ("send of an output", "receive of a gradient", "backward")
    return [
        size // MIB
        for instruction, size in zip(journal.instructions, journal.sizes, strict=True)
        if instruction.op in around
    ]


def test_a_part_of_what_is_sent_stays_until_the_backward_has_ended() -> None:
    """Of four ranks each keeps 10 of an output of 40 MiB (the toy's own is 20). The backward has a buffer for its part
    of the gradient, then output and gradient whole: each gathered flat, beside torch's flat output, and cloned."""
    whole = [40, 40, -40, 40, -40]
    first = [10, *whole, *whole, -40, -40, -10]
    assert _sends(10 * MIB)[: 6 + len(first)] == [*[10, -20] * 3, *first]
    assert _sends(10 * MIB)[6 + len(first) :][: len(first) - 1] == first[1:]


def test_without_tensor_parallelism_the_whole_output_stays() -> None:
    """Nothing is put together: the 20 MiB output stays, and the gradient lies in the buffer it is received into."""
    assert _sends(0)[:4] == [40, -20, -20, -20]


def test_bf16_gradients_are_reduced_in_a_16_bit_copy() -> None:
    """200 MiB for the 400 MiB of fp32 gradients, then the gather's output of one bucket, 200 MiB."""
    journal = play_memory(_toy("bf16", 2)).journal
    where = [instruction.name for instruction in journal.instructions if instruction.op == "optimizer step"]
    sizes = [
        size // MIB
        for instruction, size in zip(journal.instructions, journal.sizes, strict=True)
        if instruction.op == "optimizer step"
    ]
    assert where[0] == "16-bit gradients to reduce"
    assert sizes[:4] == [200, -200, 200, -200]


@pytest.mark.parametrize(("name", "allocated"), [("megatron-2022", 1), ("megatron-local", 0)])
def test_two_gradients_were_a_third_tensor(name: str, allocated: int) -> None:
    """PyTorch adds them in place since its pull request 88339 of November 2022, later than Megatron-LM 3.0."""
    job = mofa.load_workload("gpt3-175b", seq_len=2048, global_batch=48)
    machines, framework = mofa.load_cluster("a100-hgx", 48), mofa.load_framework(name)
    row = checked_strategy_row(job, machines, framework, {"tp": 4, "pp": 12})
    block = describe_ranks(TableEstimator(job, machines, framework, row))[0].chunks[0][-1].trace
    sums = [item for deed in block.backward if deed.op == "accumulate mid at mlp_norm" for item in deed.new]
    assert len(sums) == allocated


def test_options_are_of_megatron_2022() -> None:
    with pytest.raises(SpecError, match="options of megatron-2022"):
        mofa.load_framework("megatron", overrides={"deepspeed": "zero1"})
    with pytest.raises(SpecError, match="options of megatron-2022"):
        mofa.load_framework("torchtitan", overrides={"splits_layers": "greedy"})
    with pytest.raises(SpecError, match="norms_gradients is an option"):
        mofa.load_framework("megatron-2022", overrides={"deepspeed": "bf16", "norms_gradients": False})
    with pytest.raises(SpecError, match="casts_to_reduce is an option"):
        mofa.load_framework("megatron-2022", overrides={"deepspeed": "bf16", "casts_to_reduce": True})


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("short", [0, 2 << 30])
def test_backwards_of_the_bf16_optimizer_are_repeated_from_notes(stage: int, short: int) -> None:
    """Each lets the 16-bit gradients go that the one before it left: every event, size and name is as played, with room
    for all and for less."""
    framework = mofa.load_framework({"name": "megatron-2022", "deepspeed": "bf16", "launch_blocking": True})
    changes = {"model": {"num_layers": 8, "hidden": 2048}}
    job = mofa.load_workload("gpt3-175b", seq_len=2048, global_batch=32, overrides=changes)
    cluster = mofa.load_cluster("a100-hgx", 16)
    row = checked_strategy_row(job, cluster, framework, {"tp": 2, "pp": 4, "recompute": "full"})
    rank = describe_ranks(TableEstimator(job, cluster, framework, row))[stage]
    whole = play_memory(rank, skip_rounds=False, num_steps=2)
    capacity_bytes = whole.peak_reserved - short
    whole = play_memory(rank, skip_rounds=False, capacity_bytes=capacity_bytes, num_steps=2)
    with mock.patch.object(RoundSkipper, "is_round_end", return_value=False):
        repeated = play_memory(rank, capacity_bytes=capacity_bytes, num_steps=2)
    assert len([kind for _, kind, _, _ in whole.journal.computations if kind == "B"]) == 2 * 16
    assert len(repeated.journal.repetitions) > 2 * 2 * (16 - 4) and not whole.journal.repetitions
    assert (repeated.out_of_memory_instant is None) == (
        not short
    ) and repeated.out_of_memory_instant == whole.out_of_memory_instant
    for field in ("instructions", "sizes", "passages", "computations", "grown", "steps"):
        assert getattr(repeated.journal, field) == getattr(whole.journal, field), field
    for field in (
        "allocated",
        "peak_reserved",
        "allocated_between_steps",
        "first_step_peak",
        "retries",
        "missing_bytes",
    ):
        assert getattr(repeated, field) == getattr(whole, field), field


@pytest.mark.parametrize("optimizer", ["zero0", "zero1", "bf16"])
def test_an_optimizer_alone_says_what_follows_from_it(optimizer: str) -> None:
    """The name is enough for the tape to make 16-bit gradients; what contradicts it is refused in one line."""
    alone = mofa.load_framework({"name": "megatron-2022", "deepspeed": optimizer})
    assert mofa.load_framework("megatron-2022", overrides={"deepspeed": optimizer}) == alone
    assert mofa.load_framework("megatron-2022", overrides={"deepspeed": optimizer, **DEEPSPEED[optimizer]}) == alone
    assert alone.data_parallel == ("ddp" if optimizer == "zero0" else "distributed-optimizer")
    job = mofa.load_workload("gpt3-175b", seq_len=2048, global_batch=48, overrides={"model": {"num_layers": 12}})
    row = checked_strategy_row(job, mofa.load_cluster("a100-hgx", 48), alone, {"tp": 4, "pp": 12})
    block = describe_ranks(TableEstimator(job, mofa.load_cluster("a100-hgx", 48), alone, row))[0].chunks[0][-1].trace
    assert any(new.name == "dW:mlp.fc2" for deed in block.backward for new in deed.new)
    for field, value in (("fuses_wgrad_accumulation", True), ("grads_bytes_per_param", 4)):
        with pytest.raises(
            SpecError, match=f"^framework megatron-2022.*{field} .* deepspeed: {optimizer}.*leave it out"
        ):
            mofa.load_framework("megatron-2022", overrides={"deepspeed": optimizer, field: value})
    other = "distributed-optimizer" if optimizer == "zero0" else "ddp"
    if optimizer != "bf16":
        with pytest.raises(SpecError, match=f"data_parallel .{other}. cannot be"):
            mofa.load_framework("megatron-2022", overrides={"deepspeed": optimizer, "data_parallel": other})


def test_bloom_has_five_layers_beside_each_embedding() -> None:
    """bigscience, train/tr11-176B-ml/README.md: 70 layers over 12 stages as 5, ten times 6, 5; the lab book: 78 layers
    without the embeddings leave one on the last stage."""
    spec = mofa.load_framework("megatron-2022", overrides={"splits_layers": "greedy-embeddings"})
    plain = mofa.load_framework("megatron-2022", overrides={"splits_layers": "greedy"})

    def layers(num: int, framework: mofa.FrameworkSpec) -> list[int]:
        job = mofa.load_workload("gpt3-175b", seq_len=2048, global_batch=48, overrides={"model": {"num_layers": num}})
        plan = mofa.estimate(
            job, mofa.load_cluster("a100-hgx", 48), {"tp": 4, "pp": 12, "recompute": "full"}, framework=framework,
            replay=False,
        )  # fmt: skip
        return [stage.num_layers for stage in plan.memory.by_stage]

    assert layers(70, spec) == [5, *[6] * 10, 5]
    assert layers(78, plain) == [*[7] * 11, 1]
