"""A played rank as an execution trace of MLCommons Chakra, which network simulators such as ASTRA-sim read.

Written through the package ``mlc-chakra`` (1.0.0: schema/protobuf/et_def.proto, third_party/utils/protolib.py), which
is the extra ``chakra``. Names of attributes are those of its converters (``is_cpu_op``, ``comm_type``, ``comm_size``,
``pg_name``) and of its text generator's readers (``num_ops``, ``tensor_size``).
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mofa.blocks.work import Collective, HostCopy
from mofa.cost.roofline import least_bytes_of_work
from mofa.errors import SpecError
from mofa.replay.time.kernel_runs import only_entry
from mofa.replay.time.trace_graph import GraphNode

PACKAGE_VERSION = "1.0.0"
"""Of mlc-chakra, with which traces are read back."""
VERSION = "1.0.0"
"""Of Chakra's schema, as mlc-chakra 1.0.0 writes it (src/generator/generator.py)."""
COMM_TYPES = {
    "all_reduce": "ALL_REDUCE", "all_gather": "ALL_GATHER", "reduce_scatter": "REDUCE_SCATTER",
    "all_to_all": "ALL_TO_ALL", "deepep": "ALL_TO_ALL",
}  # fmt: skip
"""Chakra's word for each collective; DeepEP's kernels exchange tokens of all with all."""
Value = str | float | bool
"""Of an attribute."""
MICROSECOND = 1e-6
"""Chakra's unit of time. [s]"""


def chakra_trace(
    nodes: Sequence[GraphNode], rank: int, group_sizes: Mapping[str, int], hand_over_bytes: float, *,
    begin_s: float = 0.0, facts: Mapping[str, Value] | None = None,
) -> bytes:  # fmt: skip
    """The nodes of one rank as a Chakra execution trace.

    Parameters
    ----------
    nodes
        Of :func:`mofa.replay.time.trace_graph.rank_graph`.
    rank
        The pipeline rank: the ``comm_src`` of its sends.
    group_sizes
        Ranks of each process group. [-]
    hand_over_bytes
        What a pipeline rank hands to the next for a micro-batch. [B]
    begin_s
        When all ranks' traces begin, which no node is before. [s]
    facts
        Said at the beginning of the trace.

    Returns
    -------
    bytes
        A global record, and a node each in the order given; ids are places in it.

    Raises
    ------
    SpecError
        If ``mlc-chakra`` is not installed.

    Notes
    -----
    Chakra counts whole microseconds: starts and ends are rounded, and durations are the differences, so that those of
    a stream add up. The attribute ``duration_s`` has the exact one. ``data_deps`` has all that a node waits for, the
    node before it on its stream included, as simulators read it (the converter's ``convert_ctrl_dep_to_data_dep``).
    """
    definitions, encode = _chakra()
    out = io.BytesIO()
    attributes = [_attribute(definitions, name, value) for name, value in (facts or {}).items()]
    encode(out, definitions.GlobalMetadata(version=VERSION, attr=attributes))
    for number, node in enumerate(nodes):
        start, end = (round((time_s - begin_s) / MICROSECOND) for time_s in (node.start_s, node.end_s))
        kind, own = _kind_and_attributes(node, rank, group_sizes, hand_over_bytes)
        said: dict[str, Value] = {
            "is_cpu_op": False, "stream": node.stream, "family": node.family, "duration_s": node.end_s - node.start_s,
            **own,
        }  # fmt: skip
        if node.kind == "op" and kind == "COMM_COLL_NODE":
            said["comm_type"] = getattr(definitions, str(own["comm_type"]))
        written = definitions.Node(
            id=number, name=node.name, type=getattr(definitions, kind), data_deps=node.after, start_time_micros=start,
            duration_micros=end - start,
            attr=[_attribute(definitions, name, value) for name, value in said.items()],
        )  # fmt: skip
        encode(out, written)
    return out.getvalue()


def read_chakra_trace(data: bytes) -> tuple[Any, list[Any]]:
    """The global record and the nodes of a trace, as Chakra's own reader gives them."""
    from chakra.src.third_party.utils.protolib import decodeMessage  # type: ignore[import-not-found,unused-ignore]

    definitions, _ = _chakra()
    stream, record = io.BytesIO(data), definitions.GlobalMetadata()
    decodeMessage(stream, record)
    return record, list(_nodes(stream, definitions, decodeMessage))


def _nodes(stream: io.BytesIO, definitions: Any, decode: Any) -> Iterator[Any]:
    while True:
        node = definitions.Node()
        if not decode(stream, node):
            return
        yield node


def refuse_without_chakra() -> None:
    """Raise SpecError where Chakra's package is not installed."""
    _chakra()


def _chakra() -> tuple[Any, Any]:
    """Chakra's schema, and what writes a record."""
    try:
        from chakra.schema.protobuf import et_def_pb2  # type: ignore[import-not-found,unused-ignore]
        from chakra.src.third_party.utils.protolib import encodeMessage
    except ImportError as error:
        raise SpecError(
            f"--format chakra: needs MLCommons' package, which is not here ({error}); pip install 'mofa[chakra]'"
        ) from None
    return et_def_pb2, encodeMessage


def _kind_and_attributes(
    node: GraphNode, rank: int, group_sizes: Mapping[str, int], hand_over_bytes: float
) -> tuple[str, dict[str, Value]]:
    """Chakra's type of a node, and what is said of its work."""
    if node.kind != "op":
        source, destination = (rank, node.peer) if node.kind == "send" else (node.peer, rank)
        return "COMM_SEND_NODE" if node.kind == "send" else "COMM_RECV_NODE", {
            "comm_size": round(hand_over_bytes), "comm_src": source, "comm_dst": destination, "comm_tag": node.tag,
            "pg_name": "pp",
        }  # fmt: skip
    collectives = [work for work in node.works if isinstance(work, Collective)]
    if collectives:
        return _collective(collectives, group_sizes)
    flops = sum(only_entry(getattr(work, "flops", 0.0)) for work in node.works)
    moved = sum(_moved_bytes(work) for work in node.works)
    return "COMP_NODE", {"num_ops": round(flops), "tensor_size": round(moved)}


def _collective(collectives: Sequence[Collective], group_sizes: Mapping[str, int]) -> tuple[str, dict[str, Value]]:
    """Collectives of one launch, of one kind: of dense parameters, and of experts' over a group of their own."""
    payload = sum(only_entry(each.payload) for each in collectives)
    groups = list(dict.fromkeys(each.group for each in collectives))
    said: dict[str, Value] = {
        "pg_name": "+".join(groups), "group_size": max(group_sizes[group] for group in groups),
    }  # fmt: skip
    if math.isfinite(payload):
        said["comm_size"] = round(payload)
    kind = collectives[0].kind
    if kind == "send_recv":  # a step of ring attention: every rank sends to the group's next
        return "COMM_SEND_NODE", said
    return "COMM_COLL_NODE", said | {"comm_type": COMM_TYPES[kind]}


def _moved_bytes(work: object) -> float:
    return only_entry(work.bytes) if isinstance(work, HostCopy) else least_bytes_of_work(work)


def _attribute(definitions: Any, name: str, value: Value) -> Any:
    kind = {bool: "bool_val", int: "int64_val", float: "double_val", str: "string_val"}[type(value)]
    return definitions.AttributeProto(name=name, **{kind: value})
