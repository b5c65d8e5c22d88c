"""Host code shared by every rung of matmul: the shapes of torch.matmul, cached launches, and the gradients.

A rung gives a :data:`Write`. Forward and both gradients run it: ``dA = dC · Bᵀ`` and ``dB = Aᵀ · dC`` are products of
transposed views.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernel_ladder.semantics.matmul_shapes import as_matrices, batch_shape, output_shape, sum_to
from kernel_ladder.semantics.precision import tf32_allowed
from kernel_ladder.tracing import shapes_only
from triton_impl.runtime.descriptor_launch import ALIGNMENT_BYTES
from triton_impl.runtime.launch_cache import LaunchCache

#: Writes ``a @ b`` into contiguous `c`, all of the same batch dimensions. Returns a function of (c, a, b) that does it
#: again, or None where that took more than one launch.
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Callable[..., None] | None]

#: Writes by tensor descriptors. Where an operand's memory begins decides whether it must be copied.
described: set[Write] = set()

#: By all that decides how two operands are multiplied: the output's shape, and the launch.
_launches: LaunchCache = LaunchCache()


def product(input: torch.Tensor, other: torch.Tensor, dtype: torch.dtype, write: Write) -> torch.Tensor:
    """``input @ other`` with the shapes of torch.matmul and any strides, the output contiguous and of `dtype`."""
    if shapes_only():
        return torch.empty(output_shape(input, other), dtype=dtype, device=input.device)
    tf32 = input.dtype == torch.float32 and tf32_allowed()
    device = input.device
    begin = None
    if write in described:
        begin = input.data_ptr() % ALIGNMENT_BYTES, other.data_ptr() % ALIGNMENT_BYTES
    key = (input.shape, input.stride(), other.shape, other.stride(), begin, input.dtype, dtype, tf32, device, write)
    known = _launches.get(key)
    if known is None:
        output, launch = _first_product(input, other, dtype, write)
        if launch is not None:
            _launches.remember(key, (output.shape, launch))
        return output
    shape, launch = known
    output = torch.empty(shape, dtype=dtype, device=device)
    launch(output, input, other)
    return output


def _first_product(
    input: torch.Tensor, other: torch.Tensor, dtype: torch.dtype, write: Write
) -> tuple[torch.Tensor, Callable[..., None] | None]:
    """The product, and the launch that made it if it was one launch on the memory of `input` and `other`."""
    a, b = as_matrices(input, other)
    m, k = a.shape[-2:]
    n = b.shape[-1]
    batch = batch_shape(a, b)
    # The view is `c`: autograd refuses to modify in place an output that is a view.
    output = torch.empty(output_shape(input, other), dtype=dtype, device=a.device)
    c = output.view(*batch, m, n)
    if c.numel() == 0 or k == 0:
        c.zero_()
        return output, None
    if batch:
        a, b = a.expand(*batch, m, k), b.expand(*batch, k, n)
    return output, write(c, a, b)


def forward_by(write: Write) -> Callable[..., tuple[torch.Tensor, tuple]]:
    """A rung's `forward`."""

    def forward(input: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, tuple]:
        return product(input, other, input.dtype, write), (input, other)

    return forward


def backward_by(
    write: Write, prepare: Callable[[torch.Tensor], torch.Tensor] = lambda grad: grad
) -> Callable[..., tuple[torch.Tensor | None, torch.Tensor | None]]:
    """A rung's `backward`. `prepare` lays the output's gradient out as the rung's kernel takes it."""

    def backward(
        saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        input, other = saved
        a, b = as_matrices(input, other)
        # A view, unless the strides of the gradient keep rows from folding.
        grad = prepare(grad.reshape(*batch_shape(a, b), a.shape[-2], b.shape[-1]))
        grad_a = _gradient(grad, b.mT, a, write) if needs[0] else None
        grad_b = _gradient(a.mT, grad, b, write) if needs[1] else None
        return (
            None if grad_a is None else grad_a.view(input.shape),
            None if grad_b is None else grad_b.view(other.shape),
        )

    return backward


def _gradient(left: torch.Tensor, right: torch.Tensor, like: torch.Tensor, write: Write) -> torch.Tensor:
    """``left @ right`` in the shape of `like`: summed over broadcast batch dimensions before it is rounded."""
    batch = batch_shape(left, right)
    if batch == like.shape[:-2]:
        return product(left, right, like.dtype, write)
    return sum_to(product(left, right, torch.float32, write), like.shape, like.dtype)
