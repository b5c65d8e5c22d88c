"""Which rung of the Triton norms to try first, by the length of a row and whether a gradient is wanted.

Backward, `fused` keeps the sums of the parameters' gradients in registers, and is the fastest up to 8192 elements.
Past that a row is spread over a cluster. Forward, `cluster` overtakes `fused` at 2049 elements for layer_norm and at
8192 for rms_norm. `persistent_cluster` overtakes `cluster` at 32769, for bias_dropout_add_layer_norm at 16385 (H100).
"""

from __future__ import annotations

import math

from kernel_ladder.selection.features import begin_off
from kernel_ladder.selection.triton_softmax import ROWS_AT_ONCE
from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete, product_of, wants_gradient

#: The longest rows of the fastest `fused` backward pass.
FUSED_BACKWARD = 8192
#: The longest rows off 16 bytes that `fused` reads faster than `online`: it takes 0.75 of the time at 2,843 elements,
#: 1.4 at 7,245 (H200).
FUSED_OFF_16_BYTES = 4096


def _by_length(n_cols: int, gradient: bool, cluster_from: int, persistent_from: int) -> tuple[str, ...]:
    if gradient:
        return ("triton.fused",) if n_cols <= FUSED_BACKWARD else ("triton.cluster",)
    if n_cols < cluster_from:
        return ("triton.fused",)
    return ("triton.cluster",) if n_cols < persistent_from else ("triton.persistent_cluster",)


def layer_norm(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """`cluster` from 2049 elements, `persistent_cluster` from 32769; with a gradient `fused` up to 8192.

    16-bit rows that begin off 16 bytes: `fused`, from 4,097 elements `online`, which stores no single elements as
    `cluster` does. Of few rows `cluster` is ahead all the same.
    """
    x, gradient = inputs[0], wants_gradient(*inputs)
    n_cols = math.prod(options["normalized_shape"])
    assert x is not None
    columns = concrete(n_cols)
    if begin_off(x, columns) and product_of(x.shape) > ROWS_AT_ONCE * columns:
        fused = FUSED_BACKWARD if gradient else FUSED_OFF_16_BYTES
        return ("triton.fused",) if columns <= fused else ("triton.online",)
    return _by_length(n_cols, gradient, 2049, 32769)


def rms_norm(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """`fused` below 8192 elements, `cluster` from there; with a gradient `fused` at 8192 too."""
    n_cols = math.prod(options["normalized_shape"])
    return _by_length(n_cols, wants_gradient(*inputs), 8192, n_cols + 1)


def add_rms_norm(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """As :func:`rms_norm`."""
    assert inputs[0] is not None
    n_cols = inputs[0].shape[-1]
    return _by_length(n_cols, wants_gradient(*inputs), 8192, n_cols + 1)


def bias_dropout_add_layer_norm(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """`cluster` from 2049 elements, `persistent_cluster` from 16385; with a gradient `fused` up to 8192."""
    assert inputs[0] is not None
    return _by_length(inputs[0].shape[-1], wants_gradient(*inputs), 2049, 16385)


RULES = {
    ("layer_norm", "triton"): layer_norm,
    ("rms_norm", "triton"): rms_norm,
    ("add_rms_norm", "triton"): add_rms_norm,
    ("bias_dropout_add_layer_norm", "triton"): bias_dropout_add_layer_norm,
}
