"""What each rank of a group checks about products beside their communication: results and gradients of one GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from kernel_ladder.distributed import all_gather_matmul, matmul_reduce_scatter


def compare(backend: str, dtype: torch.dtype, tolerance: float) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    rows, inner, columns = 4 * size, 6 * size, 10 * size
    x, weight, grad = (torch.randn(s, dtype=dtype) for s in ((rows, inner), (columns, inner), (rows, columns)))

    def whole() -> list[torch.Tensor]:
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = leaves[0] @ leaves[1].mT
        return [y.detach(), *torch.autograd.grad(y, leaves, grad)]

    def close(found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)

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


def a_rank_that_dies() -> None:
    """The others' call ends in an error that names the neighbour."""
    if dist.get_rank() == 1:
        return
    x = torch.zeros(2, 3)
    with pytest.raises(RuntimeError, match=r"all_gather_matmul: rank 0 of 2 lost a neighbour \(rank 1 or 1\)"):
        all_gather_matmul(x, x.mT, backend="torch")


def everything() -> None:
    compare("torch", torch.float64, 1e-10)
    if dist.get_world_size() == 2:
        compare("triton", torch.float32, 1e-4)
        a_rank_that_dies()
