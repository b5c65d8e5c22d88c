"""Matrix product in Triton: the ladder, in the order of its rungs. Every rung has a file of its own, with its kernels.

naive       one tile per program, in row order, no load ahead
tiled       pipelined loads (``num_stages`` tiles ahead), programs in groups that share the L2, tuned tiles
tma         the copy engine fetches the tiles by descriptors
persistent  as many programs as run at once take tile after tile; the next tile's loads overlap this tile's store
split_k     where tiles are few and k is long, programs share the k of a tile

Shared openly: shapes, cached launches and gradients (``product.py``); rasterization, the loop over k and the cost model
(``tiles.py``); of `tma` and `persistent`, descriptors and the epilogue. On Hopper wgmma feeds the tensor cores, except
in `naive`, whose tiles are too small for it.
"""

from __future__ import annotations

from triton_impl import register, unsupported
from triton_impl.matmul import descriptors, naive, persistent, split_k, tiled, tma
from triton_impl.matmul.product import backward_by, described, forward_by

described.update((tma.write, persistent.write))

register(
    "matmul",
    "triton.naive",
    forward=forward_by(naive.write),
    backward=backward_by(naive.write, prepare=lambda grad: grad.contiguous()),
    unsupported=naive.unsupported,
)
register(
    "matmul",
    "triton.tiled",
    forward=forward_by(tiled.write),
    backward=backward_by(tiled.write),
    unsupported=unsupported,
)
register(
    "matmul",
    "triton.tma",
    forward=forward_by(tma.write),
    backward=backward_by(tma.write, prepare=descriptors.pad_operand),
    unsupported=descriptors.unsupported,
)
register(
    "matmul",
    "triton.persistent",
    forward=forward_by(persistent.write),
    backward=backward_by(persistent.write, prepare=descriptors.pad_operand),
    unsupported=descriptors.unsupported_unless_copied,
)
register(
    "matmul",
    "triton.split_k",
    forward=forward_by(split_k.write),
    backward=backward_by(split_k.write),
    unsupported=split_k.unsupported,
)
