"""Attention of packed sequences in Triton: the kernels of :mod:`triton_impl.attention`, which read offsets.

A program finds in them where its sequence begins and how long it is. There are as many programs a sequence as the
longest needs; those past the end of a shorter one have nothing to do.
"""

from __future__ import annotations

import torch

from kernel_ladder.semantics.masks import NO_WINDOW
from kernel_ladder.spec import Output
from triton_impl import register, unsupported
from triton_impl.attention import _forward_kernel, forward
from triton_impl.attention.aot_kernels import ahead_of_time
from triton_impl.attention.backward import _key_value_kernel, _query_kernel, gradients
from triton_impl.attention.call import Call
from triton_impl.attention.tiles import BELOW_DIAGONAL, BETWEEN_DIAGONALS, LN_2


def attention_varlen(
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
    call = Call.of_packed(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, scale, window_size
    )
    rows, heads, _ = query.shape
    output, lse = query.new_empty((rows, heads, value.shape[2])), call.empty_lse((heads, rows))
    forward(call, (output, lse))
    saved = (output, lse, *call)
    return ((output, lse * LN_2) if return_lse else output), saved


def attention_varlen_backward(saved: tuple, grad: Output, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    output, lse, *of_call = saved
    call = Call(*of_call)
    return (*gradients(call, call.spread(output), lse, grad, needs), None, None)


def _unsupported(query: torch.Tensor, *others: torch.Tensor, **options: object) -> str | None:
    return unsupported(query)


register(
    "attention_varlen",
    "triton.flash",
    forward=attention_varlen,
    backward=attention_varlen_backward,
    unsupported=_unsupported,
)

AOT = [
    ahead_of_time(_forward_kernel, 128, 128, 64, 8, 3, BELOW_DIAGONAL, VARLEN=True),
    ahead_of_time(_forward_kernel, 64, 64, 64, 4, 3, BETWEEN_DIAGONALS, VARLEN=True),
    ahead_of_time(_key_value_kernel, 128, 32, 128, 8, 2, BELOW_DIAGONAL, VARLEN=True, EVEN_Q=False),
    ahead_of_time(_query_kernel, 128, 64, 64, 4, 2, BELOW_DIAGONAL, VARLEN=True),
]
