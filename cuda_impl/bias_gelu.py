"""Bias and GELU in CUDA C++: ``csrc/bias_gelu.cu``."""

from __future__ import annotations

import torch

from cuda_impl import climb, fake_like, unsupported
from kernel_ladder.semantics.strides import collapse
from kernel_ladder.table import register
from kernel_ladder.tracing import address

#: Rungs that share the backward kernels of another.
_BACKWARD_OF = {"vectorized": "multirow"}


def _vectorized_unsupported(input: torch.Tensor, bias: torch.Tensor, *, approximate: str) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    vector = 16 // input.element_size()
    aligned = bias.shape[0] % vector == 0 and address(input) % 16 == 0 and address(bias) % 16 == 0
    if not aligned or bias.stride(0) != 1 or not _has_even_rows(input, vector):
        return "takes rows at one stride that consist of aligned vectors of 16 bytes; use cuda.multirow"
    if input.numel() // vector >= 2**31:
        return "takes fewer than 2^31 vectors; use cuda.multirow"
    return None


def _has_even_rows(input: torch.Tensor, vector: int) -> bool:
    """Whether rows of the last dimension are dense and lie at one stride, a multiple of a vector."""
    if input.is_contiguous():  # as it mostly is
        return True
    if input.stride(-1) != 1:
        return False
    sizes, (steps,) = collapse(input.shape[:-1], input.stride()[:-1])
    return len(sizes) == 1 and steps[0] % vector == 0


def _register(name: str) -> None:
    ops = torch.ops.kernel_ladder
    run, run_backward = getattr(ops.bias_gelu, name), getattr(ops.bias_gelu_backward, _BACKWARD_OF.get(name, name))

    def forward(input: torch.Tensor, bias: torch.Tensor, *, approximate: str) -> tuple[torch.Tensor, tuple]:
        return run(input, bias, approximate), (input, bias, approximate)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        return run_backward(grad, *saved)

    torch.library.register_fake(f"kernel_ladder::bias_gelu.{name}", lambda input, bias, approximate: fake_like(input))
    if name not in _BACKWARD_OF:
        torch.library.register_fake(
            f"kernel_ladder::bias_gelu_backward.{name}",
            lambda grad, input, bias, approximate: (fake_like(input), bias.new_empty(bias.shape)),
        )
    takes = _vectorized_unsupported if name == "vectorized" else unsupported
    register("bias_gelu", f"cuda.{name}", forward=forward, backward=backward, unsupported=takes)


for _name in climb("bias_gelu"):
    _register(_name)
