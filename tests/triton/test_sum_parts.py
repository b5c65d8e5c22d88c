"""Summands of a product from several GPUs are added up by one kernel: against float64, and in one order."""

from __future__ import annotations

import pytest
import torch

from kernel_ladder import table
from kernel_ladder.distributed import sums

from ..conftest import DEVICE

if (reason := table.unavailable("matmul", "triton")) is not None:
    pytest.skip(reason, allow_module_level=True)

from triton_impl.matmul.sum_parts import sum_parts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize(("shape", "gap"), [((3, 5), 0), ((64, 129), 24), ((2048,), 2048)])
def test_sum_parts(shape, gap, count, dtype):
    """`gap`: elements between two summands. Around them lies what no sum may hold."""
    generator = torch.Generator().manual_seed(0)
    size = torch.Size(shape).numel()
    exact = torch.randn(count + 1, *shape, generator=generator, dtype=torch.float64).to(dtype)
    memory = torch.full((count * (size + gap),), torch.nan, dtype=dtype, device=DEVICE)
    others = memory.as_strided((count, *shape), (size + gap, *torch.empty(shape).stride()))
    others.copy_(exact[1:])
    first = exact[0].clone().to(DEVICE)
    sum_parts(first, others)
    expected = exact[0].float()
    for other in exact[1:]:
        expected = expected + other.float()
    assert torch.equal(first.cpu(), expected.to(dtype))
    without_a_kernel = exact[0].clone()
    assert sums.sum_parts(without_a_kernel, exact[1:]) is without_a_kernel
    assert torch.equal(without_a_kernel, expected.to(dtype))


def test_nothing_to_add():
    first = torch.ones(3, device=DEVICE)
    sum_parts(first, torch.empty(0, 3, device=DEVICE))
    assert torch.equal(first, torch.ones_like(first))
