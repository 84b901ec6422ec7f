"""Host time to issue every op of a tape, over all K candidates at once."""

from __future__ import annotations

from mofa.blocks.elementwise import BoolK, FloatK, any_true, logical_not, maximum, stack_rows, where
from mofa.blocks.op import GraphLaunch, Op, PairedPass
from mofa.blocks.recomputation import is_later_token_chunk_region
from mofa.blocks.roles import NODE_ROLES
from mofa.blocks.work import PRODUCTS, Attention, Collective, HostSync
from mofa.cost.block.durations import ArrayK, OpTimingMachine
from mofa.specs.host import HostIssueTimes


def issue_seconds_array(ops: tuple[Op, ...], machine: OpTimingMachine) -> ArrayK:
    """Host time to issue each op, as :func:`issue_seconds`, as one array. (len(ops), K) [s]"""
    return stack_rows(issue_seconds(ops, machine), machine.num_k)


def issue_seconds(ops: tuple[Op, ...], machine: OpTimingMachine) -> list[FloatK]:
    """Host time to issue each op. (K,) each [s]

    Eager: a small op's issue for each launch, a product's for its first; in the forward pass what the model's Python
    adds for each launch, in the backward pass what autograd's engine adds for each op; functions of Python around it.
    Compiled: each kernel's launch, and the call of the region at its first op. Ops on distributed tensors pay their
    dispatch instead, those without a kernel as well, and collectives between layouts their bookkeeping; under an
    op-level checkpoint every op passes its mode, under PyTorch's every saved tensor its hooks, and Megatron's is a
    function; FSDP's are issued by hooks, which write down where large gradients lie (``Op.listed_elements``),
    Megatron's additions of gradients too. Products of shapes that the library does not remember wait for its choice.
    What a module issues whose call the host's profile has as a whole pays for that instead, once
    (:class:`ModuleCallIssueTimes`), and what a CUDA graph holds for the graph's launch (:class:`GraphIssueTimes`). On
    top comes a backward that a schedule starts for a part of a layer. All of it on the slowest of all hosts.
    """
    return machine.compute_tape_once("host", ops, lambda: _host_seconds(ops, machine))


def weight_cast_issue_seconds(ops: tuple[Op, ...], machine: OpTimingMachine) -> FloatK:
    """Host time to issue the casts of a forward's weights to fp8, on top of its calls in other micro-batches. (K,) [s]

    Once for each call that is issued: graphs hold casts and skip them by a flag on the device (Transformer Engine's
    pytorch/graph.py), and token chunks behind the first find their weights cast.
    """
    host, seconds, begun = machine.cluster.gpu.curves.host, 0.0 * machine.meeting_hosts_factor, set[int]()
    for op in ops:
        call = op.module_call
        if call is None or id(call) in begun or is_later_token_chunk_region(op.region):
            continue
        fact = host.module_call_time(call.module, call.format)
        if fact is None or (fact.forward_cast_s is None and fact.forward_each_cast_s is None):
            continue
        begun.add(id(call))
        once, each = (0.0 if cast is None else cast.value for cast in (fact.forward_cast_s, fact.forward_each_cast_s))
        seconds = seconds + where(op.present, call.num_calls * (once + call.num_members * each), 0.0)
    return machine.slowest_host_factor * machine.meeting_hosts_factor * seconds


def _host_seconds(ops: tuple[Op, ...], machine: OpTimingMachine) -> list[FloatK]:
    host = machine.cluster.gpu.curves.host
    slowest = machine.slowest_host_factor * machine.meeting_hosts_factor
    of_backward = any(op.role in NODE_ROLES for op in ops)
    # Megatron adds a gradient to the main one in the parameter's hook (distributed_data_parallel.py)
    hooked = not machine.framework.traits.has_pytorch_modules and not machine.framework.fuses_wgrad_accumulation
    hook_s = slowest * (host.eager_op_s.value + host.grad_hook_s.value)
    modules, eager, regions, graphs = (
        ModuleCallIssueTimes(host),
        EagerIssueTimes(host),
        CompiledIssueTimes(host),
        GraphIssueTimes(host),
    )
    out: list[FloatK] = [0.0] * len(ops)
    for i, op in enumerate(ops):
        backward = of_backward and op.paired_pass != "forward"
        forward = not backward or op.repeated  # what is computed again is a forward pass again
        launches = op.launches
        if op.graph is not None:
            out[i] = where(op.present, slowest * graphs.issue_s(op, op.graph, backward=backward), 0.0)
            continue
        if op.module_call is not None and host.modules:
            called_s = modules.issue_s(op, forward=forward)
            if called_s is not None:
                out[i] = where(op.present, slowest * called_s, 0.0)
                continue
        if hooked and op.role == "accumulate":
            out[i] = where(op.present, maximum(launches, 1.0) * hook_s, 0.0)
            continue
        if type(op.work) is HostSync or not any_true(launches):
            continue
        if op.compiled:
            each = regions.issue_s(op, forward=forward)
        elif op.is_issued_by_fsdp:
            each = _sharding_s(op, host)
        else:
            each = eager.issue_s(op, forward=forward)
        if forward and any_true(op.hooked_tensors):
            each = each + op.hooked_tensors * (host.unpacked_s.value if backward else host.packed_s.value)
        # autograd adds a module's gradients once its backward has run, which ends no region
        if regions.inside is not op.compiled and op.role != "accumulate":
            regions.begin_or_end_compiled_region(op)
        out[i] = where(op.present, where(launches > 0, slowest * each, 0.0), 0.0)
    _add_schedule_nodes(out, ops, slowest * host.schedule_node_s.value)
    return out


def _add_schedule_nodes(seconds: list[FloatK], ops: tuple[Op, ...], node_s: FloatK) -> None:
    """Add what the schedule's calls of autograd's engine take, each to the first op of its part that runs, in place."""
    begun: dict[int, BoolK] = {}
    for i, op in enumerate(ops):
        if op.schedule_node:
            before = begun.get(op.schedule_node, False)
            seconds[i] = seconds[i] + where(op.present & logical_not(before), node_s, 0.0)
            begun[op.schedule_node] = before | op.present


def _sharding_s(op: Op, host: HostIssueTimes) -> FloatK:
    """An op of FSDP's, which hooks issue and which may write down where large gradients lie. [s]"""
    each = host.shard_hook_s.value
    return each + op.listed_elements * (host.listing_s.value / 2**20) if any_true(op.listed_elements) else each


class EagerIssueTimes:
    """What a host takes for ops that PyTorch launches one by one, with the Python around them."""

    def __init__(self, host: HostIssueTimes) -> None:
        self.host = host
        self.small_s, self.product_s = host.eager_op_s.value, host.linear_op_s.value
        self.engine_s, self.model_s, self.view_s = host.backward_op_s.value, host.model_op_s.value, host.view_s.value
        self.dispatch_s = host.dtensor_op_s.value + host.dtensor_hook_s.value
        self.function_s, self.guarded_s = host.function_s.value, host.guarded_call_s.value

    def issue_s(self, op: Op, *, forward: bool) -> FloatK:
        """Seconds of an op that launches kernels. (K,) [s]"""
        work, launches = op.work, op.launches
        first: FloatK = self.product_s - self.small_s if type(work) in PRODUCTS else 0.0
        if op.role in NODE_ROLES:
            first = first + self.engine_s * op.autograd_nodes
        first = first * op.expert_loops
        python = self.model_s if forward else 0.0
        calls = launches + op.view_calls
        each = launches * python + where(op.dtensor, calls * self.dispatch_s, launches * self.small_s) + first
        each = (
            each
            + op.autograd_functions * self.function_s
            + op.guarded_calls * self.guarded_s
            + op.split_views * self.view_s
        )
        if any_true(op.expert_loops > 1.0):
            each = each - self._cached_s(op)
        if any_true(op.kernel_choices) and not op.repeated:  # computed again, it was chosen for a moment ago
            each = each + op.kernel_choices * self.host.gemm_choice_s.value
        if type(work) is Collective and op.dtensor is not False:
            each = each + where(op.dtensor, self.host.redistribute_s.value, 0.0)
        if op.selective and forward:
            each = each + calls * self.host.selective_op_s.value
        if any_true(op.checkpoints):
            each = each + op.checkpoints * self.host.checkpoint_s.value
        return each

    def _cached_s(self, op: Op) -> FloatK:
        """What loops over experts save: what runs again and again is in the processor's caches. (K,) [s]"""
        cold = op.autograd_functions * (self.function_s - self.host.loop_function_s.value)
        cold = cold + op.guarded_calls * (self.guarded_s - self.host.loop_guarded_s.value)
        return cold - cold / maximum(op.expert_loops, 1.0)  # the first round finds nothing there


class CompiledIssueTimes:
    """What a host takes for compiled ops, met in the order in which ops are issued.

    Each kernel is launched; the first of a region calls it. Any other op that runs ends the region.
    """

    def __init__(self, host: HostIssueTimes) -> None:
        self.host = host
        self.inside: BoolK = False
        """Whether the op before was compiled, by candidate."""

    def issue_s(self, op: Op, *, forward: bool) -> FloatK:
        """Seconds of a compiled op. (K,) [s]"""
        host = self.host
        begins_s = host.compiled_module_s.value if forward else host.compiled_node_s.value
        kernel_s = host.compiled_op_s.value + host.compiled_model_op_s.value
        if op.part == "loss":
            begins_s, kernel_s = host.compiled_call_s.value, host.compiled_op_s.value
        each = op.launches * kernel_s + where(self.inside, 0.0, begins_s)
        return each + host.compiled_attention_s.value if forward and type(op.work) is Attention else each

    def begin_or_end_compiled_region(self, op: Op) -> None:
        """Begin the region for whom the op runs, or end it if the op is not compiled."""
        runs: BoolK = (op.launches > 0) & op.present
        self.inside = (self.inside | runs) if op.compiled else (self.inside & logical_not(runs))


class GraphIssueTimes:
    """What a host takes for CUDA graphs, met in the order in which ops are issued: the first op that runs pays.

    Autograd calls a function of Python that launches the graph. Behind its backward come the hooks of the parameters
    whose gradients it hands on; their copies are ops of the tape (transformer_engine 2.20.2, pytorch/graph.py,
    ``Graphed``; megatron_core 0.16.1, transformer/cuda_graphs.py, ``_CudagraphReplayNode``).
    """

    def __init__(self, host: HostIssueTimes) -> None:
        self.host = host
        self.begun: dict[int, BoolK] = {}
        """Whether a graph has been launched, by its ``id``."""

    def issue_s(self, op: Op, graph: GraphLaunch, *, backward: bool) -> FloatK:
        """Seconds of an op of a graph, where it is present. [s]"""
        host = self.host
        once: FloatK = host.graph_launch_s.value
        if graph.is_function:
            once = once + host.function_s.value + (host.backward_op_s.value if backward else 0.0)
        once = once + graph.num_hooks * host.graph_hook_s.value
        begun = self.begun.get(id(graph), False)
        self.begun[id(graph)] = begun | op.present
        return where(begun, 0.0, once)


WITH_THEIR_COLLECTIVES = ("attention", "amax")
"""Modules whose collectives are part of what they take."""
TIMED_LIKE = {"exchange": "collective", "fused_router": "router", "amax": "collective", "latent_rope": "rope"}
"""What takes as long as another module in profiles that were made before it was timed."""


class ModuleCallIssueTimes:
    """What a host takes for calls of modules, met in the order in which ops are issued.

    A call is paid for once a tape, by the first of its ops that runs, whether or not that launches anything: its
    seconds hold the launches of all of them. On top come a collective that a module launches, kernels that the library
    chooses anew, and what Megatron's checkpoint does ahead of an op that it repeats.
    """

    def __init__(self, host: HostIssueTimes) -> None:
        self.host = host
        self.begun: dict[tuple[int, bool, PairedPass], BoolK] = {}
        """Whether a call has been paid for, by its ``id``, whether it is the forward, and the pass of a pair."""

    def issue_s(self, op: Op, *, forward: bool) -> FloatK | None:
        """Seconds of an op that a call issues, where it is present; None where its module was not timed. [s]"""
        call = op.module_call
        assert call is not None
        name, format_ = call.module, call.format
        work = op.work
        on_top = isinstance(work, Collective) and name not in WITH_THEIR_COLLECTIVES
        if isinstance(work, Collective) and on_top:
            name = "exchange" if work.group == "ep" else "collective"
        fact = self.host.module_call_time(name, format_)
        if fact is None and (like := TIMED_LIKE.get(name)) is not None:
            fact = self.host.module_call_time(like, format_)
        if fact is None:
            return None
        once, each = fact.seconds(forward=forward, recorded=call.is_recorded)
        if on_top:
            return once
        key = id(call), forward, op.paired_pass
        begun = self.begun.get(key, False)
        seconds = where(begun, 0.0, call.num_calls * (once + call.num_members * each))
        self.begun[key] = begun | op.present
        if any_true(op.kernel_choices) and not op.repeated:  # computed again, it was chosen for a moment ago
            seconds = seconds + op.kernel_choices * self.kernel_selection_s(format_, forward=forward)
        return seconds + op.checkpoints * self.host.checkpoint_s.value

    def kernel_selection_s(self, format_: str, *, forward: bool) -> float:
        """Choice of a kernel within a module; where that was not timed, within PyTorch's product. [s]"""
        fact = self.host.module_call_time("kernel_choice", format_)
        return self.host.gemm_choice_s.value if fact is None else fact.seconds(forward=forward)[0]
