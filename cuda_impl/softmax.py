"""Softmax in CUDA C++: ``csrc/softmax.cu``."""

from __future__ import annotations

import functools

import torch

from cuda_impl import climb, unsupported
from kernel_ladder.table import register


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that one block may ask for, less what the reductions need."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin - 1024


def _fits_on_chip(input: torch.Tensor, *, dim: int) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    # The backward pass keeps two rows: output and gradient.
    row_bytes = 2 * input.element_size() * (input.shape[dim] if input.dim() else 1)
    if row_bytes > (limit := _shared_bytes(input.device)):
        return (
            f"rows of {input.shape[dim]} elements do not fit in shared memory "
            f"(output and gradient take {row_bytes} of {limit} bytes)"
        )
    return None


def _register(name: str) -> None:
    ops = torch.ops.kernel_ladder
    run, run_backward = getattr(ops.softmax, name), getattr(ops.softmax_backward, name)

    def forward(input: torch.Tensor, *, dim: int) -> tuple[torch.Tensor, tuple]:
        output = run(input, dim)
        return output, (output, dim)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
        output, dim = saved
        return (run_backward(grad, output, dim),)

    torch.library.register_fake(f"kernel_ladder::softmax.{name}", lambda input, dim: torch.empty_like(input))
    torch.library.register_fake(
        f"kernel_ladder::softmax_backward.{name}", lambda grad, output, dim: torch.empty_like(output)
    )
    reason = _fits_on_chip if name == "shared" else unsupported
    register("softmax", f"cuda.{name}", forward=forward, backward=backward, unsupported=reason)


for _name in climb("softmax"):
    _register(_name)
