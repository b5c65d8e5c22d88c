"""Rows of softmax too long for what keeps them on chip, which a GPU reads twice."""

from __future__ import annotations

import pytest
import torch

import kernel_ladder
from kernel_ladder import autograd
from kernel_ladder.spec import Case
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import DEVICE, every_variant, needs_gpu, skip_unless_it_runs, variant_id

SPEC = kernel_ladder.spec("softmax")


@pytest.mark.sampled
@needs_gpu
@pytest.mark.parametrize("values", ["normal", "neg_inf_rows", "large"])
@pytest.mark.parametrize("shape", [(3, 262145), (37, 300_008), (5, 1_000_003), (2, 1_100_000)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("variant", [v for v in every_variant() if v.op == "softmax"], ids=variant_id)
def test_long_rows(variant, dtype, shape, values):
    case = Case(str(shape), (shape,), {"dim": -1}, values=values)
    inputs = make_inputs(case, dtype, DEVICE)
    skip_unless_it_runs(variant, inputs, case.options)
    # Of large scores few are left in a row, and every gradient but the formula's own is made from rounded ones.
    grad = None if values == "large" else make_grad(SPEC, inputs, case.options)
    result = agreement(SPEC, lambda *x, **o: autograd.run(variant, x, o), inputs, case.options, grad)
    assert result.agrees, str(result)
