"""Bias, dropout, residual sum and LayerNorm in CUDA C++: ``csrc/bias_dropout_add_layer_norm``."""

from __future__ import annotations

import torch

# LayerNorm's backward operator tells its shapes where its module registers them.
from cuda_impl import climb, fake_like, layer_norm  # noqa: F401
from cuda_impl.norms import backward_of, empty_stats, unsupported_rows, widening
from kernel_ladder.semantics import philox
from kernel_ladder.semantics.norms import as_parameter, forwards
from kernel_ladder.table import register

OP = "bias_dropout_add_layer_norm"


def _register(name: str) -> None:
    ops = torch.ops.kernel_ladder
    run = getattr(ops.bias_dropout_add_layer_norm, name)
    run_backward = getattr(getattr(ops, f"{OP}_backward"), backward_of(name))
    run_norm_backward = getattr(ops.layer_norm_backward, backward_of(name))

    def normalise(
        keep: bool,
        input: torch.Tensor,
        bias: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None = None,
        norm_bias: torch.Tensor | None = None,
        *,
        p: float,
        seed: int,
        eps: float,
    ) -> tuple[torch.Tensor, tuple]:
        mask, weight = (philox.threshold(p), philox.scale(p), seed), as_parameter(weight)
        output, total, stats = run(
            input, as_parameter(bias), residual, weight, as_parameter(norm_bias), *mask, float(eps), keep
        )
        return output, (total, weight, stats, mask)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
        total, weight, stats, mask = saved
        of_branch, of_residual, of_weight, of_norm_bias = needs[0] or needs[1], *needs[2:]
        of_sum, *of_norm = run_norm_backward(
            grad, total, weight, stats, of_branch or of_residual, of_weight, of_norm_bias
        )
        of_input, of_bias = run_backward(of_sum, *mask) if of_branch else (None, None)
        return (
            of_input if needs[0] else None,
            of_bias if needs[1] else None,
            of_sum if of_residual else None,
            *(of if need else None for of, need in zip(of_norm, needs[3:], strict=True)),
        )

    def unsupported(
        input: torch.Tensor,
        bias: torch.Tensor,
        residual: torch.Tensor,
        *parameters: torch.Tensor | None,
        **options: object,
    ) -> str | None:
        return unsupported_rows(name, (input, residual), 1, bias, *parameters)

    @torch.library.register_fake(f"kernel_ladder::{OP}.{name}")
    def _(input, bias, residual, weight, norm_bias, threshold, scale, seed, eps, keep):
        output = input.new_empty(input.shape)
        return output, input.new_empty(input.shape if keep else (0,)), empty_stats(input, 3, keep)

    run_any, back = widening(normalise, backward)
    register(OP, f"cuda.{name}", **forwards(run_any), backward=back, unsupported=unsupported)


def _register_fake_backward(rung: str) -> None:
    @torch.library.register_fake(f"kernel_ladder::{OP}_backward.{rung}")
    def _(grad, threshold, scale, seed):
        return fake_like(grad), grad.new_empty((grad.shape[-1],))


for _name in climb(OP):
    _register(_name)
for _name in climb(f"{OP}_backward"):
    _register_fake_backward(_name)
