"""CUDA graphs are refused where Megatron-Core 0.16.1 asserts against them, and where its host would wait in one.

Every case names its line of megatron/core/transformer/transformer_config.py, or of another file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mofa.blocks.frameworks.megatron.graph_legality import why_not_captured
from mofa.search.legality.masks import CHECKS, JobAndMachines, check_strategies
from mofa.search.space import combinations_of_space, default_space
from mofa.specs.model import ModelSpec
from mofa.specs.routing import RoutingSpec
from mofa.specs.strategy import RecomputeSpec
from tests.cost.toy import EXPERTS, cluster, framework, llama, moe_llama, workload

DENSE, MOE = llama(num_layers=4), moe_llama(num_layers=4)
SOME_DENSE = moe_llama(num_layers=4, moe={**EXPERTS, "first_k_dense": 1})
DROPPING = RoutingSpec(capacity_factor=1.5)
PADDED = RoutingSpec(capacity_factor=1.5, pad_to_capacity=True)


def why(
    graphs: str, model: ModelSpec = DENSE, recompute: str = "none", routing: RoutingSpec | None = None, *,
    pp: int = 1, token_chunks: int = 1, **options: Any,
) -> str:  # fmt: skip
    spec = RecomputeSpec.parse(recompute).model_copy(update={"token_chunks": token_chunks})
    fw = framework("megatron", cuda_graphs=graphs, **options)
    return why_not_captured(fw, model, routing or RoutingSpec(), spec, pp=pp) or ""


LEGAL: list[dict[str, Any]] = [
    {"graphs": "none", "model": MOE, "recompute": "full"},
    {"graphs": "local"},
    {"graphs": "local", "recompute": "selective:mlp"},
    {"graphs": "te", "recompute": "selective:core_attn+mlp"},
    {"graphs": "te:attn+mlp"},
    {"graphs": "local:full_iteration", "recompute": "full"},
    {"graphs": "te:attn+mlp", "model": SOME_DENSE},
    {"graphs": "te:attn", "model": MOE, "recompute": "selective:moe"},
    {"graphs": "te:attn+moe_router+moe_preprocess", "model": MOE},
    {"graphs": "te:moe_router+moe_preprocess", "model": MOE, "recompute": "selective:layernorm"},
    {"graphs": "te:attn+moe_router", "model": MOE, "routing": DROPPING},
    {"graphs": "local", "model": MOE, "routing": PADDED},
    {"graphs": "te", "model": MOE, "routing": PADDED},
    {"graphs": "te:attn+moe", "model": MOE, "routing": PADDED},
    {"graphs": "local:full_iteration", "model": MOE, "routing": PADDED},
    {"graphs": "te:attn", "model": llama(num_layers=4, dropout=0.1), "recompute": "selective:mlp"},
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("1743", {"graphs": "te:moe+moe_router", "model": MOE}, "moe holds the router too"),
    ("1747", {"graphs": "te:moe_preprocess", "model": MOE}, "add moe_router"),
    ("1752", {"graphs": "te:moe_router"}, "has no experts"),
    ("1752", {"graphs": "te:moe"}, "has no experts"),
    ("1759", {"graphs": "te:attn+mlp", "model": MOE}, "leave mlp out"),
    ("1768", {"graphs": "te:moe", "model": MOE}, "padded to a capacity"),
    ("1768", {"graphs": "te:moe", "model": MOE, "routing": DROPPING}, "padded to a capacity"),
    ("1771", {"graphs": "te:moe_router+moe_preprocess", "model": MOE, "routing": DROPPING}, "a capacity of rows"),
    ("1771", {"graphs": "te:moe_router+moe_preprocess", "model": MOE, "router_padding": True}, "router_padding"),
    ("1783", {"graphs": "te", "recompute": "full"}, "in a full iteration alone"),
    ("1783", {"graphs": "local", "recompute": "full:2"}, "in a full iteration alone"),
    ("1788", {"graphs": "te:moe_router", "model": MOE, "recompute": "selective:moe"}, "leave moe out of recompute"),
    ("1805", {"graphs": "te", "model": llama(num_layers=4, dropout=0.1), "recompute": "selective"}, "core_attn"),
    ("1812", {"graphs": "te:mlp", "model": llama(num_layers=4, dropout=0.1), "recompute": "selective:mlp"}, "mlp"),
    ("moe/token_dispatcher.py 862", {"graphs": "te", "model": MOE}, "no graph can hold"),
    ("moe/token_dispatcher.py 862", {"graphs": "local", "model": MOE}, "no graph can hold"),
    ("moe/token_dispatcher.py 862", {"graphs": "local:full_iteration", "model": MOE}, "no graph can hold"),
    ("moe/token_dispatcher.py 862", {"graphs": "local", "model": SOME_DENSE}, "no graph can hold"),
    (
        "transformer_layer.py 387",
        {"graphs": "te:moe_router", "model": MOE, "recompute": "selective:layernorm"},
        "the norm before the router",
    ),
    ("not modelled", {"graphs": "local:full_iteration", "pp": 2}, r"pp \(2\) of a full iteration"),
    ("not modelled", {"graphs": "te:attn", "model": MOE, "token_chunks": 2}, "token_chunks"),
]


@pytest.mark.parametrize("case", LEGAL, ids=str)
def test_what_no_assert_is_against_is_captured(case: dict[str, Any]) -> None:
    assert why(**case) == ""


@pytest.mark.parametrize(
    ("line", "case", "said"), REFUSED, ids=[f"{line} {case['graphs']}" for line, case, _ in REFUSED]
)
def test_what_the_source_refuses_is_refused_with_what_to_do(line: str, case: dict[str, Any], said: str) -> None:
    text = why(**case)
    assert said.replace("\\", "") in text, line
    assert text.startswith(f"cuda_graphs ({case['graphs']})") and "; " in text


def test_a_search_masks_what_cannot_be_captured_by_name() -> None:
    job = JobAndMachines(
        workload(DENSE, seq_len=1024, global_batch=64), cluster(8), framework("megatron", cuda_graphs="te")
    )
    table = combinations_of_space(default_space(job.workload, job.cluster, job.framework), job.cluster, job.framework)
    verdict = check_strategies(job, table)
    number = [check.reason for check in CHECKS].index("cuda_graphs")
    modes = table.degrees.recompute_modes
    full = np.array([modes[number].kind == "full" for number in table.recompute])
    by_mode = verdict.reason.reshape(-1, len(table.recompute))
    assert full.any() and (by_mode == number).any()
    assert not ((by_mode == -1) & full).any()
    assert ((by_mode == -1) & ~full).any()
