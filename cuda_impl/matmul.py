"""Matrix product in CUDA C++: ``csrc/matmul/``. The kernels broadcast batches and read any strides themselves."""

from __future__ import annotations

import torch

from cuda_impl import climb, skinny_unsupported, unsupported
from kernel_ladder.matmul_shapes import output_shape
from kernel_ladder.precision import tf32_allowed
from kernel_ladder.table import register


def _fold(tensor: torch.Tensor, dims: list[int], dim: int) -> torch.Tensor:
    """Move batch dimensions `dims` in front of the matrix dimension `dim` (-2 or -1) and merge them with it.

    A sum over batches of products becomes one product over a longer inner dimension, accumulated in float32.
    A copy is made only where the strides of the merged dimensions do not fit together.
    """
    if not dims:
        return tensor
    kept = [d for d in range(tensor.dim() - 2) if d not in dims]
    rows, columns = tensor.dim() - 2, tensor.dim() - 1
    order = [*kept, *dims, rows, columns] if dim == -2 else [*kept, rows, *dims, columns]
    return tensor.permute(order).flatten(len(order) - len(dims) + dim, len(order) + dim)


def _gradients(run, input, other, grad, needs):  # type: ignore[no-untyped-def]
    """dA = dC · Bᵀ and dB = Aᵀ · dC, on transposed views, summed over the batches that an operand was broadcast to."""
    if other.dim() == 1:
        grad = grad.unsqueeze(-1)
    if input.dim() == 1:
        grad = grad.unsqueeze(-2)
    batch_dims = grad.dim() - 2
    a = input.unsqueeze(0) if input.dim() == 1 else input
    b = other.unsqueeze(-1) if other.dim() == 1 else other
    a = a.reshape((1,) * (batch_dims + 2 - a.dim()) + a.shape) if a.dim() < batch_dims + 2 else a
    b = b.reshape((1,) * (batch_dims + 2 - b.dim()) + b.shape) if b.dim() < batch_dims + 2 else b
    grad_input = grad_other = None
    if needs[0]:
        summed = [d for d in range(batch_dims) if a.shape[d] != grad.shape[d]]
        grad_input = run(_fold(grad, summed, -1), _fold(b.mT, summed, -2)).reshape(input.shape)
    if needs[1]:
        summed = [d for d in range(batch_dims) if b.shape[d] != grad.shape[d]]
        grad_other = run(_fold(a.mT, summed, -1), _fold(grad, summed, -2)).reshape(other.shape)
    return grad_input, grad_other


def _mma_unsupported(input: torch.Tensor, other: torch.Tensor) -> str | None:
    if input.dtype is torch.float32 and input.is_cuda and not tf32_allowed():
        return (
            "float32 on tensor cores is tf32, which is off (torch.backends.cuda.matmul.allow_tf32 = True turns it on)"
        )
    return unsupported(input, other)


def _skinny_unsupported(input: torch.Tensor, other: torch.Tensor) -> str | None:
    return unsupported(input, other) or skinny_unsupported(input, other)


_UNSUPPORTED = {"mma": _mma_unsupported, "skinny": _skinny_unsupported}


def _register(name: str) -> None:
    overload = getattr(torch.ops.kernel_ladder.matmul, name)
    if name == "mma":

        def run(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            # Only float32 asks for the switch, and only where it is on does `unsupported` let float32 come here.
            return overload(input, other, input.dtype == torch.float32)

    else:
        run = overload

    def many_rows(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.ops.kernel_ladder.matmul.mma(input, other, False)

    # The gradient of `other` has as many rows as it has.
    multiply = many_rows if name == "skinny" else run

    def forward(input: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, tuple]:
        return run(input, other), (input, other)

    def backward(
        saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return _gradients(multiply, *saved, grad, needs)

    def fake(input: torch.Tensor, other: torch.Tensor, allow_tf32: bool = False) -> torch.Tensor:
        return input.new_empty(output_shape(input, other))

    torch.library.register_fake(f"kernel_ladder::matmul.{name}", fake)
    takes = _UNSUPPORTED.get(name, unsupported)
    register("matmul", f"cuda.{name}", forward=forward, backward=backward, unsupported=takes)


for _name in climb("matmul"):
    _register(_name)
