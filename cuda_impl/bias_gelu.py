"""Bias and GELU in CUDA C++: ``csrc/bias_gelu.cu``."""

from __future__ import annotations

import torch

from cuda_impl import climb, fake_like, unsupported
from kernel_ladder.table import register


def _register(name: str) -> None:
    ops = torch.ops.kernel_ladder
    run, run_backward = getattr(ops.bias_gelu, name), getattr(ops.bias_gelu_backward, name)

    def forward(input: torch.Tensor, bias: torch.Tensor, *, approximate: str) -> tuple[torch.Tensor, tuple]:
        return run(input, bias, approximate), (input, bias, approximate)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        return run_backward(grad, *saved)

    torch.library.register_fake(f"kernel_ladder::bias_gelu.{name}", lambda input, bias, approximate: fake_like(input))
    torch.library.register_fake(
        f"kernel_ladder::bias_gelu_backward.{name}",
        lambda grad, input, bias, approximate: (fake_like(input), bias.new_empty(bias.shape)),
    )
    register("bias_gelu", f"cuda.{name}", forward=forward, backward=backward, unsupported=unsupported)


for _name in climb("bias_gelu"):
    _register(_name)
