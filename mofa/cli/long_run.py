"""Options about long runs, which plan, estimate and goodput share, and the fault profile that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mofa.specs.faults import FaultSpec
    from mofa.specs.hardware import ClusterSpec


class CheckpointModeChoice(StrEnum):
    """How checkpoints are kept."""

    blocking = "blocking"
    asynchronous = "async"
    memory = "memory"
    peer = "peer"
    two_level = "two-level"
    three_level = "three-level"


class RecoveryChoice(StrEnum):
    """Where states come from after a failure."""

    checkpoint = "checkpoint"
    replica = "replica"


class ObjectiveChoice(StrEnum):
    """What the best plan is best at."""

    tokens = "tokens"
    days = "days"
    usd = "usd"
    kwh = "kwh"


Faults = Annotated[
    str | None,
    typer.Option("--faults", metavar="NAME|FILE", help="A fault profile, bundled (mofa show faults) or a YAML."),
]
Storage = Annotated[
    str | None,
    typer.Option("--storage", metavar="RATE[,RATE]", help="Shared storage, such as '2 TB/s'; or write, read."),
]
Price = Annotated[float | None, typer.Option("--price", metavar="USD", help="Price of a GPU-hour.")]
Spares = Annotated[
    str | None,
    typer.Option(
        "--spares",
        metavar="N|outside",
        help="Nodes of --gpus that stand by; outside: all of --gpus compute; '2 outside': 2 nodes stand by beside "
        "them; else plan tries several numbers.",
    ),
]
CheckpointMode = Annotated[
    CheckpointModeChoice | None,
    typer.Option("--checkpoint-mode", help="How checkpoints are kept; blocking by default."),
]
Recovery = Annotated[
    RecoveryChoice | None,
    typer.Option("--recovery", help="All go back to a checkpoint (default), or other replicas go on without rollback."),
]
CheckpointInterval = Annotated[
    str | None,
    typer.Option("--checkpoint-interval", metavar="TIME", help="Compute time between checkpoints; else the best."),
]
Log = Annotated[
    Path | None, typer.Option("--log", metavar="CSV", help="Failures (node, time, kind[, until]) for the rate.")
]
LogNodes = Annotated[
    int | None, typer.Option("--log-nodes", min=1, help="Nodes that the log is of, those that never failed included.")
]
LogDays = Annotated[
    float | None, typer.Option("--log-days", help="How long they were watched; else first to last failure.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Override one fact; PATH begins with workload., hardware., framework., strategy. or faults. Repeatable.",
    ),
]
Objective = Annotated[
    ObjectiveChoice, typer.Option("--objective", help="tokens/s/GPU, or days, dollars or energy of the whole run.")
]


@dataclass(frozen=True)
class LongRunOptions:
    """What the user said about long runs."""

    faults: str | None = None
    storage: str | None = None
    price: float | None = None
    spares: str | None = None
    mode: CheckpointModeChoice | None = None
    interval: str | None = None
    log: Path | None = None
    log_nodes: int | None = None
    log_days: float | None = None
    recovery: RecoveryChoice | None = None
    changes: Mapping[str, object] = field(default_factory=dict)
    """Facts of the profile by dotted path: ``--set faults.PATH=VALUE``."""

    @property
    def is_any_given(self) -> bool:
        """Whether any option was given."""
        return any(value is not None for name, value in vars(self).items() if name != "changes" or value)

    def fault_profile(self) -> FaultSpec | None:
        """The fault profile with what the options change; None where none is given."""
        if not self.is_any_given:
            return None
        from mofa.errors import SpecError
        from mofa.specs.fault_changes import fact_of_user, storage_of_text
        from mofa.specs.faults import PriceSpec
        from mofa.specs.load import load_faults
        from mofa.specs.ranges import MOST_USD, number_within

        self._check_log()
        spec = load_faults(self.faults, self.changes)
        changes: dict[str, object] = {}
        if self.storage is not None:
            changes["storage"] = storage_of_text(self.storage, "--storage")
        if self.price is not None:
            changes["price"] = PriceSpec(
                usd_per_gpu_hour=fact_of_user(number_within("--price", self.price, "USD", 0.0, MOST_USD))
            )
        if self.spares is not None:
            changes["spares"] = parse_spares(self.spares)[0]
        checkpoint: dict[str, object] = {}
        if self.mode is not None:
            checkpoint["mode"] = self.mode.value
        if self.interval is not None:
            checkpoint["interval_s"] = parse_checkpoint_interval_s(self.interval)
        given = {"--checkpoint-mode": self.mode, "--checkpoint-interval": self.interval, "--recovery": self.recovery,
                 "--spares": self.spares if (self.spares or "").endswith("outside") else None}  # fmt: skip
        option = next((name for name, value in given.items() if value is not None), None)
        if option is not None and spec.reliability is None and self.faults is None:
            raise SpecError(f"{option}: has no effect without failures; name a profile, such as --faults llama3")
        if checkpoint:
            changes["checkpoint"] = spec.checkpoint.model_copy(update=checkpoint)
        if self.recovery is not None:
            changes["recovery"] = self.recovery.value
        spec = spec.model_copy(update=changes)
        if spec.recovery == "replica" and spec.checkpoint.mode not in ("blocking", "async"):
            raise SpecError(f"--recovery replica: reads the states of other replicas, so that --checkpoint-mode "
                            f"{spec.checkpoint.mode} has nothing to add; use blocking or async")  # fmt: skip
        if self.log is None:
            return spec
        from mofa.faults.failures.events import read_failure_log
        from mofa.faults.failures.from_log import fault_profile_with_log

        assert self.log_nodes is not None
        return fault_profile_with_log(spec, read_failure_log(self.log), self.log_nodes, self.log_days)

    def _check_log(self) -> None:
        """Refuse a log without its nodes or without a profile, and what belongs to a log without one."""
        from mofa.errors import SpecError

        if self.log is None:
            for option, value in (("--log-nodes", self.log_nodes), ("--log-days", self.log_days)):
                if value is not None:
                    raise SpecError(f"{option}: belongs to --log, which is missing")
            return
        if self.log_nodes is None:
            raise SpecError("--log-nodes: is missing; say how many nodes the log is of, those that never failed "
                            "included")  # fmt: skip
        if self.faults is None:
            raise SpecError("--log: gives rates and kinds alone; name a profile for restarts, such as --faults llama3")
        check_log_watch(self.log_nodes, self.log_days)


def refuse_objective_without_failures(objective: ObjectiveChoice, profile: FaultSpec | None) -> None:
    """Refuse an objective of whole runs where nothing is said of failures."""
    from mofa.errors import SpecError

    if profile is None and objective is not ObjectiveChoice.tokens:
        raise SpecError(f"--objective {objective.value}: needs failures, storage and tokens; give --faults NAME|FILE")


def split_fault_settings(items: list[str] | None) -> tuple[list[str], dict[str, object]]:
    """Items of ``--set`` without those about long runs, and these as dotted paths below the profile."""
    from mofa.specs.overrides import ROOTS, parse_set_options

    of_faults = [item for item in items or () if item.strip().startswith("faults.")]
    rest = [item for item in items or () if item not in of_faults]
    parse_set_options(rest, (*ROOTS, "faults"))  # a wrong beginning is told with all that there are
    return rest, parse_set_options(of_faults, ("faults",))["faults"]


def parse_spares(text: str | None) -> tuple[int, bool]:
    """How many nodes stand by, and whether beside ``--gpus``. [nodes]

    Raises
    ------
    SpecError
        If it is neither a number nor ``outside``.

    Examples
    --------
    >>> parse_spares("2"), parse_spares("outside"), parse_spares("2 outside"), parse_spares(None)
    ((2, False), (0, True), (2, True), (0, False))
    """
    from mofa.errors import SpecError

    words = (text or "0").split()
    is_outside = words[-1:] == ["outside"]
    number = (words[:-1] or ["0"]) if is_outside else words
    if len(number) != 1 or not number[0].isdecimal() or len(number[0]) > 6:
        raise SpecError(f"--spares: {str(text)[:20]!r} is no number of nodes; write it as 2, outside or '2 outside'")
    return int(number[0]), is_outside


def with_outside_spare_nodes(machines: ClusterSpec, spares: str | None) -> ClusterSpec:
    """The machines with the nodes that stand by beside them, which a long run counts as its own."""
    number, is_outside = parse_spares(spares)
    more = number * machines.node.gpus_per_node if is_outside else 0
    return machines.model_copy(update={"num_gpus": machines.num_gpus + more}) if more else machines


def with_checked_spares(machines: ClusterSpec, spares: str) -> ClusterSpec:
    """The machines with the nodes that stand by beside them; more than there are is an error."""
    from mofa.search.long_run.spare_nodes import without_spares

    machines = with_outside_spare_nodes(machines, spares)
    without_spares(machines, parse_spares(spares)[0], "--spares")
    return machines


def check_log_watch(nodes: int, days: float | None) -> None:
    """Refuse what cannot be how many nodes a log is of, or how long they were watched. [nodes, d]"""
    from mofa.specs.ranges import LEAST_LOG_DAYS, MAX_GPUS, MOST_LOG_DAYS, number_within

    number_within("--log-nodes", nodes, "nodes", 1, MAX_GPUS)
    if days is not None:
        number_within("--log-days", days, "d", LEAST_LOG_DAYS, MOST_LOG_DAYS)


def parse_checkpoint_interval_s(text: str) -> float:
    """Compute time between checkpoints, as a fault profile has it. [s]"""
    from mofa.specs.ranges import LEAST_SECONDS, MOST_SECONDS, number_within

    interval_s = parse_duration_s("--checkpoint-interval", text)
    return number_within("--checkpoint-interval", interval_s, "s", LEAST_SECONDS, MOST_SECONDS)


def parse_duration_s(option: str, text: str, *, zero: bool = False) -> float:
    """A time with its unit, above 0 unless ``zero`` may be. [s]"""
    from mofa.errors import SpecError
    from mofa.units import parse_quantity

    try:
        value = parse_quantity(text, "s")
    except ValueError as error:
        raise SpecError(f"{option}: {error}") from None
    if value < 0 or (value == 0 and not zero):
        raise SpecError(f"{option}: is {value:g} s; give a time {'of at least' if zero else 'above'} 0 s")
    return value
