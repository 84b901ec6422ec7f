"""Which kinds of context parallelism a framework's attention has, and what to do where it lacks one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.specs.framework import FrameworkSpec
from mofa.specs.model import ModelSpec
from mofa.specs.strategy import CP_KINDS, StrategyTable

FloatN = NDArray[np.float64]
RING, A2A = CP_KINDS.index("ring"), CP_KINDS.index("a2a")
"""Values of ``StrategyTable.cp_kind``."""


def context_parallel_excess(model: ModelSpec, framework: FrameworkSpec, table: StrategyTable) -> FloatN:
    """Ranks of context parallelism above one where the framework cannot run it, 0 where it can. (n,)

    Transformer Engine exchanges whole heads only, of queries and of keys and values. It has no ring under a window;
    with sinks it has the exchange of heads alone (2.20.2, context_parallel.py, ``attn_forward_func_with_cp``
    and ``AttnFuncWithCPAndQKVOA2A``). torchtitan has neither windows nor sinks under context parallelism
    (gpt_oss/model/args.py).
    """
    a, alone = model.attention, np.asarray(table.cp - 1, dtype=float)
    if not framework.traits.has_context_parallelism:
        return alone
    a2a, plain = table.cp_kind == A2A, a.window is None and not a.sinks
    if framework.traits.has_pytorch_modules:
        return np.where(a2a | (not plain), alone, 0.0)
    refused = a2a & (_uneven(model, table) > 0)
    if a.sinks:
        refused |= ~a2a
    elif not plain:
        refused |= table.cp_kind == RING
    return np.where(refused, alone, 0.0)


def _uneven(model: ModelSpec, table: StrategyTable) -> NDArray[np.int64]:
    """Remainder of a tensor-parallel rank's heads, or key-value heads, divided by cp. (n,) [heads]"""
    a = model.attention
    heads, kv_heads = (np.maximum(n // table.tp, 1) for n in (a.num_heads, a.num_kv_heads))
    return np.asarray(heads % table.cp + kv_heads % table.cp)


def context_parallel_message(model: ModelSpec, framework: FrameworkSpec, table: StrategyTable) -> str:
    """Message for a table of one row: why it cannot have its context parallelism, and what to do."""
    a = model.attention
    if not framework.traits.has_context_parallelism:
        return "needs Transformer Engine's attention; use framework megatron or cp=1"
    if framework.traits.has_pytorch_modules:
        if int(table.cp_kind[0]) == A2A:
            return "has no exchange of heads (cp_kind=a2a); use cp_kind=allgather"
        return "does not run with windows or sinks; use cp=1"
    if int(table.cp_kind[0]) == A2A:
        heads, kv_heads = (max(n // int(table.tp[0]), 1) for n in (a.num_heads, a.num_kv_heads))
        return (
            f"must divide a rank's heads ({heads}) and key-value heads ({kv_heads}) where they are exchanged "
            "(cp_kind=a2a); use a smaller cp or tp, or another cp_kind"
        )
    if a.sinks:
        return "runs attention with sinks by all-to-all over heads alone; use cp_kind=a2a"
    return "runs windowed attention by all-gather or all-to-all over heads; use cp_kind=allgather or a2a"
