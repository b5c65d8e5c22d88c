"""Addition in CUDA C++: ``csrc/add.cu``; gradients of what was broadcast by ``csrc/sum.cu``."""

from __future__ import annotations

import torch

from cuda_impl import climb, fake_like, unsupported
from cuda_impl.sum import summed
from kernel_ladder.semantics.reduction import gradients_of_broadcast
from kernel_ladder.table import register


def _register(name: str) -> None:
    run = getattr(torch.ops.kernel_ladder.add, name)

    def forward(input: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, tuple]:
        return run(input, other), (input.shape, other.shape)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
        return gradients_of_broadcast(grad, saved, needs, summed)

    def fake(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        shape = torch.broadcast_shapes(input.shape, other.shape)
        like = next((x for x in (input, other) if x.shape == shape), None)
        return input.new_empty(shape) if like is None else fake_like(like)

    torch.library.register_fake(f"kernel_ladder::add.{name}", fake)
    register("add", f"cuda.{name}", forward=forward, backward=backward, unsupported=unsupported)


for _name in climb("add"):
    _register(_name)
