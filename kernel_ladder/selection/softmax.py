"""Which rung of softmax ``backend="cuda"`` stands for where rows begin off 16 bytes, and ``"auto"`` on a GPU."""

from __future__ import annotations

from kernel_ladder.selection import triton_softmax
from kernel_ladder.selection.features import begin_off
from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete, product_of, wants_gradient

#: Bytes of a vector, of the shortest rows for which `cuda.shared` is the choice, and for which the others are.
VECTOR, LEAST_SHARED, LEAST = 16, 2048, 8192
#: Bytes of a row from which `cuda.online` is ahead of `cuda.shared` without a gradient.
LEAST_ONLINE = 16384
#: Rows that clusters of eight blocks take at once on a GPU of 132 multiprocessors.
ROWS_AT_ONCE = 16
#: From so many elements `cuda.online` is ahead of Triton where many rows begin off 16 bytes, without a gradient: it
#: stores aligned vectors alone, and takes 0.79 to 0.98 of the time of `triton.online` at 50,257 elements (H200).
LONG, MANY_ROWS = 32768, 256
#: Elements between which half of the threads of `cuda.registers` have no vector: `triton.fused` takes 0.81 of the time
#: at 1,088 elements and 0.88 at 1,536, as long at 1,024 and 2,048 (H200).
HALF_EMPTY = (1024, 2048)


def where_unaligned(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Of dense rows that begin off 16 bytes: ``cuda.shared``, if long ``cuda.cluster`` for few, else ``cuda.online``.

    The rungs that keep a row on chip count vectors from the row's start. ``cuda.online`` reads such rows by aligned
    vectors alone, in half the time of ``cuda.cluster``; of one row it takes 2.4 times as long. Its backward pass reads
    them twice, and with it ``cuda.shared`` takes 0.9 of the time. Rows of 1,024 to 8,192 elements of 16 bits take 0.7
    to 0.95 of the time of the other rungs in ``cuda.shared`` (H200).
    """
    (x,) = inputs
    assert x is not None
    dim = options["dim"]
    if x.dim() == 0 or concrete(x.stride(dim)) != 1:
        return ()
    columns = concrete(x.shape[dim])
    size = columns * x.element_size()
    if size % VECTOR == 0 or size < LEAST_SHARED:
        return ()
    if product_of(x.shape) <= ROWS_AT_ONCE * columns:
        return ("cuda.cluster", "cuda.online") if size >= LEAST else ()
    return ("cuda.shared", "cuda.online") if wants_gradient(x) or size < LEAST_ONLINE else ("cuda.online",)


def automatic(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Prefers the triton level for 16-bit rows that begin off 16 bytes, or of 1025 to 2047 elements.

    Many long rows off 16 bytes are `cuda.online`'s.
    """
    (x,) = inputs
    dim = options["dim"]
    assert x is not None
    if not x.is_cuda or x.dim() == 0 or concrete(x.stride(dim)) != 1 or x.element_size() != 2:
        return ()
    columns = concrete(x.shape[dim])
    if not begin_off(x, columns):
        return ("triton.fused",) if HALF_EMPTY[0] < columns < HALF_EMPTY[1] else ()
    if columns >= LONG and product_of(x.shape) > MANY_ROWS * columns and not wants_gradient(x):
        return where_unaligned(inputs, options)
    return *triton_softmax.softmax(inputs, options), "triton.fused"


RULES = {("softmax", "cuda"): where_unaligned, ("softmax", "auto"): automatic}
