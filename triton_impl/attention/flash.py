"""attention, rung 2 of 5: flash

Idea      FlashAttention-2 (Dao, arXiv:2307.08691). The loop over keys has two parts. Tiles that every row sees whole
          need no mask; tiles on the diagonal and at the end of the keys follow. Tiles are tuned by head dimension;
          causal programs start with the longest tiles.
Predicts  Masks cost arithmetic in ⌈BLOCK_M / BLOCK_N⌉ + 1 tiles per program instead of all.
Limit now Every thread computes the addresses of its loads, in registers that the scores could have.
Next      `tma`: the copy engine fetches the tiles.

With a mask in memory or a sliding window the loop has one part, which tests every score; tiles outside the window are
skipped. Takes any strides, head dimensions, masks, grouped heads and packed sequences (`attention_varlen`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import triton_impl
from kernel_ladder.tracing import shapes_only
from triton_impl.attention.call import Call, fill_without_keys, forward_by
from triton_impl.attention.tiles import (
    TUNING_KEY,
    UNSPECIALIZED,
    TileTable,
    apply_mask,
    choose,
    configs,
    drop_factors,
    key_range,
    load_tile,
    mask_pointers,
    needs_int64,
    online_softmax,
    program_tile,
    seqlen_class,
    sequence,
    store_lse,
    store_tile,
)
from triton_impl.common.dot import dot
from triton_impl.runtime.autotuned_kernel import AutotunedKernel
from triton_impl.runtime.launch_cache import Launch, LaunchCache

TILES: TileTable = {
    -64: ((64, 64, 8, 1), (64, 32, 4, 2), (32, 32, 4, 1)),
    -128: ((32, 32, 8, 1), (32, 32, 4, 1)),
    -256: ((16, 32, 8, 1), (32, 16, 8, 1)),
    64: ((128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3)),
    128: ((128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 3), (64, 32, 4, 2)),
    256: ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2)),
}


@triton.jit
def _attend(
    acc, row_sum, row_max, q, k_base, v_base, mask_base, start_m, start, end, scale_log2, first, last,
    k_s, k_d, v_s, v_d, m_q, m_k, seqlen_q, seqlen_k, head_dim, head_dim_v,
    head, key_low, key_high, threshold, drop_scale,
    DROPOUT: tl.constexpr, MASKED: tl.constexpr, BAND: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, INT64_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Add keys ``start … end`` to the online softmax state (acc, row_sum, row_max) of BLOCK_M queries."""
    for start_n in range(start, end, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        k = load_tile(
            k_base, start_n, k_s, k_d, seqlen_k, head_dim, BLOCK_N, BLOCK_D, not MASKED, EVEN_D, INT64_OFFSETS
        )
        scores = dot(q, tl.trans(k), None, PRECISION)
        if MASKED:
            rows = tl.arange(0, BLOCK_M)[:, None]
            cols = tl.arange(0, BLOCK_N)[None, :]
            mask = mask_pointers(mask_base, start_m, start_n, rows, cols, m_q, m_k, INT64_OFFSETS)
            scores = apply_mask(
                scores, scale_log2, mask, start_m + rows, start_n + cols, seqlen_q, seqlen_k, first, last, BAND, MASK
            )
        weights, acc, row_sum, row_max = online_softmax(scores, scale_log2, acc, row_sum, row_max, MASK)
        if DROPOUT != 0:  # after they were summed
            weights *= drop_factors(
                head, start_m, start_n, seqlen_q, seqlen_k, key_low, key_high, threshold, drop_scale,
                DROPOUT, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        v = load_tile(
            v_base, start_n, v_s, v_d, seqlen_k, head_dim_v, BLOCK_N, BLOCK_DV, not MASKED, EVEN_DV, INT64_OFFSETS
        )
        acc = dot(weights.to(v.dtype), v, acc, PRECISION)
    return acc, row_sum, row_max


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _forward_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, cu_q_ptr, cu_k_ptr,
    key_low, key_high, threshold, drop_scale, scale_log2,
    o_b, o_h, o_s, q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, m_b, m_h, m_q, m_k, lse_b, lse_h,
    num_heads, heads, group, seqlen_q, seqlen_k, head_dim, head_dim_v, first, last, section, seqlen_class,
    total_q, total_k,
    BAND: tl.constexpr, MASK: tl.constexpr, VARLEN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``out = softmax(scale · Q Kᵀ + mask) V`` and the log-sum-exp of every row.

    Grid: (⌈S_q / BLOCK_M⌉ · B · H,), see :func:`program_tile`. Layout: every operand (B, H, S, D) by its strides, or
    packed (VARLEN); `lse` (B, H, S) contiguous, or packed (H, S).
    """
    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, head = program_tile(num_tiles, num_heads, section)
    if BAND == 1:
        tile = num_tiles - 1 - tile  # the last queries see most keys: the longest tiles first
    b, h = (head // heads).to(tl.int64), head % heads
    h_kv = (h // group).to(tl.int64)
    h = h.to(tl.int64)
    start_m = tile * BLOCK_M
    lse_base = lse_ptr + b * lse_b + h * lse_h
    if VARLEN:
        q_start, seqlen_q = sequence(cu_q_ptr, b, total_q)
        k_start, seqlen_k = sequence(cu_k_ptr, b, total_k)
        first += seqlen_k - seqlen_q
        last += seqlen_k - seqlen_q
        seqlen_k = tl.where(start_m < seqlen_q, seqlen_k, 0)  # a program past the last query has no keys
        q_ptr += q_start * q_s
        out_ptr += q_start * o_s
        lse_base += q_start
        k_ptr += k_start * k_s
        v_ptr += k_start * v_s

    q = load_tile(
        q_ptr + b * q_b + h * q_h, start_m, q_s, q_d, seqlen_q, head_dim, BLOCK_M, BLOCK_D, False, EVEN_D, INT64_OFFSETS
    )
    k_base = k_ptr + b * k_b + h_kv * k_h
    v_base = v_ptr + b * v_b + h_kv * v_h
    mask_base = mask_ptr + b * m_b + h * m_h
    acc = tl.full([BLOCK_M, BLOCK_DV], 0.0, dtype=tl.float32)
    row_sum = tl.full([BLOCK_M], 0.0, dtype=tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)

    begin, whole, end = key_range(start_m, seqlen_k, first, last, BAND, BLOCK_M, BLOCK_N)
    if BAND != 2 and MASK == 0:
        acc, row_sum, row_max = _attend(
            acc, row_sum, row_max, q, k_base, v_base, mask_base, start_m, 0, whole, scale_log2, first, last,
            k_s, k_d, v_s, v_d, m_q, m_k, seqlen_q, seqlen_k, head_dim, head_dim_v,
            head, key_low, key_high, threshold, drop_scale, DROPOUT,
            False, BAND, MASK, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, INT64_OFFSETS,
        )  # fmt: skip
        begin = whole
    acc, row_sum, row_max = _attend(
        acc, row_sum, row_max, q, k_base, v_base, mask_base, start_m, begin, end, scale_log2, first, last,
        k_s, k_d, v_s, v_d, m_q, m_k, seqlen_q, seqlen_k, head_dim, head_dim_v,
        head, key_low, key_high, threshold, drop_scale, DROPOUT,
        True, BAND, MASK, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, INT64_OFFSETS,
    )  # fmt: skip

    rows = start_m + tl.arange(0, BLOCK_M)
    store_lse(lse_base + rows, tl.cast(num_heads, tl.int64) * lse_h, row_max, row_sum, rows < seqlen_q, MASK)
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]  # zeros for a row that sees nothing
    store_tile(
        out_ptr + b * o_b + h * o_h, start_m, o_s, 1, seqlen_q, head_dim_v, acc, BLOCK_M, BLOCK_DV, INT64_OFFSETS
    )


def _suitable(configs: list[triton.Config], named_args: dict, **kwargs) -> list[triton.Config]:
    return choose(TILES, configs, kwargs)


_forward = AutotunedKernel(_forward_kernel, configs(TILES), TUNING_KEY, _suitable)

#: Launches by :attr:`Call.launch_key`.
_launches: LaunchCache = LaunchCache()


def forward(call: Call, results: tuple[torch.Tensor, torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and base-two log-sum-exp of every row of scores, written into `results` where given."""
    output, lse = call.empty_results() if results is None else results
    if shapes_only():
        return output, lse
    what = call.launch_key
    known = _launches.get(what)
    if known is not None:
        known(output, lse, call.q, call.k, call.v, *call.mask_and_offsets, values=call.of_mask)
    elif (launch := _first_forward(call, output, lse)) is not None:
        _launches.remember(what, launch)
    return output, lse


def _first_forward(call: Call, output: torch.Tensor, lse: torch.Tensor) -> Launch | None:
    q, k, v = call.q, call.k, call.v
    if k.shape[2] == 0 or output.numel() == 0:
        fill_without_keys(output, lse)
        return None
    batch, heads, _, head_dim = q.shape
    _, heads_kv, _, head_dim_v = v.shape
    seqlen_q, seqlen_k = call.lengths
    num_heads, group = batch * heads, heads // heads_kv
    constants = call.constants
    strides = call.strides(output), q.stride(), k.stride(), v.stride()
    arguments = (
        call.score_scale, *strides[0][:3], *strides[1], *strides[2], *strides[3], *call.mask_strides,
        *call.lse_strides, num_heads, heads, group, seqlen_q, seqlen_k, head_dim, head_dim_v, *call.limits,
        call.heads_per_section, seqlen_class(seqlen_q), *call.totals,
    )  # fmt: skip

    def grid(meta):
        return (triton.cdiv(seqlen_q, meta["BLOCK_M"]) * num_heads,)

    tensors = (output, lse, q, k, v, *call.mask_and_offsets)
    constants["INT64_OFFSETS"] = needs_int64(*strides, call.mask_strides)
    return _forward(grid, tensors, arguments, constants, values=call.of_mask)


def unsupported(*inputs: torch.Tensor | None, **options: object) -> str | None:
    """Why this rung does not take a call, or None."""
    mask = inputs[3] if len(inputs) > 3 else None
    if "dropout_p" in options and mask is not None and mask.requires_grad and torch.is_grad_enabled():
        return "the gradient of an additive mask beside dropped weights is given at the torch and compile levels only"
    return triton_impl.unsupported(*inputs)


attention = forward_by(forward)
