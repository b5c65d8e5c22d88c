"""Softmax in Triton: the ladder.

naive    one program per row, contiguous rows
online   rows of any length and strides, one block of columns at a time
fused    whole rows in registers, of any strides
cluster  one thread-block cluster per row, in Gluon
"""

from __future__ import annotations

from triton_impl import register
from triton_impl.common.gluon import requirements
from triton_impl.softmax import cluster, fused, naive, online, rows

register("softmax", "triton.naive", forward=naive.forward, backward=naive.backward, unsupported=naive.unsupported)
register("softmax", "triton.online", **online.PASSES, unsupported=rows.unsupported)
register("softmax", "triton.fused", **fused.PASSES, unsupported=fused.unsupported)
register(
    "softmax",
    "triton.cluster",
    forward=cluster.forward,
    backward=cluster.backward,
    unsupported=cluster.unsupported,
    here=requirements.here,
)

AOT = [*naive.AOT, *online.AOT, *fused.AOT, *cluster.AOT]
