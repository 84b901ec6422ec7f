"""Export a plan: from a result of mofa, or from its JSON, to the files of a framework's job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from mofa.errors import SpecError
from mofa.export.job import ExportJob
from mofa.plan.comparison import MAX_RESULT_BYTES
from mofa.plan.job_facts import JobFacts
from mofa.plan.result import Estimate, Plan, PlanReport
from mofa.plan.summaries import ClusterSummary
from mofa.specs.files import did_you_mean, shown_value
from mofa.specs.from_mapping import first_truth_for_number
from mofa.specs.limited_reads import parse_json, read_bytes
from mofa.specs.write_files import all_files_or_none, check_writable, make_directory, write_file_atomically

if TYPE_CHECKING:
    from mofa.search.search_result import Search
    from mofa.specs.framework import FrameworkSpec
    from mofa.specs.hardware import ClusterSpec
    from mofa.specs.workload import WorkloadSpec

Target = Literal["megatron", "torchtitan", "torchtitan-0.3", "megatron-bridge"]


@dataclass(frozen=True)
class ExportedJob:
    """The files of an exported job.

    Attributes
    ----------
    files
        Their text by name.
    """

    files: Mapping[str, str]

    def write(self, folder: str | Path) -> tuple[Path, ...]:
        """Write the files to a folder, which is made where it is not there.

        Parameters
        ----------
        folder
            Where to.

        Returns
        -------
        tuple of pathlib.Path
            What was written.

        Raises
        ------
        SpecError
            If the system refuses.
        """
        directory = Path(folder)
        check_writable(directory, directory=True)
        make_directory(directory)
        with all_files_or_none():
            for name, text in self.files.items():
                write_file_atomically(directory / name, text.encode())
        return tuple(directory / name for name in self.files)


def export(
    result: PlanReport | Search | Estimate | Plan,
    *,
    to: str,
    number: int = 1,
    out: str | Path | None = None,
    workload: WorkloadSpec | None = None,
    cluster: ClusterSpec | None = None,
    framework: FrameworkSpec | None = None,
) -> ExportedJob:
    """Write a plan as the files of a job that a framework runs.

    Parameters
    ----------
    result
        What a search or an estimate returned.
    to
        ``megatron`` (arguments of Megatron-LM's pretrain_gpt.py, Megatron-Core 0.16.1, with a Slurm script),
        ``torchtitan`` (TOML of 0.2.2), ``torchtitan-0.3`` (Python config of 0.3.0) or ``megatron-bridge`` (a recipe in
        Python, 0.3.1).
    number
        Which of a report's plans, 1 the best. [-]
    out
        The folder to write to; nothing is written where absent.
    workload, cluster, framework
        The job of a plan that :func:`~mofa.search.one_plan.estimate` returned; a report has its own.

    Returns
    -------
    ExportedJob
        The files by name, whose heads say what was predicted.

    Raises
    ------
    SpecError
        If a choice of the plan cannot be said to the framework; the message names it and says why.

    Notes
    -----
    Nothing is left to a default of the framework that would change what was predicted.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> plan = mofa.estimate(job, machines, "tp=2 recompute=full", replay=False)
    >>> exported = mofa.export(plan, to="megatron", workload=job, cluster=machines)
    >>> "--tensor-model-parallel-size 2" in exported.files["megatron.sh"]
    True
    """
    plan, facts, machines = _parts(result, number, workload, cluster, framework)
    writer = job_file_makers().get(to)
    if writer is None:
        raise SpecError(f"to ({to}): is no framework that plans are exported to; {did_you_mean(to, job_file_makers())}")
    runs = facts.framework_spec().with_options(plan.strategy.options)
    exported = ExportedJob(writer(ExportJob(facts.workload_spec(), runs, plan, machines, facts.nvls, to)))
    if out is not None:
        exported.write(out)
    return exported


def job_file_makers() -> dict[str, Callable[[ExportJob], dict[str, str]]]:
    """What writes a job's files, by the name that ``--to`` takes.

    Returns
    -------
    dict of str to callable
        Each takes a job and gives texts by file name.

    Examples
    --------
    >>> sorted(job_file_makers())
    ['megatron', 'megatron-bridge', 'torchtitan', 'torchtitan-0.3']
    """
    from mofa.export.bridge.recipe import bridge_job_files
    from mofa.export.megatron.launch_script import megatron_job_files
    from mofa.export.torchtitan.python_file import torchtitan_python_job_files
    from mofa.export.torchtitan.toml_files import torchtitan_job_files

    return {
        "megatron": megatron_job_files, "megatron-bridge": bridge_job_files, "torchtitan": torchtitan_job_files,
        "torchtitan-0.3": torchtitan_python_job_files,
    }  # fmt: skip


def _parts(
    result: PlanReport | Search | Estimate | Plan, number: int, workload: WorkloadSpec | None,
    cluster: ClusterSpec | None, framework: FrameworkSpec | None,
) -> tuple[Plan, JobFacts, ClusterSummary]:  # fmt: skip
    """The plan, the facts that it was predicted for, and the machines."""
    result = getattr(result, "report", result)  # of a search
    if isinstance(result, PlanReport):
        if not 1 <= number <= len(result.plans):
            raise SpecError(f"number ({number}): the report has {len(result.plans)} plans; name one, 1 the best")
        plan: Plan = result.plans[number - 1]
    elif isinstance(result, Plan):
        if number != 1:
            raise SpecError(f"number ({number}): the result is one plan; leave it out")
        plan = result
    else:
        raise SpecError(f"result ({type(result).__name__}): is no plan; give what find_plans or estimate returned")
    facts = getattr(result, "job", None)
    if workload is not None and cluster is not None:
        from mofa.search.request import checked_framework_or_default

        facts = JobFacts.from_specs(workload, checked_framework_or_default(workload, cluster, framework), cluster)
        return plan, facts, ClusterSummary.from_spec(cluster)
    machines = getattr(result, "cluster", None)
    if facts is None or machines is None:
        raise SpecError("a plan alone does not say its job; give workload, cluster and framework besides")
    return plan, facts, machines


def load_result_json(file: str | Path) -> PlanReport | Estimate:
    """A result from the JSON that ``mofa plan --json`` or ``mofa estimate --json`` printed.

    Parameters
    ----------
    file
        The JSON.

    Returns
    -------
    PlanReport or Estimate
        What was printed.

    Raises
    ------
    SpecError
        If it is no such JSON, or one of before plans said their job.

    Examples
    --------
    >>> load_result_json("no such file")
    Traceback (most recent call last):
    mofa.errors.SpecError: no such file: no such file; check the path
    """
    return load_numbered_result(file, None)[0]


def load_numbered_result(file: str | Path, number: int | None) -> tuple[PlanReport | Estimate, int]:
    """A result as :func:`load_result_json` reads it, and which of its plans is meant.

    Parameters
    ----------
    file
        The JSON.
    number
        Of one result its plan, 1 the best; of a list, as ``mofa plan --gpus 64..256 --json`` prints, the result. [-]

    Returns
    -------
    tuple of PlanReport or Estimate, and int
        Of a list the best plan of the result that is named.

    Raises
    ------
    SpecError
        If it is no such JSON, or a list of which none is named.

    Examples
    --------
    >>> load_numbered_result("no such file", 2)
    Traceback (most recent call last):
    mofa.errors.SpecError: no such file: no such file; check the path
    """
    where = shown_value(str(file), 200)
    data = read_bytes(file, where, MAX_RESULT_BYTES, "give the JSON of one search")
    raw = parse_json(data, where, "name what mofa plan --json or estimate --json wrote")
    if isinstance(raw, list) and len(raw) > 1 and all(isinstance(each, dict) for each in raw):
        if number is None or not 1 <= number <= len(raw):
            raise SpecError(f"{where}: has {len(raw)} results; name one by its place, from {file}:1 to :{len(raw)}")
        raw, number = [raw[number - 1]], 1
    if isinstance(raw, list) and len(raw) == 1:
        raw = raw[0]
    if not isinstance(raw, dict) or "schema_version" not in raw:
        raise SpecError(f"{file}: is no result of mofa; name what mofa plan --json or estimate --json wrote")
    if raw.get("job") is None:
        raise SpecError(
            f"{file}: says no job (schema_version {raw['schema_version']}, needed is 2.10); run the plan again"
        )
    kind: Any = PlanReport if "plans" in raw else Estimate
    try:
        result: PlanReport | Estimate = kind.model_validate(raw)
        wrong = first_truth_for_number(kind, raw)
    except ValidationError as error:
        wrong = error.errors()[0]
    if wrong is not None:
        place = ".".join(str(part) for part in wrong["loc"])
        raise SpecError(f"{file}: {place}: {wrong['msg']}; run the plan again with this version of mofa")
    return result, 1 if number is None else number
