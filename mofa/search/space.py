"""The search space: a list of values for every degree of freedom, and their product as one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.frameworks.recompute import selective_modes_to_search
from mofa.errors import SpecError
from mofa.schedules import SCHEDULE_NAMES, SCHEDULES, default_schedule
from mofa.specs.activation_offload import ACTIVATION_OFFLOAD
from mofa.specs.files import did_you_mean
from mofa.specs.framework import FrameworkSpec
from mofa.specs.framework_offers import OFFERED
from mofa.specs.hardware import ClusterSpec
from mofa.specs.optimizer_offload import OPTIMIZER_OFFLOAD
from mofa.specs.strategy import (
    AS_GIVEN,
    BALANCING,
    CP_KINDS,
    DispatcherName,
    FrameworkOptions,
    RecomputeSpec,
    StrategyTable,
)
from mofa.specs.strategy_defaults import default_zero_stage, needs_sequence_parallel
from mofa.specs.workload import FP8_RECIPES, OLD_FP8, WorkloadSpec

MAX_TP = 16
MAX_CP = 64
MAX_PP = 64
MAX_VPP = 16
MAX_MICRO_BATCH = 16
MIN_CP_TOKENS = 1024
"""Fewest tokens of a sequence on a rank for which context parallelism is searched; ``--fix cp`` goes below. [tokens]"""
SOLVED = -2
"""``recompute_layers`` of rows whose number of recomputed layers is still to be solved for."""

NODES_OF_SHARDS = (1, 2, 4)
"""Nodes over which a shard group of HSDP is searched. [-]"""
OPTIONS = FrameworkOptions._fields
"""Options of a framework that strategies choose; ``--without`` leaves the search of one out, as does ``--fix``."""

WITH = (
    *FP8_RECIPES, OLD_FP8, "bf16_moments", "bf16_grads", "deepep", "expert_overlap", "micro_moe", "token_chunks",
    "moeblaze", "cuda_graphs", "early_stop", OPTIMIZER_OFFLOAD, ACTIVATION_OFFLOAD,
)  # fmt: skip
TOKEN_CHUNKS = (1, 2, 4, 8)
"""MemFine's bins, which --with token_chunks searches."""
ZERO_BUBBLE = tuple(name for name, record in SCHEDULES.items() if record.is_searched and record.defers_weight_gradients)
"""Schedules that ``--without`` leaves out."""
FEWER_GPUS = "fewer_gpus"
"""Word of ``--without`` that keeps all GPUs computing, though fewer may be faster."""
RECOMPUTE_KINDS_BY_WORD = {
    "recompute": ("full", "selective", "ops", "every"), "full": ("full",), "selective": ("selective",),
}  # fmt: skip
"""Kinds of recomputation that each word of ``--without`` leaves out."""
WITHOUT = (
    "tp", "sp", "pp", "vpp", "cp", "ep", "etp", "recompute", "selective", "full", *ZERO_BUBBLE, *OPTIONS, FEWER_GPUS,
)  # fmt: skip


@dataclass(frozen=True)
class StrategySpace:
    """Values of each degree of freedom, in the order in which they are tried."""

    tp: tuple[int, ...]
    cp: tuple[int, ...]
    pp: tuple[int, ...]
    vpp: tuple[int, ...]
    ep: tuple[int, ...]
    etp: tuple[int, ...]
    """0 stands for tp."""
    micro_batch: tuple[int, ...]
    cp_kind: tuple[int, ...]
    recompute: tuple[tuple[RecomputeSpec, int], ...]
    """Modes with the number of layers that ``full`` recomputes: -1 all, ``SOLVED`` as few as fit."""
    schedule: tuple[str, ...]
    sp: tuple[bool, ...]
    """Whether tensor parallelism splits sequences: both where the framework runs both. Neither is always faster
    (docs/evidence/search.md, sequence parallelism)."""
    zero: int | None
    balancing: tuple[str, ...] = ("none",)
    dp: int | None = None
    """Data parallelism that tp, cp and pp must leave; any where absent."""
    most_etp: int | None = None
    """The most of etp where it stands for tp; any where absent. [-]"""
    layout: str = ""
    """The text of a layout that all have; the framework's own split where empty."""
    options: tuple[FrameworkOptions, ...] = (AS_GIVEN,)
    """Sets of the framework's options."""


def with_first_option_set(space: StrategySpace) -> StrategySpace:
    """The space with the first of its sets of framework options alone."""
    return replace(space, options=space.options[:1])


def powers_of_two(limit: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to the limit.

    >>> powers_of_two(12)
    (1, 2, 4, 8)
    """
    return tuple(2**i for i in range(limit.bit_length()) if 2**i <= limit)


def divisors(n: int, limit: int) -> tuple[int, ...]:
    """Divisors of n up to the limit.

    >>> divisors(60, 12)
    (1, 2, 3, 4, 5, 6, 10, 12)
    """
    return tuple(d for d in range(1, min(n, limit) + 1) if n % d == 0)


def max_pipeline_stages(num_layers: int) -> int:
    """Pipeline stages that layers can be on at most: the first may hold the embedding alone, the last the head.

    What is legal says so (:func:`mofa.search.legality.layers.layers_shortfall`).

    Examples
    --------
    >>> max_pipeline_stages(30)
    32
    """
    return num_layers + 2


def searched_recompute_modes(workload: WorkloadSpec, framework: FrameworkSpec) -> tuple[tuple[RecomputeSpec, int], ...]:
    """Modes that keep the numerics, as :attr:`StrategySpace.recompute`: the same on any number of GPUs."""
    modes: list[tuple[RecomputeSpec, int]] = [(RecomputeSpec(), -1)]
    if framework.traits.has_pytorch_modules:
        modes += [(RecomputeSpec.parse("ops"), -1), (RecomputeSpec.parse("every:2"), -1)]
    else:
        recipe = workload.precision.fp8_recipe
        modes += [(spec, -1) for spec in selective_modes_to_search(framework, workload.model, recipe)]
        modes.append((RecomputeSpec(kind="full"), SOLVED))
    return (*modes, (RecomputeSpec(kind="full"), -1))


def default_space(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec,
    recompute: tuple[tuple[RecomputeSpec, int], ...] | None = None,
) -> StrategySpace:  # fmt: skip
    """Everything that the framework offers without changing numerics; ``recompute`` is as
    :func:`searched_recompute_modes` has it, where that is known."""
    model, gpus = workload.model, cluster.num_gpus
    seq = workload.batch.seq_len
    cp = tuple(c for c in powers_of_two(MAX_CP) if c == 1 or (c <= gpus and seq // c >= MIN_CP_TOKENS))
    if not framework.traits.has_context_parallelism:
        cp = (1,)
    layers = model.num_layers
    pp = tuple(p for p in divisors(gpus, MAX_PP) if p <= max_pipeline_stages(layers))
    even = {v for v in range(1, MAX_VPP + 1) for p in pp for s in (0, 2) if p > 1 and (layers + s) % (p * v) == 0}
    vpp = tuple(sorted(even | {v for v in (1, 2, 3, 4) if v == 1 or any(p > 1 and p * v <= layers for p in pp)}))
    tp = powers_of_two(min(MAX_TP, cluster.node.gpus_per_domain, gpus))
    ep: tuple[int, ...] = (1,)
    etp: tuple[int, ...] = (1,)
    if model.moe is not None:
        ep = tuple(e for e in powers_of_two(model.moe.num_experts) if e <= gpus)
        etp = (1, 0) if framework.traits.has_pytorch_modules else tp
    schedules = tuple(
        name for name, schedule in SCHEDULES.items()
        if schedule.is_searched and (schedule.runs_in_megatron or framework.traits.has_pytorch_pipelines)
    )  # fmt: skip
    return StrategySpace(
        tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp,
        micro_batch=divisors(workload.batch.global_batch, MAX_MICRO_BATCH),
        cp_kind=(1,) if framework.traits.has_pytorch_modules else tuple(range(len(CP_KINDS))),
        recompute=searched_recompute_modes(workload, framework) if recompute is None else recompute, schedule=schedules,
        sp=(True,) if needs_sequence_parallel(framework, moe=model.moe is not None) else (True, False), zero=None,
        options=searched_option_sets(workload, cluster, framework),
    )  # fmt: skip


def searched_option_sets(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec
) -> tuple[FrameworkOptions, ...]:
    """Sets of options that keep the numerics and that the framework and the hardware have; what is given comes first.

    An option that the user set to something else than the framework's own is not searched. Tensor-parallel overlap
    is off under latent attention, whose linears have no user buffers (megatron_core 0.16.1,
    extensions/transformer_engine.py). DeepEP is searched on nodes whose profile has its rate. Where Megatron's
    parameters may be gathered behind the optimizer says :func:`gathers_at_once_without_gain`.
    """
    overlaps: list[bool | None] = [None]
    has_latents = workload.model.attention_kind.megatron.has_latents
    if framework.library is not None and not framework.tp_overlap and not has_latents:
        overlaps.append(True)
    dispatchers: list[DispatcherName | None] = [None]
    usual: DispatcherName = "alltoall"
    padded = workload.routing.pad_to_capacity or framework.router_padding
    if workload.model.moe is not None and framework.dispatcher == usual and not padded:
        offered = [name for name in get_args(DispatcherName) if name in OFFERED[framework.name]["dispatcher"]]
        has_deepep = cluster.node.intra.deepep_efficiency is not None
        dispatchers += [name for name in offered if name != usual and (name != "deepep" or has_deepep)]
    gathers: list[bool | None] = [None]
    if framework.overlap_param_gather and framework.data_parallel == "distributed-optimizer":
        gathers.append(False)
    replicas: list[int | None] = [None]
    replicates = "hsdp" in OFFERED[framework.name]["data_parallel"] and framework.data_parallel == "fsdp"
    if replicates and framework.dp_replicate == 1:
        nodes = cluster.num_gpus // cluster.node.gpus_per_node
        replicas += [nodes // n for n in NODES_OF_SHARDS if nodes % n == 0 and nodes // n > 1]
    return tuple(FrameworkOptions(*chosen) for chosen in product(overlaps, dispatchers, replicas, gathers))


def without_indivisible_degrees(space: StrategySpace, num_gpus: int, global_batch: int) -> StrategySpace:
    """The space without values of tp, cp and pp for which no dp completes these GPUs and divides the batch.

    Nothing legal is lost: strategies with these values fail the first check or the batch's.
    """
    triples = [
        (t, c, p) for t in space.tp for c in space.cp for p in space.pp
        if num_gpus % (t * c * p) == 0 and global_batch % (num_gpus // (t * c * p)) == 0
    ]  # fmt: skip
    degrees = [tuple(sorted(set(values))) for values in zip(*triples, strict=True)] or [(), (), ()]
    return replace(space, tp=degrees[0], cp=degrees[1], pp=degrees[2])


def constrain_space(
    space: StrategySpace,
    *,
    fix: Mapping[str, object],
    maximum: Mapping[str, int],
    with_: Sequence[str],
    without: Sequence[str],
) -> StrategySpace:
    """The space under what the user asked for.

    Raises
    ------
    SpecError
        If a word is unknown or a constraint leaves a degree without a value.
    """
    values: dict[str, object] = dict(vars(space))
    if isinstance(with_, str) or isinstance(without, str):
        raise SpecError(f"--with and --without: take words, not one text ({with_ or without!r}); give a list of them")
    _refuse_unknown_words(with_, without)
    _refuse_contradictions(fix, without)
    if "micro_moe" in with_:
        values["balancing"] = BALANCING
    for word in without:
        if word == FEWER_GPUS:
            continue
        if word == "sp":
            values["sp"] = (False,)
        elif word in RECOMPUTE_KINDS_BY_WORD:
            left_out = RECOMPUTE_KINDS_BY_WORD[word]
            values["recompute"] = tuple(m for m in space.recompute if m[0].kind not in left_out)
        elif word in ZERO_BUBBLE:
            values["schedule"] = tuple(name for name in values["schedule"] if name != word)  # type: ignore[attr-defined]
        elif word in OPTIONS:
            values["options"] = _with_option(values["options"], word, None)  # type: ignore[arg-type]
        else:
            values[word] = (1,)
    _apply_fixed(values, fix)
    chunks: tuple[int, ...] = TOKEN_CHUNKS if "token_chunks" in with_ else (1,)
    if "token_chunks" in fix:
        chunks = tuple(int(str(value)) for value in values_of_fixed_field(fix["token_chunks"]))
    for name, bound in maximum.items():
        if name == "dp":
            raise SpecError("--max: dp follows from the other degrees; bound tp, cp or pp instead")
        allowed = tuple(v for v in values[name] if (v or 1) <= bound)  # type: ignore[attr-defined]
        if not allowed:
            raise SpecError(f"--max: {name} has no value up to {bound}; raise the bound")
        values[name] = allowed
        if name == "etp":
            values["most_etp"] = bound
    values["recompute"] = _in_chunks(values["recompute"], chunks)  # type: ignore[arg-type]
    return StrategySpace(**values)  # type: ignore[arg-type]


def _refuse_unknown_words(with_: Sequence[str], without: Sequence[str]) -> None:
    """Refuse words that add or leave out nothing."""
    for word in with_:
        if word in SCHEDULES:
            raise SpecError(f"--with: {word} is searched where the framework runs it, or with --fix schedule={word}")
        if word not in WITH:
            raise SpecError(f"--with: {word} is unknown; {did_you_mean(word, WITH)}")
    for word in without:
        if word not in WITHOUT:
            raise SpecError(f"--without: {word} is unknown; {did_you_mean(word, WITHOUT)}")


def _refuse_contradictions(fix: Mapping[str, object], without: Sequence[str]) -> None:
    """Refuse a value that is both asked for and excluded."""
    for word in without:
        asked = {"recompute": "recompute", "selective": "recompute", "full": "recompute"}.get(word, word)
        if asked not in fix:
            continue
        value = " ".join(map(str, values_of_fixed_field(fix[asked])))
        left_out = value.split(":")[0]
        if (
            (asked != "recompute" and value not in ("1", "False"))
            or (word == "recompute" and left_out != "none")
            or (asked == "recompute" and word == left_out)
        ):
            raise SpecError(f"--without {word}: but --fix asks for {asked}={value}; keep one")


def _with_option(options: tuple[FrameworkOptions, ...], name: str, value: object) -> tuple[FrameworkOptions, ...]:
    """Sets of options in which one has a value, each once."""
    return tuple(dict.fromkeys(FrameworkOptions(**{**chosen._asdict(), name: value}) for chosen in options))


def _in_chunks(
    modes: tuple[tuple[RecomputeSpec, int], ...], chunks: tuple[int, ...]
) -> tuple[tuple[RecomputeSpec, int], ...]:
    """Every recomputation mode in every number of token chunks; only modes without chunks solve for recomputed
    layers."""
    return tuple(
        (spec.model_copy(update={"token_chunks": c}), n) for c in chunks for spec, n in modes if c == 1 or n != SOLVED
    )


def values_of_fixed_field(value: object) -> tuple[object, ...]:
    """The values that ``--fix`` gives a field: several as a tuple, else one.

    >>> values_of_fixed_field((4, 8)), values_of_fixed_field("full")
    ((4, 8), ('full',))
    """
    return value if isinstance(value, tuple) else (value,)


def _apply_fixed(values: dict[str, object], fix: Mapping[str, object]) -> None:
    """Leave each fixed field with its values alone."""
    for name, given in fix.items():
        if name == "token_chunks":
            continue
        if name in OPTIONS:
            sets = [_with_option(values["options"], name, value) for value in values_of_fixed_field(given)]  # type: ignore[arg-type]
            values["options"] = tuple(dict.fromkeys(chosen for options in sets for chosen in options))
            continue
        by_value = [_fixed(name, value) for value in values_of_fixed_field(given)]
        for key, first in by_value[0].items():
            if len(by_value) == 1:
                values[key] = first
            elif isinstance(first, tuple):
                values[key] = tuple(dict.fromkeys(item for fields in by_value for item in fields[key]))  # type: ignore[attr-defined]
            else:
                raise SpecError(f"--fix: {name} takes one value, not {len(by_value)}; give one of them")


def _fixed(name: str, value: object) -> dict[str, object]:
    if name == "recompute":
        spec = RecomputeSpec.parse(str(value))
        layers = spec.layers if spec.kind == "full" and spec.layers is not None else -1
        return {"recompute": ((RecomputeSpec(kind="full") if spec.kind == "full" else spec, layers),)}
    if name == "cp_kind":
        return {"cp_kind": (CP_KINDS.index(str(value)),)}
    if name == "schedule":
        if value not in SCHEDULE_NAMES:
            raise SpecError(f"--fix: schedule {value} is unknown; use one of {', '.join(SCHEDULE_NAMES)}")
        return {"schedule": (str(value),)}
    if name == "balancing":
        return {"balancing": (str(value),)}
    if name in ("zero", "layout"):
        return {name: value}
    if name == "dp":
        return {}
    if name == "framework":
        raise SpecError("--fix: the framework is chosen by --framework")
    return {name: (value,)}


@dataclass(frozen=True)
class SpaceCombinations:
    """All strategies of a space: each row of ``degrees``, (c,), in each of M recomputation modes, which vary fastest.

    Row ``i`` of all ``c * M`` has the degrees ``i // M``. Rows are made when asked for: a table of a million rows would
    take 100 MB.
    """

    degrees: StrategyTable
    recompute: NDArray[np.int64]
    """Each mode, of ``degrees.recompute_modes``. (M,)"""
    recompute_layers: NDArray[np.int32]
    """How many layers each row recomputes whole. (c * M,)"""

    def __len__(self) -> int:
        return len(self.recompute_layers)

    def select_rows(self, rows: NDArray[np.intp]) -> StrategyTable:
        """The table of these rows."""
        of, mode = np.divmod(rows, len(self.recompute))
        table = self.degrees.select_rows(of)
        layers = self.recompute_layers[rows].astype(np.int64)
        return replace(table, recompute=self.recompute[mode], recompute_layers=layers)

    def table_of_mode(self, mode: int) -> StrategyTable:
        """The table of one mode's rows. (c,)"""
        column = self.recompute_layers.reshape(-1, len(self.recompute))[:, mode].astype(np.int64)
        number = self.recompute[mode]
        return replace(self.degrees, recompute=np.full(len(column), number), recompute_layers=column)

    def rows_of_degrees(self, degrees: NDArray[np.intp]) -> SpaceCombinations:
        """These degrees in all modes."""
        layers = self.recompute_layers.reshape(-1, len(self.recompute))[degrees].reshape(-1)
        return SpaceCombinations(self.degrees.select_rows(degrees), self.recompute, layers)


def combinations_table(space: StrategySpace, cluster: ClusterSpec, framework: FrameworkSpec) -> StrategyTable:
    """All rows of :func:`combinations_of_space` as a table."""
    combined = combinations_of_space(space, cluster, framework)
    return combined.select_rows(np.arange(len(combined)))


def combinations_of_space(space: StrategySpace, cluster: ClusterSpec, framework: FrameworkSpec) -> SpaceCombinations:
    """All combinations of a space without duplicates.

    dp = gpus / (tp * cp * pp), floored where it does not divide: the first check rejects those.
    """
    modes = tuple(dict.fromkeys(spec for spec, _ in space.recompute))
    axes: list[NDArray[np.int64]] = [
        np.array(space.tp), np.array(space.cp), np.array(space.pp), np.array(space.vpp), np.array(space.ep),
        np.array(space.etp), np.array(space.micro_batch), np.array(space.cp_kind),
        np.array([SCHEDULE_NAMES.index(s) for s in space.schedule]),
        np.array([BALANCING.index(b) for b in space.balancing]), np.arange(len(space.options)),
        np.array(space.sp, dtype=np.int64),
    ]  # fmt: skip
    tp, cp, pp, vpp, ep, etp, _, kind, schedule, _, options, sp = np.ix_(*axes)
    of_one, of_several = (SCHEDULE_NAMES.index(default_schedule(n)) for n in (1, 2))
    fixed_chunks = np.array([record.chunks_per_rank or 1 for record in SCHEDULES.values()])[schedule]
    sizes = [len(axis) for axis in axes]
    twice = np.zeros(sizes, dtype=bool)
    twice |= (etp == 0) & (tp == 1) & (1 in space.etp)
    twice |= (kind != space.cp_kind[0]) & (cp == 1)
    twice |= (schedule == of_several) & (vpp == 1) & (len(space.vpp) > 1 or of_one in axes[8])
    twice |= (schedule == of_one) & (vpp > 1)
    twice |= (fixed_chunks > 1) & (vpp != fixed_chunks)
    overlaps, dispatches = (
        np.array([getattr(chosen, name) is not None for chosen in space.options])
        for name in ("tp_overlap", "dispatcher")
    )
    if len(space.sp) > 1:
        twice |= (tp == 1) & (sp != space.sp[0])
        overlapping = np.array([chosen.tp_overlap is True for chosen in space.options])[options]
        twice |= overlapping & (tp > 1) & (sp == 0)  # it needs sequence parallelism
    if not overlaps.all():  # where nothing is to be overlapped, or no tokens sent, all say the same
        twice |= overlaps[options] & (tp == 1)
    if not dispatches.all():
        twice |= dispatches[options] & (ep == 1) & (np.where(etp == 0, tp, etp) == 1)
    twice |= gathers_at_once_without_gain(space, options, tp, pp, vpp, cluster.num_gpus)
    if space.most_etp is not None:
        twice |= np.where(etp == 0, tp, etp) > space.most_etp
    if space.dp is not None:
        twice |= tp * cp * pp * space.dp != cluster.num_gpus
    single = np.unravel_index(np.flatnonzero(~twice), sizes)
    degrees = with_derived_degrees(
        [axis[i] for axis, i in zip(axes, single, strict=True)], space, modes, cluster, framework
    )
    number = np.array([modes.index(spec) for spec, _ in space.recompute], dtype=np.int64)
    layers = np.array([n for _, n in space.recompute], dtype=np.int32)
    return SpaceCombinations(degrees, number, np.tile(layers, len(degrees)))


def gathers_at_once_without_gain(
    space: StrategySpace, options: NDArray[np.int64], tp: NDArray[np.int64], pp: NDArray[np.int64],
    vpp: NDArray[np.int64], num_gpus: int,
) -> NDArray[np.bool_]:  # fmt: skip
    """Whether rows choose that Megatron gathers parameters behind the optimizer, where that makes no step shorter.

    Beside the forward each later stage of 1F1B gathers when its first input comes, one stage after the other. One
    stage, and chunks of interleaving, which all ranks ask for at once, wait no longer beside the forward than behind
    the optimizer. Nothing is gathered where no ranks share parameters. Memory is the same
    (docs/evidence/search.md, gathering parameters at once).
    """
    chosen = np.array([some.overlap_param_gather is not None for some in space.options])
    if chosen.all():  # what is fixed holds everywhere
        return np.zeros(1, dtype=bool)
    return np.asarray(chosen[options] & ((pp == 1) | (vpp > 1) | (tp * pp >= num_gpus)))


def with_derived_degrees(
    columns: list[NDArray[np.int64]], space: StrategySpace, modes: tuple[RecomputeSpec, ...], cluster: ClusterSpec,
    framework: FrameworkSpec,
) -> StrategyTable:  # fmt: skip
    """The chosen combinations with what follows from them: dp, sequence parallelism, the ZeRO stage."""
    tp, cp, pp, vpp, ep, etp, mb, kind, schedule, balancing, options, split = columns
    etp = np.where(etp == 0, tp, etp)
    dp = np.maximum(cluster.num_gpus // (tp * cp * pp), 0)
    sp = split.astype(bool) & (tp > 1)
    zero = np.full(len(tp), 0 if space.zero is None else space.zero)
    for number, chosen in enumerate(space.options if space.zero is None else ()):
        rows = np.flatnonzero(options == number)
        zero[rows] = default_zero_stage(framework.with_options(chosen), dp[rows], cp[rows], pp[rows])
    return StrategyTable(
        tp=tp, sp=sp, pp=pp, vpp=vpp, cp=cp, cp_kind=kind, ep=ep, etp=etp, dp=dp, micro_batch=mb, zero=zero,
        recompute=np.zeros_like(tp), recompute_layers=np.full_like(tp, -1), schedule=schedule, balancing=balancing,
        layout=np.zeros_like(tp), options=options, recompute_modes=modes, layouts=(space.layout,),
        option_sets=space.options,
    )  # fmt: skip
