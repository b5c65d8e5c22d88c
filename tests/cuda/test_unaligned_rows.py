"""Rows that begin anywhere, at the cuda level: vectors across their ends read and write no other row's elements."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import kernel_ladder
from kernel_ladder import autograd
from kernel_ladder.spec import Case, each
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import every_variant, needs_gpu, skip_unless_it_runs, variant_id

pytestmark = needs_gpu

ROWS = 5
#: Around vectors of 8 elements, around a warp's and a block's share, and beyond what a block has in registers.
LENGTHS = (7, 9, 15, 17, 255, 257, 1031, 4099, 8191, 16387)
OPS = ("softmax", "layer_norm", "rms_norm", "add_rms_norm", "cross_entropy")


def case_of(op: str, length: int) -> Case:
    rows, of_row = (ROWS, length), (length,)
    norm: dict[str, Any] = {"normalized_shape": of_row, "eps": 1e-5}
    cross_entropy: dict[str, Any] = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.1, "z_loss": 0.0}
    shapes, options = {
        "softmax": ((rows,), {"dim": -1}),
        "layer_norm": ((rows, of_row, of_row), norm),
        "rms_norm": ((rows, of_row), norm),
        "add_rms_norm": ((rows, rows, of_row), {"eps": 1e-5}),
        "cross_entropy": ((rows, (ROWS,)), cross_entropy),
    }[op]
    return Case("", shapes, options, kinds={1: "classes"} if op == "cross_entropy" else {})


def moved(x: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy of `x` that begins `offset` elements into memory that holds NaN around it."""
    if not x.is_floating_point():
        return x
    memory = torch.full((x.numel() + 64,), torch.nan, dtype=x.dtype, device=x.device)
    return memory[offset : offset + x.numel()].view(x.shape).copy_(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("variant", [v for v in every_variant("cuda") if v.op in OPS], ids=variant_id)
def test_rows_that_begin_anywhere(variant, dtype):
    spec, ran = kernel_ladder.spec(variant.op), 0
    for number, length in enumerate(LENGTHS):
        case = case_of(variant.op, length)
        inputs = make_inputs(case, dtype, "cuda")
        if variant.unsupported(*inputs, **case.options) is not None:
            continue
        grad = make_grad(spec, inputs, case.options)
        for offset in {0, 1, 3, 1 + number % 7}:
            at = functools.partial(moved, offset=offset)
            grads = each(at, grad) if isinstance(grad, tuple) else at(grad)
            run = lambda *x, **options: autograd.run(variant, x, options)  # noqa: E731
            result = agreement(spec, run, each(at, inputs), case.options, grads)
            assert result.agrees, f"length {length}, offset {offset}: {result}"
            ran += 1
    if not ran:
        skip_unless_it_runs(variant, inputs, case.options)
