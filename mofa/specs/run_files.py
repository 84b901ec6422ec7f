"""Runs that a file describes: read, and what they name loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from mofa.errors import SpecError, StrategyError
from mofa.specs.files import BundledKind, bundled_names, load_yaml, shown_value
from mofa.specs.framework import FrameworkSpec
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.hardware import ClusterSpec
from mofa.specs.limited_reads import exists
from mofa.specs.load import load_cluster, load_framework, load_workload, with_routing_path
from mofa.specs.model import ModelSpec
from mofa.specs.overrides import with_overrides
from mofa.specs.run import RunSpec
from mofa.specs.strategy import StrategySpec
from mofa.specs.strategy_defaults import complete_strategy
from mofa.specs.workload import WorkloadSpec


def load_runs(path: str | Path) -> tuple[RunSpec, ...]:
    """The runs that a file describes: one run, or a list of them.

    Parameters
    ----------
    path
        A YAML file with a run, or ``{runs: [RUN, ...]}``. A record ``{run: RUN, measured: ...}`` may stand in the place
        of a run, as ``mofa measure`` writes it; what was measured is not read.

    Returns
    -------
    tuple of RunSpec
        The runs in the order of the file; their ids differ.

    Raises
    ------
    SpecError
        If there is no such file, a field is wrong, or two runs have one id.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> text = '''
    ... id: eight-gpus
    ... model: llama3-8b
    ... framework: megatron
    ... hardware: h100-hgx
    ... gpus: 8
    ... strategy: {tp: 2}
    ... batch: {seq_len: 4096, micro: 1, global: 16}
    ... '''
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "run.yaml")
    ...     _ = path.write_text(text)
    ...     [run.id for run in load_runs(path)]
    ['eight-gpus']
    """
    where = shown_value(str(path), 200)
    raw = load_yaml(path, where)
    if "runs" not in raw:
        return (_run(raw, where, ""),)
    listed = raw["runs"]
    if not isinstance(listed, list) or not listed:
        raise SpecError(f"{where}: runs must be a list of at least one run; write '- id: ...' lines below it")
    extra = next((key for key in raw if key != "runs" and not (key == "source" and _is_record(listed[0]))), None)
    if extra is not None:
        raise SpecError(f"{where}: {shown_value(extra)} is no field beside runs; move it into a run")
    runs = tuple(_run(item, where, f"runs[{i}].") for i, item in enumerate(listed))
    seen: dict[str, int] = {}
    for i, run in enumerate(runs):
        if run.id in seen:
            raise SpecError(f"{where}: runs[{i}].id ({run.id}) is also runs[{seen[run.id]}]'s; give each its own")
        seen[run.id] = i
    return runs


def _is_record(raw: object) -> bool:
    """Whether it is a run and what came of it, as mofa measure writes them and published ones are kept."""
    return isinstance(raw, dict) and isinstance(raw.get("run"), dict) and "measured" in raw


def _run(raw: object, where: str, prefix: str) -> RunSpec:
    if isinstance(raw, dict) and _is_record(raw):
        raw, prefix = raw["run"], f"{prefix}run."
    if isinstance(raw, dict) and isinstance(raw.get("framework"), str):
        raw = {**raw, "framework": {"name": raw["framework"]}}
    return spec_from_mapping(RunSpec, raw, where, prefix)


def resolve_run(
    run: RunSpec, base_dir: Path | None = None
) -> tuple[WorkloadSpec, ClusterSpec, FrameworkSpec, StrategySpec]:
    """Everything that a run names, loaded and complete.

    Parameters
    ----------
    run
        The run.
    base_dir
        Folder that relative paths in the run start from, usually the run file's.

    Returns
    -------
    WorkloadSpec, ClusterSpec, FrameworkSpec, StrategySpec
        What :func:`mofa.search.one_plan.estimate` takes. The strategy is complete: dp = gpus / (tp * cp * pp).

    Raises
    ------
    SpecError
        If something that the run names does not exist or is wrong.
    StrategyError
        If its degrees do not divide the GPUs or the batch.

    Examples
    --------
    >>> batch = {"seq_len": 4096, "micro": 1, "global": 16}
    >>> run = RunSpec(
    ...     id="eight-gpus", model="llama3-8b", framework={"name": "megatron"}, hardware="h100-hgx", gpus=8,
    ...     strategy={"tp": 2}, batch=batch,
    ... )
    >>> workload, cluster, framework, strategy = resolve_run(run)
    >>> strategy.tp, strategy.dp, workload.batch.global_batch
    (2, 4, 16)
    """
    where = f"run {run.id}"
    framework = load_framework(run.framework, where=f"{where}: framework")
    model, notes = _run_model(run, base_dir, where)
    workload = WorkloadSpec(
        name=run.id,
        source=where,
        model=model,
        batch=spec_from_mapping(_BATCH, {"seq_len": run.batch.seq_len, "global_batch": run.batch.global_}, where),
        framework=framework.name,
        precision=run.precision,
        optimizer=run.optimizer,
        routing=run.routing,
        notes=notes,
    )
    workload = with_routing_path(workload, base_dir)
    cluster = load_cluster(_relative(run.hardware, base_dir, "nodes"), run.gpus)
    raw = dict(run.strategy)
    if raw.setdefault("micro_batch", run.batch.micro) != run.batch.micro:
        raise SpecError(
            f"{where}: strategy.micro_batch ({shown_value(raw['micro_batch'])}) differs from batch.micro "
            f"({run.batch.micro});"
            " write it in one place"
        )
    strategy = complete_strategy(raw, run.gpus, framework, moe=workload.model.moe is not None, where=where)
    sequences = strategy.dp * strategy.micro_batch
    if run.batch.global_ % sequences:
        raise StrategyError(
            f"{where}: batch.global ({run.batch.global_}) must be a multiple of dp ({strategy.dp}) x micro_batch "
            f"({strategy.micro_batch}) = {sequences}; change one of them"
        )
    return workload, cluster, framework, strategy


_BATCH = cast("Any", WorkloadSpec.model_fields["batch"].annotation)


def _run_model(run: RunSpec, base_dir: Path | None, where: str) -> tuple[ModelSpec, tuple[str, ...] | None]:
    """The model of a run, and what the file that it comes from assumed."""
    if isinstance(run.model, ModelSpec):
        return run.model, None
    if isinstance(run.model, str):
        return _base_model(run.model, base_dir)
    changes = dict(run.model)
    base = changes.pop("base", None)
    if base is None:
        return spec_from_mapping(ModelSpec, changes, where, "model."), None
    if not isinstance(base, str):
        raise SpecError(f"{where}: model.base ({shown_value(base)}) must be text; name a workload")
    model, notes = _base_model(base, base_dir)
    if changes:
        changes = {"name": f"{model.name} (changed)"[:200], **changes}
    return spec_from_mapping(ModelSpec, with_overrides(model.model_dump(), changes, where), where, "model."), notes


def _base_model(ref: str, base_dir: Path | None) -> tuple[ModelSpec, tuple[str, ...] | None]:
    # A run gives its own batch, so that a Hugging Face config needs none here.
    workload = load_workload(_relative(ref, base_dir, "workloads"), seq_len=1, global_batch=1)
    return workload.model, workload.notes


def _relative(ref: str, base_dir: Path | None, kind: BundledKind) -> str | Path:
    if base_dir is None or ref in bundled_names(kind) or not exists(base_dir / ref):
        return ref
    return base_dir / ref
