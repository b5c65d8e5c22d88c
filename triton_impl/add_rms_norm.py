"""Residual sum and RMSNorm in Triton: the ladder of :mod:`triton_impl.norm.ladder`, of rows that are a sum."""

from __future__ import annotations

import torch

from kernel_ladder.semantics.norms import as_parameter, eps_or_default, forwards
from triton_impl import register
from triton_impl.norm.common import Kind, Needs, as_matrix
from triton_impl.norm.ladder import Rung, ahead_of_time, rungs

KIND = Kind(is_layernorm=False, has_residual=True)


def _register(name: str, rung: Rung) -> None:
    def normalise(
        save_stats: bool, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, *, eps
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple]:
        w = as_parameter(weight)
        eps = eps_or_default(eps, input.dtype)
        x, r = as_matrix(input), as_matrix(residual)
        output, total, stats = rung.forward(KIND, input.shape, x, r, w, None, eps, save_stats)
        return (output, total), (total, w, stats)

    def backward(
        saved: tuple, grads: tuple[torch.Tensor, torch.Tensor], needs: tuple[bool, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        total, w, stats = saved
        grad, grad_sum = map(as_matrix, grads)
        wanted = Needs(needs[0] or needs[1], needs[2], bias=False)
        grad_total, grad_weight, _ = rung.backward(KIND, as_matrix(total), w, stats, grad, grad_sum, wanted)
        grad_total = None if grad_total is None else grad_total.view(total.shape)
        return grad_total if needs[0] else None, grad_total if needs[1] else None, grad_weight

    def unsupported(
        input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, *, eps
    ) -> str | None:
        return rung.unsupported(KIND, input.shape[-1], input, residual, weight)

    register("add_rms_norm", name, **forwards(normalise), backward=backward, unsupported=unsupported, here=rung.here)


for _name, _rung in rungs(KIND).items():
    _register(f"triton.{_name}", _rung)

AOT = ahead_of_time(KIND)
