"""Sums of more 16-bit numbers than 16 bits count, by PyTorch's own functions and by what `auto` takes of them."""

from __future__ import annotations

import pytest
import torch

import kernel_ladder
from kernel_ladder.spec import as_tuple
from kernel_ladder.testing.agreement import agreement, standards

from ..conftest import DEVICE, public

#: float16 counts to 2048, bfloat16 to 256, and float16 ends at 65504.
MANY = 70_000


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64)


def _labels(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


_ENTROPY = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0}
_NORM = {"normalized_shape": (8,), "eps": 1e-5}
_NORMAL = torch.randn(4096, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
CASES = {
    "layer_norm": ("layer_norm", (_NORMAL, _ones(8), _ones(8)), _NORM),
    "rms_norm": ("rms_norm", (_NORMAL, _ones(8)), _NORM),
    "add_rms_norm": ("add_rms_norm", (_NORMAL, _NORMAL, _ones(8)), {"eps": 1e-5}),
    "bias_gelu": ("bias_gelu", (_NORMAL, _ones(8)), {"approximate": "none"}),
    "linear": ("linear", (_NORMAL, _NORMAL[:8], _ones(8)), {"activation": None}),
    "cross_entropy-rows": ("cross_entropy", (0 * _ones(MANY, 4), _labels(MANY)), _ENTROPY),
    "cross_entropy-z-loss": ("cross_entropy", (0 * _ones(MANY, 4), _labels(MANY)), {**_ENTROPY, "z_loss": 1e-3}),
    "cross_entropy-classes": ("cross_entropy", (0 * _ones(2, MANY), _labels(2)), _ENTROPY),
    "sum": ("sum", (torch.cat([_ones(MANY), -_ones(MANY)]),), {"dim": None, "keepdim": False}),
    "sum-columns": ("sum", (torch.cat([_ones(MANY, 3), -_ones(MANY, 3)]),), {"dim": 0, "keepdim": False}),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("backend", ["auto", "torch.builtin"])
@pytest.mark.parametrize("case", CASES)
def test_long_sums(case, backend, dtype):
    op, given, options = CASES[case]
    spec = kernel_ladder.spec(op)
    inputs = tuple((x.to(dtype) if x.is_floating_point() else x).to(DEVICE) for x in given)
    found = spec.reference(*inputs, **options)
    # All positive, so that sums grow; not all equal, so that no gradient behind a norm is zero but for rounding.
    grads = tuple(torch.linspace(0.5, 1.5, x.numel(), device=DEVICE).view(x.shape).to(x.dtype) for x in as_tuple(found))
    grad = grads if isinstance(found, tuple) else grads[0]

    def call(*inputs: torch.Tensor, **options: object) -> torch.Tensor:
        return public(op, inputs, options, backend=backend)

    result = agreement(spec, call, inputs, options, grad, to=standards(spec, inputs, options, grad))
    assert result.agrees, str(result)
