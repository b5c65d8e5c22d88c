"""Residual sum and RMSNorm in Triton: the kernels of :mod:`triton_impl.norm.rows`, whose rows are a sum."""

from __future__ import annotations

import torch

from kernel_ladder.semantics.norms import eps_or_default, forwards
from triton_impl import register
from triton_impl.norm.ladder import STEPS, Step, ahead_of_time
from triton_impl.norm.rows import Kind, Needs, as_matrix, as_parameter

KIND = Kind(centred=False, residual=True)


def _variant(name: str, step: Step) -> None:
    normalised, refused_rows, gradients, here = step

    def normalise(
        keep: bool, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, *, eps
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple]:
        w = as_parameter(weight)
        eps = eps_or_default(eps, input.dtype)
        x, r = as_matrix(input), as_matrix(residual)
        output, total, stats = normalised(KIND, input.shape, x, r, w, None, eps, keep)
        return (output, total), (total, w, stats)

    def backward(
        saved: tuple, grads: tuple[torch.Tensor, torch.Tensor], needs: tuple[bool, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        total, w, stats = saved
        grad, grad_sum = map(as_matrix, grads)
        wanted = Needs(needs[0] or needs[1], needs[2], bias=False)
        of_sum, of_weight, _ = gradients(KIND, as_matrix(total), w, stats, grad, grad_sum, wanted)
        of_sum = None if of_sum is None else of_sum.view(total.shape)
        return of_sum if needs[0] else None, of_sum if needs[1] else None, of_weight

    def refused(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, *, eps) -> str | None:
        return refused_rows(input, input.shape[-1])

    register("add_rms_norm", name, **forwards(normalise), backward=backward, unsupported=refused, here=here)


for _name, _step in STEPS.items():
    _variant(f"triton.{_name}", _step)

AOT = ahead_of_time(KIND)
