"""Dropout of attention weights: its mask is `dropout`'s, in both passes of every rung that takes it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernel_ladder
from kernel_ladder import autograd, table
from kernel_ladder.distributed import sharding
from kernel_ladder.semantics import weight_dropout
from kernel_ladder.semantics.masks import LOWER_RIGHT
from kernel_ladder.spec import Case
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.samples import make_inputs

from ..conftest import DEVICE, needs_gpu, skip_unless_it_runs, variant_id

DROPPING = ("torch.naive", "compile.formula", "triton.flash", "cuda.flash")
VARIANTS = [v for v in table.variants("attention") if v.name in DROPPING[2:]]
OPTIONS = {"is_causal": False, "scale": None, "enable_gqa": False, "dropout_p": 0.3, "seed": 2**40 + 7}


def case(q: tuple[int, ...], k: tuple[int, ...], d_v: int = 0, mask: str = "", **options) -> Case:
    shapes, kinds = [q, k, (*k[:-1], d_v or k[-1])], {}
    if mask:
        shapes.append((q[-2], k[-2]))
        kinds = {3: mask} if mask != "additive" else {}
    return Case("", tuple(shapes), {**OPTIONS, "enable_gqa": q[1] != k[1], **options}, kinds=kinds)


#: Rows of weights that are whole calls of Philox, and that are not.
CASES = {
    "eights": case((1, 2, 20, 16), (1, 1, 40, 16), return_lse=True),
    "odd-causal": case((2, 1, 9, 8), (2, 1, 13, 8), is_causal=LOWER_RIGHT),
    "boolean": case((1, 1, 9, 8), (1, 1, 16, 8), mask="boolean"),
}
#: Many tiles, for a GPU.
LARGE = {
    "d96": case((2, 6, 300, 96), (2, 2, 333, 96), return_lse=True, is_causal=True),
    "d128": case((1, 4, 700, 128), (1, 4, 520, 128), dropout_p=0.1),
    "d192": case((2, 2, 130, 192), (2, 1, 264, 192), 128, window_size=(50, 9)),
    "d256": case((1, 2, 129, 256), (1, 2, 200, 256), return_lse=True),
    "additive": case((2, 2, 100, 64), (2, 2, 90, 64), mask="additive"),
    "odd": case((2, 3, 65, 40), (2, 3, 67, 40), dropout_p=1 - 2**-10),
}


def mask_of(shape: tuple[int, ...], p: float, seed: int) -> torch.Tensor:
    return kernel_ladder.dropout(torch.ones(shape, device=DEVICE), p, seed=seed, backend="torch.naive")


def test_weights_are_dropped_as_dropout_drops_a_tensor():
    query, key, value = make_inputs(Case("", ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4))), torch.float32, DEVICE)
    found = kernel_ladder.attention(query, key, value, None, 0.3, seed=5, backend="torch.naive")
    weights = torch.softmax(query @ key.mT * 8**-0.5, -1)
    torch.testing.assert_close(found, weights * mask_of((2, 3, 5, 7), 0.3, 5) @ value)


def holds(variant: table.Variant, of: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(of, dtype, DEVICE)
    skip_unless_it_runs(variant, inputs, of.options)
    rows, d_v = of.shapes[0][:-1], of.shapes[2][-1]
    grad = torch.randn(*rows, d_v, device=DEVICE).to(dtype)
    both = (grad, torch.randn(rows, device=DEVICE)) if of.options.get("return_lse") else grad
    spec = kernel_ladder.spec("attention")
    run = lambda *x, **o: autograd.run(variant, x, o)  # noqa: E731
    if variant.level == "triton" and len(inputs) > 3 and inputs[3].is_floating_point():  # it asks for no gradient
        *inputs, mask = inputs
        formula = spec.reference
        spec = dataclasses.replace(spec, reference=lambda *x, **o: formula(*x, mask.to(x[0]), **o))
        run = lambda *x, **o: autograd.run(variant, (*x, mask), o)  # noqa: E731
    result = agreement(spec, run, tuple(inputs), of.options, both)
    assert result.agrees, str(result)


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
@pytest.mark.parametrize("name", CASES)
def test_both_passes_agree_with_the_formula(variant, name):
    holds(variant, CASES[name], torch.bfloat16 if variant.level == "cuda" else torch.float32)


@needs_gpu  # on a CPU, a C++ compiler takes longer than all other tests of this file
@pytest.mark.parametrize("name", CASES)
def test_the_compiled_formula_agrees(name):
    variant = next(v for v in table.variants("attention") if v.name == "compile.formula")
    holds(variant, CASES[name], torch.float32)


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "name", "dtype"),
    [
        pytest.param(variant, name, dtype, id=f"{name}-{variant_id(variant)}-{dtype}")
        for turn, name in enumerate(LARGE)
        for variant in VARIANTS
        for of, dtype in enumerate((torch.bfloat16, torch.float16))
        if variant.level != "triton" or of == turn % 2  # whose kernels take ten seconds to compile
    ],
)
def test_many_tiles(variant, name, dtype):
    holds(variant, LARGE[name], dtype)


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_every_call_has_the_mask_of_its_seed(variant):
    """A launch that is known serves other seeds, and so does a program of torch.compile, in both passes."""
    dtype = torch.bfloat16 if variant.level == "cuda" else torch.float32
    query, key, value = inputs = make_inputs(Case("", ((1, 1, 9, 8), (1, 1, 8, 8), (1, 1, 8, 8))), dtype, DEVICE)
    skip_unless_it_runs(variant, inputs, OPTIONS)
    value.copy_(torch.eye(8))  # the output is the weights
    value.requires_grad_()

    def dropped(seed: int) -> torch.Tensor:
        return kernel_ladder.attention(query, key, value, dropout_p=0.5, seed=seed, backend=variant.name)

    compiled = torch.compile(dropped, fullgraph=True, dynamic=True, backend="aot_eager")
    for call in (dropped, compiled):
        for seed in (3, 2**62 + 1):
            wanted = mask_of((1, 1, 9, 8), 0.5, seed) != 0
            weights = call(seed)
            assert torch.equal(weights != 0, wanted)
            grad = torch.zeros_like(weights)
            grad[..., 0] = 1
            (found,) = torch.autograd.grad(weights, value, grad)
            assert torch.equal(found[..., 0] != 0, wanted.any(-2))
    torch._dynamo.reset()


@pytest.mark.parametrize("variant", table.variants("attention"), ids=variant_id)
def test_a_rung_drops_weights_or_says_that_it_does_not(variant):
    inputs = make_inputs(Case("", ((1, 1, 4, 8),) * 3), torch.float32, "cpu")
    reason = variant.unsupported(*inputs, **OPTIONS)
    assert (reason == weight_dropout.REFUSAL) == (variant.name not in DROPPING)


def test_a_probability_of_zero_keeps_all_weights_and_needs_no_seed():
    inputs = make_inputs(Case("", ((1, 2, 4, 8),) * 3), torch.float32, DEVICE)
    expected = kernel_ladder.attention(*inputs)
    for given in ({"dropout_p": 0.0}, {"dropout_p": 0}, {"seed": 3}):
        assert torch.equal(kernel_ladder.attention(*inputs, **given), expected)


def test_the_log_sum_exp_is_that_of_all_weights():
    inputs = make_inputs(Case("", ((1, 2, 4, 8),) * 3), torch.float32, DEVICE)
    _, expected = kernel_ladder.attention(*inputs, return_lse=True, backend="torch.naive")
    _, found = kernel_ladder.attention(*inputs, dropout_p=0.9, seed=1, return_lse=True, backend="torch.naive")
    assert torch.equal(found, expected)


def test_the_gradient_of_an_additive_mask_is_given_by_the_formula_and_cuda():
    inputs = make_inputs(Case("", ((1, 1, 4, 8),) * 3 + ((4, 4),)), torch.float32, DEVICE)
    inputs[3].requires_grad_()
    triton = next(v for v in VARIANTS if v.level == "triton")
    assert "gradient of an additive mask" in triton.unsupported(*inputs, **OPTIONS)
    assert all("gradient" not in (v.unsupported(*inputs, **OPTIONS) or "") for v in VARIANTS if v.level == "cuda")
    output = kernel_ladder.attention(*inputs, dropout_p=0.5, seed=1, backend="torch")
    assert torch.autograd.grad(output.sum(), inputs[3])[0].isfinite().all()


def test_no_shard_of_a_tensor_draws_a_mask_of_its_own():
    query, mask = torch.zeros(2, 4, 5, 8), torch.zeros(5, 5)
    for return_lse in (False, True):
        options = {**OPTIONS, "return_lse": return_lse}
        rule = sharding.RULES["attention"](query, query, query, mask, **options)
        assert not any(rule.names())
        assert [len(names) for names in rule.outputs] == [4, 3][: 1 + return_lse]
        assert [len(names) for names in rule.inputs] == [4, 4, 4, 2]
