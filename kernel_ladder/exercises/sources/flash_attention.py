"""Solution of the exercise `flash_attention`."""

import torch
import triton
import triton.language as tl

from kernel_ladder.exercises import not_plain
from kernel_ladder.table import register

EXERCISE = "flash_attention"
BLOCK_M = 32
BLOCK_N = 32
LOG2E = 1.4426950408889634
LARGEST_HEAD_DIM = 128


@triton.jit
def load_tile(ptr, rows, length, head_dim, BLOCK_D: tl.constexpr):
    """Given: rows of a (length, head_dim) matrix, zeros outside of it."""
    d = tl.arange(0, BLOCK_D)
    mask = (rows < length)[:, None] & (d < head_dim)[None, :]
    return tl.load(ptr + rows[:, None] * head_dim + d[None, :], mask=mask, other=0.0)


@triton.jit
def flash_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, scale, seqlen_q, seqlen_k, head_dim,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of BLOCK_M queries, batch · heads). Scores stay in registers; keys come BLOCK_N at a time.

    `scale` holds log2 e as well, because a GPU computes powers of two: exp(x) = 2^(x · log2 e).
    """
    head = tl.program_id(1).to(tl.int64)
    q_rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    q_ptr += head * seqlen_q * head_dim
    out_ptr += head * seqlen_q * head_dim
    k_ptr += head * seqlen_k * head_dim
    v_ptr += head * seqlen_k * head_dim
    q = load_tile(q_ptr, q_rows, seqlen_q, head_dim, BLOCK_D)
    # The online softmax's state, per query: maximum, sum, and the output before division.
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, seqlen_k, BLOCK_N):
        k_rows = start + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, k_rows, seqlen_k, head_dim, BLOCK_D)
        v = load_tile(v_ptr, k_rows, seqlen_k, head_dim, BLOCK_D)
        # TODO 1: `scores`, scale · q · kᵀ in float32: tl.dot with input_precision="ieee", tl.trans.
        # gap
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        # end
        # TODO 2: -inf for keys past the end; if CAUSAL, for every key j of query i with j > i too.
        # gap
        seen = (k_rows < seqlen_k)[None, :]
        if CAUSAL:
            seen = seen & (k_rows[None, :] <= q_rows[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        # end
        # TODO 3: `new_max` per query, `weights` = 2^(scores - new_max), and `rescale`, the factor that turns what was
        # summed with row_max into what new_max would have given.
        # gap
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        # end
        # TODO 4: bring `row_sum` and `acc` up to date. Round the weights to v's dtype for the product.
        # gap
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        # end
        row_max = new_max
    # TODO 5: divide `acc` by the sums.
    # gap
    acc = acc / row_sum[:, None]
    # end
    d = tl.arange(0, BLOCK_D)
    mask = (q_rows < seqlen_q)[:, None] & (d < head_dim)[None, :]
    tl.store(out_ptr + q_rows[:, None] * head_dim + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def attention(query, key, value, attn_mask=None, *, is_causal, scale, **others):
    batch, heads, seqlen_q, head_dim = query.shape
    seqlen_k = key.shape[2]
    output = torch.empty_like(query)
    scale = (head_dim**-0.5 if scale is None else float(scale)) * LOG2E
    grid = (triton.cdiv(seqlen_q, BLOCK_M), batch * heads)
    block_d = max(16, triton.next_power_of_2(head_dim))
    lengths = (seqlen_q, seqlen_k, head_dim)
    flash_kernel[grid](output, query, key, value, scale, *lengths, is_causal, BLOCK_M, BLOCK_N, block_d)
    return output, ()


def unsupported(query, key, value, attn_mask=None, *, is_causal, scale, **others):
    if attn_mask is not None or is_causal not in (False, True) or others.get("return_lse"):
        return "takes no mask in memory, is_causal False or True, and returns no log-sum-exp"
    if others.get("window_size", (-1, -1)) != (-1, -1):
        return "takes no sliding window"
    if query.dim() != 4 or query.shape[:2] != key.shape[:2] or value.shape != key.shape:
        return "takes (batch, heads, length, head_dim) with as many heads of keys and values as of queries"
    if query.shape[3] > LARGEST_HEAD_DIM:
        return f"takes head dimensions up to {LARGEST_HEAD_DIM}"
    return not_plain(query, key, value)


register("attention", "triton.my_flash_attention", forward=attention, unsupported=unsupported)
