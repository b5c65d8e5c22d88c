"""Features of a call, by which a table of measured choices finds the nearest call that was measured.

A category must be the same; sizes are compared by their ratios. Every operation has features: without, it has no table.
A call without a category has no entry: its time in a CUDA graph does not tell what it takes, and the rules choose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernel_ladder.selection.attention import decodes
from kernel_ladder.semantics.cross_entropy import class_dim
from kernel_ladder.semantics.masks import NO_WINDOW, keys_of_window
from kernel_ladder.semantics.matmul_shapes import as_matrices, batch_shape
from kernel_ladder.semantics.precision import tf32_allowed
from kernel_ladder.semantics.reduction import reduced_dims
from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete, product_of

#: TMA and vectorized loads read rows that begin at multiples of these bytes.
ALIGNMENT = 16
#: Columns of the usual tiles of a product; half as many of the inner dimension are a stage.
TILE = 128


class Features(NamedTuple):
    """What must agree, in words or none at all, and the sizes of a call."""

    category: str
    sizes: tuple[int, ...]


def _sizes(*sizes: Any) -> tuple[int, ...]:
    return tuple([max(concrete(size), 1) for size in sizes])


def _bits(x: torch.Tensor) -> str:
    return f"{8 * x.element_size()} bits"


def _precision(x: torch.Tensor) -> str:
    """The bits of a product's operands; tf32 where float32 may run on tensor cores."""
    return "tf32" if x.dtype is torch.float32 and tf32_allowed() else _bits(x)


def begin_off(x: torch.Tensor, length: int) -> bool:
    """Whether dense rows of 16 bits and this length begin off 16 bytes."""
    return x.element_size() == 2 and 2 * length % ALIGNMENT != 0


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
    batches = product_of(batch_shape(a, b))
    words = [_precision(a), _shape_of_product(is_aligned(a) and is_aligned(b), b.shape[-1], a.shape[-1])]
    return Features(", ".join(words), _sizes(batches, a.shape[-2], b.shape[-1], a.shape[-1]))


def _linear(inputs: Inputs, options: Options) -> Features:
    x, weight = inputs[:2]
    assert x is not None
    assert weight is not None
    k, rows = concrete(x.shape[-1]), product_of(x.shape[:-1])
    aligned = k * x.element_size() % ALIGNMENT == 0 and is_aligned(weight)
    activation = "activation" if options.get("activation") is not None else "no activation"
    words = [_precision(x), _shape_of_product(aligned, weight.shape[0], k), activation]
    return Features(", ".join(words), _sizes(rows, weight.shape[0], k))


def _linear_float8(inputs: Inputs, options: Options) -> Features:
    """As of a linear layer; scales of rows and of whole tensors, and output dtypes, are different categories."""
    x, weight, scale = inputs[:3]
    assert x is not None
    assert weight is not None
    assert scale is not None
    n, k = weight.shape
    aligned = concrete(k) % ALIGNMENT == 0 and is_aligned(weight)
    scales = "a scale a row" if scale.dim() else "one scale"
    dtype = str(options["out_dtype"]).removeprefix("torch.")
    return Features(f"{dtype}, {_shape_of_product(aligned, n, k)}, {scales}", _sizes(product_of(x.shape[:-1]), n, k))


def _linear_cross_entropy(inputs: Inputs, options: Options) -> Features:
    x, weight, target = inputs[:3]
    assert x is not None
    assert weight is not None
    assert target is not None
    return Features(_precision(x), _sizes(product_of(target.shape), x.shape[-1], weight.shape[0]))


def _seen(options: Options) -> str:
    """Which keys a query sees."""
    window = tuple(options.get("window_size") or NO_WINDOW) != NO_WINDOW
    return "window" if window else "causal" if options.get("is_causal") else "all keys"


def _heads(queries: Any, keys: Any) -> str:
    return "grouped" if concrete(queries) != concrete(keys) else "as many heads"


def _attention(inputs: Inputs, options: Options) -> Features:
    query, key, value = inputs[:3]
    assert query is not None
    assert key is not None
    assert value is not None
    mask = "mask" if len(inputs) > 3 and inputs[3] is not None else "no mask"
    if mask == "no mask" and decodes(inputs):  # of a cache whose length may be new at every step
        return Features("", ())
    words = [_bits(query), _seen(options), mask, _heads(query.shape[-3], key.shape[-3])]
    keys, seen = concrete(key.shape[-2]), keys_of_window(options)  # through a window, a call's length says little
    keys = keys if seen is None else min(keys, seen)
    sizes = (product_of(query.shape[:-2]), query.shape[-2], keys, query.shape[-1], value.shape[-1])
    return Features(", ".join(words), _sizes(*sizes))


def _attention_varlen(inputs: Inputs, options: Options) -> Features:
    """Heads, sequences, all queries, all keys and head dimensions; offsets on a GPU are not read."""
    query, key, value, offsets = inputs[:4]
    assert query is not None
    assert key is not None
    assert value is not None
    assert offsets is not None
    (queries, heads, width), sequences = query.shape, concrete(offsets.shape[0]) - 1
    words = [_bits(query), _seen(options), _heads(heads, key.shape[1])]
    return Features(", ".join(words), _sizes(heads, sequences, queries, key.shape[0], width, value.shape[-1]))


def _attention_paged(inputs: Inputs, options: Options) -> Features:
    """Sequences, heads, new tokens, the keys that a row of the table has room for, a page's, and head dimensions."""
    query, keys, values, table = inputs[:4]
    assert query is not None
    assert keys is not None
    assert values is not None
    assert table is not None
    (batch, heads, queries, width), page = query.shape, keys.shape[1]
    words = [_bits(query), _seen(options), _heads(heads, keys.shape[2])]
    if options.get("batch_invariant"):
        words.append("batch invariant")
    room = concrete(table.shape[1]) * concrete(page)
    return Features(", ".join(words), _sizes(batch, heads, queries, room, page, width, values.shape[-1]))


def _begin(x: torch.Tensor, length: Any) -> list[str]:
    """A word for rows that begin off 16 bytes. They have kernels, and an order of speed, of their own."""
    return ["off 16 bytes"] if begin_off(x, concrete(length)) else []


def _rows(*words: str, dims: Callable[[torch.Tensor, Options], int] = lambda x, options: 1) -> Any:
    """Features of an operation on rows: `dims` last dimensions make a row; `words` name options that must agree."""

    def features(inputs: Inputs, options: Options) -> Features:
        x = inputs[0]
        assert x is not None
        row = dims(x, options)
        length, count = product_of(x.shape[x.dim() - row :]), product_of(x.shape[: x.dim() - row])
        known = [_bits(x), *(f"{word} {options.get(word)}" for word in words), *_begin(x, length)]
        return Features(", ".join(known), _sizes(count, length))

    return features


def _softmax(inputs: Inputs, options: Options) -> Features:
    x = inputs[0]
    assert x is not None
    dim = options["dim"] % max(x.dim(), 1)
    last = dim == x.dim() - 1
    length = x.shape[dim] if x.dim() else 1
    words = [_bits(x), "rows" if last else "columns", *(_begin(x, length) if last else [])]
    return Features(", ".join(words), _sizes(concrete(x.numel()) // max(concrete(length), 1), length))


def _add(inputs: Inputs, options: Options) -> Features:
    x, other = inputs[:2]
    assert x is not None
    assert other is not None
    alike = _sizes(*x.shape) == _sizes(*other.shape)
    words = [_bits(x), "two tensors" if alike else "broadcast"]
    length = x.shape[-1] if x.dim() else 1
    return Features(", ".join(words), _sizes(concrete(x.numel()) // max(concrete(length), 1), length))


def _sum(inputs: Inputs, options: Options) -> Features:
    """Results, and the elements of each. Sums of last dimensions read rows, those of first ones columns."""
    x = inputs[0]
    assert x is not None
    summed = reduced_dims(options["dim"], x.dim())
    kept = [d for d in range(x.dim()) if d not in summed]
    form = "rows" if kept and summed[0] > kept[-1] else "columns" if kept and summed[-1] < kept[0] else "mixed"
    sizes = product_of(x.shape[d] for d in kept), product_of(x.shape[d] for d in summed)
    return Features(f"{_bits(x)}, {form if kept else 'all'}", _sizes(*sizes))


def _cross_entropy(inputs: Inputs, options: Options) -> Features:
    """Rows and classes. Smoothed labels need the sum of all logits, too."""
    x, target = inputs[:2]
    assert x is not None
    assert target is not None
    place = class_dim(x)
    words = [_bits(x), "rows" if place == x.dim() - 1 else "columns"]
    words.append("smoothed" if options["label_smoothing"] else "not smoothed")
    return Features(", ".join(words), _sizes(product_of(target.shape), x.shape[place]))


def _rope(inputs: Inputs, options: Options) -> Features:
    x = inputs[0]
    assert x is not None
    pairs = "neighbours" if options["interleaved"] else "halves"
    offsets = ", offsets" if len(inputs) > 2 and inputs[2] is not None else ""
    return Features(f"{_bits(x)}, {pairs}{offsets}", _sizes(product_of(x.shape[:-1]), x.shape[-1]))


FEATURES: dict[str, Callable[[Inputs, Options], Features]] = {
    "gelu": _rows("approximate"),
    "softmax": _softmax,
    "matmul": _matmul,
    "attention": _attention,
    "attention_varlen": _attention_varlen,
    "attention_paged": _attention_paged,
    "add": _add,
    "sum": _sum,
    "layer_norm": _rows(dims=lambda x, options: len(options["normalized_shape"])),
    "rms_norm": _rows(dims=lambda x, options: len(options["normalized_shape"])),
    "dropout": _rows(),
    "bias_gelu": _rows("approximate"),
    "cross_entropy": _cross_entropy,
    "rope": _rope,
    "swiglu": _rows(),
    "add_rms_norm": _rows(),
    "bias_dropout_add_layer_norm": _rows(),
    "linear": _linear,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_float8": _linear_float8,
}
