"""A record of failures, a CSV with columns node, time, kind and optionally until, into a rate with its interval."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from pydantic import Field

from mofa.errors import SpecError
from mofa.faults.failures.rates import RateEstimate, estimate_failure_rate, fit_weibull_shape
from mofa.specs.files import shown_value
from mofa.specs.limited_reads import read_bytes, utf8_text
from mofa.specs.ranges import MOST_SECONDS
from mofa.units import SECONDS_PER_DAY

MAX_BYTES, MAX_EVENTS = 2**26, 1_000_000
MIN_GAPS = 20
"""Times between failures of the same node below which no shape is fitted. [-]"""
_COLUMNS = ("node", "time", "kind", "until")


class LogStatistics(RateEstimate):
    """What a record of failures says: their rate, their kinds, how they cluster."""

    schema_version: str = Field(default="2.0", description="Version of this contract.")
    kinds: dict[str, float] = Field(description="Share of the failures of each kind, the most frequent first. [-]")
    weibull_shape: float | None = Field(
        description="Of a node's time between failures; null with too few gaps, then exponential. [-]"
    )


@dataclass(frozen=True)
class FailureLog:
    """Failures in order of time. ``until_s`` is when the node came back, NaN where the file doesn't say. [s]"""

    nodes: tuple[str, ...]
    times_s: np.ndarray
    until_s: np.ndarray
    kinds: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def span_s(self) -> float:
        """From the first failure to the last. [s]"""
        return float(self.times_s[-1] - self.times_s[0])

    def failure_rate(self, num_nodes: int, days: float | None = None, confidence: float = 0.9) -> RateEstimate:
        """Failures per node-day, downtime taken off where the file has it.

        Parameters
        ----------
        num_nodes
            Nodes that were watched, those that never failed included. [-]
        days
            How long they were watched; where absent from the first failure to the last, which then only begins the
            record and is not counted. [d]
        confidence
            Of the interval. [-]
        """
        seen = len(set(self.nodes))
        if num_nodes < seen:
            raise SpecError(
                f"--log-nodes: {num_nodes} are fewer than the {seen} that the log names; count those watched"
            )
        if days is None and self.span_s <= 0:
            raise SpecError(
                "the log: all failures are at one time, which shows no rate; give --log-days, how long was watched"
            )
        whole_s = self.span_s if days is None else days * SECONDS_PER_DAY
        if whole_s < self.span_s:
            raise SpecError(f"--log-days: {days:g} are shorter than the log's {self.span_s / SECONDS_PER_DAY:.4g} days")
        down_s = float(np.nansum(np.minimum(self.until_s, self.times_s[0] + whole_s) - self.times_s))
        up_days = num_nodes * whole_s / SECONDS_PER_DAY - down_s / SECONDS_PER_DAY
        return estimate_failure_rate(len(self) - (days is None), up_days, confidence)

    def statistics(self, num_nodes: int, days: float | None = None, confidence: float = 0.9) -> LogStatistics:
        """:meth:`failure_rate`, :meth:`failure_kind_shares` and :meth:`weibull_shape` together."""
        rate = self.failure_rate(num_nodes, days, confidence)
        return LogStatistics(**rate.model_dump(), kinds=self.failure_kind_shares(), weibull_shape=self.weibull_shape())

    def failure_kind_shares(self) -> dict[str, float]:
        """Share of the failures of each kind, the most frequent first. [-]"""
        return {kind: count / len(self) for kind, count in Counter(self.kinds).most_common()}

    def weibull_shape(self) -> float | None:
        """Weibull shape of the time between failures of the same node; None with fewer than 20 of them. [-]

        A gap begins when the node is back. The time from the last failure of each node to the log's end counts as not
        ended; nodes that never failed say nothing here.
        """
        gaps, rest = [], []
        back: dict[str, float] = {}
        for node, time_s, until in zip(self.nodes, self.times_s, self.until_s, strict=True):
            if node in back and time_s > back[node]:
                gaps.append(time_s - back[node])
            back[node] = time_s if math.isnan(until) else until
        rest = [self.times_s[-1] - time_s for time_s in back.values()]
        if len(gaps) < MIN_GAPS or np.ptp(gaps) == 0:
            return None
        return fit_weibull_shape(np.array(gaps), np.array(rest))


def read_failure_log(path: str | Path) -> FailureLog:
    """Failures that a CSV file holds.

    Parameters
    ----------
    path
        Columns ``node``, ``time``, ``kind`` in any order, optionally ``until``: when the node was back. Times are ISO
        8601 or seconds, one of the two throughout, sorted.

    Raises
    ------
    SpecError
        Naming the row (the first below the header is row 1): a time that cannot be read or is before the one above, an
        empty cell, a node that fails while it is down; a file that is missing, empty or too large.
    """
    where = f"--log {shown_value(str(path), 200)}"
    rows = _rows(Path(path), where)
    nodes: list[str] = []
    kinds: list[str] = []
    times: list[float] = []
    untils: list[float] = []
    back: dict[str, float] = {}
    clocks: set[str] = set()
    for number, row in enumerate(rows, 1):
        of_row = f"{where}: row {number}"
        for column in ("node", "time", "kind"):
            if not (row.get(column) or "").strip():
                raise SpecError(f"{of_row}: {column} is empty; fill it in")
        node = str(row["node"]).strip()
        time_s = _seconds(str(row["time"]), f"{of_row}: time", clocks)
        text = str(row.get("until") or "").strip()
        until = _seconds(text, f"{of_row}: until", clocks) if text else math.nan
        if times and time_s < times[-1]:
            raise SpecError(
                f"{of_row}: time ({shown_value(str(row['time']))}) is before the row above; sort the log by time"
            )
        if until < time_s:
            raise SpecError(
                f"{of_row}: until ({shown_value(text)}) is before time ({shown_value(str(row['time']))}); swap them"
            )
        if time_s < back.get(node, -math.inf):
            raise SpecError(
                f"{of_row}: {shown_value(node)} fails while it is still down; its downtimes overlap, correct one"
            )
        back[node] = time_s if math.isnan(until) else until
        nodes.append(node)
        kinds.append(str(row["kind"]).strip()[:60])
        times.append(time_s)
        untils.append(until)
    return FailureLog(tuple(nodes), np.array(times), np.array(untils), tuple(kinds))


def _rows(path: Path, where: str) -> list[dict[str, str | None]]:
    text = utf8_text(read_bytes(path, where, MAX_BYTES, "keep the failures alone"), where)
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        header = [str(name).strip() for name in reader.fieldnames or []]
        reader.fieldnames = header
        missing = [name for name in _COLUMNS[:3] if name not in header]
        if missing:
            raise SpecError(f"{where}: has no column {missing[0]}; the header is node,time,kind and optionally until")
        unknown = [name for name in header if name not in _COLUMNS]
        if unknown or len(set(header)) < len(header):
            odd = unknown[0] if unknown else "a column twice"
            raise SpecError(
                f"{where}: has {shown_value(odd) or 'a column without name'}; keep node, time, kind and until"
            )
        rows: list[dict[str, str | None]] = []
        for row in reader:
            if None in row or len(rows) >= MAX_EVENTS:
                raise SpecError(f"{where}: row {len(rows) + 1} has more cells than the header; write one row a failure")
            rows.append(row)
    except csv.Error as error:
        raise SpecError(f"{where}: is no CSV ({shown_value(str(error), 80)}); write node,time,kind rows") from None
    if not rows:
        raise SpecError(f"{where}: holds no failure; a rate needs at least one, or give --mtbf")
    return rows


def _seconds(text: str, where: str, clocks: set[str]) -> float:
    """A time in seconds; ``clocks`` remembers how the log writes times, which must not change."""
    text = text.strip()
    try:
        seconds, clock = float(text), "seconds"
    except ValueError:
        try:
            stamp = datetime.fromisoformat(text)
        except ValueError:
            raise SpecError(
                f"{where} ({shown_value(text)}) is no time; write ISO 8601, such as 2025-01-31T12:00:00, or seconds"
            ) from None
        clock = "dates without time zone" if stamp.tzinfo is None else "dates with time zone"
        try:
            seconds = (stamp.replace(tzinfo=UTC) if stamp.tzinfo is None else stamp).timestamp()
        except (OverflowError, ValueError):
            seconds = math.inf
    if not -MOST_SECONDS <= seconds <= MOST_SECONDS:
        raise SpecError(f"{where} ({shown_value(text)}) is not finite or not of this age; write a time")
    clocks.add(clock)
    if len(clocks) > 1:
        raise SpecError(f"{where} ({shown_value(text)}): the log mixes {' and '.join(sorted(clocks))}; write all alike")
    return seconds
