"""Which rung of the Triton norms to try first, by the length of a row and whether a gradient is wanted.

Backward, `fused` keeps the sums of the parameters' gradients in registers, and is the fastest up to 8192 elements.
Past that a row is spread over a cluster. Forward, `cluster` overtakes `fused` at 2049 elements for layer_norm and at
8192 for rms_norm. `persistent_cluster` overtakes `cluster` at 32769, for bias_dropout_add_layer_norm at 16385 (H100).

Rows of 16 bits that begin off 16 bytes: `cluster` stores single elements, and `online` vectors. So `online` takes the
long ones: 0.35 to 0.8 of the time of `cluster`. Of few rows `cluster` is ahead all the same (H200).
"""

from __future__ import annotations

import math

import torch

from kernel_ladder.selection.features import begin_off
from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete, product_of, wants_gradient

#: The longest rows of the fastest `fused` backward pass.
FUSED_BACKWARD = 8192
#: The longest rows off 16 bytes that `fused` reads faster than `online`, for layer_norm and without a mean: 0.8 of the
#: time at 3,879 elements and 1.4 at 7,245; 0.78 at 6,237 and 1.15 at 12,123 (H200).
FUSED_OFF_16_BYTES, FUSED_OFF_WITHOUT_MEAN = 4096, 8192
#: Rows off 16 bytes up to which `fused`, or past it `cluster`, is ahead of `online`: 0.77 of the time at 67 rows of
#: 5,599 elements, 0.94 at 57 of 43,215; 1.4 at 187 of 58,839 (H200).
FEW_ROWS = 128


def _off_16_bytes(x: torch.Tensor, columns: int, gradient: bool, fused: int) -> tuple[str, ...]:
    if gradient:
        return ("triton.fused",) if columns <= FUSED_BACKWARD else ("triton.online",)
    if product_of(x.shape) <= FEW_ROWS * columns:
        return ("triton.fused",) if columns <= FUSED_BACKWARD else ("triton.cluster",)
    return ("triton.fused",) if columns <= fused else ("triton.online",)


def _by_length(n_cols: int, gradient: bool, cluster_from: int, persistent_from: int) -> tuple[str, ...]:
    if gradient:
        return ("triton.fused",) if n_cols <= FUSED_BACKWARD else ("triton.cluster",)
    if n_cols < cluster_from:
        return ("triton.fused",)
    return ("triton.cluster",) if n_cols < persistent_from else ("triton.persistent_cluster",)


def layer_norm(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """`cluster` from 2049 elements, `persistent_cluster` from 32769; with a gradient `fused` up to 8192.

    16-bit rows that begin off 16 bytes: `fused` up to 4096 elements, `online` from there, `cluster` for few.
    """
    x, gradient = inputs[0], wants_gradient(*inputs)
    n_cols = math.prod(options["normalized_shape"])
    assert x is not None
    if begin_off(x, concrete(n_cols)):
        return _off_16_bytes(x, concrete(n_cols), gradient, FUSED_OFF_16_BYTES)
    return _by_length(n_cols, gradient, 2049, 32769)


def _without_mean(inputs: Inputs, n_cols: int) -> tuple[str, ...]:
    x, gradient = inputs[0], wants_gradient(*inputs)
    assert x is not None
    if begin_off(x, concrete(n_cols)):
        return _off_16_bytes(x, concrete(n_cols), gradient, FUSED_OFF_WITHOUT_MEAN)
    return _by_length(n_cols, gradient, 8192, n_cols + 1)


def rms_norm(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """`fused` below 8192 elements, `cluster` from there, `online` off 16 bytes; with a gradient `fused` at 8192 too."""
    return _without_mean(inputs, math.prod(options["normalized_shape"]))


def add_rms_norm(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """As :func:`rms_norm`."""
    assert inputs[0] is not None
    return _without_mean(inputs, inputs[0].shape[-1])


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
