"""A variant's forward or backward as a call to be timed, which cycles through copies of the inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import kernel_ladder
from bench.measure import timing
from bench.measure.correctness import Expected
from kernel_ladder.spec import Inputs, Options, Output, as_leaves, as_tuple, each, has_gradient
from kernel_ladder.table import LEVELS, Variant
from kernel_ladder.testing.agreement import Results, named


@dataclass(frozen=True)
class Copies:
    """One or several copies of the inputs; for a backward pass an output gradient with each.

    With `together` a backward pass runs the forward pass first, each time.
    """

    inputs: Sequence[Inputs]
    grads: Sequence[Output] | None
    options: Options
    together: bool = False

    @property
    def count(self) -> int:
        return len(self.inputs)

    @classmethod
    def of(cls, expected: Expected, backward: bool, device: torch.device, together: bool = False) -> Copies:
        """Enough copies that the L2 no longer holds one when it is used again."""
        used = (expected.inputs, expected.grad) if backward else expected.inputs
        others = range(timing.copies_needed(timing.nbytes(used), device) - 1)
        inputs = [expected.inputs, *(each(torch.clone, expected.inputs) for _ in others)]
        grads = [expected.grad, *(_clone(expected.grad) for _ in others)] if backward else None
        return cls(inputs, grads, expected.options, together)


def _clone(grad: Output) -> Output:
    return tuple(map(torch.clone, grad)) if isinstance(grad, tuple) else grad.clone()


def results(returned: Any, backward: bool) -> Results:
    """A call's results under the names that the oracle uses."""
    if backward:
        return {f"grad {i}": grad for i, grad in enumerate(returned) if grad is not None}
    return named(as_tuple(returned[0]))


def forward_call(variant: Variant, copies: Copies) -> timing.Call:
    def call(i: int) -> Any:
        with torch.no_grad():
            return (variant.output(*copies.inputs[i], **copies.options),)

    return call


def backward_call(variant: Variant, copies: Copies) -> timing.Call:
    """The backward alone. A variant without one is differentiated by PyTorch, and so timed through autograd."""
    if copies.together:
        return _both_passes(variant, copies)
    grads = copies.grads
    if variant.backward is None:
        # A peer may overwrite what it saved, and other variants read the same inputs.
        own = variant.level == "peer"
        return _autograd_call(lambda *x: variant.forward(*x, **copies.options)[0], copies, own)
    needs = tuple(has_gradient(x) for x in copies.inputs[0])
    saved: dict[int, Any] = {}  # by copy, at its first use: a slow call uses one copy, and may save gigabytes

    def call(i: int) -> Any:
        with torch.no_grad():
            if i not in saved:
                saved[i] = variant.forward(*copies.inputs[i], **copies.options)[1]
            return variant.backward(saved[i], grads[i], needs)

    return call


def _both_passes(variant: Variant, copies: Copies) -> timing.Call:
    """Like a variant's backward, after its forward; nothing is saved from one call to the next."""
    needs = tuple(has_gradient(x) for x in copies.inputs[0])

    def call(i: int) -> Any:
        if variant.backward is None:
            return _autograd_call(lambda *x: variant.forward(*x, **copies.options)[0], copies)(i)
        with torch.no_grad():
            saved = variant.forward(*copies.inputs[i], **copies.options)[1]
            return variant.backward(saved, copies.grads[i], needs)

    return call


def _autograd_call(forward: Callable[..., Output], copies: Copies, own: bool = False) -> timing.Call:
    """Like a variant's backward: a gradient for each input, None for an absent one. With `own`, inputs are cloned."""
    grads = copies.grads
    recorded: dict[int, tuple[Output, Inputs]] = {}  # output and leaves by copy, as above

    def call(i: int) -> Any:
        if i not in recorded:
            leaves = as_leaves(each(torch.clone, copies.inputs[i]) if own else copies.inputs[i])
            recorded[i] = forward(*leaves), leaves
        output, leaves = recorded[i]
        wanted = [x for x in leaves if has_gradient(x)]
        found = iter(torch.autograd.grad(output, wanted, grads[i], retain_graph=True))
        return tuple(next(found) if has_gradient(x) else None for x in leaves)

    return call


def host_us(variant: Variant, inputs: Inputs, options: Options, device: torch.device, backward: bool) -> tuple:
    """Host cost of a call in microseconds: of the public call by name, and of the variant's own function.

    A pair of None where the variant does not take the call.
    """
    if variant.unsupported(*inputs, **options) is not None:
        return None, None
    own = functools.partial(variant.output, **options)
    public = functools.partial(getattr(kernel_ladder, variant.op), **options, backend=variant.name)
    spec = kernel_ladder.spec(variant.op)

    def by_user(*x: torch.Tensor | None) -> Callable[[], Output]:
        """The call that a user writes: by name for our variants, a peer's own function for a peer."""
        return functools.partial(public, **spec.named(x)) if variant.level in LEVELS else functools.partial(own, *x)

    if not backward:
        with torch.no_grad():
            seconds = timing.host_seconds((by_user(*inputs), functools.partial(own, *inputs)), device)
        return tuple(1e6 * s for s in seconds)
    outputs = by_user(*inputs)()
    grad = tuple(map(torch.ones_like, outputs)) if isinstance(outputs, tuple) else torch.ones_like(outputs)
    copies = Copies([inputs], [grad], options)
    by_autograd, direct_call = _autograd_call(lambda *x: by_user(*x)(), copies), backward_call(variant, copies)
    seconds = timing.host_seconds((lambda: by_autograd(0), lambda: direct_call(0)), device)
    return tuple(1e6 * s for s in seconds)
