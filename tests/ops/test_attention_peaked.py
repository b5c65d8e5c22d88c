"""Both passes of attention over many tiles where few keys have most of the weight: outliers, nearly one-hot rows."""

from __future__ import annotations

import pytest
import torch

import kernel_ladder
from kernel_ladder import autograd, table
from kernel_ladder.semantics.masks import LOWER_RIGHT, NO_WINDOW, band, seen
from kernel_ladder.spec import Case, as_leaves
from kernel_ladder.table import Variant
from kernel_ladder.testing.agreement import Results, agreement, evaluate
from kernel_ladder.testing.deviation import Standard
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import DEVICE, needs_gpu, skip_unless_it_runs

SPEC = kernel_ladder.spec("attention")
VARIANTS = [v for v in table.variants("attention") if v.level in ("torch", "triton", "cuda")]
#: Rungs with FlashAttention-2's backward: weights from the log-sum-exp, their mean gradient from the output.
FUSED = [v for v in VARIANTS if (v.level != "torch" and v.name != "cuda.naive") or v.name == "torch.flash"]

halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
both_bands = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
head_dims = pytest.mark.parametrize("d", [64, 128])


def case(variant: Variant, d: int, is_causal: bool, **more) -> Case:
    """Heads that share keys; lengths of several tiles that no tile divides. `split_kv` is for few queries."""
    batch, queries, keys = (2, 650, 650) if is_causal else (2, 500, 777)
    causal: bool | str = is_causal
    if variant.name.endswith("split_kv"):
        batch, queries, keys, causal = 24, 3, 777, LOWER_RIGHT if is_causal else False
    options = {"is_causal": causal, "scale": None, "enable_gqa": True}
    return Case("", ((batch, 4, queries, d), *((batch, 2, keys, d),) * 2), options, **more)


@needs_gpu
@halves
@both_bands
@head_dims
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_outliers_times_100(variant, d, is_causal, dtype):
    """Of query, key and value, by the bound of every agreement check.

    Half of the rows give one key 99 % of their weight, at scores up to thousands. Formula and kernel round much the
    same there: the formula its scores to 16 bits, a kernel the output from which it computes delta.
    """
    of = case(variant, d, is_causal, values="outliers")
    inputs = make_inputs(of, dtype, DEVICE)
    skip_unless_it_runs(variant, as_leaves(inputs), of.options)
    grad = make_grad(SPEC, inputs, of.options)
    result = agreement(SPEC, lambda *x, **o: autograd.run(variant, x, o), inputs, of.options, grad)
    assert result.agrees, str(result)


def nearly_one_hot(of: Case, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Integers, whose products sum exactly in float32: no rounding of a score hides another error."""
    inputs = make_inputs(of, torch.float32, DEVICE)
    return tuple((4 * x).round().clamp(-9, 9).to(dtype) for x in inputs)


def flash_attention_2(
    inputs: tuple[torch.Tensor, ...],
    grad: torch.Tensor,
    visible: torch.Tensor,
    *,
    rounds_to: torch.dtype = torch.float64,
    output: torch.Tensor | None = None,
) -> Results:
    """Output and gradients by FlashAttention-2's algorithm (arXiv:2307.08691) in float64.

    The operands of products, and the results, are rounded to `rounds_to`. Delta is computed from `output` if given.
    """
    q, k, v, g = *(x.double() for x in inputs), grad.double()
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(rounds_to).double()

    scores = (q @ k.mT * scale).masked_fill(~visible, -torch.inf)
    exponentials = torch.exp(scores - scores.amax(-1, keepdim=True))
    row_sum = exponentials.sum(-1, keepdim=True)
    found = rounded(rounded(exponentials) @ v / row_sum)
    delta = (g * (found if output is None else output.double())).sum(-1, keepdim=True)
    weights = exponentials / row_sum
    grad_scores = rounded(weights * (g @ v.mT - delta))
    grads = scale * grad_scores @ k, scale * grad_scores.mT @ q, rounded(weights).mT @ g
    of_kv = [x.unflatten(1, (-1, group)).sum(2) for x in grads[1:]]
    return {"output": found, **{f"grad {i}": rounded(x) for i, x in enumerate((grads[0], *of_kv))}}


@needs_gpu
@halves
@both_bands
@head_dims
@pytest.mark.parametrize("variant", FUSED, ids=lambda v: v.name)
def test_nearly_one_hot_rows(variant, d, is_causal, dtype):
    """The bound of every agreement check, and beside it one that is sharp where a row is nearly one-hot.

    The formula rounds scores of about 60 to 16 bits, by up to 0.125 in bfloat16, and so a weight by a tenth of it. Its
    error, twice of which is allowed, is then ten to fifty times a kernel's: in bfloat16 it lets a delta pass that is
    2 % too large. So the standard here is the kernel's own algorithm, as in ``test_attention_lse.py``:

    - Expected are the gradients of that algorithm in float64, from the output as the variant rounded it. Where P is
      near one, dP − delta cancels to the rounding of that output, which no kernel can know better.
    - The bound is 2 × error + 2 ulp, by the error of the same algorithm with the operands of its products (P, dS) in
      the dtype. What remains of a kernel is float32: sums, exponentials and the log-sum-exp, which err by about 2⁻¹⁷ of
      a weight at scores of 100, where rounding to bfloat16 errs by 2⁻⁹ and to float16 by 2⁻¹².
    """
    of = case(variant, d, is_causal)
    inputs = nearly_one_hot(of, dtype)
    skip_unless_it_runs(variant, as_leaves(inputs), of.options)
    grad = make_grad(SPEC, inputs, of.options)
    actual = evaluate(lambda *x, **o: autograd.run(variant, x, o), inputs, of.options, grad)
    plain = agreement(SPEC, lambda *x, **o: autograd.run(variant, x, o), inputs, of.options, grad)
    assert plain.agrees, str(plain)

    lengths = of.shapes[0][-2], of.shapes[1][-2]
    visible = seen(*band(of.options["is_causal"], NO_WINDOW, *lengths), *lengths, DEVICE)
    exact = flash_attention_2(inputs, grad, visible)
    rounded = flash_attention_2(inputs, grad, visible, rounds_to=dtype)
    of_rounded = flash_attention_2(inputs, grad, visible, output=rounded["output"])
    of_actual = flash_attention_2(inputs, grad, visible, output=actual["output"])
    for name in actual:
        is_gradient = name.startswith("grad")
        expected = of_actual[name] if is_gradient else exact[name]
        around = expected + rounded[name] - (of_rounded if is_gradient else exact)[name]
        standard = Standard(expected, around, dtype, grad if is_gradient else None)
        deviation = standard.deviation(name, actual[name])
        assert deviation.agrees, str(deviation)
    weights = torch.softmax((inputs[0].double() @ _shared(inputs).mT * d**-0.5).masked_fill(~visible, -torch.inf), -1)
    assert (weights.amax(-1) > 0.99).double().mean() > 0.2  # of the rows are nearly one-hot


def _shared(inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The keys of every head of queries."""
    return inputs[1].double().repeat_interleave(inputs[0].shape[1] // inputs[1].shape[1], dim=1)
