"""Matrix product in CUDA C++: ``csrc/matmul/``. The kernels broadcast batches and read any strides themselves.

`thread_tile`, `vectorized` and `double_buffered` are teaching rungs for the plain case: two row-major float32 matrices.

A gradient is a product too. Each rung computes it with its own kernels, save where they do not take its operands. The
teaching rungs and `registers_tma` then use `registers`, and `skinny` uses `mma`.

Device memory beyond the output: on Hopper, operands that TMA cannot read are copied where the product is worth it, at
most 64 MiB of them at a time. So are, in `split_k` an `input` of at most 32 rows that lie along memory, and in
`registers_tma` the smaller of two operands that both lie along k. `stream_k`, and products of operands that are not
copied, have a workspace of 128 KiB for each multiprocessor (17 MiB on an H200). Every run gives the same bits: partial
sums are added in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from cuda_impl import climb, extension, not_hopper, skinny_unsupported, unsupported
from kernel_ladder import gpu
from kernel_ladder.selection import matmul as selection
from kernel_ladder.semantics.matmul_shapes import as_matrices, batch_shape, output_shape
from kernel_ladder.semantics.precision import tf32_allowed
from kernel_ladder.semantics.strides import collapse
from kernel_ladder.table import register
from kernel_ladder.tracing import address


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


def tma_unsupported(input: torch.Tensor, other: torch.Tensor) -> str | None:
    """For the rungs that show TMA alone.

    TMA may be unable to read the operands of their gradients: those are padded, or read with plain loads by the kernel
    of ``persistent``.
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


#: The tile of the teaching rungs: rows, columns, k.
TILE = (128, 128, 8)


def _plain_unsupported(input: torch.Tensor, other: torch.Tensor) -> str | None:
    if (reason := unsupported(input, other)) is not None:
        return reason
    if input.dtype is not torch.float32:
        return "takes float32"
    if input.dim() != 2 or other.dim() != 2 or not input.is_contiguous() or not other.is_contiguous():
        return "takes two row-major matrices without gaps"
    if any(size == 0 or size % tile for size, tile in zip((*input.shape, other.shape[1]), (128, 8, 128), strict=True)):
        return "takes multiples of {} rows, {} columns and {} of the inner dimension".format(*TILE)
    if address(input) % 16 or address(other) % 16:
        return "takes operands that begin at multiples of 16 bytes"
    return None


#: `registers_tma`: a smaller product would leave most of a tile empty.
TMA_MIN_SIZE = 64
#: The copy of an operand, in elements (64 MiB); how often each must be used, and multiply-adds that are worth a copy.
TRANSPOSE_MAX_ELEMENTS = 1 << 24
TRANSPOSE_MIN_USES = 512
TRANSPOSE_MIN_PRODUCT = 1 << 30
#: Coordinates of TMA have 32 bits, and go past the end by a tile.
TMA_MAX_SIZE = 2**31 - 1 - 1024


def _registers_tma_unsupported(input: torch.Tensor, other: torch.Tensor) -> str | None:
    if (reason := unsupported(input, other)) is not None:
        return reason
    if input.dtype is not torch.float32:
        return "takes float32; the 16-bit dtypes belong on tensor cores"
    if (reason := not_hopper(input.get_device())) is not None:
        return reason
    a, b = as_matrices(input, other)
    (m, k), n = a.shape[-2:], b.shape[-1]
    if min(m, n) <= TMA_MIN_SIZE or k == 0:
        return f"takes more than {TMA_MIN_SIZE} rows and columns"
    batches, a_step, b_step = 1, 0, 0
    if a.dim() > 2 or b.dim() > 2:
        batch = batch_shape(a, b)
        strides = [x.expand(*batch, *x.shape[-2:]).stride()[:-2] for x in (a, b)]
        sizes, merged = collapse(batch, *strides)
        if len(sizes) > 1:
            return "TMA walks batches of one stride, and these need several"
        batches, a_step, b_step = sizes[0], merged[0][0], merged[1][0]
    if max(m, n, k, batches) > TMA_MAX_SIZE:
        return f"takes sizes up to {TMA_MAX_SIZE}"
    if address(a) % 16 or address(b) % 16 or (batches > 1 and (a_step % 4 or b_step % 4)):
        return "TMA reads matrices that begin at multiples of 16 bytes"
    (a_m, a_k), (b_k, b_n) = a.stride()[-2:], b.stride()[-2:]
    a_along_k, a_along_m = _reads(k, a_k, m, a_m), _reads(m, a_m, k, a_k)
    b_along_k, b_along_n = _reads(k, b_k, n, b_n), _reads(n, b_n, k, b_k)
    if (b_along_n and (a_along_k or a_along_m)) or (a_along_m and b_along_k):
        return None
    if not a_along_k or not b_along_k:
        return "TMA reads along memory, in rows that begin at multiples of 16 bytes"
    # Both lie along k: the smaller is copied to lie along its rows or columns.
    a_copy = (batches if a_step else 1) * k * -(-m // 4) * 4
    b_copy = (batches if b_step else 1) * k * -(-n // 4) * 4
    if min(a_copy, b_copy) > TRANSPOSE_MAX_ELEMENTS:
        return "both operands lie along the inner dimension, and a transposed copy of one takes more than 64 MiB"
    if (n if a_copy < b_copy else m) < TRANSPOSE_MIN_USES or m * n * batches < TRANSPOSE_MIN_PRODUCT // k:
        return "both operands lie along the inner dimension, and the product is not worth a transposed copy of one"
    return None


def _reads(inner: int, inner_stride: int, outer: int, outer_stride: int) -> bool:
    """Whether TMA reads a float32 matrix along its dimension `inner`."""
    return (inner == 1 or inner_stride == 1) and (outer == 1 or (outer_stride > 0 and outer_stride % 4 == 0))


@gpu.cached
def _blocks_at_once(device: int) -> tuple[int, ...]:
    """How many blocks of `split_k` run at once, in clusters of 1, 2, 4 and 8: the driver's answer, else an estimate."""
    module = extension()
    if module is None or gpu.pretended() or not torch.cuda.is_available() or not_hopper(device) is not None:
        return selection.whole_clusters(device)
    return tuple(module.split_k_blocks_at_once(device))


selection.blocks_at_once = _blocks_at_once

#: Rungs on tensor cores that take tf32, with what keeps each from a call.
_TENSOR_CORES = {
    "mma": _mma_unsupported,
    "wgmma": tma_unsupported,
    "warp_specialized": tma_unsupported,
    "cluster": tma_unsupported,
    "persistent": _hopper_unsupported,
    "stream_k": _hopper_unsupported,
    "split_k": _hopper_unsupported,
}


#: Other rungs, with what keeps each from a call.
_CUDA_CORES = {
    "thread_tile": _plain_unsupported,
    "vectorized": _plain_unsupported,
    "double_buffered": _plain_unsupported,
    "registers_tma": _registers_tma_unsupported,
    "skinny": _skinny_unsupported,
}


@functools.cache
def _launcher(name: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A function of two operands that runs a rung's kernels."""
    overload = getattr(torch.ops.kernel_ladder.matmul, name)
    # Only float32 asks for tf32, and only where it is allowed does `unsupported` let float32 come here.
    if name == "split_k":

        def run_split_k(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            _, rows, columns, splits, pair = selection.plan(input, other)
            return overload(input, other, input.dtype == torch.float32, rows, columns, splits, pair)

        return run_split_k
    if name in _TENSOR_CORES:
        return lambda input, other: overload(input, other, input.dtype == torch.float32)
    return overload


def on_hopper(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The product by the rung that the selection names, for gradients of other operations."""
    return _launcher(selection.plan(input, other).rung.removeprefix("cuda."))(input, other)


@functools.cache
def product_for_gradients(name: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """What multiplies the operands of a rung's gradients, which lie otherwise than those of the call."""
    run = _launcher(name)
    if name == "skinny":  # the gradient of `other` has as many rows as it has
        return _launcher("mma")
    if (
        name == "split_k"
    ):  # of few rows and a long K the gradients have many rows, or a short K: they share the selection
        return on_hopper
    if (takes := _CUDA_CORES.get(name)) is None:
        return run
    registers = _launcher("registers")
    return lambda input, other: (run if takes(input, other) is None else registers)(input, other)


def _register(name: str) -> None:
    run, multiply = _launcher(name), product_for_gradients(name)
    takes = _TENSOR_CORES.get(name) or _CUDA_CORES.get(name) or unsupported

    def forward(input: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, tuple]:
        return run(input, other), (input, other)

    def backward(
        saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        input, other = saved
        return _gradients(multiply, input, other, grad, needs)

    def fake(input: torch.Tensor, other: torch.Tensor, *options: object) -> torch.Tensor:
        return input.new_empty(output_shape(input, other))

    torch.library.register_fake(f"kernel_ladder::matmul.{name}", fake)
    register("matmul", f"cuda.{name}", forward=forward, backward=backward, unsupported=takes)


for _name in climb("matmul"):
    _register(_name)
