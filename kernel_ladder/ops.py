"""The public functions: PyTorch's own signatures, plus ``backend``."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from kernel_ladder import autocast, autograd, operators, selection, table
from kernel_ladder.errors import raise_for_memory
from kernel_ladder.semantics import sinks as of_sinks
from kernel_ladder.semantics.masks import NO_WINDOW, causal_of, is_causal_bias
from kernel_ladder.semantics.reduction import Dim
from kernel_ladder.spec import DTYPES, Inputs, each, names_of
from kernel_ladder.tracing import PLAIN
from kernel_ladder.transforms import transforms_active


def _call(op: str, backend: str | None, inputs: Inputs, options: dict[str, Any]) -> Any:
    compiling = is_compiling()  # read once: it costs as much as is_neg(), which torch.compile cannot trace
    if compiling:
        if not transforms_active() and forward_ad._current_level < 0 and not any(map(_is_sharded, inputs)):
            return operators.call(op, backend, inputs, options)
        if autocast.applies_to(inputs):
            return autocast.call(lambda given: _call(op, backend, given, options), op, inputs)
        restated = table.spec(op).check(*inputs, **options)
    else:
        if autocast.is_on():
            return autocast.call(lambda given: _call(op, backend, given, options), op, inputs)
        restated = (table.specs.get(op) or table.spec(op)).check(*inputs, **options)
    if restated is not None:
        return restated.output(_call(op, backend, restated.inputs, options))
    negated = False
    for x in inputs:
        if x is not None:
            if type(x) not in PLAIN and _is_sharded(x):
                return _call_sharded(op, backend, inputs, options)
            negated = negated or (not compiling and x.is_neg())
    if negated:  # kernels read memory, where a lazy sign is not applied
        inputs = each(torch.resolve_neg, inputs)
    variant = selection.choose(op, backend, inputs, options, compiling)
    try:
        return autograd.run(variant, inputs, options)
    except RuntimeError as error:
        raise_for_memory(error)
        raise


def _is_sharded(x: Any) -> bool:
    """Whether `x` is a DTensor. Its module takes seconds to import, which a program that has one has done."""
    return type(x).__name__ == "DTensor"


def _call_sharded(op: str, backend: str | None, inputs: Inputs, options: dict[str, Any]) -> Any:
    """A call on DTensors whose arguments are checked."""
    from kernel_ladder.distributed import dtensor

    name = table.asked_for(op, backend)

    def run(local: Inputs) -> Any:
        return _call(op, backend, local, options)

    def anew(other: str, inputs: Inputs, options: dict[str, Any]) -> Any:
        return _call(other, name if other == op else name.partition(".")[0], inputs, options)

    return dtensor.call(op, inputs, options, run, anew)


# Options are cache keys and kernel constants, so numbers of other libraries are converted to Python's. Other values
# and bools stay unchanged for the check to judge. Most calls pass Python's numbers and skip these functions.


def _number(x: Any) -> Any:
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        return x
    try:
        return float(x)
    except OverflowError:  # an integer
        return x


def _int(n: Any) -> Any:
    if type(n) is int or isinstance(n, bool) or not isinstance(n, numbers.Integral):
        return n
    return operator.index(n)


def _ints(given: Any) -> Any:
    """One integer, or the integers of a list or tuple as a tuple."""
    if not isinstance(given, (tuple, list)):
        return _int(given)
    for n in given:
        if type(n) is not int:
            return tuple(_int(n) for n in given)
    return tuple(given)


# Arguments of PyTorch's functions that are accepted by name and refused, or resolved before a rung sees the call.


def _no_out(op: str, out: Any) -> None:
    raise ValueError(
        f"{op}: argument `out` must be None, got {type(out).__name__}: the result is a tensor of its own; "
        "copy it with `out.copy_(...)`"
    )


def _to_dtype(op: str, input: Any, dtype: Any) -> Any:
    """The input converted to `dtype`, as PyTorch does before it computes."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{op}: argument `dtype` must be a torch.dtype or None, got {type(dtype).__name__}")
    if dtype not in DTYPES:
        raise TypeError(f"{op}: argument `dtype` is {names_of([dtype])}; accepted are {names_of(DTYPES)} and None")
    return input.to(dtype) if isinstance(input, torch.Tensor) else input


def gelu(
    input: torch.Tensor, *, approximate: str = "none", out: None = None, backend: str | None = None
) -> torch.Tensor:
    """Gaussian error linear unit, elementwise: ``x · Φ(x)``, as :func:`torch.nn.functional.gelu`.

    Args:
        input: any shape and strides; float16, bfloat16, float32 (float64 at the torch and compile levels).
        approximate: ``"none"`` for the exact form with erf, ``"tanh"`` for the approximation with tanh.
        out: must be None; the result is a new tensor.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the same shape and dtype. Differentiable once.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, arXiv:1606.08415.
    """
    if out is not None:
        _no_out("gelu", out)
    return _call("gelu", backend, (input,), {"approximate": approximate})


def softmax(
    input: torch.Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    *,
    out: None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Softmax along one dimension: ``exp(x − max x) / Σ exp(x − max x)``, as :func:`torch.softmax`.

    Args:
        input: any shape and strides; float16, bfloat16, float32 (float64 at the torch and compile levels).
        dim: the dimension that sums to one, from ``-input.dim()`` to ``input.dim() - 1``.
        dtype: the dtype to which `input`, of any dtype, is converted first, in a separate pass; None: no conversion.
        out: must be None; the result is a new tensor.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the same shape, and of `dtype` or the input's. A row of −inf gives NaN, as in PyTorch.
        Differentiable once.
    """
    if dtype is not None:
        input = _to_dtype("softmax", input, dtype)
        if autocast.is_on() and isinstance(input, torch.Tensor):
            with autocast.off(input.device.type):  # the dtype that is asked for stands
                return softmax(input, dim, out=out, backend=backend)
    if out is not None:
        _no_out("softmax", out)
    return _call("softmax", backend, (input,), {"dim": dim if type(dim) is int else _int(dim)})


def matmul(input: torch.Tensor, other: torch.Tensor, *, out: None = None, backend: str | None = None) -> torch.Tensor:
    """Matrix product with the shapes of :func:`torch.matmul`: vectors, matrices and broadcast batches of them.

    Args:
        input: ``(K,)``, ``(M, K)`` or ``(..., M, K)``; float16, bfloat16, float32
            (float64 at the torch and compile levels); any strides.
        other: ``(K,)``, ``(K, N)`` or ``(..., K, N)``, of the same dtype on the same device.
        out: must be None; the result is a new tensor.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        The product, accumulated in float32 or better. Float32 inputs are multiplied as float32 unless
        ``torch.backends.cuda.matmul.allow_tf32`` permits tf32. Differentiable once.
    """
    if out is not None:
        _no_out("matmul", out)
    return _call("matmul", backend, (input, other), {})


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | str = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: Sequence[int] | None = NO_WINDOW,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    seed: int | None = None,
    backend: str | None = None,
) -> Any:
    """``softmax(query · keyᵀ · scale + mask) · value``, as :func:`torch.nn.functional.scaled_dot_product_attention`.

    A query that sees no key gives a row of zeros.

    Args:
        query: ``(B, H, S_q, D)``, or with any other number of batch dimensions, or ``(S_q, D)``; float16, bfloat16,
            float32 (float64 at the torch and compile levels); any strides.
        key: ``(B, H_kv, S_k, D)``. The batch dimensions of all three broadcast. So do the heads without `enable_gqa`.
            If key and value are broadcast, their gradients are computed in the broadcast shapes and then summed.
        value: ``(B, H_kv, S_k, D_v)``.
        attn_mask: broadcasts to the scores ``(B, H, S_q, S_k)`` and is read in place. Boolean, True where a query sees
            a key; or of the query's dtype, added to the scores; or PyTorch's own
            :func:`torch.nn.attention.bias.causal_upper_left` or ``causal_lower_right``, which is never expanded.
        dropout_p: the probability to drop a weight, from 0 up to but not including 1; the others are divided by 1 − p,
            after the softmax. Above 0 it needs `seed`, and is taken by ``torch.naive``, ``compile.formula``,
            ``triton.flash`` and ``cuda.flash``. It is applied in every call: pass 0 outside of training.
        is_causal: True: query i sees keys 0 … i, aligned to the upper left as in PyTorch. ``"lower_right"``: the last
            query sees every key, query i keys 0 … i + S_k − S_q, as with ``causal_lower_right``. Both combine with a
            mask.
        scale: a positive factor on the scores; ``1/√D`` if None.
        enable_gqa: allow H to be a multiple of H_kv: consecutive query heads share one key and value head. With one
            head for all queries, the gradient has that one head.
        window_size: (left, right): query i sees only keys i + S_k − S_q − left … i + S_k − S_q + right. The window is
            aligned to the lower right, as FlashAttention's, whatever `is_causal` says. −1 or None: no limit.
        return_lse: also return the logarithm of each row's sum of exponentials.
        sinks: ``(H,)``, float32 or the query's dtype: one logit a head, which joins the softmax of each of its rows and
            has no value, as in gpt-oss. Differentiable. It takes one pass over the output, from the log-sum-exp.
        seed: an integer from 0 to 2⁶³ − 1, with `dropout_p`: it gives the mask of :func:`dropout` for a tensor of the
            shape ``(B, H, S_q, S_k)`` of the weights. The backward pass draws it again.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor ``(B, H, S_q, D_v)``, or ``(S_q, D_v)`` for matrices. With `return_lse` also one of shape
        ``(B, H, S_q)``, or ``(S_q,)``, in float32 (float64 for float64), −inf for a query that sees no key.
        Differentiable once, in query, key and value, and in an additive mask except at the cuda level.

    Source: Vaswani et al., Attention Is All You Need, arXiv:1706.03762.
    """
    if attn_mask is not None and type(attn_mask) is not torch.Tensor and is_causal_bias(attn_mask):
        is_causal, attn_mask = causal_of("attention", attn_mask, is_causal, query, key), None
    options = {
        "is_causal": is_causal,
        "scale": None if scale is None else _number(scale),
        "enable_gqa": enable_gqa,
        "window_size": NO_WINDOW if window_size is None or window_size is NO_WINDOW else _ints(window_size),
        "return_lse": return_lse,
    }
    if type(dropout_p) is not float or dropout_p or seed is not None:
        options |= _dropping(dropout_p, seed)
    inputs = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if sinks is not None:
        return _with_sinks("attention", backend, inputs, options, sinks)
    return _call("attention", backend, inputs, options)


def _dropping(dropout_p: Any, seed: Any) -> dict[str, Any]:
    """The options of a call that drops weights, and none of one that keeps all; what is wrong is left to the check."""
    p, seed = _number(dropout_p), seed if type(seed) is int else _int(seed)
    if type(p) is float and p == 0 and (seed is None or (type(seed) is int and seed >= 0)):
        return {}
    return {"dropout_p": p, "seed": seed}


def _with_sinks(op: str, backend: str | None, inputs: Inputs, options: dict[str, Any], sinks: Any) -> Any:
    packed = op == "attention_varlen"
    query, key, value, *_ = inputs
    heads = of_sinks.heads_of(query, key, value, options["enable_gqa"] is True, packed)
    if heads is not None:
        of_sinks.check(op, query, heads, sinks)
    return_lse = options["return_lse"]
    options = {**options, "return_lse": True if return_lse is False else return_lse}
    output, lse = _call(op, backend, inputs, options)
    return of_sinks.with_sinks(output, lse, sinks, packed, return_lse)


def attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: Sequence[int] | None = NO_WINDOW,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> Any:
    """:func:`attention` within sequences of different lengths, packed one after the other without padding.

    Args:
        query: ``(T_q, H, D)``, the queries of all sequences; float16, bfloat16, float32 (float64 at the torch and
            compile levels); any strides.
        key: ``(T_k, H_kv, D)``.
        value: ``(T_k, H_kv, D_v)``.
        cu_seqlens_q: ``(B + 1,)``, int32, dense, from 0 to T_q, never decreasing: sequence b has the queries
            ``cu_seqlens_q[b] : cu_seqlens_q[b + 1]``. Offsets on the CPU are checked. Offsets on a GPU are clamped to
            0 … T_q when they are read. There, wrong offsets give wrong rows, and rows of no sequence are undefined, but
            no memory outside the tensors is read or written.
        cu_seqlens_k: likewise for keys and values.
        max_seqlen_q: at least the longest number of queries, checked as the offsets are. None means T_q, which is
            correct but slower.
        max_seqlen_k: likewise for keys.
        is_causal: within each sequence, aligned to the lower right: the last query sees every key.
        scale: a positive factor on the scores; ``1/√D`` if None.
        enable_gqa: allow H to be a multiple of H_kv: consecutive query heads share one key and value head.
        window_size: as for :func:`attention`, within each sequence.
        return_lse: also return the logarithm of each row's sum of exponentials.
        sinks: ``(H,)``, as for :func:`attention`.
        dropout_p: must be 0: attention weights are not dropped.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor ``(T_q, H, D_v)``. With `return_lse` also one of shape ``(H, T_q)`` in float32 (float64 for float64).
        A query that sees no key gives zeros and −inf. Differentiable once, in query, key and value.

    Source: Dao, FlashAttention-2, arXiv:2307.08691; its ``flash_attn_varlen_func`` has the same arguments.
    """
    if type(dropout_p) is not float or dropout_p:
        _no_dropout("attention_varlen", dropout_p)
    options = {
        "max_seqlen_q": None if max_seqlen_q is None else _int(max_seqlen_q),
        "max_seqlen_k": None if max_seqlen_k is None else _int(max_seqlen_k),
        "is_causal": is_causal,
        "scale": None if scale is None else _number(scale),
        "enable_gqa": enable_gqa,
        "window_size": NO_WINDOW if window_size is None or window_size is NO_WINDOW else _ints(window_size),
        "return_lse": return_lse,
    }
    inputs = (query, key, value, cu_seqlens_q, cu_seqlens_k)
    if sinks is not None:
        return _with_sinks("attention_varlen", backend, inputs, options, sinks)
    return _call("attention_varlen", backend, inputs, options)


def _no_dropout(op: str, dropout_p: Any) -> None:
    wrong = isinstance(dropout_p, bool) or not isinstance(dropout_p, numbers.Real)
    if wrong or dropout_p != 0:
        given = type(dropout_p).__name__ if wrong else dropout_p
        error = TypeError if wrong else ValueError
        raise error(f"{op}: argument `dropout_p` must be 0: weights are not dropped here, got {given}")


def add(
    input: torch.Tensor,
    other: torch.Tensor,
    *,
    alpha: float = 1,
    out: None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Elementwise sum of two tensors, as :func:`torch.add` without factors, numbers and mixed dtypes.

    Args:
        input: any shape and strides; float16, bfloat16, float32 (float64 at the torch and compile levels).
        other: of the same dtype on the same device, of a shape that broadcasts with that of `input`.
        alpha: must be 1; multiply `other` beforehand.
        out: must be None; the result is a new tensor.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the broadcast shape and of the same dtype. Differentiable once. The gradient of an operand of that
        shape is the output's gradient itself, not a copy.
    """
    if type(alpha) is not int or alpha != 1:
        _no_alpha(alpha)
    if type(other) is not torch.Tensor and isinstance(other, numbers.Number):
        raise TypeError(
            f"add: argument `other` must be a torch.Tensor, got {type(other).__name__}; give a number as a tensor of "
            f"no dimension, `torch.tensor({other!r}, dtype=input.dtype, device=input.device)`"
        )
    if out is not None:
        _no_out("add", out)
    return _call("add", backend, (input, other), {})


def _no_alpha(alpha: Any) -> None:
    if isinstance(alpha, bool) or not isinstance(alpha, numbers.Real):
        raise TypeError(f"add: argument `alpha` must be 1, got {type(alpha).__name__}")
    if alpha != 1:
        raise ValueError(f"add: argument `alpha` must be 1, got {alpha}; multiply `other` by it beforehand")


def sum(
    input: torch.Tensor,
    dim: Dim | list[int] = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Sum over one dimension, several or all, as :func:`torch.sum`.

    Args:
        input: any shape and strides; float16, bfloat16, float32 (float64 at the torch and compile levels).
        dim: the dimensions to sum over, each from ``-input.dim()`` to ``input.dim() - 1``; None or ``()`` for all.
        keepdim: keep them, with size 1.
        dtype: the dtype to which `input`, of any dtype, is converted first, in a separate pass; None: no conversion.
        out: must be None; the result is a new tensor.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the other dimensions, in `dtype` or the input's, accumulated in float32 or wider and rounded once.
        An empty sum is 0. Differentiable once; the gradient is a broadcast view, not a copy. The cuda and triton levels
        add in a fixed order: the same tensor gives the same bits.
    """
    if dtype is not None:
        input = _to_dtype("sum", input, dtype)
        if autocast.is_on() and isinstance(input, torch.Tensor):
            with autocast.off(input.device.type):  # the dtype that is asked for stands
                return sum(input, dim, keepdim, out=out, backend=backend)
    if out is not None:
        _no_out("sum", out)
    dims = dim if dim is None or type(dim) is int else _ints(dim)
    return _call("sum", backend, (input,), {"dim": dims, "keepdim": keepdim})


def dropout(
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    seed: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Dropout: each element is dropped with probability p, the others are divided by 1 − p.

    As :func:`torch.nn.functional.dropout`, with a seed instead of a global generator. One seed gives one mask for a
    shape, at every backend and on every device. The backward pass draws it again, so no mask is stored. Every call
    needs a seed of its own. :mod:`kernel_ladder.semantics.philox` defines the mask, bit for bit.

    Args:
        input: any shape and strides; float16, bfloat16, float32 (float64 at the torch and compile levels).
        p: the probability to drop an element, from 0 up to but not including 1.
        training: if False, `input` itself is returned, and no seed is needed.
        inplace: must be False; the result is a new tensor.
        seed: an integer from 0 to 2⁶³ − 1. Inside ``torch.compile`` it may change from call to call.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the same shape and dtype. A dropped NaN or infinity gives NaN, as in PyTorch. Differentiable once.

    Source: Srivastava et al., Dropout, JMLR 15 (2014); Salmon et al., Parallel Random Numbers, SC'11.
    """
    options = {"p": p if type(p) is float else _number(p), "seed": seed if type(seed) is int else _int(seed)}
    if inplace is not False:
        _not_inplace("dropout", inplace)
    if training is not True:
        return _not_training("dropout", training, backend, input, options)
    return _call("dropout", backend, (input,), options)


def _not_inplace(op: str, inplace: Any) -> None:
    if not isinstance(inplace, bool):
        raise TypeError(f"{op}: argument `inplace` must be False, got {type(inplace).__name__}")
    raise ValueError(f"{op}: argument `inplace` must be False, got True: the result is a tensor of its own")


def _not_training(op: str, training: Any, backend: str | None, input: torch.Tensor, options: dict[str, Any]) -> Any:
    """The input, if the call's other arguments are valid and some rung takes the call."""
    if not isinstance(training, bool):
        raise TypeError(f"{op}: argument `training` must be a bool, got {type(training).__name__}")
    if options["seed"] is None:
        options["seed"] = 0
    if is_compiling():
        _call(op, backend, (input,), options)  # only for its errors: the compiler removes the unused result
        return input
    table.spec(op).check(input, **options)
    selection.choose(op, backend, (input,), options, False)
    return input


def bias_gelu(
    input: torch.Tensor, bias: torch.Tensor, *, approximate: str = "none", backend: str | None = None
) -> torch.Tensor:
    """``gelu(input + bias)``, as :func:`torch.nn.functional.gelu` of the sum.

    Args:
        input: ``(..., N)``, any strides; float16, bfloat16, float32 (float64 at the torch and compile levels).
        bias: ``(N,)``, of the same dtype on the same device.
        approximate: ``"none"`` for the exact form with erf, ``"tanh"`` for the approximation with tanh.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the input's shape and dtype. Differentiable once.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, arXiv:1606.08415.
    """
    return _call("bias_gelu", backend, (input, bias), {"approximate": approximate})


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """``silu(gate) · up`` elementwise, with ``silu(x) = x · sigmoid(x)``.

    Args:
        gate: any shape and strides; float16, bfloat16, float32 (float64 at the torch and compile levels).
        up: of the same shape and dtype on the same device. Both may be halves of one tensor.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the same shape and dtype. Differentiable once.

    Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
    """
    return _call("swiglu", backend, (gate, up), {})


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """``(x − mean x) / √(var x + eps) · weight + bias`` over the last dimensions, as
    :func:`torch.nn.functional.layer_norm`.

    Args:
        input: any shape that ends in `normalized_shape`, any strides; float16, bfloat16, float32 (float64 at the torch
            and compile levels). The 16-bit dtypes are computed in float32.
        normalized_shape: the last dimensions, together one row; at least one.
        weight: of shape `normalized_shape`; of the input's dtype, or float32 beside 16 bits; or None for ones.
        bias: likewise, or None for zeros.
        eps: added to the variance; finite. A sum below zero gives NaN, as in PyTorch.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the input's shape and dtype. Differentiable once, in `input`, `weight` and `bias`.

    Source: Ba, Kiros and Hinton, Layer Normalization, arXiv:1607.06450.
    """
    options = {"normalized_shape": _ints(normalized_shape), "eps": eps if type(eps) is float else _number(eps)}
    return _call("layer_norm", backend, (input, weight, bias), options)


def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """``x / √(mean x² + eps) · weight`` over the last dimensions, as :func:`torch.nn.functional.rms_norm`.

    Args:
        input: any shape that ends in `normalized_shape`, any strides; float16, bfloat16, float32 (float64 at the torch
            and compile levels). The 16-bit dtypes are computed in float32.
        normalized_shape: the last dimensions, together one row; at least one.
        weight: of shape `normalized_shape`; of the input's dtype, or float32 beside 16 bits; or None for ones.
        eps: added to the mean of squares; finite. A sum below zero gives NaN, as in PyTorch. None means the machine
            epsilon of the computation's dtype: float32, or float64 for float64.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the input's shape and dtype. Differentiable once, in `input` and `weight`.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    options = {
        "normalized_shape": _ints(normalized_shape),
        "eps": eps if eps is None or type(eps) is float else _number(eps),
    }
    return _call("rms_norm", backend, (input, weight), options)


def add_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A transformer's residual sum, and :func:`rms_norm` of it over the last dimension.

    Args:
        input: ``(..., N)``, any strides; float16, bfloat16, float32 (float64 at the torch and compile levels).
        residual: of the same shape and dtype.
        weight: ``(N,)`` of the same dtype, or float32 beside 16 bits; or None for ones.
        eps: as for :func:`rms_norm`.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        The normalised sum, and the sum ``input + residual``. The norm reads the sum rounded to the dtype. Both have the
        input's shape and dtype. Differentiable once, in all three tensors and through both results.
    """
    options = {"eps": eps if eps is None or type(eps) is float else _number(eps)}
    return _call("add_rms_norm", backend, (input, residual, weight), options)


def bias_dropout_add_layer_norm(
    input: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    p: float = 0.5,
    *,
    seed: int,
    eps: float = 1e-5,
    backend: str | None = None,
) -> torch.Tensor:
    """``layer_norm(residual + dropout(input + bias))`` over the last dimension: the end of a post-norm block.

    Args:
        input: ``(..., N)``, any strides; float16, bfloat16, float32 (float64 at the torch and compile levels).
        bias: ``(N,)`` of the same dtype, added to `input`.
        residual: of the shape and dtype of `input`.
        weight: ``(N,)`` of the same dtype, the norm's scale, or None for ones.
        norm_bias: ``(N,)`` of the same dtype, the norm's bias, or None for zeros.
        p: the probability to drop an element, from 0 up to but not including 1.
        seed: an integer from 0 to 2⁶³ − 1. It gives the mask of :func:`dropout`.
        eps: as for :func:`layer_norm`.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the shape and dtype of `input`. Differentiable once, in all five tensors. For a backward pass, the
        sum before the norm is saved, but no mask.
    """
    inputs = (input, bias, residual, weight, norm_bias)
    options = {
        "p": p if type(p) is float else _number(p),
        "seed": seed if type(seed) is int else _int(seed),
        "eps": eps if type(eps) is float else _number(eps),
    }
    return _call("bias_dropout_add_layer_norm", backend, inputs, options)


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    out: None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """``activation(input · weightᵀ + bias)``, as :func:`torch.nn.functional.linear` followed by its ``gelu``.

    Args:
        input: ``(K,)`` or ``(..., K)``; float16, bfloat16, float32 (float64 at the torch and compile levels); any
            strides.
        weight: ``(N, K)``, or a vector ``(K,)``, whose output has no feature dimension; of the same dtype on the same
            device; any strides.
        bias: ``(N,)``, or ``()`` if `weight` is a vector; likewise, or None for zeros.
        activation: None, ``"gelu"`` for the exact form with erf, or ``"gelu_tanh"`` for the approximation with tanh.
        out: must be None; the result is a new tensor.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor ``(..., N)``, or ``(...)`` if `weight` is a vector, of the same dtype, accumulated in float32 or
        better. The cuda and triton levels round it once. tf32 as for :func:`matmul`. Differentiable once. A gradient
        through an activation saves the product, a tensor of the output's size. If the leading dimensions do not fold
        into one by their strides, the triton level copies the input, and every backward pass copies the gradient.
    """
    if out is not None:
        _no_out("linear", out)
    return _call("linear", backend, (input, weight, bias), {"activation": activation})


def rope(
    input: torch.Tensor,
    freqs_cis: torch.Tensor,
    *,
    interleaved: bool = False,
    offset: int = 0,
    backend: str | None = None,
) -> torch.Tensor:
    """Rotary position embedding: each pair of a row's elements, as a complex number, times ``freqs_cis`` at its place.

    Args:
        input: ``(..., S, D)``, such as the queries or keys ``(B, H, S, D)`` of :func:`attention`; any strides; float16,
            bfloat16, float32 (float64 at the torch and compile levels).
        freqs_cis: ``(P, R / 2)``, complex64, ``cos θ + i · sin θ`` for each position and pair; it gets no gradient. The
            first R elements of a row are rotated, with R at most D, and the others are copied.
        interleaved: True: pairs are neighbours, as in RoFormer and GPT-J. False: a pair is element i and i + R / 2, as
            in GPT-NeoX and Llama.
        offset: the position of the first of the S rows; ``offset + S`` is at most P. Inside ``torch.compile`` it may
            change from call to call.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the input's shape and dtype, computed in float32 or wider. Differentiable once, in `input`.

    Source: Su et al., RoFormer, arXiv:2104.09864.
    """
    options = {"interleaved": interleaved, "offset": offset if type(offset) is int else _int(offset)}
    return _call("rope", backend, (input, freqs_cis), options)


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Negative log-probability that softmax gives to labels, as :func:`torch.nn.functional.cross_entropy`.

    Args:
        input: logits ``(C,)``, ``(N, C)`` or ``(N, C, d1, ...)`` of C classes; any strides; float16, bfloat16, float32
            (float64 at the torch and compile levels).
        target: int64 labels from 0 to C − 1, of the shape of `input` without its classes. Probabilities are not taken.
        weight: must be None; classes have no weights of their own.
        size_average, reduce: must be None; `reduction` says it.
        ignore_index: the label of rows that do not count. They are not read, and their gradient is zero.
        reduction: ``"none"``, ``"sum"``, or ``"mean"`` over the rows that count; NaN if none does.
        label_smoothing: from 0 to 1, the share of the loss against equal probabilities.
        z_loss: at least 0, the factor of ``logsumexp(row)²``, which is added to each row's loss.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the input's dtype: a scalar, or for ``"none"`` the shape of `target`. Computed in float32 or wider.
        Differentiable once, in `input`.

    Raises:
        IndexError: a label on the CPU is no class. On a GPU such a row has loss NaN and gradient zero, and nothing
            outside of the tensor is read; only PyTorch's own function (``torch.builtin``, and the compile level's rungs
            of it) asserts on the device, which ends the use of the GPU by this process.

    Source: Chowdhery et al., PaLM, arXiv:2204.02311, for the z-loss.
    """
    _no_weights("cross_entropy", weight)
    for name, value in (("size_average", size_average), ("reduce", reduce)):
        if value is not None:
            raise ValueError(
                f"cross_entropy: argument `{name}` must be None, got {type(value).__name__}: PyTorch deprecates it; "
                "`reduction` takes its place"
            )
    options = _loss_options(ignore_index, reduction, label_smoothing, z_loss)
    return _call("cross_entropy", backend, (input, target), options)


def _no_weights(op: str, weight: Any) -> None:
    if weight is not None:
        raise ValueError(
            f"{op}: argument `weight` must be None, got {type(weight).__name__}: classes have no weights here; weigh "
            "the rows of reduction='none'"
        )


def _loss_options(ignore_index: Any, reduction: Any, label_smoothing: Any, z_loss: Any) -> dict[str, Any]:
    return {
        "ignore_index": ignore_index if type(ignore_index) is int else _int(ignore_index),
        "reduction": reduction,
        "label_smoothing": label_smoothing if type(label_smoothing) is float else _number(label_smoothing),
        "z_loss": z_loss if type(z_loss) is float else _number(z_loss),
    }


def linear_cross_entropy(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: None = None,
    weight: None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: None = None,
    z_loss: float = 0.0,
    wide_loss: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """``cross_entropy(input · linear_weightᵀ, target)``, as ``torch.nn.functional.linear_cross_entropy``.

    The triton level makes the logits a chunk of rows at a time, so that memory never holds them whole, and computes
    both gradients in the forward pass. The torch, compile and xla levels hold them.

    Args:
        input: ``(K,)`` or ``(N, K)``; any strides; float16, bfloat16, float32 (float64 at the torch and compile
            levels).
        linear_weight: ``(C, K)``, a row for each class, of the same dtype on the same device; any strides.
        target: int64 labels from 0 to C − 1, ``()`` or ``(N,)``.
        linear_bias: must be None; logits have no bias.
        weight: must be None; classes have no weights of their own.
        reduction, ignore_index, label_smoothing, z_loss: as for :func:`cross_entropy`; None ignores −100.
        options: must be None; the backend says how logits are made.
        wide_loss: True for a loss of float32 beside 16-bit inputs, as autocast has it.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the inputs' dtype: a scalar, or for ``"none"`` the shape of `target`. Logits are rounded to the
        inputs' dtype, and the loss is computed in float32 or wider. Differentiable once, in `input` and
        `linear_weight`; the triton level rounds the weight's gradient once a chunk, of which there are at most twelve.

    Raises:
        IndexError: as :func:`cross_entropy`.

    Source: Hsu et al., Liger Kernel, arXiv:2410.10989, for the gradients in the forward pass.
    """
    op = "linear_cross_entropy"
    _no_weights(op, weight)
    for name, value, why in (
        ("linear_bias", linear_bias, "logits have no bias here"),
        ("options", options, "`backend` chooses how logits are made"),
    ):
        if value is not None:
            raise ValueError(f"{op}: argument `{name}` must be None, got {type(value).__name__}: {why}")
    given = _loss_options(-100 if ignore_index is None else ignore_index, reduction, label_smoothing, z_loss)
    if autocast.is_on() and autocast.applies_to((input,)):
        wide_loss = True if wide_loss is False else wide_loss
    return _call(op, backend, (input, linear_weight, target), {**given, "wide_loss": wide_loss})
