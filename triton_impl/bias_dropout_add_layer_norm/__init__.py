"""Bias, dropout, residual sum and LayerNorm in Triton: the ladder.

online              rows of any length, one block of columns at a time
fused               whole rows in registers
cluster             one thread-block cluster per row, in Gluon
persistent_cluster  clusters that loop over rows, in Gluon, forward
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernel_ladder.semantics.norms import as_parameter, forwards
from kernel_ladder.tracing import wants_gradient
from triton_impl import layer_norm, register
from triton_impl.bias_dropout_add_layer_norm import cluster, common, fused, online, persistent_cluster
from triton_impl.bias_dropout_add_layer_norm.common import Forward, dropout_backward
from triton_impl.common.gluon import requirements
from triton_impl.common.philox import arguments
from triton_impl.norm import cluster_backward
from triton_impl.norm import fused as norm_fused
from triton_impl.norm import online as norm_online
from triton_impl.norm.common import Backward, Needs, as_matrix
from triton_impl.runtime.aot import Entry

OP = "bias_dropout_add_layer_norm"


def _register(
    name: str,
    sum_and_norm: Forward,
    norm_backward: Backward | None,
    unsupported: Callable[..., str | None],
    here: Callable[[], str | None] = lambda: None,
) -> None:
    def normalise(
        save_stats: bool, *inputs: torch.Tensor | None, p: float, seed: int, eps: float
    ) -> tuple[torch.Tensor, tuple]:
        mask = arguments(p, seed)
        output, total, stats = sum_and_norm(save_stats, mask, float(eps), *inputs)
        return output, (total, as_parameter(inputs[3]), stats, mask, tuple(output.shape))

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
        total, weight, stats, mask, shape = saved
        needs_branch, needs_residual = needs[0] or needs[1], needs[2]
        wanted = Needs(needs_branch or needs_residual, *needs[3:])
        grad_sum, *grad_norm = norm_backward(layer_norm.KIND, total, weight, stats, as_matrix(grad), None, wanted)
        grad_input, grad_bias = dropout_backward(grad_sum, mask) if needs_branch else (None, None)
        return (
            grad_input.view(shape) if needs[0] else None,
            grad_bias if needs[1] else None,
            grad_sum.view(shape) if needs_residual else None,
            *grad_norm,
        )

    register(
        OP,
        name,
        **forwards(normalise),
        backward=None if norm_backward is None else backward,
        unsupported=unsupported,
        here=here,
    )


def _unsupported_by(rung) -> Callable[..., str | None]:
    def unsupported(input: torch.Tensor, *others: torch.Tensor | None, **options: object) -> str | None:
        return rung.unsupported_rows(layer_norm.KIND, input, input.shape[-1], wants_gradient(input, *others))

    return unsupported


_register("triton.online", online.forward, norm_online.backward, _unsupported_by(norm_online))
_register("triton.fused", fused.forward, norm_fused.backward, _unsupported_by(norm_fused))
_register("triton.cluster", cluster.forward, cluster_backward.backward, cluster.unsupported, requirements.here)
_register(
    "triton.persistent_cluster", persistent_cluster.forward, None, persistent_cluster.unsupported, requirements.here
)

AOT: list[Entry] = [
    e for module in (fused, online, cluster, persistent_cluster, common) for e in module.ahead_of_time()
]
