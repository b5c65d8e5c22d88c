"""What autograd does with a variant's results: gradients of any strides."""

from __future__ import annotations

import pytest
import torch

import kernel_ladder
from kernel_ladder import table
from kernel_ladder.agreement import evaluate

from .conftest import DEVICE

X = (2, 4, 2, 2, 3, 3)
#: Calls on six dimensions, by the shapes of their operands.
CALLS = {
    "gelu": ((X,), {}),
    "dropout": ((X,), {"p": 0.3, "seed": 5}),
    "softmax": ((X,), {"dim": -1}),
    "softmax-middle": ((X,), {"dim": 2}),
    "swiglu": ((X, X), {}),
    "bias_gelu": ((X, (3,)), {}),
    "add": ((X, (3,)), {}),
    "add-number": ((X, ()), {}),
    "sum": ((X,), {"dim": 5, "keepdim": True}),
    "layer_norm": ((X, (3,), (3,)), {"normalized_shape": (3,)}),
    "rms_norm": ((X, (3,)), {"normalized_shape": (3,)}),
    "linear": ((X, (3, 3), (3,)), {"activation": "gelu"}),
}
#: What makes gradients of strides that do not collapse.
USES = {
    "patches": lambda y: y.permute(0, 1, 4, 2, 5, 3).reshape(2, -1).square(),
    "sums": lambda y: y.sum((0, 2, 4)).square(),
    "slices": lambda y: y * torch.ones([2 * n for n in y.shape], device=y.device)[(slice(None, None, 2),) * y.dim()],
    "reversed": lambda y: y.permute(5, 4, 3, 2, 1, 0) * 3,
}


@pytest.mark.parametrize("level", ["cuda", "triton"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("call", CALLS)
def test_a_gradient_may_have_any_strides(call, use, level):
    op = call.partition("-")[0]
    if (reason := table.unavailable(op, level)) is not None:
        pytest.skip(reason)
    shapes, options = CALLS[call]
    generator = torch.Generator(DEVICE).manual_seed(0)
    inputs = tuple(torch.randn(shape, generator=generator, device=DEVICE) for shape in shapes)

    def run(backend: str) -> dict[str, torch.Tensor]:
        def used(*leaves: torch.Tensor) -> torch.Tensor:
            names = kernel_ladder.spec(op).named(leaves)
            return USES[use](getattr(kernel_ladder, op)(**names, **options, backend=backend)).sum()

        return evaluate(used, inputs, {}, torch.ones((), device=DEVICE))

    torch.testing.assert_close(run(level), run("torch.naive"), rtol=1e-4, atol=1e-3)
