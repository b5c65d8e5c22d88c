"""Attention of packed sequences in CUDA C++: ``csrc/attention/varlen*.cu``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuda_impl import climb
from cuda_impl.attention import flash_unsupported, hopper_unsupported
from kernel_ladder.semantics.masks import LONGEST, NO_WINDOW
from kernel_ladder.semantics.scale import scale_of
from kernel_ladder.spec import Inputs, Options, Output
from kernel_ladder.table import register


def _as_one_batch(*packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(total, H, D) as (1, H, total, D)."""
    return tuple(x.transpose(0, 1).unsqueeze(0) for x in packed)


def _longest(x: torch.Tensor, max_seqlen: int | None) -> int:
    """The longest sequence as the operators take it; an unknown one is the total."""
    return x.shape[0] if max_seqlen is None else min(max_seqlen, LONGEST)


def _others(
    query: torch.Tensor, is_causal: bool | str, scale: float | None, enable_gqa: bool, window_size: tuple[int, int]
) -> tuple[Any, ...]:
    """The last arguments of the operators, forward and backward."""
    left, right = window_size
    band = min(left, LONGEST), 0 if is_causal else min(right, LONGEST)
    return (*band, scale_of(query.shape[-1], scale), enable_gqa)


def _saved_from(inputs: Inputs, outputs: tuple[torch.Tensor, ...], options: Options) -> tuple:
    query, key, value, *offsets = inputs
    longest = _longest(query, options["max_seqlen_q"]), _longest(key, options["max_seqlen_k"])
    others = _others(query, *[options[name] for name in ("is_causal", "scale", "enable_gqa", "window_size")])
    return (query, key, value, *outputs, *offsets, *longest, *others)


def _backward(saved: tuple, grad: Output, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    grad, grad_lse = (grad[0], grad[1].contiguous()) if isinstance(grad, tuple) else (grad, None)
    query, key, value, output, lse, *others = saved
    gradients = torch.ops.kernel_ladder.attention_varlen_backward.flash(
        *_as_one_batch(grad), grad_lse, *_as_one_batch(query, key, value, output), lse, *others
    )
    return (*(g if need else None for g, need in zip(gradients, needs[:3], strict=True)), None, None)


def _register(name: str, takes: Callable[..., str | None]) -> None:
    """Add a rung. `takes` is asked about the operands as one batch. All rungs have the backward of `flash`."""
    run = getattr(torch.ops.kernel_ladder.attention_varlen, name)

    def forward(
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
        longest = _longest(query, max_seqlen_q), _longest(key, max_seqlen_k)
        others = _others(query, is_causal, scale, enable_gqa, window_size)
        output, lse = run(*_as_one_batch(query, key, value), cu_seqlens_q, cu_seqlens_k, longest[0], *others)
        saved = (query, key, value, output, lse, cu_seqlens_q, cu_seqlens_k, *longest, *others)
        return ((output, lse) if return_lse else output), saved

    def unsupported(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *offsets: torch.Tensor, **options: object
    ) -> str | None:
        return takes(*_as_one_batch(query, key, value))

    @torch.library.register_fake(f"kernel_ladder::attention_varlen.{name}")
    def _(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, left, right, scale, enable_gqa):
        _, heads, total, _ = query.shape
        output = query.new_empty((total, heads, value.shape[-1]))
        return output, query.new_empty((heads, total), dtype=torch.float32)

    register(
        "attention_varlen",
        f"cuda.{name}",
        forward=forward,
        backward=_backward,
        unsupported=unsupported,
        saved_from=_saved_from,
    )


if "flash" in climb("attention_varlen_backward"):

    @torch.library.register_fake("kernel_ladder::attention_varlen_backward.flash")
    def _(grad, grad_lse, query, key, value, *others):
        return tuple(x.new_empty((x.shape[2], x.shape[1], x.shape[3])) for x in (query, key, value))


_TAKES = {"flash": flash_unsupported, "pingpong": hopper_unsupported("pingpong", 256)}

for _name in climb("attention_varlen"):
    _register(_name, _TAKES[_name])
