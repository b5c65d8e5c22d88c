"""linear_float8, rung 1 of 2: tiled

Idea      The tiles of matmul's `tiled`, with float8 operands on the tensor cores and both scales in the epilogue, which
          multiplies a tile in registers. Every 128 products the tensor cores' sum goes to a float32 accumulator, which
          keeps the digits that Hopper's tensor cores drop (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).
Predicts  Half of `linear`'s time in bfloat16: half the bytes an element, twice the products a clock.
Limit now A wait for the tensor cores, then an addition, after every 128 products.
Next      `persistent`: the copy engine fetches tiles, also the next tile's while this one is stored.

Takes everything: any strides and sizes. Float8 wgmma reads both operands along k, as rows of `input` and `weight` lie.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernel_ladder import gpu
from kernel_ladder.semantics.float8 import no_gradient, output_dtype
from kernel_ladder.semantics.linear_shapes import as_rows, output_shape
from kernel_ladder.tracing import shapes_only
from triton_impl import interpreted
from triton_impl import unsupported as unsupported_by_triton
from triton_impl.matmul.tiles import accumulate, arguments_of, config, rasterize
from triton_impl.runtime.autotuned_kernel import AutotunedKernel
from triton_impl.runtime.launch_cache import Launch, LaunchCache

#: Major compute capabilities whose sums are wide enough: Hopper's are promoted, Blackwell's tcgen05 adds in float32.
#: Triton does not promote those of mma.sync, which other GPUs have.
PROMOTING = 9, 10
PROMOTION_NEEDS = "float8 sums that keep the digits of float32 need compute capability 9.x or 10.x"

#: Tiles of at least 128 along k, as sums are promoted. The first is taken without tuning, or the last if it is too big.
CONFIGS = [
    # Of 128×256, two accumulators would not fit in registers; of 256×128, half of the tile is in flight.
    config(256, 128, 128, 8, 3),
    config(256, 128, 128, 8, 4),
    config(128, 128, 128, 8, 4),
    config(128, 128, 128, 4, 4),
    config(64, 128, 128, 4, 5),
    config(128, 64, 128, 4, 5),
    config(64, 64, 128, 4, 5),
]
#: At most 64 rows or columns: as of matmul, bound by reading the other operand.
THIN = [
    config(16, 64, 256, 4, 4),
    config(16, 32, 256, 4, 4),
    config(16, 128, 128, 4, 5),
    config(64, 32, 256, 4, 4),
    config(64, 64, 128, 4, 5),
    config(64, 16, 256, 4, 4),
]
INTERPRETED = [config(64, 64, 128, 1, 1)]


@triton.jit
def scaled_tile(
    acc, input_scale_ptr, weight_scale_ptr, bias_ptr, offs_m, offs_n, M, N, bias_stride,
    ROW_SCALES: tl.constexpr, COLUMN_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Epilogue: ``acc · input_scale · weight_scale + bias`` in float32; a scale per row, or one for the tensor."""
    if ROW_SCALES:
        acc *= tl.load(input_scale_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]
    else:
        acc *= tl.load(input_scale_ptr)
    if COLUMN_SCALES:
        acc *= tl.load(weight_scale_ptr + offs_n, mask=offs_n < N, other=0.0)[None, :]
    else:
        acc *= tl.load(weight_scale_ptr)
    if HAS_BIAS:
        bias_offsets = offs_n.to(tl.int64) * bias_stride
        acc += tl.load(bias_ptr + bias_offsets, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit(do_not_specialize=["tuning_key"])
def _linear_float8_kernel(
    c_ptr, a_ptr, b_ptr, input_scale_ptr, weight_scale_ptr, bias_ptr, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn,
    tuning_key, bias_stride,
    PRECISION: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    INT64_OFFSETS: tl.constexpr, ROW_SCALES: tl.constexpr, COLUMN_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``c = (A · B) · input_scale · weight_scale + bias`` in float32, rounded once; A and B in float8.

    Grid: (⌈M / BLOCK_M⌉ · ⌈N / BLOCK_N⌉,). Layout: A (M, K), B (K, N), bias (N,) by strides, others contiguous.
    """
    tile_m, tile_n = rasterize(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc, offs_m, offs_n, mask = accumulate(
        a_ptr, b_ptr, tile_m, tile_n, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
        PRECISION, EVEN_M, EVEN_N, EVEN_K, INT64_OFFSETS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    acc = scaled_tile(
        acc, input_scale_ptr, weight_scale_ptr, bias_ptr, offs_m, offs_n, M, N, bias_stride,
        ROW_SCALES, COLUMN_SCALES, HAS_BIAS,
    )  # fmt: skip
    c_ptrs = c_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask)


_kernels = {
    thin: AutotunedKernel(_linear_float8_kernel, INTERPRETED if interpreted() else configs, ["tuning_key"])
    for thin, configs in ((False, CONFIGS), (True, THIN))
}

#: By all that decides a launch.
_launches: LaunchCache = LaunchCache()


def launched(
    output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[tuple[torch.Tensor, ...], tuple[bool, bool], tuple[Any, ...]]:
    """The tensors of a launch, whether each scale is one per row, and all that decides the launch."""
    a, of_rows, of_columns = as_rows(input), input_scale.contiguous(), weight_scale.contiguous()
    tensors = (output, a, weight, of_rows, of_columns, output if bias is None else bias)
    step = None if bias is None else (bias.stride(0), bias.dtype)
    scales = (bool(of_rows.dim()), bool(of_columns.dim()))
    return tensors, scales, (a.shape, a.stride(), weight.shape, weight.stride(), scales, step, output.dtype, a.device)


def linear_float8(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out_dtype: torch.dtype | str,
) -> tuple[torch.Tensor, tuple]:
    output = torch.empty(output_shape(input, weight), dtype=output_dtype(out_dtype), device=input.device)
    if shapes_only() or output.numel() == 0:
        return output, ()
    tensors, scales, key = launched(output, input, weight, input_scale, weight_scale, bias)
    _launches.run(key, lambda: _first(tensors, scales, bias), tensors)
    return output, ()


def _first(tensors: tuple[torch.Tensor, ...], scales: tuple[bool, bool], bias: torch.Tensor | None) -> Launch:
    _, a, weight, *_ = tensors
    arguments, constants = arguments_of(a, weight.mT)
    m, n = arguments[:2]
    constants |= {"ROW_SCALES": scales[0], "COLUMN_SCALES": scales[1], "HAS_BIAS": bias is not None}

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    step = 0 if bias is None else bias.stride(0)
    return _kernels[m <= 64 or n <= 64](grid, tensors, (*arguments, step), constants)


def unsupported(*inputs: torch.Tensor, **options: object) -> str | None:
    """Why no Triton kernel of this operation takes a call, or None."""
    reason = no_gradient(*inputs) or unsupported_by_triton(inputs[0])
    return reason or (_without_promotion(inputs[0].get_device()) if inputs[0].is_cuda else None)


@gpu.cached
def _without_promotion(index: int) -> str | None:
    """Why Triton's float8 sums would lose digits on a GPU, or None."""
    if not gpu.visible() or (found := gpu.of(index)).capability[0] in PROMOTING:
        return None
    major, minor = found.capability
    return f"{PROMOTION_NEEDS}, {found.name} has {major}.{minor}"
