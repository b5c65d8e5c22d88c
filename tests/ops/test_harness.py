"""The agreement check itself: wrong implementations it must reject, right ones it must accept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

import kernel_ladder
from kernel_ladder.spec import Case, as_leaves, as_tuple, converted, each, has_gradient
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import (
    BUILTIN_ON_GPU,
    NO_GRADIENT,
    OWN_DTYPES,
    differentiable_ops,
    elements,
    plain_cases,
    typical_case,
)

#: What is under test is the check, whose verdict does not depend on where it runs.
DEVICE = torch.device("cpu")

ATTENTION = {"is_causal": True, "scale": None, "enable_gqa": False}
ATTENTION_SHAPES = ((2, 2, 65, 32),) * 3


def judge(op: str, run: Callable, case: Case, dtype: torch.dtype, backward: bool = False):
    spec = kernel_ladder.spec(op)
    inputs = make_inputs(case, dtype, DEVICE)
    grad = None
    if backward:
        grad = make_grad(spec, inputs, case.options)
    return agreement(spec, run, inputs, case.options, grad)


def right_of(op: str) -> Callable:
    """What the wrong implementations are made of: PyTorch's own function, or the formula where it has none here."""
    spec = kernel_ladder.spec(op)
    return spec.reference if spec.builtin is None or op in BUILTIN_ON_GPU else spec.builtin


# ---- wrong for every operation -------------------------------------------------------------------------------------


def all_zeros(output):
    return torch.zeros_like(output)


def dropped_tail_tile(output):
    output = output.clone()
    output[..., output.shape[-1] // 32 * 32 :] = 0
    return output


def largest_element_off(output):
    output = output.clone()
    output.view(-1)[output.abs().argmax()] *= 1.1
    return output


def one_nan(output):
    output = output.clone()
    output.view(-1)[0] = torch.nan
    return output


def wrong_dtype(output):
    return output.float()


def wrong_shape(output):
    return output[None]


def shifted(output):
    return output.roll(1, -1)


def tail_case(op: str) -> Case:
    """A small sample whose output ends within a tile of 32, else there is no tail to drop."""
    spec = kernel_ladder.spec(op)

    def last_dimension(case: Case) -> int:
        (shape, *_) = spec.output_shapes(make_inputs(case, torch.bfloat16, DEVICE), case.options)
        return shape[-1] if shape else 0

    fitting = [case for case in plain_cases(op) if elements(case) <= 10_000]
    return max((case for case in fitting if last_dimension(case) > 32 and last_dimension(case) % 32), key=elements)


@pytest.mark.parametrize(
    "wrong", [all_zeros, dropped_tail_tile, largest_element_off, one_nan, wrong_dtype, wrong_shape, shifted]
)
@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_rejects(op, wrong):
    right = right_of(op)

    def run(*inputs, **options):
        outputs = tuple(map(wrong, as_tuple(right(*inputs, **options))))
        return outputs if len(outputs) > 1 else outputs[0]

    result = judge(op, run, tail_case(op), torch.bfloat16)
    assert not any(deviation.agrees for deviation in result.deviations), str(result)


@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_rejects_a_stale_output_buffer(op):
    case = typical_case(op)
    stale = right_of(op)(*make_inputs(case, torch.float32, DEVICE, seed=7), **case.options)
    assert not judge(op, lambda *x, **options: stale, case, torch.float32).agrees


@pytest.mark.parametrize("op", differentiable_ops())
def test_rejects_wrong_gradients(op):
    case = typical_case(op)

    class Wrong(torch.autograd.Function):
        factor = 1.0

        @staticmethod
        def forward(ctx, *inputs):
            ctx.save_for_backward(*inputs)
            return right_of(op)(*inputs, **case.options)

        @staticmethod
        def backward(ctx, *grad):
            with torch.enable_grad():
                leaves = as_leaves(ctx.saved_tensors)
                wanted = [x for x in leaves if has_gradient(x)]
                grads = iter(torch.autograd.grad(as_tuple(right_of(op)(*leaves, **case.options)), wanted, grad))
            return tuple(Wrong.factor * next(grads) if has_gradient(x) else None for x in leaves)

    def run(*inputs, **options):
        return Wrong.apply(*inputs)

    assert judge(op, run, case, torch.float32, backward=True).agrees, "the scaffold itself must be right"
    for Wrong.factor in (0.0, -1.0, 1.01):
        result = judge(op, run, case, torch.float32, backward=True)
        for deviation in result.deviations:
            assert deviation.agrees == deviation.name.startswith("output"), str(result)


@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_rejects_nan_that_was_swallowed(op):
    right = right_of(op)
    case = typical_case(op)
    case = dataclasses.replace(case, id="nan", layout="contiguous", values="nan")

    def swallowed(x: torch.Tensor) -> torch.Tensor:
        return torch.nan_to_num(x.float()).to(x.dtype) if x.dtype is torch.float8_e4m3fn else torch.nan_to_num(x)

    run = lambda *x, **options: right(*each(swallowed, x), **options)  # noqa: E731
    assert not judge(op, run, case, torch.float32).agrees


# ---- wrong in a way of one operation -------------------------------------------------------------------------------


def softmax_without_max(input, dim):
    e = torch.exp(input)
    return e / e.sum(dim, keepdim=True)


def softmax_over_the_wrong_dim(input, dim):
    return torch.softmax(input, dim=-1 - dim)


def softmax_tail_counted_as_zero(input, dim):
    # A tile of 64 padded with 0 where −inf belongs.
    padding = -input.shape[-1] % 64
    return torch.softmax(torch.nn.functional.pad(input, (0, padding)), dim)[..., : input.shape[-1]]


def matmul_accumulated_in_16_bits(input, other):
    total = torch.zeros(input.shape[0], other.shape[1], dtype=input.dtype, device=input.device)
    for k in range(input.shape[1]):
        total += input[:, k, None] * other[None, k]
    return total


def matmul_of_the_transpose(input, other):
    return input @ other.T


def matmul_without_the_last_k_tile(input, other):
    k = (input.shape[1] - 1) // 64 * 64
    return input[:, :k] @ other[:k]


def _attention(query, key, value, mask, scale):
    scores = query.double() @ key.double().mT * scale
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value.double()).to(query.dtype)


def _causal(query, key, diagonal=0):
    return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril(diagonal)


def attention_mask_off_by_one(query, key, value, **options):
    return _attention(query, key, value, _causal(query, key, 1), 1 / math.sqrt(query.shape[-1]))


def attention_without_mask(query, key, value, **options):
    return _attention(query, key, value, _causal(query, key, key.shape[-2]), 1 / math.sqrt(query.shape[-1]))


def attention_wrong_scale(query, key, value, **options):
    return _attention(query, key, value, _causal(query, key), 1 / query.shape[-1])


def attention_right(query, key, value, **options):
    return _attention(query, key, value, _causal(query, key), 1 / math.sqrt(query.shape[-1]))


def gelu_of_the_other_form(input, *, approximate):
    return torch.nn.functional.gelu(input, approximate="tanh" if approximate == "none" else "none")


def gelu_by_sigmoid(input, *, approximate):
    return input * torch.sigmoid(1.702 * input)


def sum_accumulated_in_16_bits(input, *, dim, keepdim):
    total = torch.zeros_like(input[..., 0])
    for column in input.unbind(-1):
        total += column
    return total


def sum_without_the_last_element(input, *, dim, keepdim):
    return input[..., :-1].sum(dim, keepdim)


def sum_of_another_dim(input, *, dim, keepdim):
    return input.sum(0, keepdim)


def sum_in_one_float32_chain(input, *, dim, keepdim):
    return torch.from_numpy(input.numpy().cumsum(-1)[..., -1])


def add_of_a_column(input, other):
    return input + other[:, None]


def add_without_the_other(input, other):
    return input.clone()


def dropout_of_another_seed(input, *, p, seed):
    return kernel_ladder.dropout(input, p, seed=seed + 1, backend="torch")


def dropout_without_scale(input, *, p, seed):
    return kernel_ladder.dropout(input, p, seed=seed, backend="torch") * (1 - p)


def dropout_counted_in_memory_order(input, *, p, seed):
    return kernel_ladder.dropout(input.mT.contiguous(), p, seed=seed, backend="torch").mT


def dropout_that_stops_nan(input, *, p, seed):
    dropped = kernel_ladder.dropout(torch.ones_like(input), p, seed=seed, backend="torch") == 0
    return kernel_ladder.dropout(input, p, seed=seed, backend="torch").masked_fill(dropped, 0)


def bias_gelu_without_bias(input, bias, *, approximate):
    return torch.nn.functional.gelu(input, approximate=approximate)


def linear_without_bias(input, weight, bias, *, activation):
    return kernel_ladder.linear(input, weight, None, activation, backend="torch")


def linear_activated_before_its_bias(input, weight, bias, *, activation):
    return kernel_ladder.linear(input, weight, None, activation, backend="torch") + bias


def swiglu_of_swapped_operands(gate, up):
    return torch.nn.functional.silu(up) * gate


def swiglu_without_the_product(gate, up):
    return torch.sigmoid(gate) * up


def rope_of_other_pairs(input, freqs_cis, *, interleaved, offset):
    return kernel_ladder.rope(input, freqs_cis, interleaved=not interleaved, offset=offset, backend="torch")


def rope_of_the_next_position(input, freqs_cis, *, interleaved, offset):
    return kernel_ladder.rope(input, freqs_cis.roll(-1, 0), interleaved=interleaved, offset=offset, backend="torch")


def rope_by_opposite_angles(input, freqs_cis, *, interleaved, offset):
    return kernel_ladder.rope(input, freqs_cis.conj(), interleaved=interleaved, offset=offset, backend="torch")


def rope_without_offsets(input, freqs_cis, offsets, *, interleaved, offset):
    return kernel_ladder.rope(input, freqs_cis, interleaved=interleaved, offset=offset, backend="torch")


def rope_by_the_offset_of_another(input, freqs_cis, offsets, **options):
    return kernel_ladder.rope(input, freqs_cis, offsets.flip(0), **options, backend="torch")


def entropy_of_the_next_class(input, target, **options):
    return kernel_ladder.cross_entropy(input.roll(1, -1), target, **options, backend="torch")


def entropy_over_every_row(input, target, *, ignore_index, reduction, **options):
    rows = kernel_ladder.cross_entropy(input, target, ignore_index=ignore_index, reduction="none", backend="torch")
    return rows.mean()


def entropy_without_smoothing(input, target, *, label_smoothing, **options):
    return kernel_ladder.cross_entropy(input, target, **options, backend="torch")


def linear_entropy_of_twice_the_weight(input, linear_weight, target, **options):
    return kernel_ladder.linear_cross_entropy(input, 2 * linear_weight, target, **options, backend="torch")


ENTROPY = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0}
LABELS = Case("", ((33, 65), (33,)), ENTROPY, kinds={1: "some_classes"})
LINEAR_LABELS = Case("", ((33, 16), (65, 16), (33,)), {**ENTROPY, "wide_loss": False}, kinds={2: "classes@1"})
SMOOTHED = Case("", ((33, 65), (33,)), {**ENTROPY, "label_smoothing": 0.1}, kinds={1: "classes"})
ROPE = Case("", ((2, 9, 64), (9, 32)), {"interleaved": False, "offset": 0}, kinds={1: "rotations"})
ROPES = Case("", ((2, 3, 9, 64), (30, 32), (2,)), ROPE.options, kinds={1: "rotations", 2: "starts:3,20"})
LAYER = Case("", ((33, 65), (34, 65), (34,)), {"activation": "gelu"})
DROPOUT = {"p": 0.1, "seed": 42}

WRONG = [
    ("sum", sum_accumulated_in_16_bits, Case("", ((8, 4096),), {"dim": -1, "keepdim": False}), torch.bfloat16),
    ("sum", sum_without_the_last_element, Case("", ((8, 4097),), {"dim": -1, "keepdim": False}), torch.float32),
    ("sum", sum_of_another_dim, Case("", ((33, 33),), {"dim": -1, "keepdim": False}), torch.bfloat16),
    ("sum", sum_in_one_float32_chain, Case("", ((4, 500_000),), {"dim": -1, "keepdim": False}), torch.float32),
    ("add", add_of_a_column, Case("", ((33, 33), (33,))), torch.bfloat16),
    ("add", add_without_the_other, Case("", ((33, 33), (33,))), torch.bfloat16),
    ("gelu", gelu_of_the_other_form, Case("", ((64, 65),), {"approximate": "none"}), torch.float32),
    ("gelu", gelu_by_sigmoid, Case("", ((64, 65),), {"approximate": "tanh"}), torch.float16),
    ("softmax", softmax_without_max, Case("", ((8, 257),), {"dim": -1}, values="large"), torch.float32),
    ("softmax", softmax_over_the_wrong_dim, Case("", ((16, 16),), {"dim": -1}), torch.bfloat16),
    ("softmax", softmax_tail_counted_as_zero, Case("", ((8, 65),), {"dim": -1}), torch.bfloat16),
    ("matmul", matmul_accumulated_in_16_bits, Case("", ((32, 4096), (4096, 32))), torch.float16),
    ("matmul", matmul_accumulated_in_16_bits, Case("", ((32, 4096), (4096, 32))), torch.bfloat16),
    ("matmul", matmul_of_the_transpose, Case("", ((33, 33), (33, 33))), torch.bfloat16),
    ("matmul", matmul_without_the_last_k_tile, Case("", ((33, 129), (129, 33))), torch.bfloat16),
    ("attention", attention_mask_off_by_one, Case("", ATTENTION_SHAPES, ATTENTION), torch.bfloat16),
    ("attention", attention_without_mask, Case("", ATTENTION_SHAPES, ATTENTION), torch.bfloat16),
    ("attention", attention_wrong_scale, Case("", ATTENTION_SHAPES, ATTENTION), torch.bfloat16),
    ("dropout", dropout_of_another_seed, Case("", ((16, 17),), DROPOUT), torch.bfloat16),
    ("dropout", dropout_without_scale, Case("", ((16, 17),), DROPOUT), torch.bfloat16),
    ("dropout", dropout_counted_in_memory_order, Case("", ((16, 17),), DROPOUT, layout="transposed"), torch.bfloat16),
    ("dropout", dropout_that_stops_nan, Case("", ((257,),), DROPOUT, values="nan"), torch.float32),
    ("bias_gelu", bias_gelu_without_bias, Case("", ((64, 65), (65,)), {"approximate": "none"}), torch.bfloat16),
    ("linear", linear_without_bias, LAYER, torch.bfloat16),
    ("linear", linear_activated_before_its_bias, LAYER, torch.bfloat16),
    ("swiglu", swiglu_of_swapped_operands, Case("", ((64, 65),) * 2), torch.bfloat16),
    ("swiglu", swiglu_without_the_product, Case("", ((64, 65),) * 2), torch.bfloat16),
    ("cross_entropy", entropy_of_the_next_class, LABELS, torch.bfloat16),
    ("cross_entropy", entropy_over_every_row, LABELS, torch.bfloat16),
    ("cross_entropy", entropy_without_smoothing, SMOOTHED, torch.float32),
    ("linear_cross_entropy", linear_entropy_of_twice_the_weight, LINEAR_LABELS, torch.bfloat16),
    ("rope", rope_of_other_pairs, ROPE, torch.bfloat16),
    ("rope", rope_of_the_next_position, ROPE, torch.bfloat16),
    ("rope", rope_by_opposite_angles, ROPE, torch.bfloat16),
    ("rope", rope_without_offsets, ROPES, torch.bfloat16),
    ("rope", rope_by_the_offset_of_another, ROPES, torch.bfloat16),
]


@pytest.mark.parametrize(
    ("op", "wrong", "case", "dtype"),
    [
        pytest.param(*w, id=f"{w[1].__name__}-{str(w[3]).removeprefix('torch.')}")
        for w in WRONG
        if w[0] in kernel_ladder.OPS
    ],
)
def test_rejects_of_one_operation(op, wrong, case, dtype):
    result = judge(op, wrong, case, dtype)
    assert not result.agrees, str(result)


# ---- right ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_accepts_exact_results_rounded_once(op, dtype):
    spec, case = kernel_ladder.spec(op), typical_case(op)

    def exact(*inputs, **options):
        outputs = spec.reference(*converted(inputs, torch.float64), **options)
        to = getattr(torch, options["out_dtype"]) if op in OWN_DTYPES else dtype
        return converted(outputs, to) if isinstance(outputs, tuple) else outputs.to(to)

    result = judge(op, exact, case, dtype, backward=op not in NO_GRADIENT)
    assert result.agrees, str(result)


@pytest.mark.skipif("attention" not in kernel_ladder.OPS, reason="no attention in the table")
def test_accepts_what_the_wrong_attentions_are_made_of():
    assert judge("attention", attention_right, Case("", ATTENTION_SHAPES, ATTENTION), torch.bfloat16).agrees
