"""What is timed of a host: its issue of single ops, of what a model's Python adds, and of many kinds in turn."""

from __future__ import annotations

from mofa.calibrate.cases import Case, Item, Shape, grid_and_held_out_cases

HOST_OPS = ("launch_empty", "launch_gap", "eager_add", "eager_view", "eager_mm", "eager_linear_grad", "eager_rmsnorm",
            "eager_silu", "eager_backward_per_op", "dtensor_add", "dtensor_mm", "compiled_call", "compiled_kernel",
            "sync", "item", "nonzero", "mm_new_rows", "mm_seen_rows")  # fmt: skip


def host_issue_cases() -> list[Case]:
    """The host's issue of ops and its synchronisations."""
    return grid_and_held_out_cases("host", [(op, "python", "bf16", {"ops": 200}) for op in HOST_OPS], [], 0)


AUTOGRAD_CHAINS = ("grad_silu", "grad_view", "grad_mul", "module_linear", "module_rmsnorm", "autocast_linear",
                   "function", "guarded", "checkpoint", "selective", "dtensor_linear", "dtensor_silu",
                   "fsdp_linear")  # fmt: skip
"""Chains of layers of one kind, timed forward, and with ``_bwd`` behind the name backward."""
AUTOGRAD_CALLS = ("all_reduce", "all_to_all", "functional_gather", "adamw_fused", "adamw_foreach", "clip")


def autograd_host_cases() -> list[Case]:
    """The host's issue of what a model's Python adds to bare ops; see `mofa.calibrate.bench.torch_autograd`."""
    ops = [f"{name}{suffix}" for name in AUTOGRAD_CHAINS for suffix in ("", "_bwd")] + list(AUTOGRAD_CALLS)
    return grid_and_held_out_cases("autograd", [(op, "python", "bf16", {"ops": 200}) for op in ops], [], 0)


LARGE = ((8192, 2048), (512, 768), (512, 1024), (1024, 1024), (2048, 2048), (4096, 4096))
"""Rows and widths of tensors on either side of a MiB, from which on PyTorch's allocator keeps them apart."""
COPIED = ((1, 2**20), (1, 2**24), (1, 2**26), (1, 2**28), (8, 2**20), (8, 2**24), (64, 2**16), (3, 138 * 2**20))
"""Parameters that FSDP copies at once, and the elements of each."""


EXPERTS = ((16, 2048, 4096, 6400), (16, 256, 256, 256), (4, 256, 256, 256), (64, 256, 256, 256), (32, 512, 2048, 1024))
"""Experts that run one after the other, rows of each, the model's width and theirs."""


def op_sequence_host_cases() -> list[Case]:
    """The host's issue of many kinds of ops in turn; see `mofa.calibrate.bench.torch_sequence`."""
    small: Shape = {"ops": 320, "rows": 256, "width": 256}
    larger: list[Shape] = [{"ops": 320, "rows": rows, "width": width} for rows, width in LARGE]
    items: list[Item] = []
    for variant in ("python", "queued", "profiled"):
        for op in ("alone", "in_turn", "layer", "layer_no_grad", "layer_bwd", "layer_hooked"):
            if (op, variant) != ("alone", "profiled"):  # a start of the profiler for each kind of each round
                items.append((op, variant, "bf16", small))
    for shape in larger:
        items += [(op, "queued", "bf16", shape) for op in ("alone", "in_turn", "layer", "layer_no_grad", "layer_bwd")]
    items += [(op, "python", "bf16", small) for op in ("in_turn_walked_4m", "in_turn_walked_64m", "layer_launches")]
    for experts, rows, width, inner in EXPERTS:
        for op in ("experts", "experts_no_grad", "experts_bwd"):
            sizes: Shape = {"experts": experts, "rows": rows, "width": width, "inner": inner}
            items += [(op, how, "bf16", sizes) for how in ("same", "seen", "new")]
    for ranks in (1, 2, 4):
        for params, numel in COPIED:
            copied: Shape = {"params": params, "numel": numel, "ranks": ranks}
            items += [(op, "python", "bf16", copied) for op in ("chunk_cat", "split_copy")]
    return grid_and_held_out_cases("sequence", items, [], 0)


HOST_OPTIMIZER = "host_optimizer"
"""Family of an optimizer on the host: measured where it is named."""
STEPPED_PARAMS = (2**22, 2**24, 2**26, 2**28)
"""Of one parameter tensor: those of a layer's norms to those of an embedding. [params]"""
THREADS = (1, 2, 4, 8, 16, 32, 64)


def host_optimizer_cases() -> list[Case]:
    """Adam's step on the processor by threads, and its gradients' and parameters' way there and back."""
    items: list[Item] = [
        ("adam_step", "fused", "fp32", {"params": params, "threads": threads})
        for threads in THREADS
        for params in STEPPED_PARAMS
    ]
    for params in STEPPED_PARAMS:
        items += [(op, "memory", "fp32", {"params": params}) for op in ("grads_to_host", "params_to_device")]
    return grid_and_held_out_cases(HOST_OPTIMIZER, items, [], 0)
