"""Describe strided tensors by as few dimensions as their strides allow."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernel_ladder.spec import Inputs, Output, as_tuple, each
from kernel_ladder.tracing import dense_at_a_glance


def collapse(shape: Sequence[int], *strides: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Merge neighbouring dimensions that have one stride in every operand, and drop those of size one.

    Returns the sizes and each operand's strides, in the given order. At least one dimension remains.

    >>> collapse((4, 5, 6), (30, 6, 1), (60, 12, 2))
    ([120], [[1], [2]])
    """
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for dim in range(len(shape) - 1, -1, -1):
        size = shape[dim]
        if size == 1:
            continue
        if sizes and all(s[dim] == m[-1] * sizes[-1] for s, m in zip(strides, merged, strict=True)):
            sizes[-1] *= size
            continue
        sizes.append(size)
        for s, m in zip(strides, merged, strict=True):
            m.append(s[dim])
    if not sizes:
        return [1], [[0] for _ in strides]
    return sizes[::-1], [m[::-1] for m in merged]


def has_rows_at(x: torch.Tensor, multiple: int) -> bool:
    """Whether rows are dense and all their strides are positive multiples of `multiple` elements."""
    sizes = x.shape
    if sizes[-1] % multiple == 0 and dense_at_a_glance(x):  # the common case, and a quick check
        return True
    strides = x.stride()
    if strides[-1] != 1 and sizes[-1] > 1:
        return False
    for dim in range(len(strides) - 1):  # not all(): every call of some rungs runs this, and a generator is slow
        if sizes[dim] > 1 and (strides[dim] <= 0 or strides[dim] % multiple):
            return False
    return True


def last_offset(x: torch.Tensor) -> int:
    """The distance from the first to the last element, in elements."""
    return sum((size - 1) * abs(stride) for size, stride in zip(x.shape, x.stride(), strict=True))


def near_gradients(output: Output) -> Output:
    """Return `output` with a hook on its gradients: resolves lazy signs, and copies strides beyond 32-bit offsets."""
    for y in as_tuple(output):
        if y.grad_fn is not None:
            y.grad_fn.register_prehook(_all_near)
    return output


def gradients_in_layout_of(output: torch.Tensor) -> torch.Tensor:
    """Return `output` with a hook that gives its gradient the strides that it has itself."""
    if output.grad_fn is not None:
        shape, strides = output.shape, output.stride()

        def relaid(grads: Inputs) -> Inputs:
            (grad, *others) = grads
            if grad is None or (grad.stride() == strides and not grad.is_neg()):
                return grads
            return torch.empty_strided(shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad), *others

        output.grad_fn.register_prehook(relaid)
    return output


def _all_near(grads: Inputs) -> Inputs:
    return each(_near, grads)


def _near(grad: torch.Tensor) -> torch.Tensor:
    grad = torch.resolve_neg(grad)
    if grad.is_contiguous():  # the common case, and a quick check
        return grad
    return grad.contiguous() if last_offset(grad) >= 2**31 > grad.numel() else grad


def as_traced(x: torch.Tensor) -> torch.Tensor:
    """`x` as kernels read it: its sign resolved, and aligned to 16 bytes, as the trace assumed without data."""
    x = torch.resolve_neg(x)
    return aligned(x) if x.storage_offset() * x.element_size() % 16 == 0 else x


def aligned(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy with its strides where it begins off 16 bytes."""
    if x.data_ptr() % 16 == 0:
        return x
    # Of elements that are one in memory, one is copied.
    shape = [1 if stride == 0 else size for size, stride in zip(x.shape, x.stride(), strict=True)]
    once = torch.empty_strided(shape, x.stride(), dtype=x.dtype, device=x.device)
    return once.copy_(x[tuple(slice(size) for size in shape)]).expand(x.shape)
