"""What each rank of a group checks about products beside their communication: results and gradients of one GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kernel_ladder.distributed import all_gather_matmul, matmul_reduce_scatter, ring_attention, ring_attention_varlen


def compare(backend: str, dtype: torch.dtype, tolerance: float, unit: int = 1, device: str = "cpu") -> None:
    """Results and gradients against float64. Sizes are multiples of `unit`, `tolerance` a share of the largest."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    rows, inner, columns = 4 * size * unit, 6 * size * unit, 10 * size * unit
    shapes = (rows, inner), (columns, inner), (rows, columns)
    x, weight, grad = (torch.randn(s, dtype=dtype).to(device) for s in shapes)

    def whole() -> list[torch.Tensor]:
        leaves = x.double().requires_grad_(), weight.double().requires_grad_()
        y = leaves[0] @ leaves[1].mT
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.double())]

    def close(found: torch.Tensor, expected: torch.Tensor) -> None:
        largest = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=tolerance, atol=tolerance * largest)

    y, of_x, of_weight = whole()
    of_rank = lambda t, dim: t.chunk(size, dim)[rank].contiguous()  # noqa: E731

    # Rows of x gathered, columns of the weight sharded.
    part, own = of_rank(x, 0).requires_grad_(), of_rank(weight, 0).requires_grad_()
    found = all_gather_matmul(part, own.mT, backend=backend)
    close(found, of_rank(y, 1))
    of_part, of_own = torch.autograd.grad(found, (part, own), of_rank(grad, 1))
    close(of_part, of_rank(of_x, 0))
    close(of_own, of_rank(of_weight, 0))

    # The inner dimension sharded, the sum scattered by rows.
    part, own = of_rank(x, 1).requires_grad_(), of_rank(weight, 1).requires_grad_()
    found = matmul_reduce_scatter(part, own.mT, backend=backend)
    close(found, of_rank(y, 0))
    of_part, of_own = torch.autograd.grad(found, (part, own), of_rank(grad, 0))
    close(of_part, of_rank(of_x, 1))
    close(of_own, of_rank(of_weight, 1))
    assert torch.equal(found, matmul_reduce_scatter(part, own.mT, backend=backend)), "the same bits in two runs"

    with pytest.raises(ValueError, match=rf"rows of `input` must be a multiple of the {size} ranks, got {rows + 1}"):
        matmul_reduce_scatter(torch.zeros(rows + 1, 3), torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"all_gather_matmul: the columns of `input` .* \(2, 3\) and \(2, 3\)"):
        all_gather_matmul(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(TypeError, match=r"all_gather_matmul: argument `other` must be a torch\.Tensor, got int"):
        all_gather_matmul(torch.zeros(2, 3), 3)
    with pytest.raises(
        TypeError, match=r"matmul_reduce_scatter: arguments `input` and `other` must have the same dtype"
    ):
        matmul_reduce_scatter(torch.zeros(2, 3), torch.zeros(3, 2).half())


def check_ranks_that_differ() -> None:
    """Operands that do not fit another rank's end in the same error on every rank, and the group still works."""
    rank = dist.get_rank()
    q, x = torch.zeros(1, 2, 4 + 2 * rank, 8), torch.zeros(4 + rank, 3)
    packed = torch.zeros(2, 2, 8 + 8 * rank), torch.tensor([0, 4], dtype=torch.int32)
    other = r"must be the same on every rank: rank 1 has"
    calls: dict[str, Callable[[], Any]] = {
        rf"ring_attention: the shape of argument `query` {other} \(1, 2, 6, 8\), rank 0 has \(1, 2, 4, 8\)": (
            lambda: ring_attention(q, q, q, backend="torch")
        ),
        rf"ring_attention: the `is_causal` {other} True, rank 0 has False": (
            lambda: ring_attention(*[q[:, :, :4]] * 3, rank == 1, backend="torch")
        ),
        rf"ring_attention_varlen: the heads of argument `query` {other} \(2, 16\), rank 0 has \(2, 8\)": (
            lambda: ring_attention_varlen(*[packed[0]] * 3, packed[1], backend="torch")
        ),
        rf"ring_attention_varlen: the offsets of argument `cu_seqlens` {other} \(0, 4, 8\), rank 0 has \(0, 4\)": (
            lambda: ring_attention_varlen(
                *[torch.zeros(2 + 2 * rank, 2, 8)] * 3, torch.arange(0, 5 + 4 * rank, 4, dtype=torch.int32)
            )
        ),
        rf"all_gather_matmul: the shape of argument `input` {other} \(5, 3\), rank 0 has \(4, 3\)": (
            lambda: all_gather_matmul(x, x[:3].mT[:, :2], backend="torch")
        ),
        rf"all_gather_matmul: the dtype of argument `input` {other} float64, rank 0 has float32": (
            lambda: all_gather_matmul(*[torch.zeros(3, 3, dtype=torch.float64 if rank else torch.float32)] * 2)
        ),
        rf"matmul_reduce_scatter: the columns of argument `other` {other} 5, rank 0 has 4": (
            lambda: matmul_reduce_scatter(x[:4], x.mT, backend="torch")
        ),
    }
    for message, call in calls.items():
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                call()
    rows = all_gather_matmul(x[:4] + 1, torch.eye(3), backend="torch")
    assert torch.equal(rows, torch.ones(4 * dist.get_world_size(), 3))


def a_rank_that_dies() -> None:
    """The others' calls, and the backward pass of a ring that it took part in, end in errors that name it."""
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    output = ring_attention(q, q, q, is_causal=True, backend="torch")
    if dist.get_rank() == 1:
        return
    x = torch.zeros(2, 3)
    calls: dict[str, list[Callable[[], Any]]] = {
        "all_gather_matmul": [lambda: all_gather_matmul(x, x.mT, backend="torch")],
        "matmul_reduce_scatter": [lambda: matmul_reduce_scatter(x, x.mT, backend="torch")],
        "ring_attention": [
            output.sum().backward,
            lambda: ring_attention(q, q, q, is_causal=True, backend="torch"),
        ],
    }
    for name, runs in calls.items():
        for run in runs:
            with pytest.raises(RuntimeError, match=rf"{name}: rank 0 of 2 lost a neighbour \(rank 1 or 1\)"):
                run()
