"""The gradient of a bias: the same in every run, and whole where rows are many, few, or of odd lengths."""

from __future__ import annotations

import pytest
import torch

import kernel_ladder
from kernel_ladder import autograd
from kernel_ladder.spec import Case
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import DEVICE, every_variant, skip_unless_it_runs, variant_id

VARIANTS = [v for v in every_variant("triton", "cuda") if v.op == "bias_gelu"]
OPTIONS = {"approximate": "none"}
#: Rows and columns. The GPU's kernels share rows among blocks only where there are many.
SHAPES = [(5, 264), (300, 40), (70, 1031)] + (
    [(65536, 256), (100_003, 24), (9, 65536)] if DEVICE.type == "cuda" else []
)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_every_row_counts_once_and_in_the_same_order(variant, shape):
    spec = kernel_ladder.spec("bias_gelu")
    inputs = make_inputs(Case("", (shape, shape[1:]), OPTIONS), torch.bfloat16, DEVICE)
    skip_unless_it_runs(variant, inputs, OPTIONS)
    grad = make_grad(spec, inputs, OPTIONS)
    result = agreement(spec, lambda *x, **o: autograd.run(variant, x, o), inputs, OPTIONS, grad)
    assert result.agrees, str(result)

    def run() -> tuple[torch.Tensor, ...]:
        leaves = tuple(x.detach().requires_grad_() for x in inputs)
        return torch.autograd.grad(autograd.run(variant, leaves, OPTIONS), leaves, grad)

    first = run()
    for again in (run(), run()):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 8)], ids=str)
def test_no_rows_or_no_columns(variant, shape):
    inputs = tuple(torch.ones(s, device=DEVICE, requires_grad=True) for s in (shape, shape[-1:]))
    skip_unless_it_runs(variant, inputs, OPTIONS)
    output = autograd.run(variant, inputs, OPTIONS)
    assert output.shape == shape
    grad_input, grad_bias = torch.autograd.grad(output.sum(), inputs)
    assert grad_input.shape == shape
    assert torch.equal(grad_bias, torch.zeros_like(grad_bias)), "a sum of nothing"
