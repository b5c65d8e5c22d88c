"""Attention in Triton: FlashAttention-2 (Dao, arXiv:2307.08691). Scores live in registers, never in memory.

One program takes BLOCK_M queries and walks over the keys in steps of BLOCK_N, with a running maximum and sum per row
(online softmax: Milakov and Gimelshein, arXiv:1805.02867). The walk has two parts: tiles that every row sees whole,
read and used without any mask, and then the tiles on the diagonal and at the end of the keys.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from triton_impl import register, unsupported
from triton_impl.aot import Entry, entry
from triton_impl.attention_backward import _key_value_kernel, _query_kernel, attention_backward
from triton_impl.attention_tiles import (
    LOG2_E,
    TUNING_KEY,
    Choices,
    block,
    choose,
    configs,
    load_tile,
    program_tile,
    section,
    seqlen_class,
    store_tile,
    wide,
)
from triton_impl.dot import dot
from triton_impl.fast_math import exp2
from triton_impl.tuning import Launch, Launches, Tuned

CHOICES: Choices = {
    0: ((64, 64, 8, 1), (64, 32, 4, 2), (32, 32, 4, 1)),
    64: ((128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3)),
    128: ((128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 3), (64, 32, 4, 2)),
    256: ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2)),
}


@triton.jit
def _attend(
    acc, row_sum, row_max, q, k_base, v_base, start_m, start, end, scale_log2,
    k_s, k_d, v_s, v_d, seqlen_k, head_dim, head_dim_v,
    MASKED: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Take keys ``start … end`` into the running softmax of BLOCK_M queries."""
    for start_n in range(start, end, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        k = load_tile(k_base, start_n, k_s, k_d, seqlen_k, head_dim, BLOCK_N, BLOCK_D, not MASKED, EVEN_D, WIDE)
        scores = dot(q, tl.trans(k), None, PRECISION)
        if MASKED:
            cols = start_n + tl.arange(0, BLOCK_N)
            seen = cols[None, :] < seqlen_k
            if IS_CAUSAL:
                seen = seen & (cols[None, :] <= start_m + tl.arange(0, BLOCK_M)[:, None])
            scores = tl.where(seen, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        # A row that has met nothing but −inf keeps a sum of zero, so that it ends as 0 / 0, as the formula does.
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = exp2(scores * scale_log2 - shift[:, None])
        correction = exp2(row_max - shift)
        row_sum = row_sum * correction + tl.sum(weights, 1)
        row_max = new_max
        acc = acc * correction[:, None]
        v = load_tile(v_base, start_n, v_s, v_d, seqlen_k, head_dim_v, BLOCK_N, BLOCK_DV, not MASKED, EVEN_DV, WIDE)
        acc = dot(weights.to(v.dtype), v, acc, PRECISION)
    return acc, row_sum, row_max


@triton.jit(do_not_specialize=["section", "seqlen_class"])
def _forward_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, scale_log2,
    o_b, o_h, o_s, q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d,
    num_heads, heads, group, seqlen_q, seqlen_k, head_dim, head_dim_v, section, seqlen_class,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    scale_log2 = tl.cast(scale_log2, tl.float32)  # torch.compile passes a float as float64
    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, head = program_tile(num_tiles, num_heads, section)
    if IS_CAUSAL:
        tile = num_tiles - 1 - tile  # the last queries see most keys: the longest tiles first
    b, h = (head // heads).to(tl.int64), head % heads
    h_kv = (h // group).to(tl.int64)
    h = h.to(tl.int64)
    start_m = tile * BLOCK_M

    q = load_tile(
        q_ptr + b * q_b + h * q_h, start_m, q_s, q_d, seqlen_q, head_dim, BLOCK_M, BLOCK_D, False, EVEN_D, WIDE
    )
    k_base = k_ptr + b * k_b + h_kv * k_h
    v_base = v_ptr + b * v_b + h_kv * v_h
    acc = tl.full([BLOCK_M, BLOCK_DV], 0.0, dtype=tl.float32)
    row_sum = tl.full([BLOCK_M], 0.0, dtype=tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)

    end = seqlen_k
    whole = seqlen_k // BLOCK_N * BLOCK_N
    if IS_CAUSAL:
        end = tl.minimum(seqlen_k, start_m + BLOCK_M)
        whole = tl.minimum(seqlen_k, start_m + 1) // BLOCK_N * BLOCK_N
    acc, row_sum, row_max = _attend(
        acc, row_sum, row_max, q, k_base, v_base, start_m, 0, whole, scale_log2,
        k_s, k_d, v_s, v_d, seqlen_k, head_dim, head_dim_v,
        False, IS_CAUSAL, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, WIDE,
    )  # fmt: skip
    acc, row_sum, row_max = _attend(
        acc, row_sum, row_max, q, k_base, v_base, start_m, whole, end, scale_log2,
        k_s, k_d, v_s, v_d, seqlen_k, head_dim, head_dim_v,
        True, IS_CAUSAL, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, WIDE,
    )  # fmt: skip

    rows = start_m + tl.arange(0, BLOCK_M)
    lse_offset = head.to(tl.int64) * seqlen_q
    tl.store(lse_ptr + lse_offset + rows, row_max + tl.log2(row_sum), mask=rows < seqlen_q)
    acc = acc / row_sum[:, None]
    store_tile(out_ptr + b * o_b + h * o_h, start_m, o_s, 1, seqlen_q, head_dim_v, acc, BLOCK_M, BLOCK_DV, WIDE)


def _suitable(configs: list[triton.Config], named_args: dict, **kwargs) -> list[triton.Config]:
    return choose(CHOICES, configs, kwargs)


_forward = Tuned(_forward_kernel, configs(CHOICES), TUNING_KEY, _suitable)

#: By all that decides a forward pass: shape and strides of the output, shape of the log-sum-exp, the launch.
_launches: Launches = Launches()


def _batched(x: torch.Tensor) -> torch.Tensor:
    """(..., H, S, D) as (B, H, S, D): a view wherever the strides of the batch dimensions allow one."""
    return x if x.dim() == 4 else x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[torch.Tensor, tuple]:
    q, k, v = _batched(query), _batched(key), _batched(value)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    output, lse = _attention(q, k, v, is_causal, scale)
    saved = (q, k, v, output, lse, tuple(query.shape[:-3]), is_causal, scale)
    return (output if query.dim() == 4 else output.view(*query.shape[:-1], value.shape[-1])), saved


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and, in base two, the log-sum-exp of every row of scores."""
    if torch.compiler.is_compiling():
        return _first_attention(q, k, v, is_causal, scale)[:2]
    dtype, device = q.dtype, q.device
    what = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), dtype, device, is_causal, scale)
    known = _launches.get(what)
    if known is None:
        output, lse, launch = _first_attention(q, k, v, is_causal, scale)
        if launch is not None:
            _launches.remember(what, (output.shape, output.stride(), lse.shape, launch))
        return output, lse
    shape, strides, rows, launch = known
    output = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    lse = torch.empty(rows, dtype=torch.float32, device=device)
    launch(output, lse, q, k, v)
    return output, lse


def _first_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, Launch | None]:
    batch, heads, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, head_dim_v = v.shape
    output = torch.empty_like(q)  # in the memory order of the query, where that leaves rows dense
    if head_dim_v != head_dim or output.stride(3) != 1:
        output = q.new_empty((batch, heads, seqlen_q, head_dim_v))
    num_heads = batch * heads
    lse = torch.empty((num_heads, seqlen_q), dtype=torch.float32, device=q.device)
    if seqlen_k == 0:
        output.zero_()
    if seqlen_k == 0 or output.numel() == 0:
        return output, lse, None
    group = heads // heads_kv
    together = section(is_causal, group, seqlen_k * (head_dim + head_dim_v) * q.element_size())
    strides = output.stride(), q.stride(), k.stride(), v.stride()
    block_d, block_dv = block(head_dim), block(head_dim_v)
    arguments = (
        scale * LOG2_E, *strides[0][:3], *strides[1], *strides[2], *strides[3],
        num_heads, heads, group, seqlen_q, seqlen_k, head_dim, head_dim_v,
        min(together, num_heads), seqlen_class(seqlen_q),
    )  # fmt: skip
    constants = {
        "IS_CAUSAL": is_causal,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "EVEN_D": head_dim == block_d,
        "EVEN_DV": head_dim_v == block_dv,
        "WIDE": wide(*strides),
    }

    def grid(meta):
        return (triton.cdiv(seqlen_q, meta["BLOCK_M"]) * num_heads,)

    return output, lse, _forward(grid, (output, lse, q, k, v), arguments, constants)


def _unsupported(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object) -> str | None:
    return unsupported(query)


register("attention", "triton.flash", forward=attention, backward=attention_backward, unsupported=_unsupported)


def _ahead_of_time(kernel, head_dim: int, is_causal: bool, m: int, n: int, num_warps: int, num_stages: int) -> Entry:
    constants = {"IS_CAUSAL": is_causal, "PRECISION": "tf32", "BLOCK_D": head_dim, "BLOCK_DV": head_dim}
    constants |= {"EVEN_D": True, "EVEN_DV": True, "WIDE": False}
    constants |= {"EVEN_Q": True} if "EVEN_Q" in kernel.arg_names else {}
    constants |= {name: 1 for name in kernel.arg_names if name.endswith("_d")}  # dense rows, as in most calls
    config = triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=num_warps, num_stages=num_stages)
    of_float32 = dict.fromkeys({"lse_ptr", "delta_ptr"} & set(kernel.arg_names), "*fp32")
    of_float32 |= dict.fromkeys({"scale", "scale_log2"} & set(kernel.arg_names), "fp32")
    made = entry(kernel, "bf16", constants, config)
    return made._replace(signature={name: of_float32.get(name, type) for name, type in made.signature.items()})


AOT = [
    _ahead_of_time(_forward_kernel, 64, False, 128, 64, 4, 3),
    _ahead_of_time(_forward_kernel, 64, True, 128, 64, 4, 3),
    _ahead_of_time(_forward_kernel, 128, False, 128, 128, 8, 2),
    _ahead_of_time(_forward_kernel, 128, True, 128, 64, 8, 3),
    _ahead_of_time(_forward_kernel, 256, True, 64, 32, 8, 2),
    _ahead_of_time(_key_value_kernel, 64, True, 64, 128, 8, 2),
    _ahead_of_time(_key_value_kernel, 128, False, 32, 64, 4, 2),
    _ahead_of_time(_key_value_kernel, 256, True, 32, 32, 8, 2),
    _ahead_of_time(_query_kernel, 64, True, 128, 64, 8, 2),
    _ahead_of_time(_query_kernel, 128, False, 128, 64, 8, 2),
    _ahead_of_time(_query_kernel, 256, True, 64, 32, 8, 2),
]
