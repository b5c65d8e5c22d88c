"""Triton's interpreter: what hastens it leaves no trace, and what only torch.compile would find is looked for in it."""

from __future__ import annotations

import pytest
import torch

import kernel_ladder
import triton_impl
from kernel_ladder.agreement import agreement
from kernel_ladder.samples import make_grad, make_inputs

from .conftest import DEVICE, every_variant, public, skip_unless_it_runs, typical_case, variant_id

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


def elsewhere(x: torch.Tensor) -> torch.Tensor:
    """The same tensor in memory of its own, elements that lie on one another included."""
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())


@pytest.fixture
def each_tensor_apart(monkeypatch):
    """Kernels are called as torch.compile calls them, which takes each of their tensors for memory of its own."""
    from triton.runtime import interpreter

    run = interpreter.GridExecutor.__call__

    def run_elsewhere(self, *args, **kwargs):
        before, given = ([elsewhere(x) if isinstance(x, torch.Tensor) else x for x in args] for _ in range(2))
        run(self, *given, **kwargs)
        for x, was, now in zip(args, before, given, strict=True):
            if isinstance(x, torch.Tensor) and not torch.allclose(was, now, 0, 0, equal_nan=True):
                apart = all(step != 0 for step, size in zip(x.stride(), x.shape, strict=True) if size > 1)
                assert apart, f"{self.fn.__name__} writes to elements that are others too, {x.shape} at {x.stride()}"
                x.copy_(now)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_elsewhere)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


@pytest.mark.usefixtures("each_tensor_apart")
@pytest.mark.parametrize("variant", every_variant("triton"), ids=variant_id)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_memory_that_a_kernel_writes_is_seen_once(variant, backward):
    """What is written to one tensor of a kernel is not looked for in another, nor in another element."""
    spec, case = kernel_ladder.spec(variant.op), typical_case(variant.op, most=20_000)
    inputs = make_inputs(case, torch.float32, DEVICE)
    skip_unless_it_runs(variant, inputs, case.options)
    grad = make_grad(spec, inputs, case.options) if backward else None

    def call(*inputs, **options):
        return public(variant.op, inputs, options, backend=variant.name)

    result = agreement(spec, call, inputs, case.options, grad)
    assert result.agrees, str(result)
