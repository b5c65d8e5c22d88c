"""Triton's interpreter: what hastens it leaves no trace, and what only torch.compile would find is looked for in it."""

from __future__ import annotations

import pytest
import torch

import kernel_ladder
import triton_impl

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
