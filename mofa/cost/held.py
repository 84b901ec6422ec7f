"""What a stage of one candidate holds and does, for the closer look (:mod:`mofa.cost.sequence`).

The same that :mod:`mofa.replay.ranks` has of a rank, the first of those that share its parameters out, and of layers
that are routed alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mofa.blocks.build import layer_kind
from mofa.blocks.frameworks.megatron_lasting import OUTSIDE_LAYERS, Lasting, lasting
from mofa.blocks.tapes import label
from mofa.cost.acts import Ends, Script, pool_of, script
from mofa.cost.blockcost import BlockCost, base_mode, full_mode
from mofa.cost.data_parallel import ddp_width
from mofa.cost.heap import rounded
from mofa.cost.lead import ahead_of_peers, device_per_host, launches, paces
from mofa.cost.lives import Life, awaiting_embedding, gathering, life
from mofa.cost.moments import ROUNDS
from mofa.cost.one_by_one import one_by_one
from mofa.cost.roots import waits_for_embedding
from mofa.cost.rows import Rows
from mofa.cost.shelf import Pace
from mofa.cost.stage_inputs import held_beside
from mofa.cost.start import rotations
from mofa.cost.tensors import Module, params_of
from mofa.cost.unshard import by_chunk, gathers_whole
from mofa.cost.weights import (
    FlatBuffer,
    Weight,
    built_beside,
    ddp_buckets,
    flat_buffers,
    held_in_fp8,
    rotation_tables,
    stepped,
    weights_of,
)
from mofa.orders import order_of
from mofa.orders.interleaved import rounds

GATHER, REDUCE = 1, 2
"""FSDP's streams."""
WALKED = 32
"""Micro-batches that are played at least where there are as many: those of few ranks wander over their blocks for a
dozen rounds, up to 5.7 % of what is reserved; twice as many where chunks are reduced one by one, whose buffers come
between (5.9 % once in 176). [-]"""
ROUNDS_BEHIND = 2
"""Rounds that are played behind the last chunk's first backward of the first step: the second takes the most where the
scores of attention are tensors, and costs 5 % of a look. [-]"""
LARGE = 1 << 40
"""A size of the large pool. [B]"""
Acts = tuple[tuple[str, int, int], ...]
"""Computations: kind, chunk, micro-batch."""
Groups = tuple[tuple[tuple[tuple[float, float], ...], ...], ...]
"""Of each chunk and FSDP group the parameters of each weight, whole and one rank's. [params]"""


@dataclass(frozen=True)
class Stage:
    """What a stage holds and does. [B]

    ``acts`` are its computations, of which the first step plays ``behind`` after the last chunk's first backward.
    ``rotations`` are each part's table and what it is made of, ``lazy`` buffers come with the first forward, a
    ``workspace`` with the first product of each of two threads. ``received`` are how many buffers of what stages send
    each other are made in front of the first step, for each chunk's inputs and, last, for all gradients. DDP has
    ``buckets`` (:func:`mofa.cost.weights.ddp_buckets`). ``accumulates`` is what becomes of gradients
    (:func:`mofa.cost.acts.course`).
    """

    weights: tuple[Weight, ...]
    flat_buffers: tuple[FlatBuffer, ...]
    optimizers: tuple[tuple[Weight, ...], ...]
    chunks: tuple[tuple[Script, ...], ...]
    ends: tuple[Ends, ...]
    acts: Acts
    behind: int
    rotations: tuple[int, ...]
    received: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]
    lazy: tuple[int, ...]
    workspace: int
    accumulates: str
    groups: Groups
    """FSDP's under pipelines, which gathers them for a step and reduces them at its end."""
    unshards: bool
    """Whether that is done chunk by chunk, as torch's schedules of several do."""
    tied: bool
    output_stays: bool
    """Whether the schedule holds the latest output and input's gradient until the next are there (Schedule1F1B)."""
    launches: tuple[dict[str, float], ...]
    """Of each chunk's computations. [-]"""
    device_per_host: float
    """:func:`mofa.cost.lead.device_per_host`."""
    stored_bytes: float
    """Of a parameter of torchtitan's, and so of its reduced gradient. [B/param]"""
    inputs_at_end: tuple[int, ...]
    """What Megatron's chunks hold of their last inputs from a step's last backward to the next step. [B]"""
    paces: tuple[tuple[tuple[Pace, ...], tuple[Pace, ...]], ...] = ()
    """Of each chunk's blocks forward, and of those backward in their order."""
    built: tuple[tuple[int, int], ...] = ()
    """:func:`mofa.cost.weights.built_beside`."""

    @property
    def pools(self) -> list[int]:
        """The pools that it asks for memory."""
        blocks = {id(one): one for chunk in self.chunks for one in chunk}.values()
        found = {pool for one in blocks for pool in one.asks()} | {pool_of(1), pool_of(LARGE)}
        if self.groups:
            found |= {pool_of(size, stream) for size in (1, LARGE) for stream in (GATHER, REDUCE)}
        return sorted(found)


@dataclass
class Blocks:
    """The blocks of a candidate by their tapes' names, made when a stage asks for them."""

    rows: Rows
    lives: dict[str, Life] = field(default_factory=dict)
    scripts: dict[str, Script] = field(default_factory=dict)

    def life(self, name: str) -> Life:
        """What a block allocates."""
        if name not in self.lives:
            rows, fw = self.rows, self.rows.framework
            by_autograd = fw.name == "torchtitan" or not fw.overlap_input_grads  # and not by Megatron's own function
            self.lives[name] = one_by_one(life(
                rows.costs.tapes[name], int(rows.k[0]), autocast=rows.mode.precision == "autocast",
                weight_first=by_autograd, apart=fw.name == "megatron-2022",
                pipelined=fw.name == "torchtitan" and rows.layout.stages.pp > 1,
                replicated=fw.shards_params and fw.dp_replicate > 1,
                lasting=self.lasting(name) if fw.library else None,
            ))  # fmt: skip
        return self.lives[name]

    def lasting(self, name: str) -> dict[str, tuple[Lasting, ...]]:
        """What a block's ops take for good."""
        rows, block = self.rows, self.rows.costs.tapes[name]
        return lasting(rows.costs.context, block.name, block.forward.ops, int(rows.k[0]))

    def script(self, name: str, *, first: bool = False, waits: bool = False) -> Script:
        """Its acts; of the model's ``first`` layer, or of a head whose gradient waits for the embedding's."""
        key = f"first {name}" if first else f"waiting {name}" if waits else name
        if key not in self.scripts:
            one = self.life(name)
            one = gathering(one, self.life("embedding")) if first else one
            self.scripts[key] = script(awaiting_embedding(one) if waits else one)
        return self.scripts[key]


def plays(rows: Rows) -> bool:
    """Whether the order of requests is known here: where weights' gradients come with their inputs'."""
    known = rows.schedule in ("1f1b", "gpipe", "interleaved") and not rows.framework.deepspeed
    return known and rows.framework.allocator != "expandable"


def stage_of(rows: Rows, stage: int, workspace: int, blocks: Blocks) -> Stage:
    """What a stage of the one candidate of ``rows`` holds and does; ``workspace`` is one thread's. [B]"""
    stages, fw, k = rows.layout.stages, rows.framework, int(rows.k[0])
    rank = int(rows.layout.shown.stage[stage])
    head = rank == stages.head_stage
    names = _names(rows, rank)
    modules = [[Module(name, blocks.life(of).name, blocks.life(of).weights) for name, of in c] for c in names]
    tied = rows.workload.model.tied_embeddings and rank == 0 and head
    params = params_of(rows, stage, modules, tied=tied)
    weights = weights_of(rows, params, stage, 0)
    linears = [name for c in names for name, of in c if of not in OUTSIDE_LAYERS] if _in_fp8(rows) else []
    weights = held_in_fp8(rows, weights, linears)
    num_layers = sum(len(chunk) for chunk in stages.layers[rank])
    num = int(rows.num_micro_batches[0])
    boundary = int(float(rows.costs.boundary[k]))
    last, many = len(names) - 1, stages.pp > 1
    preallocated = fw.name == "torchtitan"
    ends = [
        Ends(rounded(boundary), many and not (rank == 0 and c == 0), many and not (head and c == last), preallocated)
        for c in range(last + 1)
    ]
    received = tuple(num * n for n in (*(one.receives for one in ends), sum(one.sends for one in ends)))
    lives = [[blocks.life(of) for _, of in c] for c in names]
    kept = int(float((rows.costs.persistent_head if head else rows.costs.persistent)[k]))
    whole = int(rows.static.buffers[0, stage]) if fw.shards_params else 0
    pipelined = gathers_whole(rows)
    acts, behind = _acts(rows, rank)
    flats = flat_buffers(rows, params, stage, weights)
    waits = waits_for_embedding(rows)
    rings = any(one.sent for of_one in lives for one in of_one)
    lead = device_per_host(_costs(rows, names), k) if rings or (preallocated and many) else 0.0
    lead = float(ahead_of_peers(lead, rows.cluster, int(rows.table.cp[0]))) if rings else lead
    beside = held_beside(fw, rows.schedule, stages.pp, sum(one.receives for one in ends))
    return Stage(
        weights, flats, stepped(weights, flats),
        tuple(
            tuple(blocks.script(of, first=name == "block 0", waits=waits and name == "the head") for name, of in c)
            for c in names
        ),
        tuple(ends), acts, behind, rotations(rows), received if preallocated and many else (),
        ddp_buckets(lives, whole, ddp_width(rows), tied=tied),
        (
            *(rotation_tables(rows, num_layers, k) if fw.library else (kept,)), *(boundary,) * beside.throughout,
        ), workspace,
        "there" if rows.static.grads_always else "fp32" if pipelined else "stay",
        _groups(rows, modules) if pipelined else (), by_chunk(rows), tied,
        preallocated and many and rows.schedule == "1f1b", tuple(launches(c) for c in lives),
        lead, rows.costs.context.stored,
        (boundary,) * beside.at_end, tuple(_paces(rows, c) for c in names), built_beside(rows, weights, num_layers),
    )  # fmt: skip


def _names(rows: Rows, rank: int) -> list[list[tuple[str, str]]]:
    """The blocks of every chunk of a rank, in order, each with its tape's name."""
    stages, table, model = rows.layout.stages, rows.table, rows.workload.model
    spec, number = table.recompute_modes[int(table.recompute[0])], int(table.recompute_layers[0])
    out: list[list[tuple[str, str]]] = []
    seen = 0
    for c, layers in enumerate(stages.layers[rank]):
        first = sum(len(stages.layers[r][d]) for d in range(stages.vpp) for r in range(stages.pp) if (d, r) < (c, rank))
        chunk = [("the embedding", "embedding")] if rank == 0 and c == 0 else []
        for j, kind in enumerate(layers):
            seen += 1
            whole = spec.kind == "full" and (number < 0 or j < number)
            whole = whole or (spec.kind == "every" and seen % (spec.layers or 1) == 0)
            chunk.append(
                (f"block {first + j}", label(stages.kinds[kind], full_mode(spec) if whole else base_mode(spec)))
            )
        if rank == stages.head_stage and c == stages.vpp - 1:
            # a prediction: its entry, a layer like the last and the head; recomputed only with all layers
            again = full_mode(spec) if spec.kind == "full" and number < 0 else base_mode(spec)
            last = label(layer_kind(model, model.num_layers - 1), again)
            for n in range(model.num_mtp_layers):
                chunk += [(f"prediction {n}", "mtp"), (f"the layer of prediction {n}", last),
                          (f"the head of prediction {n}", "head")]  # fmt: skip
            chunk.append(("the head", "head"))
        out.append(chunk)
    return out


def _by_tape(rows: Rows) -> dict[str, BlockCost]:
    """What blocks cost, by their tapes' names."""
    costs = {"embedding": rows.costs.embedding, "head": rows.costs.head}
    for mode, of_mode in rows.costs.blocks.items():
        for kind, one in zip(rows.layout.stages.kinds, of_mode, strict=True):
            costs[label(kind, mode)] = one
    return costs


def _costs(rows: Rows, names: Sequence[Sequence[tuple[str, str]]]) -> list[BlockCost]:
    """What the blocks of a rank cost."""
    costs = _by_tape(rows)
    return [costs[of] for chunk in names for _, of in chunk if of in costs]


def _paces(rows: Rows, chunk: Sequence[tuple[str, str]]) -> tuple[tuple[Pace, ...], tuple[Pace, ...]]:
    """Of the blocks of a chunk forward, and of those backward in their order."""
    costs, k = _by_tape(rows), int(rows.k[0])
    both = [paces(costs[of], k) if of in costs else (Pace(), Pace()) for _, of in chunk]
    return tuple(one for one, _ in both), tuple(one for _, one in reversed(both))


def _acts(rows: Rows, rank: int) -> tuple[Acts, int]:
    """Computations of a step, and how many the first plays behind the last chunk's first backward."""
    stages, num = rows.layout.stages, int(rows.num_micro_batches[0])
    each = rounds(stages.pp, num) if stages.vpp > 1 else stages.pp
    least = WALKED * (2 if by_chunk(rows) else 1)
    walked = num if rows.schedule == "gpipe" else min(num, max(ROUNDS * each, -(-least // each) * each))
    order = order_of(rows.schedule, rows.framework.name, stages.pp, stages.vpp, walked)
    acts = tuple((str(a.kind), a.stage // stages.pp, a.micro_batch) for a in order.ranks[rank])
    return acts, ROUNDS_BEHIND * 2 * each * stages.vpp


def _groups(rows: Rows, modules: Sequence[Sequence[Module]]) -> Groups:
    dense, expert = float(rows.shards.dense_ranks[0, 0]), float(rows.shards.expert_ranks[0, 0])
    return tuple(
        tuple(
            tuple((n, n / (expert if name.startswith("experts.") else dense)) for name, n in one.weights) for one in c
        )
        for c in modules
    )


def _in_fp8(rows: Rows) -> bool:
    return bool(rows.workload.precision.fp8_recipe) and not rows.framework.shards_params
