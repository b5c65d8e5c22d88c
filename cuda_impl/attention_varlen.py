"""Attention of packed sequences in CUDA C++: ``csrc/attention/varlen*.cu``.

The backward pass of ``pingpong`` is that of attention's ``warp_specialized`` on packed sequences. At head dimensions
above 128, and where sequences are short, it is that of ``flash``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuda_impl import climb
from cuda_impl.attention import flash_unsupported, hopper_unsupported, read_by_tma
from kernel_ladder.selection.attention import packed_backward_on_hopper
from kernel_ladder.semantics.masks import LONGEST, NO_WINDOW
from kernel_ladder.semantics.scale import scale_of
from kernel_ladder.spec import Inputs, Options, Output
from kernel_ladder.table import register
from kernel_ladder.tracing import concrete


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


def _rows_for_tma(x: torch.Tensor) -> torch.Tensor:
    """(total, H, D) as one batch, with dense rows that start on 16 bytes, copied where they are not."""
    (batch,) = _as_one_batch(x)
    return batch if read_by_tma(batch) else _as_one_batch(x.clone(memory_format=torch.contiguous_format))[0]


def _gradients(
    saved: tuple, grad: Output, needs: tuple[bool, ...], *, step: str = "flash"
) -> tuple[torch.Tensor | None, ...]:
    grad, grad_lse = (grad[0], grad[1].contiguous()) if isinstance(grad, tuple) else (grad, None)
    query, key, value, output, lse, *others = saved
    operators = torch.ops.kernel_ladder.attention_varlen_backward
    if step == "warp_specialized":
        run, grad, output = operators.warp_specialized, _rows_for_tma(grad), _rows_for_tma(output)
    else:
        run, (grad, output) = operators.flash, _as_one_batch(grad, output)
    gradients = run(grad, grad_lse, *_as_one_batch(query, key, value), output, lse, *others)
    return (*(g if need else None for g, need in zip(gradients, needs[:3], strict=True)), None, None)


def _gradients_on_hopper(saved: tuple, grad: Output, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    query, _, value, _, _, cu_seqlens_q, *_ = saved
    head_dim, sequences = max(query.shape[2], value.shape[2]), concrete(cu_seqlens_q.shape[0]) - 1
    return _gradients(saved, grad, needs, step=packed_backward_on_hopper(head_dim, concrete(query.shape[0]), sequences))


def _register(name: str, takes: Callable[..., str | None], backward: Callable[..., tuple]) -> None:
    """Add a rung. `takes` is asked about the operands as one batch."""
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
        backward=backward,
        unsupported=unsupported,
        saved_from=_saved_from,
    )


for _name in climb("attention_varlen_backward"):

    @torch.library.register_fake(f"kernel_ladder::attention_varlen_backward.{_name}")
    def _(grad, grad_lse, query, key, value, *others):
        return tuple(x.new_empty((x.shape[2], x.shape[1], x.shape[3])) for x in (query, key, value))


#: By rung: what it asks of a call, and its backward.
_RUNGS = {
    "flash": (flash_unsupported, _gradients),
    "pingpong": (hopper_unsupported("pingpong", 256), _gradients_on_hopper),
}

for _name in climb("attention_varlen"):
    _register(_name, *_RUNGS[_name])
