"""What ``backend="auto"`` tries on a GPU, fastest first, a level's name standing for all of its rungs.

On a CPU ``"auto"`` is PyTorch's own function. Rungs that take nothing which a later one refuses are left out, save
those of a level that a rule of ``"auto"`` names.
"""

from __future__ import annotations

import math

from kernel_ladder.selection.rules import Rule
from kernel_ladder.spec import Inputs, Options

ORDERS: dict[str, tuple[str, ...]] = {
    "gelu": ("cuda.vectorized", "triton.fused", "torch.builtin"),
    "softmax": (
        "cuda.cluster_two_pass",
        "cuda.cluster",
        "cuda.multirow",
        "cuda.registers",
        "cuda.shared",
        "triton.cluster",
        "triton.fused",
        "torch.builtin",
    ),
    "matmul": ("torch.builtin", "cuda"),
    "attention": (
        "torch.builtin",
        "cuda.split_kv",
        "cuda.persistent",
        "cuda.flash",
        "triton.split_kv",
        "triton.warp_specialized",
        "triton.tma",
        "triton.flash",
        "torch.naive",
    ),
    "attention_varlen": ("cuda.pingpong", "triton.flash", "torch.flash", "torch.naive"),
    "attention_paged": ("cuda.split_kv", "triton.split_kv", "torch.naive"),
    "add": ("cuda.vectorized", "triton.fused", "torch.builtin"),
    "sum": ("cuda.two_stage", "triton.two_stage", "torch.builtin"),
    "layer_norm": ("cuda.cluster", "cuda.registers", "triton.cluster", "triton.fused", "torch.builtin"),
    "rms_norm": ("cuda.cluster", "cuda.registers", "triton.cluster", "triton.fused", "torch.builtin"),
    "dropout": ("cuda.vectorized", "triton.fused", "torch.naive"),
    "bias_gelu": ("cuda.multirow", "triton.fused", "torch.builtin"),
    "cross_entropy": ("cuda.online", "triton.online", "torch.builtin"),
    "rope": ("cuda.vectorized", "triton.fused", "torch.naive"),
    "swiglu": ("cuda.vectorized", "triton.fused", "torch.builtin"),
    "add_rms_norm": ("cuda.cluster", "cuda.registers", "triton.cluster", "triton.fused", "torch.builtin"),
    "bias_dropout_add_layer_norm": (
        "cuda.cluster",
        "cuda.registers",
        "triton.cluster",
        "triton.fused",
        "triton.online",
        "torch.naive",
    ),
    "linear": ("torch.builtin", "cuda"),
    "linear_cross_entropy": ("torch.builtin", "triton"),
    "linear_float8": ("torch.builtin", "cuda.persistent", "triton.persistent", "triton.tiled", "torch.naive"),
}

#: Longest rows of a norm that are left to torch.compile: its backward pass takes 1.2 to 1.3 times as long up to them,
#: which one sum beside it makes up for, and 1.6 to 2.4 times beyond (H100).
LONGEST_FUSED_ROW = 8192


def _element_wise(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Leaves element-wise operations to the compiler that fuses them."""
    return ("torch.builtin",)


def _of_rows(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Leaves norms of rows up to 8192 elements to the compiler that fuses them."""
    length = math.prod(options.get("normalized_shape") or inputs[0].shape[-1:])
    return ("torch.builtin",) if length <= LONGEST_FUSED_ROW else ()


#: What ``"auto"`` leaves to torch.compile while it traces a call on a GPU. A kernel of ours is a wall there: nothing is
#: fused with it, and what it returns is kept for the backward pass, where a compiler computes it anew.
IN_GRAPHS: dict[str, Rule] = {
    **dict.fromkeys(("gelu", "bias_gelu", "swiglu", "add"), _element_wise),
    **dict.fromkeys(("layer_norm", "rms_norm", "add_rms_norm"), _of_rows),
}
