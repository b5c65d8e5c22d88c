"""Calls one after another on tensors of one shape and the same strides, whose memory begins at other addresses.

A launch that is remembered by shapes and strides may have copied an operand whose address no copy engine takes, or may
have chosen instructions that take aligned addresses alone. Then the next call must not repeat it on other addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import kernel_ladder
from kernel_ladder import table
from kernel_ladder.spec import as_leaves, as_tuple
from kernel_ladder.table import Variant
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.samples import make_inputs

from ..conftest import DEVICE, public, variant_id
from .test_far_strides import CASES, DTYPE, expected

#: Elements from one row to the next, and the elements at which memory begins, call after call. Other strides are
#: another launch: each order has strides of its own.
ORDERS = ((1104, (0, 1, 0)), (1120, (1, 0, 1)))


def placed(x: torch.Tensor, pitch: int, first: int) -> torch.Tensor:
    """`x` with rows `pitch` elements apart, from the `first` element of fresh memory on; NaN between them."""
    strides = [1] * x.dim()
    for d in reversed(range(x.dim() - 1)):
        strides[d] = pitch if d == x.dim() - 2 else strides[d + 1] * x.shape[d + 1]
    size = first + sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True)) + 1
    return x.new_full((size,), torch.nan).as_strided(x.shape, strides, first).copy_(x)


def all_placed(tensors: Sequence[Any], pitch: int, first: int) -> tuple[Any, ...]:
    """Every tensor of floating-point numbers, placed."""
    return tuple(placed(x, pitch, first) if x is not None and x.is_floating_point() else x for x in tensors)


def takes(variant: Variant, index: int) -> bool:
    """Whether a variant takes the case where all memory begins on 16 bytes."""
    inputs = all_placed(make_inputs(CASES[variant.op][index], DTYPE, DEVICE), ORDERS[0][0], 0)
    return variant.unsupported(*as_leaves(inputs), **CASES[variant.op][index].options) is None


def parameters() -> Iterator[Any]:
    for op in CASES:
        for index, case in enumerate(CASES[op]):
            for variant in table.variants(op):
                if variant.level == "compile":
                    continue  # the compiler's programs copy such inputs themselves, and take minutes to compile
                if (table.unavailable(op, variant.level) or variant.here()) is None and takes(variant, index):
                    yield pytest.param(variant, index, id=f"{variant_id(variant)}-{case.id}")


@pytest.mark.parametrize(("variant", "index"), list(parameters()))
def test_one_layout_at_other_addresses(variant, index, monkeypatch):
    if variant.level == "triton":
        from triton_impl.matmul import descriptors

        monkeypatch.setattr(descriptors, "COPIED_FROM", 1)  # operands of small products are copied too
    spec, case = kernel_ladder.spec(variant.op), CASES[variant.op][index]
    inputs, grad, to = expected(variant.op, index)
    failed = []

    def call(*inputs, **options):
        return public(variant.op, inputs, options, backend=variant.name)

    for pitch, firsts in ORDERS:
        for turn, first in enumerate(firsts):
            of_call, of_grad = all_placed(inputs, pitch, first), all_placed(as_tuple(grad), pitch, first)
            if variant.unsupported(*as_leaves(of_call), **case.options) is not None:
                continue
            result = agreement(spec, call, of_call, case.options, of_grad if len(of_grad) > 1 else of_grad[0], to=to)
            if not result.agrees:
                failed.append(f"begins at {', '.join(map(str, firsts[: turn + 1]))}: {result}")
    assert not failed, "\n".join(failed)
