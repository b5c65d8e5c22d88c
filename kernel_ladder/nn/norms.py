"""Normalisations with PyTorch's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kernel_ladder import ops
from kernel_ladder.nn.arguments import check_dtype
from kernel_ladder.nn.backend import HasBackend
from kernel_ladder.ops.calls import as_int, as_number
from kernel_ladder.semantics.norms import check_eps, computation_dtype


def beside(input: Any, weight: torch.Tensor | None) -> torch.Tensor | None:
    """A weight in a dtype that rms_norm takes beside an input: the input's, or that of its computation."""
    if weight is None or not isinstance(input, torch.Tensor) or weight.dtype == input.dtype:
        return weight
    return weight.to(computation_dtype(input.dtype))


def _shape_of_row(module: str, given: Any) -> tuple[int, ...]:
    """`normalized_shape` as a tuple.

    Raises:
        TypeError: it is neither an int nor ints. ValueError: it has no dimension, or a size below 0.
    """
    shape = tuple([as_int(n) for n in given]) if isinstance(given, Iterable) else (as_int(given),)
    if not all(type(n) is int for n in shape):
        raise TypeError(f"{module}: argument `normalized_shape` must be an int or a sequence of ints, got {given!r}")
    if not shape or min(shape) < 0:
        raise ValueError(f"{module}: argument `normalized_shape` must be one size or more, of at least 0, got {shape}")
    return shape


class RMSNorm(HasBackend, torch.nn.RMSNorm):
    """:class:`torch.nn.RMSNorm` by :func:`kernel_ladder.rms_norm`. The result has the input's dtype.

    Args:
        normalized_shape: the last dimensions, together one row.
        eps: added to the mean of squares; None is the machine epsilon of the computation's dtype.
        elementwise_affine: whether there is a ``weight`` of `normalized_shape`, ones at first.
        device, dtype: of the weight. Inputs may have another dtype, as with PyTorch's.
        backend: see :func:`kernel_ladder.use`; None leaves the choice to each call.
    """

    OPS = ("rms_norm",)

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        shape, eps = _shape_of_row("RMSNorm", normalized_shape), as_number(eps)
        check_eps("RMSNorm", eps)
        check_dtype("RMSNorm", dtype)
        super().__init__(shape, eps, elementwise_affine, device, dtype)  # type: ignore[arg-type]
        self.backend = backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = beside(x, self.weight)
        return ops.rms_norm(x, self.normalized_shape, weight, self.eps, backend=self._backend)

    def extra_repr(self) -> str:
        return self._with_backend(super().extra_repr())


class LayerNorm(HasBackend, torch.nn.LayerNorm):
    """:class:`torch.nn.LayerNorm` by :func:`kernel_ladder.layer_norm`.

    Args:
        normalized_shape: the last dimensions, together one row.
        eps: added to the variance.
        elementwise_affine: whether there is a ``weight`` of `normalized_shape`, ones at first.
        bias: whether there is a ``bias`` besides, zeros at first.
        device, dtype: of weight and bias. These may be float32 beside 16-bit inputs.
        backend: see :func:`kernel_ladder.use`; None leaves the choice to each call.
    """

    OPS = ("layer_norm",)

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        shape, eps = _shape_of_row("LayerNorm", normalized_shape), as_number(eps)
        check_eps("LayerNorm", eps, optional=False)
        check_dtype("LayerNorm", dtype)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)  # type: ignore[arg-type]
        self.backend = backend

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ops.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, backend=self._backend)

    def extra_repr(self) -> str:
        return self._with_backend(super().extra_repr())
