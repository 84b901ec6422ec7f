"""Random legal jobs, and what must hold of every plan: sums, finite numbers, bounds, better hardware no slower."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import Any

import mofa
from mofa.errors import MofaError, StrategyError
from mofa.plan.result import Plan
from mofa.specs.load import load_cluster, load_framework, load_workload, parse_set_options
from tests.fuzz.invariants import BrokenInvariant, expect
from tests.fuzz.number_paths import drawn_setting
from tests.fuzz.run import Findings, judge

WORKLOADS = ("llama3-8b", "mixtral-8x7b", "deepseek-v3")
NODES = ("h100-hgx", "a100-hgx", "h200-hgx", "b200-hgx")
FRAMEWORKS = ("megatron", "megatron-local", "torchtitan")
ROUNDING = 1e-9


def drawn_job(draw: random.Random) -> dict[str, Any]:
    """A job of a small model with a strategy that may be legal: the arguments of :func:`plan_of`."""
    node = draw.choice(NODES)
    tp, pp, cp = draw.choice([1, 1, 2, 4, 8]), draw.choice([1, 1, 2, 4]), draw.choice([1, 1, 1, 2])
    dp, micro, vpp = draw.choice([1, 2, 4, 8]), draw.choice([1, 1, 2, 4]), draw.choice([1, 1, 2])
    gpus = tp * pp * cp * dp
    workload = draw.choice(WORKLOADS)
    model: dict[str, object] = {"model.num_layers": pp * vpp * draw.randint(1, 3)}
    if workload == "deepseek-v3":
        model["model.moe.first_k_dense"] = 0
        model["model.num_mtp_layers"] = draw.choice([0, 1])
    strategy: dict[str, Any] = {
        "tp": tp, "pp": pp, "cp": cp, "micro_batch": micro, "sp": draw.random() < 0.5 and tp > 1,
        "recompute": draw.choice(["none", "selective", "full", "full:1"]),
        "zero": draw.choice([0, 1, 1]),
    }  # fmt: skip
    if pp > 1 and vpp > 1:
        strategy |= {"vpp": vpp, "schedule": "interleaved"}
    if workload != "llama3-8b":
        strategy["ep"] = draw.choice([e for e in (1, 2, 4, 8) if tp * cp * dp % e == 0])
    return {
        "workload": workload, "overrides": model, "seq_len": cp * tp * draw.choice([128, 256, 1024, 4096]),
        "global_batch": dp * micro * draw.choice([1, 2, pp, 4 * pp]), "node": node,
        "gpus": gpus, "strategy": strategy, "framework": draw.choice(FRAMEWORKS),
        "extreme": drawn_extremes(draw) if draw.random() < 0.4 else {},
    }  # fmt: skip


def drawn_extremes(draw: random.Random) -> dict[str, dict[str, object]]:
    """One to three facts of the machines and the framework far from what they are, by root and path."""
    roots = [draw.choice(["hardware.", "hardware.", "framework."]) for _ in range(draw.choice([1, 1, 2, 3]))]
    settings = [drawn_setting(draw, root) for root in roots]
    return parse_set_options([f"{path}={value or 0}" for path, value in settings])


def plan_of(job: dict[str, Any], *, hardware: dict[str, object] | None = None, replay: bool = False) -> Plan:
    """The plan of a job, on its machines or changed ones."""
    workload = load_workload(
        job["workload"], seq_len=job["seq_len"], global_batch=job["global_batch"], overrides=job["overrides"]
    )
    extreme = job["extreme"]
    cluster = load_cluster(job["node"], job["gpus"], {**extreme.get("hardware", {}), **(hardware or {})})
    framework = load_framework(job["framework"], extreme.get("framework", {}))
    return mofa.estimate(workload, cluster, job["strategy"], framework=framework, replay=replay)


def check_job(job: dict[str, Any], draw: random.Random) -> None:
    """Estimate a job, and hold what must hold of it against it."""
    plan = plan_of(job)
    check_plan(plan)
    if job["extreme"]:
        return
    if draw.random() < 0.3:
        check_plan(plan_of(job, replay=True))
    if draw.random() < 0.5:
        check_monotone(job, plan, draw)
    if draw.random() < 0.3:
        check_searched(job, plan)


def check_plan(plan: Plan) -> None:
    """Sums, signs and finite numbers."""
    numbers = {"step_s": plan.step_s, "tokens": plan.tokens_per_s_per_gpu}
    numbers.update((str(name), value) for name, value in plan.time.exposed.items())
    for name, value in numbers.items():
        expect(math.isfinite(value) and value >= 0.0, f"{name} is {value}")
    expect(plan.step_s > 0.0, f"step is {plan.step_s}")
    total = math.fsum(plan.time.exposed.values())
    expect(math.isclose(total, plan.step_s, rel_tol=1e-6), f"exposed parts sum to {total}, step is {plan.step_s}")
    memory = plan.memory
    parts = math.fsum(memory.by_component.values())
    expect(math.isclose(parts, memory.device_bytes, rel_tol=1e-6), f"bytes sum to {parts}, not {memory.device_bytes}")
    expect(all(value >= -1.0 for value in memory.by_component.values()), f"bytes below 0: {memory.by_component}")
    expect(0.0 <= plan.mfu <= 1.0, f"mfu is {plan.mfu}")


BETTER: tuple[dict[str, object], ...] = (
    {"gpu.memory_bandwidth_bytes_per_s": 2.0}, {"gpu.peak_flops_per_s.bf16": 2.0},
    {"node.intra.bandwidth_bytes_per_s": 2.0}, {"node.nic.bandwidth_bytes_per_s": 2.0},
)  # fmt: skip


def check_monotone(job: dict[str, Any], plan: Plan, draw: random.Random) -> None:
    """Hardware that is twice as fast in one fact is no slower, but for 1 %: more kernels are host-bound."""
    fact, times = next(iter(draw.choice(BETTER).items()))
    value: Any = load_cluster(job["node"], job["gpus"])
    for key in fact.split("."):
        value = value[key] if isinstance(value, dict) else getattr(value, key)
    unit = "FLOP/s" if "flops" in fact else "B/s"
    faster = plan_of(job, hardware={fact: f"{value.value * float(str(times))} {unit}"})
    expect(faster.step_s <= plan.step_s * 1.01, f"{fact} twice as fast: {faster.step_s} s, before {plan.step_s} s")


def check_searched(job: dict[str, Any], plan: Plan) -> None:
    """A search of the one strategy that an estimate takes finds it, with the same step."""
    workload = load_workload(
        job["workload"], seq_len=job["seq_len"], global_batch=job["global_batch"], overrides=job["overrides"]
    )
    fixed = {
        name: getattr(plan.strategy, name)
        for name in ("tp", "sp", "pp", "vpp", "cp", "cp_kind", "ep", "etp", "micro_batch", "zero", "recompute")
    }
    fixed["schedule"] = plan.strategy.schedule
    report = mofa.find_plans(
        workload,
        load_cluster(job["node"], job["gpus"]),
        framework=load_framework(job["framework"]),
        fix=fixed,
        top=50,
        replay=False,
    ).report
    if not plan.memory.fits:
        same = [p for p in report.plans if p.strategy == plan.strategy]
        expect(not same, "a search keeps what an estimate says does not fit")
        return
    same = [p for p in report.plans if p.strategy.layout == plan.strategy.layout and p.strategy == plan.strategy]
    expect(bool(same), f"a search does not find what an estimate says fits: {plan.strategy}")
    expect(math.isclose(same[0].step_s, plan.step_s, rel_tol=1e-9), f"{same[0].step_s} s searched, {plan.step_s} s")


def fuzz_jobs(findings: Findings, draw: random.Random, scratch: Path, *, inputs: int, until: float) -> None:
    """Estimate so many random jobs, or until the clock says so; illegal ones are refused in words."""
    for _ in range(inputs):
        if time.monotonic() > until:
            return
        try:
            job, seed = drawn_job(draw), draw.random()
        except MofaError:  # an extreme value that is none at all
            continue
        kind = "job with extremes" if job["extreme"] else "job"
        judge(findings, kind, repr(job).encode(), lambda job=job, seed=seed: check_job(job, random.Random(seed)))  # type: ignore[misc]


__all__ = ["BrokenInvariant", "MofaError", "StrategyError", "check_job", "check_plan", "drawn_job", "fuzz_jobs"]
