"""Rows that begin off 16 bytes: ``backend="auto"`` gives them to the Triton level.

The CUDA rungs that keep a row on chip count vectors of 16 bytes from the row's start, and read such rows by elements.
Triton's rungs take 0.25 to 1.0 of the time (H200, 16 bits, 139 to 60,673 elements).
"""

from __future__ import annotations

import torch

from kernel_ladder.selection import triton_norm, triton_softmax
from kernel_ladder.selection.features import ALIGNMENT
from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete, product_of


def _begin_off(x: torch.Tensor | None, length: int) -> bool:
    return x is not None and x.is_cuda and x.element_size() == 2 and 2 * length % ALIGNMENT != 0


def softmax(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Prefers the triton level for 16-bit rows that begin off 16 bytes."""
    (x,) = inputs
    dim = options["dim"]
    if x is None or x.dim() == 0 or concrete(x.stride(dim)) != 1 or not _begin_off(x, concrete(x.shape[dim])):
        return ()
    return *triton_softmax.softmax(inputs, options), "triton.fused"


def layer_norm(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Prefers the triton level for 16-bit rows that begin off 16 bytes."""
    if not _begin_off(inputs[0], product_of(options["normalized_shape"])):
        return ()
    return *triton_norm.layer_norm(inputs, options), "triton.fused"


RULES = {("softmax", "auto"): softmax, ("layer_norm", "auto"): layer_norm}
