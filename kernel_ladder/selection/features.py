"""Features of a call, by which a table of measured choices finds the nearest call that was measured.

A category must be the same; sizes are compared by their ratios. An operation without features has no table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernel_ladder.semantics.masks import NO_WINDOW
from kernel_ladder.semantics.matmul_shapes import as_matrices, batch_shape
from kernel_ladder.semantics.precision import tf32_allowed
from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete

#: TMA and vectorized loads read rows that begin at multiples of these bytes.
ALIGNMENT = 16
#: Columns of the usual tiles of a product; half as many of the inner dimension are a stage.
TILE = 128


class Features(NamedTuple):
    """What must agree, in words, and the sizes of a call."""

    category: str
    sizes: tuple[int, ...]


def _sizes(*sizes: Any) -> tuple[int, ...]:
    return tuple([max(concrete(size), 1) for size in sizes])


def _bits(x: torch.Tensor) -> str:
    return f"{8 * x.element_size()} bits"


def _precision(x: torch.Tensor) -> str:
    """The bits of a product's operands; tf32 where float32 may run on tensor cores."""
    return "tf32" if x.dtype is torch.float32 and tf32_allowed() else _bits(x)


def is_aligned(x: torch.Tensor) -> bool:
    """Whether a matrix has a dimension of stride 1, and lines along it that begin at multiples of ALIGNMENT bytes."""
    grid = ALIGNMENT // x.element_size()
    (rows, columns), (row, column) = (_sizes(*x.shape[-2:]), _sizes(*x.stride()[-2:]))
    if column == 1 or columns == 1:
        return rows == 1 or row % grid == 0
    return row == 1 and column % grid == 0


def _shape_of_product(aligned: bool, n: Any, k: Any) -> str:
    """How a product's columns and inner dimension fit: in whole tiles, in whole vectors, or neither."""
    if not aligned:
        return "unaligned"
    return "ragged tiles" if concrete(n) % TILE or concrete(k) % (TILE // 2) else "whole tiles"


def _matmul(inputs: Inputs, options: Options) -> Features:
    a, b = as_matrices(inputs[0], inputs[1])  # type: ignore[arg-type]
    batches = math.prod(concrete(size) for size in batch_shape(a, b))
    words = [_precision(a), _shape_of_product(is_aligned(a) and is_aligned(b), b.shape[-1], a.shape[-1])]
    return Features(", ".join(words), _sizes(batches, a.shape[-2], b.shape[-1], a.shape[-1]))


def _linear(inputs: Inputs, options: Options) -> Features:
    x, weight = inputs[:2]
    assert x is not None
    assert weight is not None
    k = concrete(x.shape[-1])
    rows = math.prod(concrete(size) for size in x.shape[:-1])
    aligned = k * x.element_size() % ALIGNMENT == 0 and is_aligned(weight)
    activation = "activation" if options.get("activation") is not None else "no activation"
    words = [_precision(x), _shape_of_product(aligned, weight.shape[0], k), activation]
    return Features(", ".join(words), _sizes(rows, weight.shape[0], k))


def _attention(inputs: Inputs, options: Options) -> Features:
    query, key, value = inputs[:3]
    assert query is not None
    assert key is not None
    assert value is not None
    heads = math.prod(concrete(size) for size in query.shape[:-2])
    window = tuple(options.get("window_size", NO_WINDOW)) != NO_WINDOW
    seen = "window" if window else "causal" if options.get("is_causal") else "all keys"
    mask = "mask" if len(inputs) > 3 and inputs[3] is not None else "no mask"
    grouped = "grouped" if query.shape[-3] != key.shape[-3] else "as many heads"
    sizes = (heads, query.shape[-2], key.shape[-2], query.shape[-1], value.shape[-1])
    return Features(", ".join([_bits(query), seen, mask, grouped]), _sizes(*sizes))


def _rows(*words: str, dims: Callable[[torch.Tensor, Options], int] = lambda x, options: 1) -> Any:
    """Features of an operation on rows: `dims` last dimensions make a row; `words` name options that must agree."""

    def features(inputs: Inputs, options: Options) -> Features:
        x = inputs[0]
        assert x is not None
        row = dims(x, options)
        length = math.prod(concrete(size) for size in x.shape[x.dim() - row :])
        count = math.prod(concrete(size) for size in x.shape[: x.dim() - row])
        return Features(
            ", ".join([_bits(x), *(f"{word} {options.get(word)}" for word in words)]), _sizes(count, length)
        )

    return features


def _softmax(inputs: Inputs, options: Options) -> Features:
    x = inputs[0]
    assert x is not None
    dim = options["dim"] % max(x.dim(), 1)
    last = dim == x.dim() - 1
    length = x.shape[dim] if x.dim() else 1
    words = [_bits(x), "rows" if last else "columns"]
    return Features(", ".join(words), _sizes(concrete(x.numel()) // max(concrete(length), 1), length))


def _add(inputs: Inputs, options: Options) -> Features:
    x, other = inputs[:2]
    assert x is not None
    assert other is not None
    words = [_bits(x), "two tensors" if x.shape == other.shape else "broadcast"]
    length = x.shape[-1] if x.dim() else 1
    return Features(", ".join(words), _sizes(concrete(x.numel()) // max(concrete(length), 1), length))


FEATURES: dict[str, Callable[[Inputs, Options], Features]] = {
    "gelu": _rows("approximate"),
    "softmax": _softmax,
    "matmul": _matmul,
    "attention": _attention,
    "add": _add,
    "layer_norm": _rows(dims=lambda x, options: len(options["normalized_shape"])),
    "rms_norm": _rows(dims=lambda x, options: len(options["normalized_shape"])),
    "dropout": _rows(),
    "bias_gelu": _rows("approximate"),
    "swiglu": _rows(),
    "add_rms_norm": _rows(),
    "bias_dropout_add_layer_norm": _rows(),
    "linear": _linear,
}
