"""matmul, rung 3 of 5: tma

Idea      The copy engine (TMA) fetches the tiles of A and B by tensor descriptors. A descriptor fills what lies outside
          a matrix with zeros, so that no load has a mask.
Predicts  The bytes of `tiled`; one thread issues a tile's copy, where every thread computed addresses.
Limit now A program ends with its tile: the store of one tile and the first loads of the next do not overlap.
Next      `persistent`: a program takes tile after tile and prefetches across them.

Shared openly with `persistent`: the description of operands (``descriptors.py``) and the epilogue (``tma_tiles.py``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from triton_impl.common.dot import dot
from triton_impl.matmul.descriptors import DescriptorProduct
from triton_impl.matmul.tma_tiles import IEEE, load_tile, store_tile, tile_origin


@triton.jit
def _matmul_tma_kernel(
    c, product, a, b, bias_ptr, M, N, K, bias_stride, tiles,
    A_ALONG_K: tl.constexpr, B_ALONG_K: tl.constexpr, A_BATCHED: tl.constexpr, B_BATCHED: tl.constexpr,
    DESCRIBED: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, SAVE_PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """``C = A · B`` in float32, rounded once.

    Grid: one program per tile of every batch entry. Layout: A (…, M, K) and B (…, K, N) by descriptors along whichever
    dimension is dense; C (…, M, N) contiguous, by a descriptor where DESCRIBED.
    """
    batch, m, n = tile_origin(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a_tile = load_tile(a, batch, m, k, A_ALONG_K, A_BATCHED, BLOCK_M, BLOCK_K)
        b_tile = load_tile(b, batch, n, k, B_ALONG_K, B_BATCHED, BLOCK_N, BLOCK_K)
        acc = dot(a_tile, b_tile.T, acc, IEEE)
    store_tile(
        c, product, bias_ptr, batch, m, n, M, N, bias_stride, acc,
        HAS_BIAS, ACTIVATION, SAVE_PRODUCT, DESCRIBED, BLOCK_M, BLOCK_N, SUBTILES,
    )  # fmt: skip


run = DescriptorProduct(_matmul_tma_kernel, persistent=False)
write = run.write
