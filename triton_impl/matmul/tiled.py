"""matmul, rung 2 of 5: tiled

Idea      Triton pipelines the loads (``num_stages`` tiles ahead). Programs run in groups that share rows of A and
          columns of B through the L2. Tile sizes are tuned per kind of product.
Predicts  Each element of A is read ⌈N / BLOCK_N⌉ times from the L2 and, in a group, about once from memory.
Limit now Every thread computes the addresses and masks of its loads, in registers the accumulator could have.
Next      `tma`: the copy engine fetches tiles by descriptors.

Takes everything: any strides, batches, dtypes and sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.strides import collapse
from triton_impl import interpreted
from triton_impl.matmul.tiles import CONFIGS, INTERPRETER_CONFIG, accumulate, arguments_of, kind_of, rasterize
from triton_impl.runtime.autotuned_kernel import AutotunedKernel
from triton_impl.runtime.launch_cache import Launch

MAX_BATCH_DIMS = 3


@triton.jit
def _tile(
    c_ptr, a_ptr, b_ptr, tile, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn,
    PRECISION: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Tile number `tile` of ``C = A · B``."""
    tile_m, tile_n = rasterize(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc, offs_m, offs_n, mask = accumulate(
        a_ptr, b_ptr, tile_m, tile_n, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
        PRECISION, EVEN_M, EVEN_N, EVEN_K, INT64_OFFSETS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    c_ptrs = c_ptr + offs_m[:, None] * N + offs_n[None, :]  # C is contiguous
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tuning_key"])
def _matmul_kernel(
    c_ptr, a_ptr, b_ptr, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn,
    tuning_key,
    PRECISION: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``C = A · B``, accumulated in float32.

    Grid: (⌈M / BLOCK_M⌉ · ⌈N / BLOCK_N⌉,), tiles in groups of GROUP_M rows. Layout: A (M, K) and B (K, N) by strides,
    C (M, N) contiguous.
    """
    _tile(
        c_ptr, a_ptr, b_ptr, tl.program_id(0), M, N, K,
        stride_am, stride_ak, stride_bk, stride_bn,
        PRECISION, EVEN_M, EVEN_N, EVEN_K, INT64_OFFSETS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tuning_key"])
def _batched_matmul_kernel(
    c_ptr, a_ptr, b_ptr, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn,
    tuning_key,
    size1, size2, a0, a1, a2, b0, b1, b2,
    PRECISION: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """As `_matmul_kernel`, for three batch dimensions of sizes (any, size1, size2).

    Grid: (batch · tiles,). Layout: batch strides a0 … a2 and b0 … b2; a broadcast dimension has stride 0.
    """
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    batch = tl.program_id(0) // tiles
    i2 = (batch % size2).to(tl.int64)
    i1 = (batch // size2 % size1).to(tl.int64)
    i0 = (batch // size2 // size1).to(tl.int64)
    c_ptr += batch.to(tl.int64) * M * N
    a_ptr += i0 * a0 + i1 * a1 + i2 * a2
    b_ptr += i0 * b0 + i1 * b1 + i2 * b2
    _tile(
        c_ptr, a_ptr, b_ptr, tl.program_id(0) % tiles, M, N, K,
        stride_am, stride_ak, stride_bk, stride_bn,
        PRECISION, EVEN_M, EVEN_N, EVEN_K, INT64_OFFSETS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
    )  # fmt: skip


def _by_kind(kernel: triton.JITFunction) -> dict[str, AutotunedKernel]:
    """The kernel tuned over each kind's configurations."""
    return {
        kind: AutotunedKernel(kernel, [INTERPRETER_CONFIG] if interpreted() else configs, ["tuning_key"])
        for kind, configs in CONFIGS.items()
    }


_matmul = _by_kind(_matmul_kernel)
_batched_matmul = _by_kind(_batched_matmul_kernel)


def write(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Launch | None:
    """See :data:`triton_impl.matmul.product.Write`."""
    kind = kind_of(a.dtype, a.shape[-2], b.shape[-1])
    arguments, constants = arguments_of(a, b)
    m, n = arguments[:2]
    if a.dim() == 2:

        def grid(meta):
            return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

        return _matmul[kind](grid, (c, a, b), arguments, constants)

    sizes, strides = collapse(c.shape[:-2], a.stride()[:-2], b.stride()[:-2])
    if len(sizes) > MAX_BATCH_DIMS:
        for i in range(c.shape[0]):
            write(c[i], a[i], b[i])
        return None
    padding = MAX_BATCH_DIMS - len(sizes)
    batches = c.shape[:-2].numel()
    batch_arguments = [*([1] * padding), *sizes][1:]
    for s in strides:
        batch_arguments += [*([0] * padding), *s]

    def grid_of_batches(meta):
        return (batches * triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    return _batched_matmul[kind](grid_of_batches, (c, a, b), (*arguments, *batch_arguments), constants)
