"""What a host takes to issue work: facts of one machine, all of which grow with what a small op takes on another."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, Self, get_args

from pydantic import AfterValidator, Field

from mofa.specs.base import Fact, PositiveSecondsFact, SecondsFact, ShareFact, Spec
from mofa.specs.optimizer_offload import HostOptimizerRates
from mofa.specs.ranges import MOST_RATIO

Module = Literal[
    "amax", "attention", "bias_dropout_add", "collective", "dispatch", "embedding", "exchange", "exchanged_attention",
    "experts", "fp8_context", "fp8_padding", "fused_router", "gathered_attention", "grouped_linear", "head",
    "kernel_choice", "latent_attention", "latent_rope", "layer", "linear", "moe_layer", "norm", "norm_linear",
    "permute", "rope", "router", "self_attention", "sort_chunks", "swiglu", "unpermute", "weighted_swiglu",
]  # fmt: skip
MODULES: tuple[Module, ...] = get_args(Module)
"""Modules and functions of Transformer Engine and Megatron-Core, whose host time is mostly Python.

``embedding`` is all ahead of the layers, ``head`` the output layer, the loss and what the schedule does around a
micro-batch. ``norm_linear`` is a norm with its linear, ``grouped_linear`` the linears of several experts, whose members
are these; members of ``attention`` are the steps of a ring, and what it takes longer where keys and values are gathered
or heads exchanged are ``gathered_attention`` and ``exchanged_attention``. ``latent_rope`` rotates latent attention's
queries, or its keys as it puts them together. ``self_attention``, ``latent_attention``,
``experts``, ``moe_layer`` and ``layer`` are what those modules do beside the others that they call; ``dispatch``
counts tokens and copies the counts to the host, ``fused_router`` is a router whose choice is one kernel, a
``collective`` is one launched within a module, an ``exchange`` one between ranks with a layer's experts, and ``amax``
a reduction of the largest element by a cast. ``fp8_context`` is what Megatron enters around each layer,
``fp8_padding`` fills up the rows of its members, the experts, or cuts them again.
``kernel_choice`` is what a product of a grouped linear takes longer whose shape the library does not remember.
"""
ModuleKey = Annotated[str, Field(pattern=rf"^({'|'.join(MODULES)})( [a-z0-9-]+)?$")]

TIMED_FORMAT = {"fp8-mxfp8": "fp8-blockwise"}
"""The format whose modules' Python stands in where its own was not timed: both cast to rows and columns of blocks, and
gather each."""


class ModuleCallTime(Spec):
    """What one call of a module takes the host: its Python and the launches of all its kernels, each way.

    With ``n`` members it takes ``forward_s + n forward_each_s`` forward, and the same back; parameters' hooks are part
    of the way back.
    """

    forward_s: SecondsFact
    """With autograd's record. [s]"""
    backward_s: SecondsFact | None = None
    """From autograd's engine to the gradients' hooks; None without a way back. [s]"""
    forward_each_s: SecondsFact | None = None
    """What each member adds. [s]"""
    backward_each_s: SecondsFact | None = None
    """What each member adds on the way back. [s]"""
    forward_each_unrecorded_s: SecondsFact | None = None
    """What each member adds forward without autograd's record, as in the first pass of Megatron's checkpoint; None
    where it is the same. [s]"""
    forward_cast_s: SecondsFact | None = None
    """What a call takes longer that casts its weight to fp8, in a step's first micro-batch. [s]"""
    forward_each_cast_s: SecondsFact | None = None
    """What each member's weight takes there. [s]"""

    def seconds(self, *, forward: bool, recorded: bool = True) -> tuple[float, float]:
        """Of a call and of each member; ``recorded`` says whether autograd records a forward. [s]

        Examples
        --------
        >>> fact = {"value": "1 ms", "provenance": "assumed", "source": "an example"}
        >>> call = ModuleCallTime(forward_s=fact, backward_s=fact, backward_each_s=fact)
        >>> call.seconds(forward=True), call.seconds(forward=False)
        ((0.001, 0.0), (0.001, 0.001))
        """
        once, each = (self.forward_s, self.forward_each_s) if forward else (self.backward_s, self.backward_each_s)
        if forward and not recorded and self.forward_each_unrecorded_s is not None:
            each = self.forward_each_unrecorded_s
        return 0.0 if once is None else once.value, 0.0 if each is None else each.value


class SmallLayerTime(NamedTuple):
    """What a small :class:`mofa.host_pace.TransformerEngineLayer` takes a host, each way."""

    issue_s: float
    """Forward. [s]"""
    back_s: float
    """Back, on autograd's thread. [s]"""


FORWARD_FACTS = tuple(name for name in ModuleCallTime.model_fields if name.startswith("forward"))
"""Facts of a module's forward pass."""


def layer_time_factors_by_fact(issue: float, back: float) -> dict[str, float]:
    """How much longer facts take that go by a layer's forward and its way back, by their names. [-]

    Examples
    --------
    >>> sorted(layer_time_factors_by_fact(2.0, 3.0).items())[:3]
    [('backward_each_s', 3.0), ('backward_s', 3.0), ('forward_cast_s', 2.0)]
    """
    return {
        **dict.fromkeys(("layer_issue_s", *FORWARD_FACTS), issue),
        **dict.fromkeys(("layer_back_s", "backward_s", "backward_each_s"), back),
    }


GRAPH_LAUNCH = Fact(
    value=10e-6,
    provenance="assumed",
    source="no profile has it yet: taken as a few launches' time, as CUDA 12.6 launches a straight-line graph again in "
    "about as long as a kernel (NVIDIA developer blog, 'Constant Time Launch for Straight-Line CUDA Graphs')",
)
"""Where a profile has none."""
GRAPH_HOOK = Fact(
    value=8.4e-6,
    provenance="assumed",
    source="as on hardware_profiles/hosts/xeon-8480c.yaml, where it was measured",
)
"""Where a profile has none."""
SCHEDULE_NODE = Fact(
    value=0.26e-3,
    provenance="assumed",
    source="as on hardware_profiles/hosts/xeon-8480c.yaml, where it was measured",
)
"""Where a profile has none."""


class FusedOptimizerTimes(Spec):
    """What Megatron's optimizer on Transformer Engine takes the host for each tensor that a rank steps. [s]"""

    before_norm_s: SecondsFact
    """From the last gradient to the norm's kernel: main gradients, lists of them. [s]"""
    clip_s: SecondsFact
    """Behind the read of the norm: lists of gradients to scale. [s]"""
    lists_s: SecondsFact
    """Adam's lists of what it reads and writes, its launches apart. [s]"""
    copy_s: SecondsFact
    """The copy of a main parameter to the model's. [s]"""
    reset_s: SecondsFact
    """As the next step begins: gradients that are no more. [s]"""


class HostIssueTimes(Spec):
    """What the host needs to issue work."""

    cpu: str
    eager_op_s: SecondsFact
    """Issue of one small eager op of PyTorch. [s]"""
    linear_op_s: SecondsFact
    """Issue of one matrix product with autograd. [s]"""
    backward_op_s: SecondsFact
    """What autograd's engine adds to a backward op, besides the issue of its kernels. [s]"""
    compiled_op_s: SecondsFact
    """Issue of one kernel from a compiled region. [s]"""
    compiled_model_op_s: SecondsFact
    """What a model's compiled module adds to the launch of each kernel: its buffers, what is asserted of them. [s]"""
    compiled_call_s: SecondsFact
    """Guards and wrapping of one call of a compiled region, its kernels apart. [s]"""
    compiled_module_s: SecondsFact
    """The same of a model's compiled module, in training: its parameters' guards and autograd's function. [s]"""
    compiled_node_s: SecondsFact
    """What autograd does from one compiled module's backward to the next; a block's recomputation is inside. [s]"""
    compiled_attention_s: SecondsFact
    """What cuDNN's attention takes beside a launch, forward, in compiled code; eager ops have it in their mean. [s]"""
    dtensor_op_s: SecondsFact
    """Issue of one op on DTensors. [s]"""
    sync_s: SecondsFact
    """A host synchronisation: from the device's end to the host's next issue. [s]"""
    model_op_s: SecondsFact
    """What a model's Python adds to the issue of each eager op of the forward pass: modules, autograd's record. [s]"""
    function_s: SecondsFact
    """A function of Python that autograd calls (autograd.Function), one way. [s]"""
    loop_function_s: SecondsFact
    """The same in a loop over experts, which it has just been called in, each way: from the second round on, as the
    first takes twice as long (0.6 ms against 0.32, medians of mc4-tp2-pp2-etp2-mixtral-4l-traced). [s]"""
    grad_hook_s: SecondsFact
    """A parameter's hook of Python in which Megatron adds its gradient to the main one, beside the addition. [s]"""
    graph_hook_s: SecondsFact = GRAPH_HOOK
    """The same hook behind a CUDA graph that has added the gradient already, with autograd's record of the parameter,
    beside the copy of the gradient that stands for it. [s]"""
    guarded_call_s: SecondsFact
    """A call of a function compiled by itself within eager code, with its guards, one way. [s]"""
    loop_guarded_s: SecondsFact
    """The same in a loop over experts, each way. [s]"""
    view_s: SecondsFact
    """A view, with autograd's record of it. [s]"""
    gemm_choice_s: SecondsFact
    """Choice of a kernel for a matrix product of a shape that the library does not remember. [s]"""
    kernel_load_s: SecondsFact
    """A kernel that is used for the first time: the driver loads it. [s]"""
    item_s: SecondsFact
    """Reading one number of an idle device. [s]"""
    tensor_pass_s: SecondsFact
    """What an optimizer's Python does for one tensor in one loop over the tensors. [s]"""
    exchange_s: SecondsFact
    """What Megatron's schedule does from the last op of a stage's pass to the launch of its exchange. [s]"""
    pass_start_s: SecondsFact
    """What it does from the end of an exchange to the first op of the next pass. [s]"""
    step_start_s: SecondsFact
    """From the end of a step to the first kernel of the next where the host waits in between. [s]"""
    shard_hook_s: SecondsFact
    """A gather, a reduction or a copy of FSDP, issued by its hooks. [s]"""
    listing_s: SecondsFact
    """Writing down, block by block, where 2**20 elements of gradients lie that FSDP copies into one buffer. [s]"""
    dtensor_hook_s: SecondsFact
    """What training adds to each op on distributed tensors: autograd's node, the parallel style's hooks. [s]"""
    redistribute_s: SecondsFact
    """A collective between layouts of distributed tensors, with its wait, beside the launch. [s]"""
    dtensor_step_s: SecondsFact
    """What clipping and the optimizer's step do for one distributed parameter. [s]"""
    selective_op_s: SecondsFact
    """What an op-level checkpoint adds to each op, forward and where it is repeated: its dispatch mode. [s]"""
    packed_s: SecondsFact
    """A tensor that autograd saves through the hooks of PyTorch's checkpoint, forward. [s]"""
    unpacked_s: SecondsFact
    """The same where it is repeated: saved anew, compared, handed out, beside the op that makes it again. [s]"""
    checkpoint_s: SecondsFact
    """A checkpoint that is a function of Megatron's, on the way back: states of random numbers, a backward pass within
    the backward pass. [s]"""
    layer_issue_s: PositiveSecondsFact | None = None
    """Forward of a small layer of Transformer Engine: the pace at which hosts run modules' Python. [s]"""
    layer_back_s: PositiveSecondsFact | None = None
    """Its way back, on autograd's thread. [s]"""
    optimizer: HostOptimizerRates | None = None
    """What steps of an optimizer on the host reach; None where nothing is known."""
    fused_optimizer: FusedOptimizerTimes | None = None
    """Transformer Engine's optimizer under Megatron; where None by ``tensor_pass_s``."""
    schedule_node_s: SecondsFact = SCHEDULE_NODE
    """A part of a layer whose backward Megatron's schedule starts by itself: autograd's engine and thread, there and
    back. [s]"""
    graph_launch_s: SecondsFact = GRAPH_LAUNCH
    """Launch of a CUDA graph that is there already. [s]"""
    modules: dict[ModuleKey, ModuleCallTime] = {}
    """Calls of modules whose Python is timed as a whole, by :data:`MODULES` and, where it differs, the format that they
    compute in: ``linear fp8-blockwise``."""

    def module_call_time(self, name: str, format_: str) -> ModuleCallTime | None:
        """A module's call in a format; None where it was not timed in any.

        Examples
        --------
        >>> from mofa.cost.kernels.toy_gpu import toy_gpu
        >>> toy_gpu().curves.host.module_call_time("linear", "bf16") is None
        True
        """
        for key in (f"{name} {format_}", f"{name} {TIMED_FORMAT.get(format_, format_)}", name):
            if key in self.modules:
                return self.modules[key]
        return None

    def scaled_to_speed(self, op_s: float, source: str, layer: SmallLayerTime | None = None) -> Self:
        """Another host of the kind, that issues one small eager op in ``op_s``: every time in proportion.

        Modules go by ``layer`` instead, each way by its own, where that host was timed with it and this one was.
        Assumes that whatever slows one op down slows all alike. Between two machines of one kind whose small ops took
        5.4 and 10.1 us, products were 2.0, distributed tensors 2.1, autograd's nodes 1.6 and compiled functions 2.6
        times apart (measurements/h200-1gpu and h200-1gpu-second, host.csv).

        Parameters
        ----------
        op_s
            Time of one small eager op on that host. [s]
        source
            Where that was read.
        layer
            A small layer of Transformer Engine on that host.

        Examples
        --------
        >>> from mofa.cost.kernels.toy_gpu import toy_gpu
        >>> slow = toy_gpu().curves.host.scaled_to_speed(1e-5, "an example")
        >>> slow.eager_op_s.value, round(slow.dtensor_op_s.value, 9)
        (1e-05, 6e-05)
        """
        factor = op_s / self.eager_op_s.value
        by_name = layer_time_factors_by_fact(factor, factor)
        if layer is not None and self.layer_issue_s is not None and self.layer_back_s is not None:
            by_name = layer_time_factors_by_fact(
                layer.issue_s / self.layer_issue_s.value, layer.back_s / self.layer_back_s.value
            )

        def longer(fact: Fact, times: float) -> Fact:
            words = f"{fact.source}; {times:.3g} times as long: {source}"
            return Fact(value=fact.value * times, provenance=fact.provenance, source=words)

        def slower(part: Spec) -> dict[str, Fact]:
            facts = {name: fact for name in type(part).model_fields if isinstance(fact := getattr(part, name), Fact)}
            return {name: longer(fact, by_name.get(name, factor)) for name, fact in facts.items()}

        modules = {name: call.model_copy(update=slower(call)) for name, call in self.modules.items()}
        fused = self.fused_optimizer and self.fused_optimizer.model_copy(update=slower(self.fused_optimizer))
        return self.model_copy(update={**slower(self), "modules": modules, "fused_optimizer": fused})


def _at_least_typical(fact: Fact) -> Fact:
    if not 1.0 <= fact.value <= MOST_RATIO:
        raise ValueError(
            f"is {fact.value:g}; a slow host takes at least as long as a typical one: give 1 to {MOST_RATIO:g}"
        )
    return fact


class HostSpeedQuantiles(Spec):
    """How host speed spreads over machines of one kind: quantiles of a small op's time, over the typical host's. [-]

    The typical host is the one that ``GpuCurves.host`` describes.
    """

    fast: ShareFact
    """10 % quantile: one host in ten takes less. [-]"""
    slow: Annotated[Fact, AfterValidator(_at_least_typical)]
    """90 % quantile: one host in ten takes more. [-]"""
