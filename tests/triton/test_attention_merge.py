"""Results of a ring's steps are merged by one kernel: against the formula in float64."""

from __future__ import annotations

import math

import pytest
import torch

from kernel_ladder import table
from kernel_ladder.distributed import steps

from ..conftest import DEVICE

if (reason := table.unavailable("attention", "triton")) is not None:
    pytest.skip(reason, allow_module_level=True)

from triton_impl.attention.merge import merge

#: The log-sum-exp of a row, of both results: no key at all in one, in the other, in both; and far apart.
EDGES = [(-math.inf, 1.0), (2.0, -math.inf), (-math.inf, -math.inf), (300.0, -300.0), (-1e4, 1e4), (0.5, 0.5)]


def made(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def results(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Output and log-sum-exp, twice, in float64."""
    output, found = made(*shape, seed=0), made(*shape, seed=1)
    lse, found_lse = 3 * made(*shape[:-1], seed=2), 3 * made(*shape[:-1], seed=3)
    for row, (one, other) in enumerate(EDGES):
        lse[..., row], found_lse[..., row] = one, other
    output[lse == -math.inf] = 0
    found[found_lse == -math.inf] = 0
    return [output, lse, found, found_lse]


@pytest.mark.parametrize("columns", [64, 40])
@pytest.mark.parametrize("layout", ["batched", "packed", "strided"])
@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
def test_merge(given, into, layout, columns):
    narrow = [x.to(given if x.dim() == 4 else torch.float32) for x in results((2, 3, 130, columns))]
    if layout == "packed":  # (T, H, D) with a log-sum-exp of (H, T)
        narrow = [x[0].transpose(0, 1).contiguous().transpose(0, 1) if x.dim() == 4 else x[0] for x in narrow]
    elif layout == "strided":  # late rows of (B, S, H, D), and of a log-sum-exp
        pad = [torch.cat((x[:, :, :7], x), 2) for x in narrow]
        narrow = [(x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x)[:, :, 7:] for x in pad]
    output, lse, found, found_lse = (x.to(DEVICE) for x in narrow)
    exact = [x.double() for x in (output, lse)]
    steps.merge(exact[0], exact[0], exact[1], found.double(), found_lse.double())
    target = output.to(into) if into != given else output  # in place where the dtype stays
    merge(target, output, lse, found, found_lse)
    torch.testing.assert_close(target, exact[0].to(into), rtol=2 * torch.finfo(into).eps, atol=1e-6)
    torch.testing.assert_close(lse, exact[1].float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(lse == -math.inf, exact[1] == -math.inf)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("ranges", [[(0, 32)], [(0, 32), (16, 32)], [(0, 16), (8, 32), (0, 32)], [(4, 9), (20, 32)]])
def test_ranges_of_rows(ranges, dtype):
    """Results of some rows each. Rows that no result has are 0, and the output has the results' dtype."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    merged = steps.Merged(len(ranges), (2, 32, 8))
    total, weights = torch.zeros(2, 32, 8, dtype=torch.float64), torch.zeros(2, 32, dtype=torch.float64)
    for i, (begin, end) in enumerate(ranges):
        found, lse = made(2, end - begin, 8, seed=i).to(dtype), made(2, end - begin, seed=9 + i).to(wide)
        weight = lse.double().exp()
        total[:, begin:end] += found.double() * weight[..., None]
        weights[:, begin:end] += weight
        merged.add(found.to(DEVICE), lse.to(DEVICE), slice(begin, end))
    output, lse = (x.cpu() for x in merged.result())
    exact = total / weights.clamp_min(1e-300)[..., None]
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(lse.double(), weights.log(), rtol=1e-6, atol=1e-6)
