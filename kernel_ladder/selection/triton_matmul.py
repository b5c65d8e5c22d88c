"""Which rung of matmul and of linear ``backend="triton"`` stands for."""

from __future__ import annotations

import math

import torch

from kernel_ladder import gpu
from kernel_ladder.semantics.matmul_shapes import as_matrices, batch_shape
from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete

#: The least k that `split_k` splits, and the sides of its usual tile: as in ``triton_impl/matmul/split_k.py``.
MIN_SPLIT_K = 4096
SPLIT_TILE = 64
MIN_ROWS = 16
#: The largest tile of `persistent`: as in ``triton_impl/matmul/descriptors.py``.
LARGEST_TILE = 128, 256
#: Elements of a vector of 16 bytes, and by how many Triton asks a stride to be divisible before it loads vectors.
VECTOR, SPECIALISED = 8, 16


def _tiles(rows: int, columns: int, tile: tuple[int, int]) -> int:
    return -(-rows // tile[0]) * -(-columns // tile[1])


def _is_off_triton(x: torch.Tensor) -> bool:
    """Whether lines of a 16-bit matrix begin on 16 bytes, but Triton does not see it in their stride."""
    lines = max(map(concrete, x.stride()[-2:]))
    return x.element_size() == 2 and lines % VECTOR == 0 and lines % SPECIALISED != 0


def matmul(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """`split_k` where tiles are few and k is long, `persistent` where its tiles are many, else `tiled`.

    Few tiles: they keep at most half of the multiprocessors busy. Many: at least half. Of few rows `tiled` makes many
    small tiles, which read the other operand together; `persistent` takes 1.05 to 2 times as long (H200).

    Where 8 divides the lines of an operand and 16 does not, Triton loads single elements for `tiled`, which takes up to
    4.3 times as long as `persistent` (H200).
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
    if m > MIN_ROWS and (_is_off_triton(a) or _is_off_triton(b)):
        return "triton.persistent", "triton.tiled"
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
