"""Softmax in JAX: the ladder.

jit     the formula as one program
pallas  kernels of our own, in Pallas
"""

from __future__ import annotations

from xla_impl.rung import register
from xla_impl.softmax import jit, pallas

register("softmax", jit.formula, name="xla.jit")
register("softmax", pallas.formula, name="xla.pallas", also_unsupported=pallas.unsupported)
