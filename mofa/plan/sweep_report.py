"""A sweep as JSON: the types of what ``mofa sweep --json`` prints."""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from mofa.specs.base import Spec

SCHEMA_VERSION: Final = "1.0"

Cell = str | bool | int | float | None
"""A value of a point; None where the table has none."""


class SweptJob(Spec):
    """Points that train one thing under one kind of failures and one case of prices, compared."""

    points: tuple[int, ...] = Field(min_length=1, description="Points of the job that have a plan, from 0. [-]")
    compared_by: Literal["usd", "gpu_hours", "gpu_seconds_per_million_tokens"] = Field(
        description="The field that says which point is cheapest: the first of these that all points of the job have."
    )
    cheapest: int = Field(ge=0, description="The cheapest point, from 0. [-]")
    fastest: int = Field(ge=0, description="The point with the fewest days, or without days the shortest step. [-]")


class SweepReport(Spec):
    """What ``mofa sweep --json`` prints.

    Raises
    ------
    pydantic.ValidationError
        If points differ in their fields, or a job names a point that is not there; it is a ``ValueError``.

    Examples
    --------
    >>> SweepReport(points=({"status": "failed"},), jobs=()).schema_version
    '1.0'
    """

    schema_version: Literal["1.0"] = Field(default=SCHEMA_VERSION, description="Version of this contract.")
    points: tuple[dict[str, Cell], ...] = Field(
        min_length=1, description="A point each, with the columns of sweep.parquet; null where that has nothing."
    )
    jobs: tuple[SweptJob, ...] = Field(description="Jobs with a plan, in the order of their first points.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(point.keys() != self.points[0].keys() for point in self.points):
            raise ValueError("points: differ in their fields")
        named = {number for job in self.jobs for number in (*job.points, job.cheapest, job.fastest)}
        if named - set(range(len(self.points))):
            raise ValueError("jobs: name points that are not there")
        return self
