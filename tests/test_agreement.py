"""Every variant, in every dtype it takes, on every sample, forward and backward, against float64."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import kernel_ladder
from kernel_ladder import autograd, table
from kernel_ladder.agreement import agreement, baseline, oracle
from kernel_ladder.samples import make_grad, make_inputs
from kernel_ladder.spec import DTYPES, Case, as_leaves
from kernel_ladder.table import Variant

from .conftest import DEVICE, every_variant, variant_id


@functools.lru_cache(maxsize=8)
def expected(op: str, case_index: int, dtype: torch.dtype, backward: bool):
    """Inputs, output gradient, oracle and the naive formula's results: shared by the variants of one case."""
    spec = kernel_ladder.spec(op)
    case = spec.samples[case_index]
    inputs = make_inputs(case, dtype, DEVICE)
    grad = None
    if backward:
        grad = make_grad(spec, inputs, case.options)
    exact = oracle(spec, inputs, case.options, grad)
    return inputs, grad, exact, baseline(spec, inputs, case.options, grad, exact)


def is_tried(variant: Variant, index: int, case: Case, dtype: torch.dtype) -> bool:
    """Whether a variant is tried on a sample in a dtype: on all in all, where that does not take hours.

    A compiler takes seconds or minutes for a sample; Triton's interpreter so long that each has one dtype by turns.
    """
    if variant.name == "compile.max_autotune":
        return case.id == "prime"
    if variant.level == "compile":
        return index % 7 == 0
    if dtype is torch.float64 and variant.level in ("triton", "cuda"):
        return index == 0  # that they refuse it, one sample tells
    return variant.level != "triton" or DEVICE.type == "cuda" or index == 0 or DTYPES.index(dtype) == index % 3


def parameters():
    for variant in every_variant():
        reason = table.unavailable(variant.op, variant.level)
        if reason is not None:
            yield pytest.param(variant, None, None, None, id=variant_id(variant), marks=pytest.mark.skip(reason=reason))
    for op in kernel_ladder.OPS:
        variants = [v for v in table.variants(op) if table.unavailable(op, v.level) is None]
        for index, case in enumerate(kernel_ladder.spec(op).samples):
            for dtype, backward, variant in itertools.product(DTYPES, (False, True), variants):
                if not is_tried(variant, index, case, dtype):
                    continue
                ident = f"{op}-{variant.name}-{str(dtype).removeprefix('torch.')}-{case.id}"
                ident += "-backward" if backward else "-forward"
                yield pytest.param(variant, index, dtype, backward, id=ident)


#: Where the formula itself departs from float64, anywhere: (variant, samples) -> what it does.
KNOWN = {
    ("swiglu", "torch.naive", ("large",)): "the sigmoid's gradient overflows float16 before a slope of zero meets it",
}

#: Where PyTorch itself departs from the formula, on the CPU only.
KNOWN_ON_CPU = {
    ("gelu", "torch.builtin", ("none-inf",)): "PyTorch's CPU kernel gives NaN for +inf, its CUDA kernel +inf",
    ("bias_gelu", "torch.builtin", ("none-inf",)): "PyTorch's CPU kernel gives NaN for +inf, its CUDA kernel +inf",
    (
        "bias_gelu",
        "compile.default",
        ("none-many-rows", "tanh-many-rows"),
    ): "Inductor's CPU kernel adds up a long column in one chain",
    (
        "softmax",
        "torch.builtin",
        ("million", "long", "neg-inf-long-rows", "medium"),
    ): "PyTorch's CPU kernel adds up a long row in fewer partial sums than a plain sum does",
    ("sum", "compile.default", ("long-columns",)): "Inductor's CPU code adds up a column in one chain",
    (
        "layer_norm",
        "torch.builtin",
        ("one", "column", "offset", "offset-long"),
    ): "PyTorch's CPU kernel has x * rstd - mean * rstd in the gradients, which cancels for a large mean",
    ("layer_norm", "torch.builtin", ("many-rows",)): "PyTorch's CPU kernel adds up weight gradients in 16 bits",
    ("layer_norm", "compile.default", ("offset-long",)): "Inductor's running mean of a long row rounds at every step",
}


#: The same on a GPU, in float32.
KNOWN_ON_GPU = {
    ("bias_gelu", "torch.builtin", ("tanh-one",)): "PyTorch rounds the sum to bfloat16 before the activation's slope",
    (
        "attention",
        "torch.builtin",
        ("scale-causal", "d256-causal"),
    ): "PyTorch's memory-efficient backward sums float32 gradients in an order that varies, up to 1.4 times the bound",
}


def known_departure(op: str, variant: str, sample: str) -> str | None:
    known = KNOWN | (KNOWN_ON_CPU if DEVICE.type == "cpu" else KNOWN_ON_GPU)
    for (known_op, known_variant, samples), reason in known.items():
        if (known_op, known_variant) == (op, variant) and sample in samples:
            return reason
    return None


@pytest.mark.parametrize(("variant", "case_index", "dtype", "backward"), list(parameters()))
def test_agreement(variant, case_index, dtype, backward, request):
    spec = kernel_ladder.spec(variant.op)
    case = spec.samples[case_index]
    inputs, grad, exact, naive = expected(variant.op, case_index, dtype, backward)
    reason = variant.unsupported(*(as_leaves(inputs) if backward else inputs), **case.options)
    if reason is not None:
        pytest.skip(reason)
    if known := known_departure(variant.op, variant.name, case.id):
        request.applymarker(pytest.mark.xfail(reason=known, strict=False))
    result = agreement(
        spec,
        lambda *x, **options: autograd.run(variant, x, options),
        inputs,
        case.options,
        grad,
        exact=exact,
        naive=naive,
    )
    assert result.agrees, str(result)
