"""LayerNorm in Triton: the kernels of :mod:`triton_impl.norms`, with mean and bias."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kernel_ladder.norms import forwards
from triton_impl import gluon, norms, norms_cluster, norms_cluster_backward, register
from triton_impl.norms import Kind, Needs, as_matrix, as_parameter

KIND = Kind(centred=True, residual=False)


def _variant(name: str, normalised: Callable, refused_rows: Callable, gradients: Callable, **more: Callable) -> None:
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

    register("layer_norm", name, **forwards(normalise), backward=backward, unsupported=refused, **more)


# Rows that `fused` has in one block forward are in a cluster's backward, where they may.
for _name, _kernels in norms.STEPS.items():
    _variant(f"triton.{_name}", *_kernels, norms_cluster_backward.backward if _name == "fused" else norms.backward)
_variant(
    "triton.cluster", norms_cluster.forward, norms_cluster.refused, norms_cluster_backward.backward, here=gluon.here
)

AOT = [e for module in (norms, norms_cluster, norms_cluster_backward) for e in module.ahead_of_time(KIND)]
