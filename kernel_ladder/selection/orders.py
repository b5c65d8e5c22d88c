"""What ``backend="auto"`` tries on a GPU, fastest first, a level's name standing for all of its rungs.

On a CPU ``"auto"`` is PyTorch's own function. Rungs that take nothing which a later one refuses are left out, save
those of a level that a rule of ``"auto"`` names.
"""

from __future__ import annotations

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
        "triton.online",
    ),
    "matmul": ("torch.builtin", "cuda", "triton.persistent"),
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
    "layer_norm": (
        "cuda.cluster",
        "cuda.registers",
        "triton.cluster",
        "triton.fused",
        "torch.builtin",
        "triton.online",
    ),
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
    "linear": ("torch.builtin", "cuda", "triton.persistent"),
    "linear_cross_entropy": ("torch.builtin", "triton"),
    "linear_float8": ("torch.builtin", "cuda.persistent", "triton.persistent", "triton.tiled", "torch.naive"),
}
