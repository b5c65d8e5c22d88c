"""Index strided operands of elementwise kernels: up to four dimensions that do not collapse."""

from __future__ import annotations

import torch
import triton
import triton.language as tl  # noqa: F401 (the interpreter looks for it among the globals of a kernel)

from kernel_ladder.strides import collapse

MAX_DIMS = 4


@triton.jit
def offset_of(index, size1, size2, size3, stride0, stride1, stride2, stride3):
    """Memory offset of the element at a row-major `index`, in a tensor of sizes (any, size1, size2, size3)."""
    i3 = index % size3
    index = index // size3
    i2 = index % size2
    index = index // size2
    i1 = index % size1
    i0 = index // size1
    return i0 * stride0 + i1 * stride1 + i2 * stride2 + i3 * stride3


def is_dense(output: torch.Tensor, *operands: torch.Tensor) -> bool:
    """Whether operands of one shape can be walked as one dense run of memory. `output` is fresh, and so dense."""
    strides = output.stride()
    return all(t.stride() == strides for t in operands)


def indexing(*tensors: torch.Tensor) -> list[int]:
    """What :func:`offset_of` takes for tensors of one shape: three inner sizes, then four strides per tensor."""
    return pad(*collapse(tensors[0].shape, *(t.stride() for t in tensors)))


def pad(sizes: list[int], strides: list[list[int]]) -> list[int]:
    """Collapsed sizes and strides, filled up to what :func:`offset_of` takes."""
    padding = MAX_DIMS - len(sizes)
    flat = [*([1] * padding), *sizes][1:]
    for s in strides:
        flat += [*([0] * padding), *s]
    return flat


def too_many_dims(*tensors: torch.Tensor) -> str | None:
    """Why these tensors cannot be indexed by :func:`offset_of`, or None."""
    for t in tensors:
        if t.dim() > MAX_DIMS and not t.is_contiguous():
            dims = len(collapse(t.shape, t.stride(), torch.empty(t.shape, device="meta").stride())[0])
            if dims > MAX_DIMS:
                return f"strides that do not collapse to {MAX_DIMS} dimensions (these need {dims})"
    return None
