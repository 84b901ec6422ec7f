"""Activations that go to the host's memory behind a module's forward and come back ahead of its backward.

A transform of a layer's tapes, read in Megatron-Core 0.16.1 (core/pipeline_parallel/fine_grained_activation_offload.py
and its uses in transformer/). Of a module that is offloaded:

- **Forward.** Hooks take what autograd saves in it. At its end the stream of copies to the host waits for the computing
  one and copies each tensor of at least 2^20 elements that is no parameter into pinned memory (``bulk_offload_group``).
  A norm's group ends behind its residual addition, ``moe_act``'s behind the second product. The allocator is told of
  that stream (``record_stream``): memory comes back once the device has got that far.
- **Backward.** The end of a module's backward has the next group come back: what was offloaded last, which is the same
  module one layer below (``on_group_start_backward``). Its copies wait for the computing stream and for those to the
  host, and that stream waits for them where the module's backward begins. They are allocated on the stream of copies to
  the device, in a pool of its own.
- **Last.** The last layer of a chunk whose backward is next keeps what others offload (``should_bulk_offload``), and
  has the layer below come back. Behind a chunk's first layer the next chunk's last one comes back.
- A tensor that two modules save is copied for each of them. It leaves the device where every reader offloads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mofa.blocks.context import Context
from mofa.blocks.elementwise import BoolK, FloatK, all_true, any_true, logical_not, where
from mofa.blocks.lifetimes import Lifetimes
from mofa.blocks.op import OFFLOAD_STREAM, RELOAD_STREAM, Op, Tape, Tensor
from mofa.blocks.work import GroupedGemm, HostCopy
from mofa.specs.activation_offload import MIN_ELEMENTS, OffloadModule

FUNCTIONS = 2.0
"""Functions of Python that autograd calls for a group, at its start and at its end, each way. [-]"""


@dataclass(frozen=True)
class OffloadedTensor:
    """What a module saves and the host has until its backward, of candidates for which it is large enough."""

    name: str
    module: OffloadModule
    bytes: FloatK
    is_large: BoolK

    @property
    def reloaded_tensor_name(self) -> str:
        """What the module's backward reads instead."""
        return f"{self.name} of {self.module}"

    @property
    def host_copy_name(self) -> str:
        """Its copy in pinned memory."""
        return f"{self.reloaded_tensor_name} on host"

    @property
    def tensor_name_reloaded_for_layer_below(self) -> str:
        """The same of the layer below, on its way while this layer runs."""
        return f"{self.reloaded_tensor_name} ahead"


def offloaded_tensors(forward: Tape, ctx: Context) -> tuple[OffloadedTensor, ...]:
    """What a layer's forward offloads, in order."""
    modules = _modules(forward.ops)
    tensors: dict[tuple[str, str], OffloadedTensor] = {}
    for op in forward.ops:
        module = modules.get(op.name)
        if module is None or module not in ctx.framework.offloaded_activations.modules:
            continue
        for name in op.saves:
            tensor = forward.tensors[name]
            element = ctx.activation_element_bytes if tensor.grad else 4.0  # sums and scales are fp32
            is_large = tensor.bytes >= MIN_ELEMENTS * element
            if any_true(is_large):
                large_bytes = where(is_large, tensor.bytes, 0.0)
                tensors.setdefault((module, name), OffloadedTensor(name, module, large_bytes, is_large))
    return tuple(tensors.values())


def with_activation_offload(forward: Tape, backward: Tape, ctx: Context, *, keeps: bool = False) -> tuple[Tape, Tape]:
    """A layer's tapes with its activations on the host; ``keeps`` of the last layer of a chunk, which keeps its own."""
    tensors = offloaded_tensors(forward, ctx)
    if not tensors:
        return forward, backward
    modules = _modules(forward.ops)
    ends = {module: _end_of(forward.ops, modules, module) for module in dict.fromkeys(t.module for t in tensors)}
    if not keeps:
        forward = _copied_out(forward, tensors, ends)
    return forward, _copied_back(forward, backward, tensors, modules, keeps=keeps)


def _modules(ops: tuple[Op, ...]) -> dict[str, OffloadModule]:
    """The module of each op that saves something in one, by the op's name."""
    out: dict[str, OffloadModule] = {}
    before_attention = True
    for op in ops:
        before_attention &= op.region != "core_attn"
        if op.region == "layernorm.attn_norm":
            out[op.name] = "attn_norm"
        elif op.region == "core_attn":
            out[op.name] = "core_attn"
        elif before_attention:
            out[op.name] = "qkv_linear"
        elif op.purpose == "attention_output":
            out[op.name] = "attn_proj"
        elif op.region == "layernorm.mlp_norm":
            out[op.name] = "mlp_norm"
        elif op.region == "moe.moe_act":
            out[op.name] = "moe_act"
        elif isinstance(op.work, GroupedGemm) and "expert_fc1" not in out.values():  # the first of two
            out[op.name] = "expert_fc1"
    return out


def _end_of(ops: tuple[Op, ...], modules: Mapping[str, OffloadModule], module: OffloadModule) -> int:
    """The op of a forward behind which a module's group ends."""
    last = max(i for i, op in enumerate(ops) if modules.get(op.name) == module)
    closing = {"attn_norm": "mid", "mlp_norm": "out"}.get(module)
    if closing is not None:
        return next(i for i, op in enumerate(ops) if i >= last and closing in op.writes)
    if module == "moe_act":
        return next((i for i, op in enumerate(ops) if i > last and isinstance(op.work, GroupedGemm)), last)
    return last


def _copied_out(forward: Tape, tensors: tuple[OffloadedTensor, ...], ends: Mapping[OffloadModule, int]) -> Tape:
    """The forward with a copy of each tensor behind its module's end; the allocator is told of the copies."""
    behind: dict[int, list[Op]] = {}
    declared = dict(forward.tensors)
    shares = Lifetimes(forward.ops, forward.tensors).memory_aliases
    for i, tensor in enumerate(tensors):
        functions = FUNCTIONS * (i == 0 or tensors[i - 1].module != tensor.module)
        declared[tensor.host_copy_name] = Tensor(tensor.host_copy_name, 0.0 * tensor.bytes, grad=False)
        behind.setdefault(ends[tensor.module], []).append(
            Op(f"{tensor.reloaded_tensor_name} to host", "memory_bound", HostCopy(tensor.bytes), (tensor.name,),
               (tensor.host_copy_name,), stream=OFFLOAD_STREAM, present=tensor.is_large,
               autograd_functions=functions, hooked_tensors=1.0)
        )  # fmt: skip
        for name in _memory_of(shares, tensor.name):
            declared[name] = declared[name]._replace(
                recorded_on_nccl_stream=declared[name].recorded_on_nccl_stream | tensor.is_large
            )
    ops = [new for i, op in enumerate(forward.ops) for new in (op, *behind.get(i, ()))]
    return replace(forward, ops=tuple(_without_frames(ops, tensors)), tensors=declared)


def _without_frames(ops: list[Op], tensors: tuple[OffloadedTensor, ...]) -> Iterator[Op]:
    """Ops without the local variables that have offloaded tensors: their storage goes at the group's end whoever has
    them (``forced_released_tensors``)."""
    gone = {tensor.name for tensor in tensors if all_true(tensor.is_large) and tensor.module != "qkv_linear"}
    variables = {op.writes[0] for op in ops if op.frame and op.writes and not gone.isdisjoint(op.reads)}
    for op in ops:
        if op.frame and not variables.isdisjoint(op.writes):
            continue
        reads = tuple(name for name in op.reads if name not in variables)
        if reads or not op.reads:
            yield op if reads == op.reads else op._replace(reads=reads)


def _memory_of(shares: Mapping[str, tuple[str, BoolK]], name: str) -> Iterator[str]:
    """A tensor and those whose memory it is."""
    yield name
    while name in shares:
        name = shares[name][0]
        yield name


def _copied_back(
    forward: Tape, backward: Tape, tensors: tuple[OffloadedTensor, ...], modules: Mapping[str, OffloadModule], *,
    keeps: bool,
) -> Tape:  # fmt: skip
    """The backward with the copies of the layer below behind each module's end, and of those before in its reads."""
    by_reader: dict[tuple[str, str], OffloadedTensor] = {(t.module, t.name): t for t in tensors}
    of_frames = {t.name: t for t in reversed(tensors)}
    """By name alone: a checkpoint's end holds what its module saved."""
    ops = list(backward.ops)
    last: dict[OffloadModule, int] = {}
    for i, op in enumerate(ops):
        module = modules.get(op.origin)
        if module is None and op.origin:
            continue
        if module is not None and (op.role or op.repeated):
            last[module] = i
        if not keeps:
            readers = of_frames if module is None else {r: by_reader.get((module, r)) for r in op.reads}
            reads = tuple(t.reloaded_tensor_name if (t := readers.get(r)) is not None else r for r in op.reads)
            ops[i] = op._replace(reads=reads)
    ahead: list[Op] = []
    behind: dict[int, list[Op]] = {}
    declared = {name: forward.tensors.get(name, tensor) for name, tensor in backward.tensors.items()}
    for i, tensor in enumerate(tensors):
        if tensor.module not in last:
            continue
        functions = FUNCTIONS * (i == 0 or tensors[i - 1].module != tensor.module)
        reloaded, name = tensor.reloaded_tensor_name, tensor.tensor_name_reloaded_for_layer_below
        declared[name] = Tensor(name, tensor.bytes, grad=False)
        declared[tensor.host_copy_name] = Tensor(tensor.host_copy_name, 0.0 * tensor.bytes, grad=False)
        behind.setdefault(last[tensor.module], []).append(
            Op(f"{reloaded} to device", "memory_bound", HostCopy(tensor.bytes), (tensor.host_copy_name,), (name,),
               stream=RELOAD_STREAM, present=tensor.is_large, autograd_functions=functions)
        )  # fmt: skip
        if keeps:
            continue
        declared[reloaded] = Tensor(reloaded, tensor.bytes, grad=False)
        ahead.append(
            Op(f"{reloaded} is there", "memory_bound", None, (name,), (reloaded,), launches=0, pool=RELOAD_STREAM)
        )
        if not all_true(tensor.is_large):  # what is too small is still on the device
            behind.setdefault(last[tensor.module], []).append(
                Op(f"{reloaded} stayed", "memory_bound", None, (tensor.name,), launches=0,
                   present=logical_not(tensor.is_large))
            )  # fmt: skip
    new = list(ahead)
    for i, op in enumerate(ops):
        new += [op, *behind.get(i, ())]
    coming = tuple(tensor.tensor_name_reloaded_for_layer_below for tensor in tensors if tensor.module in last)
    new.append(Op("activations of the layer below", "memory_bound", None, coming, launches=0))
    return replace(backward, ops=tuple(new), tensors=declared)
