"""Matrix product in JAX: the ladder.

jit     ``jax.numpy.matmul``
pallas  kernels of our own, in Pallas
"""

from __future__ import annotations

from xla_impl.matmul import jit, pallas
from xla_impl.rung import register

register("matmul", jit.formula, name="xla.jit")
register("matmul", pallas.formula, name="xla.pallas", also_unsupported=pallas.unsupported)
