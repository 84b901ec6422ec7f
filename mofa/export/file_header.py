"""The head of an exported file: what was predicted, by which version, from which facts."""

from __future__ import annotations

import textwrap
from importlib.metadata import PackageNotFoundError, version

from mofa.export.job import ExportJob
from mofa.units import GIB

WIDTH = 118
"""Of a line of comment. [characters]"""


def header_lines(job: ExportJob, runs_in: str) -> list[str]:
    """What a file's head says, a sentence or more a line, without signs of a comment.

    Parameters
    ----------
    job
        The plan with its job.
    runs_in
        The program and version that the file is for.
    """
    plan, memory, batch = job.plan, job.plan.memory, job.workload.batch
    framework, cluster = job.framework, job.cluster
    band = "" if plan.step_s_band is None else " (8 in 10 such steps in {:.4g} to {:.4g} s)".format(*plan.step_s_band)
    shares = ", ".join(f"{kind} {share:.1%}" for kind, share in plan.provenance.items() if share >= 5e-4)
    strategy = " ".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in plan.strategy.model_dump(exclude={"framework"}).items()
        if value not in ("", None)
    )
    speed = f"{plan.tokens_per_s_per_gpu:,.1f} tokens/s/GPU, {plan.mfu:.1%} MFU"
    sizes = (("allocated", memory.allocated_bytes), ("reserved", memory.reserved_bytes),
             ("on the device", memory.device_bytes))  # fmt: skip
    filled = ", ".join(f"{size / GIB:.2f} GiB {name}" for name, size in sizes)
    facts = f"framework {framework.name} {framework.version} ({framework.provenance}: {framework.source})"
    routing = job.workload.routing
    lines = [
        f"Written by mofa {_version()} for {runs_in}.",
        f"Job: {job.workload.name}, {batch.global_batch:,} x {batch.seq_len:,} tokens a step, {routing} routing.",
        f"Machines: {job.num_gpus:,} x {cluster.gpu} ({cluster.name}), {job.gpus_per_node} a node.",
        f"Strategy: {strategy}.",
        *([f"Layout of the pipeline: {job.layout.text} (by {job.layout.by})."] if job.layout is not None else []),
        f"Predicted by {plan.costed_by.replace('_', ' ')}: step {plan.step_s:.6g} s{band}, {speed}.",
        f"Predicted memory of the fullest GPU: {filled}, of {memory.capacity_bytes / GIB:.2f} GiB.",
        f"The step rests on facts that are: {shares}.",
        f"Profiles: GPU {cluster.gpu} (capacity {cluster.capacity_provenance}), node type {cluster.name}, {facts}.",
        *([f"Kernels of PyTorch {framework.pytorch}."] if framework.pytorch else []),
        *plan.notes,
    ]
    return [piece for line in lines for piece in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]


def _version() -> str:
    try:
        return version("mofa")
    except PackageNotFoundError:
        return "(not installed)"


def as_comment(lines: list[str]) -> str:
    """Lines as comments of a shell, of TOML or of Python.

    >>> as_comment(["a", "b"])
    '# a\\n# b\\n'
    """
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)
