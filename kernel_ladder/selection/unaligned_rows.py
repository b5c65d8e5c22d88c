"""Rows of 16 bits that begin off 16 bytes: what norms and bias_gelu take by ``backend="auto"``, norms by ``"cuda"``.

The CUDA rungs that keep a row on chip count vectors of 16 bytes from the row's start, and join each of two aligned
ones: half as many threads fit on a multiprocessor. Triton's rungs take 0.2 to 1.0 of the time (H200, 139 to 133,723
elements). ``cuda.block`` keeps no row, so that more threads fit: 0.5 to 0.95 of the time for few rows and long ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_ladder.selection import norm, triton_norm
from kernel_ladder.selection.features import begin_off
from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete, product_of, wants_gradient

if TYPE_CHECKING:
    from kernel_ladder.selection.rules import Rule

#: Elements of bias_gelu from which Triton's kernel is ahead: 0.54 to 0.79 of the time, 1.2 and more below (H200).
LARGE_BIAS_GELU = 2**20
#: Up to so many rows a kernel's length is that of one row's way through a block.
FEW_ROWS = 256
#: The longest rows whose `block` is ahead where rows are few, without and with a gradient. Above them a cluster shares
#: a row, save for one of many.
FEW_OF_BLOCK = (8192, 16384)
#: From so many elements `block` is ahead of many rows, too.
LONG_OF_BLOCK = {"layer_norm": 8192, "add_rms_norm": 4096}


def _columns_and_rows(inputs: Inputs, options: Options) -> tuple[int, int]:
    """The length of a norm's rows, 0 where they are none of 16 bits that begin off 16 bytes; and how many there are."""
    x = inputs[0]
    assert x is not None
    columns = concrete(product_of(options.get("normalized_shape", x.shape[-1:])))
    return (columns, product_of(x.shape) // columns) if x.is_cuda and columns and begin_off(x, columns) else (0, 0)


def _triton_for(rule: Rule) -> Rule:
    def norm_of(inputs: Inputs, options: Options) -> tuple[str, ...]:
        """Prefers the triton level for 16-bit rows that begin off 16 bytes."""
        columns, _ = _columns_and_rows(inputs, options)
        return (*rule(inputs, options), "triton.fused") if columns else ()

    return norm_of


def bias_gelu(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Prefers ``triton.fused`` for many 16-bit rows that begin off 16 bytes."""
    columns, rows = _columns_and_rows(inputs, options)
    return ("triton.fused",) if columns * rows >= LARGE_BIAS_GELU else ()


def long_rows_of_fusion(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Prefers ``triton.online`` for 16-bit rows off 16 bytes of more than 8192 elements."""
    columns, _ = _columns_and_rows(inputs, options)
    return ("triton.online",) if columns > triton_norm.FUSED_BACKWARD else ()


def _block_for(op: str, rule: Rule) -> Rule:
    long = LONG_OF_BLOCK.get(op)

    def norm_of(inputs: Inputs, options: Options) -> tuple[str, ...]:
        columns, rows = _columns_and_rows(inputs, options)
        if rows > FEW_ROWS:
            block = long is not None and columns > long
        else:
            block = 0 < columns <= FEW_OF_BLOCK[wants_gradient(*inputs)]
        return (*(("cuda.block",) if block else ()), *rule(inputs, options))

    norm_of.__doc__ = f"{(rule.__doc__ or '').strip()}\n\nOf rows off 16 bytes `block` for few of them, and long ones."
    return norm_of


RULES: dict[tuple[str, str], Rule] = {
    ("layer_norm", "auto"): _triton_for(triton_norm.layer_norm),
    ("rms_norm", "auto"): _triton_for(triton_norm.rms_norm),
    ("add_rms_norm", "auto"): _triton_for(triton_norm.add_rms_norm),
    ("bias_dropout_add_layer_norm", "auto"): long_rows_of_fusion,
    ("bias_gelu", "auto"): bias_gelu,
    **{(op, "cuda"): _block_for(op, rule) for op, rule in norm.BY_LENGTH.items()},
}
