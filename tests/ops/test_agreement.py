"""Every variant, in every dtype it takes, on every sample, forward and backward, against float64."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import NamedTuple

import pytest
import torch

import kernel_ladder
from kernel_ladder import autograd, table
from kernel_ladder.spec import DTYPES, PASSES, Case, Inputs, as_leaves
from kernel_ladder.table import Variant
from kernel_ladder.testing.agreement import agreement, standards
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import DEVICE, computes, every_variant, never_runs, variant_id, without_gradient

#: Sizes of the normalisations' samples that Triton's interpreter, which takes seconds for each, has smaller. All that
#: tells one from another there stays. Only `online` takes more than 32768 columns, by blocks of 8192, 4096 and 2048;
#: `naive` and `fused` go through rows by 32 and by 8.
INTERPRETED_SIZES = {
    "short": {70: 35},  # more rows than a tile of 32 has, and a last block of 8 that is not full
    "many-rows": {131: 35},  # likewise
    "transposed-middle": {37: 9},  # 36 rows of two dimensions, whole blocks of neither
    "long": {65537: 32769},  # one element in the last block, whichever the blocks; no multiple of anything
    "two-clusters": {5: 2, 65536: 49152},  # whole blocks of the largest; rows that one program loops over
    "million": {1_000_000: 100_000},  # a multiple of 16, and a last block that is not full
}


@functools.cache
def sample(op: str, case_index: int, interpreted: bool) -> Case:
    """A sample, as Triton's interpreter has it or as all others do."""
    case = kernel_ladder.spec(op).samples[case_index]
    if not interpreted or "norm" not in op or case.id not in INTERPRETED_SIZES:
        return case
    smaller = INTERPRETED_SIZES[case.id]

    def resized(sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if sizes is None else tuple(smaller.get(size, size) for size in sizes)

    options = {name: resized(x) if name == "normalized_shape" else x for name, x in case.options.items()}
    return dataclasses.replace(case, shapes=tuple(map(resized, case.shapes)), options=options)


@functools.lru_cache(maxsize=8)
def inputs_of(op: str, case_index: int, dtype: torch.dtype, interpreted: bool) -> Inputs:
    """The inputs of a case, shared by both passes of all variants."""
    return make_inputs(sample(op, case_index, interpreted), dtype, DEVICE)


@functools.lru_cache(maxsize=8)
def expected(op: str, case_index: int, dtype: torch.dtype, backward: bool, interpreted: bool):
    """The output's gradient, and what results are held to: shared by the variants of one case."""
    spec = kernel_ladder.spec(op)
    case, inputs = sample(op, case_index, interpreted), inputs_of(op, case_index, dtype, interpreted)
    grad = make_grad(spec, inputs, case.options) if backward else None
    return grad, standards(spec, inputs, case.options, grad)


#: The samples, by their index modulo 3, whose forward pass alone is tried in a dtype without a GPU, or of PyTorch's own
#: functions. For Triton's dtypes they are those that have the dtype by turns.
FORWARD_TURN = {dtype: i for i, dtype in enumerate(DTYPES[:3])}


def traits(case: Case) -> set:
    """What tells a sample from others to a compiler: layouts, values, kinds, options, and which arguments are there."""
    of_options = {(name, str(value)) for name, value in case.options.items() if isinstance(value, (str, bool))}
    given = ("given", tuple(shape is not None for shape in case.shapes))
    return {case.layout, case.values, *case.kinds.values(), given} | of_options


#: How many samples of an operation a compiler has without a GPU, each in the next dtype.
COMPILED_ON_CPU = 2


@functools.cache
def compiled_on_cpu(op: str) -> list[int]:
    """The samples that a compiler has without a GPU, which takes seconds for each.

    Each is the one with most traits that none before it has. They have something to compute.
    """
    samples = kernel_ladder.spec(op).samples
    left = [i for i, case in enumerate(samples) if computes(case)]
    chosen: list[int] = []
    seen: set = set()
    while left and len(chosen) < COMPILED_ON_CPU:
        best = max(left, key=lambda i: (len(traits(samples[i]) - seen), -i))
        left.remove(best)
        chosen.append(best)
        seen |= traits(samples[best])
    return chosen


#: The xla level has every third sample on a GPU and every eleventh without one, each in one dtype by turns, because XLA
#: compiles both passes of each. Pallas' interpreter becomes large programs: there its rungs have a third of these.
XLA_STRIDE = 3 if DEVICE.type == "cuda" else 11


#: Operations whose compiled code is of kinds that others' samples try in every dtype and layout: reductions of rows.
#: Those of float8 have one formula, whose dtypes do not follow the sample's.
COMPILED_ONCE = ("attention_paged", "cross_entropy", "linear_cross_entropy", "linear_float8")


def has_formula(op: str) -> bool:
    """Whether the compile level has the formula as well, which is what its compiler is tried on."""
    return any(v.name == "compile.formula" for v in table.variants(op, "compile"))


def is_tried(variant: Variant, index: int, case: Case, dtype: torch.dtype, backward: bool) -> bool:
    """Whether a variant is tried on a sample in a dtype: on all in all, where that does not take hours.

    A compiler takes seconds or minutes for a sample: few have it, forward alone in one dtype by turns. Without a GPU it
    has them in one dtype each, and backward alone, where the output is compared too. The first runs forward as well.
    Triton's interpreter takes so long that each has one dtype by turns. The forward pass alone is tried at every third
    sample without a GPU and of PyTorch's own functions, interpreted at every second: the backward pass has its output
    compared. The xla level has a share of the samples, by :data:`XLA_STRIDE`.
    """
    if without_gradient(variant):
        if backward:
            return index == 0  # that it refuses it, one sample tells
        backward = True  # there is no other pass that has its output compared
    if variant.name in ("compile.max_autotune", "compile.reduce_overhead"):  # the same code as compile.default
        return index == compiled_on_cpu(variant.op)[0] and dtype is torch.bfloat16
    if variant.level == "compile":
        if DEVICE.type == "cuda":
            by_turns = index == 0 or DTYPES.index(dtype) == index // 7 % len(DTYPES)
            return index % 7 == 0 and (backward or by_turns)
        few = compiled_on_cpu(variant.op)
        one = variant.op in COMPILED_ONCE or (variant.name == "compile.default" and has_formula(variant.op))
        if index not in few[: 1 if one else None]:
            return False
        turn = few.index(index)
        return dtype is DTYPES[(kernel_ladder.OPS.index(variant.op) + turn) % len(DTYPES)] and (backward or turn == 0)
    if variant.level == "xla":
        stride = XLA_STRIDE * (3 if variant.name == "xla.pallas" and DEVICE.type == "cpu" else 1)
        by_turns = DTYPES.index(dtype) == index // stride % len(DTYPES)
        return by_turns and index % stride == 0 and (backward or index % (4 * stride) == 0)
    few = DEVICE.type == "cpu" or variant.level == "torch"
    if few and not backward and index % 3 != FORWARD_TURN.get(dtype, 0):
        return False
    if dtype is torch.float64 and variant.level in ("triton", "cuda"):
        return index == 0  # that they refuse it, one sample tells
    if variant.level != "triton" or DEVICE.type == "cuda" or index == 0:
        return True
    return DTYPES.index(dtype) == index % 3 and (backward or index % 2 == 0)


def parameters():
    for variant in every_variant():
        reason = never_runs(variant)
        if reason is not None:
            yield pytest.param(variant, None, None, None, id=variant_id(variant), marks=pytest.mark.skip(reason=reason))
    for op in kernel_ladder.OPS:
        variants = [v for v in table.variants(op) if never_runs(v) is None]
        for index, case in enumerate(kernel_ladder.spec(op).samples):
            for dtype, backward, variant in itertools.product(DTYPES, (False, True), variants):
                if not is_tried(variant, index, case, dtype, backward):
                    continue
                ident = f"{op}-{variant.name}-{str(dtype).removeprefix('torch.')}-{case.id}"
                ident += "-backward" if backward else "-forward"
                yield pytest.param(variant, index, dtype, backward, id=ident)


class Departure(NamedTuple):
    """What is known to depart from float64 by more than its bound, and why."""

    op: str
    variant: str
    samples: tuple[str, ...]
    reason: str
    dtypes: tuple[torch.dtype, ...] = DTYPES
    passes: tuple[str, ...] = PASSES


SINGLE_AND_DOUBLE = (torch.float32, torch.float64)

#: Where the formula itself does, anywhere.
KNOWN = [
    *(
        Departure(
            *("attention_varlen", rung, ("nan", "inf")),
            "the formula has every score: what is no number in one sequence makes NaN of all",
        )
        for rung in ("compile.default", "xla.jit")
    ),
]

#: Where PyTorch does, on the CPU only.
KNOWN_ON_CPU = [
    *(
        Departure(
            *(op, "torch.builtin", ("none-inf",)),
            "PyTorch's CPU kernel gives NaN for +inf, its CUDA kernel +inf; in float16 on some CPUs alone",
            (torch.float16, torch.bfloat16, torch.float32),
        )
        for op in ("gelu", "bias_gelu")
    ),
    Departure(
        *("bias_gelu", "compile.default", ("none-many-rows", "tanh-many-rows")),
        "Inductor's CPU kernel adds up a long column in one chain",
        SINGLE_AND_DOUBLE,
        ("backward",),
    ),
    Departure(
        *("linear", "xla.jit", ("long-k",)),
        "XLA's CPU code adds up a product of few elements in one chain, and the slope of gelu passes its error on",
        (torch.float32,),
        ("backward",),
    ),
    Departure(
        *("softmax", "torch.builtin", ("million", "long", "neg-inf-long-rows", "medium")),
        "PyTorch's CPU kernel adds up a long row in as many partial sums as the CPU's vectors have lanes: often few",
        SINGLE_AND_DOUBLE,
    ),
    Departure(
        *("sum", "compile.default", ("long-columns", "million-columns")),
        "Inductor's CPU code adds up a column in one chain",
        SINGLE_AND_DOUBLE,
    ),
    Departure(
        *("sum", "compile.default", ("million",)),
        "Inductor's CPU code adds up a row in as many chains as the CPU's vectors have lanes: often few",
        SINGLE_AND_DOUBLE,
    ),
    Departure(
        *("layer_norm", "torch.builtin", ("one", "column")),
        "PyTorch's CPU kernel has x * rstd - mean * rstd in the gradients, which cancels where x is the mean",
        passes=("backward",),
    ),
    Departure(
        *("layer_norm", "torch.builtin", ("offset", "offset-long")),
        "PyTorch's CPU kernel has x * rstd - mean * rstd in the gradients, which cancels for a large mean",
        passes=("backward",),
    ),
    Departure(
        *("layer_norm", "compile.default", ("offset-long",)),
        "Inductor's running mean of a long row rounds at every step",
        SINGLE_AND_DOUBLE,
    ),
]

#: Where PyTorch does, on a GPU.
KNOWN_ON_GPU = [
    Departure(
        *("attention_varlen", "torch.naive", ("nan", "inf")),
        "the formula has every score: what is no number in one sequence makes NaN of all",
    ),
    Departure(
        *("bias_gelu", "torch.builtin", ("none-one", "tanh-one")),
        "PyTorch rounds the sum to 16 bits before the activation's slope",
        (torch.float16, torch.bfloat16),
        ("backward",),
    ),
    Departure(
        *("attention", "torch.builtin", ("mask-additive-number",)),
        "PyTorch's memory-efficient kernel multiplies scores by log2 e in float32 after it has added the mask",
        (torch.float32,),
        ("forward",),
    ),
    Departure(
        *("attention", "torch.builtin", ("scale-causal", "d256-causal")),
        "PyTorch's memory-efficient backward sums float32 gradients in an order that varies, up to 1.4 times the bound",
        (torch.float32,),
        ("backward",),
    ),
    Departure(
        *("layer_norm", "compile.default", ("one",)),
        "Inductor subtracts a product from itself, one of the two in an FMA: what rounding it leaves is the gradient",
        (torch.float32,),
        ("backward",),
    ),
    Departure(
        *("layer_norm", "compile.default", ("offset-long",)),
        "Inductor takes x̂ from a mean in float32: what rounding a large one leaves stays in the gradient",
        (torch.float32,),
        ("backward",),
    ),
    Departure(
        *("linear", "xla.jit", ("empty-k",)),
        "XLA's erf is right to two units in the last place; of so few values PyTorch's error is less than one",
        (torch.float32,),
    ),
    Departure(
        *("layer_norm", "torch.builtin", ("offset-long",)),
        "PyTorch's CUDA kernel takes x̂ from a mean in float32: what rounding a large one leaves stays in the gradient",
        (torch.float32,),
        ("backward",),
    ),
    *(
        Departure(
            *(op, "torch.builtin", ("inf",)),
            "PyTorch's CUDA kernel gives NaN for all of a row that holds an infinity, the formula zeros beside it",
        )
        for op in ("rms_norm", "add_rms_norm")
    ),
]


def known_departure(op: str, variant: str, sample: str, dtype: torch.dtype, pass_: str) -> str | None:
    for known in KNOWN + (KNOWN_ON_CPU if DEVICE.type == "cpu" else KNOWN_ON_GPU):
        here = sample in known.samples and dtype in known.dtypes and pass_ in known.passes
        if here and (known.op, known.variant) == (op, variant):
            return known.reason
    return None


@pytest.mark.sampled(device="cuda")
@pytest.mark.parametrize(("variant", "case_index", "dtype", "backward"), list(parameters()))
def test_agreement(variant, case_index, dtype, backward, request):
    spec = kernel_ladder.spec(variant.op)
    interpreted = variant.level == "triton" and DEVICE.type == "cpu"
    case = sample(variant.op, case_index, interpreted)
    inputs = inputs_of(variant.op, case_index, dtype, interpreted)
    reason = variant.unsupported(*(as_leaves(inputs) if backward else inputs), **case.options)
    if reason is not None:
        pytest.skip(reason)
    if known := known_departure(variant.op, variant.name, case.id, dtype, PASSES[backward]):
        request.applymarker(pytest.mark.xfail(reason=known, strict=False))
    grad, to = expected(variant.op, case_index, dtype, backward, interpreted)
    result = agreement(
        spec,
        lambda *x, **options: autograd.run(variant, x, options),
        inputs,
        case.options,
        grad,
        to=to,
    )
    assert result.agrees, str(result)
