"""The steps of ring attention, whatever the layout: merge a step's result, differentiate a step by the whole result.

:mod:`kernel_ladder.distributed.ring` has the formulas. Its tensors are ``(B, H, S, D)``; those of packed sequences are
``(T, H, D)``, and their log-sum-exp ``(H, T)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from kernel_ladder import autograd, selection
from kernel_ladder.distributed.exchange import Exchange, circulate


def merge(output: torch.Tensor, lse: torch.Tensor, found: torch.Tensor, found_lse: torch.Tensor) -> None:
    """Merge a step's result into the float32 accumulators, in place.

    The result's share of a row is exp(L₁) / (exp(L) + exp(L₁)), the sigmoid of L₁ − L.
    """
    share = torch.sigmoid(found_lse - lse).masked_fill_(found_lse == -math.inf, 0.0)  # of no key at all, zero
    output.lerp_(found.to(output.dtype), share[..., None])
    lse.copy_(torch.logaddexp(lse, found_lse))


def gradients(
    op: str,
    backend: str | None,
    inputs: tuple[torch.Tensor, ...],
    options: dict[str, Any],
    output: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    grad_lse: torch.Tensor | None,
) -> Sequence[torch.Tensor]:
    """Gradients of a step's query, key and value, by the whole output and log-sum-exp of its queries.

    Args:
        op: ``"attention"`` or ``"attention_varlen"``.
        backend: as in :func:`kernel_ladder.attention`.
        inputs: the call's tensors: query, key, value, and the offsets of packed sequences.
        options: the call's options, with ``return_lse=True``.
        output, lse: of the whole attention.
        grad, grad_lse: their gradients; no `grad_lse` is one of zeros.
    """
    packed = op == "attention_varlen"
    leaves = (*[x.detach().requires_grad_() for x in inputs[:3]], *inputs[3:])
    with torch.enable_grad():
        variant = selection.resolve(op, backend, leaves, options)
    if variant.saved_from is not None:
        needs = (*[True] * 3, *[False] * len(inputs[3:]))
        with torch.no_grad():
            saved = variant.saved_from(inputs, (output.contiguous(), lse.contiguous()), options)
            of_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
            return autograd.gradients(variant, saved, (grad, of_lse), needs)[:3]  # type: ignore[return-value]
    # The rung cannot take another output: differentiate the merge instead. With w = exp(L₁ − L), dO₁ = w · dO and
    # dL₁ = w · (Σ dO · (O₁ − O) + dL).
    with torch.enable_grad():
        found, found_lse = autograd.run(variant, leaves, options)
    weight = torch.exp(found_lse.detach() - torch.where(lse == -math.inf, 0.0, lse))
    of_lse = (grad.to(lse.dtype) * (found.detach().to(lse.dtype) - output.to(lse.dtype))).sum(-1)
    of_lse = of_lse.mT if packed else of_lse
    of_lse = weight * (of_lse if grad_lse is None else of_lse + grad_lse)
    share = (weight.mT if packed else weight)[..., None]
    return torch.autograd.grad(
        (found, found_lse), leaves[:3], ((share * grad).to(found.dtype), of_lse.to(found_lse.dtype))
    )


def gradients_around(
    caller: str,
    group: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    dtype: torch.dtype,
    step: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None],
) -> tuple[torch.Tensor, ...]:
    """Send keys and values around the ring with their gradients. Returns the gradients of this rank's, in `dtype`.

    ``step(owner, key, value, of_key, of_value)`` writes what this rank adds to the gradients of rank `owner`.
    """
    widths = key.shape[-1], value.shape[-1]
    travelling = torch.cat((key, value), -1)
    total = torch.zeros_like(travelling, dtype=dtype)  # of the keys and values that this rank has now
    returning = None
    alone = dist.get_world_size(group) == 1
    for owner, both in circulate(caller, group, travelling):
        found = torch.zeros_like(total)
        step(owner, *both.split(widths, -1), *found.split(widths, -1))
        if returning is not None:
            total = returning.wait()
        total = total + found
        # They follow their keys: one hop behind the step that adds to them.
        returning = None if alone else Exchange(caller, group, total)
    return (total if returning is None else returning.wait()).split(widths, -1)


class Around(torch.autograd.Function):
    """A ring's forward and backward pass as one differentiable call.

    ``forward(query, key, value)`` returns the output and its log-sum-exp. ``backward(query, key, value, output, lse,
    grad, grad_lse)`` returns three gradients; `grad_lse` may be None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> Any:
        output, lse = forward(query, key, value)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.run_backward = backward
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None, grad_lse: torch.Tensor | None) -> Any:
        query, key, value, output, lse = ctx.saved_tensors
        grad = torch.zeros_like(output) if grad is None else grad
        return None, None, *ctx.run_backward(query, key, value, output, lse, grad, grad_lse)
