"""Join a rung's plain ``forward`` and ``backward`` into one differentiable call."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from kernel_ladder import autocast
from kernel_ladder.errors import raise_for_memory
from kernel_ladder.spec import Inputs, Options, Output, each
from kernel_ladder.table import Variant

#: Whether the backward pass that runs in this thread may run again: ``retain_graph=True``. True outside of one.
_graph_is_kept = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, variant: Variant, options: Options, *inputs: torch.Tensor | None) -> Output:
        output, saved = variant.forward(*inputs, **options)
        # Tensors must go through save_for_backward, which detects in-place changes and breaks reference cycles.
        ctx.save_for_backward(*[s for s in saved if isinstance(s, torch.Tensor)])
        ctx.others = [torch.Tensor if isinstance(s, torch.Tensor) else s for s in saved]
        ctx.variant = variant
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors  # read once: a checkpoint gives them only once, and other hooks unpack each time
        left = iter(tensors)
        saved = tuple([next(left) if s is torch.Tensor else s for s in ctx.others])
        needs = ctx.needs_input_grad[2:]
        if not is_compiling():  # torch.compile cannot trace is_neg()
            for grad in grads:
                if grad.is_neg():
                    grads = each(torch.resolve_neg, grads)
                    break
            if torch.is_grad_enabled():  # create_graph=True
                return (None, None, *_Gradient.apply(ctx.variant, saved, needs, len(grads), *grads, *tensors))
        last = ctx.variant.last_backward is not None and not is_compiling() and not _graph_is_kept()
        return (None, None, *gradients(ctx.variant, saved, grads, needs, last))


class _Gradient(torch.autograd.Function):
    """A rung's backward as a node of the graph, so that a second derivative is an error and not a silent zero.

    ``torch.autograd.function.once_differentiable`` detects a second derivative through the output's gradient only, not
    through the saved inputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        variant: Variant,
        saved: tuple[Any, ...],
        needs: tuple[bool, ...],
        outputs: int,
        *grads_and_saved: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.variant = variant
        return tuple(gradients(variant, saved, grads_and_saved[:outputs], needs))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        raise RuntimeError(once_only(ctx.variant.op, ctx.variant.name))


def once_only(op: str, name: str) -> str:
    """The message for a second derivative, which no rung with its own backward has."""
    return f"{op}: {name} can be differentiated only once; for a second derivative use backend='torch.naive'"


def gradients(
    variant: Variant,
    saved: tuple[Any, ...],
    grads: tuple[torch.Tensor, ...],
    needs: tuple[bool, ...],
    last: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Run a rung's backward, with one gradient per output; its ``last_backward`` where nothing saved is read again."""
    backward = variant.last_backward if last else variant.backward
    assert backward is not None
    if autocast.is_on():  # a backward pass inside the block: what it computes is stated in dtypes already
        with autocast.off(grads[0].device.type):
            return gradients(variant, saved, grads, needs, last)
    try:
        return backward(saved, grads if len(grads) > 1 else grads[0], needs)
    except RuntimeError as error:
        raise_for_memory(error)
        raise


def run(variant: Variant, inputs: Inputs, options: Options) -> Any:
    """Call a rung, through autograd only if a gradient is wanted."""
    if variant.backward is not None and torch.is_grad_enabled():
        for x in inputs:  # not any(): a generator costs as much as the rest of this function
            if x is not None and x.requires_grad:
                return _Differentiable.apply(variant, options, *inputs)
    if variant.inference is not None:  # variant.output() inlined: a further call would unpack the options again
        return variant.inference(*inputs, **options)
    return variant.forward(*inputs, **options)[0]
