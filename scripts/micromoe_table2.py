"""Gains of scheduled replicas on the five models of MicroMoE's table 2, as docs/moe.md has them.

The paper trained on real text and prints neither the loads nor the gain of each model, only their average and the best:
the gains here are those of Zipf loads, each layer with popular experts of its own, which stay while its tokens are
drawn anew for every micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import mofa
from mofa.routing.balance.setup import BalanceSetup
from mofa.search.experts.balanced_step import balance_report_with_step, scheduled_replica_setup
from mofa.specs.load import spec_from_mapping
from mofa.specs.routing import RoutingSpec
from mofa.specs.workload import WorkloadSpec

SKEWS = (0.5, 0.75, 0.9, 1.0)
PAPER_AVERAGE, PAPER_BEST = 0.369, 0.476


@dataclass(frozen=True)
class Model:
    """A row of the table; ``micro_batch`` and ``global_batch`` in sequences."""

    name: str
    layers: int
    heads: int
    hidden: int
    ffn_hidden: int
    seq_len: int
    experts: int
    micro_batch: int
    global_batch: int
    gpus: int
    pp: int
    gated: bool


MODELS = (
    Model("GPT 32x1.3B", 24, 16, 2048, 8192, 2048, 32, 4, 512, 16, 2, False),
    Model("GPT 16x3.2B", 16, 32, 4096, 16384, 2048, 16, 2, 512, 16, 2, False),
    Model("GPT 8x6.7B", 32, 32, 4096, 16384, 2048, 8, 2, 512, 32, 4, False),
    Model("Mixtral 16x2B", 32, 32, 2048, 8192, 4096, 16, 2, 256, 16, 2, True),
    Model("Mixtral 8x7B", 32, 32, 4096, 14336, 4096, 8, 1, 256, 32, 4, True),
)
"""MicroMoE, arXiv 2511.16947, table 2; ep 4 and top 2 throughout."""


def workload(model: Model, skew: float) -> WorkloadSpec:
    """The training job; what the table leaves out as in GPT-3 and Mixtral."""
    gated = model.gated
    attention = {
        "kind": "gqa", "num_heads": model.heads, "num_kv_heads": 8 if gated else model.heads,
        "head_dim": model.hidden // model.heads, "qkv_bias": not gated, "out_bias": not gated,
    }  # fmt: skip
    extra = {} if gated else {"norm": "layernorm", "positions": "learned", "max_positions": model.seq_len}
    raw = {
        "name": model.name,
        "source": "MicroMoE, arXiv 2511.16947, table 2",
        "model": {
            "name": model.name, "source": "MicroMoE, arXiv 2511.16947, table 2", "num_layers": model.layers,
            "hidden": model.hidden, "vocab": 32000 if gated else 50257, "attention": attention,
            "mlp": {"activation": "swiglu" if gated else "gelu"},
            "moe": {"num_experts": model.experts, "top_k": 2, "expert_hidden": model.ffn_hidden}, **extra,
        },
        "batch": {"seq_len": model.seq_len, "global_batch": model.global_batch},
        "routing": RoutingSpec(kind="zipf", s=skew).model_dump(exclude_none=True),
    }  # fmt: skip
    return spec_from_mapping(WorkloadSpec, raw, "table 2")


@dataclass(frozen=True)
class Gain:
    """Throughput gained over plain expert parallelism: scheduled on symmetric and adaptive placements, were routing
    balanced. [-]"""

    symmetric: float
    adaptive: float
    balanced: float


def gain(model: Model, skew: float, micro_batches: int | None = None) -> Gain:
    """What a model gains under loads of a skew, in the mean of so many drawn micro-batches; twenty where absent."""
    cluster, framework = mofa.load_cluster("h100-hgx", model.gpus), mofa.load_framework("megatron")
    strategy = f"pp={model.pp} ep=4 micro_batch={model.micro_batch} recompute=selective:moe_act"
    job = workload(model, skew)
    setup = BalanceSetup(*scheduled_replica_setup(job, cluster, framework, strategy))
    step = balance_report_with_step(
        job, cluster, strategy, setup, framework=framework, micro_batches=micro_batches
    ).step
    assert step is not None
    return Gain(step.gain_fraction, step.before_s / step.adaptive_s - 1, step.before_s / step.balanced_s - 1)


def main() -> None:
    """Print the table as Markdown: symmetric / adaptive of balanced."""
    print("| model | " + " | ".join(f"s = {s:g}" for s in SKEWS) + " |")
    print("|---" * (len(SKEWS) + 1) + "|")
    every = []
    for model in MODELS:
        found = [gain(model, s) for s in SKEWS]
        every.append([(g.symmetric, g.adaptive, g.balanced) for g in found])
        print(f"| {model.name} | " + " | ".join(_cell(*row) for row in every[-1]) + " |")
    for name, row in (("average", np.mean(every, axis=0)), ("best", np.max(every, axis=0))):
        print(f"| {name} | " + " | ".join(_cell(*x) for x in row) + " |")
    print(f"\nThe paper: {PAPER_AVERAGE:+.1%} on average, {PAPER_BEST:+.1%} at best.")


def _cell(symmetric: float, adaptive: float, balanced: float) -> str:
    return f"{symmetric:+.1%} / {adaptive:+.1%} of {balanced:+.1%}"


if __name__ == "__main__":
    main()
