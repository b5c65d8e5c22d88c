"""LayerNorm in Triton: the ladder of :mod:`triton_impl.norm.ladder`, with mean and bias."""

from __future__ import annotations

import math

import torch

from kernel_ladder.semantics.norms import as_parameter, forwards
from triton_impl import register
from triton_impl.norm import naive
from triton_impl.norm.common import Kind, Needs, as_matrix, dtype_of
from triton_impl.norm.ladder import Rung, ahead_of_time, rungs

KIND = Kind(is_layernorm=True, has_residual=False)


def _register(name: str, rung: Rung) -> None:
    def normalise(
        save_stats: bool,
        input: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        normalized_shape,
        eps,
    ) -> tuple[torch.Tensor, tuple]:
        x, w = as_matrix(input, len(normalized_shape)), as_parameter(weight)
        output, _, stats = rung.forward(KIND, input.shape, x, None, w, as_parameter(bias), float(eps), save_stats)
        return output, (x, w, stats, tuple(input.shape), normalized_shape, dtype_of(bias))

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
        x, w, stats, shape, row, bias_dtype = saved
        grad = as_matrix(grad, len(row))
        grad_input, *grad_parameters = rung.backward(KIND, x, w, stats, grad, None, Needs(*needs), bias_dtype)
        grad_input = None if grad_input is None else grad_input.view(shape)
        return grad_input, *(None if g is None else g.view(row) for g in grad_parameters)

    def unsupported(
        input: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        normalized_shape,
        eps,
    ) -> str | None:
        return rung.unsupported(KIND, math.prod(normalized_shape), input, weight, bias)

    register(
        "layer_norm",
        name,
        **forwards(normalise),
        backward=None if rung.backward is None else backward,
        unsupported=unsupported,
        here=rung.here,
    )


register(
    "layer_norm",
    "triton.naive",
    forward=naive.layer_norm,
    backward=naive.layer_norm_backward,
    unsupported=naive.layer_norm_unsupported,
)
for _name, _rung in rungs(KIND).items():
    _register(f"triton.{_name}", _rung)

AOT = naive.ahead_of_time(True) + ahead_of_time(KIND)
