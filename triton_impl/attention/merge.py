"""Merge two results of attention over the same queries by their log-sum-exp, for rings of GPUs.

Idea      Weights come from the log-sum-exp of a row, and both outputs are read and one is written in the same pass.
Predicts  An element is read twice and written once: 6 bytes of 16-bit outputs.
Limit now Memory bandwidth.
Source    Liu et al., Ring Attention, arXiv:2310.01889. ``kernel_ladder/distributed/steps.py`` has the formula.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_impl.runtime.launch_cache import Launch, LaunchCache

#: Elements of a tile: eight 16-byte loads a thread of four warps for each float32 operand.
TILE = 4096


@triton.jit
def _merge_kernel(
    into_ptr, output_ptr, lse_ptr, found_ptr, found_lse_ptr, heads, rows, columns,
    i_b, i_h, i_s, i_d, o_b, o_h, o_s, o_d, l_b, l_h, l_s, f_b, f_h, f_s, f_d, m_b, m_h, m_s,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``into = (exp(L₁) · output + exp(L₂) · found) / (exp(L₁) + exp(L₂))``, and ``lse`` becomes that of both.

    Grid: (⌈rows / BLOCK_M⌉ · heads · batch,). Layout: outputs (B, H, S, D), log-sum-exp (B, H, S), any strides.
    """
    tiles = tl.cdiv(rows, BLOCK_M)
    head = tl.program_id(0) // tiles
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    row = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    in_rows = row < rows
    mask = in_rows[:, None] & (column < columns)[None, :]
    lse_ptr += b * l_b + h * l_h + row * l_s
    output_ptr += b * o_b + h * o_h + row[:, None] * o_s + column[None, :] * o_d
    found_ptr += b * f_b + h * f_h + row[:, None] * f_s + column[None, :] * f_d
    into_ptr += b * i_b + h * i_h + row[:, None] * i_s + column[None, :] * i_d

    lse = tl.load(lse_ptr, mask=in_rows, other=0.0)
    found_lse = tl.load(found_lse_ptr + b * m_b + h * m_h + row * m_s, mask=in_rows, other=0.0)
    output = tl.load(output_ptr, mask=mask, other=0.0).to(tl.float32)
    found = tl.load(found_ptr, mask=mask, other=0.0).to(tl.float32)
    tl.debug_barrier()  # another thread may write below what this one reads: `lse`, and `into` where it is `output`

    largest = tl.maximum(lse, found_lse)
    largest = tl.where(largest == -float("inf"), 0.0, largest)  # neither saw a key: both weights are 0
    kept, added = tl.exp(lse - largest), tl.exp(found_lse - largest)
    total = kept + added
    scale = tl.where(total == 0.0, 0.0, 1.0 / total)
    merged = output * (kept * scale)[:, None] + found * (added * scale)[:, None]
    tl.store(into_ptr, merged.to(into_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr, largest + tl.log(total), mask=in_rows)


_launches: LaunchCache = LaunchCache()


def merge(
    into: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, found: torch.Tensor, found_lse: torch.Tensor
) -> None:
    """Write what `output` and `found` are together into `into`, and their log-sum-exp into `lse`.

    Rows in which neither saw a key have −inf, and become 0.

    Args:
        into: ``(…, H, S, D)`` with one dimension more or none, of any dtype up to float32. It may be `output`.
        output, found: of the same shape, of any such dtype and strides.
        lse, found_lse: ``(…, H, S)``, float32, any strides.
    """
    if into.numel() == 0:
        return
    tensors = [x if into.dim() == 4 else x[None] for x in (into, output, lse, found, found_lse)]
    key = tuple((x.dtype, x.shape, x.stride()) for x in tensors)
    launch = _launches.get(key)
    if launch is None:
        batch, heads, rows, columns = tensors[0].shape
        width = triton.next_power_of_2(columns)
        height = max(1, TILE // width)
        strides = [stride for x in tensors for stride in x.stride()]
        grid = (triton.cdiv(rows, height) * heads * batch,)
        launch = Launch(_merge_kernel, grid, (heads, rows, columns, *strides, height, width), {})
        _launches.remember(key, launch)
    launch(*tensors)
