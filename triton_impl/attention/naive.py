"""attention, rung 1 of 5: naive

Idea      One program per block of queries. It walks over the keys block by block and keeps the state of an online
          softmax per row: running maximum, running sum, weighted values (Milakov and Gimelshein, arXiv:1805.02867).
Predicts  The S_q × S_k scores never reach memory: (2 · S_q + 2 · S_k · ⌈S_q / BLOCK_M⌉) · D elements per head instead
          of S_q · S_k and more.
Limit now Every block of keys is masked, on the diagonal or not, and one tile size serves every head dimension.
Next      `flash`: unmasked tiles apart from masked ones, tuned tiles, masks, windows, grouped heads and any strides.

Takes the plain case: contiguous (B, H, S, D), one D that is a power of two, no mask but a causal one, no gradients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.masks import NO_WINDOW
from kernel_ladder.semantics.scale import scale_of
from kernel_ladder.spec import Output
from kernel_ladder.tracing import shapes_only, wants_gradient
from triton_impl import unsupported as unsupported_by_triton
from triton_impl.attention.tiles import LOG2_E
from triton_impl.common.dot import dot
from triton_impl.runtime.launch_cache import FUSED

HEAD_DIMS = (16, 32, 64, 128)
#: Programs that the second axis of a grid holds.
MAX_GRID_Y = 65535


@triton.jit
def _naive_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, scale_log2, seqlen_q, seqlen_k,
    IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``out = softmax(scale · Q Kᵀ) V``, with ``exp(x) = exp2(x · log2 e)``.

    Grid: (⌈S_q / BLOCK_M⌉, B · H). Layout: all four (B, H, S, D), contiguous.
    """
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    q_offsets = (head * seqlen_q + rows[:, None]) * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=rows[:, None] < seqlen_q, other=0.0)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)

    end = tl.minimum(seqlen_k, (tl.program_id(0) + 1) * BLOCK_M) if IS_CAUSAL else seqlen_k
    for start_n in range(0, end, BLOCK_N):
        cols = start_n + tl.arange(0, BLOCK_N)
        kv_offsets = (head * seqlen_k + cols[:, None]) * HEAD_DIM + dims[None, :]
        k = tl.load(k_ptr + kv_offsets, mask=cols[:, None] < seqlen_k, other=0.0)
        v = tl.load(v_ptr + kv_offsets, mask=cols[:, None] < seqlen_k, other=0.0)
        visible = cols[None, :] < seqlen_k
        if IS_CAUSAL:
            visible = visible & (cols[None, :] <= rows[:, None])
        scores = tl.where(visible, dot(q, tl.trans(k), None, "ieee") * scale_log2, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)  # a row of −inf alone: exp2 gives 0, not NaN
        weights = tl.exp2(scores - shift[:, None])
        correction = tl.exp2(row_max - shift)
        row_sum = row_sum * correction + tl.sum(weights, 1)
        acc = dot(weights.to(v.dtype), v, acc * correction[:, None], "ieee")
        row_max = new_max

    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    tl.store(out_ptr + q_offsets, acc.to(out_ptr.dtype.element_ty), mask=rows[:, None] < seqlen_q)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool | str,
    scale: float | None,
    enable_gqa: bool,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
) -> tuple[Output, tuple]:
    output = torch.empty_like(query)
    batch, heads, seqlen_q, head_dim = query.shape
    block = 64 if query.element_size() == 2 else 32
    if output.numel() and not shapes_only():
        _naive_kernel[(triton.cdiv(seqlen_q, block), batch * heads)](
            output, query, key, value, scale_of(head_dim, scale) * LOG2_E, seqlen_q, key.shape[2],
            bool(is_causal), head_dim, block, block, **FUSED,
        )  # fmt: skip
    return output, ()


def unsupported(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool | str = False,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
    **options: object,
) -> str | None:
    """Why the call is not the plain case, or None."""
    if (reason := unsupported_by_triton(query)) is not None:
        return reason
    if wants_gradient(query, key, value):
        return "no backward: use `flash` for gradients"
    if attn_mask is not None or window_size != NO_WINDOW or is_causal not in (False, True):
        return "takes no mask but is_causal=True; `flash` takes masks and windows"
    if return_lse:
        return "keeps no log-sum-exp; `flash` returns it"
    if query.dim() != 4 or key.shape[:2] != query.shape[:2] or key.shape != value.shape:
        return "takes (B, H, S, D) with as many heads of keys and values as of queries; `flash` takes the rest"
    if query.shape[3] not in HEAD_DIMS or key.shape[2] == 0:
        return f"takes head dimensions {HEAD_DIMS} and at least one key; `flash` takes any"
    if query.shape[0] * query.shape[1] > MAX_GRID_Y:
        return f"takes at most {MAX_GRID_Y} heads in all, the size of a grid's second axis"
    if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
        return "takes contiguous tensors only; `flash` takes any strides"
    return None
