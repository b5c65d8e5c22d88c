"""Attention of packed sequences in CUDA C++: ``csrc/attention/varlen.cu``."""

from __future__ import annotations

import torch

from cuda_impl import climb
from cuda_impl.attention import hopper_unsupported
from kernel_ladder.semantics.masks import LONGEST, NO_WINDOW
from kernel_ladder.semantics.scale import scale_of
from kernel_ladder.spec import Output
from kernel_ladder.table import register


def _as_one_batch(*packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(total, H, D) as (1, H, total, D)."""
    return tuple(x.transpose(0, 1).unsqueeze(0) for x in packed)


def _pingpong(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool | str,
    scale: float | None,
    enable_gqa: bool,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
) -> tuple[Output, tuple]:
    left, right = window_size
    output, lse = torch.ops.kernel_ladder.attention_varlen.pingpong(
        *_as_one_batch(query, key, value),
        cu_seqlens_q,
        cu_seqlens_k,
        query.shape[0] if max_seqlen_q is None else min(max_seqlen_q, LONGEST),
        min(left, LONGEST),
        0 if is_causal else min(right, LONGEST),
        scale_of(query.shape[-1], scale),
        enable_gqa,
    )
    return ((output, lse) if return_lse else output), ()


_takes = hopper_unsupported("pingpong", 128)


def _unsupported(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *offsets: torch.Tensor, **options: object
) -> str | None:
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return "the gradients of attention_varlen are given at the triton, torch and compile levels only"
    return _takes(*_as_one_batch(query, key, value))


if "pingpong" in climb("attention_varlen"):

    @torch.library.register_fake("kernel_ladder::attention_varlen.pingpong")
    def _(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, left, right, scale, enable_gqa):
        _, heads, total, _ = query.shape
        output = query.new_empty((total, heads, value.shape[-1]))
        return output, query.new_empty((heads, total), dtype=torch.float32)

    register("attention_varlen", "cuda.pingpong", forward=_pingpong, unsupported=_unsupported)
