"""A job that somebody has, read as what mofa estimates, by its framework."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mofa.errors import SpecError
from mofa.export.job_file import JobOfFile
from mofa.specs.files import did_you_mean, shown_value


def read_job(framework: str, file: str | Path, num_gpus: int | None = None) -> JobOfFile:
    """Read a job of a framework.

    Parameters
    ----------
    framework
        ``megatron`` or ``torchtitan``.
    file
        A shell script with arguments or a log with a dump of them; TOML, or a Python config.
    num_gpus
        GPUs of the job, in place of those that the file says. [-]

    Raises
    ------
    SpecError
        If the file cannot be read, or says something that matters and is not modelled.
    """
    reader = job_readers().get(framework)
    if reader is None:
        raise SpecError(f"--from {framework}: no such jobs are read; {did_you_mean(framework, job_readers())}")
    try:
        return reader(Path(file), num_gpus)
    except ArithmeticError as error:  # degrees of 0, sizes beyond what numbers hold
        raise SpecError(
            f"{shown_value(str(file), 200)}: its numbers make no job ({shown_value(str(error), 60)}); correct its "
            "sizes and degrees"
        ) from None


def job_readers() -> dict[str, Callable[[Path, int | None], JobOfFile]]:
    """What reads a job's file, by the name that ``--from`` takes."""
    from mofa.export.megatron.read_megatron import read_megatron_job
    from mofa.export.torchtitan.read_torchtitan import read_torchtitan_job

    return {"megatron": read_megatron_job, "torchtitan": read_torchtitan_job}
