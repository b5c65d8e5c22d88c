"""Masks of attention whose numbers, places in memory, or wish for a gradient are out of the ordinary."""

from __future__ import annotations

import pytest
import torch

import cuda_impl
import kernel_ladder
from kernel_ladder import autograd, gpu, table
from kernel_ladder.spec import Case, as_leaves
from kernel_ladder.testing.agreement import evaluate
from kernel_ladder.testing.deviation import compare
from kernel_ladder.testing.samples import make_grad, make_inputs, on_absent_gpu

from ..conftest import DEVICE, skip_unless_it_runs

SPEC = kernel_ladder.spec("attention")
VARIANTS = table.variants("attention")
RUNGS = [v for v in VARIANTS if v.level != "compile"]
OPTIONS = {"is_causal": False, "scale": None, "enable_gqa": True}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def of_shape(queries: int, keys: int, dtype: torch.dtype, dim: int = 16) -> tuple[torch.Tensor, ...]:
    """Operands of two batch entries and four heads, of which two share keys."""
    return make_inputs(Case("", ((2, 4, queries, dim), (2, 2, keys, dim), (2, 2, keys, dim))), dtype, DEVICE)


def disagreements(variant, inputs, mask, options) -> list[str]:
    """What of the output, the log-sum-exp and the gradients is past its bound; the mask wants no gradient."""
    grad = make_grad(SPEC, (*inputs, mask), options)

    def beside(run, mask, inputs=inputs, grad=grad):
        return evaluate(lambda *x, **more: run((*x, mask), more), inputs, options, grad)

    def formula(x, more):
        return SPEC.reference(*x, **more)

    def in_float64(x):
        return x.double() if x.is_floating_point() else x

    grads = grad if isinstance(grad, tuple) else (grad,)
    exact = beside(formula, in_float64(mask), tuple(map(in_float64, inputs)), tuple(map(in_float64, grads)))
    naive = beside(formula, mask)
    actual = beside(lambda x, more: autograd.run(variant, x, more), mask)
    deviations = [
        compare(name, actual[name], exact[name], naive[name], grad if name.startswith("grad") else None)
        for name in exact
    ]
    return [str(d) for d in deviations if not d.agrees]


def lowest(queries: int, keys: int, low: float, dtype: torch.dtype) -> torch.Tensor:
    """Rows that see all, hold the lowest number throughout or in part, beside −inf, or −inf alone."""
    mask = torch.zeros(queries, keys, dtype=dtype, device=DEVICE)
    mask[1::5] = low
    mask[2::5, : keys // 2] = low
    mask[3::5] = low
    mask[3::5, ::3] = -torch.inf
    mask[4::5] = -torch.inf
    return mask


@pytest.mark.sampled
@pytest.mark.parametrize("queries", [5, 40], ids=["few", "many"])
@pytest.mark.parametrize("return_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_a_row_of_the_lowest_number_sees_every_key(variant, dtype, return_lse, queries):
    inputs = of_shape(queries, 300 if queries == 5 else 70, dtype)
    options = {**OPTIONS, "return_lse": return_lse}
    mask = lowest(queries, inputs[1].shape[-2], torch.finfo(dtype).min, dtype)
    skip_unless_it_runs(variant, (*as_leaves(inputs), mask), options)
    assert not (wrong := disagreements(variant, inputs, mask, options)), wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_under_one_number_throughout_the_output_is_the_mean(variant, dtype):
    """What float64 gives, whatever rounding the formula allows."""
    query = torch.zeros(1, 1, 2, 8, dtype=dtype, device=DEVICE)
    _, key, value = make_inputs(Case("", ((1, 1, 2, 8), (1, 1, 40, 8), (1, 1, 40, 8))), dtype, DEVICE)
    low = torch.finfo(dtype).min
    mask = torch.zeros(2, 40, dtype=dtype, device=DEVICE)
    mask[1] = low
    options = {**OPTIONS, "return_lse": True}
    with_lse = variant.unsupported(query, key, value, mask, **options) is None
    options["return_lse"] = with_lse
    skip_unless_it_runs(variant, (query, key, value, mask), options)
    output = variant.forward(query, key, value, mask, **options)[0]
    if with_lse:
        output, lse = output
        expected = torch.tensor([[[40.0, 1.0]]], dtype=torch.float64, device=DEVICE).log()
        expected[..., 1] = low
        torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=0)
    mean = value.double().mean(-2, keepdim=True).expand(1, 1, 2, 8)
    torch.testing.assert_close(output.double(), mean, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("low", [-1e6, -1e9, -1e37], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_the_backward_gives_weights_their_sum_under_masks_of_large_numbers(variant, low):
    """Next to such numbers the logarithm of a sum vanishes, and weights made again from both together were one each."""
    inputs = of_shape(5, 70, torch.bfloat16)
    mask = torch.zeros(5, 70, dtype=torch.bfloat16, device=DEVICE)
    mask[3] = low
    skip_unless_it_runs(variant, (*as_leaves(inputs), mask), OPTIONS)
    grad = torch.zeros_like(inputs[0])
    grad[..., 3, :] = 1
    gradients = evaluate(lambda *x, **more: autograd.run(variant, (*x, mask), more), inputs, OPTIONS, grad)
    # The values' gradients are the weights of the two heads that share them: they add up to two.
    sums = gradients["grad 2"].double().sum(-2)
    torch.testing.assert_close(sums, torch.full_like(sums, 2), rtol=0.02, atol=0)


@pytest.mark.skipif(cuda_impl.extension() is None, reason="the extension kernel_ladder._C was not built")
@pytest.mark.parametrize("queries", [2, 40])
@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.5, "seed": 3}], ids=["", "dropout"])
def test_cuda_rungs_that_take_a_mask_give_its_gradient(queries, dropout):
    of = Case("", ((2, 4, queries, 64), (2, 2, 300, 64), (2, 2, 300, 64), (4, 1, 300)), {**OPTIONS, **dropout})
    taken = []
    for gradients in (False, True):
        with gpu.pretend("H100"), on_absent_gpu(of, torch.bfloat16, gradients=gradients) as inputs:
            variants = table.variants("attention", "cuda")
            taken.append([v.name for v in variants if v.unsupported(*inputs, **of.options) is None])
    few = ["cuda.split_kv"] if queries == 2 else []
    assert taken[0] == taken[1] == (["cuda.flash"] if dropout else ["cuda.naive", "cuda.flash", *few])
