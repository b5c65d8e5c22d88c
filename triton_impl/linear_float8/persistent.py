"""linear_float8, rung 2 of 2: persistent

Idea      Matmul's `persistent` with float8 operands: the copy engine fetches tiles by descriptors, and as many programs
          as run at once take tile after tile, so the next tile's operands come while this one is scaled and stored.
Predicts  Addresses and masks cost no registers, and a tile's prologue and epilogue are hidden behind its neighbours.
Limit now The addition of the tensor cores' sum to the float32 accumulator: two accumulators fill the registers.
Next      Nothing further here; a CUDA rung could let two warpgroups add by turns, as FlashAttention-3's ping-pong.

A descriptor needs rows of K elements that start on 16 bytes: K a multiple of 16, or rows cut out of such.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_ladder.semantics.float8 import output_dtype
from kernel_ladder.semantics.linear_shapes import as_rows, output_shape
from kernel_ladder.tracing import concrete, shapes_only
from triton_impl import interpreted, multiprocessors
from triton_impl.common.dot import dot
from triton_impl.linear_float8 import tiled
from triton_impl.linear_float8.tiled import launched, scaled_tile
from triton_impl.matmul.descriptors import Operand, operand
from triton_impl.matmul.tiles import MULTIPROCESSORS, config, likeliest, programs_at_once
from triton_impl.matmul.tma_tiles import IEEE, store_subtile, tile_origin
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.descriptor_launch import DescriptorLaunch, without_descriptors
from triton_impl.runtime.launch_cache import LaunchCache

#: Candidates, of which the cost model leaves COUNT. SUBTILES: see :mod:`triton_impl.matmul.descriptors`.
CONFIGS = [
    config(256, 128, 128, 8, 3, SUBTILES=2),
    config(256, 128, 128, 8, 3, SUBTILES=1),
    config(128, 128, 128, 8, 4, SUBTILES=1),
    config(128, 128, 128, 4, 4, SUBTILES=1),
    config(128, 64, 128, 4, 5, SUBTILES=1),
    config(64, 128, 128, 4, 5, SUBTILES=1),
    config(64, 64, 128, 4, 5, SUBTILES=1),
]
COUNT = 5
INTERPRETED = [config(64, 64, 128, 1, 1, SUBTILES=2)]


@triton.jit
def _scaled_subtile(
    c, input_scale_ptr, weight_scale_ptr, bias_ptr, batch, m, n, M, N, bias_stride, acc,
    ROW_SCALES: tl.constexpr, COLUMN_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scale and store one subtile at (m, n) of the output. There is one batch entry: `batch` is 0."""
    acc = scaled_tile(
        acc, input_scale_ptr, weight_scale_ptr, bias_ptr, m + tl.arange(0, BLOCK_M), n + tl.arange(0, COLUMNS), M, N,
        bias_stride, ROW_SCALES, COLUMN_SCALES, HAS_BIAS,
    )  # fmt: skip
    store_subtile(c, batch, m, n, M, N, acc, DESCRIBED, BLOCK_M, COLUMNS)


@triton.jit
def _linear_float8_persistent_kernel(
    c, a, b, input_scale_ptr, weight_scale_ptr, bias_ptr, M, N, K, bias_stride, tiles,
    ROW_SCALES: tl.constexpr, COLUMN_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """``c = (A · Bᵀ) · input_scale · weight_scale + bias`` in float32, rounded once; A and B in float8.

    Grid: min(tiles, programs that run at once); program p takes tiles p, p + grid, …. Layout: descriptors of A (M, K)
    and B (N, K), each dense along k; c (M, N) and scales contiguous.
    """
    # The stored tile has a counter of its own, so that no value lives across the whole pipeline.
    stored = tl.program_id(0) - tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        _, m, n = tile_origin(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = dot(a.load([m, k]), b.load([n, k]).T, acc, IEEE)
        stored += tl.num_programs(0)
        batch, m_stored, n_stored = tile_origin(stored, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        if SUBTILES == 1:
            _scaled_subtile(
                c, input_scale_ptr, weight_scale_ptr, bias_ptr, batch, m_stored, n_stored, M, N, bias_stride, acc,
                ROW_SCALES, COLUMN_SCALES, HAS_BIAS, DESCRIBED, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        else:
            HALF: tl.constexpr = BLOCK_N // 2
            left, right = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
            _scaled_subtile(
                c, input_scale_ptr, weight_scale_ptr, bias_ptr, batch, m_stored, n_stored, M, N, bias_stride, left,
                ROW_SCALES, COLUMN_SCALES, HAS_BIAS, DESCRIBED, BLOCK_M, HALF,
            )  # fmt: skip
            _scaled_subtile(
                c, input_scale_ptr, weight_scale_ptr, bias_ptr, batch, m_stored, n_stored + HALF, M, N, bias_stride,
                right, ROW_SCALES, COLUMN_SCALES, HAS_BIAS, DESCRIBED, BLOCK_M, HALF,
            )  # fmt: skip


_choose = Autotuner(_linear_float8_persistent_kernel)

#: By all that decides a launch.
_launches: LaunchCache = LaunchCache()


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
    known = _launches.get(key)
    if known is None:
        _launches.remember(key, _first(tensors, scales, bias))
    else:
        known(*tensors)
    return output, ()


def _first(
    tensors: tuple[torch.Tensor, ...], scales: tuple[bool, bool], bias: torch.Tensor | None
) -> Callable[..., None]:
    """Run the kernel; the returned launch repeats it."""
    c, a, weight, *_ = tensors
    (m, k), n = a.shape, weight.shape[0]
    rows, columns = operand(a), operand(weight)
    assert isinstance(rows, Operand), rows
    assert isinstance(columns, Operand), columns
    # A float32 tile would take the shared memory of a stage: stored by pointer.
    described = n % (16 // c.element_size()) == 0 and c.element_size() == 2

    def launch(config: triton.Config) -> DescriptorLaunch:
        blocks = config.kwargs
        tiles = triton.cdiv(m, blocks["BLOCK_M"]) * triton.cdiv(n, blocks["BLOCK_N"])
        at_once = multiprocessors(c.device, MULTIPROCESSORS) * programs_at_once(config, a.element_size())
        out = None
        if described:
            out = TensorDescriptor(c, [m, n], [n, 1], [blocks["BLOCK_M"], blocks["BLOCK_N"] // blocks["SUBTILES"]])
        of_a = rows.descriptor(a, blocks["BLOCK_M"], blocks["BLOCK_K"])
        of_b = columns.descriptor(weight, blocks["BLOCK_N"], blocks["BLOCK_K"])
        sizes = (m, n, k, 0 if bias is None else bias.stride(0), tiles)
        names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "SUBTILES")
        arguments = (*sizes, *scales, bias is not None, described, *(blocks[name] for name in names))
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        describe = (out, of_a, of_b, None, None, None)
        return DescriptorLaunch(_linear_float8_persistent_kernel, min(tiles, at_once), describe, arguments, options)

    key = (str(c.dtype), m, n, k, *scales, bias is not None, described)
    candidates = INTERPRETED if interpreted() else likeliest(CONFIGS, COUNT, m, n, k, 1, a.element_size(), c.device)
    return _choose.launch(key, candidates, launch, *tensors)


def unsupported(*inputs: torch.Tensor, **options: object) -> str | None:
    """Why descriptors cannot fetch the operands of a call, or None."""
    if (reason := tiled.unsupported(*inputs, **options)) is not None:
        return reason
    input, weight, *_ = inputs
    if any(concrete(size) == 0 for size in (*input.shape, *weight.shape)):
        return "tensor descriptors take no empty operands"
    a = as_rows(input)
    if (reason := without_descriptors(a, weight)) is not None:
        return reason
    for name, x in (("input", a), ("weight", weight)):
        described = operand(x)
        if isinstance(described, str):
            return f"argument `{name}`: {described}"
        if not described.along_k:
            return f"argument `{name}` must be dense along its last dimension: float8 tensor cores read along it"
    return None
