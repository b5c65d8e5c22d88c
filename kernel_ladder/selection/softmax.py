"""Which rung of softmax ``backend="cuda"`` stands for where rows begin off 16 bytes."""

from __future__ import annotations

from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete, product_of, wants_gradient

#: Bytes of a vector, and of the shortest rows for which this is the choice.
VECTOR, LEAST = 16, 8192
#: Rows that clusters of eight blocks take at once on a GPU of 132 multiprocessors.
ROWS_AT_ONCE = 16


def where_unaligned(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Of long dense rows that begin off 16 bytes: ``cuda.cluster`` for few, else ``cuda.online``.

    The rungs that keep a row on chip count vectors from the row's start. ``cuda.online`` reads such rows by aligned
    vectors alone, in half the time of ``cuda.cluster``; of one row it takes 2.4 times as long. Its backward pass reads
    them twice, and with it ``cuda.shared`` takes 0.9 of the time (H200).
    """
    (x,) = inputs
    assert x is not None
    dim = options["dim"]
    if x.dim() == 0 or concrete(x.stride(dim)) != 1:
        return ()
    columns = concrete(x.shape[dim])
    if columns * x.element_size() % VECTOR == 0 or columns * x.element_size() < LEAST:
        return ()
    if product_of(x.shape) <= ROWS_AT_ONCE * columns:
        return ("cuda.cluster", "cuda.online")
    return ("cuda.shared", "cuda.online") if wants_gradient(x) else ("cuda.online",)


RULES = {("softmax", "cuda"): where_unaligned}
