"""Gradients against finite differences in float64, and what a second derivative does."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import kernel_ladder
from kernel_ladder import autograd
from kernel_ladder.spec import as_leaves, as_tuple, has_gradient
from kernel_ladder.testing.samples import make_inputs

from ..conftest import (
    DEVICE,
    NO_GRADIENT,
    elements,
    every_variant,
    plain_cases,
    register_own_gelu,
    skip_unless_it_runs,
    typical_case,
    variant_id,
)
from ..sampling import MODES_OF_DEFAULT


@functools.cache
def small_cases(op: str, count: int):
    """Samples small enough for finite differences, from the largest down."""
    found = sorted((c for c in plain_cases(op) if elements(c) <= 400), key=elements, reverse=True)
    assert found, f"{op} has no small plain sample"
    return found[:count]


#: Without a GPU compiling takes seconds an operation: there, float64 gradients of all of them are test_agreement.py's.
COMPILED_ON_CPU = ("gelu", "softmax", "attention")


def in_plain_torch() -> list:
    found = [v for v in every_variant("torch", "compile") if v.name not in MODES_OF_DEFAULT]
    found = [v for v in found if v.op not in NO_GRADIENT]
    return [v for v in found if v.level == "torch" or DEVICE.type == "cuda" or v.op in COMPILED_ON_CPU]


@pytest.mark.parametrize("variant", in_plain_torch(), ids=variant_id)
def test_gradcheck(variant):
    ran = 0
    # Compiling takes seconds a case.
    for case in small_cases(variant.op, 4 if variant.level == "torch" else 1):
        inputs = make_inputs(case, torch.float64, DEVICE)
        if variant.unsupported(*inputs, **case.options) is None:
            leaves = as_leaves(inputs)
            assert torch.autograd.gradcheck(
                lambda *x, options=case.options: autograd.run(variant, x, options),
                leaves,
                fast_mode=elements(case) > 64,
            )
            ran += 1
    if not ran:
        skip_unless_it_runs(variant, inputs, case.options)


@pytest.mark.parametrize("variant", [v for v in every_variant() if v.backward is not None], ids=variant_id)
def test_a_second_derivative_is_a_clear_error(variant):
    case = typical_case(variant.op, most=5000)
    leaves = as_leaves(make_inputs(case, torch.float32, DEVICE))
    skip_unless_it_runs(variant, leaves, case.options)
    wanted = [x for x in leaves if has_gradient(x)]

    def loss() -> torch.Tensor:
        return sum(y.square().sum() for y in as_tuple(autograd.run(variant, leaves, case.options)))

    grads = torch.autograd.grad(loss(), wanted, create_graph=True)
    plain = torch.autograd.grad(loss(), wanted)
    torch.testing.assert_close(tuple(g.detach() for g in grads), plain)  # the first is as without create_graph
    with pytest.raises(RuntimeError, match=rf"{variant.op}: {variant.name} can be differentiated only once"):
        torch.autograd.grad(sum(g.sum() for g in grads), wanted)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_checkpoint_recomputes(create_graph, scratch_table):
    """What is saved can be read once from a checkpoint that does not re-enter autograd."""
    register_own_gelu()
    x = torch.randn(9, device=DEVICE, requires_grad=True)
    y = checkpoint(lambda x: kernel_ladder.gelu(x, backend="torch.own"), x, use_reentrant=False)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=create_graph)
    (expected,) = torch.autograd.grad(torch.nn.functional.gelu(x).sum(), x)
    torch.testing.assert_close(grad.detach(), expected)


@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_only_what_needs_a_gradient_gets_one(op):
    for variant in every_variant():
        if variant.op != op or variant.backward is None:
            continue
        case = typical_case(op, most=5000)
        inputs = make_inputs(case, torch.float32, DEVICE)
        skip_unless_it_runs(variant, as_leaves(inputs), case.options)
        for wanted in [i for i, x in enumerate(inputs) if has_gradient(x)]:
            leaves = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(inputs)]
            outputs = as_tuple(autograd.run(variant, tuple(leaves), case.options))
            sum(y.sum() for y in outputs).backward()
            assert [x.grad is not None for x in leaves] == [i == wanted for i in range(len(leaves))]


@pytest.mark.parametrize("variant", [v for v in every_variant() if v.inference is not None], ids=variant_id)
def test_without_a_gradient_the_output_is_the_same(variant):
    """There are two ways to it, with what a backward pass needs and without."""
    case = typical_case(variant.op)
    inputs = make_inputs(case, torch.float16, DEVICE)
    skip_unless_it_runs(variant, as_leaves(inputs), case.options)
    alone = as_tuple(autograd.run(variant, inputs, case.options))
    outputs = as_tuple(autograd.run(variant, (inputs[0].requires_grad_(), *inputs[1:]), case.options))
    for one, other in zip(alone, outputs, strict=True):
        assert one.grad_fn is None
        assert other.grad_fn is not None
        assert torch.equal(one, other)
