"""The memory of a GPU that a user leaves to a plan."""

from __future__ import annotations

from mofa.errors import SpecError
from mofa.specs.base import Fact
from mofa.specs.hardware import ClusterSpec
from mofa.units import format_bytes, parse_quantity


def with_memory_limit(machines: ClusterSpec, text: str | None, where: str = "--memory-limit") -> ClusterSpec:
    """Machines whose GPUs have so much memory for a plan and its margin; as they are where nothing is said.

    Parameters
    ----------
    machines
        A cluster.
    text
        A size such as ``70GB``; None leaves the GPU's own.
    where
        What gave it, for errors.

    Raises
    ------
    SpecError
        If it is no size, less than the CUDA context takes, or more than the GPU has.

    Examples
    --------
    >>> from mofa.specs.load import load_cluster
    >>> with_memory_limit(load_cluster("h100-hgx", 8), "70GB").gpu.capacity_bytes.value
    70000000000.0
    """
    if text is None:
        return machines
    try:
        limit_bytes = parse_quantity(text, "B")
    except ValueError as error:
        raise SpecError(f"{where}: {error}") from None
    capacity_bytes, context_bytes = machines.gpu.capacity_bytes.value, machines.gpu.context_bytes.value
    if not context_bytes <= limit_bytes <= capacity_bytes:
        no_room = f"less than the {format_bytes(context_bytes)} that the CUDA context alone takes of it"
        too_much = f"more than the {format_bytes(capacity_bytes)} of {machines.gpu.name}"
        raise SpecError(
            f"{where}: {text} is {no_room if limit_bytes < context_bytes else too_much}; "
            f"give {format_bytes(context_bytes)} to {format_bytes(capacity_bytes)}"
        )
    fact = Fact(value=limit_bytes, provenance="assumed", source="--memory-limit")
    return machines.model_copy(update={"gpu": machines.gpu.model_copy(update={"capacity_bytes": fact})})
