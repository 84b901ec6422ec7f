"""How well the closed forms of the search agree with the replay, on random legal strategies.

python benchmarks/replay_agreement.py            # 500 random jobs, uniform over each field, and what differs
python benchmarks/replay_agreement.py --num 2000 --seed 7 --jobs 2   # more of another seed, in two processes
python benchmarks/replay_agreement.py --time     # step times alone, which is quick
python benchmarks/replay_agreement.py --by-kind  # strategies of eight jobs of which each kind is drawn as often
python benchmarks/replay_agreement.py --by-kind --num 100 --batches 8   # the same with 8 times the global batch
python benchmarks/replay_agreement.py --zero-bubble --num 60  # PyTorch's schedules that put weights' gradients off
python benchmarks/replay_agreement.py --wider --num 240       # other frameworks and options, one line for each
python benchmarks/replay_agreement.py --wider --only fsdp1 --verbose
python benchmarks/replay_agreement.py --wider --num 240 --seed 2731 --parts  # whose parts are named alike
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.cost.breakdown import TIME_COMPONENTS
from mofa.cost.estimate import TableEstimator
from mofa.replay.memory.rank_memory import play_memory
from mofa.replay.memory.shared_recordings import SharedRecordings
from mofa.replay.rank.from_estimator import describe_ranks, outside_allocator_bytes
from mofa.replay.time.step import replay_step_time
from mofa.schedules import SCHEDULE_NAMES
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.legality.masks import JobAndMachines, check_strategies
from mofa.search.space import SOLVED, combinations_table, constrain_space, default_space, with_first_option_set
from mofa.specs.framework_offers import PYTORCH_MODULES
from mofa.specs.load import load_cluster, load_framework, load_workload
from mofa.specs.strategy import StrategyTable

SEED = 5
MEMORY_BAR, TIME_BAR, PARTS_BAR = 0.02, 0.035, 0.02
SKEWED: dict[str, object] = {"routing": {"kind": "zipf", "s": 0.3}}
# name, cluster, GPUs, global batch, framework, what is changed
JOBS: tuple[tuple[str, str, int, int, str, dict[str, object]], ...] = (
    ("llama3-8b", "h100-hgx", 32, 128, "megatron", {}),
    ("llama3-8b", "h100-hgx", 32, 128, "torchtitan", {}),
    ("llama3-70b", "h200-hgx", 64, 64, "megatron", {}),
    ("llama3-70b", "h200-hgx", 64, 64, "torchtitan", {}),
    ("qwen3-30b-a3b", "h100-hgx", 64, 128, "megatron", {}),
    ("qwen3-30b-a3b", "h200-hgx", 64, 128, "torchtitan", {}),
    ("mixtral-8x7b", "h100-hgx", 32, 64, "megatron", SKEWED),
    ("deepseek-v3", "h200-hgx", 256, 256, "megatron", {}),
)  # fmt: skip
Where = tuple[str, str, int, int]
"""Workload, cluster, GPUs, global batch."""
DENSE: tuple[Where, ...] = (("llama3-8b", "h100-hgx", 32, 128), ("llama3-70b", "h200-hgx", 64, 64))
EXPERTS: tuple[Where, ...] = (("qwen3-30b-a3b", "h100-hgx", 64, 128), ("mixtral-8x7b", "h100-hgx", 32, 64))
LATENT: tuple[Where, ...] = (("deepseek-v2-lite", "h100-hgx", 32, 128),)
GPT: tuple[Where, ...] = (("gpt3-175b", "h200-hgx", 128, 128), ("llama3-8b", "h100-hgx", 32, 128))
LARGE: tuple[Where, ...] = (
    ("llama3-8b", "h100-hgx", 32, 512), ("llama3-70b", "h200-hgx", 64, 512), ("gpt3-175b", "h200-hgx", 128, 512),
)  # fmt: skip
FP8: dict[str, object] = {"precision": {"gemm": "fp8"}}
# as the runs of BLOOM have it (reference_runs/published/bloom.yaml): 16-bit gradients of autograd's, fp32 only to step
APART: dict[str, object] = {
    "fuses_wgrad_accumulation": False, "overlap_input_grads": False, "grads_bytes_per_param": 2,
    "accumulation_bytes_per_param": 6, "reduced_bytes_per_param": 2,
}  # fmt: skip


class Line(NamedTuple):
    """A framework with options, on some workloads: what is changed in these, the modes of recomputation besides those
    of the search, and what the search is asked for."""

    where: tuple[Where, ...]
    framework: str
    options: dict[str, object] = {}
    changes: dict[str, object] = {}
    modes: tuple[str, ...] = ()
    with_: tuple[str, ...] = ()


EVEN = {"balances_by": "turn"}
"""Closed forms do not know what tokens that fall at random tear; the replay draws them."""
WIDER: dict[str, Line] = {
    "fsdp1": Line(LARGE, "fsdp1", modes=("full",)),
    "fsdp1 compile": Line(LARGE, "fsdp1", {"compile": True}, modes=("full",)),
    "fsdp1 hsdp": Line(LARGE[:2], "fsdp1", {"data_parallel": "hsdp", "dp_replicate": 4}),
    "torchtitan compile": Line((*DENSE, *EXPERTS, *LATENT), "torchtitan", {"compile": True}),
    "torchtitan eager": Line((*EXPERTS, *LATENT), "torchtitan", modes=("full", "every:3")),
    "torchtitan hsdp": Line((*DENSE, *EXPERTS), "torchtitan", {"data_parallel": "hsdp", "dp_replicate": 2}),
    "torchtitan ddp": Line(DENSE[:1], "torchtitan", {"data_parallel": "ddp"}),
    "torchtitan deepep": Line((*EXPERTS, *LATENT), "torchtitan", {"dispatcher": "deepep"}),
    "torchtitan sequential": Line(EXPERTS, "torchtitan", {"experts": "sequential"}),
    "torchtitan fp8": Line(DENSE, "torchtitan", {}, FP8),
    "torchtitan fp8 compile": Line(DENSE, "torchtitan", {"compile": True}, FP8),
    "megatron fp8": Line((*DENSE, *EXPERTS, *LATENT), "megatron", {}, FP8),
    "megatron fp8 params": Line((*DENSE, *EXPERTS), "megatron", {"fp8_params": True}, FP8),
    "megatron ddp": Line((*DENSE, *EXPERTS), "megatron", {"data_parallel": "ddp"}),
    "megatron no overlap": Line(
        (*DENSE, *EXPERTS), "megatron", {"overlap_grad_reduce": False, "overlap_param_gather": False}
    ),
    "megatron allgather": Line((*EXPERTS, *LATENT), "megatron", {"dispatcher": "allgather"}),
    "megatron deepep": Line((*EXPERTS, *LATENT), "megatron", {"dispatcher": "deepep"}),
    "megatron sequential": Line(EXPERTS, "megatron", {"experts": "sequential"}),
    "megatron latent": Line(LATENT, "megatron", modes=("selective:mla_up_proj", "full:1")),
    "megatron chunks": Line((*EXPERTS, *LATENT), "megatron", with_=("token_chunks",)),
    "megatron moeblaze": Line(EXPERTS, "megatron", {"routed_copies": "either"}),
    "megatron micro-moe": Line(EXPERTS, "megatron", with_=("micro_moe",)),
    "megatron tp overlap": Line(DENSE, "megatron", {"tp_overlap": True}),
    "megatron expert overlap": Line((*EXPERTS, *LATENT), "megatron", {"expert_overlap": "combined"}),
    "megatron delayed weights": Line(
        (*EXPERTS, *LATENT), "megatron", {"expert_overlap": "combined", "delay_wgrad": True}
    ),
    "megatron shared experts": Line(LATENT, "megatron", {"shared_expert_overlap": True}),
    "megatron overlapped deepep": Line(
        (*EXPERTS, *LATENT), "megatron", {"expert_overlap": "combined", "delay_wgrad": True, "dispatcher": "deepep"}
    ),
    "megatron bf16 moments": Line(DENSE, "megatron", {}, {"precision": {"moments": "bf16"}}, ("full:1",)),
    "megatron skewed": Line(EXPERTS, "megatron", {}, SKEWED),
    "megatron-local": Line((*DENSE, *EXPERTS), "megatron-local", modes=("selective:core_attn+mlp",)),
    "megatron-local unfused": Line(
        (*DENSE, *EXPERTS), "megatron-local", {"attention": "unfused"}, modes=("selective:core_attn+mlp",)
    ),
    "megatron-2022": Line(GPT, "megatron-2022", modes=("full:1",)),
    "megatron-2022 ddp": Line(GPT, "megatron-2022", {"data_parallel": "ddp"}, modes=("full:1",)),
    "deepspeed zero0": Line(
        GPT, "megatron-2022",
        {**APART, "deepspeed": "zero0", "data_parallel": "ddp", "states_bytes_per_param": 16}, modes=("full:1",),
    ),
    "deepspeed zero1": Line(
        GPT, "megatron-2022", {**APART, "deepspeed": "zero1", "states_bytes_per_param": 16}, modes=("full:1",),
    ),
    "deepspeed bf16": Line(
        GPT, "megatron-2022",
        {**APART, "deepspeed": "bf16", "grads_bytes_per_param": 6, "accumulation_bytes_per_param": 18,
         "reduced_bytes_per_param": 4, "splits_layers": "greedy-embeddings"}, modes=("full:1",),
    ),
}  # fmt: skip
WANTED: dict[str, Callable[[JobAndMachines, StrategyTable], NDArray[np.bool_]]] = {
    "any": lambda job, t: np.ones(len(t), dtype=bool),
    "pp > 1": lambda job, t: t.pp > 1,
    "vpp > 1": lambda job, t: t.vpp > 1,
    "ep > 1": lambda job, t: t.ep > 1,
    "cp > 1": lambda job, t: t.cp > 1,
    "full": lambda job, t: _recompute(t, "full"),
    "selective": lambda job, t: _recompute(t, "selective"),
    "torchtitan": lambda job, t: np.full(len(t), job.framework.name == "torchtitan"),
    "skewed": lambda job, t: (t.ep > 1) & (job.workload.routing.kind != "balanced"),
}
"""What there are to be at least 50 of among 500."""


@dataclass(frozen=True)
class Case:
    """A strategy of a job."""

    name: str
    job: JobAndMachines
    row: StrategyTable

    @cached_property
    def estimator(self) -> TableEstimator:
        return TableEstimator(
            self.job.workload,
            self.job.cluster,
            self.job.framework,
            self.row,
            routing_loads_by_ep(self.job.workload, self.row),
        )


def _recompute(table: StrategyTable, kind: str) -> NDArray[np.bool_]:
    return np.array([spec.kind == kind for spec in table.recompute_modes])[table.recompute]


@cache
def _legal(index: int, batches: int = 1) -> tuple[str, JobAndMachines, StrategyTable]:
    name, cluster, gpus, batch, framework, changes = JOBS[index]
    job, table = _strategies(Line(((name, cluster, gpus, batches * batch),), framework, {}, changes), 0)
    return f"{name} {framework}", job, table


def _strategies(line: Line, at: int) -> tuple[JobAndMachines, StrategyTable]:
    """The job of one of a line's workloads, and all its legal strategies."""
    name, cluster, gpus, batch = line.where[at]
    job = JobAndMachines(
        load_workload(name, global_batch=batch, overrides=line.changes or None), load_cluster(cluster, gpus),
        load_framework({"name": line.framework, **EVEN, **line.options}),
    )  # fmt: skip
    default = with_first_option_set(default_space(job.workload, job.cluster, job.framework))  # zbv has cases of its own
    asked = [constrain_space(default, fix=fix, maximum={}, with_=line.with_, without=("zbv",))
             for fix in ({}, *({"recompute": mode} for mode in line.modes))]  # fmt: skip
    modes = tuple(dict.fromkeys(mode for space in asked for mode in space.recompute))
    pytorch_ddp = job.framework.name in PYTORCH_MODULES and job.framework.data_parallel == "ddp"
    space = replace(asked[0], recompute=modes, zero=0 if pytorch_ddp else None)
    table = combinations_table(space, job.cluster, job.framework)
    legal = (check_strategies(job, table).reason < 0) & (table.recompute_layers != SOLVED)
    if "micro_moe" in line.with_:
        legal &= table.balancing > 0
    return job, table.select_rows(np.flatnonzero(legal))


def wider_cases(num: int, seed: int = SEED, only: str = "") -> Iterator[Case]:
    """Random legal strategies of :data:`WIDER`, of each line whose name begins with ``only`` as many.

    A mode of recomputation is drawn first and then one of its rows, as some modes have few.
    """
    lines = {name: line for name, line in WIDER.items() if name.startswith(only)}
    for number, (name, line) in enumerate(lines.items()):
        random = np.random.default_rng((seed, *name.encode()))
        jobs = [_strategies(line, at) for at in range(len(line.where))]
        for i in range(-(-(num - number) // len(lines))):
            job, table = jobs[i % len(jobs)]
            fits = np.flatnonzero(table.recompute == random.choice(np.unique(table.recompute)))
            yield Case(name, job, table.select_rows(np.array([random.choice(fits)])))


def cases(num: int, seed: int = SEED, batches: int = 1) -> Iterator[Case]:
    """Random legal strategies, every kind of :data:`WANTED` in its turn, of jobs of so many times their batch."""
    random = np.random.default_rng(seed)
    for i in range(num):
        want = list(WANTED.values())[i % len(WANTED)]
        while True:
            name, job, table = _legal(int(random.integers(len(JOBS))), batches)
            found = np.flatnonzero(want(job, table))
            if len(found):
                break
        row = table.select_rows(np.array([random.choice(found)]))
        yield Case(name, job, row)


def zero_bubble_cases(num: int, seed: int = SEED) -> Iterator[Case]:
    """Random legal strategies of torchtitan under ZB-V and interleaved zero bubble in turn; no op-level checkpoints."""
    random = np.random.default_rng(seed)
    jobs = [i for i, job in enumerate(JOBS) if job[4] == "torchtitan"]
    for i in range(num):
        schedule, vpp = (("zbv", 2), ("interleaved-zb", 0))[i % 2]
        name, job, table = _legal(jobs[i % len(jobs)])
        known = np.array([mode.kind != "ops" for mode in table.recompute_modes])[table.recompute]
        fits = np.flatnonzero(known & ((table.vpp == vpp) if vpp else (table.vpp > 1)))
        row = table.select_rows(np.array([random.choice(fits)]))
        yield Case(name, job, replace(row, schedule=np.array([SCHEDULE_NAMES.index(schedule)])))


@dataclass(frozen=True)
class Agreement:
    """Closed form over replay - 1: the step, and the largest of all ranks' memory (None where it was not played).

    ``reserved`` is what all candidates of a search are weighed by.
    """

    step: float
    allocated: float | None = None
    reserved: float | None = None
    device: float | None = None
    parts: float = 0.0
    """How far the part that differs most is apart, over the replay's step, beyond what the steps are."""


def compare(case: Case, *, memory: bool = True) -> Agreement:
    """Both ways for one strategy."""
    estimator = case.estimator
    closed = estimator.breakdown(detail=True)
    replayed = replay_step_time(estimator, detail=False)
    step = float(closed.step_s[0]) / replayed.step_s - 1
    exposed = zip(TIME_COMPONENTS, closed.exposed_s[:, 0].tolist(), strict=True)
    parts = max(abs(seconds - replayed.exposed[name]) for name, seconds in exposed) / replayed.step_s - abs(step)
    if not memory:
        return Agreement(step, parts=parts)
    detail = closed.detail
    assert detail is not None
    expandable = case.job.framework.allocator == "expandable"
    recordings = SharedRecordings()
    ranks = [play_memory(rank, expandable=expandable, recordings=recordings) for rank in describe_ranks(estimator)]
    context, communicators = outside_allocator_bytes(estimator)
    reserved = max(rank.peak_reserved for rank in ranks)
    device = context + max(rank.peak_reserved + held for rank, held in zip(ranks, communicators, strict=True))
    return Agreement(
        step,
        float(detail.allocated_bytes[0].max()) / max(rank.allocated for rank in ranks) - 1,
        float(detail.reserved_bytes[0].max()) / reserved - 1,
        float(detail.device_bytes[0].max()) / device - 1,
        parts,
    )


def describe(case: Case) -> str:
    """The strategy in words."""
    t = case.row
    parts = [f"{n}={int(getattr(t, n)[0])}" for n in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "micro_batch")]
    recompute = t.recompute_modes[int(t.recompute[0])]
    model = "" if case.name.startswith(case.job.workload.name) else f" {case.job.workload.name}"
    return f"{case.name}{model}: {' '.join(parts)} {recompute} {SCHEDULE_NAMES[int(t.schedule[0])]}"


def by_line(found: list[tuple[Case, Agreement]], names: tuple[str, ...]) -> str:
    """A line for each name that cases have: how many are within the bars, and the ends, of each quantity."""
    lines = [f"{'':24s}   num" + "".join(f"{name:>29s}" for name in names)]
    for line in dict.fromkeys(case.name for case, _ in found):
        text = ""
        own = [agreement for case, agreement in found if case.name == line]
        for name in names:
            x = np.array([getattr(agreement, name) for agreement in own])
            inside = int((np.abs(x) <= (TIME_BAR if name == "step" else MEMORY_BAR)).sum())
            text += f"{inside:7d} in {np.median(x):+5.1%} ({x.min():+6.1%} {x.max():+6.1%})"
        lines.append(f"{line:24s} {len(own):5d} {text}")
    return "\n".join(lines)


def by_parts(found: list[tuple[Case, Agreement]]) -> str:
    """The strategies of which a part of the step differs by more than the bar, and how many these are."""
    apart = [(agreement.parts, case) for case, agreement in found if agreement.parts > PARTS_BAR]
    every = [agreement.parts for _, agreement in found]
    lines = [f"{parts:8.2%} {describe(case)}" for parts, case in sorted(apart, key=lambda each: -each[0])]
    lines.append(
        f"parts: {len(apart)} of {len(found)} beyond {PARTS_BAR:.0%} of the step, median {np.median(every):.2%}"
    )
    return "\n".join(lines)


def main() -> None:
    """Print the distributions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=500)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=1, help="processes, of random jobs")
    parser.add_argument("--by-kind", action="store_true", help="each kind of strategy of eight jobs in its turn")
    parser.add_argument("--batches", type=int, default=1, help="with --by-kind: times the jobs' global batches")
    parser.add_argument("--time", action="store_true", help="step times alone")
    parser.add_argument("--parts", action="store_true", help="step times alone, and which differ in a part")
    parser.add_argument("--zero-bubble", action="store_true", help="ZB-V and interleaved zero bubble alone")
    parser.add_argument("--wider", action="store_true", help="other frameworks and options than the search's usual")
    parser.add_argument("--only", default="", help="with --wider: the lines whose name begins so")
    parser.add_argument("--verbose", action="store_true", help="one line per strategy")
    given = parser.parse_args()
    given.time |= given.parts
    if not (given.by_kind or given.zero_bubble or given.wider):
        from random_agreement import compare_all, report  # beside this file

        results = compare_all(given.num, given.seed, given.jobs, memory=not given.time)
        print(report(results, given.seed, memory=not given.time, verbose=given.verbose))
        return
    started = time.perf_counter()
    found: list[tuple[Case, Agreement]] = []
    if given.wider:
        drawn = wider_cases(given.num, given.seed, given.only)
    elif given.zero_bubble:
        drawn = zero_bubble_cases(given.num, given.seed)
    else:
        drawn = cases(given.num, given.seed, given.batches)
    for case in drawn:
        found.append((case, compare(case, memory=not given.time)))
        if given.verbose:
            a = found[-1][1]
            parts = [f"{x:+8.2%}" for x in (a.step, a.allocated, a.reserved, a.device) if x is not None]
            print(" ".join(parts), "", describe(case), flush=True)
        elif sys.stderr.isatty():
            print(f"\r{len(found)} of {given.num}", end="", file=sys.stderr)
    print(f"{len(found)} legal strategies, seed {given.seed}, {time.perf_counter() - started:.0f} s")
    if given.parts:
        print(by_parts(found))
    names = ("step",) if given.time else ("step", "allocated", "reserved", "device")
    if given.wider:
        print(by_line(found, names))
    for kind, want in {} if given.wider else WANTED.items():
        print(f"  {kind}: {sum(bool(want(case.job, case.row)[0]) for case, _ in found)}")
    print("closed form over replay   median |x|   mean |x|    90 %     99 %    worst   within")
    for name in names:
        bar = TIME_BAR if name == "step" else MEMORY_BAR
        x = np.array([getattr(agreement, name) for _, agreement in found])
        size = np.abs(x)
        row = (np.median(size), size.mean(), *np.quantile(size, [0.9, 0.99]), size.max())
        inside = int((size <= bar).sum())
        ends = (
            f"   {inside} of {len(x)} within {bar:.0%}, {int((x < -bar).sum())} below; {x.min():+.1%} to {x.max():+.1%}"
        )
        if name == "reserved" and not given.wider:
            for framework in ("megatron", "torchtitan"):
                own = np.array([getattr(a, name) for case, a in found if case.job.framework.name == framework])
                ends += f"; {framework}'s {int((np.abs(own) <= bar).sum())} of {len(own)}"
        print(f"{name:24s} " + " ".join(f"{v:9.2%}" for v in row) + ends)


if __name__ == "__main__":
    main()
