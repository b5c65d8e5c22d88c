"""matmul, rung 1 of 5: naive

Idea      One program per tile of C, tiles in row order. It walks over k and adds the products of two tiles of operands.
Predicts  Each element of A is read ⌈N / BLOCK_N⌉ times, each of B ⌈M / BLOCK_M⌉ times: 32 flops per element read.
Limit now Loads are not pipelined: every step waits for its two tiles. Row order finds little of B in the L2.
Next      `tiled`: loads several tiles ahead, tuned tiles, programs in groups that share the L2.

Takes two matrices of any strides. The tile is too small for wgmma on Hopper.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.matmul_shapes import as_matrices
from triton_impl import unsupported as unsupported_by_triton
from triton_impl.common.dot import dot
from triton_impl.matmul.tiles import arguments_of
from triton_impl.runtime.launch_cache import CachedKernel

BLOCK_M = BLOCK_N = BLOCK_K = 32


@triton.jit
def _matmul_naive_kernel(
    c_ptr, a_ptr, b_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    PRECISION: tl.constexpr, INT64_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``C = A · B``, accumulated in float32.

    Grid: (⌈M / BLOCK_M⌉ · ⌈N / BLOCK_N⌉,), tiles in row order. Layout: A (M, K) and B (K, N) by strides, C contiguous.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    offs_m = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    if INT64_OFFSETS:  # an element may lie 2³¹ elements behind the first
        offs_m, offs_n, steps = offs_m.to(tl.int64), offs_n.to(tl.int64), steps.to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + steps
        a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
        b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
        a = tl.load(a_ptrs, mask=(offs_m[:, None] < M) & (offs_k[None, :] < K), other=0.0)
        b = tl.load(b_ptrs, mask=(offs_k[:, None] < K) & (offs_n[None, :] < N), other=0.0)
        acc = dot(a, b, acc, PRECISION)
    c_ptrs = c_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(offs_m[:, None] < M) & (offs_n[None, :] < N))


_kernel = CachedKernel(_matmul_naive_kernel, num_warps=4, num_stages=1)


def write(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """See :data:`triton_impl.matmul.product.Write`."""
    (m, n, *sizes_and_strides, _), constants = arguments_of(a, b)
    programs = triton.cdiv(m, BLOCK_M) * triton.cdiv(n, BLOCK_N)
    constant = (constants["PRECISION"], constants["INT64_OFFSETS"], BLOCK_M, BLOCK_N, BLOCK_K)
    _kernel(programs, (c, a, b), (m, n, *sizes_and_strides, *constant))


def unsupported(input: torch.Tensor, other: torch.Tensor) -> str | None:
    """Why the call is not a product of two matrices, or None."""
    if (reason := unsupported_by_triton(input)) is not None:
        return reason
    a, b = as_matrices(input, other)
    if a.dim() > 2 or b.dim() > 2:
        return "takes two matrices; `tiled` takes batches"
    return None
