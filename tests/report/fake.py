"""Results built by hand: a made-up job whose numbers are chosen so that the sums can be checked by eye."""

from __future__ import annotations

from typing import Any

import pandas as pd

from mofa.plan.memory import Memory, StageMemory
from mofa.plan.result import Estimate, NearestMiss, Plan, PlanReport
from mofa.plan.step_parts import TIME_COMPONENTS, Time
from mofa.plan.summaries import ClusterSummary, FrameworkSummary, WorkloadSummary
from mofa.specs.strategy import StrategySpec
from mofa.units import GIB

NUM_GPUS = 64
SEQ_LEN, GLOBAL_BATCH = 4096, 256
CAPACITY_BYTES = 79.1 * GIB

WORKLOAD = WorkloadSummary(
    name="toy-moe",
    num_params=100_000_000_000,
    num_active_params=10_000_000_000,
    num_mtp_params=0,
    num_layers=32,
    seq_len=SEQ_LEN,
    global_batch=GLOBAL_BATCH,
    tokens=1e12,
    gemm_format="bf16",
    moments_format="fp32",
    routing="balanced",
)
CLUSTER = ClusterSummary(
    name="toy-hgx",
    gpu="toy",
    num_gpus=NUM_GPUS,
    gpus_per_node=8,
    gpus_per_domain=8,
    capacity_bytes=CAPACITY_BYTES,
    capacity_provenance="assumed",
)
FRAMEWORK = FrameworkSummary(
    name="megatron",
    version="core_r0.13",
    compile=False,
    allocator="native",
    dispatcher="alltoall",
    experts="grouped",
    routed_copies="materialised",
    attention="fused",
    data_parallel="distributed-optimizer",
    dp_replicate=1,
    optimizer="te",
    provenance="read",
    source="Megatron-LM, megatron/core",
)


def make_memory(device_gib: float = 60.0, num_stages: int = 4) -> Memory:
    """Parts of 1/2, 1/4, 1/8, 1/16 and 1/16 of the fullest rank; stages that fall by 1 GiB."""
    shares = {
        "activations": 0.5, "optimizer_states": 0.25, "gradients": 0.125, "allocator_slack": 0.0625,
        "cuda_context": 0.0625,
    }  # fmt: skip
    stages = tuple(
        StageMemory(
            stage=i,
            num_layers=8,
            allocated_bytes=0.8 * gib * GIB,
            reserved_bytes=0.9 * gib * GIB,
            device_bytes=gib * GIB,
            instant="loss backward",
            in_flight_micro_batches=float(num_stages - i),
            by_component={name: share * gib * GIB for name, share in shares.items()},
        )
        for i, gib in ((i, device_gib - i) for i in range(num_stages))
    )
    device, margin = device_gib * GIB, 0.03 * CAPACITY_BYTES
    return Memory(
        allocated_bytes=0.8 * device,
        reserved_bytes=0.9 * device,
        device_bytes=device,
        margin_bytes=margin,
        peak_bytes=device,
        capacity_bytes=CAPACITY_BYTES,
        fits=device + margin <= CAPACITY_BYTES,
        by_component={name: share * device for name, share in shares.items()},
        by_stage=stages,
    )


def make_plan(step_s: float = 8.0, device_gib: float = 60.0, **strategy: Any) -> Plan:
    """A plan whose exposed parts are equal."""
    return Plan(
        strategy=StrategySpec(**{"tp": 2, "sp": True, "pp": 4, "ep": 8, "dp": 8, "recompute": "selective", **strategy}),
        step_s=step_s,
        tokens_per_s_per_gpu=SEQ_LEN * GLOBAL_BATCH / step_s / NUM_GPUS,
        tflops_per_gpu=1000 / step_s,
        mfu=1 / step_s,
        hfu=1.2 / step_s,
        days_without_failures=1e12 / (SEQ_LEN * GLOBAL_BATCH) * step_s / 86400,
        memory=make_memory(device_gib),
        time=Time(
            exposed=dict.fromkeys(TIME_COMPONENTS, step_s / len(TIME_COMPONENTS)), hidden={"dp": 0.5, "ep": 0.25}
        ),
        provenance={"assumed": 0.75, "datasheet": 0.25},
        costed_by="closed_form",
        notes=("efficiencies of toy are assumed",),
    )


def make_report(num_plans: int = 3) -> PlanReport:
    """A search that found plans, or with 0 none."""
    plans = tuple(make_plan(8.0 + i, 70.0 - 5 * i, micro_batch=1 + i) for i in range(num_plans))
    return PlanReport(
        workload=WORKLOAD,
        cluster=CLUSTER,
        framework=FRAMEWORK,
        space=1000,
        searched=600,
        rejected={"batch is not divisible": 400, "memory": 600 - num_plans},
        nearest_miss={"memory": NearestMiss(strategy=make_plan().strategy, short_by=3.1 * GIB, unit="B")},
        min_gpus=None if num_plans else 128,
        min_gpus_note=None if num_plans else "over whole nodes",
        elapsed_s=0.25,
        plans=plans,
        defaults={"framework": "megatron", "objective": "tokens/s/GPU"},
    )


def make_estimate(run_id: str | None = None, device_gib: float = 60.0) -> Estimate:
    """One costed strategy."""
    plan = make_plan(device_gib=device_gib)
    fields = {name: getattr(plan, name) for name in Plan.model_fields}
    return Estimate(**fields, id=run_id, workload=WORKLOAD, cluster=CLUSTER, framework=FRAMEWORK)


def make_table(report: PlanReport, num_rows: int = 50) -> pd.DataFrame:
    """Costed strategies, the report's plans first; the last one doesn't fit."""
    rows = [plan.to_row() for plan in report.plans]
    while len(rows) < num_rows:
        i = len(rows)
        rows.append(make_plan(9.0 + i, 20.0 + (i * 7) % 40).to_row())
    rows.append(make_plan(2.0, 100.0).to_row())
    return pd.DataFrame(rows)
