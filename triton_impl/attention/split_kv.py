"""attention, rung 5 of 5: split_kv

Idea      Few queries over long keys, as in decoding: the keys are split over programs. One program holds all queries
          that share a head of keys, packed as the rows of one tile: grouped heads read their keys once. A second
          kernel weighs the splits by their log-sum-exps. Flash-Decoding (Dao et al.,
          https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
Predicts  B · H_kv · splits programs instead of B · H_kv: keys and values are read at the rate of memory.
Limit now A second launch, and float32 partial outputs through memory.
Next      cuda `split_kv`, whose clusters combine the splits in shared memory.

The splits are added in order, so that results repeat. Their number, and so the last bits, depends on the number of
multiprocessors of the GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_ladder.tracing import shapes_only
from triton_impl import interpreted, multiprocessors
from triton_impl import unsupported as unsupported_by_triton
from triton_impl.attention.call import Call, fill_without_keys, forward_by
from triton_impl.attention.tiles import apply_mask, load_tile, needs_int64, online_softmax, store_lse
from triton_impl.common.dot import dot
from triton_impl.common.fast_math import LOG2E, exp2
from triton_impl.runtime.autotuned_kernel import AutotunedKernel
from triton_impl.runtime.launch_cache import Launch, LaunchCache

#: Rows of a tile: queries of all heads that share keys.
MAX_ROWS = 32
#: The least number of keys of a split.
MIN_SPLIT_KEYS = 256
#: Programs that an SM splits at a time, about.
PROGRAMS_PER_SM = 4
#: A program adds up the keys of its split one after another, and a float32 sum loses bits with their number. There a
#: split has so many keys at most, as long as there are no more splits than this.
FLOAT32_KEYS, FLOAT32_SPLITS = 512, 64

CONFIGS = [
    triton.Config({"BLOCK_N": 64}, num_warps=4, num_stages=3),
    triton.Config({"BLOCK_N": 64}, num_warps=4, num_stages=4),
    triton.Config({"BLOCK_N": 128}, num_warps=4, num_stages=2),
    triton.Config({"BLOCK_N": 32}, num_warps=4, num_stages=2),
]


@triton.jit(do_not_specialize=["first", "last", "key_begin", "key_end", "keys_per_split"])
def _split_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, scale_log2,
    o_split, o_b, o_h, o_s, lse_split, q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, m_b, m_h, m_q, m_k,
    heads_kv, group, seqlen_q, seqlen_k, head_dim, head_dim_v, first, last, key_begin, key_end, keys_per_split,
    BAND: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, INT64_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of all queries that share a head of keys to one split of these keys.

    Grid: (B · H_kv, splits). Layout: operands (B, H, S, D) by strides; partial outputs (splits, B, H, S, D) contiguous
    in float32, or the output itself where there is one split; `lse` (splits, B · H · S).
    """
    # Heads are on the first axis: there may be more than the second axis holds, 65,535.
    head, index = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h_kv = (head // heads_kv).to(tl.int64), (head % heads_kv).to(tl.int64)
    rows = tl.arange(0, BLOCK_M)
    inside = rows < group * seqlen_q
    h = h_kv * group + rows // seqlen_q
    query = rows % seqlen_q
    query_offset = query.to(tl.int64)
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    q_rows = q_ptr + b * q_b + (h * q_h + query_offset * q_s)
    q = tl.load(q_rows[:, None] + dims[None, :] * q_d, mask=inside[:, None] & (dims[None, :] < head_dim), other=0.0)
    k_base = k_ptr + b * k_b + h_kv * k_h
    v_base = v_ptr + b * v_b + h_kv * v_h
    mask_rows = mask_ptr + b * m_b + (h * m_h + query_offset * m_q)
    # Rows past the last query see nothing.
    query = tl.where(inside, query, seqlen_q)

    acc = tl.full([BLOCK_M, BLOCK_DV], 0.0, dtype=tl.float32)
    row_sum = tl.full([BLOCK_M], 0.0, dtype=tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    start = key_begin + tl.program_id(1) * keys_per_split
    for start_n in range(start, tl.minimum(start + keys_per_split, key_end), BLOCK_N):
        k = load_tile(k_base, start_n, k_s, k_d, seqlen_k, head_dim, BLOCK_N, BLOCK_D, False, EVEN_D, INT64_OFFSETS)
        scores = dot(q, tl.trans(k), None, PRECISION)
        cols = start_n + tl.arange(0, BLOCK_N)
        mask = mask_rows[:, None] + cols[None, :].to(tl.int64) * m_k
        scores = apply_mask(
            scores, scale_log2, mask, query[:, None], cols[None, :], seqlen_q,
            tl.minimum(start + keys_per_split, key_end), first, last, BAND, MASK,
        )  # fmt: skip
        weights, acc, row_sum, row_max = online_softmax(scores, scale_log2, acc, row_sum, row_max, MASK)
        v = load_tile(v_base, start_n, v_s, v_d, seqlen_k, head_dim_v, BLOCK_N, BLOCK_DV, False, EVEN_DV, INT64_OFFSETS)
        acc = dot(weights.to(v.dtype), v, acc, PRECISION)

    lse_rows = (b * heads_kv * group + h) * seqlen_q + query_offset
    num_rows = tl.num_programs(1) * tl.cast(lse_split, tl.int64)
    store_lse(lse_ptr + index * lse_split + lse_rows, num_rows, row_max, row_sum, inside, MASK)
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    dims_v = tl.arange(0, BLOCK_DV)
    out_rows = out_ptr + index * o_split + b * o_b + (h * o_h + query_offset * o_s)
    tl.store(
        out_rows[:, None] + dims_v[None, :], acc.to(out_ptr.dtype.element_ty),
        mask=inside[:, None] & (dims_v[None, :] < head_dim_v),
    )  # fmt: skip


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    partial_ptr, partial_lse_ptr, out_ptr, lse_ptr, o_b, o_h, o_s, heads, seqlen_q, head_dim_v, num_rows, splits,
    BLOCK_SPLITS: tl.constexpr, BLOCK_DV: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """``out = Σ_s w_s · partial_s / Σ_s w_s`` with ``w_s = exp(lse_s − max lse)``, for one query.

    Grid: (B · H · S,). Layout: partials (splits, B · H · S, D) contiguous, `out` by its strides.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_SPLITS)
    dims = tl.arange(0, BLOCK_DV)
    lse_ptrs = partial_lse_ptr + row + i.to(tl.int64) * num_rows
    lse = tl.load(lse_ptrs, mask=i < splits, other=-float("inf"))
    row_max = tl.max(lse, 0)
    shift = tl.where(row_max == -float("inf"), 0.0, row_max)
    if MASK == 2:  # see store_lse
        lse_ptrs += splits * tl.cast(num_rows, tl.int64)
        log_sum = tl.load(lse_ptrs, mask=i < splits, other=-float("inf"))
        weights = exp2((lse - shift) * LOG2E + log_sum)
    else:
        weights = exp2(lse - shift)
    row_sum = tl.sum(weights, 0)
    store_lse(lse_ptr + row, num_rows, row_max, row_sum, None, MASK)
    total = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = tl.full([BLOCK_DV], 0.0, dtype=tl.float32)
    for index in range(0, splits):
        weight = tl.sum(tl.where(i == index, weights, 0.0), 0)
        split_offset = (row + tl.cast(index, tl.int64) * num_rows) * head_dim_v
        acc += weight * tl.load(partial_ptr + split_offset + dims, mask=dims < head_dim_v, other=0.0)
    b, h, query = row // (heads * seqlen_q), row // seqlen_q % heads, row % seqlen_q
    tl.store(out_ptr + b * o_b + h * o_h + query * o_s + dims, (acc / total).to(out_ptr.dtype.element_ty),
             mask=dims < head_dim_v)  # fmt: skip


_split = AutotunedKernel(
    _split_kernel,
    CONFIGS[-1:] if interpreted() else CONFIGS,
    ("BLOCK_D", "BLOCK_DV", "BAND", "MASK", "BLOCK_M"),
)

#: Launches by :attr:`Call.launch_key` and number of splits.
_launches: LaunchCache = LaunchCache()


def least_splits(keys: int, dtype: torch.dtype) -> int:
    """How many splits of so many keys a sum in this dtype needs, however many programs there are."""
    return max(1, min(triton.cdiv(keys, FLOAT32_KEYS), FLOAT32_SPLITS)) if dtype == torch.float32 else 1


def split_keys(programs: int, keys: int, num_sms: int, dtype: torch.dtype) -> tuple[int, int]:
    """(splits, keys of each), where one split has so many programs: enough to fill the GPU, none of too few keys."""
    filling = min(PROGRAMS_PER_SM * num_sms // max(programs, 1), keys // MIN_SPLIT_KEYS)
    splits = max(least_splits(keys, dtype), filling)
    keys_per_split = max(1, triton.cdiv(triton.cdiv(keys, splits), 128)) * 128
    return max(1, triton.cdiv(keys, keys_per_split)), keys_per_split


def _forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = call.empty_results()
    q, k, v = call.q, call.k, call.v
    batch, heads, seqlen_q, _ = q.shape
    heads_kv, seqlen_k = k.shape[1:3]
    if shapes_only():
        return output, lse
    if seqlen_k == 0 or output.numel() == 0:
        fill_without_keys(output, lse)
        return output, lse
    first, last = call.limits
    begin, end = max(0, first), max(0, min(seqlen_k, seqlen_q + last))
    # The band may hold no key at all.
    splits, keys_per_split = split_keys(batch * heads_kv, max(0, end - begin), multiprocessors(q.device, 16), q.dtype)
    partial_out, partial_lse = output, lse
    if splits > 1:
        partial_out = q.new_empty((splits, batch, heads, seqlen_q, v.shape[3]), dtype=torch.float32)
        rows = (splits, batch * heads * seqlen_q)
        partial_lse = call.empty_lse((2, *rows) if call.additive else rows)
    tensors = (partial_out, partial_lse, q, k, v, call.mask_and_offsets[0])
    combine_tensors = (partial_out, partial_lse, output, lse)
    what = (call.launch_key, splits)
    known = _launches.get(what)
    if known is None:
        _launches.remember(what, _first_launches(call, tensors, combine_tensors, (begin, end, keys_per_split)))
    else:
        split, combine = known
        split(*tensors)
        if combine is not None:
            combine(*combine_tensors)
    return output, lse


def _first_launches(
    call: Call, tensors: tuple, combine_tensors: tuple, keys: tuple[int, int, int]
) -> tuple[Launch, Launch | None]:
    partial_out, _, output, _ = combine_tensors
    q, k, v = call.q, call.k, call.v
    batch, heads, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, head_dim_v = v.shape
    group = heads // heads_kv
    constants = call.constants
    del constants["VARLEN"], constants["DROPOUT"]
    constants["BLOCK_M"] = max(16, triton.next_power_of_2(group * seqlen_q))
    constants["INT64_OFFSETS"] = needs_int64(k.stride(), v.stride())
    splits = partial_out.shape[0] if partial_out is not output else 1
    split_stride, strides = (0, output.stride()) if splits == 1 else (partial_out.stride(0), partial_out.stride()[1:])
    arguments = (
        call.score_scale, split_stride, *strides[:3], batch * heads * seqlen_q,
        *q.stride(), *k.stride(), *v.stride(), *call.mask_strides,
        heads_kv, group, seqlen_q, seqlen_k, head_dim, head_dim_v, *call.limits, *keys,
    )  # fmt: skip
    split = _split(lambda meta: (batch * heads_kv, splits), tensors, arguments, constants)
    if splits == 1:
        return split, None
    rows = batch * heads * seqlen_q
    arguments = (*output.stride()[:3], heads, seqlen_q, head_dim_v, rows, splits)
    arguments += (triton.next_power_of_2(splits), constants["BLOCK_DV"], constants["MASK"])
    combine = Launch(_combine_kernel, (rows,), arguments, {})
    combine(*combine_tensors)
    return split, combine


attention = forward_by(_forward)


def unsupported(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    **options: object,
) -> str | None:
    rows = query.shape[-2] * (query.shape[-3] // max(key.shape[-3], 1))
    if rows > MAX_ROWS:
        return f"split_kv is for few queries: at most {MAX_ROWS} share a head of keys, got {rows}"
    return unsupported_by_triton(query)
