"""A linear layer with its activation in the product's epilogue, and GELU alone."""

from __future__ import annotations

from typing import Any

import torch

from kernel_ladder import ops
from kernel_ladder.nn.arguments import as_size, check_dtype
from kernel_ladder.nn.backend import HasBackend

#: What :func:`kernel_ladder.linear` can apply to its product.
ACTIVATIONS = (None, "gelu", "gelu_tanh")


def check_approximate(module: str, approximate: object) -> None:
    """Raise unless `approximate` names a form of GELU."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"{module}: argument `approximate` must be 'none' or 'tanh', got {approximate!r}")


class Linear(HasBackend, torch.nn.Linear):
    """:class:`torch.nn.Linear` by :func:`kernel_ladder.linear`, with an activation fused into the product.

    Args:
        in_features, out_features: sizes of the last dimension of input and output.
        bias: whether there is a ``bias``.
        device, dtype: of weight and bias.
        activation: None, ``"gelu"`` or ``"gelu_tanh"``.
        backend: see :func:`kernel_ladder.use`; None leaves the choice to each call.
    """

    OPS = ("linear",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        backend: str | None = None,
    ) -> None:
        if activation not in ACTIVATIONS:
            accepted = ", ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"Linear: argument `activation` must be one of {accepted}, got {activation!r}")
        in_features = as_size("Linear", "in_features", in_features, 0)
        out_features = as_size("Linear", "out_features", out_features, 0)
        check_dtype("Linear", dtype)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation, self.backend = activation, backend

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ops.linear(input, self.weight, self.bias, self.activation, backend=self._backend)

    def extra_repr(self) -> str:
        activation = "" if self.activation is None else f", activation={self.activation!r}"
        return self._with_backend(super().extra_repr() + activation)


class GELU(HasBackend, torch.nn.GELU):
    """:class:`torch.nn.GELU` by :func:`kernel_ladder.gelu`.

    Args:
        approximate: ``"none"`` for the exact form with erf, ``"tanh"`` for the approximation with tanh.
        backend: see :func:`kernel_ladder.use`; None leaves the choice to each call.
    """

    OPS = ("gelu",)

    def __init__(self, approximate: str = "none", *, backend: str | None = None) -> None:
        check_approximate("GELU", approximate)
        super().__init__(approximate)
        self.backend = backend

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ops.gelu(input, approximate=self.approximate, backend=self._backend)

    def extra_repr(self) -> str:
        return self._with_backend(super().extra_repr())
