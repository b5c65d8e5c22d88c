"""linear_cross_entropy, rung 1 of 1: chunked

Idea      One chunk of rows at a time: their logits, their loss, and its gradient, written over the logits. Both
          products of the backward pass follow at once (Hsu et al., Liger Kernel, arXiv:2410.10989). So memory holds the
          logits of one chunk alone, and no product is computed twice.
Predicts  The time of three products, and 4·C·sizeof(T) bytes more for each row; memory of a chunk's logits.
Limit now The products: those with few rows leave multiprocessors idle. The weight's gradient is read and written once a
          chunk.
Next      Stream-K for the input's gradient, whose tiles are few and whose k is all classes.

Where the gradient of every row's loss is another one, as without a reduction, the backward pass computes the logits
again: ``kernel_ladder/semantics/chunked_loss.py`` has the passes, this file what they launch. Shared openly: the
products of ``matmul/persistent.py``, of ``matmul/tiled.py`` where operands have no tensor descriptors, and the kernels
of ``cross_entropy/online.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics import chunked_loss
from kernel_ladder.semantics.chunked_loss import sum_dtype
from kernel_ladder.semantics.precision import tf32_allowed
from triton_impl import interpreted, register, unsupported
from triton_impl.common.dot import INTERPRETED, dot
from triton_impl.cross_entropy import online, rows
from triton_impl.cross_entropy.rows import Options
from triton_impl.matmul import persistent, tiled
from triton_impl.matmul.descriptors import DescriptorProduct, tma_unsupported
from triton_impl.matmul.tiles import CONFIGS, INTERPRETER_CONFIG, accumulate, arguments_of, kind_of, rasterize
from triton_impl.matmul.tma_tiles import IEEE, load_tile, tile_origin
from triton_impl.runtime.autotuned_kernel import AutotunedKernel
from triton_impl.runtime.descriptor_launch import ALIGNMENT_BYTES
from triton_impl.runtime.launch_cache import CachedKernel, Launch, LaunchCache

#: Chunks that the rows are cut into at most, the least rows of one, and what divides those. Fewer rows give the input's
#: gradient too few tiles for a GPU: 1024 rows of 2048 columns have 128 of 128².
CHUNKS, LEAST_ROWS, ROW_MULTIPLE = 12, *((16, 16) if interpreted() else (1024, 128))
#: Elements that a row of logits is padded to, so that each starts on 16 bytes and tensor descriptors take them.
PADDED_TO = 8
#: Elements of a program that scales a gradient.
BLOCK = 2048


@triton.jit(do_not_specialize=["tuning_key"])
def _add_product_kernel(
    c_ptr, a_ptr, b_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, tuning_key,
    PRECISION: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``C += A · B``, accumulated in float32 and rounded once.

    Grid: (⌈M / BLOCK_M⌉ · ⌈N / BLOCK_N⌉,). Layout: A (M, K) and B (K, N) by strides, C (M, N) contiguous.
    """
    tile_m, tile_n = rasterize(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc, offs_m, offs_n, mask = accumulate(
        a_ptr, b_ptr, tile_m, tile_n, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
        PRECISION, EVEN_M, EVEN_N, EVEN_K, INT64_OFFSETS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    c_ptrs = c_ptr + offs_m[:, None] * N + offs_n[None, :]
    acc += tl.load(c_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_subtile(
    out, m, n, M, N, x, DESCRIBED: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Add `x` to the output at (m, n). The copy engine adds in the L2 what it has been given in the output's dtype."""
    if DESCRIBED and INTERPRETED:  # the interpreter has no copy engine that adds
        out.store([m, n], (out.load([m, n]).to(tl.float32) + x).to(out.dtype))
    elif DESCRIBED:
        out.atomic_add([m, n], x.to(out.dtype))
    else:
        offs_m, offs_n = m + tl.arange(0, BLOCK_M), n + tl.arange(0, COLUMNS)
        mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        ptrs = out + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
        x += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(ptrs, x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_product_persistent_kernel(
    c, product, a, b, bias_ptr, M, N, K, bias_stride, tiles,
    A_ALONG_K: tl.constexpr, B_ALONG_K: tl.constexpr, A_BATCHED: tl.constexpr, B_BATCHED: tl.constexpr,
    DESCRIBED: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, SAVE_PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """``C += A · B``: the loop of ``matmul/persistent.py``, whose arguments it takes, with another epilogue.

    Each element of C is added to once, so that its bits are the same in every run. Grid and layout: as there.
    """
    stored = tl.program_id(0) - tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        batch, m, n = tile_origin(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            a_tile = load_tile(a, batch, m, k, A_ALONG_K, A_BATCHED, BLOCK_M, BLOCK_K)
            b_tile = load_tile(b, batch, n, k, B_ALONG_K, B_BATCHED, BLOCK_N, BLOCK_K)
            acc = dot(a_tile, b_tile.T, acc, IEEE)
        stored += tl.num_programs(0)
        _, m_stored, n_stored = tile_origin(stored, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        if SUBTILES == 1:
            _add_subtile(c, m_stored, n_stored, M, N, acc, DESCRIBED, BLOCK_M, BLOCK_N)
        else:
            HALF: tl.constexpr = BLOCK_N // 2
            left, right = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
            _add_subtile(c, m_stored, n_stored, M, N, left, DESCRIBED, BLOCK_M, HALF)
            _add_subtile(c, m_stored, n_stored + HALF, M, N, right, DESCRIBED, BLOCK_M, HALF)


@triton.jit
def _scale_kernel(out_ptr, x_ptr, grad_ptr, count_ptr, numel, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """``out = grad · x``, and divided by the count for a mean; `out` may be `x`.

    Grid: one program per BLOCK elements. Layout: dense.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < numel, other=0.0).to(tl.float32)
    scale = tl.load(grad_ptr).to(tl.float32)
    if MEAN:
        count = tl.load(count_ptr)
        scale = tl.where(count > 0, scale / count, 0.0)  # where no row counts, every gradient is zero
    value = x * scale
    tl.store(out_ptr + i, value.to(out_ptr.dtype.element_ty), mask=i < numel)


# ---- host ----------------------------------------------------------------------------------------------------------

_add_product = {
    kind: AutotunedKernel(_add_product_kernel, [INTERPRETER_CONFIG] if interpreted() else configs, ["tuning_key"])
    for kind, configs in CONFIGS.items()
}
_add_product_persistent = DescriptorProduct(_add_product_persistent_kernel, persistent=True)
_launches = LaunchCache()
#: By the dtypes of the sums and of the output's gradient: a kernel's launches are cached by that of its output alone.
_scale_kernels = defaultdict(lambda: CachedKernel(_scale_kernel))


def _add_tiled(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Launch:
    arguments, constants = arguments_of(a, b)
    m, n = arguments[:2]

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    return _add_product[kind_of(a.dtype, m, n)](grid, (c, a, b), arguments, constants)


def multiply(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, add: bool = False) -> None:
    """``c = a @ b``, or ``c += a @ b``, of matrices. The rows of `c` are dense, and where no descriptors are, close."""
    if 0 in (*c.shape, a.shape[1]):
        if not add:
            c.zero_()
        return
    tf32 = a.dtype == torch.float32 and tf32_allowed()
    begin = a.data_ptr() % ALIGNMENT_BYTES, b.data_ptr() % ALIGNMENT_BYTES  # of which descriptors ask
    key = (add, c.stride(), a.shape, a.stride(), b.shape, b.stride(), begin, a.dtype, c.dtype, tf32, c.device)
    launch = _launches.get(key)
    if launch is None:
        described = tma_unsupported(a, b) is None
        writes = (persistent.write, tiled.write), (_add_product_persistent.write, _add_tiled)
        write = writes[add][0 if described else 1]
        # Timing configurations runs the kernel many times, so the first call adds to a tensor of no use.
        launch = write(torch.empty_like(c) if add else c, a, b)
        assert launch is not None
        _launches.remember(key, launch)
        if not add:
            return
    launch(c, a, b)


def rows_of_chunk(n_rows: int) -> int:
    """Rows of every chunk but the last: a multiple of a tile's, which keeps operands aligned too."""
    return max(LEAST_ROWS, triton.cdiv(triton.cdiv(n_rows, CHUNKS), ROW_MULTIPLE) * ROW_MULTIPLE)


def _gradients(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    options: Options,
    losses: torch.Tensor,
    grad: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write each row's loss, and return the gradients of input and weight, where `grad` has that of each row's loss."""
    by_row = options._replace(reduction="none")
    unused = torch.empty((), dtype=torch.float32, device=input.device)
    grad_input = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    dtype = sum_dtype(weight.dtype)
    make = torch.empty if input.shape[0] else torch.zeros
    grad_weight = make(weight.shape, dtype=dtype, device=weight.device)
    for part in _chunks(input.shape[0]):
        x, labels = input[part], target[part]
        logits, stats = _losses(x, weight, labels, options, losses[part])
        online.launch_backward(logits, logits, labels, grad[part], stats, unused, by_row)
        multiply(grad_input[part], logits, weight)
        multiply(grad_weight, logits.mT, x, add=part.start > 0)
        del logits, stats  # before the next chunk's are made
    return grad_input, grad_weight


def _chunks(n_rows: int) -> Iterator[slice]:
    step = rows_of_chunk(n_rows)
    for first in range(0, n_rows, step):
        yield slice(first, first + step)


def _empty_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Room for the logits of `x`: with padded rows where tensor descriptors take the operands."""
    classes = weight.shape[0]
    padded = triton.cdiv(classes, PADDED_TO) * PADDED_TO if tma_unsupported(x, weight.mT) is None else classes
    return torch.empty((x.shape[0], padded), dtype=x.dtype, device=x.device)[:, :classes]


def _losses(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, options: Options, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the losses of a chunk, and return its logits, with the maximum and sum of each row."""
    logits = _empty_logits(x, weight)
    multiply(logits, x, weight.mT)
    stats = torch.empty(2 * x.shape[0], dtype=torch.float32, device=x.device)
    online.launch_forward(logits, labels, losses, stats, options)
    return logits, stats


def _write_losses(
    input: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, options: Options, losses: torch.Tensor
) -> None:
    for part in _chunks(input.shape[0]):
        _losses(input[part], weight, target[part], options, losses[part])


def _scale(output: torch.Tensor, sums: torch.Tensor, grad: torch.Tensor, count: torch.Tensor, mean: bool) -> None:
    kernel = _scale_kernels[sums.dtype, grad.dtype]
    kernel(triton.cdiv(sums.numel(), BLOCK), (output, sums, grad, count), (sums.numel(), mean, BLOCK))


_rung = chunked_loss.Launches(Options, _write_losses, _gradients, rows.launch_sum, _scale)
register("linear_cross_entropy", "triton.chunked", **chunked_loss.passes(_rung), unsupported=unsupported)
