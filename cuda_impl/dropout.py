"""Dropout in CUDA C++: ``csrc/dropout.cu``."""

from __future__ import annotations

import torch

from cuda_impl import climb, fake_like, unsupported
from kernel_ladder.semantics import philox
from kernel_ladder.table import register


def _register(name: str) -> None:
    run = getattr(torch.ops.kernel_ladder.dropout, name)

    def forward(input: torch.Tensor, *, p: float, seed: int) -> tuple[torch.Tensor, tuple]:
        threshold, scale = philox.threshold(p), philox.scale(p)
        return run(input, threshold, scale, seed), (threshold, scale, seed)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
        return (run(grad, *saved),)  # the same mask, drawn again

    torch.library.register_fake(
        f"kernel_ladder::dropout.{name}", lambda input, threshold, scale, seed: fake_like(input)
    )
    register("dropout", f"cuda.{name}", forward=forward, backward=backward, unsupported=unsupported)


for _name in climb("dropout"):
    _register(_name)
