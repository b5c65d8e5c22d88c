"""Which products ``backend="auto"`` gives to the cuda level on Hopper, where it otherwise takes PyTorch's."""

from __future__ import annotations

import torch

from kernel_ladder.selection import matmul, measured
from kernel_ladder.selection.features import ALIGNMENT, is_aligned
from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete, product_of

#: Multiply-adds of a product from which on the gain is more than what a call costs on the host.
LEAST = 2**28
#: What comes first where only the product is unaligned.
OF_ALIGNED_OPERANDS = ("triton.persistent",)


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether a matrix begins on 16 bytes, and so do its lines."""
    return concrete(x.storage_offset()) * x.element_size() % ALIGNMENT == 0 and is_aligned(x)


def _before_cuda(input: torch.Tensor, other: torch.Tensor, columns: int | torch.SymInt) -> tuple[str, ...] | None:
    """What is ahead of the cuda level, which is ahead of cuBLAS; None where cuBLAS is not behind."""
    if not input.is_cuda or input.dtype not in (torch.float16, torch.bfloat16) or min(input.dim(), other.dim()) < 2:
        return None
    n = concrete(columns)
    if not matmul.is_hopper(input.get_device()) or product_of(input.shape) * n < LEAST:
        return None
    if not (_is_aligned(input) and _is_aligned(other)):
        return ()
    return OF_ALIGNED_OPERANDS if n * input.element_size() % ALIGNMENT else None


def matmul_where_unaligned(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Prefers the cuda level to cuBLAS where rows of 16-bit operands or of the product begin off 16 bytes.

    There cuBLAS does without TMA, at a quarter of its rate. The cuda level computes in parts, or copies first. Where
    the product's rows alone are unaligned, as of GPT-2's vocabulary, ``triton.persistent`` takes 0.87 to 1.0 of its
    time (H200).
    """
    input, other = inputs[:2]
    assert input is not None
    assert other is not None
    first = _before_cuda(input, other, other.shape[-1])
    return () if first is None else (*first, *matmul.rule(inputs, options))


def linear_where_unaligned(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Prefers ``cuda.persistent`` to cuBLAS where rows of 16-bit operands or of the output begin off 16 bytes.

    Where those of the output alone do, ``triton.persistent`` takes 0.8 to 0.95 of its time, 0.6 with gradients (H200).
    """
    input, weight = inputs[:2]
    assert input is not None
    assert weight is not None
    first = _before_cuda(input, weight, weight.shape[0])
    return () if first is None else (*first, "cuda.persistent")


def never_needed(rows: int, columns: int) -> bool:
    """Whether ``"auto"`` takes PyTorch's product with a weight of these sizes, whatever the GPU and the dtype.

    The H200's table prefers another rung at one row, which gains less than a call costs on the host, and in 2 of 14
    layers at 4,096 rows, by 5 % at most.
    """
    each = ALIGNMENT // torch.float16.itemsize
    return rows % each == columns % each == 0 and not measured.enabled()


RULES = {("matmul", "auto"): matmul_where_unaligned, ("linear", "auto"): linear_where_unaligned}
