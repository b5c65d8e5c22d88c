"""Cross-entropy in CUDA C++: ``csrc/cross_entropy.cu``."""

from __future__ import annotations

from typing import Any

import torch

from cuda_impl import climb, fake_like, unsupported
from kernel_ladder.table import register
from kernel_ladder.tracing import shapes_only

OPTIONS = ("reduction", "ignore_index", "label_smoothing", "z_loss")


def _without_data(
    input: torch.Tensor, target: torch.Tensor, reduction: str, wide_loss: bool
) -> tuple[torch.Tensor, ...]:
    """Output, each row's softmax state, and the count of a mean, in the shapes of the operator's results."""
    dtype = torch.float32 if wide_loss else input.dtype
    output = input.new_empty(target.shape if reduction == "none" else (), dtype=dtype)
    sizes = 2 * target.numel(), int(reduction == "mean")
    return output, *[input.new_empty(size, dtype=torch.float32) for size in sizes]


def _register(name: str) -> None:
    ops = torch.ops.kernel_ladder
    run, run_backward = getattr(ops.cross_entropy, name), getattr(ops.cross_entropy_backward, name)

    def forward(
        input: torch.Tensor, target: torch.Tensor, *, wide_loss: bool = False, **options: Any
    ) -> tuple[torch.Tensor, tuple]:
        given = tuple([options[option] for option in OPTIONS])
        if shapes_only():
            output, *kept = _without_data(input, target, given[0], wide_loss)
        else:
            output, *kept = run(input, target, *given, wide_loss)
        return output, (input, target, *kept, *given)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, None]:
        input, target, *kept = saved
        if not needs[0]:
            return None, None
        if shapes_only():
            return fake_like(input), None
        return run_backward(grad.expand(target.shape), input, target, *kept), None

    @torch.library.register_fake(f"kernel_ladder::cross_entropy.{name}")
    def fake(input, target, reduction, ignore_index, label_smoothing, z_loss, wide_loss):
        return _without_data(input, target, reduction, wide_loss)

    torch.library.register_fake(
        f"kernel_ladder::cross_entropy_backward.{name}", lambda grad, input, *_: fake_like(input)
    )
    register("cross_entropy", f"cuda.{name}", forward=forward, backward=backward, unsupported=unsupported)


for _name in climb("cross_entropy"):
    _register(_name)
