"""One rank of a run of PyTorch's first FSDP: a plain GPT, wrapped and stepped as composer does for llm-foundry.

Read in composer 0.17 (composer/trainer/dist_strategy.py, ``prepare_fsdp_module``): a flat parameter a block, the
root holds the rest, gathers are limited to two ahead, the backward prefetches behind a block's gradients
(``BACKWARD_POST``), parameters keep their own names, every micro-batch reduces its gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import set_checkpoint_early_stop

from mofa.measure.records import GRAD_NORM_LIMIT
from mofa.measure.runners.common import BuiltTraining, Job, measure_one_rank


class Attention(nn.Module):
    """Causal attention whose queries, keys and values are one product."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__()
        self.heads = plan["num_heads"], plan["num_kv_heads"], plan["num_kv_heads"]
        self.head_dim = plan["head_dim"]
        self.wqkv = nn.Linear(plan["hidden"], sum(self.heads) * self.head_dim)
        self.out = nn.Linear(plan["num_heads"] * self.head_dim, plan["hidden"])

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] in and out."""
        parts = self.wqkv(x).split([heads * self.head_dim for heads in self.heads], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in parts)
        grouped = q.size(1) != k.size(1)
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        y: Tensor = self.out(context.transpose(1, 2).flatten(-2))
        return y


class Block(nn.Module):
    """A norm and attention, a norm and a feed-forward layer, each added to its input."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__()
        norm = getattr(nn, plan["norm"])
        self.attention_norm, self.attention = norm(plan["hidden"]), Attention(plan)
        self.mlp_norm = norm(plan["hidden"])
        self.up = nn.Linear(plan["hidden"], plan["ffn_hidden"])
        self.down = nn.Linear(plan["ffn_hidden"], plan["hidden"])

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] in and out."""
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.down(functional.gelu(self.up(self.mlp_norm(x))))
        return y


class Gpt(nn.Module):
    """Embeddings of tokens and positions, blocks, the last norm and the logits."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(plan["vocab"], plan["hidden"])
        self.positions = nn.Embedding(plan["max_positions"], plan["hidden"])
        self.blocks = nn.ModuleList(Block(plan) for _ in range(plan["num_layers"]))
        self.norm = getattr(nn, plan["norm"])(plan["hidden"])
        self.head = None if plan["tied"] else nn.Linear(plan["hidden"], plan["vocab"], bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, seq] token ids to [batch, seq, vocabulary] logits."""
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return functional.linear(x, self.embedding.weight) if self.head is None else self.head(x)


def _initialise(module: nn.Module) -> None:
    """Small weights, so that losses stay finite over all steps."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)


def _wrapped(plan: dict[str, Any]) -> FullyShardedDataParallel:
    with torch.device("cuda"):
        model = Gpt(plan)
    _initialise(model)
    reduced = torch.float32 if plan["reduces_in_fp32"] else torch.bfloat16
    strategy = ShardingStrategy.FULL_SHARD if plan["reshard_after_forward"] else ShardingStrategy.SHARD_GRAD_OP
    sharded = FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduced, buffer_dtype=torch.bfloat16),
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        forward_prefetch=False,
        limit_all_gathers=True,
        use_orig_params=True,
        device_id=torch.cuda.current_device(),
    )
    if plan["recompute"] == "full":
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        apply_activation_checkpointing(
            sharded, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, Block)
        )
    return sharded


def _batches(plan: dict[str, Any], seed: int) -> Callable[[], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shape = plan["micro_batch"], plan["seq_len"] + 1
    pool = [torch.randint(plan["vocab"], shape, generator=generator).pin_memory() for _ in range(4)]
    turn = 0

    def batch() -> tuple[Tensor, Tensor]:
        nonlocal turn
        turn += 1
        tokens = pool[turn % len(pool)].cuda(non_blocking=True)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch


def build_fsdp1_training(job: Job) -> BuiltTraining:
    """The wrapped model of one rank, AdamW, clipping, and a step over all micro-batches."""
    plan = job["fsdp1"]
    torch.distributed.init_process_group("nccl", timeout=timedelta(seconds=120))
    torch.manual_seed(job["seed"])
    model = _wrapped(plan)
    kind = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}[plan["optimizer"]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, **kind)
    batch = _batches(plan, job["seed"] + torch.distributed.get_rank())
    losses: list[Tensor] = []

    def step() -> None:
        optimizer.zero_grad()
        losses.clear()
        for _ in range(plan["num_micro_batches"]):
            tokens, labels = batch()
            with set_checkpoint_early_stop(plan["early_stop"]):
                logits = model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            del logits
            (loss / plan["num_micro_batches"]).backward()
            losses.append(loss.detach())
        if plan["clips"]:
            model.clip_grad_norm_(GRAD_NORM_LIMIT)
        optimizer.step()

    parameters = list(model.parameters())
    return BuiltTraining(
        step=step,
        count_tokens=None,
        loss=lambda: float(torch.stack(losses).mean()) if losses else None,
        facts={
            "local_params": sum(p.numel() for p in parameters),
            "param_dtypes": sorted({str(p.dtype) for p in parameters}),
            "layers": [[str(i) for i in range(plan["num_layers"])]],
        },
        layers=tuple(module for module in model.modules() if isinstance(module, Block)),
    )


if __name__ == "__main__":
    measure_one_rank(build_fsdp1_training, torch.__version__)
