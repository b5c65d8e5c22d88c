"""attention_paged, rung 1 of 1: split_kv

Idea      Attention's `split_kv` on keys that lie in pages: one program has all query heads that share a head of keys,
          so each page is read once, and it looks the pages of a tile's keys up in the block table. A sequence's keys
          are split by its own length, which only the GPU knows (Flash-Decoding, Dao et al.,
          https://crfm.stanford.edu/2023/10/12/flashdecoding.html; PagedAttention, Kwon et al., arXiv:2309.06180).
Predicts  The time of `split_kv` on dense keys, plus four bytes of the block table a page.
Limit now A second launch, and float32 partial outputs through memory.
Next      cuda `split_kv`, whose copies of keys overlap with the look-up of the next pages.

Splits are added in order, so that results repeat. Their number depends on the batch and on the number of
multiprocessors; with `batch_invariant` it depends on the sequence's length alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.masks import NO_WINDOW
from kernel_ladder.semantics.no_gradient import refuse, wanted
from kernel_ladder.semantics.scale import scale_of
from kernel_ladder.spec import Output
from kernel_ladder.tracing import shapes_only
from triton_impl import interpreted, multiprocessors, register
from triton_impl import unsupported as unsupported_by_triton
from triton_impl.attention.call import UNLIMITED, fill_without_keys
from triton_impl.attention.split_kv import CONFIGS, MIN_SPLIT_KEYS, PROGRAMS_PER_SM, least_splits
from triton_impl.attention.tiles import (
    BELOW_DIAGONAL,
    BETWEEN_DIAGONALS,
    EVERYTHING,
    LN_2,
    LOG2_E,
    apply_mask,
    blocks,
    online_softmax,
    store_lse,
)
from triton_impl.common.dot import dot
from triton_impl.common.fast_math import exp2
from triton_impl.runtime.autotuned_kernel import AutotunedKernel
from triton_impl.runtime.launch_cache import Launch, LaunchCache

#: Rows of a tile, at most: new tokens of all heads that share keys. A call with more of them has several tiles.
MAX_BLOCK_M = 64
#: Splits of a sequence with `batch_invariant`, at most; shorter sequences have one for every MIN_SPLIT_KEYS keys.
INVARIANT_SPLITS = 32

_MIN_SPLIT_KEYS = tl.constexpr(MIN_SPLIT_KEYS)


@triton.jit
def _keys_of(lengths_ptr, b, n_b, seqlen_q, capacity, left, splits):
    """(length, first key that is seen, keys per split) of a sequence, inside the table whatever its length says."""
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + b * n_b), 0), capacity)
    begin = tl.minimum(tl.maximum(length - seqlen_q - left, 0), length)
    keys_per_split = tl.cdiv(tl.cdiv(length - begin, splits), _MIN_SPLIT_KEYS) * _MIN_SPLIT_KEYS
    return length, begin, tl.maximum(keys_per_split, _MIN_SPLIT_KEYS)


@triton.jit
def _load_rows(base, rows, inside, stride_d, head_dim, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr):
    """A tile of rows at the offsets `rows`, zeros outside."""
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    pointers = base + rows[:, None] + dims[None, :] * stride_d
    if EVEN_D:
        return tl.load(pointers, mask=inside[:, None], other=0.0)
    return tl.load(pointers, mask=inside[:, None] & (dims[None, :] < head_dim), other=0.0)


@triton.jit(do_not_specialize=["num_pages", "capacity", "left", "right"])
def _paged_split_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, scale_log2,
    o_split, o_b, o_h, o_s, lse_split, q_b, q_h, q_s, q_d, k_p, k_s, k_h, k_d, v_p, v_s, v_h, v_d, t_b, t_p, n_b,
    heads_kv, group, seqlen_q, head_dim, head_dim_v, row_blocks, num_pages, capacity, left, right,
    BAND: tl.constexpr, PRECISION: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of the rows that share a head of keys to one split of a sequence's keys.

    Grid: (B · H_kv · row_blocks, splits). Layout: query (B, H, L, D) and caches (pages, page_size, H_kv, D) by strides;
    partial outputs (splits, B, H, L, D) contiguous in float32, or the output itself where there is one split; `lse`
    (splits, B · H · L). A split past the end of the sequence writes nothing: the second kernel knows the length too.
    """
    head = tl.program_id(0) // row_blocks
    b, h_kv = (head // heads_kv).to(tl.int64), (head % heads_kv).to(tl.int64)
    index, splits = tl.program_id(1), tl.num_programs(1)
    length, begin, keys_per_split = _keys_of(lengths_ptr, b, n_b, seqlen_q, capacity, left, splits)
    start = begin + index * keys_per_split
    end = tl.minimum(start + keys_per_split, length)

    rows = tl.program_id(0) % row_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < group * seqlen_q
    h, query = h_kv * group + rows // seqlen_q, rows % seqlen_q
    query_offset = query.to(tl.int64)
    q = _load_rows(q_ptr + b * q_b, h * q_h + query_offset * q_s, inside, q_d, head_dim, BLOCK_D, EVEN_D)
    # Aligned to the lower right: the last new token is at the last key.
    query += length - seqlen_q

    acc = tl.full([BLOCK_M, BLOCK_DV], 0.0, dtype=tl.float32)
    row_sum = tl.full([BLOCK_M], 0.0, dtype=tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    for start_n in range(start, end, BLOCK_N):
        cols = start_n + tl.arange(0, BLOCK_N)
        seen = cols < end
        page = tl.load(table_ptr + b * t_b + (cols // PAGE_SIZE).to(tl.int64) * t_p, mask=seen, other=0)
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int64)
        row = (cols % PAGE_SIZE).to(tl.int64)
        k = _load_rows(k_ptr + h_kv * k_h, page * k_p + row * k_s, seen, k_d, head_dim, BLOCK_D, EVEN_D)
        scores = dot(q, tl.trans(k), None, PRECISION)
        scores = apply_mask(scores, scale_log2, q_ptr, query[:, None], cols[None, :], 0, end, -left, right, BAND, 0)
        weights, acc, row_sum, row_max = online_softmax(scores, scale_log2, acc, row_sum, row_max)
        v = _load_rows(v_ptr + h_kv * v_h, page * v_p + row * v_s, seen, v_d, head_dim_v, BLOCK_DV, EVEN_DV)
        acc = dot(weights.to(v.dtype), v, acc, PRECISION)

    if (start < end) | (splits == 1):
        split = index.to(tl.int64)
        lse_rows = (b * heads_kv * group + h) * seqlen_q + query_offset
        store_lse(lse_ptr + split * lse_split + lse_rows, 0, row_max, row_sum, inside, 0)
        acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        dims_v = tl.arange(0, BLOCK_DV)
        out_rows = out_ptr + split * o_split + b * o_b + (h * o_h + query_offset * o_s)
        tl.store(
            out_rows[:, None] + dims_v[None, :], acc.to(out_ptr.dtype.element_ty),
            mask=inside[:, None] & (dims_v[None, :] < head_dim_v),
        )  # fmt: skip


@triton.jit(do_not_specialize=["capacity", "left", "splits"])
def _paged_combine_kernel(
    partial_ptr, partial_lse_ptr, out_ptr, lse_ptr, lengths_ptr, o_b, o_h, o_s, n_b, heads, seqlen_q, head_dim_v,
    num_rows, capacity, left, splits, BLOCK_SPLITS: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """``out = Σ_s w_s · partial_s / Σ_s w_s`` with ``w_s = exp(lse_s − max lse)``, for one new token and head.

    Grid: (B · H · L,). Layout: partials (splits, B · H · L, D) contiguous, `out` by its strides. Both sums go over the
    splits that the sequence has, in order: how many there might be changes no bit.
    """
    row = tl.program_id(0).to(tl.int64)
    b, h, query = row // (heads * seqlen_q), row // seqlen_q % heads, row % seqlen_q
    length, begin, keys_per_split = _keys_of(lengths_ptr, b, n_b, seqlen_q, capacity, left, splits)
    count = tl.cdiv(length - begin, keys_per_split)
    i = tl.arange(0, BLOCK_SPLITS)
    dims = tl.arange(0, BLOCK_DV)
    lse_ptrs = partial_lse_ptr + row
    row_max = tl.max(tl.load(lse_ptrs + i.to(tl.int64) * num_rows, mask=i < count, other=-float("inf")), 0)
    shift = tl.where(row_max == -float("inf"), 0.0, row_max)
    row_sum = tl.sum(tl.full([1], 0.0, dtype=tl.float32), 0)
    acc = tl.full([BLOCK_DV], 0.0, dtype=tl.float32)
    for index in range(0, count):
        place = row + tl.cast(index, tl.int64) * num_rows
        weight = exp2(tl.load(partial_lse_ptr + place) - shift)
        row_sum += weight
        acc += weight * tl.load(partial_ptr + place * head_dim_v + dims, mask=dims < head_dim_v, other=0.0)
    store_lse(lse_ptr + row, 0, row_max, row_sum, None, 0)
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)
    tl.store(out_ptr + b * o_b + h * o_h + query * o_s + dims, acc.to(out_ptr.dtype.element_ty),
             mask=dims < head_dim_v)  # fmt: skip


_KEY = ("BLOCK_D", "BLOCK_DV", "BAND", "BLOCK_M", "PAGE_SIZE")
#: By whether calls are batch-invariant: a choice that is timed on one batch would decide the bits of another.
_kernels = {
    invariant: AutotunedKernel(_paged_split_kernel, CONFIGS[-1:] if invariant or interpreted() else CONFIGS, _KEY)
    for invariant in (False, True)
}

#: Launches by all that decides them.
_launches: LaunchCache = LaunchCache()


def attention_paged(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    is_causal: bool | str,
    scale: float | None,
    enable_gqa: bool,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> tuple[Output, tuple]:
    batch, heads, rows, _ = query.shape
    output = query.new_empty((batch, heads, rows, value_cache.shape[3]))
    lse = query.new_empty((batch, heads, rows), dtype=torch.float32)
    capacity = block_table.shape[1] * key_cache.shape[1] if key_cache.shape[0] else 0
    if shapes_only() or capacity == 0 or output.numel() == 0:
        if not shapes_only():
            fill_without_keys(output, lse)
        return ((output, lse) if return_lse else output), ()
    programs = batch * key_cache.shape[2]
    most = INVARIANT_SPLITS if batch_invariant else PROGRAMS_PER_SM * multiprocessors(query.device, 16) // programs
    least = 1 if batch_invariant else least_splits(capacity, query.dtype)  # a sequence's length alone decides its bits
    splits = max(least, min(most, triton.cdiv(capacity, MIN_SPLIT_KEYS)))
    partial_out, partial_lse = output, lse
    if splits > 1:
        partial_out = query.new_empty((splits, *output.shape), dtype=torch.float32)
        partial_lse = query.new_empty((splits, *lse.shape), dtype=torch.float32)
    inputs = (query, key_cache, value_cache, block_table, cache_seqlens)
    tensors = (partial_out, partial_lse, *inputs)
    combine_tensors = (partial_out, partial_lse, output, lse, cache_seqlens)
    band = is_causal, window_size, scale, batch_invariant
    what = (*((x.shape, x.stride()) for x in inputs), query.dtype, query.device, splits, *band)
    known = _launches.get(what)
    if known is None:
        _launches.remember(what, _first_launches(tensors, combine_tensors, capacity, *band))
    else:
        split, combine = known
        split(*tensors)
        if combine is not None:
            combine(*combine_tensors)
    return ((output, lse * LN_2) if return_lse else output), ()


def _first_launches(
    tensors: tuple[torch.Tensor, ...],
    combine_tensors: tuple[torch.Tensor, ...],
    capacity: int,
    is_causal: bool | str,
    window_size: tuple[int, int],
    scale: float | None,
    batch_invariant: bool,
) -> tuple[Launch, Launch | None]:
    partial_out, _, query, key_cache, value_cache, block_table, cache_seqlens = tensors
    _, _, output, lse, _ = combine_tensors
    (batch, heads, rows, head_dim), (pages, page_size, heads_kv, head_dim_v) = query.shape, value_cache.shape
    group = heads // heads_kv
    left, right = (side if 0 <= side < UNLIMITED else UNLIMITED for side in window_size)
    right = 0 if is_causal else right
    block_m = min(MAX_BLOCK_M, max(16, triton.next_power_of_2(group * rows)))
    row_blocks = triton.cdiv(group * rows, block_m)
    block_d, block_dv = blocks(head_dim, head_dim_v)
    constants = {
        # Of one new token the right side hides nothing.
        "BAND": BETWEEN_DIAGONALS if left < UNLIMITED else BELOW_DIAGONAL if right < rows - 1 else EVERYTHING,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "PAGE_SIZE": page_size,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "EVEN_D": head_dim == block_d,
        "EVEN_DV": head_dim_v == block_dv,
        "BLOCK_M": block_m,
    }
    splits = partial_out.shape[0] if partial_out is not output else 1
    out_strides = (0, *output.stride()[:3]) if splits == 1 else partial_out.stride()[:4]
    arguments: tuple[Any, ...] = (
        scale_of(head_dim, scale) * LOG2_E, *out_strides, lse.numel(),
        *query.stride(), *key_cache.stride(), *value_cache.stride(), *block_table.stride(), *cache_seqlens.stride(),
        heads_kv, group, rows, head_dim, head_dim_v, row_blocks, pages, capacity, left, right,
    )  # fmt: skip
    kernel = _kernels[batch_invariant]
    split = kernel(lambda meta: (batch * heads_kv * row_blocks, splits), tensors, arguments, constants)
    if splits == 1:
        return split, None
    arguments = (*output.stride()[:3], *cache_seqlens.stride(), heads, rows, head_dim_v, lse.numel())
    arguments += (capacity, left, splits, triton.next_power_of_2(splits), block_dv)
    combine = Launch(_paged_combine_kernel, (lse.numel(),), arguments, {})
    combine(*combine_tensors)
    return split, combine


def unsupported(*inputs: torch.Tensor, **options: object) -> str | None:
    query, key_cache, _, block_table, _ = inputs
    if (keys := block_table.shape[1] * key_cache.shape[1]) > UNLIMITED:
        return f"it counts keys in 32 bits: {UNLIMITED} a row of `block_table` at most, got {keys}"
    return wanted(*inputs) or unsupported_by_triton(query)


register(
    "attention_paged",
    "triton.split_kv",
    forward=attention_paged,
    backward=refuse("attention_paged", "triton.split_kv"),
    unsupported=unsupported,
)
