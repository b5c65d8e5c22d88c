"""Device functions shared by the rungs `tma` and `persistent`: load a tile by its descriptor, finish and store one."""

from __future__ import annotations

import triton
import triton.language as tl

from triton_impl.gelu import gelu_of
from triton_impl.matmul.tiles import rasterize

IEEE = tl.constexpr("ieee")


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """``x`` for None, else ``gelu(x)``: exact for "none", approximated for "tanh"."""
    if ACTIVATION is None:
        return x
    return gelu_of(x, ACTIVATION == "tanh")


@triton.jit
def load_tile(
    desc, batch, x, k, ALONG_K: tl.constexpr, BATCHED: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Tile (BLOCK_X, BLOCK_K) at (x, k) of an operand: rows of A or columns of B. ALONG_K: k is dense."""
    if ALONG_K and BATCHED:
        return desc.load([batch, x, k]).reshape(BLOCK_X, BLOCK_K)
    elif ALONG_K:
        return desc.load([x, k])
    elif BATCHED:
        return desc.load([batch, k, x]).reshape(BLOCK_K, BLOCK_X).T
    else:
        return desc.load([k, x]).T


@triton.jit
def store_subtile(
    out, batch, m, n, M, N, x, DESCRIBED: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Store `x` at (m, n) of the output: by its descriptor, or by its pointer where it has none."""
    if DESCRIBED:
        out.store([m, n], x.to(out.dtype))
    else:
        offs_m = m + tl.arange(0, BLOCK_M)
        offs_n = n + tl.arange(0, COLUMNS)
        pointers = out + (batch.to(tl.int64) * M + offs_m[:, None]) * N + offs_n[None, :]
        tl.store(pointers, x.to(out.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


@triton.jit
def _epilogue(
    c, product, bias_ptr, batch, m, n, M, N, bias_stride, x,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, SAVE_PRODUCT: tl.constexpr, DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``c = activation(x + bias)`` for one subtile; with SAVE_PRODUCT `x` alone goes to `product` too."""
    if SAVE_PRODUCT:
        store_subtile(product, batch, m, n, M, N, x, DESCRIBED, BLOCK_M, COLUMNS)
    if HAS_BIAS:
        offs_n = n + tl.arange(0, COLUMNS)
        bias_offsets = offs_n.to(tl.int64) * bias_stride
        x += tl.load(bias_ptr + bias_offsets, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    store_subtile(c, batch, m, n, M, N, activate(x, ACTIVATION), DESCRIBED, BLOCK_M, COLUMNS)


@triton.jit
def store_tile(
    c, product, bias_ptr, batch, m, n, M, N, bias_stride, acc,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, SAVE_PRODUCT: tl.constexpr, DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """Run the epilogue on the accumulator, whole or in two halves of its columns (SUBTILES)."""
    if SUBTILES == 1:
        _epilogue(
            c, product, bias_ptr, batch, m, n, M, N, bias_stride, acc,
            HAS_BIAS, ACTIVATION, SAVE_PRODUCT, DESCRIBED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        _epilogue(
            c, product, bias_ptr, batch, m, n, M, N, bias_stride, left,
            HAS_BIAS, ACTIVATION, SAVE_PRODUCT, DESCRIBED, BLOCK_M, HALF,
        )  # fmt: skip
        _epilogue(
            c, product, bias_ptr, batch, m, n + HALF, M, N, bias_stride, right,
            HAS_BIAS, ACTIVATION, SAVE_PRODUCT, DESCRIBED, BLOCK_M, HALF,
        )  # fmt: skip


@triton.jit
def tile_origin(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(batch entry, first row, first column) of the tile with this number."""
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = rasterize(tile % tiles, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    return tile // tiles, tile_m * BLOCK_M, tile_n * BLOCK_N
