"""Residual sum and RMSNorm in CUDA C++: ``csrc/add_rms_norm.cu``.

The rungs from `registers` on share one backward pass.
"""

from __future__ import annotations

import torch

from cuda_impl import climb, fake_like
from cuda_impl.norms import backward_of, empty_if, empty_stats, unsupported_rows, widening
from kernel_ladder.semantics.norms import as_parameter, eps_or_default, forwards
from kernel_ladder.table import register


def _register(name: str) -> None:
    ops = torch.ops.kernel_ladder
    run, run_backward = getattr(ops.add_rms_norm, name), getattr(ops.add_rms_norm_backward, backward_of(name))

    def normalise(
        keep: bool, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, *, eps
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple]:
        weight = as_parameter(weight)
        output, total, stats = run(input, residual, weight, eps_or_default(eps, input.dtype), keep)
        return (output, total), (total, weight, stats)

    def backward(
        saved: tuple, grads: tuple[torch.Tensor, torch.Tensor], needs: tuple[bool, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        total, weight, stats = saved
        of_sum, of_weight = run_backward(*grads, total, weight, stats, needs[0] or needs[1], needs[2])
        return of_sum if needs[0] else None, of_sum if needs[1] else None, of_weight if needs[2] else None

    def unsupported(
        input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, *, eps
    ) -> str | None:
        return unsupported_rows(name, (input, residual), 1, weight)

    @torch.library.register_fake(f"kernel_ladder::add_rms_norm.{name}")
    def _(input, residual, weight, eps, keep):
        return fake_like(input), fake_like(input), empty_stats(input, 1, keep)

    run_any, back = widening(normalise, backward)
    register("add_rms_norm", f"cuda.{name}", **forwards(run_any), backward=back, unsupported=unsupported)


def _register_fake_backward(rung: str) -> None:
    @torch.library.register_fake(f"kernel_ladder::add_rms_norm_backward.{rung}")
    def _(grad, grad_sum, sum, weight, stats, needs_input, needs_weight):
        of_sum = fake_like(sum) if needs_input else sum.new_empty((0,))
        return of_sum, empty_if(needs_weight, sum, sum.shape[-1])


for _name in climb("add_rms_norm"):
    _register(_name)
for _name in climb("add_rms_norm_backward"):
    _register_fake_backward(_name)
