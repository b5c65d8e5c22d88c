"""Attention in Triton: the ladder, in the order of its rungs. Every rung has a file of its own, with its kernels.

naive             one program per block of queries, online softmax over blocks of keys: the plain case
flash             FlashAttention-2: unmasked tiles apart from masked ones, any strides, masks, windows, grouped heads
tma               tensor descriptors (TMA) fetch the tiles of Q, K and V
warp_specialized  Gluon: a producer warp fetches, consumer warpgroups compute, and softmax overlaps wgmma
split_kv          few queries over long keys, as in decoding: programs share the keys of a head

Shared openly: `flash`, `tma` and `split_kv` have their gradients from the kernels of ``backward.py``, that of an
additive mask from ``mask_grad.py``. `warp_specialized` has its own (``specialized_backward.py``), and those of
``backward.py`` for head dimensions above 128.
"""

from __future__ import annotations

from triton_impl import register
from triton_impl.attention import flash, naive, specialized_backward, split_kv, tma, warp_specialized
from triton_impl.attention.backward import attention_backward
from triton_impl.attention.call import saved_from
from triton_impl.common.gluon import requirements

register("attention", "triton.naive", forward=naive.attention, unsupported=naive.unsupported)
register(
    "attention",
    "triton.flash",
    forward=flash.attention,
    backward=attention_backward,
    saved_from=saved_from,
    unsupported=flash.unsupported,
    drops_weights=True,
)
register(
    "attention",
    "triton.tma",
    forward=tma.attention,
    backward=attention_backward,
    saved_from=saved_from,
    unsupported=tma.unsupported,
)
register(
    "attention",
    "triton.warp_specialized",
    forward=warp_specialized.attention,
    backward=specialized_backward.attention_backward,
    saved_from=saved_from,
    unsupported=warp_specialized.unsupported,
    here=requirements.here,
)
register(
    "attention",
    "triton.split_kv",
    forward=split_kv.attention,
    backward=attention_backward,
    saved_from=saved_from,
    unsupported=split_kv.unsupported,
)
