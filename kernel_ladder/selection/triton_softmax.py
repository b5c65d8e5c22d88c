"""Which rung of the Triton softmax to try first, by the length of a row."""

from __future__ import annotations

from kernel_ladder.spec import Inputs, Options

#: The longest rows at which `fused` is as fast as `cluster` (H100).
FUSED = 8192


def softmax(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """`fused` up to 8192 elements, `cluster` from there."""
    (x,) = inputs
    assert x is not None
    n_cols = x.shape[options["dim"]] if x.dim() else 1
    return ("triton.fused",) if n_cols <= FUSED else ("triton.cluster",)


RULES = {("softmax", "triton"): softmax}
