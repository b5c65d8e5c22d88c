"""Attention beyond its samples: bands of keys, bias objects, mask gradients, memory, repetition."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

import kernel_ladder
from kernel_ladder import autograd, table
from kernel_ladder.semantics.masks import LOWER_RIGHT, band, hides_nothing, pairs, seen
from kernel_ladder.spec import Case, as_leaves
from kernel_ladder.testing.agreement import agreement, evaluate
from kernel_ladder.testing.deviation import compare
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import DEVICE, needs_gpu, skip_unless_it_runs

VARIANTS = [v for v in table.variants("attention") if v.level != "compile"]
OPTIONS = {"is_causal": False, "scale": None, "enable_gqa": False}
#: What a kernel may allocate beside its results: alignment of the allocator's blocks.
SLACK_BYTES = 2**16


def visible(is_causal, window, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """The definition, one score at a time."""
    matrix = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    for i, j in itertools.product(range(seqlen_q), range(seqlen_k)):
        place = i + seqlen_k - seqlen_q  # where FlashAttention's window lies around
        matrix[i, j] = (
            (not is_causal or j <= (place if is_causal == LOWER_RIGHT else i))
            and (window[0] < 0 or j >= place - window[0])
            and (window[1] < 0 or j <= place + window[1])
        )
    return matrix


@pytest.mark.parametrize("is_causal", [False, True, LOWER_RIGHT])
def test_a_band_is_what_its_definition_says(is_causal):
    for window in itertools.product((-1, 0, 1, 3, 50), repeat=2):
        for lengths in itertools.product((1, 2, 5, 7), repeat=2):
            limits, expected = band(is_causal, window, *lengths), visible(is_causal, window, *lengths)
            assert torch.equal(seen(*limits, *lengths, torch.device("cpu")), expected)
            assert pairs(*limits, *lengths) == expected.sum()
            assert hides_nothing(*limits, *lengths) == bool(expected.all())


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize(("bias", "is_causal"), [(causal_lower_right, LOWER_RIGHT), (causal_upper_left, True)])
def test_bias_objects_are_never_expanded(variant, bias, is_causal):
    inputs = make_inputs(Case("", ((1, 2, 5, 16), (1, 2, 9, 16), (1, 2, 9, 16))), torch.float32, DEVICE)
    skip_unless_it_runs(variant, inputs, {**OPTIONS, "is_causal": is_causal})
    expected = kernel_ladder.attention(*inputs, is_causal=is_causal, backend=variant.name)
    if variant.level == "torch":  # PyTorch's own function expands them where it has no kernel for them
        actual = kernel_ladder.attention(*inputs, attn_mask=bias(5, 9), backend=variant.name)
    else:
        with mock.patch.object(CausalBias, "_materialize", side_effect=AssertionError("expanded")):
            actual = kernel_ladder.attention(*inputs, attn_mask=bias(5, 9), backend=variant.name)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("shape", [(2, 4, 12, 37), (12, 1), (4, 1, 37)], ids=str)
def test_gradients_beside_an_additive_mask(variant, dtype, shape):
    """A mask that asks for no gradient, which every variant takes."""
    spec = kernel_ladder.spec("attention")
    options = {**OPTIONS, "enable_gqa": True, "is_causal": LOWER_RIGHT}
    case = Case("", ((2, 4, 12, 16), (2, 2, 37, 16), (2, 2, 37, 16), shape), options)
    *inputs, mask = make_inputs(case, dtype, DEVICE)
    mask[..., ::5] = -torch.inf
    skip_unless_it_runs(variant, (*as_leaves(inputs), mask), options)
    grad = make_grad(spec, (*inputs, mask), options)

    def beside(run, mask):
        return evaluate(lambda *x, **more: run((*x, mask), more), tuple(inputs), options, grad)

    actual = beside(lambda x, more: autograd.run(variant, x, more), mask)
    naive = beside(lambda x, more: spec.reference(*x, **more), mask)
    exact = evaluate(
        lambda *x, **more: spec.reference(*x, mask.double(), **more),
        tuple(x.double() for x in inputs),
        options,
        grad.double(),
    )
    for name in exact:
        deviation = compare(name, actual[name], exact[name], naive[name], grad if name.startswith("grad") else None)
        assert deviation.agrees, str(deviation)


@pytest.mark.parametrize("low", [-1e9, -1e10], ids=str)
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.level != "torch"], ids=lambda v: v.name)
def test_no_weight_is_more_than_one_under_a_mask_of_large_numbers(variant, low):
    """One query may see nothing, by numbers next to which scores vanish; its weights are made again from them."""
    inputs = make_inputs(Case("", ((1, 2, 40, 64),) * 3), torch.bfloat16, DEVICE)
    mask = torch.zeros(1, 1, 40, 40, dtype=torch.bfloat16, device=DEVICE)
    mask[..., 3, :] = low
    skip_unless_it_runs(variant, (*inputs, mask), OPTIONS)
    grad = make_inputs(Case("", ((1, 2, 40, 64),)), torch.bfloat16, DEVICE, seed=1)[0]
    gradients = evaluate(lambda *x, **options: autograd.run(variant, (*x, mask), options), inputs, OPTIONS, grad)
    assert all(x.isfinite().all() for x in gradients.values())
    most = grad.double().abs().sum(-2, keepdim=True)  # of the values' gradients, were every weight one
    assert (gradients["grad 2"].double().abs() <= 1.01 * most).all()


def test_the_gradient_of_a_mask_is_given_or_refused():
    inputs = as_leaves(make_inputs(Case("", ((1, 2, 5, 16),) * 3 + ((5, 5),)), torch.float32, DEVICE))
    weights = (inputs[0] @ inputs[1].mT / 4 + inputs[3]).softmax(-1)
    (expected,) = torch.autograd.grad((weights @ inputs[2]).square().sum(), inputs[3])
    for variant in VARIANTS:
        if table.unavailable("attention", variant.level) is not None:
            continue
        if variant.name in ("torch.naive", "triton.flash", "triton.split_kv", "xla.jit", "cuda.naive"):
            output = kernel_ladder.attention(*inputs, backend=variant.name)
            (found,) = torch.autograd.grad(output.square().sum(), inputs[3])
            torch.testing.assert_close(found, expected)
        else:
            assert variant.unsupported(*inputs, **OPTIONS) is not None
            with torch.no_grad():
                plain = variant.unsupported(*inputs, **OPTIONS)
            assert plain is None or "gradient" not in plain


@pytest.mark.parametrize(
    ("name", "batch", "mask", "dtype"),
    [
        ("flash", (2,), (2, 4, 3, 40), torch.float32),
        ("flash", (2,), (3, 40), torch.bfloat16),
        ("split_kv", (2,), (3, 40), torch.bfloat16),
        ("flash", (2,), (2, 1, 1, 40), torch.bfloat16),
        ("flash", (2,), (4, 3, 1), torch.float32),
        ("flash", (2,), (1, 1, 1, 1), torch.float32),
        ("flash", (), (4, 3, 40), torch.float32),
        ("flash", (3, 2), (3, 1, 4, 1, 40), torch.float32),
    ],
    ids=str,
)
def test_the_gradient_of_a_mask_is_summed_over_what_it_broadcasts_to(name, batch, mask, dtype):
    found = [v for v in VARIANTS if v.name == f"triton.{name}"]
    if not found:
        pytest.skip("the triton level is not installed")
    variant, spec = found[0], kernel_ladder.spec("attention")
    shapes = ((*batch, 4, 3, 8), (*batch, 2, 40, 8), (*batch, 2, 40, 16), mask)
    options = {**OPTIONS, "enable_gqa": True, "window_size": (30, 5), "return_lse": True}
    inputs = make_inputs(Case("", shapes, options), dtype, DEVICE)
    skip_unless_it_runs(variant, as_leaves(inputs), options)
    grad = make_grad(spec, inputs, options)
    result = agreement(spec, lambda *x, **o: autograd.run(variant, x, o), inputs, options, grad)
    assert result.agrees, str(result)
    assert result.deviations[-1].name == "grad 3"


@needs_gpu
@pytest.mark.parametrize("mask", [(700, 900), (2, 1, 1, 900), (4, 700, 1), (2, 4, 700, 900)], ids=str)
def test_the_gradient_of_a_mask_of_many_tiles(mask):
    variant, spec = next(v for v in VARIANTS if v.name == "triton.flash"), kernel_ladder.spec("attention")
    options = {**OPTIONS, "is_causal": LOWER_RIGHT, "enable_gqa": True}
    shapes = ((2, 4, 700, 64), (2, 2, 900, 64), (2, 2, 900, 128), mask)
    inputs = make_inputs(Case("", shapes, options), torch.bfloat16, DEVICE)
    grad = make_grad(spec, inputs, options)
    result = agreement(spec, lambda *x, **o: autograd.run(variant, x, o), inputs, options, grad)
    assert result.agrees, str(result)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("window", [(3, 0), (0, 2), (-1, 5), (70, -1)], ids=str)
def test_a_window_is_the_mask_that_flash_attention_describes(variant, window):
    inputs = make_inputs(Case("", ((1, 2, 40, 16), (1, 2, 90, 16), (1, 2, 90, 16))), torch.float32, DEVICE)
    options = {**OPTIONS, "window_size": window}
    skip_unless_it_runs(variant, inputs, options)
    expected = kernel_ladder.attention(*inputs, attn_mask=visible(False, window, 40, 90).to(DEVICE), backend="torch")
    torch.testing.assert_close(
        kernel_ladder.attention(*inputs, window_size=list(window), backend=variant.name), expected
    )


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_a_scale_may_be_an_integer_past_64_bits(variant):
    query, key, value = (torch.randn(1, 2, 9, 16, device=DEVICE) for _ in range(3))
    options = {"is_causal": False, "enable_gqa": False}
    skip_unless_it_runs(variant, (query, key, value), {**options, "scale": 2**70})
    expected = variant.forward(query, key, value, scale=1.0, **options)[0]
    output = variant.forward(query * 2.0**-70, key, value, scale=2**70, **options)[0]
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_a_band_may_pass_by_every_key(variant):
    """The causal mask counts from the first key, the window from the last."""
    inputs = make_inputs(Case("", ((1, 1, 1, 8), (1, 1, 8, 8), (1, 1, 8, 8))), torch.bfloat16, DEVICE)
    options = {**OPTIONS, "is_causal": True, "window_size": (5, 0)}
    skip_unless_it_runs(variant, inputs, options)
    assert not variant.output(*inputs, **options).any()


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.level in ("triton", "cuda")], ids=lambda v: v.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_call_gives_the_same_bits(variant, dtype):
    keys = 700 if DEVICE.type == "cuda" else 130  # interpreted, one thread does all, in one order
    case = Case("", ((2, 8, 2, 64), (2, 2, keys, 64), (2, 2, keys, 64)), {**OPTIONS, "enable_gqa": True})
    inputs = make_inputs(case, dtype, DEVICE)
    skip_unless_it_runs(variant, inputs, case.options)
    grad = make_grad(kernel_ladder.spec("attention"), inputs, case.options)
    first, second = (
        evaluate(lambda *x, **o: autograd.run(variant, x, o), inputs, case.options, grad) for _ in range(2)
    )
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)


@needs_gpu
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.level in ("triton", "cuda")], ids=lambda v: v.name)
@pytest.mark.parametrize("mask", [False, True], ids=["no-mask", "mask"])
def test_memory_is_that_of_the_results(variant, mask):
    if variant.name == "cuda.naive":
        pytest.skip("the step whose scores stand in memory")
    queries = 1 if variant.name.endswith("split_kv") else 8192
    case = Case("", ((1, 4, queries, 64), (1, 4, 8192, 64), (1, 4, 8192, 64)), OPTIONS)
    inputs = make_inputs(case, torch.bfloat16, DEVICE)
    if mask:
        inputs = (*inputs, torch.rand(1, 1, 1, 8192, device=DEVICE) < 0.5)
    skip_unless_it_runs(variant, inputs, OPTIONS)
    variant.forward(*inputs, **OPTIONS)  # tunes, and fills caches
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = variant.forward(*inputs, **OPTIONS)[0]
    results = output.nbytes + 4 * output.numel() // 64
    if variant.name.endswith("split_kv"):  # each run's, in float32
        results += 64 * 4 * (output.numel() + output.numel() // 64)
    assert torch.cuda.max_memory_allocated() - before <= results + SLACK_BYTES


@pytest.mark.parametrize("variant", table.variants("attention_varlen"), ids=lambda v: v.name)
def test_packed_sequences_do_not_see_each_other(variant):
    """What stands in one sequence changes nothing in another, NaN included."""
    case = next(c for c in kernel_ladder.spec("attention_varlen").samples if c.id == "gqa-causal")
    inputs = make_inputs(case, torch.bfloat16, DEVICE)
    skip_unless_it_runs(variant, inputs, case.options)
    if (
        variant.level == "xla"
        or variant.level == "compile"
        or (variant.name == "torch.naive" and DEVICE.type == "cuda")
    ):
        pytest.skip("the formula multiplies hidden values by a weight of zero, which NaN outlives")
    before = variant.forward(*inputs, **case.options)[0]
    for x in inputs[:3]:
        x[33:] = torch.nan
    torch.testing.assert_close(variant.forward(*inputs, **case.options)[0][:33], before[:33], rtol=0, atol=0)
