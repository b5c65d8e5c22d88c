"""Add up what several ranks have sent, in one order."""

from __future__ import annotations

import importlib

import torch

from kernel_ladder import table


def sum_parts(first: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """``first + others[0] + others[1] + …``, in float32 (float64 for float64), rounded once.

    On a GPU with the triton level this is one kernel, which reads each summand once.

    Args:
        first: dense, of any floating-point dtype; overwritten by the sum.
        others: ``(n, *first.shape)``, each of them dense, of the same dtype.

    Returns:
        `first`.
    """
    if first.is_cuda and first.dtype != torch.float64 and table.unavailable("matmul", "triton") is None:
        importlib.import_module("triton_impl.matmul.sum_parts").sum_parts(first, others)
        return first
    total = first if first.dtype == torch.float64 else first.float()
    for other in others:
        total = total + other
    return first.copy_(total)
