"""Residual sum and RMSNorm in Triton: the kernels of :mod:`triton_impl.norms`, whose rows are a sum."""

from __future__ import annotations

import torch

from kernel_ladder.norms import eps_or_default, forwards
from triton_impl import norms, register, unsupported
from triton_impl.norms import Kind, Needs, as_matrix, as_parameter

KIND = Kind(centred=False, residual=True)


def _variant(name: str, fused: bool) -> None:
    def normalise(
        keep: bool, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, *, eps
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple]:
        w = as_parameter(weight)
        eps = eps_or_default(eps, input.dtype)
        output, total, stats = norms.forward(KIND, fused, as_matrix(input), as_matrix(residual), w, None, eps, keep)
        total = total.view(input.shape)
        return (output.view(input.shape), total), (total, w, stats)

    def backward(
        saved: tuple, grads: tuple[torch.Tensor, torch.Tensor], needs: tuple[bool, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        total, w, stats = saved
        grad, grad_sum = map(as_matrix, grads)
        wanted = Needs(needs[0] or needs[1], needs[2], bias=False)
        of_sum, of_weight, _ = norms.backward(KIND, as_matrix(total), w, stats, grad, grad_sum, wanted)
        of_sum = None if of_sum is None else of_sum.view(total.shape)
        return of_sum if needs[0] else None, of_sum if needs[1] else None, of_weight

    def refused(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, *, eps) -> str | None:
        return unsupported(input) or norms.too_long(input.shape[-1], fused)

    register("add_rms_norm", name, **forwards(normalise), backward=backward, unsupported=refused)


_variant("triton.online", fused=False)
_variant("triton.fused", fused=True)

AOT = norms.ahead_of_time(KIND)
