"""Products of few tiles and a long k: programs share each tile's k, and a second kernel adds up what they make.

The shares lie in a workspace of float32, at most 64 MiB, and are added in order: the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from triton_impl import interpreted, multiprocessors
from triton_impl.matmul.tiles import MULTIPROCESSORS, accumulate, arguments_of, config, kind_of, likeliest
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.launch_cache import CachedKernel, Launch

#: Bytes of partial sums, at most.
WORKSPACE = 64 * 2**20
#: Shares of a tile's k, at most, and the least of k that is worth one.
MOST, LEAST_K = 32, 256
#: The least of k that is worth sharing at all: less takes no longer than the second kernel.
LEAST_SHARED_K = 4096
#: Outputs of a program of the second kernel.
SUM_BLOCK = 512

#: The 16-bit dtypes; tensor cores take 16 rows, however few there are.
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
INTERPRETED = [config(64, 64, 64, 1, 1)]


@triton.jit
def _matmul_split_kernel(
    partials_ptr, a_ptr, b_ptr, M, N, K, share_k,
    stride_am, stride_ak, stride_bk, stride_bn,
    PRECISION: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, LARGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    # The shares of a tile run side by side, and tiles down the rows first: b is read once where rows are few.
    tile_m = tl.program_id(0) % tl.cdiv(M, BLOCK_M)
    tile_n = tl.program_id(0) // tl.cdiv(M, BLOCK_M)
    share = tl.program_id(1).to(tl.int64)
    first = share * share_k
    acc, offs_m, offs_n, mask = accumulate(
        a_ptr + first * stride_ak, b_ptr + first * stride_bk, tile_m, tile_n, M, N, tl.minimum(K - first, share_k),
        stride_am, stride_ak, stride_bk, stride_bn,
        PRECISION, EVEN_M, EVEN_N, EVEN_K, LARGE, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    tl.store(partials_ptr + share * M * N + offs_m[:, None] * N + offs_n[None, :], acc, mask=mask)


@triton.jit
def _matmul_split_sum_kernel(c_ptr, partials_ptr, numel, shares, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for share in range(shares):
        total += tl.load(partials_ptr + share * numel + i, mask=i < numel, other=0.0)
    tl.store(c_ptr + i, total.to(c_ptr.dtype.element_ty), mask=i < numel)


KERNEL, SUM_KERNEL = _matmul_split_kernel, _matmul_split_sum_kernel
_choose = Autotuner(_matmul_split_kernel)
_sum = CachedKernel(_matmul_split_sum_kernel)


def shares(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> int:
    """How many shares to make of k: as many as give each multiprocessor four tiles, as far as that is worth it.

    One where the tiles keep half of them busy, where k is short, and in batches.
    """
    (m, k), n = a.shape[-2:], b.shape[-1]
    if c.dim() > 2:
        return 1
    if interpreted():
        return min(3, triton.cdiv(k, 16))
    block = 64 if min(m, n) > 64 else min(m, n)
    tiles = triton.cdiv(m, max(block, 16)) * triton.cdiv(n, 64)
    sms = multiprocessors(c.device, MULTIPROCESSORS)
    if 2 * tiles > sms or k < LEAST_SHARED_K:
        return 1
    wanted = triton.cdiv(4 * sms, tiles)
    return max(1, min(wanted, MOST, k // LEAST_K, WORKSPACE // (4 * m * n)))


def write(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, count: int) -> Callable[..., None] | None:
    """Write ``a @ b`` into contiguous `c`, by that many shares of k; what is returned does it again."""
    (m, n, k, *strides, _), constants = arguments_of(a, b)
    # A share is a whole number of every configuration's steps, and all shares but the last are alike.
    share_k = triton.cdiv(triton.cdiv(k, count), LEAST_K) * LEAST_K if not interpreted() else triton.cdiv(k, count)
    count = triton.cdiv(k, share_k)
    constants["EVEN_K"] = k % LEAST_K == 0 and share_k % LEAST_K == 0
    partials = torch.empty((count, m, n), dtype=torch.float32, device=c.device)

    def launch(config: triton.Config) -> Launch:
        blocks = {**constants, **config.kwargs}
        names = _matmul_split_kernel.arg_names[-9:]
        arguments = (m, n, k, share_k, *strides, *(blocks[name] for name in names))
        grid = (triton.cdiv(m, blocks["BLOCK_M"]) * triton.cdiv(n, blocks["BLOCK_N"]), count)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        return Launch(_matmul_split_kernel, grid, arguments, options)

    kind = kind_of(c.dtype, m, n)
    if interpreted():
        candidates = INTERPRETED
    else:
        of_kind = FLOAT32 if kind in ("tf32", "ieee") else CONFIGS
        candidates = likeliest(of_kind, COUNT, m, n, share_k, count, c.element_size(), c.device)
    key = (str(a.dtype), kind, m, n, k, count, *(min(s, 2) if s < 2 else s % 8 == 0 for s in strides))
    chosen = _choose.launch(key, candidates, launch, partials, a, b)
    sum_programs, sum_arguments = triton.cdiv(m * n, SUM_BLOCK), (m * n, count, SUM_BLOCK)
    _sum(sum_programs, (c, partials), sum_arguments)

    def again(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        partials = torch.empty((count, m, n), dtype=torch.float32, device=c.device)
        chosen(partials, a, b)
        _sum(sum_programs, (c, partials), sum_arguments)

    return again
