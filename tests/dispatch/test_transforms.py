"""What PyTorch does behind a kernel's back: signs that are not in memory, transforms that follow operators."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

import kernel_ladder
from kernel_ladder import UnsupportedError
from kernel_ladder.spec import Inputs, as_leaves, as_tuple, each, has_gradient
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import (
    DEVICE,
    differentiable_ops,
    elements,
    plain_cases,
    public,
    skip_unless_available,
    skip_unless_it_runs,
    without_gradient,
)

LEVELS = [level for level in kernel_ladder.LEVELS if level != "cuda" or DEVICE.type == "cuda"]


pytestmark = pytest.mark.usefixtures("forget_compiled")


def small_case(op: str):
    """The largest of an operation's samples that Triton's interpreter has in a moment, with every argument there."""
    return max((c for c in plain_cases(op) if elements(c) <= 2000 and None not in c.shapes), key=elements)


def skip_unless_differentiable(op: str, level: str) -> None:
    skip_unless_available(op, level)
    skip_unless_it_runs(kernel_ladder.variants(op, level)[-1])
    if (op, level) == ("attention_varlen", "cuda"):
        pytest.skip("takes 16 bits alone, in which rungs differ that read other strides")
    if without_gradient(kernel_ladder.variants(op, level)[-1]):
        pytest.skip("it is for inference and refuses gradients: tests/ops/test_attention_paged.py")


def elsewhere(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as the imaginary part of a conjugate: every other element in memory, with the other sign."""
    if not x.is_floating_point():
        return x
    found = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert found.is_neg()
    return found


def negated(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in dense memory, with the other sign there."""
    return torch._neg_view(-x)


def gradients(op: str, inputs: Inputs, options: dict, backend: str, grads: tuple) -> tuple[tuple, tuple]:
    leaves = as_leaves(inputs)
    outputs = as_tuple(public(op, leaves, options, backend=backend))
    wanted = [x for x in leaves if has_gradient(x)]
    return outputs, torch.autograd.grad(outputs, wanted, grads)


@pytest.mark.sampled
@pytest.mark.parametrize("op", kernel_ladder.OPS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_sign_that_is_not_in_memory(op, level):
    skip_unless_differentiable(op, level)
    case = small_case(op)
    inputs = make_inputs(case, torch.float32, DEVICE)
    grads = as_tuple(make_grad(kernel_ladder.spec(op), inputs, case.options))
    expected = gradients(op, inputs, case.options, level, grads)
    found = gradients(op, each(elsewhere, inputs), case.options, level, each(negated, grads))
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        alone = as_tuple(public(op, each(elsewhere, inputs), case.options, backend=level))
    torch.testing.assert_close(alone, tuple(y.detach() for y in expected[0]))


def under_grad(function, x):
    return torch.func.grad(lambda x: function(x).square().sum())(x)


def under_vmap(function, x):
    return torch.func.vmap(function)(torch.stack([x, 2 * x]))


def under_jvp(function, x):
    return torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]


def under_duals(function, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


TRANSFORMS = [under_grad, under_vmap, under_jvp, under_duals]


def add_one(name: str, **more) -> None:
    """Register a variant of gelu with a backward pass of its own."""
    kernel_ladder.register(
        "gelu", name, forward=lambda x, **_: (x + 1, ()), backward=lambda saved, grad, needs: (grad,), **more
    )


def of_first_input(op: str, dtype: torch.dtype = torch.float32):
    """The first output of an operation as a function of its first input and the backend, and that input."""
    case = small_case(op)
    first, *others = make_inputs(case, dtype, DEVICE)

    def function(x: torch.Tensor, backend: str) -> torch.Tensor:
        return as_tuple(public(op, (x, *others), case.options, backend=backend))[0]

    return function, first


@pytest.mark.parametrize("op", differentiable_ops())
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_auto_in_a_transform_is_pytorchs_own(op, transform):
    if op == "attention" and transform in (under_jvp, under_duals):
        pytest.skip("PyTorch's fused attention has no forward-mode derivative")
    function, x = of_first_input(op)
    found = transform(partial(function, backend="auto"), x)
    expected = transform(partial(function, backend="torch.naive"), x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", differentiable_ops())
@pytest.mark.parametrize("level", [level for level in LEVELS if level != "torch"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_kernel_in_a_transform_is_refused(op, level, transform):
    skip_unless_available(op, level)
    skip_unless_it_runs(kernel_ladder.variants(op, level)[-1])
    function, x = of_first_input(op)
    who = "forward-mode differentiation" if transform is under_duals else "torch.func"
    with pytest.raises(UnsupportedError, match=rf"{op}: .*: {who} .*follows PyTorch's own operators alone"):
        transform(partial(function, backend=level), x)


def test_what_a_transform_does_not_follow_may_be_a_kernels(scratch_table):
    """Tensors from outside of it, without a gradient."""
    add_one("torch.own")
    x = torch.ones(3, device=DEVICE)
    found = torch.func.vmap(lambda y: y + kernel_ladder.gelu(x, backend="torch.own"))(torch.zeros(2, 3, device=DEVICE))
    assert torch.equal(found, torch.full_like(found, 2))
    with forward_ad.dual_level():
        assert torch.equal(kernel_ladder.gelu(x, backend="torch.own"), x + 1)


def test_no_reason_is_asked_for_where_there_is_no_memory(scratch_table):
    add_one("torch.own", unsupported=lambda x, **_: "odd addresses" if x.data_ptr() % 2 else None)
    with pytest.raises(UnsupportedError, match="follows PyTorch's own operators alone"):
        under_vmap(partial(kernel_ladder.gelu, backend="torch.own"), torch.ones(3, device=DEVICE))


@pytest.mark.parametrize("transform", [under_grad, under_vmap, under_jvp])
def test_a_transform_inside_compile(transform, scratch_table):
    add_one("torch.own")
    x = torch.linspace(-2, 2, 5, device=DEVICE)
    expected = transform(torch.nn.functional.gelu, x)
    for backend in ("auto", "torch.builtin", "compile"):
        function = partial(kernel_ladder.gelu, backend=backend)
        inside = torch.compile(lambda x: transform(function, x), fullgraph=True, backend="aot_eager")  # noqa: B023
        torch.testing.assert_close(inside(x), expected)
    function = partial(kernel_ladder.gelu, backend="torch.own")
    inside = torch.compile(lambda x: transform(function, x), backend="aot_eager")
    with pytest.raises(Exception, match=r"torch\.func .* follows PyTorch's own operators alone"):
        inside(x)
