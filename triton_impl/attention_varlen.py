"""attention_varlen, rung 1 of 1: flash

Idea      The kernels of attention's `flash` and of its backward (shared openly) read the offsets of packed sequences:
          where a program's sequence begins and how long it is.
Predicts  The time of `flash` on each sequence alone.
Limit now Every sequence has as many programs as the longest needs; those past its end exit at once.
Next      cuda `pingpong`.
"""

from __future__ import annotations

import torch

from kernel_ladder.semantics.masks import NO_WINDOW
from kernel_ladder.spec import Inputs, Options, Output
from triton_impl import register, unsupported
from triton_impl.attention.backward import gradients
from triton_impl.attention.call import Call
from triton_impl.attention.flash import forward
from triton_impl.attention.tiles import LN_2


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
    *grads, _ = gradients(call, call.spread(output), lse, grad, needs)
    return (*grads, None, None)


def saved_from(inputs: Inputs, outputs: tuple[torch.Tensor, ...], options: Options) -> tuple:
    """What the forward saves, by outputs from elsewhere: see :class:`kernel_ladder.table.Variant`."""
    output, lse = outputs
    of_call = ("max_seqlen_q", "max_seqlen_k", "is_causal", "scale", "window_size")
    return (output, lse / LN_2, *Call.of_packed(*inputs, *[options[name] for name in of_call]))


def _unsupported(query: torch.Tensor, *others: torch.Tensor, **options: object) -> str | None:
    return unsupported(query)


register(
    "attention_varlen",
    "triton.flash",
    forward=attention_varlen,
    backward=attention_varlen_backward,
    unsupported=_unsupported,
    saved_from=saved_from,
)
