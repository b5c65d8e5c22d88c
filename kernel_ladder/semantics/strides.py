"""Describe strided tensors by as few dimensions as their memory allows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernel_ladder.spec import Inputs, Output, as_tuple, each


def collapse(shape: Sequence[int], *strides: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Merge neighbouring dimensions that every operand walks as one; drop those of size one.

    Returns sizes and, per operand, strides, in the order of the given dimensions (at least one dimension).

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
    """Whether rows are dense, and lie from one another at positive multiples of so many elements."""
    sizes = x.shape
    if sizes[-1] % multiple == 0 and x.is_contiguous():  # what most are, and quick to ask
        return True
    strides = x.stride()
    if strides[-1] != 1 and sizes[-1] > 1:
        return False
    for dim in range(len(strides) - 1):  # not all(): every call of some steps comes by here, and a generator is slow
        if sizes[dim] > 1 and (strides[dim] <= 0 or strides[dim] % multiple):
            return False
    return True


def last_offset(x: torch.Tensor) -> int:
    """How far the last element lies from the first, in elements."""
    return sum((size - 1) * abs(stride) for size, stride in zip(x.shape, x.stride(), strict=True))


def near_gradients(output: Output) -> Output:
    """`output`, whose gradients reach its backward pass with their sign in memory and offsets that 32 bits hold."""
    for y in as_tuple(output):
        if y.grad_fn is not None:
            y.grad_fn.register_prehook(_all_near)
    return output


def _all_near(grads: Inputs) -> Inputs:
    return each(_near, grads)


def _near(grad: torch.Tensor) -> torch.Tensor:
    grad = torch.resolve_neg(grad)
    if grad.is_contiguous():  # what most are, and quick to ask
        return grad
    return grad.contiguous() if last_offset(grad) >= 2**31 > grad.numel() else grad
