"""Shared by `online` and `fused`: how a call's rows are found and launched.

Dense rows have kernels of their own with few arguments, because every argument of a kernel costs host time. All other
layouts take the strided kernels, whose rows are found from their number through up to three sizes and strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

from kernel_ladder.semantics.strides import collapse
from kernel_ladder.tracing import shapes_only
from triton_impl import unsupported as unsupported_by_triton
from triton_impl.common.elementwise import MAX_DIMS, gradient_for_kernel, pad_strides
from triton_impl.runtime.launch_cache import FUSED, Launch, LaunchCache


class Kernels(NamedTuple):
    """The kernels of a rung's pass.

    ``dense(tensors, n_rows, n_cols)`` runs the kernel for dense rows, and returns the launch. ``strided`` is the kernel
    for any others; ``strided_shape(n_cols)`` gives its BLOCK, its rows per program and its warps.
    """

    dense: Callable[[tuple[torch.Tensor, ...], int, int], Launch]
    strided: Any
    strided_shape: Callable[[int], tuple[int, int, int]]


_launches = LaunchCache()


def _row_addressing(dim: int, *tensors: torch.Tensor) -> list[int]:
    """Each operand's stride along a row, then what :func:`offset_of` takes to find a row among the other dimensions."""
    first = tensors[0]
    others = [d for d in range(first.dim()) if d != dim]
    col_strides = [t.stride(dim) for t in tensors]
    return col_strides + pad_strides(
        *collapse([first.shape[d] for d in others], *([t.stride(d) for d in others] for t in tensors))
    )


def _launch(kernels: Kernels, dim: int, *tensors: torch.Tensor) -> None:
    """Launch over the rows of `tensors`, the output first."""
    output = tensors[0]
    numel = output.numel()
    if shapes_only() or numel == 0:
        return
    last = output.dim() - 1
    if dim < 0:
        dim += max(output.dim(), 1)
    n_cols = output.shape[dim] if output.dim() else 1
    n_rows = numel // n_cols
    if output.dim() == 0 or (dim == last and all(t.is_contiguous() for t in tensors)):
        key = (kernels.strided, n_rows, n_cols, output.dtype, output.device)
        _launches.run(key, lambda: kernels.dense(tensors, n_rows, n_cols), tensors)
        return
    block, rows, num_warps = kernels.strided_shape(n_cols)
    kernels.strided[(triton.cdiv(n_rows, rows),)](
        *tensors, n_rows, n_cols, *_row_addressing(dim, *tensors), BLOCK=block, ROWS=rows, num_warps=num_warps, **FUSED
    )


def passes(forward_kernels: Kernels, backward_kernels: Kernels) -> dict[str, Callable[..., Any]]:
    """A rung's ``forward`` and ``backward``."""

    def forward(input: torch.Tensor, *, dim: int) -> tuple[torch.Tensor, tuple]:
        output = torch.empty_like(input)
        _launch(forward_kernels, dim, output, input)
        return output, (output, dim)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
        output, dim = saved
        grad_input = torch.empty_like(output)
        grad = gradient_for_kernel(grad, grad_input, output, rows_at=dim)
        _launch(backward_kernels, dim, grad_input, grad, output)
        return (grad_input,)

    return {"forward": forward, "backward": backward}


def unsupported(input: torch.Tensor, *, dim: int) -> str | None:
    """Why no kernel here takes a tensor, or None."""
    if (reason := unsupported_by_triton(input)) is not None:
        return reason
    if input.dim() > MAX_DIMS + 1:
        fresh = torch.empty_like(input, device="meta")
        others = [d for d in range(input.dim()) if d != dim % input.dim()]
        strides = [[t.stride(d) for d in others] for t in (input, fresh)]
        dims = len(collapse([input.shape[d] for d in others], *strides)[0])
        if dims > MAX_DIMS:
            return f"rows whose strides do not collapse to {MAX_DIMS} dimensions (these need {dims})"
    return None
