"""Matrix products whose operand is gathered, or whose result is summed and scattered, while they compute.

Tensor parallelism with the sequence sharded in between needs both. Rows are gathered before the first product of a
block; the summands of the last one are added up and scattered by rows. Each is the other's gradient. The data travels
in n parts, beside the product of a part that is there (Wang et al., Overlap Communication with Dependent Computation
via Decomposition, ASPLOS 2023). By copy engines every part goes directly to the rank that needs it; by messages parts
go around a ring. The order of sums is fixed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from kernel_ladder import ops
from kernel_ladder.distributed.exchange import check_group, direct, exchange, gather
from kernel_ladder.distributed.peer_copy import guarded
from kernel_ladder.distributed.same import check_same
from kernel_ladder.distributed.sums import sum_parts
from kernel_ladder.spec import check_tensors


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a caller's name, a group and more, whose errors name both where another rank is gone."""

    @functools.wraps(function)
    def call(caller: str, group: Any, *args: Any, **options: Any) -> Any:
        return guarded(caller, group, function, caller, group, *args, **options)

    return call


@_guarded
def _gather_matmul(
    caller: str, group: Any, part: torch.Tensor, other: torch.Tensor, backend: str | None, keep: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The product of all ranks' rows with `other`, and these rows if `keep`."""
    rows, size = part.shape[0], dist.get_world_size(group)
    output = part.new_empty((size * rows, other.shape[1]))
    gathered = part.new_empty((size * rows, part.shape[1])) if keep else None
    for owner, owned in gather(caller, group, part.contiguous()):
        place = slice(owner * rows, (owner + 1) * rows)
        output[place] = ops.matmul(owned, other, backend=backend)
        if gathered is not None:
            gathered[place] = owned
    return output, gathered


@_guarded
def _matmul_scatter(
    caller: str, group: Any, input: torch.Tensor, other: torch.Tensor, backend: str | None
) -> torch.Tensor:
    """This rank's rows of the sum over ranks of ``input @ other``.

    By copies, every rank sends its summands to the ranks whose rows they are. By messages, the sum of part c begins at
    rank c + 1, and each rank on the way to c adds its summand.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rows = input.shape[0] // size

    def summand(distance: int) -> torch.Tensor:
        begin = (rank - distance) % size * rows
        return ops.matmul(input[begin : begin + rows], other, backend=backend)

    if size == 1:
        return summand(0)
    total = summand(1)
    copies = direct(caller, group, "summands", total)
    if copies is not None:
        copies.send(1, total)
        for distance in range(2, size):
            copies.send(distance, summand(distance))
        total = sum_parts(summand(0), copies.wait_for_all())
        copies.finish()
        return total
    hops = exchange(caller, group, "sums", total)
    for distance in range(2, size + 1):
        hops.send(total)
        total = summand(distance)
        total += hops.wait()[0]
    return total


class _AllGatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, backend: str | None, input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        output, _ = _gather_matmul("all_gather_matmul", group, input, other, backend)
        ctx.save_for_backward(input, other)
        ctx.call = group, backend
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        input, other = ctx.saved_tensors
        group, backend = ctx.call
        of_input = of_other = None
        if ctx.needs_input_grad[2]:
            of_input = _matmul_scatter("all_gather_matmul", group, grad, other.mT, backend)
        if ctx.needs_input_grad[3]:  # one product of the rows gathered again: their memory is not kept from the forward
            gathered = input.new_empty((grad.shape[0], input.shape[1]))
            dist.all_gather_into_tensor(gathered, input.contiguous(), group)
            of_other = ops.matmul(gathered.mT, grad, backend=backend)
        return None, None, of_input, of_other


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, backend: str | None, input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, other)
        ctx.call = group, backend
        return _matmul_scatter("matmul_reduce_scatter", group, input, other, backend)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        input, other = ctx.saved_tensors
        group, backend = ctx.call
        keep = ctx.needs_input_grad[3]
        of_input, gathered = _gather_matmul("matmul_reduce_scatter", group, grad, other.mT, backend, keep)
        of_other = None if gathered is None else ops.matmul(input.mT, gathered, backend=backend)
        return None, None, of_input, of_other


def _check(caller: str, group: Any, input: Any, other: Any) -> None:
    check_group(caller, group)
    tensors = {"input": input, "other": other}
    check_tensors(caller, **tensors)  # before anything is sent: a rank that raises later leaves the others waiting
    for name, x in tensors.items():
        if x.dim() != 2:
            raise ValueError(f"{caller}: argument `{name}` must be a matrix, got shape {tuple(x.shape)}")
    if input.shape[1] != other.shape[0]:
        raise ValueError(
            f"{caller}: the columns of `input` must be as many as the rows of `other`, got shapes "
            f"{tuple(input.shape)} and {tuple(other.shape)}"
        )


def all_gather_matmul(
    input: torch.Tensor, other: torch.Tensor, *, group: Any = None, backend: str | None = None
) -> torch.Tensor:
    """``gather(input) @ other``, the rows of all ranks gathered while the product computes.

    Args:
        input: this rank's rows ``(M / n, K)``, of the same shape on each of the n ranks.
        other: ``(K, N)``, this rank's columns of a weight, say; of the same dtype, any strides.
        group: the process group; None: the default one. Every rank of it must call.
        backend: see :func:`kernel_ladder.use`; of the product.

    Returns:
        ``(M, N)``, rows in the order of ranks. Differentiable once: the gradient of `input` is that of
        :func:`matmul_reduce_scatter`.

    Raises:
        ValueError, TypeError: operands that do not fit, or a `group` without this process. ValueError, on every rank:
            operands that do not fit another rank's, found in the first call with their shapes. RuntimeError: no process
            group, or a neighbour that is gone.
    """
    _check("all_gather_matmul", group, input, other)
    of_input = tuple(input.shape)
    check_same("all_gather_matmul", group, input.device, shape_of_input=of_input, dtype_of_input=input.dtype)
    return _AllGatherMatmul.apply(group, backend, input, other)


def matmul_reduce_scatter(
    input: torch.Tensor, other: torch.Tensor, *, group: Any = None, backend: str | None = None
) -> torch.Tensor:
    """This rank's rows of the sum over ranks of ``input @ other``, summed and sent while the product computes.

    Args:
        input: ``(M, K)``; M is a multiple of the number n of ranks.
        other: ``(K, N)``, this rank's rows of a weight, say; of the same dtype, any strides.
        group: the process group; None: the default one. Every rank of it must call, with the same M and N.
        backend: see :func:`kernel_ladder.use`; of the product.

    Returns:
        ``(M / n, N)``, of the inputs' dtype, to which every summand is rounded. By copies the sum is then float32 and
        rounds once; by messages each of the n − 1 additions rounds. Differentiable once.

    Raises:
        ValueError, TypeError: operands that do not fit, or a `group` without this process. ValueError, on every rank:
            operands that do not fit another rank's, found in the first call with their shapes. RuntimeError: no process
            group, or a neighbour that is gone.
    """
    _check("matmul_reduce_scatter", group, input, other)
    size = dist.get_world_size(group)
    if input.shape[0] % size:
        raise ValueError(
            f"matmul_reduce_scatter: the rows of `input` must be a multiple of the {size} ranks, got {input.shape[0]}"
        )
    check_same(
        "matmul_reduce_scatter", group, input.device, rows_of_input=input.shape[0], columns_of_other=other.shape[1],
        dtype_of_input=input.dtype,
    )  # fmt: skip
    return _MatmulReduceScatter.apply(group, backend, input, other)
