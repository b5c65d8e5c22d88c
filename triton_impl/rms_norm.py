"""RMSNorm in Triton: the ladder of :mod:`triton_impl.norm.ladder`, without a mean."""

from __future__ import annotations

import math

import torch

from kernel_ladder.semantics.norms import as_parameter, eps_or_default, forwards
from triton_impl import register
from triton_impl.norm import naive
from triton_impl.norm.common import Kind, Needs, as_matrix
from triton_impl.norm.ladder import Rung, ahead_of_time, rungs

KIND = Kind(is_layernorm=False, has_residual=False)


def _register(name: str, rung: Rung) -> None:
    def normalise(
        save_stats: bool, input: torch.Tensor, weight: torch.Tensor | None = None, *, normalized_shape, eps
    ) -> tuple[torch.Tensor, tuple]:
        x, w = as_matrix(input, len(normalized_shape)), as_parameter(weight)
        eps = eps_or_default(eps, input.dtype)
        output, _, stats = rung.forward(KIND, input.shape, x, None, w, None, eps, save_stats)
        return output, (x, w, stats, tuple(input.shape), normalized_shape)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
        x, w, stats, shape, row = saved
        wanted = Needs(*needs, bias=False)
        grad_input, grad_weight, _ = rung.backward(KIND, x, w, stats, as_matrix(grad, len(row)), None, wanted)
        return (
            None if grad_input is None else grad_input.view(shape),
            None if grad_weight is None else grad_weight.view(row),
        )

    def unsupported(input: torch.Tensor, weight: torch.Tensor | None = None, *, normalized_shape, eps) -> str | None:
        return rung.unsupported(KIND, math.prod(normalized_shape), input, weight)

    register("rms_norm", name, **forwards(normalise), backward=backward, unsupported=unsupported, here=rung.here)


register(
    "rms_norm",
    "triton.naive",
    forward=naive.rms_norm,
    backward=naive.rms_norm_backward,
    unsupported=naive.rms_norm_unsupported,
)
for _name, _rung in rungs(KIND).items():
    _register(f"triton.{_name}", _rung)

AOT = naive.ahead_of_time(False) + ahead_of_time(KIND)
