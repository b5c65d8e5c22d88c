"""Sum in CUDA C++: ``csrc/sum.cu``."""

from __future__ import annotations

import math

import torch

from cuda_impl import climb, unsupported
from kernel_ladder.semantics.reduction import Dim, reduced_dims, spread, sum_shape
from kernel_ladder.table import register

#: The most elements that one thread may sum: more would take seconds.
NAIVE_LIMIT = 2**20


def summed(input: torch.Tensor, dims: tuple[int, ...], keepdim: bool) -> torch.Tensor:
    """The sum over `dims`, by the last step of the climb: for gradients of operations that broadcast."""
    return torch.ops.kernel_ladder.sum.two_stage(input, dims, keepdim)


def _naive_unsupported(input: torch.Tensor, *, dim: Dim, keepdim: bool) -> str | None:
    length = math.prod([input.shape[d] for d in reduced_dims(dim, input.dim())])  # a list, which torch.compile traces
    if length > NAIVE_LIMIT:
        return f"one thread would add up {length} elements; it is refused past {NAIVE_LIMIT}"
    return unsupported(input)


def _register(name: str) -> None:
    run = getattr(torch.ops.kernel_ladder.sum, name)

    def forward(input: torch.Tensor, *, dim: Dim, keepdim: bool) -> tuple[torch.Tensor, tuple]:
        dims = reduced_dims(dim, input.dim())
        return run(input, dims, keepdim), (input.shape, dims, keepdim)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
        return (spread(grad, *saved),)

    def fake(input: torch.Tensor, dim: list[int], keepdim: bool) -> torch.Tensor:
        return input.new_empty(sum_shape(input.shape, tuple(dim), keepdim))

    torch.library.register_fake(f"kernel_ladder::sum.{name}", fake)
    takes = _naive_unsupported if name == "naive" else unsupported
    register("sum", f"cuda.{name}", forward=forward, backward=backward, unsupported=takes)


for _name in climb("sum"):
    _register(_name)
