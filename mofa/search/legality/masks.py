"""Which strategies a framework can run on a cluster: named masks in a documented order, each with how far it missed.

A row that several masks reject is counted under the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.schedules import SCHEDULE_NAMES, SCHEDULES, default_schedule
from mofa.search.legality.context_parallel import context_parallel_excess, context_parallel_message
from mofa.search.legality.expert_overlap import expert_overlap_message, expert_overlap_shortfall
from mofa.search.legality.expert_parallel import (
    dispatcher_message,
    dispatcher_shortfall,
    etp_shortfall,
    expert_grid_shortfall,
    expert_sharding_ranks,
    experts_shortfall,
    rank_order_shortfall,
    routed_copies_shortfall,
    token_scheduling_shortfall,
)
from mofa.search.legality.fp8_sizes import (
    float8_degrees_excess,
    float8_degrees_message,
    fp8_message,
    fp8_shortfall,
)
from mofa.search.legality.graph_capture_check import graph_capture_message, graph_capture_shortfall
from mofa.search.legality.layers import (
    layers_shortfall,
    num_refused_chunks,
    refused_layout_message,
    too_many_chunks_message,
)
from mofa.search.legality.named_check import (
    FloatN,
    LegalityCheck,
    Verdicts,
    degrees_text,
    micro_batches_per_step,
    shortfall_to_multiple,
)
from mofa.search.legality.named_check import JobAndMachines as JobAndMachines
from mofa.search.legality.recompute_modes import recompute_message, recompute_shortfall
from mofa.search.legality.step_length import step_length_excess, step_length_message
from mofa.search.space import SpaceCombinations
from mofa.specs.strategy import MERGED_GROUPS, StrategyTable
from mofa.specs.strategy_defaults import default_zero_stage, needs_sequence_parallel


def _gpus(job: JobAndMachines, table: StrategyTable) -> FloatN:
    ranks = table.tp * table.cp * table.pp
    return np.where(
        ranks > job.cluster.num_gpus, ranks - job.cluster.num_gpus, shortfall_to_multiple(job.cluster.num_gpus, ranks)
    )


def _heads(job: JobAndMachines, table: StrategyTable) -> FloatN:
    a = job.workload.model.attention
    shortfall = shortfall_to_multiple(a.num_heads, table.tp)
    if job.framework.traits.has_pytorch_modules:  # heads are views of what a rank has (model.py)
        shortfall = np.maximum(shortfall, shortfall_to_multiple(a.num_kv_heads, table.tp))
    else:  # either tp divides the key-value heads or each is held by several ranks
        kv = a.num_kv_heads
        shortfall = np.maximum(
            shortfall,
            np.where(
                table.tp <= kv,
                shortfall_to_multiple(kv, table.tp),
                shortfall_to_multiple(table.tp, np.full_like(table.tp, kv)),
            ),
        )
    return shortfall


def _widths(job: JobAndMachines, table: StrategyTable) -> FloatN:
    model = job.workload.model
    shortfall = np.zeros(len(table))
    if model.num_dense_layers:
        shortfall = np.maximum(shortfall, shortfall_to_multiple(model.mlp.ffn_hidden or 0, table.tp))
    if model.moe is not None:
        shortfall = np.maximum(shortfall, shortfall_to_multiple(model.moe.expert_hidden, table.etp))
        if model.moe.shared_hidden:
            shortfall = np.maximum(shortfall, shortfall_to_multiple(model.moe.shared_hidden, table.tp))
    if job.framework.vocab_divisor == 1:
        shortfall = np.maximum(shortfall, shortfall_to_multiple(model.vocab, table.tp))
    return shortfall


def _sp(job: JobAndMachines, table: StrategyTable) -> FloatN:
    if not needs_sequence_parallel(job.framework, moe=job.workload.model.moe is not None):
        return np.zeros(len(table))
    return np.asarray((table.tp > 1) & ~table.sp, dtype=float)


def _tp_overlap(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """Megatron-Core turns the overlap off under latent attention, whose linears have no user buffers (megatron_core
    0.16.1, extensions/transformer_engine.py)."""
    if not job.framework.tp_overlap or not job.workload.model.attention_kind.megatron.has_latents:
        return np.zeros(len(table))
    return np.asarray(table.tp > 1, dtype=float)


def _sequence(job: JobAndMachines, table: StrategyTable) -> FloatN:
    seq = job.workload.batch.seq_len
    unit = np.where(table.cp > 1, 2 * table.cp, 1) * np.where(table.sp, table.tp, 1)
    if job.framework.traits.has_pytorch_modules:
        unit = table.tp * 2 * table.cp
    return shortfall_to_multiple(seq, unit)


def _cp(job: JobAndMachines, table: StrategyTable) -> FloatN:
    return context_parallel_excess(job.workload.model, job.framework, table)


def _batch(job: JobAndMachines, table: StrategyTable) -> FloatN:
    return shortfall_to_multiple(job.workload.batch.global_batch, table.dp * table.micro_batch)


def _interleaving(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """Micro-batches by which rounds miss: Megatron's have pp each; PyTorch's are ``max(1, m // pp)`` of equal
    length."""
    m = micro_batches_per_step(job, table)
    shortfall = np.where(m < table.pp, table.pp - m, shortfall_to_multiple(m, table.pp))
    if job.framework.traits.has_pytorch_modules:  # pipelining/schedules.py, ScheduleInterleaved1F1B and -ZeroBubble
        shortfall = np.where(m < table.pp, 0.0, np.minimum(shortfall, shortfall_to_multiple(m, m // table.pp)))
    shortfall = np.where(table.vpp > 1, np.where(table.pp == 1, 1.0, shortfall), 0.0)
    chunks = np.array([s.chunks_per_rank or 1 for s in SCHEDULES.values()])[table.schedule]
    return np.where(chunks > 1, np.where((table.pp > 1) & (table.vpp == chunks), 0.0, 1.0), shortfall)


def _schedule(job: JobAndMachines, table: StrategyTable) -> FloatN:
    records = tuple(SCHEDULES.values())
    offered = [s for s in records if job.framework.traits.has_pytorch_modules or s.runs_in_megatron]
    # DeepSpeed's pipeline engine has no other than TrainSchedule (runtime/pipe/schedule.py), its splits no chunks
    if job.framework.deepspeed or job.framework.splits_layers != "even":
        offered = [SCHEDULES[default_schedule(1)]]
    ok = np.array([s in offered for s in records])[table.schedule]
    several = np.array([s.has_several_chunks for s in records])[table.schedule]
    ok &= (table.vpp == 1) | several
    ok &= ~several | ((table.pp > 1) & (table.vpp > 1))
    forwards_first = np.array([s.forwards_first for s in records])[table.schedule]
    ok &= ~forwards_first | (table.pp > 1)  # without a pipeline nothing puts backwards off
    return np.asarray(~ok, dtype=float)


def _zero(job: JobAndMachines, table: StrategyTable) -> FloatN:
    if job.framework.data_parallel == "ddp":
        ok = table.zero == 0
        if job.framework.traits.has_pytorch_modules:
            ok &= (table.tp == 1) & (table.pp == 1) & (table.cp == 1)
    elif job.framework.traits.leaves_lone_ranks_whole:
        ok = (table.zero == np.where(table.pp > 1, 2, 3)) | (
            table.zero == default_zero_stage(job.framework, table.dp, table.cp, table.pp)
        )
    elif job.framework.traits.has_pytorch_modules:
        ok = table.zero >= 2
    else:
        ok = table.zero <= 1
    return np.asarray(~ok, dtype=float)


def _titan(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """torchtitan's expert parallelism needs a sharded grid (parallel_dims.py), its replicas must divide dp."""
    if not job.framework.traits.has_pytorch_modules:
        return np.zeros(len(table))
    shortfall = np.where((table.ep > 1) & (expert_sharding_ranks(job, table) * table.cp == 1), 1.0, 0.0)
    return np.maximum(shortfall, shortfall_to_multiple(table.dp, np.full_like(table.dp, job.framework.dp_replicate)))


def _fsdp1(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """FSDP1 alone: one group shards everything."""
    if not job.framework.traits.has_one_shard_group:
        return np.zeros(len(table))
    return np.asarray(np.maximum(table.tp * table.pp * table.cp * table.ep - 1, table.zero != 3), dtype=float)


def _mtp(job: JobAndMachines, table: StrategyTable) -> FloatN:
    layers = job.workload.model.num_mtp_layers if job.framework.traits.has_pytorch_modules else 0
    return np.full(len(table), float(layers))


def _rotary(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """Refuses eager rotary embeddings of attention under Transformer Engine where they have no tape."""
    eager = job.framework.owner_of_layer_modules == "transformer-engine" and not job.framework.fused_rope
    return np.full(len(table), float(eager and not job.workload.model.attention_kind.megatron.has_eager_rotation))


def _tied(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """Tied embeddings: a stage of torchtitan is a module that must have both weights (qwen3/model/model.py,
    init_weights)."""
    if not job.framework.traits.has_pytorch_modules or not job.workload.model.tied_embeddings:
        return np.zeros(len(table))
    return np.asarray(table.pp - 1, dtype=float)


def _of_replicas(job: JobAndMachines) -> str:
    """Words after dp where replicas do not count."""
    fw = job.framework
    replicated = fw.traits.has_pytorch_modules and (fw.dp_replicate > 1 or fw.data_parallel == "ddp")
    return " (without replicas)" if replicated else ""


def _of_deepspeed(job: JobAndMachines) -> str:
    """Words after the framework's name where DeepSpeed's pipeline engine decides its schedules."""
    fw = job.framework
    options = {"deepspeed": fw.deepspeed, "splits_layers": "" if fw.splits_layers == "even" else fw.splits_layers}
    said = " and ".join(f"{name}: {value}" for name, value in options.items() if value)
    return f" with {said} (1f1b alone, vpp 1)" if said else ""


def _what_of_zero(job: JobAndMachines, table: StrategyTable) -> str:
    """What to do about a ZeRO stage, in words."""
    alone = job.framework.data_parallel == "ddp" and job.framework.traits.has_pytorch_modules
    if alone and int(table.tp[0] * table.pp[0] * table.cp[0]) > 1:
        return "its DDP runs with tp, pp and cp 1 alone: set them to 1, or take fsdp"
    return "leave zero out"


def _what_wants_sp(job: JobAndMachines) -> str:
    """What needs sequence parallelism under a tensor-parallel degree, in words."""
    if job.framework.traits.needs_sequence_parallel:
        return ""
    return "tp_overlap under " if job.framework.tp_overlap else "experts under "


def _unpadded(job: JobAndMachines) -> str:
    """A vocabulary that the framework does not pad, in words."""
    return f" and the vocabulary ({job.workload.model.vocab})" if job.framework.vocab_divisor == 1 else ""


def _round_length(job: JobAndMachines, table: StrategyTable) -> str:
    """What the micro-batches of an interleaved pipeline must be a multiple of, in words."""
    if not job.framework.traits.has_pytorch_modules:
        return degrees_text(table, "pp")
    num_rounds = max(1, int(micro_batches_per_step(job, table)[0] // table.pp[0]))
    return f"their {num_rounds} rounds of at least {degrees_text(table, 'pp')}"


CHECKS: tuple[LegalityCheck, ...] = (
    LegalityCheck("multi_token_prediction", "layers", _mtp, lambda j, t: (
        f"torchtitan trains no multi-token-prediction layers, the model has {j.workload.model.num_mtp_layers}; set "
        "workload.model.num_mtp_layers=0")),
    LegalityCheck("rotary_embedding", "switch", _rotary, lambda j, t: (
        f"{j.framework.name}: fused_rope false is not modelled for {j.workload.model.attention_kind.title}; leave it "
        "out")),
    LegalityCheck("gpus", "GPUs", _gpus, lambda j, t: (
        f"gpus ({j.cluster.num_gpus}) must be a multiple of {degrees_text(t, 'tp', 'cp', 'pp')}; change one of them")),
    LegalityCheck("fsdp1", "ranks", _fsdp1, lambda j, t: (
        f"fsdp1: {degrees_text(t, 'tp', 'pp', 'cp', 'ep')} must be 1 and zero ({int(t.zero[0])}) 3; "
        "use framework torchtitan")),
    LegalityCheck("heads", "heads", _heads, lambda j, t: (
        f"{degrees_text(t, 'tp')} must divide num_heads ({j.workload.model.attention.num_heads}) and divide "
        f"{'' if j.framework.traits.has_pytorch_modules else 'or be a multiple of '}num_kv_heads "
        f"({j.workload.model.attention.num_kv_heads}); lower tp")),
    LegalityCheck("widths", "columns", _widths, lambda j, t: (
        f"{degrees_text(t, 'tp')} must divide the widths of the feed-forward layers{_unpadded(j)} and "
        f"{degrees_text(t, 'etp')} those of the experts; lower it")),
    LegalityCheck("fp8_widths", "elements", fp8_shortfall, fp8_message),
    LegalityCheck("float8_degrees", "ranks", float8_degrees_excess, float8_degrees_message),
    LegalityCheck("experts", "experts", experts_shortfall, lambda j, t: (
        f"{degrees_text(t, 'ep')} must divide num_experts ({j.workload.model.moe.num_experts}); change ep"
        if j.workload.model.moe else
        f"{degrees_text(t, 'ep', 'etp')} needs experts, and {j.workload.model.name} has none; leave ep and etp out")),
    LegalityCheck("expert_grid", "GPUs", expert_grid_shortfall, lambda j, t: (
        f"{degrees_text(t, 'tp', 'cp', 'dp')}{_of_replicas(j)} must be a multiple of {degrees_text(t, 'ep', 'etp')}; "
        "change ep or etp")),
    LegalityCheck("expert_tensor_parallel", "ranks", etp_shortfall, lambda j, t: (
        f"torchtitan: {degrees_text(t, 'etp')} must be 1 or {degrees_text(t, 'tp')}, and tp where ep is 1; change etp"
        if j.framework.traits.has_pytorch_modules else
        f"{j.framework.name}: experts with biases need etp 1, not {int(t.etp[0])}; set etp=1")),
    LegalityCheck("expert_parallel", "ranks", _titan, lambda j, t: (
        f"torchtitan: {degrees_text(t, 'ep')} needs dp x cp{_of_replicas(j)} above 1, and dp_replicate "
        f"({j.framework.dp_replicate}) must divide "
        f"{degrees_text(t, 'dp')}; change ep or dp_replicate")),
    LegalityCheck("rank_order", "ranks", rank_order_shortfall, lambda j, t: (
        f"{j.framework.name}: rank_order {j.framework.rank_order} with {degrees_text(t, 'pp')} needs as many ranks of "
        f"{degrees_text(t, 'tp', 'cp')} as of {'ep x etp' if j.workload.model.moe else 'tp'}; "
        f"{'set ep x etp to tp x cp' if j.workload.model.moe else 'set cp=1'}, or leave rank_order out")),
    LegalityCheck("dispatcher", "ranks", dispatcher_shortfall, dispatcher_message),
    LegalityCheck("expert_overlap", "conditions", expert_overlap_shortfall, expert_overlap_message,
          depends_on_recompute_mode=True),
    LegalityCheck("sequence_parallel", "switch", _sp, lambda j, t: (
        f"{j.framework.name}: {_what_wants_sp(j)}{degrees_text(t, 'tp')} needs sequence parallelism; set sp=true")),
    LegalityCheck("tp_overlap", "switch", _tp_overlap, lambda j, t: (
        f"{j.framework.name}: tp_overlap with {degrees_text(t, 'tp')} is off under latent attention; leave it out")),
    LegalityCheck("context_parallel", "ranks", _cp, lambda j, t: (
        f"{j.framework.name}: {degrees_text(t, 'cp')} {context_parallel_message(j.workload.model, j.framework, t)}")),
    LegalityCheck("sequence", "tokens", _sequence, lambda j, t: (
        f"seq_len ({j.workload.batch.seq_len}) does not divide over {degrees_text(t, 'cp', 'tp')}; change cp or tp")),
    LegalityCheck("layers", "layers", layers_shortfall, too_many_chunks_message),
    LegalityCheck("layout", "switch", num_refused_chunks, refused_layout_message),
    LegalityCheck("batch", "sequences", _batch, lambda j, t: (
        f"global_batch ({j.workload.batch.global_batch}) must be a multiple of {degrees_text(t, 'dp', 'micro_batch')}; "
        "change micro_batch or the degrees")),
    LegalityCheck("step_length", "computations", step_length_excess, step_length_message),
    LegalityCheck("tied_embeddings", "stages", _tied, lambda j, t: (
        f"{j.framework.name} ties the embedding to the head within a stage alone, not over {degrees_text(t, 'pp')}; "
        "set pp=1")),
    LegalityCheck("schedule", "switch", _schedule, lambda j, t: (
        f"{j.framework.name}{_of_deepspeed(j)} does not run schedule {SCHEDULE_NAMES[int(t.schedule[0])]} with "
        f"{degrees_text(t, 'pp', 'vpp')}; change schedule, pp or vpp")),
    LegalityCheck("interleaving", "micro-batches", _interleaving, lambda j, t: (
        f"{degrees_text(t, 'vpp')} needs pp above 1 and micro-batches ({int(micro_batches_per_step(j, t)[0])}) "
        "that are a "
        f"multiple of {_round_length(j, t)}; change vpp, pp or micro_batch")),
    LegalityCheck("recompute", "switch", recompute_shortfall, recompute_message, depends_on_recompute_mode=True),
    LegalityCheck("cuda_graphs", "switch", graph_capture_shortfall, graph_capture_message,
                  depends_on_recompute_mode=True),
    LegalityCheck("zero", "stages", _zero, lambda j, t: (
        f"{j.framework.name} with data_parallel {j.framework.data_parallel} does not run {degrees_text(t, 'zero')} "
        f"with {degrees_text(t, 'tp', 'pp', 'cp')}; {_what_of_zero(j, t)}")),
    LegalityCheck("routed_copies", "ranks", routed_copies_shortfall, lambda j, t: (
        f"routed_copies: index (MoEBlaze) gathers a rank's own tokens: {degrees_text(t, 'ep', 'etp')} must be 1; set "
        "them to 1 or leave it out")),
    LegalityCheck("balancing", "GPUs", token_scheduling_shortfall, lambda j, t: (
        f"balancing micro_moe needs experts, framework megatron with dispatcher alltoall, {degrees_text(t, 'ep')} of "
        f"at least 2 and at most half the experts, and an even number of EP groups: "
        f"{degrees_text(t, 'tp', 'cp', 'dp')} a multiple of {MERGED_GROUPS} x {degrees_text(t, 'ep', 'etp')}; "
        "change ep or leave balancing out")),
)  # fmt: skip
"""In the order in which they are applied; ``needless`` and ``memory`` come after costing."""


@dataclass(frozen=True)
class FailedChecks:
    """Index of the first failed check of each row, -1 for none, and by how much it missed. (n,)"""

    reason: Verdicts
    shortfall: FloatN


def check_strategies(
    job: JobAndMachines, table: StrategyTable | SpaceCombinations, except_checks: tuple[str, ...] = ()
) -> FailedChecks:
    """Apply all checks ``except_checks`` those of some names. Of combinations, most checks read the degrees alone."""
    degrees = table if isinstance(table, StrategyTable) else table.degrees
    modes = 1 if isinstance(table, StrategyTable) else len(table.recompute)
    reason, shortfall = np.full((len(degrees), modes), -1, dtype=np.int8), np.zeros((len(degrees), modes))
    for options, rows in degrees.rows_by_options():
        _check(job.with_options(options), table, rows, except_checks, reason, shortfall)
    return FailedChecks(reason.reshape(-1), shortfall.reshape(-1))


def _check(
    job: JobAndMachines, every_row: StrategyTable | SpaceCombinations, rows: NDArray[np.intp], but: tuple[str, ...],
    reason: Verdicts, shortfall: FloatN,
) -> None:  # fmt: skip
    """The checks of ``rows`` that choose the same options of the framework, put where these are. (degrees, modes)"""
    num_modes = reason.shape[1]
    table = _degrees_of(every_row, rows) if len(rows) < len(reason) else every_row
    open_rows = rows
    """Degrees that no check has rejected in all modes; what is known of them, in all modes alike or in each."""
    own_reason, own_shortfall = np.full((len(rows), 1), -1, dtype=np.int8), np.zeros((len(rows), 1))
    for i, rule in enumerate(CHECKS):
        if rule.reason in but:
            continue
        miss = _shortfall(rule, job, table)
        is_short = miss > 0
        if not np.count_nonzero(is_short):  # quicker than any() of one row
            continue
        if miss.shape[1] > own_reason.shape[1]:
            own_reason = np.repeat(own_reason, num_modes, axis=1)
            own_shortfall = np.repeat(own_shortfall, num_modes, axis=1)
        new = (own_reason < 0) & is_short
        own_reason[new] = i
        own_shortfall[new] = np.broadcast_to(miss, new.shape)[new]
        is_left = (own_reason < 0).any(axis=1)
        left = np.flatnonzero(is_left)
        if 2 * len(left) < len(own_reason):  # further checks need not see the others
            gone = np.flatnonzero(~is_left)
            reason[open_rows[gone]], shortfall[open_rows[gone]] = own_reason[gone], own_shortfall[gone]
            open_rows, own_reason, own_shortfall = open_rows[left], own_reason[left], own_shortfall[left]
            if not len(left):
                return
            table = _degrees_of(table, left)
    failed = np.flatnonzero((own_reason >= 0).any(axis=1))
    reason[open_rows[failed]], shortfall[open_rows[failed]] = own_reason[failed], own_shortfall[failed]


def _degrees_of(table: StrategyTable | SpaceCombinations, rows: NDArray[np.intp]) -> StrategyTable | SpaceCombinations:
    """Some degrees, of combinations in all modes."""
    return table.select_rows(rows) if isinstance(table, StrategyTable) else table.rows_of_degrees(rows)


def _shortfall(rule: LegalityCheck, job: JobAndMachines, table: StrategyTable | SpaceCombinations) -> FloatN:
    """By how much each row misses. (degrees, modes), or (degrees, 1) where modes do not matter"""
    if isinstance(table, StrategyTable):
        return rule.shortfall(job, table)[:, None]
    if not rule.depends_on_recompute_mode:
        return rule.shortfall(job, table.degrees)[:, None]
    by_mode = [rule.shortfall(job, table.table_of_mode(mode)) for mode in range(len(table.recompute))]
    if not any(miss.any() for miss in by_mode):  # as nearly always
        return np.zeros((len(table.degrees), 1))
    return np.stack(by_mode, axis=1)
