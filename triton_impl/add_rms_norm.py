"""Residual sum and RMSNorm in Triton: the kernels of :mod:`triton_impl.norms`, whose rows are a sum."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernel_ladder.norms import eps_or_default, forwards
from triton_impl import gluon, norms, norms_cluster, norms_cluster_backward, register
from triton_impl.norms import Kind, Needs, as_matrix, as_parameter

KIND = Kind(centred=False, residual=True)


def _variant(name: str, normalised: Callable, refused_rows: Callable, gradients: Callable, **more: Callable) -> None:
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

    register("add_rms_norm", name, **forwards(normalise), backward=backward, unsupported=refused, **more)


# Rows that `fused` has in one block forward are in a cluster's backward, where they may.
for _name, _kernels in norms.STEPS.items():
    _variant(f"triton.{_name}", *_kernels, norms_cluster_backward.backward if _name == "fused" else norms.backward)
_variant(
    "triton.cluster", norms_cluster.forward, norms_cluster.refused, norms_cluster_backward.backward, here=gluon.here
)

AOT = [e for module in (norms, norms_cluster, norms_cluster_backward) for e in module.ahead_of_time(KIND)]
