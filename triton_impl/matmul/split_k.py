"""matmul, rung 5 of 5: split_k

Idea      Where tiles are few and k is long, several programs share the k of each tile. Each writes a float32 partial; a
          second kernel adds the partials in order, so that the bits are the same in every run.
Predicts  ``splits`` times as many busy multiprocessors, for 8 · splits · M · N more bytes and one more launch.
Limit now The partials, at most 64 MiB, make a round trip through memory.
Next      cuBLAS's stream-K and the rungs of the cuda level, which reduce partials without a second kernel.

Takes two matrices. A product that is not worth splitting has one split, which writes the output itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.matmul_shapes import as_matrices
from triton_impl import interpreted, multiprocessors
from triton_impl import unsupported as unsupported_by_triton
from triton_impl.matmul import tiles
from triton_impl.matmul.tiles import (
    INTERPRETER_CONFIG,
    MULTIPROCESSORS,
    accumulate,
    arguments_of,
    config,
    kind_of,
    likeliest,
    rasterize,
)
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.launch_cache import CachedKernel, Launch

#: Bytes of partial sums, at most.
WORKSPACE_BYTES = 64 * 2**20
#: Splits of a tile's k, at most, and the least of k that is worth one.
MAX_SPLITS = 32
MIN_SPLIT_K = 256
#: The least k that is worth splitting at all: less takes no longer than the second kernel.
MIN_K = 4096
#: Outputs of a program of the second kernel.
SUM_BLOCK = 512

#: Of the 16-bit dtypes; tensor cores take 16 rows, however few there are.
CONFIGS = [
    *(config(16, 64, 128, 4, stages) for stages in (4, 6)),
    config(16, 32, 256, 4, 4),
    config(16, 128, 128, 4, 4),
    config(32, 64, 128, 4, 4),
    config(64, 64, 128, 4, 4),
    config(64, 128, 64, 4, 4),
    config(128, 64, 64, 4, 4),
    config(64, 16, 128, 4, 4),
    config(32, 16, 256, 4, 4),
]
FLOAT32 = [config(16, 64, 64, 4, 4), config(32, 64, 32, 4, 4), config(64, 64, 32, 4, 4), config(64, 16, 64, 4, 4)]
COUNT = 6


@triton.jit
def _matmul_split_kernel(
    partials_ptr, a_ptr, b_ptr, M, N, K, split_k,
    stride_am, stride_ak, stride_bk, stride_bn,
    PRECISION: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``partials[s] = A[:, s·split_k …] · B[s·split_k …, :]``.

    Grid: (tiles, splits). Layout: A (M, K) and B (K, N) by strides; partials (splits, M, N) contiguous, in float32, or
    the output itself where there is one split.
    """
    tile_m, tile_n = rasterize(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    split = tl.program_id(1).to(tl.int64)
    first = split * split_k
    acc, offs_m, offs_n, mask = accumulate(
        a_ptr + first * stride_ak, b_ptr + first * stride_bk, tile_m, tile_n, M, N, tl.minimum(K - first, split_k),
        stride_am, stride_ak, stride_bk, stride_bn,
        PRECISION, EVEN_M, EVEN_N, EVEN_K, INT64_OFFSETS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    partials_ptrs = partials_ptr + split * M * N + offs_m[:, None] * N + offs_n[None, :]
    tl.store(partials_ptrs, acc.to(partials_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _matmul_split_sum_kernel(c_ptr, partials_ptr, numel, splits, BLOCK: tl.constexpr):
    """``c[i] = Σ_s partials[s, i]``, in the order of s. Grid: (⌈numel / BLOCK⌉,). Layout: both contiguous."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        total += tl.load(partials_ptr + split * numel + i, mask=i < numel, other=0.0)
    tl.store(c_ptr + i, total.to(c_ptr.dtype.element_ty), mask=i < numel)


_choose = Autotuner(_matmul_split_kernel)
_sum = CachedKernel(_matmul_split_sum_kernel)


def split_count(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> int:
    """How many splits of k: enough for four tiles per multiprocessor, as far as that is worth it.

    One where the tiles keep half of the multiprocessors busy, and where k is short.
    """
    (m, k), n = a.shape[-2:], b.shape[-1]
    if interpreted():
        return min(3, triton.cdiv(k, 16))
    block = 64 if min(m, n) > 64 else min(m, n)
    tiles = triton.cdiv(m, max(block, 16)) * triton.cdiv(n, 64)
    sms = multiprocessors(c.device, MULTIPROCESSORS)
    if 2 * tiles > sms or k < MIN_K:
        return 1
    wanted = triton.cdiv(4 * sms, tiles)
    return max(1, min(wanted, MAX_SPLITS, k // MIN_SPLIT_K, WORKSPACE_BYTES // (4 * m * n)))


def write(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Callable[..., None]:
    """See :data:`triton_impl.matmul.product.Write`."""
    count = split_count(c, a, b)
    (m, n, k, *strides, _), constants = arguments_of(a, b)
    # A split is a whole number of every configuration's steps, and all splits but the last are alike.
    step = 1 if interpreted() else MIN_SPLIT_K
    split_k = triton.cdiv(triton.cdiv(k, count), step) * step
    count = triton.cdiv(k, split_k)
    constants["EVEN_K"] = k % MIN_SPLIT_K == 0 and split_k % MIN_SPLIT_K == 0

    def launch(config: triton.Config) -> Launch:
        blocks = {**constants, **config.kwargs}
        names = _matmul_split_kernel.arg_names[-9:]
        arguments = (m, n, k, split_k, *strides, *(blocks[name] for name in names))
        grid = (triton.cdiv(m, blocks["BLOCK_M"]) * triton.cdiv(n, blocks["BLOCK_N"]), count)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        return Launch(_matmul_split_kernel, grid, arguments, options)

    kind = kind_of(c.dtype, m, n)
    if interpreted():
        candidates = [INTERPRETER_CONFIG]
    else:
        of_kind = tiles.CONFIGS[kind] if count == 1 else FLOAT32 if kind in ("tf32", "ieee") else CONFIGS
        candidates = likeliest(of_kind, COUNT, m, n, split_k, count, c.element_size(), c.device)
    key = (str(a.dtype), kind, m, n, k, count, *(s if s < 2 else 8 if s % 8 == 0 else 2 for s in strides))
    if count == 1:
        return _choose.launch(key, candidates, launch, c, a, b)
    partials = torch.empty((count, m, n), dtype=torch.float32, device=c.device)
    chosen = _choose.launch(key, candidates, launch, partials, a, b)
    sum_programs, sum_arguments = triton.cdiv(m * n, SUM_BLOCK), (m * n, count, SUM_BLOCK)
    _sum(sum_programs, (c, partials), sum_arguments)

    def again(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        partials = torch.empty((count, m, n), dtype=torch.float32, device=c.device)
        chosen(partials, a, b)
        _sum(sum_programs, (c, partials), sum_arguments)

    return again


def unsupported(input: torch.Tensor, other: torch.Tensor) -> str | None:
    """Why the call is not a product of two matrices, or None."""
    if (reason := unsupported_by_triton(input)) is not None:
        return reason
    a, b = as_matrices(input, other)
    return "takes two matrices; `tiled` and `persistent` take batches" if a.dim() > 2 or b.dim() > 2 else None
