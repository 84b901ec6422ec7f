"""The op tape: what one phase of one block computes, moves, allocates, keeps and sends, op by op.

A quantity that depends on the strategy is a float or an array of shape (K,). It has an entry for each unique
combination of the degrees that the block's cost depends on. The tape is read twice: scanned over all K at once to
search, and played out for one plan. A byte or a second that no op carries is a defect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from mofa.blocks.elementwise import BoolK as BoolK
from mofa.blocks.elementwise import FloatK as FloatK
from mofa.blocks.elementwise import any_true, logical_not
from mofa.blocks.roles import FSDP_USES, BlockRole, LayerStep, Part, Purpose, Role, RoutingStep, TensorUse
from mofa.blocks.work import MemoryBound, Work
from mofa.specs.host import Module

PairedPass = Literal["", "forward", "backward"]
Kind = Literal["activation", "weight_copy", "grad", "state", "buffer", "scratch"]
KINDS: tuple[Kind, ...] = ("activation", "weight_copy", "grad", "state", "buffer", "scratch")
Family = Literal[
    "gemm", "grouped_gemm", "attention", "memory_bound", "recompute", "tp", "cp", "ep", "pp", "dp", "optimizer",
    "host", "host_idle",
]  # fmt: skip
COMM_FAMILIES: tuple[Family, ...] = ("tp", "cp", "ep", "pp", "dp")
COMPUTING_FAMILIES: tuple[Family, ...] = (
    "gemm", "grouped_gemm", "attention", "memory_bound", "recompute", "optimizer",
)  # fmt: skip
"""What loses by communication beside it; the others wait."""


class Tensor(NamedTuple):
    """A tensor of the tape. ``bytes`` is what it allocates by itself [B]; ``grad`` says whether it has a gradient.

    ``grad_bytes`` is what the gradient allocates where that differs: a tensor in a buffer that lives outside the tape
    allocates nothing, its gradient does. [B]

    ``recorded_on_nccl_stream`` says where a stream of NCCL's uses it of which the allocator is told (``recordStream``):
    memory that is let go comes back only once the device has got that far. ``grad_recorded_on_nccl_stream`` says the
    same of its gradient.

    ``held_by_watchdog`` says where a coalesced collective that nobody waits for keeps it: it stays allocated until
    PyTorch's watchdog has seen the collective finished (:mod:`mofa.cost.allocations.watchdog`).

    ``use`` says what it is used for, ``weight`` of a weight's gradient the op of the forward that has the weight.
    """

    name: str
    bytes: FloatK
    kind: Kind = "activation"
    grad: bool = True
    grad_bytes: FloatK | None = None
    recorded_on_nccl_stream: BoolK = False
    grad_recorded_on_nccl_stream: BoolK = False
    held_by_watchdog: BoolK = False
    use: TensorUse = ""
    weight: str = ""

    @property
    def is_of_fsdp(self) -> bool:
        """Whether FSDP declares it."""
        return self.use in FSDP_USES


CP_POOL = "cp_attention"
"""The stream on which Transformer Engine runs every second step of attention under context parallelism, as a pool."""
GRAPH_POOL = "cuda_graphs"
"""The private pool that a rank's CUDA graphs share: no tensor outside them gets its memory (CUDACachingAllocator.cpp,
``PrivatePool``; megatron_core 0.16.1, transformer/cuda_graphs.py, ``global_mempool``)."""
EXPERT_STREAM = "expert_exchange"
"""The stream on which Megatron-Core exchanges experts' tokens beside another micro-batch's computing, as a pool."""
SHARED_EXPERT_STREAM = "shared_experts"
"""The stream on which Megatron-Core runs shared experts beside the exchange of routed ones' tokens, as a pool."""
OFFLOAD_STREAM = "activation_offload"
"""The stream on which Megatron-Core copies activations to the host."""
RELOAD_STREAM = "activation_reload"
"""The stream on which Megatron-Core copies them back, into memory of its own pool."""
HOST_COPY_STREAMS = (OFFLOAD_STREAM, RELOAD_STREAM)
OWN_POOLS = (
    "fsdp_gather", "fsdp_reduce", CP_POOL, EXPERT_STREAM, SHARED_EXPERT_STREAM, GRAPH_POOL, RELOAD_STREAM,
)  # fmt: skip
"""Streams and graphs that allocate from memory pools of their own, of what ops on them and ops of that pool write."""

WRITES = 1000
"""In an :class:`ScratchSequence` the first output; those behind it count on."""
READS = 2000
"""In an :class:`ScratchSequence` the first input, let go there if the op is its last reader; those behind it count
on."""


class ScratchSequence(NamedTuple):
    """An op's temporaries one by one, as its kernels allocate and free them; their most together is its ``scratch``.

    In ``steps``, n allocates the n-th of ``sizes`` and ~n frees it. ``WRITES`` + n allocates the n-th output, ``READS``
    + n lets the n-th input go. [B]
    """

    sizes: tuple[FloatK, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class TimedModuleCall:
    """A call of a module that a host's profile times as a whole (:class:`mofa.specs.host.ModuleCallTime`).

    All ops that the module issues carry the same one: the first of them that runs pays for it, the others nothing but
    what is no part of it, such as a collective. The same holds on the way back.
    """

    module: Module
    format: str = "bf16"
    """What its products compute in."""
    num_members: FloatK = 0.0
    """Experts, or steps of context parallelism. [-]"""
    num_calls: FloatK = 1.0
    """Calls of it, one for each expert where these run one after the other. [-]"""
    is_recorded: bool = True
    """Whether autograd records its forward: not in the first pass of a checkpoint that is a function of Python."""


@dataclass(frozen=True, eq=False, slots=True)
class GraphLaunch:
    """A CUDA graph that holds ops of one pass of a block: all of them carry the same one, and its first op that runs
    pays for the launch."""

    num_hooks: FloatK = 0.0
    """Parameters whose hooks run behind it, as their gradients come out of the graph. [-]"""
    is_function: bool = True
    """Whether a function of autograd's launches it, within a step; else the step begins with it."""


class OpBackward(NamedTuple):
    """How an op is differentiated where its kind does not say: the bytes that its backward kernels move.

    ``bytes`` 0 with ``launches`` 0 is a pure view: the gradient passes through.
    """

    bytes: FloatK = 0.0
    launches: FloatK = 1
    scratch: FloatK = 0.0
    work: Work | None = None
    """Backward work of another kind than the forward's, such as the all-reduce behind a column-parallel linear."""
    family: Family | None = None
    present: BoolK = True
    view: BoolK = False
    stream: str = "compute"
    like: str = ""
    elements: FloatK = 0.0
    width: FloatK = 0.0
    source: FloatK = 0.0
    parts: tuple[tuple[FloatK, str], ...] = ()
    """Of the backward kernels, as in :class:`MemoryBound`."""
    autograd_nodes: FloatK = 1.0
    """Nodes of autograd's graph that they belong to. [-]"""
    order: ScratchSequence | None = None
    """Of the backward kernels, where ``scratch`` is more than one temporary."""
    overwrites_saved: bool = False
    """With ``work`` and ``view``: the gradient is written over the first tensor that was kept."""
    pool: str = ""
    """Of what the backward kernels write, as :attr:`Op.pool`."""
    held_outputs: tuple[str, ...] = ()
    """Outputs of ops behind it whose gradients are there until its end: one node of autograd's graph had them."""
    held_copies: tuple[str, ...] = ()
    """What the backward made of such gradients and has until then too, where the next field says so."""
    holds_copies: BoolK = True

    def memory_bound_work(self) -> MemoryBound:
        """The work of backward kernels that only move bytes."""
        return MemoryBound(self.bytes, self.like, self.elements, self.width, self.source, self.parts)


GRADIENT = "the gradient of its output"
"""Among what the ops of a :class:`BackwardPreparation` read: the gradient that comes back to the linear layer."""


class BackwardPreparation(NamedTuple):
    """What a linear layer does in its backward besides its products.

    ``gradient`` are ops on :data:`GRADIENT`, in order. Of what they write, the product for the input's gradient reads
    ``dgrad``, that for the weight's ``wgrad``. ``before_dgrad`` are ops on saved tensors, before the product for the
    input; ``after_dgrad`` are those behind it, which may read ``dgrad`` too. Where ``input`` names a tensor that these
    write, the weight's product reads it instead of what was saved. The forward tape declares all these tensors.
    """

    gradient: tuple[Op, ...]
    dgrad: str
    wgrad: str
    before_dgrad: tuple[Op, ...] = ()
    after_dgrad: tuple[Op, ...] = ()
    input: str = ""

    def ops(self) -> tuple[Op, ...]:
        """All ops of the preparation."""
        return (*self.gradient, *self.before_dgrad, *self.after_dgrad)


class Op(NamedTuple):
    """One op: its work, the tensors it reads, writes and keeps for the backward pass, and where it runs.

    ``present`` is where it runs at all; where it doesn't, its first output is its first input. ``view`` says where
    its outputs share the first input's memory although the op runs (views, an in-place op).
    ``weight`` names the parameter of a linear, ``weight_bytes`` the gradient it makes before it is accumulated.
    ``region`` is the module that selective recomputation names.
    """

    name: str
    family: Family
    work: Work | None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    saves: tuple[str, ...] = ()
    scratch: FloatK = 0.0
    launches: FloatK = 1
    present: BoolK = True
    view: BoolK = False
    stream: str = "compute"
    region: str = ""
    back: OpBackward | None = None
    weight: str = ""
    weight_bytes: FloatK = 0.0
    weight_params: FloatK = 0.0
    num_weights: FloatK = 1
    accumulate_bytes_per_param: float = 0.0
    """Bytes moved per parameter to add a separate weight gradient to the main one; 0 where the GEMM adds. [B]"""
    regather: tuple[str, ...] = ()
    """Names of collectives that run again before the weight gradient, because only their input was kept."""
    backward_preparation: BackwardPreparation | None = None
    """Of a linear layer whose backward casts, gathers or transposes before it multiplies."""
    autograd_functions: FloatK = 0.0
    """Functions of Python that autograd calls around the op, on the way forward and on the way back."""
    guarded_calls: FloatK = 0.0
    """Calls of functions that are compiled by themselves and checked at every call, each way."""
    kernel_choices: FloatK = 0.0
    """Products among its launches for which the library chooses a kernel anew: of a shape it does not remember."""
    order: ScratchSequence | None = None
    """Where ``scratch`` is more than one temporary: which, and when."""
    kernel_loads: FloatK = 0.0
    """Kernels among its launches that nothing has used before, which the driver loads while the device idles. [-]"""
    mean_loops_before: FloatK = 1.0
    """Loops like its own that a pass has been through at the end of one, in the mean over the pass's layers. [-]"""
    autograd_nodes: FloatK = 1.0
    """Of a backward op: nodes of autograd's graph that it is made of, in each round. [-]"""
    split_views: FloatK = 0.0
    """Views that it cuts its inputs into, to join them otherwise, and the same on the way back: a call each. [-]"""
    listed_elements: FloatK = 0.0
    """Elements whose places the host writes down for the kernel, block by block. [-]"""
    expert_loops: FloatK = 1.0
    """Times that it runs in turn with the ops next to it that run as often: experts one after the other."""
    compiled: bool = False
    """Runs inside a compiled region: its launches cost the host little."""
    dtensor: BoolK = False
    """Where it is dispatched as an op on distributed tensors, which costs the host more."""
    view_calls: FloatK = 0.0
    """Ops without a kernel around it: views, and turns between local and distributed tensors. They cost the host
    something where each op is dispatched in Python."""
    selective: bool = False
    """Goes through the dispatch mode of an op-level checkpoint, forward and where it is repeated."""
    pool: str = ""
    """The stream from whose memory its outputs come, where that is not its own."""
    hooked_tensors: FloatK = 0.0
    """Tensors that autograd saves at it through the hooks of PyTorch's checkpoint, forward and where it is repeated."""
    module_call: TimedModuleCall | None = None
    """The call of a module that issues it."""
    graph: GraphLaunch | None = None
    """The CUDA graph that holds it: it is launched with that, and no host issues it."""
    role: Role = ""
    """What it is for, in a backward."""
    schedule_node: int = 0
    """Which part of a layer's backward it belongs to that the schedule starts by itself, where the first op that runs
    pays the host's call of autograd's engine. 0 of all others."""
    paired_pass: PairedPass = ""
    """Of a tape of a forward beside a backward: which of them it belongs to; empty for all others."""
    repeated: bool = False
    """Runs the op of a forward again, for a checkpoint."""
    checkpoints: FloatK = 0.0
    """Checkpoints that are functions of a framework's own, begun where it is repeated and ended behind it. [-]"""

    origin: str = ""
    """The op of the forward that it differentiates, with a role, or repeats; empty where it is of a whole group."""
    part: Part = ""
    """What of the model issues it."""
    purpose: Purpose = ""
    """What else time and memory ask of it."""
    claims: str = ""
    """Of a mark: under which name the block before held what this one takes over; empty for most."""
    frame: str = ""
    """Of a mark: the call whose local variable it begins to hold, or which returns at it."""
    routing: RoutingStep = ""
    """Which step of the tokens' way through the experts it is."""
    registered_at: int = 0
    """Place of its weight among the block's, as the model registers its modules; else in the order of the forward."""
    step: LayerStep = ""
    """Which step of a layer it is; of a sum, that of the op whose gradient is added."""
    casts_for: str = ""
    """The linear whose input it casts; of a sum at such a cast too."""
    sum_of: TensorUse = ""
    """Of a sum of gradients: what the tensor is used for whose gradients they are."""
    adds_to_view: bool = False
    """Of a sum of gradients: whether the first is a view of what a product made. A view has its base, so that nothing
    is added to it in place (``can_accumulate_inplace``)."""

    @property
    def casts_weight(self) -> bool:
        """Whether it makes a 16-bit copy of a weight."""
        return self.purpose == "weight_cast"

    @property
    def holds_for_next_block(self) -> bool:
        """Of a mark: whether what it reads is held for the next block."""
        return self.purpose == "hold"

    @property
    def copies_out_gathered_weights(self) -> bool:
        """Whether it copies what FSDP gathered into a tensor for each weight."""
        return self.purpose in ("copy_out", "experts_copy_out")

    @property
    def renews_dispatcher(self) -> bool:
        """Whether the layer's dispatcher of tokens gets new probabilities at it."""
        return self.purpose == "renewal"

    @property
    def is_embedding_gradient(self) -> bool:
        """Whether it makes the embedding's gradient, of zeros first (Embedding.cu): temporaries come later."""
        return self.purpose == "embedding_gradient"

    @property
    def is_issued_by_fsdp(self) -> bool:
        """Whether FSDP issues it: for a block's own parameters, or for experts that are sharded apart."""
        return self.part == "fsdp"

    def aliases_first_input(self) -> BoolK:
        """Where the outputs are the memory of the first input. (K,)"""
        if self.present is True:
            return self.view
        return self.view | logical_not(self.present)


_REGION = Op._fields.index("region")
RENEWAL = "dispatcher renewed"
"""The op at which a layer's dispatcher of tokens gets new probabilities, and lets go of the last ones."""


@dataclass(frozen=True)
class Tape:
    """Ops in issue order with their tensors. ``inputs`` are alive at the start, ``outputs`` at the end.

    What ``retained_by_dispatcher`` is alive beyond the end, until the block's :data:`RENEWAL` is passed again.
    """

    ops: tuple[Op, ...]
    tensors: dict[str, Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    retained_by_dispatcher: tuple[str, ...] = ()

    def saved_names(self) -> tuple[str, ...]:
        """Names kept for the backward pass, each once."""
        return tuple(dict.fromkeys(name for op in self.ops for name in op.saves))

    def without_families(self, drop: Iterable[str]) -> Tape:
        """The tape without the ops of these families: what they cost is what the tape loses."""
        families = set(drop)
        return replace(self, ops=tuple(op for op in self.ops if op.family not in families))


@dataclass
class TapeBuilder:
    """Appends ops and names their tensors."""

    ops: list[Op] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    region: str = ""
    part: Part = ""
    """Of the ops that are appended, where they say none themselves and are no marks of a frame."""
    step: LayerStep = ""
    """Of the ops that are appended, where they say none themselves and are no marks of a frame."""
    block: BlockRole = ""
    """What block is being built, where a primitive depends on it."""
    mark: Callable[[Op], Op] | None = None
    """Applied to every op appended, such as to say how it is dispatched."""

    def tensor(
        self, name: str, nbytes: FloatK, kind: Kind = "activation", *, grad: bool = True,
        grad_bytes: FloatK | None = None, recorded_on_nccl_stream: BoolK = False,
        grad_recorded_on_nccl_stream: BoolK = False,
        held_by_watchdog: BoolK = False, use: TensorUse = "",
    ) -> str:  # fmt: skip
        """Declare a tensor and return its name; a name is declared once."""
        assert name not in self.tensors, f"tensor {name} is declared twice"
        self.tensors[name] = Tensor(
            name,
            nbytes,
            kind,
            grad,
            grad_bytes,
            recorded_on_nccl_stream,
            grad_recorded_on_nccl_stream,
            held_by_watchdog,
            use,
        )
        return name

    @contextmanager
    def in_layer_step(self, step: LayerStep) -> Iterator[None]:
        """Append ops of this step of a layer."""
        before, self.step = self.step, step
        yield
        self.step = before

    def add(self, op: Op) -> str:
        """Append an op and return its first output."""
        if self.region and not op.region:
            op = Op._make((*op[:_REGION], self.region, *op[_REGION + 1 :]))  # twice as quick as _replace
        if self.part and not op.part and not op.frame:
            op = op._replace(part=self.part)
        if self.step and not op.step and not op.frame:
            op = op._replace(step=self.step)
        if self.mark is not None:
            op = self.mark(op)
        if not all(map(self.tensors.__contains__, (*op.reads, *op.writes, *op.saves))):
            missing = [name for name in (*op.reads, *op.writes, *op.saves) if name not in self.tensors]
            raise AssertionError(f"op {op.name}: tensor {missing[0]} is not declared")
        self.ops.append(op)
        return op.writes[0] if op.writes else ""

    def tape(self, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Tape:
        """The finished tape without the ops that no candidate has."""
        ops = []
        renamed: dict[str, str] = {}
        for op in self.ops:
            op = _rename(op, renamed) if renamed else op
            if op.present is True or any_true(op.present):
                ops.append(op)
            elif op.writes:
                renamed[op.writes[0]] = op.reads[0]
        outputs = tuple(renamed.get(name, name) for name in outputs)
        return Tape(tuple(ops), self.tensors, inputs, outputs)


def _rename(op: Op, names: dict[str, str]) -> Op:
    def new(group: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names.get(name, name) for name in group)

    if not any(name in names for name in (*op.reads, *op.saves)):
        return op
    return op._replace(reads=new(op.reads), saves=new(op.saves))
