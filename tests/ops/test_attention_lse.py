"""The log-sum-exp of attention, in every variant that returns it, and gradients that hang on it and on the output."""

from __future__ import annotations

import pytest
import torch

import kernel_ladder
from kernel_ladder import autograd, table
from kernel_ladder.semantics.masks import LOWER_RIGHT
from kernel_ladder.spec import Case, as_leaves
from kernel_ladder.testing.agreement import agreement, evaluate
from kernel_ladder.testing.deviation import compare
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import DEVICE, needs_gpu, skip_unless_it_runs

SPEC = kernel_ladder.spec("attention")
VARIANTS = table.variants("attention")
OPTIONS = {"is_causal": False, "scale": None, "enable_gqa": False}
#: Whose backward makes weights again from the log-sum-exp, and their mean gradient from the output.
FUSED = [v for v in VARIANTS if (v.level in ("triton", "cuda") and v.name != "cuda.naive") or v.name == "torch.flash"]


def holds(variant, case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype, DEVICE)
    skip_unless_it_runs(variant, inputs, case.options)
    result = agreement(SPEC, lambda *x, **options: autograd.run(variant, x, options), inputs, case.options)
    assert result.agrees, str(result)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_of_few_keys_it_is_as_exact_as_float32(variant, dtype):
    """A sum of weights that were rounded to 16 bits first is 1e-3 off in the first rows of a causal mask."""
    options = {**OPTIONS, "is_causal": True, "return_lse": True}
    holds(variant, Case("", ((2, 4, 40, 64),) * 3, options), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_of_one_query_it_is_as_exact_as_float32(variant, dtype):
    """Where each of several programs has some of the keys."""
    options = {**OPTIONS, "enable_gqa": True, "return_lse": True}
    holds(variant, Case("", ((1, 4, 1, 64), (1, 2, 700, 64), (1, 2, 700, 64)), options), dtype)


@needs_gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_of_many_keys_it_is_as_exact_as_float32(variant):
    options = {**OPTIONS, "is_causal": LOWER_RIGHT, "window_size": (90_000, 0), "return_lse": True}
    holds(variant, Case("", ((1, 1, 64, 160), (1, 1, 100_000, 160), (1, 1, 100_000, 160)), options), torch.float16)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.level in ("torch", "compile")], ids=lambda v: v.name)
def test_formulas_sum_rows_in_float32(variant):
    """Of 70,000 equal keys each has a weight of 1; float16 ends at 65,504."""
    query = torch.zeros(1, 1, 2, 8, dtype=torch.float16, device=DEVICE)
    key = torch.zeros(1, 1, 70_000, 8, dtype=torch.float16, device=DEVICE)
    value = torch.ones_like(key)
    skip_unless_it_runs(variant, (query, key, value), OPTIONS)
    output = variant.output(query, key, value, **OPTIONS)
    torch.testing.assert_close(output, torch.ones_like(output), rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("variant", FUSED, ids=lambda v: v.name)
def test_on_peaked_attention_gradients_differ_by_the_outputs_rounding_alone(variant, dtype):
    """What FlashAttention-2's backward (arXiv:2307.08691) gives where almost all weight is on one key.

    The gradient of a score is P · (dP − delta). The formula has delta = Σ P · dP, which cancels dP where P is one;
    fused kernels have delta = Σ dO · O with the output in 16 bits, and are left with Σ dO · (rounding of O). In exact
    arithmetic that moves the gradient of query i by scale · Σ_d dO · (O − rounded O) · Σ_j P_ij K_j: more than the
    formula errs. Every kernel that keeps no more than the output does so. Here the same algorithm, in float64 with the
    output as the variant rounded it, stands for the oracle; the bound is the formula's.
    """
    case = Case("", ((1, 64, 5, 64),) * 3)
    inputs = tuple((4 * x).round().clamp(-9, 9).to(dtype) for x in make_inputs(case, torch.float32, DEVICE))
    skip_unless_it_runs(variant, as_leaves(inputs), OPTIONS)
    grad = make_grad(SPEC, inputs, OPTIONS)
    actual = evaluate(lambda *x, **o: autograd.run(variant, x, o), inputs, OPTIONS, grad)
    naive = evaluate(SPEC.reference, inputs, OPTIONS, grad)
    exact = evaluate(SPEC.reference, tuple(x.double() for x in inputs), OPTIONS, grad.double())

    q, k, v, g, scale = *(x.double() for x in inputs), grad.double(), 64**-0.5
    weights = (q @ k.mT * scale).softmax(-1)
    delta = (g * actual["output"].double()).sum(-1, keepdim=True)
    grad_scores = weights * (g @ v.mT - delta)
    expected = {"grad 0": scale * grad_scores @ k, "grad 1": scale * grad_scores.mT @ q, "grad 2": weights.mT @ g}
    past_the_formula = 0
    for name, of_algorithm in expected.items():
        errors = naive[name].double() - exact[name]
        for head in range(64):  # each by its own bound: some have next to no gradient
            of_head, grad_of_head = of_algorithm[:, head], grad[:, head]
            around = (of_head + errors[:, head]).to(dtype)
            deviation = compare(name, actual[name][:, head], of_head, around, grad_of_head)
            assert deviation.agrees, f"head {head}: {deviation}"
            rounded = of_head.to(dtype)
            plain = compare(name, rounded, exact[name][:, head], naive[name][:, head], grad_of_head)
            past_the_formula += not plain.agrees
    assert past_the_formula > 0  # else the oracle itself would do
