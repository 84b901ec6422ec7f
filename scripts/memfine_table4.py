"""MemFine's table 4 and its differences in throughput, as docs/moe.md has them: printed, by its formulas, and ours.

Active memory and the verdicts come from its own formulas with the rows that the row without chunks implies; static
memory is the table's, with what its equation 1 and what our tapes give for set-ups that Megatron can run beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mofa
from mofa.routing.chunks import memfine_layer_activations, memfine_static_bytes
from mofa.specs.routing import RoutingSpec
from mofa.specs.workload import WorkloadSpec

GB = 1e9
BUDGET_GB = 64.0
"""alpha M of 64 GB GPUs; alpha is not printed. What trains needs 62.4, what does not 65.9."""


@dataclass(frozen=True)
class Row:
    """A row of table 4. [GB]"""

    model: str
    chunks: int
    static: float
    active: float
    whole: float
    trains: bool


TABLE_4 = (
    Row("I", 1, 43.0, 22.9, 65.9, False), Row("I", 8, 43.0, 3.7, 46.7, True), Row("I", 2, 43.0, 11.9, 54.9, True),
    Row("II", 1, 39.5, 22.9, 62.4, True), Row("II", 8, 39.5, 3.7, 43.2, True), Row("II", 2, 39.5, 11.9, 51.4, True),
)  # fmt: skip
"""MemFine, arXiv 2511.21431, table 4; the third method is MACT, of which its text says 2 chunks."""
WORKLOADS = {"I": "memfine-model-1", "II": "memfine-model-2"}
SETUPS = ("ep=32", "pp=4 ep=8")
"""Strategies on 32 GPUs that Megatron runs; the paper's p = 4 with e = 32 needs 128."""
EQUATION_1_BYTES = 2 + 2 + 4 * 4
"""Weights and gradients in bf16, four tensors of the optimizer in fp32: one reading of D_para + D_grad + 4 D_opt."""
FIGURE_5 = {1: 89, 2: 91, 4: 60}
"""Cells of figure 5 with so many chunks."""
ASSUMPTIONS = (
    ("the whole layer is recomputed, chunks one after the other", "full", False),
    ("the whole layer is recomputed, neighbours overlap", "full", True),
    ("the chunks alone are recomputed, one after the other", "none", False),
    ("the chunks alone are recomputed, neighbours overlap", "none", True),
)
PAPER = {"8 chunks": -0.0540, "MACT": 0.0442}


def static_rows() -> Iterator[list[str]]:
    """Static memory: the table's, equation 1's with all layers and with a quarter, ours for each set-up. [GB]"""
    for name, workload in WORKLOADS.items():
        job = mofa.load_workload(workload)
        layers = job.model.num_layers
        ours = []
        for setup in SETUPS:
            plan = mofa.estimate(
                job, mofa.load_cluster("h100-hgx", 32), f"{setup} recompute=full token_chunks=8",
                framework=mofa.load_framework("megatron"), replay=False,
            )  # fmt: skip
            kinds = plan.memory.by_component
            ours.append(sum(kinds[kind] for kind in ("parameters", "gradients", "optimizer_states")) / GB)
        read = [memfine_static_bytes(job.model, n, 32, EQUATION_1_BYTES) / GB for n in (layers, layers // 4)]
        printed = next(row.static for row in TABLE_4 if row.model == name)
        yield [name, *(f"{value:.1f}" for value in (printed, *read, *ours))]


def active_rows() -> Iterator[list[str]]:
    """Active memory by the paper's formulas, the verdict beside the printed one."""
    model = mofa.load_workload(WORKLOADS["I"]).model
    terms = memfine_layer_activations(model, 4096)
    received = (22.9 * GB - terms.fixed_bytes) / terms.bytes_per_row
    for row in TABLE_4:
        active = terms.activation_bytes(received, row.chunks) / GB
        fits = row.static + active <= BUDGET_GB
        yield [row.model, str(row.chunks), f"{row.static:.1f}", f"{row.active:.1f}", f"{active:.2f}",
               f"{active / row.active - 1:+.1%}", f"{row.static + active:.1f}", "trains" if fits else "out of memory",
               "as printed" if fits == row.trains else "NOT as printed"]  # fmt: skip


def step_s(job: WorkloadSpec, recompute: str, chunks: int, *, overlap: bool) -> float:
    """A step of model II; one chunk that is recomputed alone is Megatron's module ``moe``. [s]"""
    machines = mofa.load_cluster("h100-hgx", 32, overrides={"gpu.memory_bytes": "400 GB"})
    if recompute == "none" and chunks == 1:
        recompute = "selective:moe"
    framework = mofa.load_framework({"name": "megatron", "chunk_overlap": overlap})
    strategy = f"ep=32 micro_batch=1 recompute={recompute} token_chunks={chunks}"
    return mofa.estimate(job, machines, strategy, framework=framework, replay=False).step_s


def gains() -> dict[str, dict[str, float]]:
    """Throughput over full recomputation without chunks, per assumption: of fixed chunks, and of figure 5's mix."""
    routing = RoutingSpec.parse("memfine-iteration-7").model_copy(update={"memory_quantile": 1.0})
    job = mofa.load_workload(WORKLOADS["II"]).model_copy(update={"routing": routing})
    whole = step_s(job, "full", 1, overlap=False)
    found = {}
    for words, recompute, overlap in ASSUMPTIONS:
        steps = {chunks: step_s(job, recompute, chunks, overlap=overlap) for chunks in (1, 2, 4, 8)}
        mixed = sum(steps[c] * cells for c, cells in FIGURE_5.items()) / sum(FIGURE_5.values())
        found[words] = {f"{c} chunks": whole / s - 1 for c, s in steps.items()} | {"figure 5's mix": whole / mixed - 1}
    return found


def main() -> None:
    """Print the three tables."""
    print("| model | chunks | static | active, printed | active, here | | all | verdict | |")
    for row in active_rows():
        print("| " + " | ".join(row) + " |")
    print("\n| model | table 4 | equation 1, l = L | equation 1, l = L/4 | " + " | ".join(f"ours, {s}" for s in SETUPS))
    for row in static_rows():
        print("| " + " | ".join(row) + " |")
    print(f"\nprinted: {', '.join(f'{name} {value:+.2%}' for name, value in PAPER.items())}")
    for words, values in gains().items():
        print(f"| {words} | " + " | ".join(f"{name} {value:+.1%}" for name, value in values.items()) + " |")


if __name__ == "__main__":
    main()
