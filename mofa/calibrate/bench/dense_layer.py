"""A whole dense layer in plain PyTorch: what is timed beside collectives and beside held multiprocessors."""

from __future__ import annotations

import torch

from mofa.calibrate.bench.torch_timing import Call


def dense_layer_call(tokens: int, hidden: int, ffn: int, where: torch.device) -> Call:
    """A dense layer forward and backward, eager: norms, attention over 2,048 tokens in heads of 128, GELU.

    Parameters
    ----------
    tokens
        A multiple of 2,048. [tokens]
    hidden
        A multiple of 128. [-]
    ffn
        Width of the feed-forward part. [-]

    Returns
    -------
    Call
        Issues the layer's kernels on the current stream and returns.
    """
    functional = torch.nn.functional
    widths = ((hidden, 3 * hidden), (hidden, hidden), (hidden, ffn), (ffn, hidden))
    weights = [(torch.randn(n, k, device=where, dtype=torch.bfloat16) / k**0.5).requires_grad_() for k, n in widths]
    x = torch.randn(tokens, hidden, device=where, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(tokens, hidden, device=where, dtype=torch.bfloat16)

    def call() -> None:
        normed = functional.layer_norm(x, (hidden,))
        q, k, v = (
            part.view(-1, 2048, hidden // 128, 128).transpose(1, 2)
            for part in functional.linear(normed, weights[0]).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape_as(x)
        y = x + functional.linear(mixed, weights[1])
        inner = functional.gelu(functional.linear(functional.layer_norm(y, (hidden,)), weights[2]))
        torch.autograd.grad(y + functional.linear(inner, weights[3]), [x, *weights], gradient)

    return call
