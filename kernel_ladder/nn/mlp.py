"""The two feed-forward blocks of transformers."""

from __future__ import annotations

from typing import Any

import torch

from kernel_ladder import ops
from kernel_ladder.nn.arguments import as_size
from kernel_ladder.nn.backend import HasParts
from kernel_ladder.nn.linear import Linear, check_approximate


class SwigluMLP(HasParts):
    """``down_proj(silu(gate_proj(x)) · up_proj(x))``: Llama's block, with its parameter names.

    Args:
        in_features: size of the last dimension of the input.
        hidden_features: that of gate and up.
        out_features: that of the output; None is `in_features`.
        bias: whether the three projections have biases.
        device, dtype: of the parameters.
        backend: see :func:`kernel_ladder.use`; None leaves the choice to each call.

    Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
    """

    OPS = ("linear", "swiglu")

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.backend = backend
        in_features = as_size("SwigluMLP", "in_features", in_features, 0)
        hidden_features = as_size("SwigluMLP", "hidden_features", hidden_features, 0)
        out = as_size("SwigluMLP", "out_features", in_features if out_features is None else out_features, 0)
        more = {"bias": bias, "device": device, "dtype": dtype, "backend": backend}
        self.gate_proj = Linear(in_features, hidden_features, **more)  # type: ignore[arg-type]
        self.up_proj = Linear(in_features, hidden_features, **more)  # type: ignore[arg-type]
        self.down_proj = Linear(hidden_features, out, **more)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x), backend=self._backend))


class GeluMLP(HasParts):
    """``fc2(gelu(fc1(x)))``, with bias and GELU in the first product's epilogue.

    Args:
        in_features: size of the last dimension of the input.
        hidden_features: that between the two products.
        out_features: that of the output; None is `in_features`.
        bias: whether both products have a bias.
        approximate: ``"none"`` for the exact GELU with erf, ``"tanh"`` for the approximation with tanh.
        device, dtype: of the parameters.
        backend: see :func:`kernel_ladder.use`; None leaves the choice to each call.
    """

    OPS = ("linear",)

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        approximate: str = "none",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        check_approximate("GeluMLP", approximate)
        self.backend = backend
        in_features = as_size("GeluMLP", "in_features", in_features, 0)
        hidden_features = as_size("GeluMLP", "hidden_features", hidden_features, 0)
        out = as_size("GeluMLP", "out_features", in_features if out_features is None else out_features, 0)
        activation = "gelu" if approximate == "none" else "gelu_tanh"
        self.fc1 = Linear(in_features, hidden_features, bias, device, dtype, activation=activation, backend=backend)
        self.fc2 = Linear(hidden_features, out, bias, device, dtype, backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x))
