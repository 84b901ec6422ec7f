"""GPUs and nodes to fill in: a YAML text with every fact, its unit and where to find it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from mofa.specs.like_profiles import expanded_profile
from mofa.specs.workload_template import UNFILLED

Facts = Mapping[str, Any]


class FactHint(NamedTuple):
    """What a fact is, with its unit, and where a user finds it."""

    meaning: str
    default: str | None = None
    """What stands where the profile that it is like does not say it; such a fact is a comment."""


GPU_HINTS: Mapping[str, FactHint] = {
    "peak_flops_per_s": FactHint(
        "dense peaks [FLOP/s]: halve those 'with sparsity'; null for a format that it has not"
    ),
    "memory_bytes": FactHint("memory by the datasheet [B], whose GB are mostly GiB; nvidia-smi shows memory.total"),
    "capacity_bytes": FactHint("what the driver leaves of it [B]: torch.cuda.mem_get_info()[1]"),
    "memory_bandwidth_bytes_per_s": FactHint("memory bandwidth by the datasheet [B/s]"),
    "num_sms": FactHint("multiprocessors, of AMD compute units: torch's multi_processor_count"),
    "l2_bytes": FactHint("L2 cache [B]: torch.cuda.get_device_properties(0).L2_cache_size"),
    "host_link_bytes_per_s": FactHint("host to device, a direction [B/s]: PCIe 4.0 x16 32 GB/s, 5.0 64 GB/s"),
    "tdp_w": FactHint("power limit [W]: nvidia-smi shows power.limit; it says how far products' clock falls"),
    "context_bytes": FactHint("memory of a CUDA context [B]: nvidia-smi of a process with one tensor", ""),
    "fp8_transposes": FactHint("whether fp8 products need transposed copies: below compute capability 10.0", "true"),
    "fp8_recipes": FactHint(
        "fp8 recipes of Transformer Engine: blockwise from capability 9.0 on, mxfp8 on 10.x",
        "[delayed, tensorwise, blockwise]",
    ),
    "software": FactHint("cuda, or rocm of an AMD GPU", "cuda"),
}
"""Every fact of a GPU, curves apart."""
NODE_HINTS: Mapping[str, FactHint] = {
    "gpus_per_node": FactHint("GPUs of a node"),
    "gpus_per_domain": FactHint("GPUs that reach each other without the network: a node's, or 72 of an NVL72 rack"),
    "intra.name": FactHint("the link between the GPUs of a node: NVLink, xGMI, PCIe (nvidia-smi topo -m)"),
    "intra.bandwidth_bytes_per_s": FactHint("of a GPU, a direction [B/s]: halve what a datasheet calls bidirectional"),
    "intra.efficiency": FactHint(
        "share that large collectives reach: bus bandwidth of all_gather_perf over the link", ""
    ),
    "intra.all_to_all_efficiency": FactHint("the same of alltoall_perf", ""),
    "intra.latency_s": FactHint("a step of a ring [s]: small all-gathers on 8 GPUs less those on 2, over 6", ""),
    "intra.relays": FactHint("whether NCCL relays messages for other rails over it: NVLink yes, PCIe no", "true"),
    "intra.is_mesh": FactHint("whether every two GPUs have a link of their own, as xGMI, and no switch", "false"),
    "nic.name": FactHint("the network interfaces"),
    "nic.num_per_node": FactHint("interfaces of a node that training uses: ibstat lists them"),
    "nic.bandwidth_bytes_per_s": FactHint("of one interface, a direction [B/s], such as 200 Gbit/s"),
    "nic.protocol": FactHint("infiniband, roce or ethernet: Link layer of ibstat"),
    "nic.efficiency": FactHint("share that large collectives reach: all_gather_perf on two nodes over their NICs", ""),
    "nic.all_to_all_efficiency": FactHint("the same of alltoall_perf", ""),
    "nic.latency_s": FactHint("a message between nodes [s]: a hop more of a small ring; see nccl.yaml", ""),
    "nic.oversubscription": FactHint("of all that is above the interfaces, tiers apart: 1 is non-blocking", ""),
    "nic.rail_optimised": FactHint("true where GPUs of one number share a leaf: ask who built the network", "false"),
    "host_memory_bytes": FactHint("memory of a node [B]: free -b"),
    "nvls_factor": FactHint("how much NVLink SHARP speeds up all-reduce in a node: 1 before NVSwitch 3"),
    "collective_startup_s": FactHint("start of a collective [s]: all_reduce_perf -b 8 on two GPUs", ""),
}
"""Every fact of a node, communicators and measured collectives apart."""
PARTS_OF_A_NODE = """\
# A part of a node that shares a way to the rest, smallest first: a PCIe switch's uplink, a socket (nvidia-smi topo -m).
# shared:
# - {name: uplink of a PCIe switch, gpus: 2, bandwidth_bytes_per_s: 32 GB/s}
# - {name: link between the sockets, gpus: 4, bandwidth_bytes_per_s: 60 GB/s}
# A faster link over pairs of GPUs, where intra is PCIe: NVLink bridges (NV# in nvidia-smi topo -m).
# bridge:
#   name: NVLink bridges over a pair
#   gpus: 2
#   bandwidth_bytes_per_s: 300 GB/s
#   efficiency: 0.77
#   all_to_all_efficiency: 0.77
#   latency_s: 3 us
"""
TIERS = """\
  # Tiers of the network from below: GPUs that reach each other without leaving one, and what comes in over what leaves.
  # tiers:
  # - {name: leaf, gpus: 256, oversubscription: 1}
  # - {name: spine, gpus: 2048, oversubscription: 2}
"""


def gpu_template(like: str) -> str:
    """A GPU's YAML text to fill in, like a bundled one.

    Examples
    --------
    >>> [line for line in gpu_template("h100-sxm").splitlines() if line.startswith("num_sms")][0][:12]
    'num_sms: ???'
    """
    raw = expanded_profile("gpus", like)
    lines = [
        f"# A GPU like {like}: write a value in place of each {UNFILLED}, or leave out a line that is as {like}'s.",
        "# Curves are rescaled by these facts and assumed, until mofa calibrate run measures them.",
        "# Check it by mofa show hardware FILE; a node names it by its file's name (mofa new node).",
        f"name: {UNFILLED}  # as the file, without .yaml",
        f"like: {like}",
        f"source: {UNFILLED}  # the datasheet that the values below are from; one may also be a mapping, as {like}'s:",
        "# memory_bytes: {value: 80 GiB, provenance: measured, source: nvidia-smi of node 1}",
        *_lines(raw, GPU_HINTS, like),
        "# What large products reach over those of the GPU above, where one program measured both; in place of peaks:",
        "# rates_over_like:",
        f"#   bf16: {{value: 0.96, provenance: transferred, source: mamf-finder on this and on {like}}}",
    ]
    return "\n".join(lines) + "\n"


def node_template(like: str, gpu: str | None = None) -> str:
    """A node's YAML text to fill in, like a bundled one; with the name of its GPU where that is known.

    Examples
    --------
    >>> "num_per_node: ???" in node_template("h100-hgx")
    True
    """
    raw = expanded_profile("nodes", like)
    lines = [
        f"# A node like {like}: write a value in place of each {UNFILLED}, or leave out a line that is as {like}'s.",
        f"# Collectives that were measured on {like} are rescaled by the link; mofa calibrate nccl puts yours in.",
        f"name: {UNFILLED}  # of the node",
        f"like: {like}",
        f"gpu: {gpu or UNFILLED}  # bundled (mofa show hardware), or a file's name beside this; {like}: {raw['gpu']}",
        f"source: {UNFILLED}  # the datasheet or the order that the values below are from",
        *_lines({key: raw[key] for key in raw if key != "gpu"}, NODE_HINTS, like),
    ]
    return "\n".join(lines) + "\n"


def _lines(raw: Facts, hints: Mapping[str, FactHint], like: str) -> Iterator[str]:
    group = ""
    for path, hint in hints.items():
        head, _, field = path.rpartition(".")
        if head != group:
            if group == "nic":
                yield from TIERS.splitlines()
            if head == "nic":
                yield from PARTS_OF_A_NODE.splitlines()
                yield from _parts_of(raw, like)
            if head:
                yield f"{head}:"
            group = head
        known = raw.get(head, {}).get(field) if head else raw.get(field)
        yield from _line(field, known, hint, like, "  " if head else "")


def _parts_of(raw: Facts, like: str) -> Iterator[str]:
    """What the profile has of parts that a node may lack, and how a file says that its node has none."""
    shared = [f"{link['name']} ({link['gpus']} GPUs, {_shown(link['bandwidth_bytes_per_s'])})"
              for link in raw.get("shared") or ()]  # fmt: skip
    if shared:
        yield f"# {like} has {', '.join(shared)}; write shared: [] if yours has none."
    if bridge := raw.get("bridge"):
        yield f"# {like} has {bridge['name']} ({_shown(bridge['bandwidth_bytes_per_s'])}); write bridge: null if not."


def _line(field: str, known: object, hint: FactHint, like: str, indent: str) -> Iterator[str]:
    """One fact: to be written, or as it is in the profile that it is like, as a comment."""
    if isinstance(known, Mapping) and "value" not in known:  # a table by format
        yield f"{indent}{field}:  # {hint.meaning}"
        for key, fact in known.items():
            yield f"{indent}  {key}: {UNFILLED}  # {like}: {_shown(fact)}"
    elif hint.default is None:
        example = "" if known is None else f"; {like}: {_shown(known)}"
        yield f"{indent}{field}: {UNFILLED}  # {hint.meaning}{example}"
    else:
        yield f"{indent}# {field}: {hint.default if known is None else _shown(known)}  # {hint.meaning}"


def _shown(fact: object) -> str:
    value = fact["value"] if isinstance(fact, Mapping) else fact
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return str(text).removesuffix("\n").removesuffix("\n...")
