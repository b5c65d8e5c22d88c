"""Index strided operands of elementwise kernels: up to four dimensions that do not collapse."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.strides import collapse

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
    """Whether operands of one shape are one dense run of memory in one order. `output` is fresh, and so dense."""
    strides = output.stride()
    return all(t.stride() == strides for t in operands)


def indexing(*tensors: torch.Tensor) -> list[int]:
    """Arguments of :func:`offset_of` for tensors of one shape: three inner sizes, then four strides per tensor."""
    return pad_strides(*collapse(tensors[0].shape, *(t.stride() for t in tensors)))


def pad_strides(sizes: list[int], strides: list[list[int]]) -> list[int]:
    """Collapsed sizes and strides, padded to the arguments of :func:`offset_of`."""
    padding = MAX_DIMS - len(sizes)
    if padding < 0:
        raise ValueError(f"strides that do not collapse to {MAX_DIMS} dimensions (these need {len(sizes)})")
    flat = [*([1] * padding), *sizes][1:]
    for s in strides:
        flat += [*([0] * padding), *s]
    return flat


def row_indexing(*tensors: torch.Tensor) -> tuple[int, int, tuple[int, ...]]:
    """Tensors of one shape as rows of their last dimension: (rows, columns, strides).

    `strides` holds the arguments of :func:`offset_of` for a row, then each tensor's stride along a row.
    """
    columns = tensors[0].shape[-1]
    sizes, strides = collapse(tensors[0].shape[:-1], *(t.stride()[:-1] for t in tensors))
    return tensors[0].numel() // columns, columns, (*pad_strides(sizes, strides), *(t.stride(-1) for t in tensors))


@triton.jit
def tile(rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's rows, columns (as one row) and mask. Programs take tiles in row-major order."""
    blocks = tl.cdiv(columns, BLOCK_N)
    row = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    return row, column[None, :], (row < rows)[:, None] & (column < columns)[None, :]


def tile_of(columns: int, elements: int) -> tuple[int, int]:
    """(rows, columns) of a tile of so many elements, as wide as a row allows."""
    width = min(triton.next_power_of_2(columns), elements)
    return elements // width, width


def gradient_for_kernel(
    grad: torch.Tensor, like: torch.Tensor, *operands: torch.Tensor, rows_at: int | None = None
) -> torch.Tensor:
    """An output's gradient, copied into the strides of `like` where kernels cannot index it beside `operands`.

    Autograd chooses its strides, which no `unsupported` has seen. `like` is a fresh tensor. The dimension `rows_at` has
    a stride of its own and does not count.
    """
    if grad.dim() > MAX_DIMS:
        kept = [d for d in range(grad.dim()) if rows_at is None or d != rows_at % grad.dim()]
        strides = [[t.stride(d) for d in kept] for t in (like, grad, *operands)]
        if len(collapse([grad.shape[d] for d in kept], *strides)[0]) > MAX_DIMS:
            return torch.empty_like(like).copy_(grad)
    return grad


def too_many_row_dims(*tensors: torch.Tensor) -> str | None:
    """Why :func:`row_indexing` cannot index these tensors and a fresh one like the first, or None."""
    if tensors[0].dim() <= MAX_DIMS + 1:
        return None
    fresh = torch.empty_like(tensors[0], device="meta")
    dims = len(collapse(fresh.shape[:-1], *(t.stride()[:-1] for t in (fresh, *tensors)))[0])
    return (
        f"rows whose strides do not collapse to {MAX_DIMS} dimensions (these need {dims})" if dims > MAX_DIMS else None
    )


def too_many_dims(x: torch.Tensor) -> str | None:
    """Why a tensor and a fresh one like it cannot be indexed by :func:`offset_of`, or None."""
    if x.dim() > MAX_DIMS and not x.is_contiguous():
        dims = len(collapse(x.shape, x.stride(), torch.empty_like(x, device="meta").stride())[0])
        if dims > MAX_DIMS:
            return f"strides that do not collapse to {MAX_DIMS} dimensions (these need {dims})"
    return None
