"""Which rung of the Triton softmax to try first, by the length of a row."""

from __future__ import annotations

from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete

#: The longest rows at which `fused` is as fast as `cluster` (H100).
FUSED = 8192


def softmax(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """`fused` up to 8192 elements; from there `cluster`, or `online` where rows begin off 16 bytes.

    Off 16 bytes `cluster` stores single elements, in three times the time of `online`.
    """
    (x,) = inputs
    assert x is not None
    n_cols = x.shape[options["dim"]] if x.dim() else 1
    if n_cols <= FUSED:
        return ("triton.fused",)
    return ("triton.online",) if concrete(n_cols) * x.element_size() % 16 else ("triton.cluster",)


RULES = {("softmax", "triton"): softmax}
