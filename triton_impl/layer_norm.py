"""LayerNorm in Triton: the kernels of :mod:`triton_impl.norm.rows`, with mean and bias."""

from __future__ import annotations

import math

import torch

from kernel_ladder.semantics.norms import forwards
from triton_impl import register
from triton_impl.norm import naive
from triton_impl.norm.ladder import STEPS, Step, ahead_of_time
from triton_impl.norm.rows import Kind, Needs, as_matrix, as_parameter

KIND = Kind(centred=True, residual=False)


def _variant(name: str, step: Step) -> None:
    normalised, refused_rows, gradients, here = step

    def normalise(
        keep: bool,
        input: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        normalized_shape,
        eps,
    ) -> tuple[torch.Tensor, tuple]:
        x, w = as_matrix(input, len(normalized_shape)), as_parameter(weight)
        output, _, stats = normalised(KIND, input.shape, x, None, w, as_parameter(bias), float(eps), keep)
        return output, (x, w, stats, tuple(input.shape), normalized_shape)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
        x, w, stats, shape, row = saved
        of_input, *of_parameters = gradients(KIND, x, w, stats, as_matrix(grad, len(row)), None, Needs(*needs))
        of_input = None if of_input is None else of_input.view(shape)
        return of_input, *(None if of is None else of.view(row) for of in of_parameters)

    def refused(
        input: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        normalized_shape,
        eps,
    ) -> str | None:
        return refused_rows(input, math.prod(normalized_shape))

    register("layer_norm", name, **forwards(normalise), backward=backward, unsupported=refused, here=here)


register(
    "layer_norm",
    "triton.naive",
    forward=naive.layer_norm,
    backward=naive.layer_norm_backward,
    unsupported=naive.layer_norm_unsupported,
)
for _name, _step in STEPS.items():
    _variant(f"triton.{_name}", _step)

AOT = naive.ahead_of_time(True) + ahead_of_time(KIND)
