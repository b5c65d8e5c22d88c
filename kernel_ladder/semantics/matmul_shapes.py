"""Fold the shapes of torch.matmul into plain and batched matrix products, as views, and unfold their gradients."""

from __future__ import annotations

import torch

from kernel_ladder.semantics.strides import collapse


def as_matrices(input: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views ``(…, M, K)`` and ``(…, K, N)`` of the arguments of matmul.

    A vector becomes a row (`input`) or a column (`other`). If `other` is one matrix for the whole batch and the rows of
    `input` have one stride, they become the rows of one matrix.
    """
    if input.dim() == 1:
        input = input.unsqueeze(0)
    if other.dim() == 1:
        other = other.unsqueeze(1)
    if input.dim() > 2 and other.dim() == 2:
        sizes, (strides,) = collapse(input.shape[:-1], input.stride()[:-1])
        if len(sizes) == 1:
            input = input.as_strided((sizes[0], input.shape[-1]), (strides[0], input.stride(-1)))
    return input, other


def output_shape(input: torch.Tensor, other: torch.Tensor) -> tuple[int, ...]:
    """The shape of ``matmul(input, other)``."""
    rows = input.shape[-2:-1] if input.dim() > 1 else ()
    columns = other.shape[-1:] if other.dim() > 1 else ()
    return (*batch_shape(input, other), *rows, *columns)


def batch_shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """The batch dimensions of a product, broadcast."""
    if b.dim() <= 2:
        return tuple(a.shape[:-2])
    if a.dim() <= 2:
        return tuple(b.shape[:-2])
    if a.shape[:-2] == b.shape[:-2]:
        return tuple(a.shape[:-2])
    return tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))


def sum_to(grad: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Sum over the broadcast batch dimensions in the dtype of `grad`, then round once to `dtype`."""
    return grad.sum_to_size(shape).to(dtype)
