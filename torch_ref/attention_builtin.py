"""PyTorch's own attention: its choice among its kernels, two of them by name, and what each cannot be asked."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernel_ladder.band import LOWER_RIGHT, NO_WINDOW
from kernel_ladder.transforms import under_vmap


def lower_right(seqlen_q: int, seqlen_k: int) -> torch.Tensor | None:
    """PyTorch's own object for the mask, or None where it hides nothing."""
    if seqlen_q == 1:
        return None
    from torch.nn.attention.bias import causal_lower_right  # imports the compiler, which takes seconds

    return causal_lower_right(seqlen_q, seqlen_k)


def _as_matrix(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask with at least two dimensions, as scaled_dot_product_attention wants it."""
    return mask if mask.dim() >= 2 else mask.expand(query.shape[-2], key.shape[-2])


def builtin(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool | str = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
) -> torch.Tensor:
    """PyTorch's own choice among its kernels. It has no sliding window, and keeps the log-sum-exp to itself."""
    assert window_size == NO_WINDOW
    assert not return_lse
    if is_causal == LOWER_RIGHT:
        is_causal, attn_mask = False, lower_right(query.shape[-2], key.shape[-2])
    elif attn_mask is not None:
        attn_mask = _as_matrix(attn_mask, query, key)
    scale = None if scale is None else float(scale)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _other_options(
    attn_mask: torch.Tensor | None,
    lengths: tuple[int, int],
    *,
    is_causal: bool | str,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
    **others: object,
) -> str | None:
    """What scaled_dot_product_attention cannot be asked for, or None."""
    if window_size != NO_WINDOW:
        return "scaled_dot_product_attention has no sliding window"
    if return_lse:
        return "scaled_dot_product_attention does not return the log-sum-exp"
    if is_causal and attn_mask is not None:
        return "scaled_dot_product_attention takes no causal mask beside another mask"
    if is_causal == LOWER_RIGHT and lengths[0] > lengths[1]:
        return f"PyTorch's lower right causal bias gives NaN for more queries than keys, {lengths[0]} and {lengths[1]}"
    return None


def faults(*inputs: torch.Tensor) -> str | None:
    """Why PyTorch's fused kernels would fault or fail on these inputs, or None. Seen in PyTorch 2.11.

    Rows of 16-bit values that do not start on 16 bytes are read wrong, or end the process's use of the GPU; so do
    float32 operands whose first element does not. For empty tensors the kernels return nothing, or their backward
    fails.
    """
    if not inputs[0].is_cuda:
        return None
    if any(x.numel() == 0 for x in inputs):
        return "PyTorch's fused attention takes no empty tensors"
    if inputs[0].dtype == torch.float64:
        return None
    for name, x in zip(("query", "key", "value"), inputs, strict=True):
        # While torch.compile traces, where a tensor starts is not known.
        aligned = torch.compiler.is_compiling() or x.storage_offset() * x.element_size() % 16 == 0
        if x.element_size() == 2:
            if x.shape[-1] % 8:
                continue  # PyTorch pads it first, into an aligned copy
            strides = zip(x.stride()[:-1], x.shape[:-1], strict=True)
            aligned = aligned and all(s % 8 == 0 for s, size in strides if size > 1)
        if not aligned:
            return f"PyTorch's fused attention faults on rows that do not start on 16 bytes, as those of `{name}`"
    return None


def unsupported(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    **options: object,
) -> str | None:
    if attn_mask is not None and query.is_cuda and under_vmap(query, key, value, attn_mask):
        return "PyTorch's fused attention takes no mask under torch.func.vmap"  # seen in PyTorch 2.11
    return _other_options(attn_mask, (query.shape[-2], key.shape[-2]), **options) or faults(query, key, value)


def pinned(backend: SDPBackend) -> Callable[..., tuple[torch.Tensor, tuple]]:
    def forward(*inputs: torch.Tensor, **options: object) -> tuple[torch.Tensor, tuple]:
        with sdpa_kernel(backend):
            return builtin(*inputs, **options), ()

    return forward


def _pinned_unsupported(
    name: str,
    takes: Callable[..., bool],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    **options: object,
) -> str | None:
    if not query.is_cuda:
        return f"PyTorch's {name} attention takes CUDA tensors, got {query.device.type}"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"PyTorch's {name} attention takes float16 and bfloat16, got {str(query.dtype).removeprefix('torch.')}"
    if query.dim() != 4:
        return f"PyTorch's {name} attention takes 4 dimensions (B, H, S, D), got {query.dim()}"
    lengths = query.shape[-2], key.shape[-2]
    if (reason := _other_options(attn_mask, lengths, **options) or faults(query, key, value)) is not None:
        return reason
    causal = options["is_causal"]
    if name == "flash":
        if attn_mask is not None:
            return "PyTorch's flash attention takes no mask but a causal one"
        if value.shape[-1] != query.shape[-1]:
            return f"value's head dimension must be query's, {query.shape[-1]}, got {value.shape[-1]}"
        if causal is True and lengths[0] != lengths[1]:
            return f"a causal mask needs as many queries as keys, got {lengths[0]} and {lengths[1]}"
    elif causal == LOWER_RIGHT and lengths[0] > 1:
        return (
            f"a causal mask from the lower right is flash attention's alone, got lengths {lengths[0]} and {lengths[1]}"
        )
    elif query.shape[-1] % 8 or value.shape[-1] % 8:
        return f"head dimensions must be multiples of 8, got {query.shape[-1]} and {value.shape[-1]}"
    attn_mask = None if attn_mask is None else _as_matrix(attn_mask, query, key)
    params = torch.backends.cuda.SDPAParams(query, key, value, attn_mask, 0.0, causal is True, options["enable_gqa"])
    if not takes(params):
        return f"PyTorch's {name} attention does not take these shapes or strides on this GPU"
    return None


def flash_unsupported(*inputs: torch.Tensor, **options: object) -> str | None:
    return _pinned_unsupported("flash", torch.backends.cuda.can_use_flash_attention, *inputs, **options)


def cudnn_unsupported(*inputs: torch.Tensor, **options: object) -> str | None:
    return _pinned_unsupported("cuDNN", torch.backends.cuda.can_use_cudnn_attention, *inputs, **options)
