"""Triton's interpreter: what hastens it leaves no trace, and what only torch.compile would find is looked for in it."""

from __future__ import annotations

import pytest
import torch

import kernel_ladder
import triton_impl
from kernel_ladder import table

if (reason := table.unavailable("softmax", "triton")) is not None:
    pytest.skip(reason, allow_module_level=True)

import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(not triton_impl.interpreted(), reason="the kernels are compiled here")


def test_after_a_launch_the_language_is_what_it_was():
    from triton.language import core, math
    from triton.runtime.interpreter import tl

    def members() -> list[dict]:
        return [
            {name: x for name, x in vars(owner).items() if not name.startswith("__")}
            for owner in (tl, tl.tensor, core, math)
        ]

    before = members()
    kernel_ladder.softmax(torch.zeros(3, 40), backend="triton")
    assert members() == before


@triton.jit
def _round(out_ptr, back_ptr, x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    rounded = tl.load(x_ptr + at).to(tl.bfloat16)
    tl.store(out_ptr + at, rounded)
    tl.store(back_ptr + at, rounded.to(tl.float32))


def test_bfloat16_is_rounded_to_the_nearest_ties_to_even():
    """As by PyTorch and GPUs: normal and subnormal numbers, ties, carries into the exponent, infinity, no numbers."""
    some = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    ties = (torch.arange(-2048, 2048) * 2**16 + 0x3F008000).to(torch.int32).view(torch.float32)
    bounds = [
        0.0,
        -0.0,
        float("inf"),
        -float("inf"),
        torch.finfo(torch.float32).max,
        1.9999999,
        -255.9999,
        1e-45,
        1e-39,
    ]
    edges = torch.tensor(bounds * 455 + [0.5])
    for x in (some, some * 1e-39, ties, edges):
        out, back = torch.empty(4096, dtype=torch.bfloat16), torch.empty(4096)
        _round[(1,)](out, back, x, BLOCK=4096)
        assert torch.equal(out.view(torch.int16), x.bfloat16().view(torch.int16))
        assert torch.equal(back, x.bfloat16().float())
    nans = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32).repeat(1024)
    _round[(1,)](out, back, nans, BLOCK=4096)
    assert out.isnan().all()
    assert back.isnan().all()


@triton.jit
def _multiply(out_ptr, x_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_of_blocks(dtype):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(32, 32, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(32, 32)
    _multiply[(1,)](out, x, y, SIZE=32)
    torch.testing.assert_close(out, x.float() @ y.float())


@triton.jit
def _after(scale, shift, other_scale, other_shift):
    """x · scale + shift, then the other: composing is associative and does not commute."""
    return scale * other_scale, shift * other_scale + other_shift


@triton.jit
def _compose(out_ptr, x_ptr, y_ptr, AXIS: tl.constexpr, KEEP: tl.constexpr):
    at = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    scale, shift = tl.reduce((tl.load(x_ptr + at), tl.load(y_ptr + at)), AXIS, _after, keep_dims=KEEP)
    to = tl.arange(0, 4 if AXIS == 1 else 8)
    if KEEP:
        to = to[:, None] if AXIS == 1 else to[None, :]
    tl.store(out_ptr + to, scale)
    tl.store(out_ptr + 8 + to, shift)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_reduction_by_a_function_keeps_the_order(axis, keep):
    x, y = torch.randint(-2, 3, (2, 4, 8)).float().unbind()
    out = torch.zeros(2, 8)
    _compose[(1,)](out, x, y, AXIS=axis, KEEP=keep)
    scale, shift = x.select(axis, 0), y.select(axis, 0)
    for i in range(1, x.shape[axis]):
        scale, shift = scale * x.select(axis, i), shift * x.select(axis, i) + y.select(axis, i)
    assert torch.equal(out[:, : scale.numel()], torch.stack((scale, shift)))


def test_an_interpreter_that_does_not_run_says_why(monkeypatch):
    class Broken:
        def __getitem__(self, grid):
            raise TypeError("only 0-dimensional arrays can be converted")

    monkeypatch.setattr(triton_impl, "_count", Broken())
    triton_impl.unavailable.cache_clear()
    try:
        reason = triton_impl.unavailable()
        assert "numpy" in reason
        assert "only 0-dimensional arrays" in reason
    finally:
        triton_impl.unavailable.cache_clear()
