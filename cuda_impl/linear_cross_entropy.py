"""The loss of a linear layer in CUDA C++: ``csrc/linear_cross_entropy.cu``. This module loops over chunks of rows.

The passes around them are those of ``kernel_ladder/semantics/chunked_loss.py``.

A product is matmul's: on Hopper's tensor cores by the rung that the selection names for its operands, elsewhere by
``mma``, in exact float32 by ``registers``. So the input's gradient, whose tiles are few and whose k is all classes,
goes by ``stream_k`` or ``split_k``. The products that add to the weight's gradient have one kernel for each of these.

Device memory beyond the gradients: a chunk's logits and what its products need (:mod:`cuda_impl.matmul`); where TMA
cannot read the input's rows, a copy of a chunk's. Every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cuda_impl import climb, not_hopper, unsupported
from cuda_impl.matmul import selection  # with the driver's answer to how many blocks run at once
from kernel_ladder.semantics import chunked_loss
from kernel_ladder.semantics.chunked_loss import sum_dtype
from kernel_ladder.semantics.cross_entropy import LossOptions
from kernel_ladder.semantics.precision import tf32_allowed
from kernel_ladder.table import register
from kernel_ladder.tracing import address

#: Chunks that the rows are cut into at most, the least rows of one, and what divides those. Fewer rows give the input's
#: gradient too few tiles for a GPU: 1024 rows of 2048 columns have 128 of 128².
CHUNKS, LEAST_ROWS, ROW_MULTIPLE = 12, 1024, 128
#: Rows of logits begin at multiples of 16 bytes where TMA reads them.
VECTOR_BYTES = 16

_operators = torch.ops.kernel_ladder


class _Options(LossOptions):
    @property
    def numbers(self) -> tuple[int, float, float]:
        """What the kernels of a row's loss take."""
        return self.ignore_index, self.label_smoothing, self.z_loss


def _by_tma(x: torch.Tensor) -> bool:
    """Whether products of this dtype are those of Hopper's tensor cores."""
    return (x.dtype is not torch.float32 or tf32_allowed()) and not_hopper(x.get_device()) is None


def multiply(output: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``output = a @ b``, of matrices. Padding of the output's rows, to a multiple of 16 bytes, has any value then."""
    if 0 in (*output.shape, a.shape[1]):
        output.zero_()
        return
    tf32, rung, tile = a.dtype is torch.float32 and tf32_allowed(), "mma", (0, 0, 0, False)
    if a.dtype is torch.float32 and not tf32:
        rung = "registers"
    elif _by_tma(a):
        output = _with_padding(output)
        name, *of_tile = selection.plan(a, b)
        rung, tile = name.removeprefix("cuda."), tuple(of_tile)
    _operators.linear_cross_entropy_product.chunked(a, b, output, rung, tf32, *tile)


def add_product(output: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``output += a @ b``, of matrices; `output` is dense."""
    tf32 = a.dtype is torch.float32 and tf32_allowed()
    _operators.linear_cross_entropy_add_product.chunked(a, b, output, tf32, _by_tma(a))


def rows_of_chunk(n_rows: int) -> int:
    """Rows of every chunk but the last: a multiple of a tile's, which keeps operands aligned too."""
    return max(LEAST_ROWS, -(-n_rows // (CHUNKS * ROW_MULTIPLE)) * ROW_MULTIPLE)


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same rows of each tensor, a chunk at a time."""
    n_rows = tensors[0].shape[0]
    step = rows_of_chunk(n_rows)
    for first in range(0, n_rows, step):
        # Unlike an index, `narrow` takes tensors without data where no GPU is.
        yield tuple([x.narrow(0, first, min(step, n_rows - first)) for x in tensors])


def _empty_rows(x: torch.Tensor, columns: int, aligned: bool) -> torch.Tensor:
    """Room for as many rows as `x` has; `aligned`: each begins at a multiple of 16 bytes."""
    grid = VECTOR_BYTES // x.element_size() if aligned else 1
    rows = torch.empty((x.shape[0], -(-columns // grid) * grid), dtype=x.dtype, device=x.device)
    return rows.narrow(1, 0, columns)


def _with_padding(rows: torch.Tensor) -> torch.Tensor:
    """`rows` of :func:`_empty_rows` with their padding, which TMA writes too; others as they are."""
    step = rows.stride(0)
    padded = rows.shape[1] < step < rows.shape[1] + VECTOR_BYTES // rows.element_size()
    return rows.as_strided((rows.shape[0], step), (step, 1)) if padded else rows


def _empty_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Room for the logits of `x`: with padded rows where TMA reads and writes them."""
    return _empty_rows(x, weight.shape[0], _by_tma(x))


def _readable(x: torch.Tensor) -> torch.Tensor:
    """A chunk's rows where vectors of 16 bytes lie along them, or a copy of them."""
    grid = VECTOR_BYTES // x.element_size()
    if x.stride(1) == 1 and x.stride(0) % grid == 0 and address(x) % VECTOR_BYTES == 0:
        return x
    # Called by its operator's name, `copy_` takes tensors without data where no GPU is.
    return torch.ops.aten.copy_.default(_empty_rows(x, x.shape[1], aligned=True), x)


def _losses(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, options: _Options, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the losses of a chunk, and return its logits, with the softmax state of each row."""
    logits = _empty_logits(x, weight)
    multiply(logits, x, weight.mT)
    stats = torch.empty(2 * x.shape[0], dtype=torch.float32, device=x.device)
    _operators.linear_cross_entropy.chunked(logits, labels, losses, stats, *options.numbers)
    return logits, stats


def _gradients(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    options: _Options,
    losses: torch.Tensor,
    grad: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write each row's loss, and return the gradients of input and weight, where `grad` has that of each row's loss."""
    grad_input = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    dtype = sum_dtype(weight.dtype)
    add = dtype is not weight.dtype  # a product has the dtype of its operands, so the first of float16 is added too
    make = torch.zeros if add or not input.shape[0] else torch.empty
    grad_weight = make(weight.shape, dtype=dtype, device=weight.device)
    for rows, labels, of_losses, grads, of_input in _chunks(input, target, losses, grad, grad_input):
        x = _readable(rows)
        logits, stats = _losses(x, weight, labels, options, of_losses)
        _operators.linear_cross_entropy_backward.chunked(grads, labels, stats, logits, *options.numbers)
        multiply(of_input, logits, weight)
        (add_product if add else multiply)(grad_weight, logits.mT, x)
        add = True
        del logits, stats  # before the next chunk's are made
    return grad_input, grad_weight


def _write_losses(
    input: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, options: _Options, losses: torch.Tensor
) -> None:
    for rows, labels, of_losses in _chunks(input, target, losses):
        _losses(_readable(rows), weight, labels, options, of_losses)


def _total(
    output: torch.Tensor, count: torch.Tensor, losses: torch.Tensor, target: torch.Tensor, options: _Options
) -> None:
    mean = options.reduction == "mean"
    _operators.linear_cross_entropy_sum.chunked(losses, target, output, count, options.ignore_index, mean)


def _scale(output: torch.Tensor, sums: torch.Tensor, grad: torch.Tensor, count: torch.Tensor, mean: bool) -> None:
    _operators.linear_cross_entropy_scale.chunked(sums, grad, count, output, mean)


def _register(name: str) -> None:
    for suffix in ("", "_backward", "_product", "_add_product", "_sum", "_scale"):
        operator = f"kernel_ladder::linear_cross_entropy{suffix}.{name}"
        torch.library.register_fake(operator, lambda *arguments: None)  # each writes to its arguments
    launches = chunked_loss.Launches(_Options, _write_losses, _gradients, _total, _scale)
    register("linear_cross_entropy", f"cuda.{name}", **chunked_loss.passes(launches), unsupported=unsupported)


for _name in climb("linear_cross_entropy"):
    _register(_name)
