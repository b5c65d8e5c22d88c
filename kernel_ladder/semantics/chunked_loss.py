"""The passes of ``linear_cross_entropy`` over chunks of rows, which the cuda and the triton level share.

With a reduction, the gradients of the sum of the losses are computed in the forward pass, and scaled in the backward
pass. Without one, each row's loss has a gradient of its own: the backward pass computes the logits again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernel_ladder.semantics.cross_entropy import LossOptions
from kernel_ladder.tracing import shapes_only


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the weight's gradient before it is scaled: float16 has no room for sums over all rows."""
    return torch.float32 if dtype is torch.float16 else dtype


class Launches(NamedTuple):
    """What a level does on tensors with data. `input` is a matrix, with a label a row in `target`."""

    options: type[LossOptions]
    #: ``losses(input, weight, target, options, losses)`` writes each row's loss.
    losses: Callable[..., None]
    #: ``gradients(input, weight, target, options, losses, grad)`` writes the losses too, and returns the gradients of
    #: input and weight, where `grad` has that of each row's loss.
    gradients: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    #: ``total(output, count, losses, target, options)`` writes the sum or mean, and for a mean the number of its rows.
    total: Callable[..., None]
    #: ``scale(output, sums, grad, count, mean)`` writes ``grad · sums``, for a mean divided by the count.
    scale: Callable[..., None]


def passes(launches: Launches) -> dict[str, Callable[..., Any]]:
    """A rung's ``forward``, ``inference``, ``backward`` and ``last_backward``."""

    def reduced(
        losses: torch.Tensor, target: torch.Tensor, options: LossOptions, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the number of rows that a mean divides by."""
        output, count = (torch.empty((), dtype=kind, device=losses.device) for kind in (dtype, torch.float32))
        if not shapes_only():
            launches.total(output, count, losses, target, options)
        return output, count

    def inference(
        input: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, wide_loss: bool, **named: Any
    ) -> torch.Tensor:
        options, dtype = launches.options(**named), torch.float32 if wide_loss else input.dtype
        losses = torch.empty(target.shape, dtype=torch.float32 if options.reduced else dtype, device=input.device)
        if not shapes_only():
            x, labels = _as_matrix(input, target)
            launches.losses(x, weight, labels, options, losses.view(labels.shape))
        return reduced(losses, target, options, dtype)[0] if options.reduced else losses

    def forward(
        input: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, wide_loss: bool, **named: Any
    ) -> tuple[torch.Tensor, tuple]:
        options, dtype = launches.options(**named), torch.float32 if wide_loss else input.dtype
        if not options.reduced:
            output = inference(input, weight, target, wide_loss=wide_loss, **named)
            return output, (input, weight, target, *options)
        x, labels = _as_matrix(input, target)
        losses = torch.empty(labels.shape, dtype=torch.float32, device=input.device)
        if shapes_only():
            sums = torch.empty(weight.shape, dtype=sum_dtype(weight.dtype), device=weight.device)
            gradients = (torch.empty(x.shape, dtype=x.dtype, device=x.device), sums)
        else:
            ones = torch.ones((), dtype=torch.float32, device=input.device).expand(labels.shape)
            gradients = launches.gradients(x, weight, labels, options, losses, ones)
        output, count = reduced(losses, labels, options, dtype)
        return output, (gradients[0].view(input.shape), gradients[1], count, *options)

    def backward(
        saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...], in_place: bool = False
    ) -> tuple[torch.Tensor | None, ...]:
        first, second, third, *named = saved
        options = launches.options(*named)
        if options.reduced:  # gradients of the sum of the losses, and the count of a mean
            mean = options.reduction == "mean"
            sums = zip((first, second), needs, strict=False)
            return *[scaled(x, grad, third, mean, first.dtype, in_place) if need else None for x, need in sums], None
        x, labels = _as_matrix(first, third)
        if shapes_only():
            gradients = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, second))
        else:
            losses = torch.empty(labels.shape, dtype=torch.float32, device=x.device)
            gradients = launches.gradients(x, second, labels, options, losses, grad.reshape(labels.shape))
        return (
            gradients[0].view(first.shape) if needs[0] else None,
            gradients[1].to(second.dtype) if needs[1] else None,
            None,
        )

    def scaled(
        sums: torch.Tensor, grad: torch.Tensor, count: torch.Tensor, mean: bool, dtype: torch.dtype, in_place: bool
    ) -> torch.Tensor:
        keeps = in_place and sums.dtype == dtype
        output = sums if keeps else torch.empty(sums.shape, dtype=dtype, device=sums.device)
        if output.numel() and not shapes_only():
            launches.scale(output, sums, grad, count, mean)
        return output

    return {
        "forward": forward,
        "inference": inference,
        "backward": backward,
        "last_backward": functools.partial(backward, in_place=True),  # no second set of gradients in memory
    }


def _as_matrix(input: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Unlike an index, `unsqueeze` takes tensors without data where no GPU is.
    return (input, target) if input.dim() == 2 else (input.unsqueeze(0), target.unsqueeze(0))
