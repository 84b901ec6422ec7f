"""A plan of runs that nobody chose: every field drawn at random, written as YAML for `mofa measure`.

python scripts/draw_runs.py --seed 1 --num 12 --gpus 2 --gpu h200-hgx > reference_runs/plans/drawn.yaml

Models are the bundled ones, cut in depth so that the optimizer's states fit. A draw that its framework refuses, that
takes too much memory by the replay, or whose step takes too long is drawn again; how often and why is told at the end.
What `mofa measure` cannot tell its framework to run is left out of the plan.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from typing import Any

import yaml

import mofa
from mofa.errors import MofaError
from mofa.measure.expand import expand_run
from mofa.measure.runs import task_of_run
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.run import RunSpec
from mofa.specs.run_files import resolve_run

MODELS = (
    "llama3-8b", "llama3-70b", "qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3",
    "gpt-oss-120b", "gpt3-175b",
)  # fmt: skip
MOST_BYTES, MOST_STEP_S = 66 * 2**30, 3.0
"""What a run may take, of either GPU's 79 GiB or more; and how long a step of it. [B, s]"""
FRAMEWORKS = ("megatron", "megatron", "torchtitan")
"""What is named twice is drawn twice as often: the default framework, and below bf16 and no recomputation."""
RECIPES = ("bf16", "bf16", "fp8-delayed", "fp8-tensorwise", "fp8-blockwise")
RECOMPUTE = ("none", "none", "full", "full:2", "selective", "selective:moe_act", "selective:layernorm", "selective:mlp",
             "selective:moe", "every:2")  # fmt: skip


def drawn_run(draw: random.Random, name: str, gpus: int, gpu: str) -> dict[str, Any]:
    """One run, legal or not, whose identifier begins with ``name``."""
    model_name = draw.choice(MODELS)
    model = mofa.load_workload(model_name).model.model_dump(mode="json", exclude_none=True)
    model["num_layers"] = draw.choice((2, 3, 4, 6, 8, 12))
    model["name"] = f"{model_name}-{model['num_layers']}l"
    framework: dict[str, Any] = {"name": draw.choice(FRAMEWORKS)}
    degrees = dict.fromkeys(("tp", "pp", "cp", "ep"), 1)
    for degree in draw.sample(sorted(degrees), draw.randint(0, 2)):
        degrees[degree] = gpus
    strategy: dict[str, Any] = {name: size for name, size in degrees.items() if size > 1}
    strategy["recompute"] = draw.choice(RECOMPUTE)
    if degrees["tp"] > 1 and framework["name"] == "megatron":
        strategy["sp"] = draw.random() < 0.7 or degrees["ep"] > 1
    if degrees["pp"] > 1:
        strategy["vpp"] = draw.choice((1, 1, 2))
        strategy["schedule"] = draw.choice(("1f1b", "gpipe", "zbv")) if strategy["vpp"] == 1 else "interleaved"
    if degrees["cp"] > 1:
        strategy["cp_kind"] = draw.choice(("ring", "allgather", "a2a"))
    micro, micro_batches = draw.choice((1, 1, 2, 4)), draw.choice((1, 2, 4, 8))
    ranks = gpus // max(degrees["tp"] * degrees["pp"] * degrees["cp"], 1)
    global_batch = micro * micro_batches * ranks
    run: dict[str, Any] = {
        "id": f"{name}-{model_name}", "model": model, "framework": framework, "hardware": gpu, "gpus": gpus,
        "strategy": strategy,
        "batch": {"seq_len": draw.choice((1024, 2048, 4096, 8192)), "micro": micro, "global": global_batch},
    }  # fmt: skip
    if framework["name"] == "megatron" and (recipe := draw.choice(RECIPES)) != "bf16":
        run["precision"] = {"gemm": recipe}
    if model.get("moe") and draw.random() < 0.3:
        run["routing"] = {"kind": "zipf", "s": 0.3}
    return run


def fault_of(run: dict[str, Any]) -> str | None:
    """Why a run is not taken, None where it is."""
    try:
        workload, cluster, framework, strategy = resolve_run(spec_from_mapping(RunSpec, run, "draw", ""))
        for replay in (False, True):  # most are known to be too large without one
            plan = mofa.estimate(workload, cluster, strategy, framework=framework, replay=replay)
            if plan.memory.device_bytes > MOST_BYTES:
                return "too large"
            if plan.step_s > MOST_STEP_S:
                return "too long a step"
    except MofaError as error:
        return str(error).split(";")[0][:90]
    return None


def can_be_measured(run: dict[str, Any]) -> bool:
    """Whether `mofa measure` can tell its framework to run it."""
    try:
        task_of_run(expand_run(spec_from_mapping(RunSpec, run, "draw", "")), timeout_s=10.0)
    except MofaError:
        return False
    return True


def main() -> None:
    """Draw until there are enough, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num", type=int, default=12)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--gpu", default="h200-hgx")
    parser.add_argument("--name", help="what identifiers begin with; drawn2 for two GPUs")
    options = parser.parse_args()
    name = options.name or f"drawn{options.gpus}"
    draw, refused = random.Random(options.seed), Counter[str]()
    runs: list[dict[str, Any]] = []
    while len(runs) < options.num:
        run = drawn_run(draw, f"{name}-{len(runs):02d}", options.gpus, options.gpu)
        fault = fault_of(run)
        if fault is None:
            runs.append(run)
        else:
            refused[fault] += 1
    made_by = (
        f"python scripts/draw_runs.py --seed {options.seed} --num {options.num} --gpus {options.gpus} --name {name}"
    )
    print(f"# {made_by}")
    told = [run for run in runs if can_be_measured(run)]  # a number is missing for each that cannot
    print(yaml.safe_dump({"runs": told}, sort_keys=False, allow_unicode=True, width=116), end="")
    for reason, times in refused.most_common():
        print(f"{times} times: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
