"""Normalisations with PyTorch's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernel_ladder import ops
from kernel_ladder.nn.backend import HasBackend


class RMSNorm(HasBackend, torch.nn.RMSNorm):
    """:class:`torch.nn.RMSNorm` by :func:`kernel_ladder.rms_norm`.

    Args:
        normalized_shape: the last dimensions, together one row.
        eps: added to the mean of squares; None is the machine epsilon of the computation's dtype.
        elementwise_affine: whether there is a ``weight`` of `normalized_shape`, ones at first.
        device, dtype: of the weight. A float32 weight may stand beside 16-bit inputs.
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
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)  # type: ignore[arg-type]
        self.backend = backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.normalized_shape, self.weight, self.eps, backend=self._backend)

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
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)  # type: ignore[arg-type]
        self.backend = backend

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ops.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, backend=self._backend)

    def extra_repr(self) -> str:
        return self._with_backend(super().extra_repr())
