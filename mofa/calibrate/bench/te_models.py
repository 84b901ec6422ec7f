"""Whole small models of Megatron-Core on Transformer Engine, by the parts of a step, for :mod:`.te_host`."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mofa import host_pace
from mofa.calibrate.bench.te_megatron import RECIPES, Todo, init_process_groups, small_layer_config
from mofa.calibrate.bench.te_timing import RowRecorder, case_label, quiet_sample_indices

SEQUENCE, VOCABULARY = 128, 1024
WARMUP, STEPS = 4, 16
Experts = dict[str, Any]


def moe_layer_config(num: int, **more: Any) -> Experts:
    """Configuration of a layer of experts as Megatron's MoE recipes have it; of many hardly any gets no token."""
    return {
        "num_moe_experts": num, "moe_router_topk": 2 if num < 64 else 8, "moe_ffn_hidden_size": 256,
        "moe_grouped_gemm": True, "moe_permute_fusion": True, "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none", **more,
    }  # fmt: skip


class BackwardTimer:
    """Autograd's engine, whose outermost calls are marked; times are net of waits for the device."""

    def __init__(self, recorder: RowRecorder) -> None:
        self.recorder, self.depth = recorder, 0
        self.stamps: list[tuple[float, float]] = []
        self._engine = torch.autograd.Variable._execution_engine

    def mark_time(self) -> None:
        """Now, and what was waited so far."""
        self.stamps.append((time.perf_counter(), self.recorder.waits.seconds))

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """As the engine's, marked where it is not within another."""
        if self.depth == 0:
            self.mark_time()
        self.depth += 1
        try:
            return self._engine.run_backward(*args, **kwargs)
        finally:
            self.depth -= 1
            if self.depth == 0:
                self.mark_time()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class MethodTimer:
    """Seconds, net of waits, in chosen methods of Megatron's modules, of each call in the forward pass."""

    WHICH = (
        ("megatron.core.transformer.attention", "Attention", "forward"),
        ("megatron.core.transformer.multi_latent_attention", "MLASelfAttention", "forward"),
        ("megatron.core.transformer.attention", "SelfAttention", "get_query_key_value_tensors"),
        ("megatron.core.transformer.mlp", "MLP", "forward"),
        ("megatron.core.transformer.moe.moe_layer", "MoELayer", "forward"),
        ("megatron.core.transformer.moe.moe_layer", "MoELayer", "route"),
        ("megatron.core.transformer.moe.router", "TopKRouter", "gating"),
        ("megatron.core.transformer.moe.router", "TopKRouter", "routing"),
        ("megatron.core.transformer.moe.moe_layer", "MoELayer", "preprocess"),
        ("megatron.core.transformer.moe.moe_layer", "MoELayer", "dispatch"),
        ("megatron.core.transformer.moe.moe_layer", "MoELayer", "routed_experts_compute"),
        ("megatron.core.transformer.moe.token_dispatcher", "MoEAlltoAllTokenDispatcher", "preprocess"),
        ("megatron.core.transformer.moe.token_dispatcher", "MoEAlltoAllTokenDispatcher", "dispatch_postprocess"),
        ("megatron.core.transformer.moe.token_dispatcher", "MoEAlltoAllTokenDispatcher", "combine_preprocess"),
        ("megatron.core.transformer.moe.experts", "TEGroupedMLP", "forward"),
        ("megatron.core.transformer.moe.moe_layer", "MoELayer", "combine"),
        ("megatron.core.transformer.moe.moe_layer", "MoELayer", "postprocess"),
        ("megatron.core.transformer.transformer_layer", "TransformerLayer", "forward"),
        ("megatron.core.extensions.transformer_engine", "TEDotProductAttention", "forward"),
        ("megatron.core.extensions.transformer_engine", "TEGroupedLinear", "forward"),
        ("megatron.core.extensions.transformer_engine", "TELayerNormColumnParallelLinear", "forward"),
        ("megatron.core.extensions.transformer_engine", "TELinear", "forward"),
        ("megatron.core.models.gpt.gpt_model", "GPTModel", "_preprocess"),
        ("megatron.core.models.gpt.gpt_model", "GPTModel", "_postprocess"),
        ("megatron.core.optimizer.optimizer", "MixedPrecisionOptimizer", "prepare_grads"),
        ("megatron.core.optimizer.optimizer", "MegatronOptimizer", "clip_grad_norm"),
        ("megatron.core.optimizer.optimizer", "MixedPrecisionOptimizer", "step_with_ready_grads"),
        ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer", "step_with_ready_grads"),
    )
    FUNCTIONS = (
        ("megatron.core.models.common.embeddings.rope_utils", "fused_apply_rotary_pos_emb"),
        ("megatron.core.transformer.mlp", "bias_swiglu_impl"),
        ("megatron.core.transformer.moe.experts", "weighted_bias_swiglu_impl"),
        ("megatron.core.fusions.fused_bias_dropout", "bias_dropout_add_fused_train"),
        ("megatron.core.transformer.moe.token_dispatcher", "permute"),
        ("megatron.core.transformer.moe.token_dispatcher", "unpermute"),
        ("megatron.core.transformer.moe.token_dispatcher", "sort_chunks_by_idxs"),
        ("megatron.core.fp8_utils", "get_fp8_context"),
    )
    BACKWARDS = (
        ("transformer_engine.pytorch.module.linear", "_Linear"),
        ("transformer_engine.pytorch.module.layernorm_linear", "_LayerNormLinear"),
        ("transformer_engine.pytorch.module.grouped_linear", "_GroupedLinear"),
        ("transformer_engine.pytorch.attention.dot_product_attention.backends", "FusedAttnFunc"),
        ("transformer_engine.pytorch.attention.rope", "FusedRoPEFunc"),
        ("transformer_engine.pytorch.ops.fuser", "_OperationFuserAutogradFunction"),
        ("megatron.core.fusions.fused_bias_swiglu", "SwiGLUFunction"),
        ("megatron.core.fusions.fused_bias_swiglu", "WeightedSwiGLUFunction"),
        ("megatron.core.transformer.moe.moe_utils", "RouterGatingLinearFunction"),
        ("megatron.core.tensor_parallel.layers", "LinearWithGradAccumulationAndAsyncCommunication"),
        ("megatron.core.tensor_parallel.cross_entropy", "_VocabParallelCrossEntropy"),
        ("megatron.core.tensor_parallel.random", "CheckpointFunction"),
    )
    """Functions whose way back is Python, on the thread that autograd's engine runs."""
    _wrapped = False
    seconds: dict[str, list[float]] = defaultdict(list)

    @classmethod
    def start_timing_methods(cls, recorder: RowRecorder) -> None:
        """Time the methods from now on; once."""
        import importlib

        if cls._wrapped:
            return
        cls._wrapped = True
        for module, owner, method in cls.WHICH:
            with contextlib.suppress(Exception):
                kind = getattr(importlib.import_module(module), owner)
                if method in vars(kind):
                    setattr(kind, method, cls._timed(f"{owner}.{method}", getattr(kind, method), recorder))
        for module, name in cls.FUNCTIONS:
            with contextlib.suppress(Exception):
                place = importlib.import_module(module)
                setattr(place, name, cls._timed(name, getattr(place, name), recorder))
        rms = importlib.import_module("transformer_engine.pytorch").RMSNorm
        rms.forward = cls._timed("RMSNorm.forward", rms.forward, recorder)
        with contextlib.suppress(Exception):
            place = importlib.import_module("megatron.core.distributed").DistributedDataParallel
            make = place._make_backward_post_hook
            place._make_backward_post_hook = lambda self, parameter: cls._timed("hook", make(self, parameter), recorder)
        for module, name in cls.BACKWARDS:
            with contextlib.suppress(Exception):
                kind = getattr(importlib.import_module(module), name)
                kind.backward = staticmethod(cls._timed(f"{name}.backward", kind.backward, recorder))

    @classmethod
    def _timed(cls, name: str, call: Callable[..., Any], recorder: RowRecorder) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            waits = recorder.waits
            waited, began = waits.seconds, time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                cls.seconds[name].append(time.perf_counter() - began - (waits.seconds - waited))

        return timed


class MegatronModel:
    """A model with its data parallelism, optimizer and schedule, put together as Megatron's training loop does."""

    def __init__(self, changes: dict[str, Any], micro_batches: int, overlap: bool) -> None:
        from megatron.core import tensor_parallel
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer.module import Float16Module

        config = small_layer_config(**changes)
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization="RMSNorm")
        model = GPTModel(
            config=config, transformer_layer_spec=spec, vocab_size=VOCABULARY, max_sequence_length=4 * SEQUENCE,
            position_embedding_type="rope", share_embeddings_and_output_weights=False,
        )  # fmt: skip
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        wrapped = Float16Module(config, model.cuda())
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
        )  # fmt: skip
        self.model = DistributedDataParallel(config, options, wrapped)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=1e-4, weight_decay=0.1, bf16=True, params_dtype=torch.bfloat16,
                use_distributed_optimizer=True, clip_grad=1.0, overlap_param_gather=overlap,
            ),
            [self.model], use_gloo_process_groups=False,
        )  # fmt: skip
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if overlap:
            config.no_sync_func = self.model.no_sync
        self.schedule = get_forward_backward_func()
        self.micro_batches = micro_batches
        self.num_parameters = len(list(model.parameters()))
        self.model.train()
        self._tokens = torch.randint(VOCABULARY, (1, SEQUENCE + 1)).pin_memory()

    def forward_step(self, batch: Any, model: Any) -> tuple[Any, Any]:
        """One micro-batch."""
        tokens = self._tokens.cuda(non_blocking=True)
        positions = torch.arange(SEQUENCE, device="cuda").unsqueeze(0)
        out = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous())

        def loss(output: Any) -> tuple[Any, dict[str, Any]]:
            mean = output.float().mean()
            return mean, {"lm loss": mean.detach().clone()}

        return out, loss

    def step(self, mark: Callable[[], None]) -> None:
        """A training step; ``mark`` between its parts."""
        mark()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        mark()
        self.schedule(
            forward_step_func=self.forward_step, data_iterator=None, model=self.model,
            num_microbatches=self.micro_batches, seq_length=SEQUENCE, micro_batch_size=1,
            decoder_seq_length=SEQUENCE, forward_only=False,
        )  # fmt: skip
        mark()
        self.optimizer.step()
        mark()


def time_model_parts(
    recorder: RowRecorder, op: str, changes: dict[str, Any], layers: int, micro_batches: int = 1, *,
    recipe: str = "bf16", overlap: bool = False,
) -> None:  # fmt: skip
    """Rows of a model's parts of a step, in all and of each call of chosen methods."""
    if recipe != "bf16":
        name, form = RECIPES[recipe]
        changes = changes | {"fp8": form, "fp8_recipe": name}
    _forget_aux_losses()
    MethodTimer.start_timing_methods(recorder)
    model = MegatronModel(changes | {"num_layers": layers}, micro_batches, overlap)
    marks = BackwardTimer(recorder)
    torch.autograd.Variable._execution_engine = marks
    times_by_part: dict[str, list[float]] = defaultdict(list)
    called: dict[str, list[float]] = defaultdict(list)
    layer = host_pace.TransformerEngineLayer()
    quiet: list[bool] = []
    steps: list[tuple[dict[str, float], dict[str, list[float]]]] = []
    try:
        for i in range(WARMUP + STEPS):
            settled = i >= WARMUP and recorder.cores.stay_or_move_to_quiet()
            ahead = layer.forward_and_backward_s(5)
            MethodTimer.seconds = defaultdict(list)
            marks.stamps = []
            torch.autograd.Variable._execution_engine = marks
            model.step(marks.mark_time)
            torch.autograd.Variable._execution_engine = marks._engine
            torch.cuda.synchronize()
            calls, MethodTimer.seconds = MethodTimer.seconds, defaultdict(list)
            behind = layer.forward_and_backward_s(5)
            forward, back = (
                0.5 * (a + b)
                for a, b in zip(
                    recorder.pace.layer_times_over_given(ahead),
                    recorder.pace.layer_times_over_given(behind),
                    strict=True,
                )
            )
            if i >= WARMUP:
                quiet.append(settled and recorder.cores.is_still_quiet())
                parts = {
                    part: (back if part.startswith("backward") else forward) * seconds
                    for part, seconds in _parts(marks.stamps).items()
                }
                scaled = {
                    part: [(back if part.endswith(".backward") or part == "hook" else forward) * s for s in times]
                    for part, times in calls.items()
                }
                steps.append((parts, scaled))
        for i in quiet_sample_indices([sum(parts.values()) for parts, _ in steps], quiet, 0):
            parts, scaled = steps[i]
            for part, seconds in parts.items():
                times_by_part[part].append(seconds)
            for part, times in scaled.items():
                called[part] += times
        num_steps = len(next(iter(times_by_part.values())))
    finally:
        recorder.cores.release()
        torch.autograd.Variable._execution_engine = marks._engine
    sizes = {"ops": 1, "layers": layers, "micro_batches": micro_batches, "parameters": model.num_parameters}
    for part, times in times_by_part.items():
        if max(times) > 0:
            recorder.write_row(op, part, recipe, sizes, times)
    for part, times in called.items():
        recorder.write_row(op, f"call:{part}", recipe, {**sizes, "calls": len(times) // num_steps or 1}, times)
    recorder.write_pace_rows(op, recipe, sizes)
    label = case_label(op, recipe, sizes)
    recorder.later.append((f"{label}|step", partial(model.step, lambda: None)))
    if recorder.writes:
        middle = {part: sorted(times)[len(times) // 2] * 1e3 for part, times in times_by_part.items()}
        print(f"{label:58s} " + " ".join(f"{part} {ms:.2f}" for part, ms in middle.items()) + " ms", flush=True)


def _forget_aux_losses() -> None:
    """Megatron keeps them by layer, of as many layers as the first model had."""
    with contextlib.suppress(Exception):
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        get_moe_layer_wise_logging_tracker().clear()


def _parts(stamps: list[tuple[float, float]]) -> dict[str, float]:
    """Seconds of a step's parts from its marks: begin, zeroed, then pairs of each backward, end, stepped."""

    def net(a: int, b: int) -> float:
        return stamps[b][0] - stamps[a][0] - (stamps[b][1] - stamps[a][1])

    num = (len(stamps) - 4) // 2
    begins, ends = [2 + 2 * i for i in range(num)], [3 + 2 * i for i in range(num)]
    last = len(stamps) - 2
    return {
        "zero": net(0, 1),
        "forward": sum(net(b - 1, b) for b in begins),
        "backward": sum(net(b, e) for b, e in zip(begins, ends, strict=True)),
        "finalize": net(last - 1, last),
        "optimizer": net(last, last + 1),
        "forward_waits": sum(stamps[b][1] - stamps[b - 1][1] for b in begins),
        "backward_waits": sum(stamps[e][1] - stamps[b][1] for b, e in zip(begins, ends, strict=True)),
        "optimizer_waits": stamps[last + 1][1] - stamps[last][1],
    }


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 64, "v_head_dim": 64, "rope_type": "yarn", "qk_layernorm": True, "kv_channels": None,
    "num_query_groups": 4,
}  # fmt: skip


def one_gpu_model_cases(recorder: RowRecorder) -> Todo:
    """Cases of models on one GPU, the ones that matter most first."""
    plain: dict[str, Any] = {}
    listed: list[tuple[str, dict[str, Any], tuple[int, ...], dict[str, Any]]] = [
        ("model_dense", plain, (2, 6), {}),
        ("model_moe8", moe_layer_config(8), (2, 4), {}),
        ("model_moe64", moe_layer_config(64), (1, 3), {}),
        ("model_dense", plain, (2,), {"micro_batches": 3}),
        ("model_moe8", moe_layer_config(8), (2,), {"micro_batches": 3}),
        ("model_dense_full", FULL, (2, 6), {}),
        (
            "model_moe8_aux",
            moe_layer_config(8, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-2),
            (2, 4),
            {},
        ),
        ("model_dense", plain, (2, 4), {"recipe": "fp8-blockwise"}),
        ("model_dense", plain, (2, 4), {"recipe": "fp8-tensorwise"}),
        ("model_dense", plain, (2, 4), {"recipe": "fp8-delayed"}),
        ("model_moe8", moe_layer_config(8), (1, 3), {"recipe": "fp8-blockwise"}),
        ("model_moe8_forced", moe_layer_config(8, moe_router_force_load_balancing=True), (2, 4), {}),
        ("model_moe8_router_fused", moe_layer_config(8, moe_router_fusion=True), (2, 4), {}),
        ("model_moe8_shared", moe_layer_config(8, moe_shared_expert_intermediate_size=256), (2, 4), {}),
        ("model_moe8_full", moe_layer_config(8) | FULL, (2, 4), {}),
        ("model_moe128", moe_layer_config(128), (1, 2), {}),
        ("model_latent", LATENT, (2, 4), {}),
        ("model_qk_norm", {"qk_layernorm": True}, (2, 4), {}),
        ("model_dense", plain, (2,), {"micro_batches": 3, "recipe": "fp8-blockwise"}),
        ("model_moe8_allgather", moe_layer_config(8, moe_token_dispatcher_type="allgather"), (2, 4), {}),
        ("model_dense_eager_rope", {"apply_rope_fusion": False}, (2, 4), {}),
    ]
    return _todo(recorder, listed)


def _todo(
    recorder: RowRecorder, listed: list[tuple[str, dict[str, Any], tuple[int, ...], dict[str, Any]]]
) -> Todo:  # fmt: skip
    return [
        (op, partial(time_model_parts, recorder, op, changes, layers, **more))
        for op, changes, numbers, more in listed
        for layers in numbers
    ]


def two_gpu_model_cases(recorder: RowRecorder) -> Todo:
    """Cases of models on two GPUs; groups are made anew for each kind of parallelism."""
    kinds: list[tuple[str, dict[str, int], dict[str, Any], tuple[int, ...], bool]] = [
        ("model_tp2_dense", {"tensor_model_parallel_size": 2}, {"sequence_parallel": True}, (2, 4), False),
        ("model_ep2_moe8", {"expert_model_parallel_size": 2}, moe_layer_config(8), (2, 4), False),
        ("model_cp2_p2p", {"context_parallel_size": 2}, {"cp_comm_type": "p2p"}, (2, 4), False),
        ("model_dp2_dense", {}, {}, (2, 4), True),
        ("model_ep2_moe64", {"expert_model_parallel_size": 2}, moe_layer_config(64), (1, 2), False),
        ("model_cp2_all_gather", {"context_parallel_size": 2}, {"cp_comm_type": "all_gather"}, (2, 4), False),
        ("model_cp2_a2a", {"context_parallel_size": 2}, {"cp_comm_type": "a2a"}, (2, 4), False),
    ]
    todo: Todo = []
    for op, parallel, changes, numbers, overlap in kinds:
        for layers in numbers:

            def call(
                op: str = op, parallel: dict[str, int] = parallel, changes: dict[str, Any] = changes,
                layers: int = layers, overlap: bool = overlap,
            ) -> None:  # fmt: skip
                init_process_groups(2, parallel)
                time_model_parts(recorder, op, changes | parallel, layers, overlap=overlap)

            todo.append((op, call))
    return todo
