"""matmul, rung 4 of 5: persistent

Idea      As many programs as run at once take tile after tile. The two loops, over tiles and over k, are flattened into
          one pipeline: the next tile's operands are fetched while this tile is stored.
Predicts  Prologue and epilogue of a tile are hidden behind its neighbours: ⌈tiles / programs⌉ mainloops in a row.
Limit now Few tiles leave multiprocessors idle, however long k is.
Next      `split_k`: programs share the k of one tile.

Operands whose rows begin off 16 bytes are copied with padded rows where the product is large (``descriptors.py``): a
copy takes device memory of their size.

The persistent loop, with the stored tile counted apart from the fetched one, is that of Triton's tutorial
09-persistent-matmul. Shared openly with `tma`: the description of operands and the epilogue. `linear` runs this kernel
with a bias and an activation in its epilogue.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triton_impl.common.dot import dot
from triton_impl.matmul.descriptors import DescriptorProduct
from triton_impl.matmul.tma_tiles import IEEE, load_tile, store_tile, tile_origin


@triton.jit
def _matmul_persistent_kernel(
    c, product, a, b, bias_ptr, M, N, K, bias_stride, tiles,
    A_ALONG_K: tl.constexpr, B_ALONG_K: tl.constexpr, A_BATCHED: tl.constexpr, B_BATCHED: tl.constexpr,
    DESCRIBED: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, SAVE_PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """``C = activation(A · B + bias)`` in float32, rounded once; with SAVE_PRODUCT also ``product = A · B``.

    Grid: min(tiles, programs that run at once); program p takes tiles p, p + grid, …. Layout: as of `tma`.
    """
    # The stored tile has a counter of its own, so that no value lives across the whole pipeline.
    stored = tl.program_id(0) - tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        batch, m, n = tile_origin(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            a_tile = load_tile(a, batch, m, k, A_ALONG_K, A_BATCHED, BLOCK_M, BLOCK_K)
            b_tile = load_tile(b, batch, n, k, B_ALONG_K, B_BATCHED, BLOCK_N, BLOCK_K)
            acc = dot(a_tile, b_tile.T, acc, IEEE)
        stored += tl.num_programs(0)
        batch_stored, m_stored, n_stored = tile_origin(stored, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        store_tile(
            c, product, bias_ptr, batch_stored, m_stored, n_stored, M, N, bias_stride, acc,
            HAS_BIAS, ACTIVATION, SAVE_PRODUCT, DESCRIBED, BLOCK_M, BLOCK_N, SUBTILES,
        )  # fmt: skip


run = DescriptorProduct(_matmul_persistent_kernel, persistent=True)
write = run.write
