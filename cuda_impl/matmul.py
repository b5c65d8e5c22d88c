"""Matrix product in CUDA C++: ``csrc/matmul/``. The kernels broadcast batches and read any strides themselves.

Device memory beyond the output: on Hopper, operands that TMA cannot read are copied where the product is worth it, at
most 64 MiB of them at a time, as are in `split_k` an `input` of at most 32 rows that lie along memory, and in
`registers` the smaller of two float32 operands that both lie along k; where tiles are shared out, by `stream_k` (and
`split_k` where it does the same) and for operands that are not copied, 128 KiB for each multiprocessor (17 MiB on an
H200). All give the same bits in every run: what is added up in parts is added in a fixed order.
"""

from __future__ import annotations

import torch

from cuda_impl import climb, not_hopper, skinny_unsupported, unsupported
from kernel_ladder.semantics.matmul_shapes import output_shape
from kernel_ladder.semantics.precision import tf32_allowed
from kernel_ladder.semantics.strides import collapse
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


def _hopper_unsupported(input: torch.Tensor, other: torch.Tensor) -> str | None:
    return _mma_unsupported(input, other) or not_hopper(input.device.index)


def _not_for_tma(tensor: torch.Tensor, name: str, k: int) -> str | None:
    """Why TMA cannot read an operand, or None. It addresses multiples of 16 bytes; `k` is the inner dimension."""
    grid = 16 // tensor.element_size()
    if tensor.storage_offset() % grid:
        return f"TMA reads from multiples of 16 bytes, where `{name}` does not begin"
    shape, strides = tensor.shape, tensor.stride()
    if len(shape) == 1:
        shape, strides, k = torch.Size((1, *shape)), (0, *strides), -1
    steps = [size == 1 or (stride > 0 and stride % grid == 0) for size, stride in zip(shape, strides, strict=True)]
    unit = [size == 1 or stride == 1 for size, stride in zip(shape, strides, strict=True)]
    x = -3 - k
    if not (unit[k] and steps[x]) and not (grid == 8 and unit[x] and steps[k]):
        along = "along memory" if grid == 8 else "tf32 along the inner dimension"
        return f"TMA reads {along}, in rows that begin at multiples of 16 bytes; `{name}` has strides {tuple(strides)}"
    if not all(step or stride == 0 for step, stride in zip(steps[:-2], strides[:-2], strict=True)):
        return f"TMA reads batches that begin at multiples of 16 bytes; `{name}` has strides {tuple(strides)}"
    return None


def _tma_unsupported(input: torch.Tensor, other: torch.Tensor) -> str | None:
    """For the steps that show TMA alone.

    The operands of their gradients may still be such that TMA cannot read them: those are treated as by ``persistent``.
    """
    reason = _hopper_unsupported(input, other)
    if reason is not None or not input.numel() or not other.numel():
        return reason
    if input.dim() > 3 or other.dim() > 3:
        batch = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])
        strides = [t.expand(*batch, *t.shape[-2:]).stride()[:-2] for t in (input, other) if t.dim() > 1]
        if len(collapse(batch, *strides)[0]) > 1:
            return "TMA walks batches of one stride, and these need several"
    return _not_for_tma(input, "input", -1) or _not_for_tma(other, "other", -2)


def _skinny_unsupported(input: torch.Tensor, other: torch.Tensor) -> str | None:
    return unsupported(input, other) or skinny_unsupported(input, other)


#: Steps that take tf32, with what keeps each from a call.
_TENSOR_CORES = {
    "mma": _mma_unsupported,
    "wgmma": _tma_unsupported,
    "warp_specialized": _tma_unsupported,
    "cluster": _tma_unsupported,
    "persistent": _hopper_unsupported,
    "stream_k": _hopper_unsupported,
    "split_k": _hopper_unsupported,
}


def _register(name: str) -> None:
    overload = getattr(torch.ops.kernel_ladder.matmul, name)
    takes = _skinny_unsupported if name == "skinny" else _TENSOR_CORES.get(name, unsupported)
    if name in _TENSOR_CORES:

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
    register("matmul", f"cuda.{name}", forward=forward, backward=backward, unsupported=takes)


for _name in climb("matmul"):
    _register(_name)
