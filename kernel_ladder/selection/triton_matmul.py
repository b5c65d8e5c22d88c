"""Which rung of matmul and of linear ``backend="triton"`` stands for."""

from __future__ import annotations

import math

import torch

from kernel_ladder import gpu
from kernel_ladder.semantics.matmul_shapes import as_matrices, batch_shape
from kernel_ladder.spec import Inputs, Options

#: The least k that `split_k` splits, and the sides of its usual tile: as in ``triton_impl/matmul/split_k.py``.
MIN_SPLIT_K = 4096
SPLIT_TILE = 64
MIN_ROWS = 16
#: The largest tile of `persistent`: as in ``triton_impl/matmul/descriptors.py``.
LARGEST_TILE = 128, 256


def _tiles(rows: int, columns: int, tile: tuple[int, int]) -> int:
    return -(-rows // tile[0]) * -(-columns // tile[1])


def matmul(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """`split_k` where tiles are few and k is long, `persistent` where its tiles are many, else `tiled`.

    Few tiles: they keep at most half of the multiprocessors busy. Many: at least half. Of few rows `tiled` makes many
    small tiles, which read the other operand together; `persistent` takes 1.05 to 2 times as long (H200).
    """
    input, other = inputs
    assert input is not None
    assert other is not None
    a, b = as_matrices(input, other)
    (m, k), n = a.shape[-2:], b.shape[-1]
    batch = batch_shape(a, b)
    sms = gpu.multiprocessors(input)
    if not batch and k >= MIN_SPLIT_K:
        side = max(min(m, n, SPLIT_TILE), MIN_ROWS)
        if 2 * _tiles(m, n, (side, SPLIT_TILE)) <= sms:
            return ("triton.split_k",)
    if m <= MIN_ROWS or 2 * torch.Size(batch).numel() * _tiles(m, n, LARGEST_TILE) < sms:
        return ("triton.tiled",)
    return "triton.persistent", "triton.tiled"


def linear(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """`tiled` for few rows, as in a product: `persistent` takes 1.04 to 1.9 times as long (H200).

    Where torch.compile has symbols for the rows there may be many.
    """
    input = inputs[0]
    assert input is not None
    rows = math.prod(input.shape[:-1])
    return ("triton.tiled",) if type(rows) is int and rows <= MIN_ROWS else ()


RULES = {("matmul", "triton"): matmul, ("linear", "triton"): linear}
