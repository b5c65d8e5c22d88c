"""A linear layer: what it keeps for its gradient and when, and the same bits in every run."""

from __future__ import annotations

import pytest
import torch

import kernel_ladder
from kernel_ladder import autograd, table
from kernel_ladder.spec import Case
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import DEVICE, every_variant, skip_unless_available, skip_unless_it_runs, variant_id

VARIANTS = [v for v in every_variant("triton", "cuda") if v.op == "linear"]
GELU = {"activation": "gelu"}
#: M, N, K: tiles cut at every edge, rows that backward shares among blocks, a thin input.
SHAPES = [(5, 40, 24), (300, 40, 17), (70, 131, 65), (1, 96, 264)]
if DEVICE.type == "cuda":
    SHAPES += [(4096, 512, 1024), (1000, 1032, 4099), (16, 8192, 2048), (100_003, 24, 40)]


def layer(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    return make_inputs(Case("", ((m, k), (n, k), (n,)), GELU), dtype, DEVICE)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_agreement_at_more_shapes_and_the_same_bits_again(variant, dtype, shape):
    spec, inputs = kernel_ladder.spec("linear"), layer(*shape, dtype)
    skip_unless_it_runs(variant, inputs, GELU)
    grad = make_grad(spec, inputs, GELU)
    result = agreement(spec, lambda *x, **o: autograd.run(variant, x, o), inputs, GELU, grad)
    assert result.agrees, str(result)

    def run() -> tuple[torch.Tensor, ...]:
        leaves = tuple(x.detach().requires_grad_() for x in inputs)
        output = autograd.run(variant, leaves, GELU)
        return output.detach(), *torch.autograd.grad(output, leaves, grad)

    first = run()
    for again in (run(), run()):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh"])
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_the_product_is_kept_only_for_a_gradient_through_an_activation(variant, activation):
    inputs = layer(33, 40, 24)
    options = {"activation": activation}
    skip_unless_it_runs(variant, inputs, options)
    with torch.no_grad():
        alone = variant.output(*inputs, **options)
        output, saved = variant.forward(*inputs, **options)
    assert torch.equal(alone, output), "with and without what is kept"
    own = {x.data_ptr() for x in inputs}
    kept = [s for s in saved if isinstance(s, torch.Tensor) and s.data_ptr() not in own]
    assert len(kept) == (activation is not None)
    if kept:
        alone = kernel_ladder.linear(*inputs[:2], backend=variant.name)
        assert torch.equal(kept[0].view(alone.shape), alone)


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_a_gradient_that_no_view_can_fold(variant):
    """The gradient of an output that was permuted: its rows do not fold, so they are copied."""
    options = {"activation": "gelu"}
    inputs = make_inputs(Case("", ((3, 17, 24), (40, 24), (40,)), options), torch.float32, DEVICE)
    skip_unless_it_runs(variant, inputs, options)
    spec = kernel_ladder.spec("linear")
    grad = make_grad(spec, inputs, options)
    for given in (grad, grad.transpose(0, 1).contiguous().transpose(0, 1), grad[:1, :1].expand_as(grad)):
        result = agreement(spec, lambda *x, **o: autograd.run(variant, x, o), inputs, options, given)
        assert result.agrees, str(result)


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_only_the_wanted_gradients_are_made(variant, needs):
    inputs = layer(33, 40, 24)
    skip_unless_it_runs(variant, inputs, GELU)
    with torch.no_grad():
        output, saved = variant.forward(*inputs, **GELU)
        everything = variant.backward(saved, torch.ones_like(output), (True,) * 3)
        some = variant.backward(saved, torch.ones_like(output), needs)
    for wanted, all_of, one_of in zip(needs, everything, some, strict=True):
        assert torch.equal(all_of, one_of) if wanted else one_of is None


def test_unaligned_operands_of_large_layers_are_copied_for_descriptors(monkeypatch):
    skip_unless_available("linear", "triton")
    from triton_impl.matmul import descriptors

    monkeypatch.setattr(descriptors, "COPIED_FROM", 2**10)
    spec, options = kernel_ladder.spec("linear"), {"activation": "gelu"}
    (variant,) = (v for v in table.variants("linear", "triton") if v.name == "triton.persistent")
    inputs = make_inputs(Case("", ((2, 20, 35), (33, 35), (33,)), options), torch.bfloat16, DEVICE)
    skip_unless_it_runs(variant, inputs, options)
    grad = make_grad(spec, inputs, options)
    for _ in range(2):  # a known launch copies again
        result = agreement(spec, lambda *x, **o: autograd.run(variant, x, o), inputs, options, grad)
        assert result.agrees, str(result)
