"""Shared by the kernels of matrix products: rasterization, the loop over k, configurations and their cost model."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.precision import tf32_allowed
from triton_impl import multiprocessors
from triton_impl.common.dot import dot


def config(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int, **more: Any) -> triton.Config:
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": 8, **more}
    return triton.Config(blocks, num_warps=num_warps, num_stages=num_stages)


#: By kind of product. Tuning drops a configuration that needs more shared memory than the GPU has. Without tuning the
#: first is taken, or the last where the first does not fit.
CONFIGS = {
    # Two warpgroups hold a 128×256 accumulator in registers; smaller tiles where those would leave SMs idle.
    "16-bit": [
        config(128, 256, 64, 8, 3),
        config(128, 256, 64, 8, 4),
        config(256, 128, 64, 8, 3),
        config(256, 128, 64, 8, 4),
        config(128, 128, 64, 4, 4),
        config(128, 128, 64, 8, 4),
        config(128, 64, 64, 4, 5),
        config(64, 128, 64, 4, 5),
        # Rows of memory along k are read 256 bytes at a time: where reading is what limits, as at 128 rows.
        config(128, 64, 128, 4, 4),
        config(64, 128, 128, 4, 4),
        config(64, 64, 64, 4, 5),
    ],
    # At most 64 rows or columns: bound by reading the other matrix, so narrow tiles (many programs), deep pipelines.
    "16-bit thin": [
        config(16, 32, 256, 4, 4),
        config(16, 64, 128, 4, 5),
        config(16, 128, 64, 4, 5),
        config(32, 64, 128, 4, 5),
        config(64, 16, 128, 4, 5),
        config(64, 32, 128, 4, 5),
        config(64, 64, 128, 4, 4),
        config(32, 16, 256, 4, 4),
    ],
    "tf32": [
        config(128, 256, 32, 8, 3),
        config(256, 128, 32, 8, 3),
        config(128, 128, 32, 8, 4),
        config(128, 128, 32, 4, 4),
        config(64, 128, 32, 4, 4),
        config(64, 64, 32, 4, 5),
        config(16, 64, 64, 4, 4),
    ],
    # On the CUDA cores: the tile is a thread's registers, so it stays small.
    "ieee": [
        config(128, 128, 16, 8, 3),
        config(128, 64, 16, 4, 3),
        config(64, 128, 16, 4, 3),
        config(64, 64, 16, 4, 3),
        config(64, 32, 32, 4, 3),
        config(16, 64, 32, 4, 4),
    ],
}
#: Every block size divides it: sizes that are multiples of it need no masks.
BLOCK_MULTIPLE = 256

#: The interpreter has nothing to tune.
INTERPRETER_CONFIG = config(64, 64, 64, 1, 1)


@triton.jit
def rasterize(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(row, column) of the tile with this number, in grouped order.

    Programs that run at the same time cover GROUP_M rows of tiles, and share their A and B through the L2.
    """
    grid_m = tl.cdiv(M, BLOCK_M)
    per_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_m = tile // per_group * GROUP_M
    rows = min(grid_m - first_m, GROUP_M)
    return first_m + tile % per_group % rows, tile % per_group // rows


@triton.jit
def accumulate(
    a_ptr, b_ptr, tile_m, tile_n, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    PRECISION: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    INT64_OFFSETS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Mainloop: ``Σ_k A[m, k] · B[k, n]`` of one tile, in float32, with its row and column offsets and its mask."""
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = tl.full((BLOCK_M,), True, tl.int1) if EVEN_M else offs_m < M
    mask_n = tl.full((BLOCK_N,), True, tl.int1) if EVEN_N else offs_n < N
    if INT64_OFFSETS:
        offs_m, offs_n, offs_k = offs_m.to(tl.int64), offs_n.to(tl.int64), offs_k.to(tl.int64)
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn

    step = tl.full((), BLOCK_K, tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        mask_k = tl.full((BLOCK_K,), True, tl.int1) if EVEN_K else offs_k < K - k
        a = tl.load(a_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        acc = dot(a, b, acc, PRECISION)
        a_ptrs += step * stride_ak
        b_ptrs += step * stride_bk
    return acc, offs_m, offs_n, mask_m[:, None] & mask_n[None, :]


#: Bits of the tuning key about an operand's strides, A's; those of B are two further up.
_INNER_STRIDE_IS_1 = 1 << 12
_ALIGNED_16_BYTES = 1 << 13


def _magnitude(size: int) -> int:
    """The power of two that a size reaches, up to 2¹⁵: sizes alike in this are tuned alike."""
    power = 0
    while power < 15 and size > 1 << power:
        power += 1
    return power


def kind_of(dtype: torch.dtype, m: int, n: int) -> str:
    """Which of CONFIGS a product takes."""
    if dtype == torch.float32:
        return "tf32" if tf32_allowed() else "ieee"
    return "16-bit thin" if m <= 64 or n <= 64 else "16-bit"


def arguments_of(a: torch.Tensor, b: torch.Tensor) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Sizes, strides and tuning key of a product of ``(…, M, K)`` and ``(…, K, N)``, and its constants."""
    m, k = a.shape[-2:]
    n = b.shape[-1]
    stride_am, stride_ak = a.stride()[-2:]
    stride_bk, stride_bn = b.stride()[-2:]
    # One row (column) has no next, whatever its stride says: (1, K) in the memory of (K, 1) runs along k all the same.
    if m == 1:
        stride_am = 0
    if n == 1:
        stride_bn = 0
    # The last element's offset, with room for the blocks that reach past it.
    large = (
        (m + 257) * n >= 2**31
        or (m + 256) * stride_am + (k + 256) * stride_ak >= 2**31
        or (k + 256) * stride_bk + (n + 256) * stride_bn >= 2**31
    )
    tuning_key = _magnitude(m) + (_magnitude(n) << 4) + (_magnitude(k) << 8)
    # What decides how wide the loads are: the unit strides, and whether the others keep 16-byte alignment.
    tuning_key += _width(stride_ak, stride_am) + 4 * _width(stride_bn, stride_bk)
    constants = {
        "PRECISION": "tf32" if kind_of(a.dtype, m, n) == "tf32" else "ieee",
        "EVEN_M": m % BLOCK_MULTIPLE == 0,
        "EVEN_N": n % BLOCK_MULTIPLE == 0,
        "EVEN_K": k % BLOCK_MULTIPLE == 0,
        "INT64_OFFSETS": large,
    }
    return (m, n, k, stride_am, stride_ak, stride_bk, stride_bn, tuning_key), constants


def _width(inner: int, outer: int) -> int:
    """The bits of an operand with these strides, in elements."""
    if inner == 1:
        return _INNER_STRIDE_IS_1 + (_ALIGNED_16_BYTES if outer % 8 == 0 else 0)
    return _ALIGNED_16_BYTES if inner % 8 == 0 else 0


#: What the cost model takes a GPU to be where it cannot ask: an H200's multiprocessors.
MULTIPROCESSORS = 132
#: Bytes of shared memory that a multiprocessor has for programs.
_SHARED = 227 * 1024


def programs_at_once(config: triton.Config, itemsize: int) -> int:
    """How many programs of a configuration a multiprocessor has shared memory for: stages, and a tile to be stored."""
    b = config.kwargs
    stage = (b["BLOCK_M"] + b["BLOCK_N"]) * b["BLOCK_K"] * itemsize
    tile = b["BLOCK_M"] * b["BLOCK_N"] * itemsize // b.get("SUBTILES", 1)
    return max(1, min(8, 64 // config.num_warps, _SHARED // (config.num_stages * stage + tile)))


def estimate(config: triton.Config, m: int, n: int, k: int, batches: int, itemsize: int, device: torch.device) -> float:
    """Seconds that a product should take: the largest of what tensor cores, L2 and memory need, on a GPU like an H200.

    It only has to order configurations. A multiprocessor's rate falls with small tiles, which read more of shared
    memory for each flop; the last wave of tiles costs as much as a full one.
    """
    b, sms = config.kwargs, multiprocessors(device, MULTIPROCESSORS)
    split = b.get("SPLIT", 1)
    tiles = triton.cdiv(m, b["BLOCK_M"]) * triton.cdiv(n, b["BLOCK_N"]) * batches * split
    per_tile = 2 * b["BLOCK_M"] * b["BLOCK_N"] * triton.cdiv(k, b["BLOCK_K"] * split) * b["BLOCK_K"]
    rate = 6.5e12 / (1 + 24 * (1 / b["BLOCK_M"] + 1 / b["BLOCK_N"])) * 2 / itemsize
    at_once = programs_at_once(config, itemsize)
    busiest = triton.cdiv(tiles, sms) if tiles <= sms * at_once else triton.cdiv(tiles, sms * at_once) * at_once
    compute = busiest * per_tile / rate
    moved = tiles * (b["BLOCK_M"] + b["BLOCK_N"]) * k / split * itemsize
    least = batches * (m * k + k * n + m * n) * itemsize + (8 * split * batches * m * n if split > 1 else 0)
    # Bytes in flight: few programs do not fill the memory's latency.
    stage = (b["BLOCK_M"] + b["BLOCK_N"]) * b["BLOCK_K"] * itemsize
    in_flight = min(1.0, min(tiles / sms, at_once) * stage * config.num_stages / 2**15)
    return max(compute, moved / 5.5e12, least / (4.0e12 * in_flight)) + (3e-6 if split > 1 else 0.0)


def likeliest(
    configs: list[triton.Config], count: int, m: int, n: int, k: int, batches: int, itemsize: int, device: torch.device
) -> list[triton.Config]:
    """As many configurations as the cost model expects to be fastest, that one first; last one that fits anywhere."""
    ordered = sorted(configs, key=lambda config: estimate(config, m, n, k, batches, itemsize, device))[:count]
    smallest = min(configs, key=lambda c: (c.kwargs["BLOCK_M"] + c.kwargs["BLOCK_N"]) * c.num_stages)
    return ordered if smallest in ordered[-1:] else [*(c for c in ordered if c is not smallest), smallest]
