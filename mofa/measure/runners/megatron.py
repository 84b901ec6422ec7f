"""One rank of a Megatron-Core run: on its local layer spec if started itself, else by :func:`build_megatron_training`.

On the local spec, without Transformer Engine or Apex, two modules are supplied from outside, as Megatron's specs allow:
PyTorch's scaled dot product as the core attention, and a norm that marks its weight as ``sequence_parallel``, because
Megatron's own wrapper of PyTorch's norm refuses it. ``moe_utils.te_general_gemm`` is set to None, which is how that
module asks whether it is there, and ``multi_latent_attention.HAVE_TE`` to False: it takes an import of
placeholders for Transformer Engine itself.
"""

from __future__ import annotations

import collections
import functools
import importlib.metadata
import os
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core import parallel_state, tensor_parallel
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe import moe_utils

from mofa.measure.records import DRAWN
from mofa.measure.runners import graph_capture
from mofa.measure.runners.common import BuiltTraining, Job, measure_one_rank

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None
if not isinstance(multi_latent_attention.TELinear, type):  # a placeholder: Transformer Engine is not installed
    multi_latent_attention.HAVE_TE = False


class SequenceParallelNorm:
    """PyTorch's norm with its weight marked for the reduction of sequence parallelism."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        """A torch module; Megatron's specs ask for a class."""
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(normalized_shape=hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class SdpaAttention(MegatronModule):  # type: ignore[misc]
    """Core attention through ``torch.nn.functional.scaled_dot_product_attention``, causal."""

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        """[s, b, heads, d] in, [s, b, heads * d_v] out."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        grouped = q.size(1) != k.size(1)
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped
        )
        return out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)


def _block_spec(config: Any, job: dict[str, Any], vp_stage: int | None) -> Any:
    if job["transformer_engine"]:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in spec.layer_specs:
        modules = layer.submodules
        modules.input_layernorm = modules.pre_mlp_layernorm = SequenceParallelNorm
        attention = modules.self_attention.submodules
        if job["attention"] == "sdpa":
            attention.core_attention = SdpaAttention
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):  # of heads, or of latents
            if getattr(attention, name, IdentityOp) is not IdentityOp:
                setattr(attention, name, SequenceParallelNorm)
    spec.layer_norm = SequenceParallelNorm
    return spec


def _config(options: dict[str, Any]) -> Any:
    values = dict(options)
    functions = {function.__name__: function for function in (functional.silu, functional.gelu, functional.relu)}
    values["activation_func"] = (functions | {"squared_relu": squared_relu})[values["activation_func"]]
    values["params_dtype"] = values["pipeline_dtype"] = torch.bfloat16
    if "attention_backend" in values:
        values["attention_backend"] = AttnBackend[values["attention_backend"]]
    if "window_size" in values:
        values["window_size"] = tuple(values["window_size"])
    latent = values.get("multi_latent_attention", False)
    return (MLATransformerConfig if latent else TransformerConfig)(bf16=True, **values)


def _initialize(plan: dict[str, Any], seed: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device()) if plan["eager_groups"] else None
    torch.distributed.init_process_group("nccl", timeout=timedelta(seconds=120), device_id=device)
    parallel_state.initialize_model_parallel(**plan["parallel"])
    tensor_parallel.model_parallel_cuda_manual_seed(seed, te_rng_tracker=graph_capture.captures_graphs(plan))
    torch.manual_seed(seed + parallel_state.get_pipeline_model_parallel_rank())


def _chunks(config: Any, job: dict[str, Any]) -> list[Any]:
    chunks = []
    num_chunks = config.virtual_pipeline_model_parallel_size
    for stage in range(num_chunks or 1):
        vp_stage = stage if num_chunks else None
        model = GPTModel(
            config=config,
            transformer_layer_spec=_block_spec(config, job, vp_stage),
            vocab_size=job["padded_vocab"],
            max_sequence_length=job["max_positions"],
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=job["tied"],
            position_embedding_type=job["positions"],
            rotary_percent=job["rotary_percent"],
            rotary_base=500000,
            vp_stage=vp_stage,
        )
        model.model_type = ModelType.encoder_or_decoder
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(Float16Module(config, model.cuda(torch.cuda.current_device())))
    return chunks


def _batches(job: dict[str, Any], seed: int) -> Callable[[], tuple[Any, Any, Any]]:
    shape = (job["micro_batch"], job["seq_len"] // job["cp"])
    generator = torch.Generator().manual_seed(seed)
    number = 4 * job["num_micro_batches"]  # none comes twice in a step: its rows would find their kernels chosen
    pool = [
        torch.randint(job["vocab"], (shape[0], shape[1] + 1), generator=generator).pin_memory() for _ in range(number)
    ]
    turn = 0

    def batch() -> tuple[Any, Any, Any]:
        nonlocal turn
        turn += 1
        tokens = pool[turn % len(pool)].cuda(non_blocking=True)
        positions = torch.arange(shape[1], device="cuda").unsqueeze(0).expand(*shape)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions

    return batch


def _loss(output: Any) -> tuple[Any, dict[str, Any]]:
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach().clone()}


def _forward_step(batch: Callable[[], Any], model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """A micro-batch's forward, or what a schedule runs beside a backward in its place (combined_1f1b.py)."""
    tokens, labels, positions = batch()
    if return_schedule_plan:
        return model.build_schedule_plan(tokens, positions, None, labels=labels), _loss
    return model(tokens, positions, None, labels=labels), _loss


def _routers(chunks: list[Any]) -> list[Any]:
    routers = [m for chunk in chunks for m in chunk.modules() if type(m).__name__ == "TopKRouter"]
    return sorted(routers, key=lambda router: router.layer_number)


CERTAINTY = 8.0
"""How much larger than a router's own logits those are that choose its experts. [-]"""


def _skew_routers(chunks: list[Any], shares: list[float] | None, tokens: int, seed: int) -> None:
    """Let each token choose its experts by itself, each as often as it is wanted.

    Logarithms of shares plus Gumbel noise choose experts in proportion to the shares, without putting any back. The
    router's own logits stay, too small to matter: of weights that were never trained they send whole sequences to the
    same experts. Every call starts at another row of the noise, so that no two have the same counts, and one that is
    computed again starts where it did before.
    """
    if shares is None:
        return
    shift = torch.tensor(shares, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(seed)
    uniform = torch.rand(2 * tokens, len(shares), device="cuda", generator=generator)
    noise = CERTAINTY * (shift - torch.log(-torch.log(uniform.clamp_(1e-6, 1 - 1e-6))))
    rows = random.Random(seed)
    for router in _routers(chunks):
        inner = router.gating
        again: collections.deque[int] = collections.deque()

        def skewed(hidden: Any, inner: Callable[[Any], Any] = inner, again: collections.deque[int] = again) -> Any:
            logits = inner(hidden)
            num = logits.numel() // logits.size(-1)
            recomputed = torch.is_grad_enabled() and bool(again)
            first = again.popleft() if recomputed else rows.randrange(noise.size(0) - num + 1)
            if not torch.is_grad_enabled():  # a checkpoint's first pass; its second comes in the same order
                again.append(first)
            return logits + noise[first : first + num].view_as(logits).to(logits.dtype)

        router.gating = skewed


def _moe_layers(chunks: list[Any]) -> list[Any]:
    layers = [m for chunk in chunks for m in chunk.modules() if type(m).__name__ == "MoELayer"]
    return sorted(layers, key=lambda layer: layer.router.layer_number)


def _counter(
    chunks: list[Any], step: Callable[[], None], tokens: int, plan: dict[str, Any]
) -> Callable[[], list[list[int]]] | None:
    captured = graph_capture.captures_router(plan)
    layers = _moe_layers(chunks)
    if not layers or (captured and plan["config"]["expert_model_parallel_size"] > 1):
        return None  # a captured router's hooks are not called, and experts see what all ranks send them

    def count() -> list[list[int]]:
        seen: dict[int, Any] = {}

        def look(layer: int, _: Any, inputs: Any, output: Any) -> None:
            seen[layer] = seen.get(layer, 0) + (inputs[1] if captured else output[1].sum(dim=0))

        numbers = [m.router.layer_number for m in layers]
        watched = [m.experts if captured else m.router for m in layers]
        hooks = [m.register_forward_hook(functools.partial(look, n)) for m, n in zip(watched, numbers, strict=True)]
        step()
        for hook in hooks:
            hook.remove()
        counts = [seen[n].float() for n in numbers]
        return [[round(float(v) * tokens / max(float(c.sum()), 1.0)) for v in c.tolist()] for c in counts]

    return count


def build_megatron_training(job: Job) -> BuiltTraining:
    """Model chunks, optimizer and schedule of one rank, put together as Megatron-LM's training loop does."""
    plan = job["megatron"]
    _initialize(plan, job["seed"])
    config = _config(plan["config"])
    modules = _chunks(config, plan)
    ddp = DistributedDataParallelConfig(**plan["ddp"])
    with graph_capture.side_stream_for_wrapping(plan):
        chunks = [DistributedDataParallel(config, ddp, m, disable_bucketing=(i > 0)) for i, m in enumerate(modules)]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-4, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, bf16=True,
            params_dtype=torch.bfloat16, **plan["optimizer"],
        ),
        chunks,
        use_gloo_process_groups=plan["parallel"].get("create_gloo_process_groups", True),
    )  # fmt: skip
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if ddp.overlap_grad_reduce:
        config.no_sync_func = [c.no_sync for c in chunks] if len(chunks) > 1 else chunks[0].no_sync
    if ddp.overlap_param_gather and ddp.align_param_gather:
        starts = [c.start_param_sync for c in chunks]
        config.param_sync_func = starts if len(chunks) > 1 else starts[0]
    for chunk in chunks:
        chunk.train()
    tokens = plan["micro_batch"] * plan["seq_len"] // plan["cp"]
    _skew_routers(chunks, job.get("routing_bias"), tokens, job["seed"] + parallel_state.get_data_parallel_rank())
    schedule = graph_capture.schedule_in_full_graph(get_forward_backward_func(), plan)
    graphs = graph_capture.TransformerEngineGraphs(plan, config, chunks, optimizer)
    batch: Any = _batches(plan, job["seed"] + parallel_state.get_data_parallel_rank())
    forward_step = _forward_step
    if graph_capture.captures_full_iteration(plan):
        batch, forward_step = (
            graph_capture.StaticGraphBatches(batch),
            graph_capture.forward_step_with_static_batches(_loss),
        )
    losses: list[Any] = []
    norms: list[float] = []

    def step() -> None:
        graphs.capture_if_due()
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = schedule(
            forward_step_func=forward_step,
            data_iterator=[batch] * len(chunks) if len(chunks) > 1 else batch,
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=plan["num_micro_batches"],
            seq_length=plan["seq_len"],
            micro_batch_size=plan["micro_batch"],
            decoder_seq_length=plan["seq_len"],
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        if norm is not None:
            norms.append(norm)
        losses[:] = [r["lm loss"] for r in reduced]

    return BuiltTraining(
        step=step,
        count_tokens=_counter(chunks, step, job["routed_per_step"], plan),
        loss=lambda: float(torch.stack(losses).mean()) if losses else None,
        facts={
            "local_params": sum(p.numel() for c in chunks for p in c.parameters()),
            "param_dtypes": sorted({str(p.dtype) for c in chunks for p in c.parameters()}),
            "layers": [[str(x.layer_number - 1) for x in m.module.decoder.layers] for m in modules],
            **({"routed": DRAWN} if job.get("routing_bias") is not None else {}),
            "optimizers": [type(o).__name__ for o in getattr(optimizer, "chained_optimizers", [optimizer])],
        },
        on_engine=plan["transformer_engine"],
        layers=graph_capture.modules_with_pace_hooks(plan, modules),
        chunks=tuple(modules),
        parts="mofa.measure.runners.megatron_parts",
        grad_norms=norms,
    )


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    measure_one_rank(build_megatron_training, importlib.metadata.version("megatron-core"))
