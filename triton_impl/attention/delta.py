"""delta = Σ_d dO · O of each row, which every backward pass of attention needs (Dao, arXiv:2307.08691, algorithm 2)."""

from __future__ import annotations

import triton
import triton.language as tl

from triton_impl.attention.call import Call
from triton_impl.attention.tiles import block, load_tile, needs_int64
from triton_impl.runtime.launch_cache import Launch


@triton.jit
def _delta_kernel(
    delta_ptr, out_ptr, grad_ptr, grad_lse_ptr, o_b, o_h, o_s, o_d, g_b, g_h, g_s, g_d, heads, seqlen_q, head_dim_v,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, INT64_OFFSETS: tl.constexpr, LSE_GRAD: tl.constexpr,
):  # fmt: skip
    """``delta = Σ_d dO · O`` per row, minus the gradient of the log-sum-exp.

    Grid: (⌈S_q / BLOCK_M⌉ · B · H,). Layout: O and dO (B, H, S, D) by strides, delta (B, H, S) contiguous.
    """
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    head = tl.program_id(0) // tiles
    start_m = tl.program_id(0) % tiles * BLOCK_M
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    o = load_tile(
        out_ptr + b * o_b + h * o_h, start_m, o_s, o_d, seqlen_q, head_dim_v, BLOCK_M, BLOCK_DV, False, False,
        INT64_OFFSETS,
    )  # fmt: skip
    g = load_tile(
        grad_ptr + b * g_b + h * g_h, start_m, g_s, g_d, seqlen_q, head_dim_v, BLOCK_M, BLOCK_DV, False, False,
        INT64_OFFSETS,
    )  # fmt: skip
    rows = start_m + tl.arange(0, BLOCK_M)
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    row_offset = head.to(tl.int64) * seqlen_q
    if LSE_GRAD:
        delta -= tl.load(grad_lse_ptr + row_offset + rows, mask=rows < seqlen_q, other=0.0)
    tl.store(delta_ptr + row_offset + rows, delta, mask=rows < seqlen_q)


def launch_delta(call: Call, of_delta: tuple) -> Launch:
    """Run the kernel of delta on its tensors. Returns the launch that repeats it."""
    delta, output, grad, grad_lse = of_delta
    batch, heads, total_q, _ = call.q.shape
    head_dim_v = call.v.shape[3]
    # delta is per row: packed sequences are one long sequence to it.
    rows = 32
    grid = (triton.cdiv(total_q, rows) * (heads if call.packed else batch * heads),)
    arguments = (*output.stride(), *grad.stride(), heads, total_q, head_dim_v)
    arguments += (rows, block(head_dim_v), needs_int64(output.stride(), grad.stride()), grad_lse is not delta)
    for_delta = Launch(_delta_kernel, grid, arguments, {})
    for_delta(*of_delta)
    return for_delta
