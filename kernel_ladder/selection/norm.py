"""Which CUDA rung the normalisations try first, by the length of a row. Measured on an H200 (bench/results/archive).

Lengths are in elements of 16 bits: the rungs `smem_pipeline` and `persistent_cluster` take no others. Rows of float32
stay in registers of a block or of a cluster.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kernel_ladder.spec import Inputs, Options

if TYPE_CHECKING:
    from kernel_ladder.selection.rules import Rule

#: Longest rows that `registers` runs faster than `smem_pipeline`.
REGISTERS = 8192
#: Longest rows of one block of `smem_pipeline`.
PIPELINE = 16384
#: Rows from which `persistent_cluster` pays, and its longest.
PERSISTENT = (65536, 131072)


def _row_length(inputs: Inputs, options: Options) -> int:
    dims = len(options.get("normalized_shape", (0,)))
    assert inputs[0] is not None
    return math.prod(inputs[0].shape[-dims:])


def _is_16_bit(x: torch.Tensor | None) -> bool:
    assert x is not None
    return x.element_size() == 2


def rms_norm(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """`registers`, `smem_pipeline` for 16-bit rows of 8193 to 16384 elements, `cluster` for what outgrows a block."""
    length = _row_length(inputs, options)
    if _is_16_bit(inputs[0]) and REGISTERS < length <= PIPELINE:
        return ("cuda.smem_pipeline", "cuda.registers", "cuda.cluster")
    return ("cuda.registers", "cuda.cluster")


def layer_norm(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """As `rms_norm`; `persistent_cluster` for 16-bit rows of 65537 to 131072 elements."""
    least, most = PERSISTENT
    if _is_16_bit(inputs[0]) and least < _row_length(inputs, options) <= most:
        return ("cuda.persistent_cluster", "cuda.cluster")
    return rms_norm(inputs, options)


def add_rms_norm(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """`registers` up to 8192 elements, and where a block of 1024 threads has no idle one; else `smem_pipeline`."""
    length = _row_length(inputs, options)
    if not _is_16_bit(inputs[0]) or length <= REGISTERS or 14336 < length <= PIPELINE:
        return ("cuda.registers", "cuda.cluster")
    return ("cuda.smem_pipeline", "cuda.registers", "cuda.cluster")


def bias_dropout_add_layer_norm(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """`registers` up to 2048 elements, `smem_pipeline` for longer 16-bit rows, `cluster` for long float32 rows."""
    if _is_16_bit(inputs[0]) and _row_length(inputs, options) > 2048:
        return ("cuda.smem_pipeline", "cuda.registers", "cuda.cluster")
    return ("cuda.registers", "cuda.cluster")


#: Rules of rows that begin on 16 bytes; unaligned_rows.py adds what differs elsewhere.
BY_LENGTH: dict[str, Rule] = {"layer_norm": layer_norm, "rms_norm": rms_norm, "add_rms_norm": add_rms_norm}

RULES = {("bias_dropout_add_layer_norm", "cuda"): bias_dropout_add_layer_norm}
