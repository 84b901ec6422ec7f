"""Why Megatron-Core captures no CUDA graphs of a model, or with a recomputation: its own asserts, and what mofa lacks.

Lines are those of megatron_core 0.16.1, transformer/transformer_config.py, unless another file is named. That a full
iteration is no scope of Transformer Engine's (1739) the option's text cannot say. Offloading to the host (1722) and
overlapped exchanges of experts (1898) are refused by their own options.
"""

from __future__ import annotations

from mofa.specs.cuda_graphs import CudaGraphs
from mofa.specs.framework import FrameworkSpec
from mofa.specs.model import ModelSpec
from mofa.specs.routing import RoutingSpec
from mofa.specs.strategy import RecomputeSpec

OF_EXPERTS = "te:attn+moe_router+moe_preprocess"


def why_not_captured(
    framework: FrameworkSpec, model: ModelSpec, routing: RoutingSpec, spec: RecomputeSpec, *, pp: int = 1
) -> str | None:
    """Why a framework's graphs cannot be captured, and what to do; None where they can, or where there are none.

    Parameters
    ----------
    routing
        Whose capacity of rows makes experts' shapes known.
    spec
        The layers' recomputation.
    pp
        Pipeline stages. [-]
    """
    graphs = framework.graphs
    if not graphs.captures_any:
        return None
    said = f"cuda_graphs ({graphs})"
    return (
        _by_scope(said, graphs, framework, model, routing)
        or _by_recompute(said, graphs, framework, model, spec)
        or _not_modelled(said, graphs, framework, routing, spec, pp)
    )


def _by_scope(
    said: str, graphs: CudaGraphs, framework: FrameworkSpec, model: ModelSpec, routing: RoutingSpec
) -> str | None:
    scope, moe = graphs.scope, model.moe
    if "moe" in scope and "moe_router" in scope:  # 1743
        return f"{said}: moe holds the router too; name one of moe and moe_router"
    if "moe_preprocess" in scope and "moe_router" not in scope:  # 1747
        return f"{said}: moe_preprocess is captured with moe_router alone; add moe_router"
    if moe is None:
        if {"moe", "moe_router", "moe_preprocess"} & set(scope):  # 1752
            return f"{said}: {model.name} has no experts; use te, or te: with attn and mlp"
        return None
    if "mlp" in scope and not model.num_dense_layers:  # 1759
        return f"{said}: every layer of {model.name} has experts, and mlp is of dense ones; leave mlp out"
    if routing.pad_to_capacity:  # drop_and_pad: shapes are known, and no host asks for them
        return None
    if "moe" in scope:  # 1768
        return f"{said}: moe is captured with experts padded to a capacity alone; use {OF_EXPERTS}"
    if graphs.whole_layers or graphs.full_iteration:  # moe/token_dispatcher.py, 862: an event waited for, captured
        return (
            f"{said}: a layer's host waits for its experts' numbers of rows, which no graph can hold; use {OF_EXPERTS}"
        )
    dropping = routing.capacity_factor is not None
    if "moe_preprocess" in scope and framework.dispatcher == "alltoall" and (dropping or framework.router_padding):
        # 1771; padding by moe_router_padding_for_quantization is not asserted, and waits all the same (516)
        what = "a capacity of rows" if dropping else "router_padding"
        return f"{said}: with {what} the host waits within moe_preprocess; leave moe_preprocess out"
    return None


def _by_recompute(
    said: str, graphs: CudaGraphs, framework: FrameworkSpec, model: ModelSpec, spec: RecomputeSpec
) -> str | None:
    if spec.kind == "none":
        return None
    if spec.kind != "selective":  # 1783
        return (
            None
            if graphs.full_iteration
            else (
                f"{said}: recompute {spec.text} is captured in a full iteration alone; use recompute=selective or "
                "none, or cuda_graphs: local:full_iteration"
            )
        )
    if graphs.implementation == "te" and "moe" in spec.modules and "moe_router" in graphs.scope:  # 1788
        return f"{said}: a checkpoint around moe would hold moe_router's graph; leave moe out of recompute"
    dropped = [m for m in spec.modules if _draws_in_graph(graphs, m)] if model.dropout else []
    if dropped:  # 1805, 1812
        return f"{said}: {dropped[0]} is computed again in a graph, with dropout; leave it out of recompute"
    return _by_norm(said, graphs, framework, spec)


def _draws_in_graph(graphs: CudaGraphs, module: str) -> bool:
    parts = {"core_attn": "attn", "mlp": "mlp", "moe": "moe"}
    holds_all = graphs.whole_layers or graphs.full_iteration
    return module in parts and (holds_all or parts[module] in graphs.scope)


def _by_norm(said: str, graphs: CudaGraphs, framework: FrameworkSpec, spec: RecomputeSpec) -> str | None:
    """transformer_layer.py, 387: Megatron leaves the norm before the experts alone with a warning."""
    is_discarded = "moe_preprocess" in graphs.scope and framework.dispatcher == "alltoall"
    if "layernorm" in spec.modules and "moe_router" in graphs.scope and not is_discarded:
        return (
            f"{said}: the norm before the router's graph is not computed again then; add moe_preprocess with "
            "dispatcher: alltoall, or leave layernorm out of recompute"
        )
    return None


def _not_modelled(
    said: str, graphs: CudaGraphs, framework: FrameworkSpec, routing: RoutingSpec, spec: RecomputeSpec, pp: int
) -> str | None:
    others = {
        "launch_blocking": framework.launch_blocking,
        f"routed_copies: {framework.routed_copies}": framework.routed_copies != "materialised",
        "rank_capacity_factor": routing.rank_capacity_factor is not None,
        f"token_chunks ({spec.token_chunks})": spec.token_chunks > 1,
        f"expert_overlap: {framework.expert_overlap}": framework.expert_overlap != "none",  # 1898 allows te without mlp
        "shared_expert_overlap": framework.shared_expert_overlap,
        f"pp ({pp}) of a full iteration": graphs.full_iteration and pp > 1,
    }
    named = [name for name, is_on in others.items() if is_on]
    return f"{said} is not modelled with {named[0]}; leave one of them out" if named else None
