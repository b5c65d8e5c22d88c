"""The loss of class labels, from logits or from a linear layer."""

from __future__ import annotations

from typing import Any

import torch

from kernel_ladder import autocast
from kernel_ladder.ops.calls import as_int, as_number, call


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
    wide_loss: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Negative log-probability that softmax gives to labels, as :func:`torch.nn.functional.cross_entropy`.

    Args:
        input: logits ``(C,)``, ``(N, C)`` or ``(N, C, d1, ...)`` of C classes; any strides; float16, bfloat16, float32
            (float64 at the torch, compile and xla levels).
        target: int64 labels from 0 to C − 1, of the shape of `input` without its classes. Probabilities are not taken.
        weight: must be None; classes have no weights of their own.
        size_average, reduce: must be None; `reduction` says it.
        ignore_index: the label of rows that do not count. They are not read, and their gradient is zero.
        reduction: ``"none"``, ``"sum"``, or ``"mean"`` over the rows that count; NaN if none does.
        label_smoothing: from 0 to 1, the share of the loss against equal probabilities.
        z_loss: at least 0, the factor of ``logsumexp(row)²``, which is added to each row's loss.
        wide_loss: True for a loss of float32 beside 16-bit logits, as autocast has it, without a copy of them.
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
    if wide_loss is False and autocast.is_on() and autocast.applies_to((input,)):
        wide_loss = autocast.policy("cross_entropy", input.device.type) is not None
    if wide_loss is not False:
        options["wide_loss"] = wide_loss
    return call("cross_entropy", backend, (input, target), options)


def _no_weights(op: str, weight: Any) -> None:
    if weight is not None:
        raise ValueError(
            f"{op}: argument `weight` must be None, got {type(weight).__name__}: classes have no weights here; weigh "
            "the rows of reduction='none'"
        )


def _loss_options(ignore_index: Any, reduction: Any, label_smoothing: Any, z_loss: Any) -> dict[str, Any]:
    return {
        "ignore_index": ignore_index if type(ignore_index) is int else as_int(ignore_index),
        "reduction": reduction,
        "label_smoothing": label_smoothing if type(label_smoothing) is float else as_number(label_smoothing),
        "z_loss": z_loss if type(z_loss) is float else as_number(z_loss),
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

    The triton and cuda levels compute the logits one chunk of rows at a time, so that memory never holds them whole.
    They compute both gradients in the forward pass. The torch, compile and xla levels hold the logits.

    Args:
        input: ``(K,)`` or ``(N, K)``; any strides; float16, bfloat16, float32 (float64 at the torch, compile and xla
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
        `linear_weight`; the triton and cuda levels round the weight's gradient once or twice a chunk, of which there
        are at most twelve.

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
    return call(op, backend, (input, linear_weight, target), {**given, "wide_loss": wide_loss})
