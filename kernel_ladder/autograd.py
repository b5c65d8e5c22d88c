"""Join a variant's plain ``forward`` and ``backward`` into one differentiable call."""

from __future__ import annotations

from typing import Any

import torch

from kernel_ladder.spec import Inputs, Options
from kernel_ladder.table import Variant


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, variant: Variant, options: Options, *inputs: torch.Tensor) -> torch.Tensor:
        output, saved = variant.forward(*inputs, **options)
        # Tensors must go through save_for_backward (it detects in-place changes and breaks reference cycles).
        ctx.save_for_backward(*[s for s in saved if isinstance(s, torch.Tensor)])
        ctx.saved_others = [None if isinstance(s, torch.Tensor) else s for s in saved]
        ctx.saved_is_tensor = [isinstance(s, torch.Tensor) for s in saved]
        ctx.variant = variant
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = list(ctx.saved_tensors)
        saved = tuple(
            tensors.pop(0) if is_tensor else other
            for is_tensor, other in zip(ctx.saved_is_tensor, ctx.saved_others, strict=True)
        )
        return (None, None, *ctx.variant.backward(saved, grad, ctx.needs_input_grad[2:]))


def run(variant: Variant, inputs: Inputs, options: Options) -> torch.Tensor:
    """Call a variant, through autograd only where a gradient is wanted."""
    if variant.backward is None or not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs):
        return variant.forward(*inputs, **options)[0]
    return _Differentiable.apply(variant, options, *inputs)
