"""What PyTorch does behind a kernel's back: signs that are not in memory, transforms that follow operators."""

from __future__ import annotations

import pytest
import torch

import kernel_ladder
from kernel_ladder.samples import make_grad, make_inputs
from kernel_ladder.spec import Inputs, as_leaves, as_tuple, each, has_gradient

from .conftest import DEVICE, elements, plain_cases, public, skip_unless_it_runs

LEVELS = [level for level in kernel_ladder.LEVELS if level != "cuda" or DEVICE.type == "cuda"]


def small_case(op: str):
    """The largest of an operation's samples that Triton's interpreter has in a moment, with every argument there."""
    return max((c for c in plain_cases(op) if elements(c) <= 2000 and None not in c.shapes), key=elements)


def skip_unless_differentiable(op: str, level: str) -> None:
    skip_unless_it_runs(kernel_ladder.variants(op, level)[-1])
    if (op, level) == ("attention_varlen", "cuda"):
        pytest.skip("has no gradients")


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
