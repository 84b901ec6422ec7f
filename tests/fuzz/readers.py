"""Every kind of file and option that users write: a sound example of each, how it is mutated, and what reads it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import yaml

from mofa.calibrate.fits.nccl_tests import read_nccl_tests_output
from mofa.calibrate.measurements import read_environment, read_rows_of_file
from mofa.export.entry import load_result_json
from mofa.export.read_job import read_job
from mofa.faults.failures.events import read_failure_log
from mofa.plan.comparison import compare_results, read_results, single_result
from mofa.routing.counts import CountedModel, read_counts
from mofa.routing.placement_file import read_placement
from mofa.specs.load import load_cluster, load_faults, load_framework, load_workload, parse_set_options, parse_strategy
from mofa.specs.run_files import load_runs, resolve_run
from mofa.specs.sweep_lists import load_sweep
from mofa.validate.attribute import read_profile
from mofa.validate.hosts import read_machine_hosts
from mofa.validate.reference import reference_of_file
from tests.committed import read_yaml
from tests.fuzz.invariants import expect
from tests.fuzz.mutations import HOSTILE, mutated, mutated_bytes, mutated_lines, mutated_yaml, truths_for_numbers
from tests.fuzz.number_paths import drawn_setting, number_paths

ROOT = Path(__file__).resolve().parents[2]
Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


@dataclass(frozen=True)
class Kind:
    """A kind of input."""

    name: str
    file: str
    """Name of the file that it is written to, below the scratch folder."""
    example: Any
    """Nested facts, or text."""
    read: Callable[[Path], Any]
    separator: str | None = None
    """Between the cells of a line."""
    beside: tuple[tuple[str, str], ...] = ()
    """Other files and their texts, that it needs."""
    heavy: bool = False
    """Whether reading takes so long that it is drawn less often."""


def written(draw: random.Random, kind: Kind) -> bytes:
    """A mutated input as bytes."""
    example = kind.example
    if isinstance(example, str):
        text = mutated_lines(draw, example, kind.separator) if draw.random() < 0.85 else example
    else:
        facts = mutated(draw, example) if draw.random() < 0.9 else example
        text = _as_text(facts, kind.file)
        if kind.file.endswith(".yaml") and draw.random() < 0.15:
            text = mutated_yaml(draw, text)
    data = text.encode("utf-8", errors="surrogatepass")
    return mutated_bytes(draw, data) if draw.random() < 0.1 else data


def _as_text(facts: Any, file: str) -> str:
    try:
        if file.endswith(".json"):
            return json.dumps(facts, default=str)
        return str(yaml.dump(facts, Dumper=Dumper, sort_keys=False, allow_unicode=True))
    except (ValueError, yaml.YAMLError, TypeError):  # what Python does not write out is written as text
        return repr(facts) if not isinstance(facts, int) else "9" * 500


def _facts(path: str) -> Any:
    return read_yaml(ROOT / path)


def _resolved(path: Path) -> None:
    for run in load_runs(path)[:2]:
        resolve_run(run, path.parent)


def _events(path: Path) -> None:
    read_failure_log(path).statistics(100, None)


SWEEP = {
    "models": ["llama3-8b"], "clusters": ["h100-hgx"], "gpus": [8, 16], "global_batch": ["16", "1M tokens"],
    "seq_len": [512], "tokens": ["1T"], "faults": ["llama3"], "prices": [2.5], "storage": "2 TB/s, 4 TB/s",
    "search": {"fast": True, "refine_seconds": 0.0, "fix": {"tp": 2}, "max": {"pp": 1}},
}  # fmt: skip
NCCL = {
    "args": ["all_reduce_perf"], "config": {"nthreads": 1, "ngpus": 2, "devices": [
        {"hostname": "h", "device_info": "NVIDIA H100"}]},
    "results": [{"size": 1 << n, "out_of_place": {"time": 5.0 + n}, "in_place": {"time": 5.0}} for n in range(20, 26)],
    "out_of_bounds": {"count": 0},
}  # fmt: skip
TRACE = {
    "deviceProperties": [{"name": "NVIDIA H100"}], "distributedInfo": {"world_size": 2},
    "traceEvents": [{"cat": "kernel", "name": f"gemm{i}", "ts": 10.0 * i, "dur": 5.0, "tid": 7} for i in range(5)],
}  # fmt: skip
TOML = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
global_batch_size = 16
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
[job]
dump_folder = "x"
"""
MEGATRON = """#!/bin/bash
GPUS_PER_NODE=8
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes 2 pretrain_gpt.py \\
  --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 \\
  --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 \\
  --micro-batch-size 1 --global-batch-size 64 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \\
  --swiglu --normalization RMSNorm --position-embedding-type rope --bf16 --use-distributed-optimizer \\
  --untie-embeddings-and-output-weights --disable-bias-linear --vocab-size 128256 --sequence-parallel \\
  --attention-backend fused --transformer-impl transformer_engine
"""
NCCL_TEXT = """# nThread 1 nGpus 2 minBytes 1024 maxBytes 4096 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
# Using devices
#  Rank  0 Group  0 Pid 1 on node0 device  0 [0x1b] NVIDIA H100
#  Rank  1 Group  0 Pid 1 on node0 device  1 [0x1c] NVIDIA H100
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
        1024           256     float     sum      -1    10.00    0.10    0.10      0    10.00    0.10    0.10      0
        2048           512     float     sum      -1    11.00    0.10    0.10      0    10.00    0.10    0.10      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 0.1
# all_reduce_perf
"""


@lru_cache(maxsize=1)
def kinds() -> tuple[Kind, ...]:
    """All kinds, with examples that are read without an error."""
    gpu, node = _facts("hardware_profiles/gpus/h100-sxm.yaml"), _facts("hardware_profiles/nodes/h100-hgx.yaml")
    gpu_text = (ROOT / "hardware_profiles/gpus/h100-sxm.yaml").read_text()
    node_text = (ROOT / "hardware_profiles/nodes/h100-hgx.yaml").read_text()
    run = {
        "id": "r", "model": "llama3-8b", "framework": {"name": "megatron"}, "hardware": "h100-hgx", "gpus": 8,
        "strategy": {"tp": 2, "recompute": "full:2"}, "batch": {"seq_len": 4096, "micro": 1, "global": 16},
        "precision": {"gemm": "fp8-delayed"}, "routing": {"kind": "balanced"},
    }  # fmt: skip
    record = next(iter(sorted((ROOT / "reference_runs/measured").glob("h100-mc1-ernie-3l*skewed.yaml"))))
    config = (
        json.loads((ROOT / "tests/specs/configs/qwen3-30b-a3b.json").read_text())
        if (ROOT / "tests/specs/configs/qwen3-30b-a3b.json").is_file()
        else json.loads(sorted((ROOT / "tests/specs/configs").glob("*.json"))[0].read_text())
    )
    counts = "iteration,layer,expert,tokens\n" + "".join(
        f"{i},{layer},{e},{10 * e + 1}\n" for i in range(2) for layer in range(2) for e in range(4)
    )
    csv = (ROOT / "measurements/h200-1gpu-second/gemm.csv").read_text().splitlines(keepends=True)
    host = ROOT / "reference_runs/hosts.yaml"
    made = [
        *(Kind(f"workload {name}", "w.yaml", _facts(f"workloads/{name}.yaml"), load_workload)
          for name in ("llama3-8b", "deepseek-v3", "mixtral-8x7b")),
        Kind("gpu", "gpus/h100-sxm.yaml", gpu, lambda p: load_cluster(p.parent.parent / "nodes/n.yaml", 8),
             beside=(("nodes/n.yaml", node_text),), heavy=True),
        Kind("node", "nodes/n.yaml", node, lambda p: load_cluster(p, 16),
             beside=(("gpus/h100-sxm.yaml", gpu_text),), heavy=True),
        *(Kind(f"framework {name}", "f.yaml", {**_facts(f"framework_profiles/{name}.yaml")}, _framework)
          for name in ("megatron", "torchtitan")),
        *(Kind(f"faults {name}", "faults.yaml", _facts(f"fault_profiles/{name}.yaml"), load_faults)
          for name in ("llama3", "rsc-1")),
        Kind("run", "run.yaml", run, _resolved),
        Kind("runs", "runs.yaml", {"runs": [run, {**run, "id": "s"}]}, _resolved),
        Kind("sweep", "sweep.yaml", SWEEP, load_sweep),
        Kind("record", "measured/rec.yaml", read_yaml(record), _record, heavy=True),
        Kind("nccl json", "all_reduce_perf.json", NCCL, read_nccl_tests_output),
        Kind("nccl text", "all_reduce_perf.txt", NCCL_TEXT, read_nccl_tests_output),
        Kind("trace", "trace.json", TRACE, read_profile),
        Kind("kernels", "kernels.json", {"kernels_us": [[0, "gemm", 1.0, 2.0], [0, "x", 5.0, 2.0]]}, read_profile),
        Kind("counts", "counts.csv", counts, lambda p: read_counts(p, CountedModel("m", 4)), separator=","),
        Kind("placement", "placement.csv", "expert,gpu\n0,0\n1,1\n2,0\n3,1\n",
             lambda p: read_placement(p, 4, 2, 2), separator=","),
        Kind("events", "log.csv", "node,time,kind,until\n" + "".join(
            f"n{i % 3},2025-01-{i + 1:02d}T00:00:00,gpu,\n" for i in range(25)), _events, separator=","),
        Kind("calibration", "gemm.csv", "".join(csv[:6]), read_rows_of_file, separator=","),
        Kind("environment", "environment.json", {"gpu": "NVIDIA H200"}, lambda p: read_environment(p.parent)),
        Kind("plan json", "plan.json", _plan(), load_result_json, heavy=True),
        Kind("compared json", "compared.json", _plan(), _compared, heavy=True),
        Kind("hugging face", "config.json", config, partial(load_workload, seq_len=4096, global_batch=16)),
        Kind("torchtitan", "job.toml", TOML, lambda p: read_job("torchtitan", p, 8)),
        Kind("megatron", "job.sh", MEGATRON, lambda p: read_job("megatron", p)),
    ]  # fmt: skip
    if host.is_file():
        made.append(Kind("hosts", "hosts.yaml", read_yaml(host),
                         lambda p: read_machine_hosts(p.parent / "measured"), heavy=True))  # fmt: skip
    return tuple(made)


def _compared(path: Path) -> None:
    """A result beside a sound one and itself."""
    sound = single_result(_plan())
    for i, result in enumerate(read_results(path)):
        compare_results({"sound": sound, f"{i}": result, f"{i} again": result})


def _framework(path: Path) -> None:
    from mofa.specs.files import load_yaml

    load_framework(load_yaml(path))


def _record(path: Path) -> None:
    reference_of_file(path, path.parent)


def _plan() -> Any:
    import mofa
    from mofa.cli.commands.estimate import estimate_of_request
    from mofa.cli.jobs import EstimateRequest

    job, machines = load_workload("llama3-8b"), load_cluster("h100-hgx", 8)
    request = EstimateRequest(None, job, machines, mofa.StrategySpec(tp=2, dp=4), load_framework("megatron"),
                              frozenset())  # fmt: skip
    return json.loads(estimate_of_request(request, "causal", None, False, 1, False).model_dump_json())


# --- options
PATHS = (
    "workload.tokens", "workload.name", "workload.model.num_layers", "workload.model.hidden",
    "workload.model.attention.num_heads", "workload.model.moe.num_experts", "workload.batch.seq_len",
    "workload.routing.kind", "workload.model", "hardware.gpu.memory_bytes", "hardware.gpu.num_sms",
    "hardware.gpu.peak_flops_per_s.bf16", "hardware.gpu.curves.host.eager_op_s", "hardware.node.intra.latency_s",
    "hardware.node.gpus_per_domain", "hardware.gpu.memory_bandwidth_bytes_per_s", "hardware.node", "framework.compile",
    "framework.dispatch_syncs", "framework.vocab_divisor", "framework.grads", "strategy.tp", "strategy.layout",
    "strategy.recompute", "x.y", "workload.", "workload..x",
)  # fmt: skip
STRATEGY = "tp=4 sp=true pp=2 vpp=2 cp=1 ep=1 etp=1 micro_batch=1 zero=1 recompute=selective:mlp+moe_act layout=Et|t|tL"


def read_option(draw: random.Random) -> Iterator[tuple[str, Callable[[], Any]]]:
    """One drawn option: its text, and what reads it."""
    kind = draw.random()
    if kind < 0.4:
        text = "=".join(drawn_setting(draw))
        yield text, lambda: _apply(text)
    elif kind < 0.7:
        value = str(_short(draw)) if draw.random() < 0.8 else f"!!bool {draw.randint(0, 9)}"
        text = f"{draw.choice(PATHS)}={value}"
        yield text, lambda: _apply(text)
    else:
        text = mutated_lines(draw, STRATEGY)
        yield text, lambda: parse_strategy(text)


def _short(draw: random.Random) -> object:
    value = draw.choice(HOSTILE)
    try:
        str(value)
    except ValueError:
        return "9" * 400
    return value


def _apply(text: str) -> None:
    overrides = parse_set_options([text])
    if overrides["workload"]:
        load_workload("mixtral-8x7b", overrides=overrides["workload"])
    if overrides["hardware"]:
        load_cluster("h100-hgx", 8, overrides["hardware"])
    if overrides["framework"]:
        load_framework("megatron", overrides["framework"])
    path, _, value = text.partition("=")
    truth = value.strip() in ("true", "false", "yes")
    expect(not (truth and path in number_paths()), f"{path.rpartition('.')[2]} takes {value} for a number")


UNCHECKED = frozenset(("facts", "in_place", "job", "fix", "world_size", "traceEvents"))
"""What is not read, or checked where it is used."""
COMPARED = frozenset(("step_s", "tokens_per_s_per_gpu", "mfu", "usd", "exposed", "by_component"))
"""Of results that are compared, what is reckoned with; the rest is shown as it stands."""


def read_and_check(kind: Kind, path: Path) -> None:
    """Read a file, and hold against what is taken that true and false stand for no number."""
    kind.read(path)
    if not isinstance(kind.example, str) and path.suffix in (".yaml", ".json"):
        after = json.loads(path.read_bytes()) if path.suffix == ".json" else read_yaml(path)
        wrong = [place for place in truths_for_numbers(kind.example, after) if not UNCHECKED.intersection(place)]
        if kind.name.startswith("compared"):
            wrong = [place for place in wrong if COMPARED.intersection(place)]
        expect(not wrong, f"takes true or false for a number at {wrong[:1]}")
