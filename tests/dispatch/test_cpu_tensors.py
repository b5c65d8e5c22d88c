"""Tensors on the CPU are taken where a GPU is present as well: no choice asks a GPU about them."""

from __future__ import annotations

import pytest
import torch

import kernel_ladder
from kernel_ladder.spec import as_leaves, as_tuple
from kernel_ladder.testing.samples import make_inputs

from ..conftest import NO_GRADIENT, public, typical_case


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_tensors_on_the_cpu(op, backend):
    case = typical_case(op, 3000)
    inputs = make_inputs(case, torch.float32, "cpu")
    expected = as_tuple(public(op, inputs, case.options, backend="torch.naive"))
    for given in (inputs,) if op in NO_GRADIENT else (inputs, as_leaves(inputs)):
        found = as_tuple(public(op, given, case.options, backend=backend))
        for ours, right in zip(found, expected, strict=True):
            assert ours.device.type == "cpu"
            torch.testing.assert_close(ours.detach(), right, rtol=1e-4, atol=1e-4)
