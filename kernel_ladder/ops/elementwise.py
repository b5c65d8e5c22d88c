"""Functions of each element: GELU, dropout, sums of two tensors, gates, rotations."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch.compiler import is_compiling

from kernel_ladder import selection, table
from kernel_ladder.ops.calls import as_int, as_number, call, no_out


def gelu(
    input: torch.Tensor, *, approximate: str = "none", out: None = None, backend: str | None = None
) -> torch.Tensor:
    """Gaussian error linear unit, elementwise: ``x · Φ(x)``, as :func:`torch.nn.functional.gelu`.

    Args:
        input: any shape and strides; float16, bfloat16, float32 (float64 at the torch, compile and xla levels).
        approximate: ``"none"`` for the exact form with erf, ``"tanh"`` for the approximation with tanh.
        out: must be None; the result is a new tensor.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the same shape and dtype. Differentiable once.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, arXiv:1606.08415.
    """
    if out is not None:
        no_out("gelu", out)
    return call("gelu", backend, (input,), {"approximate": approximate})


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
        input: any shape and strides; float16, bfloat16, float32 (float64 at the torch, compile and xla levels).
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
        no_out("add", out)
    return call("add", backend, (input, other), {})


def _no_alpha(alpha: Any) -> None:
    if isinstance(alpha, bool) or not isinstance(alpha, numbers.Real):
        raise TypeError(f"add: argument `alpha` must be 1, got {type(alpha).__name__}")
    if alpha != 1:
        raise ValueError(f"add: argument `alpha` must be 1, got {alpha}; multiply `other` by it beforehand")


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
        input: any shape and strides; float16, bfloat16, float32 (float64 at the torch, compile and xla levels).
        p: the probability to drop an element, from 0 up to but not including 1.
        training: if False, `input` itself is returned, and no seed is needed.
        inplace: must be False; the result is a new tensor.
        seed: an integer from 0 to 2⁶³ − 1. Inside ``torch.compile`` it may change from call to call.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the same shape and dtype. A dropped NaN or infinity gives NaN, as in PyTorch. Differentiable once.

    Source: Srivastava et al., Dropout, JMLR 15 (2014); Salmon et al., Parallel Random Numbers, SC'11.
    """
    options = {"p": p if type(p) is float else as_number(p), "seed": seed if type(seed) is int else as_int(seed)}
    if inplace is not False:
        _not_inplace("dropout", inplace)
    if training is not True:
        return _not_training("dropout", training, backend, input, options)
    return call("dropout", backend, (input,), options)


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
        call(op, backend, (input,), options)  # only for its errors: the compiler removes the unused result
        return input
    table.spec(op).check(input, **options)
    selection.choose(op, backend, (input,), options, False)
    return input


def bias_gelu(
    input: torch.Tensor, bias: torch.Tensor, *, approximate: str = "none", backend: str | None = None
) -> torch.Tensor:
    """``gelu(input + bias)``, as :func:`torch.nn.functional.gelu` of the sum.

    Args:
        input: ``(..., N)``, any strides; float16, bfloat16, float32 (float64 at the torch, compile and xla levels).
        bias: ``(N,)``, of the same dtype on the same device.
        approximate: ``"none"`` for the exact form with erf, ``"tanh"`` for the approximation with tanh.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the input's shape and dtype. Differentiable once.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, arXiv:1606.08415.
    """
    return call("bias_gelu", backend, (input, bias), {"approximate": approximate})


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """``silu(gate) · up`` elementwise, with ``silu(x) = x · sigmoid(x)``.

    Args:
        gate: any shape and strides; float16, bfloat16, float32 (float64 at the torch, compile and xla levels).
        up: of the same shape and dtype on the same device. Both may be halves of one tensor.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the same shape and dtype. Differentiable once.

    Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
    """
    return call("swiglu", backend, (gate, up), {})


def rope(
    input: torch.Tensor,
    freqs_cis: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    offset: int = 0,
    backend: str | None = None,
) -> torch.Tensor:
    """Rotary position embedding: each pair of a row's elements, as a complex number, times ``freqs_cis`` at its place.

    Args:
        input: ``(..., S, D)``, such as the queries or keys ``(B, H, S, D)`` of :func:`attention`; any strides; float16,
            bfloat16, float32 (float64 at the torch, compile and xla levels).
        freqs_cis: ``(P, R / 2)``, complex64, ``cos θ + i · sin θ`` for each position and pair; it gets no gradient. The
            first R elements of a row are rotated, with R at most D, and the others are copied.
        offsets: ``(B,)``, int32, for an input of ``(B, ..., S, D)``: row s of sequence b stands at position
            ``offset + offsets[b] + s``, as with FlashAttention's ``seqlen_offsets``. None is 0 for all. They get no
            gradient, and change from call to call without another compilation.
        interleaved: True: pairs are neighbours, as in RoFormer and GPT-J. False: a pair is element i and i + R / 2, as
            in GPT-NeoX and Llama.
        offset: the position of the first of the S rows; ``offset + S`` is at most P. Inside ``torch.compile`` it may
            change from call to call. Beside `offsets` it may be negative: ``-S`` beside lengths that count the S rows.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the input's shape and dtype, computed in float32 or wider. Differentiable once, in `input`.

    Raises:
        TypeError: a tensor, `interleaved` or `offset` is of a wrong type or dtype.
        ValueError: shapes or devices do not fit, or the table lacks a position. `offsets` are read on the CPU alone:
            on a GPU, and inside ``torch.compile``, the rotated elements of a row outside of the table become NaN, and
            so does their gradient. No memory outside of the table is read.

    Source: Su et al., RoFormer, arXiv:2104.09864.
    """
    options = {"interleaved": interleaved, "offset": offset if type(offset) is int else as_int(offset)}
    inputs = (input, freqs_cis) if offsets is None else (input, freqs_cis, offsets)
    return call("rope", backend, inputs, options)
