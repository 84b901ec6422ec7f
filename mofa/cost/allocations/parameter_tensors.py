"""The parameter tensors of a stage, in the order of its modules, and what of them a rank's optimizer owns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mofa.blocks.elementwise import value_of_combination
from mofa.blocks.op import Op
from mofa.blocks.roles import Purpose
from mofa.cost.rank_rules import BUCKET_PER_RANK, SMALLEST_BUCKET
from mofa.cost.rank_spec import BlockRole, RankSpec
from mofa.specs.framework import FrameworkSpec
from mofa.specs.params import layer_parameter_tensors
from mofa.specs.workload import WorkloadSpec

ENDS: tuple[Purpose, ...] = ("embedding", "output")
"""Purposes of the weights at the model's ends."""
ALIGNED_PARAM, ALIGNED_BUCKET = 64, 128
"""Parameters that Megatron's buffers align each tensor and each bucket to (param_and_grad_buffer.py)."""


class BlockWeight(NamedTuple):
    """A weight of a block. [params]"""

    name: str
    params: float
    of_experts: bool = False
    purpose: Purpose = ""
    """As of the :class:`mofa.blocks.op.Op` that has it."""


class RankModule(NamedTuple):
    """What runs as one on a rank: its name, its role, and its weights."""

    name: str
    role: BlockRole
    weights: tuple[BlockWeight, ...]


class ParameterTensor(NamedTuple):
    """A parameter tensor of a rank before data parallelism. [params]"""

    name: str
    params: float
    chunk: int
    expert: bool = False
    flat: bool = False
    """Of one dimension: norms and biases, which Megatron's optimizer holds in a group of their own."""
    shared: bool = False
    """An embedding that another pipeline stage holds too: Megatron gives it a bucket of its own."""
    module: str = ""
    """Name of what it is part of."""
    purpose: Purpose = ""
    """As of its :class:`BlockWeight`."""


def block_weights(ops: Iterable[Op], combination: int) -> tuple[BlockWeight, ...]:
    """Every weight of a combination with its parameters, in order; one that several ops read (token chunks) once.
    [params]"""
    readers: dict[str, Op] = {}
    for op in ops:
        if value_of_combination(op.weight_params, combination) > 0:
            readers.setdefault(op.weight or op.name, op)
    return tuple(
        BlockWeight(
            name,
            value_of_combination(op.weight_params, combination)
            / max(value_of_combination(op.num_weights, combination), 1.0),
            op.part == "experts",
            op.purpose,
        )
        for name, op in readers.items()
        for _ in range(max(int(value_of_combination(op.num_weights, combination)), 1))
    )


def parameter_tensors_of_rank(
    workload: WorkloadSpec, framework: FrameworkSpec, spec: RankSpec, chunks: Sequence[Sequence[RankModule]]
) -> tuple[ParameterTensor, ...]:  # fmt: skip
    """A rank's parameters in the order of its modules.

    What no op of a tape names (norms, biases) is spread over the layers in as many tensors as these have more; a
    learned position embedding is one. Megatron registers the output projection of attention before the others, and
    of sequential experts each one's matrices in turn (transformer/attention.py, moe/experts.py).
    """
    megatron, model = spec.gradients.has_flat_buffers, workload.model
    lone = model.tied_embeddings and spec.place.pp > 1
    named: list[tuple[RankModule, int, list[ParameterTensor]]] = []
    once: set[str] = set()  # a prediction's embedding and output are the model's, where the rank holds those
    for c, chunk in enumerate(chunks):
        for piece in chunk:
            weights = tuple(weight for weight in piece.weights if weight.name not in once)
            once |= {weight.name for weight in weights if weight.purpose in ENDS}
            if megatron:
                weights = _in_order(weights, sequential=framework.experts == "sequential")
            params = [
                ParameterTensor(
                    f"{piece.name} {weight.name}", weight.params, c, weight.of_experts, weight.purpose == "norm",
                    lone and weight.purpose in ENDS, piece.name, weight.purpose,
                )
                for weight in weights
                if weight.params and not (spec.gradients.ties_ends and weight.purpose == "output")
            ]  # fmt: skip
            named.append((piece, c, params))
    rest = spec.parameters.total - sum(p.params for _, _, params in named for p in params)
    positions = (model.max_positions or 0) * model.hidden if model.positions == "learned" else 0
    layers = [n for n, (piece, _, _) in enumerate(named) if piece.role == "layer"]
    out: list[ParameterTensor] = []
    for n, (piece, c, params) in enumerate(named):
        out += params
        if positions and piece.role == "embedding":
            own = min(float(positions), rest)
            rest -= own
            out.append(ParameterTensor(f"{piece.name} positions", own, c))
        elif n in layers and rest > 0:
            experts = any(p.expert for p in params)
            number = max(
                layer_parameter_tensors(model, experts, packed=megatron)[0] - sum(not p.expert for p in params), 1
            )
            each = rest / (len(layers) * number)
            out += [ParameterTensor(f"{piece.name} norms and biases", each, c, flat=True)] * number
    return tuple(p for p in out if p.params >= 1)


def _in_order(weights: tuple[BlockWeight, ...], *, sequential: bool) -> tuple[BlockWeight, ...]:
    """A block's weights as Megatron's modules register them."""
    first = [w for w in weights[:1] if w.purpose == "norm"]
    rest = weights[len(first) :]
    moved = [w for w in rest if w.purpose == "attention_output"]
    rest = tuple(w for w in rest if w.purpose != "attention_output")
    experts = [w for w in rest if w.of_experts]
    if not experts or not sequential:
        return (*first, *moved, *rest)
    first_expert = rest.index(experts[0])
    kinds = [[w for w in experts if w.name == name] for name in dict.fromkeys(w.name for w in experts)]
    by_expert = [w for of_expert in zip(*kinds, strict=True) for w in of_expert]
    return (
        *first,
        *moved,
        *rest[:first_expert],
        *by_expert,
        *(w for w in rest[first_expert:] if not w.of_experts),
    )


def optimizer_owned_params(
    framework: FrameworkSpec, spec: RankSpec, params: Sequence[ParameterTensor], data_rank: int
) -> list[float]:
    """Of each parameter what a rank of Megatron's distributed optimizer steps: of its buffers each owns another part,
    whatever tensors that cuts, so that most tensors are some rank's whole. [params]

    Parameters
    ----------
    data_rank
        Which of the ranks that hold the same parameters.
    """
    place = spec.place
    own = [0.0] * len(params)
    # ranks between two of the same experts' replicas
    number = place.dense_ranks * place.tensor_ranks // max(place.expert_ranks, 1) or 1
    for buffer in megatron_buffers_of_rank(framework, spec, params):
        ranks = place.expert_ranks if buffer.expert else place.dense_ranks
        rank = data_rank * place.tensor_ranks // number if buffer.expert else data_rank
        for n, size in optimizer_owned_fractions(buffer, ranks, rank % ranks).items():
            own[n] = size
    return own


@dataclass(frozen=True)
class BucketedBuffer:
    """A buffer of Megatron's data parallelism: which parameters it holds, and where. [params]

    ``places`` has the first and last index of each, ``buckets`` the first of each bucket and the buffer's end.
    """

    expert: bool
    chunk: int
    members: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    buckets: tuple[int, ...]


def megatron_buffers_of_rank(
    framework: FrameworkSpec, spec: RankSpec, params: Sequence[ParameterTensor]
) -> tuple[BucketedBuffer, ...]:
    """Megatron's buffers: of each chunk one for what all ranks hold, and one for experts under expert parallelism.

    Parameters lie from the last to the first. Where reductions overlap, the first stage's first chunk is cut into
    buckets (distributed_data_parallel.py, param_and_grad_buffer.py).
    """
    chunks, place = sorted({p.chunk for p in params}), spec.place
    split = place.splits_experts or place.dense_ranks != place.expert_ranks
    out = []
    for c in chunks:
        bucket = math.inf
        if framework.overlap_grad_reduce and place.data_ranks > 1 and place.pipeline_rank == 0 and c == 0:
            bucket = max(SMALLEST_BUCKET, BUCKET_PER_RANK * place.data_ranks)
        for experts in (False, True) if split else (False,):
            members = [n for n, p in enumerate(params) if p.chunk == c and (p.expert and split) is experts][::-1]
            if members:
                ranks = (place.expert_ranks if experts else place.dense_ranks) if spec.gradients.shards_states else 0
                places, buckets = _places([params[n] for n in members], bucket, ranks)
                out.append(BucketedBuffer(experts, c, tuple(members), places, buckets))
    return tuple(out)


def _places(
    params: list[ParameterTensor], bucket: float, ranks: int
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """Where a buffer holds each parameter, and where its buckets begin; ``ranks`` 0 aligns nothing."""
    unit, aligned = (math.lcm(ranks, ALIGNED_BUCKET), ALIGNED_PARAM) if ranks else (1, 1)
    places: list[tuple[int, int]] = []
    begun = [0]
    offset = 0
    for p in params:
        offset = -(-offset // aligned) * aligned
        if p.shared and ranks and offset > begun[-1]:
            offset = -(-offset // unit) * unit
            begun.append(offset)
        places.append((offset, offset + round(p.params)))
        offset += round(p.params)
        if offset - begun[-1] >= bucket or (p.shared and ranks):
            offset = -(-offset // unit) * unit
            begun.append(offset)
    if offset > begun[-1]:
        begun.append(-(-offset // unit) * unit)
    return tuple(places), tuple(begun)


def optimizer_owned_fractions(buffer: BucketedBuffer, ranks: int, rank: int) -> dict[int, float]:
    """Of each parameter of a buffer the part that a rank optimizes: it owns as much of each bucket as any other."""
    out: dict[int, float] = {}
    offset = 0
    for start, end in zip(buffer.buckets, buffer.buckets[1:], strict=False):
        size = (end - start) // ranks
        low, high = start + rank * size, start + (rank + 1) * size
        while offset < len(buffer.members) and buffer.places[offset][0] < end:
            first, last = buffer.places[offset]
            out[buffer.members[offset]] = float(max(0, min(last, high) - max(first, low)))
            offset += 1
    return out
