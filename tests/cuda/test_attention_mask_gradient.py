"""The gradient of an additive mask: each way to broadcast, odd sizes, the same bits in every run, stated memory (GPU).

Sums over all keys of a query vanish, but for the gradient of the log-sum-exp: such masks are held beside one.
"""

from __future__ import annotations

import math

import pytest
import torch

import kernel_ladder
from kernel_ladder import autograd, table
from kernel_ladder.semantics.masks import LOWER_RIGHT
from kernel_ladder.spec import Case, Inputs, as_leaves
from kernel_ladder.testing.agreement import agreement, evaluate
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import DEVICE, needs_extension, needs_gpu, skip_unless_it_runs

pytestmark = [needs_gpu, needs_extension]

SPEC = kernel_ladder.spec("attention")
RUNGS = {name: v for v in table.variants("attention", "cuda") if (name := v.name) in ("cuda.naive", "cuda.flash")}
OPTIONS = {"is_causal": False, "scale": None, "enable_gqa": True}

#: Three batch entries, four heads of which two share keys, and lengths that no tile divides.
B, H, H_KV, Q, K = 3, 4, 2, 131, 203
MASKS = {
    "keys": (1, 1, 1, K),
    "keys of a head": (H, 1, K),
    "batch": (B, 1, Q, K),
    "head": (1, H, Q, K),
    "matrix": (Q, K),
    "whole": (B, H, Q, K),
}
HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (256, 256), (192, 128), (40, 72)]
#: Options that change which scores count.
BANDS = {
    "causal": ((1, 1, 1, K), {"is_causal": True}),
    "window": ((1, H, Q, K), {"window_size": (50, 9)}),
    "lower right": ((B, 1, Q, K), {"is_causal": LOWER_RIGHT, "return_lse": True}),
}
#: Masks that add one number to all keys of a query.
NUMBERS = {"row": (Q, 1), "row of a batch entry": (B, 1, Q, 1), "head": (1, H, 1, 1), "number": ()}


def inputs_of(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> Inputs:
    """Operands and a mask of numbers, some of which are −inf and hide their keys."""
    *operands, mask = make_inputs(Case("", shapes), dtype, DEVICE)
    if mask.dim() and mask.shape[-1] > 1:
        mask[..., ::7] = -torch.inf
        if mask.shape[-2:-1] > (3,):
            mask[..., 3, :] = -torch.inf
    return (*operands, mask)


def attention_shapes(d: int, d_v: int, mask: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return (B, H, Q, d), (B, H_KV, K, d), (B, H_KV, K, d_v), mask


def holds(name: str, inputs: Inputs, options: dict) -> None:
    """Output and gradients, the mask's among them, are as near to float64 as the formula's."""
    variant = RUNGS[name]
    skip_unless_it_runs(variant, as_leaves(inputs), options)
    grad = make_grad(SPEC, inputs, options)
    result = agreement(SPEC, lambda *x, **o: autograd.run(variant, x, o), inputs, options, grad)
    assert len(result.deviations) == 5 + bool(options.get("return_lse"))
    assert result.agrees, str(result)


def by_dtype(name: str) -> list[torch.dtype]:
    return [torch.float32] if name == "cuda.naive" else [torch.bfloat16, torch.float16]


EACH = [pytest.param(name, dtype, id=f"{name}-{str(dtype)[6:]}") for name in RUNGS for dtype in by_dtype(name)]


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("d", "d_v"), HEAD_DIMS, ids=str)
@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_a_mask_that_broadcasts_gets_the_sum_over_its_scores(name, dtype, d, d_v, mask):
    holds(name, inputs_of(attention_shapes(d, d_v, mask), dtype), OPTIONS)


@pytest.mark.parametrize(("mask", "options"), BANDS.values(), ids=BANDS)
@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_bands_of_keys(name, dtype, mask, options):
    holds(name, inputs_of(attention_shapes(64, 64, mask), dtype), {**OPTIONS, **options})


@pytest.mark.parametrize("mask", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RUNGS)
def test_one_number_for_all_keys_of_a_query(name, dtype, is_causal, mask):
    """Scores' gradients cancel, and the log-sum-exp's is left. In float32 the formula's error of that is luck."""
    options = {**OPTIONS, "is_causal": is_causal, "return_lse": True}
    holds(name, inputs_of(attention_shapes(64, 64, mask), dtype), options)


@pytest.mark.parametrize("mask", [(2, 1, 1, Q, K), (1, 3, 2, 1, K), (3, 1, Q, K), (2, 3, 2, Q, K)], ids=str)
@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_several_batch_dimensions_of_which_some_broadcast(name, dtype, mask):
    shapes = ((2, 3, 2, Q, 64), (2, 3, 1, K, 64), (2, 3, 1, K, 64), mask)
    holds(name, inputs_of(shapes, dtype), OPTIONS)


#: Masks of few tiles beside many scores, so that several blocks share a tile.
LONG = {"keys": (1, 1, 1, 700), "matrix": (650, 700), "head": (8, 1, 700)}


def long_inputs(mask: tuple[int, ...], dtype: torch.dtype, d: int = 64) -> Inputs:
    return inputs_of(((4, 8, 650, d), (4, 2, 700, d), (4, 2, 700, d), mask), dtype)


@pytest.mark.parametrize("mask", LONG.values(), ids=LONG)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [64, 256])
def test_blocks_that_share_a_tile_of_the_mask(d, is_causal, mask):
    holds("cuda.flash", long_inputs(mask, torch.bfloat16, d), {**OPTIONS, "is_causal": is_causal})


@pytest.mark.parametrize("mask", [*LONG.values(), (4, 8, 650, 700)], ids=[*LONG, "whole"])
@pytest.mark.parametrize("name", RUNGS)
def test_the_same_bits_in_every_run(name, mask):
    """Also where new memory is NaN, as PyTorch fills it under the flag."""
    inputs, variant = long_inputs(mask, torch.bfloat16), RUNGS[name]
    skip_unless_it_runs(variant, as_leaves(inputs), OPTIONS)
    grad = make_grad(SPEC, inputs, OPTIONS)

    def gradients() -> dict[str, torch.Tensor]:
        return evaluate(lambda *x, **o: autograd.run(variant, x, o), inputs, OPTIONS, grad)

    first = gradients()
    torch.use_deterministic_algorithms(True)
    try:
        again = gradients()
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(first) == {"output", *(f"grad {i}" for i in range(4))}
    for of in first:
        assert torch.equal(first[of], again[of]), f"{of} differs between runs"


@pytest.mark.parametrize("mask", [(1, 1, 1, 700), (2, 700), (2, 8, 2, 700)], ids=str)
def test_few_queries(mask):
    """`split_kv`, which has the backward pass of `flash`."""
    variant = next(v for v in table.variants("attention", "cuda") if v.name == "cuda.split_kv")
    inputs = inputs_of(((2, 8, 2, 128), (2, 2, 700, 128), (2, 2, 700, 128), mask), torch.bfloat16)
    skip_unless_it_runs(variant, as_leaves(inputs), OPTIONS)
    grad = make_grad(SPEC, inputs, OPTIONS)
    result = agreement(SPEC, lambda *x, **o: autograd.run(variant, x, o), inputs, OPTIONS, grad)
    assert result.agrees, str(result)


@pytest.mark.parametrize("mask", [(), (3, 1), (1, 2, 3, 0)], ids=str)
@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_without_keys_the_gradient_is_zero(name, dtype, mask):
    inputs = as_leaves(make_inputs(Case("", ((1, 2, 3, 8), (1, 2, 0, 8), (1, 2, 0, 8), mask)), dtype, DEVICE))
    output = kernel_ladder.attention(*inputs, backend=name)
    (found,) = torch.autograd.grad(output.sum(), inputs[3])
    assert found.shape == mask
    assert not found.any()


@pytest.mark.parametrize("name", RUNGS)
def test_a_compiled_call_has_the_same_gradient(name):
    leaves = as_leaves(inputs_of(attention_shapes(64, 64, (H, 1, K)), torch.bfloat16))

    def loss(*x: torch.Tensor) -> torch.Tensor:
        return kernel_ladder.attention(*x, enable_gqa=True, backend=name).float().square().sum()

    found = []
    for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        found.append(torch.autograd.grad(call(*leaves), leaves[3])[0])
    torch._dynamo.reset()
    assert found[0].any()
    assert torch.equal(*found)


@pytest.mark.parametrize("mask", [(1, 1, 1, 4096), (4096, 4096), (1, 4, 4096, 1)], ids=str)
def test_the_backward_holds_gradients_and_its_workspace(mask):
    """As docs/limits.md states it; a gradient of the scores in float32 would take 256 MiB."""
    inputs = make_inputs(Case("", ((1, 4, 4096, 64), *((1, 4, 4096, 64),) * 2, mask)), torch.bfloat16, DEVICE)
    variant = RUNGS["cuda.flash"]
    skip_unless_it_runs(variant, as_leaves(inputs), OPTIONS)
    output, saved = variant.forward(*inputs, **OPTIONS)
    grad, needs = torch.ones_like(output), (True,) * 4
    variant.backward(saved, grad, needs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    gradients = variant.backward(saved, grad, needs)
    held = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    delta = 4 * math.prod(output.shape[:-1])
    runs = 2**16 * torch.cuda.get_device_properties(DEVICE).multi_processor_count
    assert held <= sum(x.nbytes for x in gradients) + delta + runs


def test_the_operator_checks_the_masks_shape():
    q, k = (torch.randn(1, 2, n, 64, dtype=torch.bfloat16, device=DEVICE) for n in (4, 5))
    mask_backward = torch.ops.kernel_ladder.attention_mask_backward.naive
    for mask in (q.new_zeros(4, 4), q.new_zeros(2, 2, 4, 5), q.new_zeros(1, 1, 1, 4, 5)):
        with pytest.raises(RuntimeError, match="argument `attn_mask` must broadcast to the shape of the scores"):
            mask_backward(q, None, q, k, k, mask, -4, 5, 0.125, False)
