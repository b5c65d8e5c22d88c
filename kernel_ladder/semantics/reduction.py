"""The dimensions of a sum, the shape of its result, and its gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: The user's `dim`: one dimension, several, or all of them, given by None or an empty tuple as in PyTorch.
Dim = int | tuple[int, ...] | None


def reduced_dims(dim: Dim, dims: int) -> tuple[int, ...]:
    """The dimensions that `dim` names in a tensor of `dims` dimensions, non-negative and sorted."""
    if dim is None or dim == ():
        return tuple(range(dims))
    if dims == 0:
        return ()
    return (dim % dims,) if isinstance(dim, int) else tuple(sorted(d % dims for d in dim))


def sum_shape(shape: tuple[int, ...], dims: tuple[int, ...], keepdim: bool) -> tuple[int, ...]:
    """The shape of a sum over `dims` of a tensor of `shape`."""
    if keepdim:
        return tuple(1 if d in dims else size for d, size in enumerate(shape))
    return tuple(size for d, size in enumerate(shape) if d not in dims)


def spread(grad: torch.Tensor, shape: tuple[int, ...], dims: tuple[int, ...], keepdim: bool) -> torch.Tensor:
    """The gradient of a tensor that was summed over `dims`: a view of the sum's gradient, of `shape`."""
    return (grad if keepdim else grad.reshape(sum_shape(shape, dims, True))).expand(shape)


def broadcast_dims(shape: tuple[int, ...], to: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions of `to` along which broadcasting repeats a tensor of `shape`."""
    missing = len(to) - len(shape)
    return tuple(d for d, size in enumerate(to) if d < missing or (shape[d - missing] == 1 and size != 1))


def gradients_of_broadcast(
    grad: torch.Tensor,
    shapes: tuple[tuple[int, ...], ...],
    needs: tuple[bool, ...],
    summed: Callable[[torch.Tensor, tuple[int, ...], bool], torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """The gradient of each operand of an addition that broadcast operands of `shapes`.

    It is `grad` itself, not a copy, for an operand of the same shape, else ``summed(grad, dims, keepdim)``.
    """
    found: list[torch.Tensor | None] = []
    for shape, needed in zip(shapes, needs, strict=True):
        dims = broadcast_dims(shape, grad.shape) if needed else ()
        found.append((summed(grad, dims, True).view(shape) if dims else grad) if needed else None)
    return tuple(found)
