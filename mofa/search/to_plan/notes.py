"""Notes of a plan: what its numbers assume or leave out, and which facts they rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mofa.blocks.moeblaze import routed_copies_bytes
from mofa.cost.host_optimizer import host_adam_bytes_per_s, optimizer_host_bytes_of_node
from mofa.routing.scheduled import token_scheduling_host_s
from mofa.search.to_plan.fp8_notes import fp8_notes
from mofa.search.to_plan.graph_notes import graph_notes
from mofa.search.to_plan.step_band import HOST_BOUND
from mofa.specs.framework import FrameworkSpec
from mofa.specs.framework_names import RANK_ORDERS
from mofa.specs.hardware import ClusterSpec
from mofa.specs.model import ModelSpec
from mofa.specs.optimizer_offload import ADAM_MOVED_BYTES
from mofa.specs.residuals import load_closed_form_residuals, load_residuals
from mofa.specs.routing import RoutingSpec
from mofa.specs.strategy import StrategyTable
from mofa.specs.workload import WorkloadSpec
from mofa.units import format_bytes, format_seconds


def host_notes(cluster: ClusterSpec, step_s: float, host_idle_s: float) -> tuple[str, ...]:
    """Note on the host that a host-bound step rests on."""
    if host_idle_s <= HOST_BOUND * step_s:
        return ()
    host, hosts = cluster.gpu.curves.host, cluster.gpu.curves.hosts
    share = host_idle_s / step_s
    pace = host.eager_op_s.value
    fast, slow = (pace, pace) if hosts is None else (times.value * pace for times in (hosts.fast, hosts.slow))
    undisturbed = hosts is not None and cluster.node.hosts == "own"
    note = f"the device waits for its host {share:.0%} of the step, at {_us(fast if undisturbed else pace)} a small op"
    if hosts is not None:
        whose = "an undisturbed machine's" if undisturbed else "the median of machines that were timed"
        note += f", {whose} (8 in 10 timed: {_us(fast)} to {_us(slow)}); `mofa calibrate run --families "
        note += "host` times yours, --host-issue says it"
    return (note,)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.2g} us"


def _routing_note(routing: RoutingSpec) -> str:
    """Note on the source of the ranks' loads."""
    note = f"routing: {routing}"
    if routing.kind == "preset":
        note += " (assumed: reconstructed from three statistics of each layer)"
    if routing.capacity_factor is not None:
        padded = ", padded" if routing.pad_to_capacity else ""
        note += f"; tokens beyond {routing.capacity_factor:g} x an even share dropped{padded}"
    if routing.rank_capacity_factor is not None:
        note += f"; ranks compute on {routing.rank_capacity_factor:g} x an even share, steps with more run again"
    return note


def token_scheduling_note(workload: WorkloadSpec, row: StrategyTable) -> tuple[str, ...]:
    """Note on what token scheduling over replicas assumes."""
    if workload.model.moe is None or not row.balancing[0]:
        return ()
    overhead = format_seconds(token_scheduling_host_s(workload.model.moe.num_experts))
    note = (
        f"balancing micro_moe: {overhead} of host time a layer and micro-batch (the solve measured on one core, the "
        "rest of the dispatch as published: MicroMoE, figure 9), not overlapped; symmetric placement"
    )
    return (note,)


def dispatch_by_index_note(workload: WorkloadSpec, framework: FrameworkSpec, row: StrategyTable) -> tuple[str, ...]:
    """Note on the memory that MoEBlaze's dispatch by index saves; none where copies of tokens are made."""
    model = workload.model
    shared = int(row.ep[0]) * int(row.etp[0]) > 1
    if model.moe is None or framework.routed_copies == "materialised" or shared:
        return ()
    tokens = float(row.micro_batch[0]) * workload.batch.seq_len / float(row.cp[0])
    tokens /= float(row.tp[0]) if bool(row.sp[0]) else 1.0
    saved = format_bytes(float(routed_copies_bytes(tokens, model.moe.top_k, model.hidden)))
    return (
        (
            f"dispatch by index (MoEBlaze): no routed copies, {saved} each into and out of the experts of a layer and "
            "micro-batch; the time gained is of bytes not moved: a model, no measurement"
        ),
    )


def untested_option_notes(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, row: StrategyTable
) -> tuple[str, ...]:
    """Notes on options that no run of ours has shown."""
    notes = []
    if framework.tp_overlap and int(row.tp[0]) > 1:
        notes.append(
            "tp_overlap: as read in Transformer Engine's source, judged by published rows alone (docs/published.md); "
            "its user buffers ask the launch for a set-up of their own; --without tp_overlap leaves it out"
        )
    notes += graph_notes(cluster, framework)
    if framework.expert_overlap == "combined":
        notes.append(
            "expert_overlap: as read in Megatron-Core's source, shown by no run of ours; the few published rows with "
            "it are told too fast (docs/evidence/expert_overlap.md)"
        )
    if framework.rank_order != RANK_ORDERS[0]:
        notes.append(f"ranks are numbered {framework.rank_order} over the nodes, where {RANK_ORDERS[0]} is usual")
    if workload.model.moe is not None and framework.dispatcher == "deepep":
        rate = cluster.node.intra.deepep_efficiency
        said = "an all-to-all's of NCCL" if rate is None else f"{rate.provenance}: {rate.source}"
        notes.append(f"dispatcher deepep: its rate inside a node is {said}; --without dispatcher leaves it out")
    if framework.optimizer_offload:
        notes.append(_offload_note(workload, cluster, framework))
    if framework.offloaded_activations.offloads_any:
        link = cluster.gpu.host_link_bytes_per_s
        notes.append(
            f"activation_offload {framework.activation_offload}: each GPU has its link to the host to itself "
            f"({link.value / 1e9:.3g} GB/s a direction, {link.provenance}); the numerics stay "
            "(docs/evidence/activation_offload.md)"
        )
    return tuple(notes)


def _offload_note(workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec) -> str:
    """Note on what hosts hold of the optimizer, and on the threads that step it."""
    host = cluster.gpu.curves.host.optimizer
    assert host is not None
    held_bytes = format_bytes(optimizer_host_bytes_of_node(workload, cluster, framework))
    threads, ranks = framework.host_threads, min(cluster.num_gpus, cluster.node.gpus_per_node)
    rate = host_adam_bytes_per_s(cluster, threads, host) / ADAM_MOVED_BYTES
    return (
        f"hosts hold and step {framework.optimizer_offload:.0%} of the optimizer: {held_bytes} of a node's memory; "
        f"{threads} thread{'s' * (threads > 1)} of each of {ranks} ranks (OMP_NUM_THREADS={threads}) step "
        f"{rate / 1e9:.2g} billion parameters a second ({host.thread_bytes_per_s.provenance} on one machine's host), "
        "as long as a node has cores for them"
    )


def unmeasured_model_notes(model: ModelSpec, framework: FrameworkSpec) -> tuple[str, ...]:
    """Notes on facts of the model whose ops no run of ours has; runs te1-* have some on Transformer Engine."""
    a, is_measured = model.attention, framework.library is not None
    facts = {
        f"{model.mlp.activation} activations": model.mlp.activation not in ("swiglu", "gelu") and not is_measured,
        "norms behind each branch": model.norm_placement == "after",
        "norms before and behind each branch": model.norm_placement == "both",
        "parallel branches": model.parallel_branches,
        "soft caps of logits": model.logit_softcap,
        f"multiplied {' and '.join(model.multipliers)}": bool(model.multipliers),
        "norms of all heads at once": a.qk_norm and a.qk_norm_kind == "full",
        "norms of heads without weights": a.qk_norm and a.qk_norm_kind == "unweighted" and not is_measured,
        "attention within chunks": a.chunked,
        "layers without a rotary embedding": bool(a.nope_every) and not is_measured,
        "a bias of the output layer": model.head_bias,
        "heads of values of another width": "attention.v_head_dim" in model.uncommon_facts,
    }
    names = [name for name, has in facts.items() if has]
    notes = []
    if names:
        notes.append(f"{', '.join(names)}: costed by what their kernels move, not shown by a run of ours")
    if a.softcap:
        notes.append("soft caps of scores: inside the attention kernel, taken to cost nothing there")
    if framework.traits.has_pytorch_modules and model.moe is not None and model.moe.shared_gate:
        notes.append(
            f"{framework.name}'s models have no gate of shared experts: the step is predicted without it, and its "
            "weights are counted"
        )
    return tuple(notes)


def alignment_note(sizes: Mapping[int, Sequence[str]]) -> tuple[str, ...]:
    """Note on matrix products whose sizes are slower on tensor cores than predicted."""
    if not sizes:
        return ()
    named = "; ".join(f"{size} of {', '.join(names)}" for size, names in sizes.items())
    note = (
        f"matrix products with a width or depth of no multiple of 16 bytes (8 elements of bf16): {named}; "
        "tensor cores are slower on them (NVIDIA, Matrix Multiplication Background). In bf16 they are predicted to "
        "take 3 to 8 times as long as padded ones, as measured on the H200; of experts that is left out"
    )
    return (note,)


def closed_form_margin_note(framework: FrameworkSpec, pp: int) -> tuple[str, ...]:
    """What a closed form leaves free for memory that only a replay knows."""
    more = load_closed_form_residuals().reserved_memory_residual(framework.name, pp)
    return (f"the margin has {more.value:.1%} of the reserved memory more, as no replay follows: {more.source}",)


def notes_of_every_plan(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, played: bool
) -> tuple[str, ...]:
    """Notes of every plan: its margin of memory, its GPU's capacity, its framework and its routing."""
    reserved = "reserved memory: rounding, other streams' pools, the loss's largest tensor; no other fragmentation"
    if played:
        reserved = "memory: every allocation, until steps repeat, played through PyTorch's caching allocator"
    margin = load_residuals().memory_margin(framework.graphs)
    rocm = "ROCm: collectives are RCCL's, by the node's links; kernels are those of the GPU that the profile is like"
    notes = [
        f"memory margin of {margin.value:.1%} of the capacity, {margin.provenance}: {margin.source}",
        f"capacity {cluster.gpu.capacity_bytes.provenance}: {cluster.gpu.capacity_bytes.source}",
        *cluster.gpu.slow_curve_notes,
        *((rocm,) if cluster.gpu.software == "rocm" else ()),
        f"{framework.name} {framework.version}: {framework.provenance} in {framework.source}",
        reserved,
    ]
    if framework.pytorch:
        own = framework.pytorch in cluster.gpu.curves.releases
        which = "as measured" if own else f"not measured on {cluster.gpu.name}, today's are taken"
        notes.append(f"kernels of PyTorch {framework.pytorch}: {which}")
    if not framework.traits.has_pytorch_modules and framework.cross_entropy_fusion == "native":
        notes.append(
            "cross_entropy_fusion: native, as true is read, is Megatron's own fused loss; te is Transformer Engine's"
        )
    if workload.model.moe is not None:
        notes.append(_routing_note(workload.routing))
    return (*notes, *fp8_notes(workload, cluster, framework), *(workload.notes or ()))
