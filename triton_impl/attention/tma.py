"""attention, rung 3 of 5: tma

Idea      The copy engine (TMA) fetches the tiles of Q, K and V by tensor descriptors. A descriptor fills what lies
          beyond its tensor with zeros, so that no load has a mask.
Predicts  The bytes and products of `flash`; the registers of its addresses go to the scores.
Limit now All warps wait together: softmax and tensor cores take turns.
Next      `warp_specialized`: a producer warp fetches, and softmax overlaps the products.

The loop over keys is that of `flash`, and so is the backward pass (`backward.py`). Shared openly with
`warp_specialized`: what may be described, and the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_ladder.semantics.strides import has_rows_at
from triton_impl import unsupported as unsupported_by_triton
from triton_impl.attention.call import Call, forward_by_launch
from triton_impl.attention.tiles import (
    LOG2_E,
    TileTable,
    apply_mask,
    configs_of_rows,
    key_range,
    needs_int64,
    online_softmax,
    program_tile,
    seqlen_class,
    store_tile,
)
from triton_impl.common.dot import dot
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.descriptor_launch import DescriptorLaunch, without_descriptors

IEEE = tl.constexpr("ieee")

TILES: TileTable = {
    64: ((128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 4, 3)),
    128: ((128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2), (64, 128, 4, 2)),
    256: ((128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2)),
}


@triton.jit
def _attend(
    acc, row_sum, row_max, q, k_desc, v_desc, b, h_kv, start_m, start, end, scale_log2, first, last, seqlen_q, seqlen_k,
    MASKED: tl.constexpr, BAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Add keys ``start … end`` to the online softmax state (acc, row_sum, row_max) of BLOCK_M queries."""
    for start_n in range(start, end, BLOCK_N):
        k = k_desc.load([b, h_kv, start_n, 0]).reshape(BLOCK_N, BLOCK_D)
        scores = dot(q, tl.trans(k), None, IEEE)
        if MASKED:
            rows = start_m + tl.arange(0, BLOCK_M)[:, None]
            cols = start_n + tl.arange(0, BLOCK_N)[None, :]
            scores = apply_mask(scores, scale_log2, None, rows, cols, seqlen_q, seqlen_k, first, last, BAND, 0)
        weights, acc, row_sum, row_max = online_softmax(scores, scale_log2, acc, row_sum, row_max)
        v = v_desc.load([b, h_kv, start_n, 0]).reshape(BLOCK_N, BLOCK_DV)
        acc = dot(weights.to(v.dtype), v, acc, IEEE)
    return acc, row_sum, row_max


@triton.jit(do_not_specialize=["first", "last", "section"])
def _tma_kernel(
    out_ptr, lse_ptr, q_desc, k_desc, v_desc, scale_log2, o_b, o_h, o_s,
    num_heads, heads, group, seqlen_q, seqlen_k, head_dim_v, first, last, section,
    BAND: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, INT64_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``out = softmax(scale · Q Kᵀ) V`` and the log-sum-exp of every row.

    Grid: (⌈S_q / BLOCK_M⌉ · B · H,), see :func:`program_tile`. Layout: Q, K and V (B, H, S, D) by descriptors, `out` by
    its strides with dense rows, `lse` (B, H, S) contiguous.
    """
    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, head = program_tile(num_tiles, num_heads, section)
    if BAND == 1:
        tile = num_tiles - 1 - tile  # the last queries see most keys: the longest tiles first
    b, h = head // heads, head % heads
    h_kv = h // group
    start_m = tile * BLOCK_M

    q = q_desc.load([b, h, start_m, 0]).reshape(BLOCK_M, BLOCK_D)
    acc = tl.full([BLOCK_M, BLOCK_DV], 0.0, dtype=tl.float32)
    row_sum = tl.full([BLOCK_M], 0.0, dtype=tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    begin, whole, end = key_range(start_m, seqlen_k, first, last, BAND, BLOCK_M, BLOCK_N)
    if BAND != 2:
        acc, row_sum, row_max = _attend(
            acc, row_sum, row_max, q, k_desc, v_desc, b, h_kv, start_m, 0, whole, scale_log2, first, last,
            seqlen_q, seqlen_k, False, BAND, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        begin = whole
    acc, row_sum, row_max = _attend(
        acc, row_sum, row_max, q, k_desc, v_desc, b, h_kv, start_m, begin, end, scale_log2, first, last,
        seqlen_q, seqlen_k, True, BAND, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip

    rows = start_m + tl.arange(0, BLOCK_M)
    tl.store(lse_ptr + head.to(tl.int64) * seqlen_q + rows, row_max + tl.log2(row_sum), mask=rows < seqlen_q)
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]  # zeros for a row that sees nothing
    out = out_ptr + b.to(tl.int64) * o_b + h.to(tl.int64) * o_h
    store_tile(out, start_m, o_s, 1, seqlen_q, head_dim_v, acc, BLOCK_M, BLOCK_DV, INT64_OFFSETS)


def unsupported(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    **options: object,
) -> str | None:
    """Why operands cannot be fetched by descriptors, or None."""
    if (reason := unsupported_by_triton(query)) is not None:
        return reason
    if query.dtype not in (torch.float16, torch.bfloat16):
        return "tensor descriptors feed the 16-bit tensor cores alone here; float32 is for `flash`"
    if attn_mask is not None:
        return "takes causal masks and windows, but no mask in memory"
    if (reason := without_descriptors(query, key, value)) is not None:
        return reason
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            return f"takes 4 dimensions (B, H, S, D), got {x.dim()} of `{name}`"
        if not has_rows_at(x, 8):
            return f"a tensor descriptor needs dense rows, at multiples of 8, got strides {x.stride()} of `{name}`"
    return None


def tiles_of(x: torch.Tensor, rows: int, columns: int) -> tuple[list[int], list[int], list[int]]:
    """Shape, strides and tile by which a descriptor fetches (B, H, S, D), one head at a time."""
    dense = 8 * triton.cdiv(x.shape[3], 8)  # a dimension of size 1 may have any stride that the copy engine takes
    strides = [dense if size == 1 else step for size, step in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return list(x.shape), [*strides, 1], [1, 1, rows, columns]


def _described(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, *tiles_of(x, rows, columns))


# ---- host, shared with warp_specialized.py --------------------------------------------------------------------------


def descriptors(call: Call, describe: Callable[..., Any], queries: int, keys: int) -> tuple[Any, ...]:
    """None for output and log-sum-exp, and the operands' descriptors, with tiles of so many queries and keys."""
    d, d_v = call.constants["BLOCK_D"], call.constants["BLOCK_DV"]
    return None, None, describe(call.q, queries, d), describe(call.k, keys, d), describe(call.v, keys, d_v)


def arguments(call: Call, output: torch.Tensor) -> tuple[Any, ...]:
    """A kernel's arguments after its tensors, before those of its schedule."""
    batch, heads, seqlen_q, _ = call.q.shape
    _, heads_kv, seqlen_k, head_dim_v = call.v.shape
    return (
        call.scale * LOG2_E, *output.stride()[:3], batch * heads, heads, heads // heads_kv,
        seqlen_q, seqlen_k, head_dim_v, *call.limits, call.heads_per_section,
    )  # fmt: skip


def tuning_key(call: Call) -> tuple[Any, ...]:
    """Equal for calls that share a tuned configuration."""
    constants = call.constants
    return str(call.q.dtype), constants["BLOCK_D"], constants["BLOCK_DV"], call.kind, seqlen_class(call.q.shape[2])


_autotuner = Autotuner(_tma_kernel)


def _first(call: Call, output: torch.Tensor, lse: torch.Tensor) -> DescriptorLaunch:
    """Choose a configuration and run it; the returned launch repeats it."""
    batch, heads, seqlen_q, _ = call.q.shape
    block_d, block_dv = call.constants["BLOCK_D"], call.constants["BLOCK_DV"]

    def launch(config: triton.Config) -> DescriptorLaunch:
        block_m, block_n = config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"]
        describe = descriptors(call, _described, block_m, block_n)
        constants = (call.kind, block_d, block_dv, needs_int64(output.stride()), block_m, block_n)
        programs = triton.cdiv(seqlen_q, block_m) * batch * heads
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        return DescriptorLaunch(_tma_kernel, programs, describe, (*arguments(call, output), *constants), options)

    candidates = configs_of_rows(TILES[max(64, block_d, block_dv)])
    return _autotuner.launch(tuning_key(call), candidates, launch, output, lse, call.q, call.k, call.v)


attention = forward_by_launch(_first)
