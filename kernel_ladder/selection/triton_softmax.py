"""Which rung of the Triton softmax to try first, by the length of a row."""

from __future__ import annotations

from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete, product_of, wants_gradient

#: The longest rows at which `fused` is as fast as `cluster` (H100).
FUSED = 8192
#: Rows that clusters of sixteen blocks take at once on a GPU of 132 multiprocessors.
ROWS_AT_ONCE = 8
#: A cluster takes a power of two of elements. Padded by more than this factor, `online` is ahead without a gradient
#: (H200: 0.79 of the time at 152,064 elements, 1.18 at 128,256).
MOST_PADDING = 1.5


def softmax(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """`fused` up to 8192 elements; from there `cluster`, or `online` where rows begin off 16 bytes or are padded.

    Off 16 bytes `cluster` stores single elements, in twice the time of `online`; of one row it takes 0.4 of the time.
    """
    (x,) = inputs
    assert x is not None
    n_cols = x.shape[options["dim"]] if x.dim() else 1
    if n_cols <= FUSED:
        return ("triton.fused",)
    columns = concrete(n_cols)
    if product_of(x.shape) <= ROWS_AT_ONCE * columns:
        return ("triton.cluster",)
    padded = 1 << (columns - 1).bit_length() > MOST_PADDING * columns and not wants_gradient(x)
    return ("triton.online",) if padded or columns * x.element_size() % 16 else ("triton.cluster",)


RULES = {("softmax", "triton"): softmax}
