"""Cross-entropy in Triton: the ladder.

naive   one program per row, contiguous rows, maximum and sum in a pass each
online  rows of any strides; maximum and sum in one pass, and a backward pass by blocks of columns
"""

from __future__ import annotations

from triton_impl import register
from triton_impl.cross_entropy import naive, online, rows

register("cross_entropy", "triton.naive", **naive.PASSES, unsupported=naive.unsupported)
register("cross_entropy", "triton.online", **online.PASSES, unsupported=rows.unsupported)

AOT = [*naive.AOT, *online.AOT, *rows.AOT]
