"""``--routing`` and ``--trace``: how tokens fall on experts, from options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mofa.specs.routing import RoutingSpec
    from mofa.specs.workload import WorkloadSpec


def parse_routing(text: str | None) -> RoutingSpec | None:
    """The routing that an option names; None where it is absent.

    Examples
    --------
    >>> str(parse_routing("zipf:0.9"))
    'zipf:0.9'
    """
    from pydantic import ValidationError

    from mofa.errors import SpecError
    from mofa.specs.from_mapping import sentence_of_problem
    from mofa.specs.routing import RoutingSpec

    if text is None:
        return None
    try:
        return RoutingSpec.parse(text)
    except ValidationError as error:
        sentence = sentence_of_problem(RoutingSpec, error.errors(include_url=False)[0])
        what, example = sentence.rpartition(";")[0], f"{text.strip().partition(':')[0]}:1"
        raise SpecError(f"--routing {text[:40]}: {what}; write it like {example}") from None
    except ValueError as error:
        raise SpecError(f"--routing: {error}") from None


def workload_with_routing(workload: WorkloadSpec, routing: str | None, trace: Path | None) -> WorkloadSpec:
    """The workload with the routing of an option, or of a trace; its own where neither is given."""
    from mofa.errors import SpecError
    from mofa.search.experts.balanced_step import workload_with_trace_routing

    if routing is not None and trace is not None:
        raise SpecError("--routing: is given beside --trace, which says how tokens fall; leave one out")
    chosen = parse_routing(routing)
    if chosen is not None:
        return workload.model_copy(update={"routing": chosen})
    return workload if trace is None else workload_with_trace_routing(workload, trace)
