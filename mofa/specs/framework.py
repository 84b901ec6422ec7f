"""Facts of a training framework: what it keeps, fuses, shards, overlaps; read from its source or shown by a run.

The tape transforms in :mod:`mofa.blocks.frameworks` act on these facts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from mofa.errors import StrategyError
from mofa.specs.activation_offload import ActivationOffload, ActivationOffloadText, check_activation_offload
from mofa.specs.base import CountFact, Library, Provenance, Spec
from mofa.specs.cuda_graphs import CudaGraphs, CudaGraphsText
from mofa.specs.expert_overlap import ExpertOverlap, check_expert_overlap_options
from mofa.specs.framework_names import FRAMEWORK_NAMES as FRAMEWORK_NAMES
from mofa.specs.framework_names import RANK_ORDERS, RankOrder
from mofa.specs.framework_names import Family as Family
from mofa.specs.framework_offers import LOCAL_LAYERS as LOCAL_LAYERS
from mofa.specs.framework_offers import MEGATRON, OFFERED, PYTORCH_MODULES, READ_BY
from mofa.specs.framework_traits import TRAITS, FrameworkTraits, Layers
from mofa.specs.implied_facts import DEEPSPEED, GRADIENTS, NOT_OTHERWISE
from mofa.specs.implied_facts import implied_facts as implied_facts
from mofa.specs.optimizer_offload import check_optimizer_offload
from mofa.specs.optimizers import STEP_KERNELS, Implementation, OptimizerStepKernels
from mofa.specs.ranges import (
    MAX_ALIGNMENT,
    MAX_DISPATCH_SYNCS,
    MAX_GPUS,
    MAX_HOST_THREADS,
    MAX_LOSS_METRICS,
    MAX_WIDTH,
    BytesPerParam,
    ExtraBytesPerElement,
)
from mofa.specs.strategy import FrameworkOptions


class PythonFunctionCounts(Spec):
    """Functions of Python that a framework calls beside its launches, each of which takes a host ``function_s``. [-]"""

    module_call: CountFact
    """In FSDP's hooks around a module's forward that neither gathers nor shards. [-]"""
    rows_in_order: CountFact
    """Between the host's wait for experts' counts and the rows in order: the exchange's own, PyTorch's wrapper of a
    tensor that is still on its way, which every op on it passes, a Triton kernel's launch. [-]"""
    expert_counts: CountFact
    """From the gather of rows to the host's wait for the counts. [-]"""
    experts_return: CountFact
    """From the experts' last product to the weighted sum: the exchange back, and ops on a tensor that is still on its
    way. [-]"""


def _fusion(value: object) -> object:
    """``cross_entropy_fusion`` as it was once written: true is the framework's own fused loss, false none."""
    return ("native" if value else "none") if isinstance(value, bool) else value


class FrameworkSpec(Spec):
    """One framework with its options.

    Fields that a user may set are the first group; the rest describe what the framework does and come from its
    profile. ``provenance`` is ``read`` until a run has shown it.
    """

    name: Family
    version: str
    provenance: Provenance
    source: str
    # --- options of a run
    compile: bool = False
    compile_loss: bool = True
    """Whether ``compile`` covers the loss; torchtitan left it out until spring 2025."""
    allocator: Literal["native", "expandable"] = "native"
    dispatcher: Literal["alltoall", "allgather", "deepep"] = "alltoall"
    experts: Literal["grouped", "sequential"] = "grouped"
    routed_copies: Literal["materialised", "index", "either"] = "materialised"
    """Whether experts read copies of their tokens, or gather them by index (MoEBlaze; no released framework does),
    which needs ep 1 and etp 1; ``either`` gathers by index there and copies elsewhere."""
    attention: Literal["fused", "sdpa", "flash", "flash1", "unfused"] = "fused"
    """``sdpa`` and ``fused`` take cuDNN's kernels, ``flash`` those of FlashAttention 2 (Transformer Engine's with
    ``NVTE_FUSED_ATTN=0`` or ``--attention-backend flash``), ``flash1`` the first one's."""
    permute_fusion: bool = True
    """megatron: whether Transformer Engine's kernels sort rows by expert and back (``moe_permute_fusion``) or PyTorch's
    ops. Megatron-Core 0.16.1 has it off where nothing is said; Megatron-Bridge's recipes switch it on."""
    router_fusion: bool = False
    """megatron: whether a kernel of Transformer Engine's chooses experts (``moe_router_fusion``) or PyTorch's ops."""
    router_padding: bool = False
    """megatron: with fp8 products the router's map is padded, so that each expert gets whole blocks of rows
    (``moe_router_padding_for_quantization``), and no copies of them with zeros between are made."""
    chunk_overlap: bool = False
    """With token chunks, whether the next chunk is dispatched while the experts compute on this one."""
    expert_overlap: ExpertOverlap = "none"
    """megatron: ``combined`` runs a layer's forward of one micro-batch beside another's backward, each beside the
    other's exchanges of tokens (``overlap_moe_expert_parallel_comm``)."""
    delay_wgrad: bool = False
    """megatron, with ``expert_overlap``: weight gradients of linears come later than inputs', to fill the time of
    exchanges (``delay_wgrad_compute``)."""
    shared_expert_overlap: bool = False
    """megatron: shared experts run beside the exchanges of tokens (``moe_shared_expert_overlap``)."""
    data_parallel: Literal["distributed-optimizer", "fsdp", "hsdp", "ddp"] = "distributed-optimizer"
    dp_replicate: int = Field(default=1, ge=1, le=MAX_GPUS)
    """Replicas of an FSDP shard group (HSDP); 1 shards over all of dp."""
    optimizer: Implementation = "te"
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    loss_parallel: bool = True
    cross_entropy_fusion: Annotated[Literal["none", "native", "te"], BeforeValidator(_fusion)] = "none"
    """Whether the loss of the logits is fused: ``native`` is the framework's own (Megatron's
    ``cross_entropy_fusion_impl``, fsdp1's of FlashAttention), ``te`` Transformer Engine's. True means native."""
    loss_copies_logits: bool = True
    """megatron, ``cross_entropy_fusion: te``: the loss copies the logits and writes their gradient over the copy, as
    Transformer Engine does since 2.20.2; up to 2.19 it wrote the gradient over the logits themselves."""
    grads: Literal["", "fp32", "bf16"] = ""
    """megatron: number format in which gradients are added up over micro-batches and reduced (``grad_reduce_in_fp32``
    or not); where empty, what ``grads_bytes_per_param`` and ``reduced_bytes_per_param`` say."""
    process_groups: Literal["lazy", "eager"] = "lazy"
    """Whether every process group's NCCL communicator is made with the group (``init_process_group(device_id=...)``)
    or at its first use. Lazy by default in Megatron-LM core_v0.16.1 (megatron/training/initialize.py), Megatron-Bridge
    067f987 (training/initialize.py) and torchtitan v0.2.2 (distributed/utils.py), none of which gives a device."""
    rank_order: RankOrder = "tp-cp-ep-dp-pp"
    """Megatron-Core: how ranks are numbered over the nodes, what varies fastest first. The other order
    (``--use-tp-pp-dp-mapping``) puts stages of one pipeline near each other and data-parallel ranks far apart."""
    fused_qkv: bool = False
    """fsdp1: queries, keys and values are one product."""
    loss_metrics: int = Field(default=0, ge=0, le=MAX_LOSS_METRICS)
    """fsdp1: metrics that compute a cross entropy of their own from the logits after each micro-batch. [-]"""
    cuda_graphs: CudaGraphsText = "none"
    """megatron: what is captured in CUDA graphs (:class:`mofa.specs.cuda_graphs.CudaGraphs`): ``local``,
    ``local:full_iteration``, ``te`` or ``te:attn+mlp``."""
    tp_overlap: bool = False
    """megatron: with sequence parallelism, linears gather their input and reduce their output piece by piece beside
    their product (``tp_comm_overlap``, Transformer Engine's user buffers)."""
    early_stop: bool = False
    """torchtitan, fsdp1: a checkpoint of a layer stops as soon as all that its backward reads is there again, as
    PyTorch's own does unless told otherwise (``activation_checkpoint.early_stop``, which torchtitan leaves off)."""
    saves_attention: bool = True
    """torchtitan: whether ``recompute: ops`` keeps the output of attention. cuDNN's, which runs on B200 since May 2025
    (pull request 1196), is in its list only since December 2025 (2095): in between it is computed again."""
    ends_apart: bool = True
    """torchtitan: whether the embedding, and the last norm with the output layer, are groups of FSDP of their own, as
    since pull request 1094 (end of July 2025). Before, both were the root's: gathered in front of the embedding, there
    until the end of the backward pass (FSDP2 does not shard a root again before it), reduced behind it."""
    reshard_after_forward: bool = True
    """torchtitan, fsdp1: whether FSDP lets a block's gathered weights go behind its forward, to gather them once more
    for its backward. Off, they stay until each micro-batch's backward has reduced their gradients: FSDP1's
    SHARD_GRAD_OP, torchtitan's ``fsdp_reshard_after_forward: never``. Pipelines keep them over the step anyway."""
    shards_head_norms: bool = True
    """torchtitan: whether norms over heads are split by tp, as since pull request 1870 (14 October 2025). Before,
    queries and keys were gathered for them, and turned whole on every rank as well."""
    repeats_keys: bool = False
    """torchtitan: whether keys and values are copied for every query head, as until pull request 2259 (27 January
    2026), which leaves that to the kernel."""
    overlap_input_grads: bool = True
    """Megatron: without sequence parallelism a linear's input gradient is reduced beside its weight gradient."""
    launch_blocking: bool = False
    """The host waits for every kernel that it launches (``CUDA_LAUNCH_BLOCKING=1``), so that nothing runs beside
    anything; without FSDP or overlapped gradients. What the optimizer launches is taken not to block."""
    optimizer_offload: float = Field(default=0.0, ge=0.0, le=1.0)
    """megatron: share of the optimizer's states that hosts hold and step (``optimizer_offload_fraction`` of the hybrid
    device optimizer, with ``optimizer_cpu_offload``); tensors go there whole, in order, until the share is reached. [-]
    """
    overlap_optimizer_copies: bool = False
    """With ``optimizer_offload``: each tensor's gradient, step and way back beside those of others
    (``overlap_cpu_optimizer_d2h_h2d``, which Megatron-Core 0.16.1 leaves off)."""
    host_threads: int = Field(default=1, ge=1, le=MAX_HOST_THREADS)
    """Threads of a rank on its host (``OMP_NUM_THREADS``, which torchrun sets to 1 where nothing is said), by which
    the optimizer steps there. [-]"""
    activation_offload: ActivationOffloadText = "none"
    """megatron: modules whose saved tensors go to the host until their backward, such as ``core_attn+attn_proj``
    (:class:`mofa.specs.activation_offload.ActivationOffload`, ``fine_grained_activation_offloading``)."""
    fp8_params: bool = False
    """megatron: with fp8 products the layers' weights are held and gathered in fp8 (``fp8_param_gather``): a byte a
    parameter and one transposed, instead of two of bf16 and both in fp8."""
    fp8_all_gather: bool = False
    """torchtitan, ``fp8-tensorwise``: FSDP casts its shards to fp8 and gathers those
    (``enable_fsdp_float8_all_gather``)."""
    fp8_scales_ahead: bool = False
    """torchtitan, with ``fp8_all_gather``: the scales of all weights come out of one reduction behind the optimizer's
    step (``precompute_float8_dynamic_scale_for_fsdp``), not of one for each weight in front of each gather."""
    fp8_filter: str = Field(default="output", pattern=r"^[\w.]*(\+[\w.]+)*$")
    """torchtitan: parts of names, joined by +, whose linears stay in bf16 (``filter_fqns``); ``auto_filter_small_kn``
    leaves out those that are too small to gain. The output layer, which is not compiled, must be among them."""
    pytorch: str = Field(default="", pattern=r"^(\d+\.\d+)?$")
    """Release that the run's kernels are of, such as ``2.1``, with the cuBLAS that it brings; where a GPU's profile has
    none of it, and if empty, those that its curves were measured with."""
    vocab_divisor: int = Field(default=128, ge=1, le=MAX_WIDTH)
    """Megatron pads the vocabulary to a multiple of this times tp; 1: not padded."""
    # --- what it does
    params_bytes_per_param: BytesPerParam
    """Of the parameters that compute reads, unless sharded. [B/param]"""
    grads_bytes_per_param: BytesPerParam
    reduced_bytes_per_param: BytesPerParam = 4.0
    """Of gradients as FSDP, or Megatron over data-parallel ranks, sums them. [B/param]"""
    states_bytes_per_param: BytesPerParam
    """Adam's states with the main copy of the parameters, before sharding. [B/param]"""
    shards_params: bool
    """FSDP: parameters and gradients live sharded over dp*cp, gathered per block."""
    flat_params: bool = False
    """fsdp1: a block's parameters are views of one gathered tensor; its gradients are concatenated and divided."""
    fuses_wgrad_accumulation: bool = True
    fused_swiglu: bool = True
    """Megatron: SwiGLU is one compiled function (``bias_activation_fusion``), not a kernel for each step."""
    fused_rope: bool = True
    """Megatron: the rotary embedding is one kernel (``apply_rope_fusion``), not a kernel for each step."""
    fused_softmax: bool = False
    """Unfused attention: scale, mask and softmax are one 16-bit kernel that keeps its output (Apex), not fp32 steps."""
    scatters_pipeline_sends: bool = False
    """Without sequence parallelism a tensor-parallel rank sends its part of a stage's output, which the receivers
    gather over NVLink."""
    deepspeed: Literal["", "zero0", "zero1", "bf16"] = ""
    """megatron-2022: DeepSpeed's pipeline engine, with its FP16 optimizer, ZeRO stage 1 or its BF16 optimizer."""
    norms_gradients: bool = True
    """ZeRO 1: whether the tensor-parallel rank that is told of takes the gradients' norm. Up to DeepSpeed 0.6.0 only
    the first does: ``is_model_parallel_parameter`` looks for ``model_parallel``, where Megatron of 2022 sets
    ``tensor_model_parallel`` (deepspeed/runtime/utils.py, zero/stage_1_and_2.py; megatron/mpu/layers.py)."""
    optimizer_rank: int = Field(default=0, ge=0, le=MAX_GPUS)
    """ZeRO 1: which of the ranks that share the optimizer's states is told of. The embedding lies in the parts of the
    first ones, and its piece is the largest that any part has."""
    casts_to_reduce: bool = False
    """ZeRO 1: gradients are bf16 and copied to fp16 to be reduced (DeepSpeed of early 2022: ``allreduce_bucket`` of
    zero/stage_1_and_2.py reduces what ``communication_data_type`` says, fp16 with any stage of ZeRO)."""
    splits_layers: Literal["even", "greedy", "greedy-embeddings"] = "even"
    """How uneven layers go to stages: balanced; or as many as the fullest stage may have on each but the last, with or
    without the embedding and the head as a layer each (DeepSpeed, ``partition_method: type:transformer|embedding``)."""
    accumulation_bytes_per_param: ExtraBytesPerElement = 10.0
    """Moved to add a weight gradient that is made apart: 10 reads the 16-bit one, reads and writes an fp32 one.
    [B/param]"""
    clipped_steps: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of steps in which clipping scales the gradients. PyTorch's ``clip_grad_norm_`` always multiplies, and so is
    DeepSpeed taken to. Megatron-Core 0.16.1 does only where the norm exceeds the limit (core/optimizer/clip_grads.py,
    ``clip_grad_by_total_norm_fp32``), as it rarely does in settled training: 0 there. [-]"""
    default_recompute: str = "none"
    grouped_alignment: int = Field(default=1, ge=1, le=MAX_ALIGNMENT)
    """Rows of an expert's input are padded to a multiple of this. [tokens]"""
    grouped_kernel: Literal["one", "multi-stream"] = "one"
    """Grouped experts' products are one kernel (CUTLASS's), or one each on several streams, as Transformer Engine's
    ``GroupedLinear`` runs them (transformer_engine 2.20, common/gemm/cublaslt_gemm.cu, multi_stream_cublas_gemm)."""
    python_functions: PythonFunctionCounts | None = None
    """torchtitan: what its modules call beside launches."""
    balances_by: Literal["turn", "chance"] = "turn"
    """How ``routing: balanced`` is run: tokens take experts in turn (torchtitan's ``moe_force_load_balance``), or
    random logits choose (Megatron's ``moe_router_force_load_balancing``: moe_utils.py, ``RandomSTE``)."""
    module_calls: bool = False
    """megatron: layers are calls of modules whose Python a host's profile times as a whole (``host.modules``)."""
    dispatch_syncs: int = Field(default=1, ge=0, le=MAX_DISPATCH_SYNCS)
    """Host synchronisations per dispatch of tokens. [-]"""

    def with_options(self, options: FrameworkOptions) -> Self:
        """The framework with the options that a strategy chooses.

        Raises
        ------
        StrategyError
            If the framework has no such option.
        """
        chosen = options.chosen_options
        if all(getattr(self, name) == value for name, value in chosen.items()):
            return self
        return _with_options(self, options)  # type: ignore[return-value]

    @property
    def graphs(self) -> CudaGraphs:
        """What is captured in CUDA graphs."""
        return CudaGraphs.parse(self.cuda_graphs)

    @property
    def offloaded_activations(self) -> ActivationOffload:
        """Which activations go to the host."""
        return ActivationOffload.parse(self.activation_offload)

    @property
    def fp8_filters(self) -> tuple[str, ...]:
        """Parts of names whose linears stay in bf16."""
        return tuple(part for part in self.fp8_filter.split("+") if part)

    @property
    def traits(self) -> FrameworkTraits:
        """What it does in every run."""
        return TRAITS[self.name]

    @property
    def optimizer_step_kernels(self) -> OptimizerStepKernels:
        """How its optimizer runs a step."""
        return STEP_KERNELS[self.optimizer]

    @property
    def owner_of_layer_modules(self) -> Layers:
        """Whose modules its layers are made of."""
        return self.traits.layers

    @property
    def library(self) -> Library | None:
        """The library of layers that it runs, if any."""
        return "transformer-engine" if self.owner_of_layer_modules == "transformer-engine" else None

    @property
    def has_kernel_per_expert(self) -> bool:
        """Whether each expert's product has a kernel of its own, which the library chooses by the number of rows."""
        return self.experts == "sequential" or self.grouped_kernel == "multi-stream"

    def gathered_bytes_per_param(self, gemm: str) -> float:
        """Of Megatron's parameters as data parallelism gathers them; the embedding's, always bf16, are taken alike.
        [B/param]"""
        return 1.0 if self.fp8_params and gemm != "bf16" else 2.0

    @property
    def widens_gradients(self) -> bool:
        """Whether Megatron's optimizer steps on fp32 copies of gradients, which it makes where these are in 16 bits
        (core/optimizer/distrib_optimizer.py and optimizer.py, ``_copy_model_grads_to_main_grads``)."""
        return self.name in MEGATRON and not self.deepspeed and self.grads_bytes_per_param < 4.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_options()
        self._check_routed_copies()
        self._check_deepspeed()
        self._check_gradients()
        self._check_modelled()
        self._check_zero1()
        self._check_of_one_framework()
        check_expert_overlap_options(
            self.name, self.expert_overlap, self.experts, on_engine=self.library is not None,
            delay_wgrad=self.delay_wgrad,
            shared_expert_overlap=self.shared_expert_overlap,
        )  # fmt: skip
        self._check_read_by()
        self._check_sharding()
        check_optimizer_offload(
            self.name, self.optimizer_offload, self.data_parallel, self.optimizer, on_engine=self.library is not None,
            fp8_params=self.fp8_params, has_options=self.overlap_optimizer_copies or self.host_threads != 1,
        )  # fmt: skip
        check_activation_offload(
            self.name, self.activation_offload, self.experts, on_engine=self.library is not None,
            has_graphs=self.graphs.captures_any,
            overlaps_experts=self.expert_overlap != "none" or self.shared_expert_overlap,
        )  # fmt: skip
        return self

    def _check_options(self) -> None:
        """Options that the framework offers, and what HSDP needs."""
        for field, offered in OFFERED[self.name].items():
            value = getattr(self, field)
            if value not in offered:
                raise ValueError(f"{field} ({value}) is not offered by {self.name}; use one of {', '.join(offered)}")
        if self.data_parallel == "hsdp" and self.dp_replicate == 1:
            raise ValueError("data_parallel: hsdp needs dp_replicate above 1, the replicas of a shard group")

    def _check_routed_copies(self) -> None:
        """What gathering tokens by index needs."""
        if self.routed_copies != "materialised" and (self.name != "megatron" or self.experts != "grouped"):
            raise ValueError(
                f"routed_copies: {self.routed_copies} is modelled for megatron's grouped experts, not for {self.name}'s"
            )
        if self.routed_copies != "materialised" and not (self.permute_fusion and not self.router_padding):
            raise ValueError(
                f"routed_copies: {self.routed_copies} replaces permute_fusion and router_padding; leave them out"
            )

    def _check_deepspeed(self) -> None:
        """DeepSpeed's engine and its optimizers."""
        if self.name != "megatron-2022" and (self.deepspeed or self.splits_layers != "even"):
            raise ValueError(f"deepspeed and splits_layers are options of megatron-2022, not of {self.name}")
        for field in NOT_OTHERWISE if self.deepspeed else ():
            value = getattr(self, field)
            wanted = DEEPSPEED[self.deepspeed].get(field, value)
            if value != wanted:
                raise ValueError(f"{field} ({value}) is {wanted} with deepspeed: {self.deepspeed}; leave it out")
        if (self.deepspeed, self.data_parallel) in (("zero0", "distributed-optimizer"), ("zero1", "ddp")):
            raise ValueError(
                f"data_parallel ({self.data_parallel}) cannot be with deepspeed: {self.deepspeed}; leave it out"
            )

    def _check_gradients(self) -> None:
        """Megatron's main gradients."""
        for field, value in GRADIENTS.get(self.grads, {}).items():
            if getattr(self, field) != value:
                raise ValueError(f"{field} ({getattr(self, field)}) is {value} with grads: {self.grads}; leave one out")
        if self.grads and (self.name not in MEGATRON or self.deepspeed):
            raise ValueError(f"grads ({self.grads}) is an option of Megatron's main gradients; leave it out")

    def _check_modelled(self) -> None:
        """Options that are modelled with others alone."""
        if not self.loss_copies_logits and self.cross_entropy_fusion != "te":
            raise ValueError("loss_copies_logits is an option of cross_entropy_fusion: te; leave it out")
        if self.process_groups == "eager" and self.name not in ("megatron", "megatron-local"):
            raise ValueError(f"process_groups: eager is modelled for Megatron-Core, not for {self.name}; use lazy")
        if self.rank_order != RANK_ORDERS[0] and self.name not in ("megatron", "megatron-local"):
            raise ValueError(
                f"rank_order: {self.rank_order} is an option of Megatron-Core, not of {self.name}; leave it out"
            )
        if self.launch_blocking and (self.shards_params or self.overlap_grad_reduce):
            raise ValueError("launch_blocking is modelled without FSDP and with overlap_grad_reduce: false")

    def _check_zero1(self) -> None:
        """Options of DeepSpeed's ZeRO stage 1."""
        if not self.norms_gradients and self.deepspeed != "zero1":
            raise ValueError("norms_gradients is an option of megatron-2022 with deepspeed: zero1")
        if self.optimizer_rank and self.deepspeed != "zero1":
            raise ValueError("optimizer_rank is an option of megatron-2022 with deepspeed: zero1")
        if self.casts_to_reduce and self.deepspeed != "zero1":
            raise ValueError("casts_to_reduce is an option of megatron-2022 with deepspeed: zero1")

    def _check_of_one_framework(self) -> None:
        """Options that one framework has."""
        if self.tp_overlap and self.name != "megatron":
            raise ValueError(f"tp_overlap is an option of megatron's Transformer Engine layers, not of {self.name}")
        if not self.saves_attention and self.name != "torchtitan":
            raise ValueError(f"saves_attention is an option of torchtitan's recompute: ops, not of {self.name}")
        if not self.ends_apart and self.name != "torchtitan":
            raise ValueError(f"ends_apart is an option of torchtitan's groups of FSDP, not of {self.name}")
        if not self.overlap_input_grads and self.name in PYTORCH_MODULES:
            raise ValueError(f"overlap_input_grads is an option of Megatron's linears, not of {self.name}")
        for overlap in ("overlap_grad_reduce", "overlap_param_gather"):
            if self.name in PYTORCH_MODULES and not getattr(self, overlap):
                raise ValueError(f"{overlap} is an option of Megatron's; {self.name} always overlaps, leave it out")
        if self.fp8_params and self.name != "megatron":
            raise ValueError(f"fp8_params is an option of megatron's Transformer Engine layers, not of {self.name}")
        if self.fp8_scales_ahead and not self.fp8_all_gather:
            raise ValueError("fp8_scales_ahead is an option of fp8_all_gather; set that too, or leave it out")
        if self.flat_params and self.name != "fsdp1":
            raise ValueError(f"flat_params is what fsdp1 has, not {self.name}")

    def _check_read_by(self) -> None:
        """Facts that no layer of the framework reads."""
        for field, (names, otherwise) in READ_BY.items():
            if self.name not in names and (value := getattr(self, field)) != otherwise.get(self.name, False):
                raise ValueError(
                    f"{field} ({value}) is modelled for {' and '.join(names)}, not for {self.name}; leave it out"
                )

    def _check_sharding(self) -> None:
        """How parameters are sharded and layers compiled."""
        if self.shards_params != (self.name in PYTORCH_MODULES):
            raise ValueError(
                f"shards_params ({self.shards_params}) is what {self.name} does, and no option; leave it out, "
                "data_parallel says how a run shards"
            )
        if self.compile and self.name not in PYTORCH_MODULES:
            raise ValueError(f"compile is torchtitan's option; {self.name} runs its own fused kernels")
        if self.dp_replicate > 1 and self.data_parallel not in ("fsdp", "hsdp"):
            raise ValueError(f"dp_replicate ({self.dp_replicate}) needs data_parallel: hsdp, not {self.data_parallel}")


@lru_cache(maxsize=256)
def _with_options(framework: FrameworkSpec, options: FrameworkOptions) -> FrameworkSpec:
    """A framework's copy with other options: the same one each time, so that what is made of it is shared."""
    changes: dict[str, object] = {**options.chosen_options}
    if options.dp_replicate is not None and framework.data_parallel in ("fsdp", "hsdp"):
        changes["data_parallel"] = "hsdp" if options.dp_replicate > 1 else "fsdp"
    try:
        chosen = FrameworkSpec.model_validate(framework.model_dump() | changes)
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise StrategyError(f"strategy: {said}; choose another or leave it out") from None
    if chosen.router_padding and chosen.dispatcher != "alltoall":
        raise StrategyError(
            f"strategy: dispatcher ({chosen.dispatcher}) is not modelled with router_padding; use alltoall"
        )
    return chosen
