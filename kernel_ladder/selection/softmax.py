"""Which rung of softmax ``backend="cuda"`` stands for where rows begin off 16 bytes."""

from __future__ import annotations

from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete

#: Bytes of a vector, and of the shortest rows for which this is the choice.
VECTOR, LEAST = 16, 8192


def online_where_unaligned(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Prefers ``cuda.online`` for long dense rows that begin off 16 bytes, which it reads by aligned vectors alone.

    The rungs that keep a row on chip count vectors from the row's start.
    """
    (x,) = inputs
    assert x is not None
    dim = options["dim"]
    if x.dim() == 0 or concrete(x.stride(dim)) != 1:
        return ()
    row = concrete(x.shape[dim]) * x.element_size()
    return ("cuda.online",) if row % VECTOR and row >= LEAST else ()


RULES = {("softmax", "cuda"): online_where_unaligned}
