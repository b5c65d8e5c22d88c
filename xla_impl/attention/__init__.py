"""Attention in JAX: the ladder.

jit     product, softmax, product as one program
fused   what JAX's own library offers
pallas  kernels of our own, in Pallas
"""

from __future__ import annotations

from xla_impl.attention import fused, jit, pallas
from xla_impl.rung import register

register("attention", jit.formula, name="xla.jit")
register("attention", fused.formula, name="xla.fused", also_unsupported=fused.unsupported)
register("attention", pallas.formula, name="xla.pallas", also_unsupported=pallas.unsupported)
