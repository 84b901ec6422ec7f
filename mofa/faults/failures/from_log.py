"""A fault profile whose failure rate, kinds and clustering come out of a record of failures."""

from __future__ import annotations

from mofa.errors import SpecError
from mofa.faults.failures.events import FailureLog
from mofa.specs.base import Fact
from mofa.specs.faults import FailureKind, FaultSpec, ReliabilitySpec
from mofa.specs.ranges import LEAST_FACTOR, MOST_FACTOR, number_within


def fault_profile_with_log(faults: FaultSpec, log: FailureLog, num_nodes: int, days: float | None = None) -> FaultSpec:
    """The profile with what a log says of its nodes; its restarts, storage and prices stay.

    Parameters
    ----------
    faults
        With reliability, whose kinds say how a job comes back from each.
    log
        Failures; its nodes are taken to have as many GPUs as the profile's.
    num_nodes, days
        As in :meth:`mofa.faults.failures.events.FailureLog.failure_rate`.

    Raises
    ------
    SpecError
        If the profile has no kinds of failures, or the log names kinds that are neither its kinds nor recovery paths.

    Notes
    -----
    The log's kinds are those of the profile, by name or by recovery path (``process``, ``node``, ``network``); several
    kinds of one path share what the log gives that path as they do in the profile. The Weibull shape is taken over
    where the log shows enough gaps, and replaces the profile's lemons, which such a shape would count twice.
    """
    reliability = faults.reliability
    if reliability is None:
        raise SpecError(f"{faults.name}: has no reliability, whose kinds say how a job comes back; add the section")
    rate, shape = log.failure_rate(num_nodes, days), log.weibull_shape()
    number_within("--log: its rate", rate.rate_per_node_day, "failures per node-day", LEAST_FACTOR, MOST_FACTOR)
    source = f"a log of {rate.failures:,} failures in {rate.node_days:,.1f} node-days"

    def fact(value: float) -> Fact:
        return Fact(value=value, provenance="measured", source=source)

    kinds = _kinds(reliability.kinds, log.failure_kind_shares(), faults.name, fact(0.0))
    changes: dict[str, object] = {
        "failures_per_node_day": fact(rate.rate_per_node_day), "counted_failures": fact(rate.failures),
        "components": (), "kinds": kinds,
    }  # fmt: skip
    if shape is not None:
        changes |= {"shape": fact(min(max(shape, 0.1), 10.0)), "lemon_fraction": None, "lemon_multiple": None}
    spec = ReliabilitySpec(**{**{name: getattr(reliability, name) for name in ReliabilitySpec.model_fields}, **changes})
    return faults.model_copy(update={"reliability": spec})


def _kinds(known: tuple[FailureKind, ...], shares: dict[str, float], where: str, like: Fact) -> tuple[FailureKind, ...]:
    """The profile's kinds with the shares of a log."""
    given = dict.fromkeys(range(len(known)), 0.0)
    for word, share in shares.items():
        matching = [i for i, kind in enumerate(known) if kind.name.casefold() == word.casefold()]
        matching = matching or [i for i, kind in enumerate(known) if kind.path == word.casefold()]
        if not matching:
            names = dict.fromkeys([*(kind.name for kind in known), *(kind.path for kind in known)])
            raise SpecError(f"--log: kind {word} is none of {where}'s; write one of {', '.join(names)}")
        total = sum(known[i].share.value for i in matching)
        for i in matching:
            given[i] += share * (known[i].share.value / total if total else 1 / len(matching))
    return tuple(
        kind.model_copy(update={"share": like.model_copy(update={"value": given[i]})}) for i, kind in enumerate(known)
    )
