"""attention, rung 2 of 3: fused

Idea      Call `jax.nn.dot_product_attention`: cuDNN's FlashAttention kernel on a GPU, XLA's own program on a CPU.
Predicts  No scores in memory where cuDNN runs: S² elements less to write and to read, a pass.
Limit now Takes what the library takes: no masks in memory, head dimensions of a multiple of 8 up to 256, 16-bit dtypes.
Next      `pallas`: a kernel that one can read and change.
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_ladder.semantics.deterministic import refusal as refused_as_not_deterministic
from kernel_ladder.semantics.masks import NO_WINDOW
from kernel_ladder.tracing import wants_gradient
from xla_impl.lazy import jax, jnp

#: The largest head dimension of cuDNN's kernel, and what its head dimensions are multiples of.
CUDNN_HEAD_DIM = 256
CUDNN_HEAD_MULTIPLE = 8


def formula(
    _: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    *,
    is_causal: bool | str = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
    platform: str,
) -> Any:
    """``jax.nn.dot_product_attention``, whose layout is (B, S, H, D)."""

    def rows_first(x: Any) -> Any:
        heads = x if x.ndim > 2 else x[None]
        return jnp.swapaxes(heads.reshape(-1, *heads.shape[-3:]), 1, 2)

    window = None
    if window_size != NO_WINDOW:
        longest = key.shape[-2]
        window = tuple(longest if side < 0 else min(side, longest) for side in window_size)
    options = {"is_causal": bool(is_causal), "scale": scale, "local_window_size": window}

    implementation = "cudnn" if platform == "cuda" else "xla"
    with jax.default_matmul_precision("highest"):
        found = jax.nn.dot_product_attention(
            *map(rows_first, (query, key, value)),
            implementation=implementation,
            return_residual=return_lse,
            **options,
        )
    output, lse = found if return_lse else (found, None)
    output = jnp.swapaxes(output, 1, 2).reshape(query.shape)
    return (output, jnp.swapaxes(lse, 1, 2).reshape(query.shape[:-1])) if return_lse else output


def unsupported(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool | str = False,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
    **options: Any,
) -> str | None:
    if attn_mask is not None:
        return "a row that `attn_mask` hides whole would be a mean of all values there, not zeros; use xla.jit"
    if query.dtype is torch.float64:
        return "computes in float32: takes float16, bfloat16 and float32, got float64"
    if return_lse and query.element_size() == 2:
        return "JAX rounds the log-sum-exp to 16 bits; use xla.jit"
    if return_lse and wants_gradient(query, key, value):
        return "the log-sum-exp has no gradient there; use xla.jit"
    if query.dim() < 3:
        return f"takes at least 3 dimensions, got {query.dim()}"
    if 0 in (*query.shape, *key.shape):
        return "takes no empty tensors"
    if value.shape[-1] != query.shape[-1]:
        return f"`value` must have the head dimension of `query`, got {value.shape[-1]} and {query.shape[-1]}"
    square = query.shape[-2] == key.shape[-2]
    if not square and (is_causal not in (False, True) or tuple(window_size) != NO_WINDOW):
        lengths = f"{query.shape[-2]} and {key.shape[-2]}"
        return f"a mask aligned to the lower right needs as many queries as keys, got {lengths}"
    if query.is_cuda:
        if wants_gradient(query, key, value):
            if query.shape[-2] % 2 or key.shape[-2] % 2:
                return f"cuDNN's gradients take even lengths, got {query.shape[-2]} queries and {key.shape[-2]} keys"
            if (reason := refused_as_not_deterministic()) is not None:
                return reason
        return _cudnn_unsupported(query, window_size, is_causal)
    return "XLA's CPU products of float16 have no float32 sums" if query.dtype is torch.float16 else None


def _cudnn_unsupported(query: torch.Tensor, window_size: tuple[int, int], is_causal: bool | str) -> str | None:
    dim = query.shape[-1]
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"cuDNN's kernel takes float16 and bfloat16, got {str(query.dtype).removeprefix('torch.')}"
    if dim > CUDNN_HEAD_DIM or dim % CUDNN_HEAD_MULTIPLE:
        return f"cuDNN's kernel takes head dimensions of a multiple of 8 up to {CUDNN_HEAD_DIM}, got {dim}"
    if tuple(window_size) != NO_WINDOW and not (is_causal and window_size[1] in (-1, 0)):
        return f"cuDNN's kernel takes windows of causal attention alone, got window_size={tuple(window_size)}"
    return None
