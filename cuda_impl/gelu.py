"""GELU in CUDA C++: ``csrc/gelu.cu``."""

from __future__ import annotations

import torch

from cuda_impl import climb, fake_like, unsupported
from kernel_ladder.table import register


def _register(name: str) -> None:
    ops = torch.ops.kernel_ladder
    run, run_backward = getattr(ops.gelu, name), getattr(ops.gelu_backward, name)

    def forward(input: torch.Tensor, *, approximate: str) -> tuple[torch.Tensor, tuple]:
        return run(input, approximate), (input, approximate)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
        input, approximate = saved
        return (run_backward(grad, input, approximate),)

    torch.library.register_fake(f"kernel_ladder::gelu.{name}", lambda input, approximate: fake_like(input))
    torch.library.register_fake(
        f"kernel_ladder::gelu_backward.{name}", lambda grad, input, approximate: fake_like(input)
    )
    register("gelu", f"cuda.{name}", forward=forward, backward=backward, unsupported=unsupported)


for _name in climb("gelu"):
    _register(_name)
