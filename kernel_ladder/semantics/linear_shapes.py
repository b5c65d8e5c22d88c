"""A linear layer's activations and shapes, shared by all levels."""

from __future__ import annotations

import math

import torch

#: The activations of linear, each with the ``approximate`` of the GELU that it names.
ACTIVATIONS = {"gelu": "none", "gelu_tanh": "tanh"}


def output_shape(input: torch.Tensor, weight: torch.Tensor) -> tuple[int, ...]:
    """The shape of ``linear(input, weight)``: the input's, with the rows of `weight` last."""
    return (*input.shape[:-1], weight.shape[0])


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``(..., K)`` as ``(M, K)``: a view if the strides let the rows fold, else a copy. A vector is one row."""
    return tensor if tensor.dim() == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
