"""Kinds of calls: what a choice depends on, so that a chooser remembers it and a repeated call costs one look-up.

A kind holds what changes which rung is the fastest, or which rungs take a call: shapes, layouts, dtypes, options and
whether a gradient is wanted. It leaves out numbers that leave the work as it is: `scale`, `eps`, `p`, a seed, the
lengths in a packed batch. A rung that refuses such a number is passed over when it is met.

A layout is a tensor's strides, and whether it begins at an aligned vector. ``is_contiguous`` is quicker to read, but
adds a guard to a graph of symbolic sizes. Where the first tensor's shape and the strides of another leave one of its
sizes open, its number of elements stands for its shape: that is read sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernel_ladder.semantics.precision import tf32_allowed
from kernel_ladder.spec import Inputs, Options

Kind = tuple[Any, ...]
KindOf = Callable[[Inputs, Options, bool], Kind]

#: Tensors that begin at multiples of so many elements begin on 16 bytes. A mask: ``&`` is quicker than ``%``.
BEGIN = 7
FLOAT32 = torch.float32  # a module's global, because calls of products read it


# Every call runs one of these functions. Each spells its attributes out, because a helper or a loop takes longer.


def _row(name: str | None = None) -> KindOf:
    """A kind of call on one tensor, with the option that decides beside it."""

    def kind(inputs: Inputs, options: Options, gradient: bool) -> Kind:
        x: Any = inputs[0]
        option = name and options[name]
        return x.shape, x.stride(), x.storage_offset() & BEGIN, x.dtype, option, gradient

    return kind


def _sum(inputs: Inputs, options: Options, gradient: bool) -> Kind:
    """Two tensors that are broadcast to each other."""
    x: Any = inputs[0]
    other: Any = inputs[1]
    layouts = x.stride(), other.stride()
    begin = (x.storage_offset() | other.storage_offset()) & BEGIN
    return x.shape, other.shape, layouts, begin, x.dtype, gradient


def _two_rows(inputs: Inputs, options: Options, gradient: bool) -> Kind:
    """Two tensors of one shape, and the dtype of the weight that may follow them."""
    x: Any = inputs[0]
    other: Any = inputs[1]
    weight: Any = inputs[2] if len(inputs) > 2 else None
    begin = (x.storage_offset() | other.storage_offset()) & BEGIN
    return x.shape, x.stride(), other.stride(), begin, x.dtype, weight is None or weight.dtype, gradient


def _bias(inputs: Inputs, options: Options, gradient: bool) -> Kind:
    x: Any = inputs[0]
    bias: Any = inputs[1]
    layouts = x.stride(), bias.stride()
    begin = (x.storage_offset() | bias.storage_offset()) & BEGIN
    return x.shape, layouts, begin, x.dtype, options["approximate"], gradient


def _norm(inputs: Inputs, options: Options, gradient: bool) -> Kind:
    """Rows, the dimensions that make one, and the dtypes of weight and bias: float32 ones stand beside 16-bit rows."""
    x: Any = inputs[0]
    weight: Any = inputs[1]
    bias: Any = inputs[2] if len(inputs) > 2 else None
    parameters = weight is None or weight.dtype, bias is None or bias.dtype
    layout, begin = x.stride(), x.storage_offset() & BEGIN
    return x.shape, layout, begin, x.dtype, options["normalized_shape"], parameters, gradient


def _bias_dropout_add(inputs: Inputs, options: Options, gradient: bool) -> Kind:
    x: Any = inputs[0]
    residual: Any = inputs[2]
    layouts = x.stride(), residual.stride()
    begin = (x.storage_offset() | residual.storage_offset()) & BEGIN
    return x.shape, layouts, begin, x.dtype, inputs[3] is None, inputs[4] is None, gradient


def _product(inputs: Inputs, options: Options, gradient: bool) -> Kind:
    a: Any = inputs[0]
    b: Any = inputs[1]
    dtype = a.dtype
    precision = (dtype, tf32_allowed()) if dtype is FLOAT32 else dtype
    begin = (a.storage_offset() | b.storage_offset()) & BEGIN
    return a.shape, b.numel(), a.stride(), b.stride(), begin, precision, options.get("activation"), gradient


def _float8(inputs: Inputs, options: Options, gradient: bool) -> Kind:
    a: Any = inputs[0]
    b: Any = inputs[1]
    scale: Any = inputs[2]
    other: Any = inputs[3]
    begin = (a.storage_offset() | b.storage_offset()) & 15
    return (
        a.shape, b.numel(), a.stride(), b.stride(), begin,
        scale.dim(), other.dim(), inputs[4] is None, options["out_dtype"], gradient,
    )  # fmt: skip


def _loss(inputs: Inputs, options: Options, gradient: bool) -> Kind:
    """Logits; their shape is that of the labels too."""
    x: Any = inputs[0]
    form = not options["label_smoothing"], not options["z_loss"]
    return x.shape, x.stride(), x.storage_offset() & BEGIN, x.dtype, form, gradient


def _linear_loss(inputs: Inputs, options: Options, gradient: bool) -> Kind:
    a: Any = inputs[0]
    b: Any = inputs[1]
    dtype = a.dtype
    precision = (dtype, tf32_allowed()) if dtype is FLOAT32 else dtype
    begin = (a.storage_offset() | b.storage_offset()) & BEGIN
    plain, without_z_loss = not options["label_smoothing"], not options["z_loss"]
    return a.shape, b.numel(), a.stride(), b.stride(), begin, precision, plain, without_z_loss, gradient


def _rope(inputs: Inputs, options: Options, gradient: bool) -> Kind:
    """Rows, how many of their pairs are turned, and whether sequences have offsets of their own."""
    x: Any = inputs[0]
    table: Any = inputs[1]
    offsets = len(inputs) > 2 and inputs[2] is not None
    layout, begin = x.stride(), x.storage_offset() & BEGIN
    return x.shape, layout, begin, x.dtype, table.shape[1], options["interleaved"], offsets, gradient


def _attention(inputs: Inputs, options: Options, gradient: bool) -> Kind:
    """Queries, keys and values, whose strides tell their head dimension.

    Sinks are in it as `return_lse`: the rung returns the log-sum-exp, by which they are joined afterwards.
    """
    query: Any = inputs[0]
    key: Any = inputs[1]
    value: Any = inputs[2]
    mask: Any = inputs[3] if len(inputs) > 3 else None
    get = options.get
    begin = (query.storage_offset() | key.storage_offset() | value.storage_offset()) & BEGIN
    bias = mask is not None and (mask.shape, mask.stride(), mask.dtype, mask.requires_grad)
    return (
        query.shape, key.numel(), query.dtype,
        query.stride(), key.stride(), value.stride(), begin, bias,
        options["is_causal"], get("window_size"), get("return_lse"), get("enable_gqa"), "dropout_p" in options,
        gradient,
    )  # fmt: skip


def _packed(inputs: Inputs, options: Options, gradient: bool) -> Kind:
    """Attention to packed sequences, or to keys in pages.

    The elements of offsets, or of the table of pages, tell the number of sequences.
    """
    query: Any = inputs[0]
    key: Any = inputs[1]
    value: Any = inputs[2]
    places: Any = inputs[3]
    get = options.get
    begin = (query.storage_offset() | key.storage_offset() | value.storage_offset()) & BEGIN
    return (
        query.shape, key.numel(), places.numel(), query.dtype,
        query.stride(), key.stride(), value.stride(), begin,
        options["is_causal"], get("window_size"), get("return_lse"), get("enable_gqa"), get("batch_invariant"),
        gradient,
    )  # fmt: skip


def of_any(inputs: Inputs, options: Options, gradient: bool) -> Kind:
    """The kind of an operation that has none of its own."""
    given = tuple([None if x is None else (x.shape, x.stride(), x.dtype) for x in inputs])
    return given, options.get("dim"), options.get("is_causal"), gradient


#: The kind of a call, by operation. It has no hash where torch.compile traces sizes as symbols.
KINDS: dict[str, KindOf] = {
    "gelu": _row("approximate"),
    "softmax": _row("dim"),
    "matmul": _product,
    "attention": _attention,
    "attention_varlen": _packed,
    "attention_paged": _packed,
    "add": _sum,
    "sum": _row("dim"),
    "layer_norm": _norm,
    "rms_norm": _norm,
    "dropout": _row(),
    "bias_gelu": _bias,
    "cross_entropy": _loss,
    "rope": _rope,
    "swiglu": _two_rows,
    "add_rms_norm": _two_rows,
    "bias_dropout_add_layer_norm": _bias_dropout_add,
    "linear": _product,
    "linear_cross_entropy": _linear_loss,
    "linear_float8": _float8,
}
