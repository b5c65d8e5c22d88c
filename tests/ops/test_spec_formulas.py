"""The formulas that stand in for the naive one, as oracle or as yardstick, compute the same."""

from __future__ import annotations

import pytest
import torch

import kernel_ladder
from kernel_ladder.testing.agreement import evaluate
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import DEVICE

#: Operations whose yardstick is a model of tensor cores in float32: test_linear_float8.py checks it.
MODELS = ("linear_float8",)


def parameters():
    for op in kernel_ladder.OPS:
        spec = kernel_ladder.spec(op)
        for name in ("oracle", "yardstick"):
            if getattr(spec, name) is not None and op not in MODELS:
                for case in spec.samples:
                    yield pytest.param(spec, getattr(spec, name), case, id=f"{op}-{name}-{case.id}")


@pytest.mark.parametrize(("spec", "formula", "case"), list(parameters()))
def test_equals_reference(spec, formula, case):
    if spec.name == "attention_varlen" and case.values in ("nan", "inf"):
        pytest.skip("what is no number in one sequence makes NaN of all in the naive formula")
    inputs = make_inputs(case, torch.float64, DEVICE)
    grad = make_grad(spec, inputs, case.options)
    expected = evaluate(spec.reference, inputs, case.options, grad)
    # float64 against float64: the default tolerance allows for the order of the sum alone.
    torch.testing.assert_close(evaluate(formula, inputs, case.options, grad), expected, equal_nan=True)
