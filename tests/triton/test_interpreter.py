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
