"""Sinks of attention: the softmax with one logit more a row, at every level, with gradients, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kernel_ladder
from kernel_ladder import table
from kernel_ladder.semantics.masks import LOWER_RIGHT, NO_WINDOW, band, seen
from kernel_ladder.spec import Case
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import DEVICE, needs_gpu, skip_unless_it_runs

BACKENDS = [v for v in table.variants("attention") if v.name not in ("torch.builtin", "torch.cudnn", "compile.default")]
QKV = ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 16))


def formula(query, key, value, sinks, *, is_causal, scale, enable_gqa, window_size=NO_WINDOW, return_lse):
    """The sink stands beside the scores as one more column, whose weight meets no value."""
    group = query.shape[-3] // key.shape[-3]
    key, value = (x.repeat_interleave(group, dim=-3) for x in (key, value))
    lengths = query.shape[-2], key.shape[-2]
    visible = seen(*band(is_causal, window_size, *lengths), *lengths, query.device)

    def scores_of(query, key):
        scores = query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores.masked_fill(~visible, -torch.inf), column), -1)

    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    weights = torch.softmax(scores_of(query, key), -1, dtype=wide).to(value.dtype)
    output = weights[..., :-1] @ value
    return (output, torch.logsumexp(scores_of(query.to(wide), key.to(wide)), -1)) if return_lse else output


SPEC = replace(kernel_ladder.spec("attention"), reference=formula, oracle=None, yardstick=None, parts=None)


def case(**options) -> Case:
    options = {"is_causal": False, "scale": None, "enable_gqa": True, "return_lse": False, **options}
    return Case("", (*QKV, (4,)), options)


def holds(backend: str, of: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(of, dtype, DEVICE)

    def run(query, key, value, sinks, **options):
        return kernel_ladder.attention(query, key, value, sinks=sinks, backend=backend, **options)

    result = agreement(SPEC, run, inputs, of.options, make_grad(SPEC, inputs, of.options))
    assert result.agrees, str(result)
    assert any(d.name == "grad 3" for d in result.deviations)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("variant", BACKENDS, ids=lambda v: v.name)
def test_outputs_and_gradients_are_those_of_one_more_column(variant, dtype):
    of = case(is_causal=LOWER_RIGHT, return_lse=True)
    inputs = make_inputs(of, dtype, DEVICE)[:3]
    leaves = inputs if variant.backward is None else tuple(x.requires_grad_() for x in inputs)
    skip_unless_it_runs(variant, leaves, of.options)
    holds(variant.name, of, dtype)


@pytest.mark.parametrize("return_lse", [False, True])
def test_queries_that_see_no_key_have_the_sink_alone(return_lse):
    of = case(window_size=(0, 0), return_lse=return_lse)
    of = replace(of, shapes=((1, 2, 9, 8), (1, 2, 4, 8), (1, 2, 4, 8), (2,)))
    holds("torch.naive", of, torch.float32)
    query, key, value, sinks = make_inputs(of, torch.float32, DEVICE)
    options = {**of.options, "return_lse": True}
    output, lse = kernel_ladder.attention(query, key, value, sinks=sinks, backend="torch.naive", **options)
    assert not output[..., :5, :].any()
    assert torch.equal(lse[..., :5], sinks[:, None].expand(1, 2, 5))


def test_a_sink_of_minus_infinity_is_none():
    query, key, value, _ = make_inputs(case(), torch.float32, DEVICE)
    sinks = torch.full((4,), -torch.inf, device=DEVICE)
    with_sinks, without = (
        kernel_ladder.attention(query, key, value, enable_gqa=True, sinks=x, backend="torch.naive")
        for x in (sinks, None)
    )
    assert torch.equal(with_sinks, without)


def test_matrices_and_packed_sequences_take_sinks():
    query, key, value = torch.randn(3, 6, 8, device=DEVICE)
    sink = torch.randn(1, device=DEVICE)
    four = [x[None, None] for x in (query, key, value)]
    expected = kernel_ladder.attention(*four, sinks=sink, backend="torch.naive")
    matrices = kernel_ladder.attention(query, key, value, sinks=sink, backend="torch.naive")
    torch.testing.assert_close(matrices, expected[0, 0])
    offsets = torch.tensor([0, 6], dtype=torch.int32, device=DEVICE)
    packed = [x[:, None] for x in (query, key, value)]
    for is_causal in (False, True):
        expected, lse = kernel_ladder.attention(
            *four, sinks=sink, is_causal=is_causal, return_lse=True, backend="torch.naive"
        )
        options = {"is_causal": is_causal, "return_lse": True, "sinks": sink, "backend": "torch.naive"}
        output, of_packed = kernel_ladder.attention_varlen(*packed, offsets, offsets, **options)
        torch.testing.assert_close(output[:, 0], expected[0, 0])
        torch.testing.assert_close(of_packed, lse[0])


@needs_gpu  # on a CPU, a C++ compiler takes longer than all other tests of this file
def test_the_level_compile_takes_sinks():
    if (reason := table.unavailable("attention", "compile")) is not None:
        pytest.skip(reason)
    holds("compile", case(is_causal=True), torch.float32)


@pytest.mark.parametrize(
    ("sinks", "error", "message"),
    [
        ([0.0] * 4, TypeError, r"`sinks` must be a torch\.Tensor or None, got list"),
        (torch.zeros(3), ValueError, r"`sinks` must have one logit for each of the heads, shape \(4,\), got \(3,\)"),
        (torch.zeros(4, 1), ValueError, r"shape \(4,\), got \(4, 1\)"),
        (torch.zeros(4, dtype=torch.float16), TypeError, r"`sinks` has dtype float16; accepted are float32, bfloat16"),
        (
            torch.zeros(4, device="meta"),
            ValueError,
            r"`query` and `sinks` must be on the same device, got cpu and meta",
        ),
    ],
)
def test_what_does_not_fit_is_refused(sinks, error, message):
    query, key, value = (torch.zeros(shape, dtype=torch.bfloat16) for shape in QKV)
    with pytest.raises(error, match=message):
        kernel_ladder.attention(query, key, value, enable_gqa=True, sinks=sinks)
    packed = [x[0].transpose(0, 1) for x in (query, key, value)]
    offsets = (torch.tensor([0, 5], dtype=torch.int32), torch.tensor([0, 7], dtype=torch.int32))
    with pytest.raises(error, match=message):
        kernel_ladder.attention_varlen(*packed, *offsets, enable_gqa=True, sinks=sinks)


def test_faults_of_the_operands_are_told_first():
    query, key, value = (torch.zeros(shape) for shape in QKV)
    with pytest.raises(ValueError, match="must have the 4 heads of `query`"):
        kernel_ladder.attention(query, key, value, sinks=torch.zeros(4))
    with pytest.raises(TypeError, match=r"`key` must be a torch\.Tensor"):
        kernel_ladder.attention(query, None, value, sinks=torch.zeros(4))
    with pytest.raises(TypeError, match="`return_lse` must be a bool, got int"):
        kernel_ladder.attention(query, key, value, enable_gqa=True, return_lse=1, sinks=torch.zeros(4))
