"""LayerNorm in CUDA C++: ``csrc/layer_norm.cu``. The rungs from `registers` on share one backward pass."""

from __future__ import annotations

import torch

from cuda_impl import climb, fake_like
from cuda_impl.norms import backward_of, empty_if, empty_stats, unsupported_rows, widening
from kernel_ladder.semantics.norms import as_parameter, as_rows, forwards
from kernel_ladder.table import register


def _register(name: str) -> None:
    ops = torch.ops.kernel_ladder
    run, run_backward = getattr(ops.layer_norm, name), getattr(ops.layer_norm_backward, backward_of(name))

    def normalise(
        keep: bool,
        input: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        normalized_shape,
        eps,
    ) -> tuple[torch.Tensor, tuple]:
        dims = len(normalized_shape)
        rows, weight = as_rows(input, dims), as_parameter(weight)
        output, stats = run(rows, weight, as_parameter(bias), float(eps), keep)
        if dims > 1:
            output = torch.ops.aten._unsafe_view(output, input.shape)  # of a view autograd forbids to be modified
        return output, (rows, weight, stats, normalized_shape)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
        rows, weight, stats, shape = saved
        shape_of_grad, dims = grad.shape, len(shape)
        of_input, of_weight, of_bias = run_backward(as_rows(grad, dims), rows, weight, stats, *needs)
        return (
            of_input.view(shape_of_grad) if needs[0] else None,
            of_weight.view(shape) if needs[1] else None,
            of_bias.view(shape) if needs[2] else None,
        )

    def unsupported(
        input: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        normalized_shape,
        eps,
    ) -> str | None:
        return unsupported_rows(name, (input,), len(normalized_shape), weight, bias)

    @torch.library.register_fake(f"kernel_ladder::layer_norm.{name}")
    def _(input, weight, bias, eps, keep):
        return fake_like(input), empty_stats(input, 3, keep)

    run_any, back = widening(normalise, backward)
    register("layer_norm", f"cuda.{name}", **forwards(run_any), backward=back, unsupported=unsupported)


def _register_fake_backward(rung: str) -> None:
    @torch.library.register_fake(f"kernel_ladder::layer_norm_backward.{rung}")
    def _(grad, input, weight, stats, needs_input, needs_weight, needs_bias):
        of_input = fake_like(input) if needs_input else input.new_empty((0,))
        return of_input, *(empty_if(needed, input, input.shape[-1]) for needed in (needs_weight, needs_bias))


for _name in climb("layer_norm"):
    _register(_name)
for _name in climb("layer_norm_backward"):
    _register_fake_backward(_name)
