"""Packed sequences at the cuda level: which calls each rung takes, and gradients of many tiles against float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import cuda_impl
import kernel_ladder
from kernel_ladder import autograd, gpu, selection, table
from kernel_ladder.spec import Case
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.samples import make_inputs, on_absent_gpu

from ..conftest import DEVICE, needs_extension, needs_gpu, skip_unless_it_runs

NAMES = ("cuda.flash", "cuda.pingpong")


def packed(of_q: list[int], of_k: list[int], d: int, d_v: int, layout: str = "contiguous", **band: Any) -> Case:
    """Sequences at these offsets; six heads of queries share two of keys."""
    shapes = (of_q[-1], 6, d), (of_k[-1], 2, d), (of_k[-1], 2, d_v), (len(of_q),), (len(of_k),)
    kinds = {3: "offsets:" + ",".join(map(str, of_q)), 4: "offsets:" + ",".join(map(str, of_k))}
    longest = {f"max_seqlen_{x}": max(b - a for a, b in itertools.pairwise(o)) for x, o in (("q", of_q), ("k", of_k))}
    options = {"is_causal": False, "scale": None, "enable_gqa": True, "return_lse": True, **longest, **band}
    return Case("", shapes, options, layout=layout, kinds=kinds)


def rung(name: str) -> table.Variant:
    found = [v for v in table.variants("attention_varlen") if v.name == name]
    return found[0] if found else pytest.skip(f"{name} is not installed")


# ---- without a GPU -------------------------------------------------------------------------------------------------


@needs_extension
@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("gpu_name", "d", "d_v", "taken", "inference", "training"),
    [
        ("H100", 64, 64, {"cuda.flash", "cuda.pingpong"}, "cuda.pingpong", "cuda.pingpong"),
        ("H100", 96, 96, {"cuda.flash", "cuda.pingpong"}, "cuda.pingpong", "cuda.pingpong"),
        ("H100", 192, 128, {"cuda.flash", "cuda.pingpong"}, "cuda.pingpong", "triton.flash"),
        ("H100", 256, 256, {"cuda.flash", "cuda.pingpong"}, "cuda.pingpong", "triton.flash"),
        ("H100", 60, 64, {"cuda.flash"}, "triton.flash", "triton.flash"),
        ("A10", 128, 128, {"cuda.flash"}, "triton.flash", "triton.flash"),
        ("RTX 5090", 256, 256, {"cuda.flash"}, "triton.flash", "triton.flash"),
    ],
)
def test_what_is_taken_and_chosen(monkeypatch, gradients, gpu_name, d, d_v, taken, inference, training):
    monkeypatch.setattr(cuda_impl, "architectures", lambda: ["sm_80", "sm_90a", "sm_120"])
    case = packed([0, 5, 40], [0, 9, 33], d, d_v, is_causal=True)
    with gpu.pretend(gpu_name), on_absent_gpu(case, torch.bfloat16, gradients=gradients) as inputs:
        rungs = table.variants("attention_varlen", "cuda")
        assert {v.name for v in rungs if v.unsupported(*inputs, **case.options) is None} == taken
        found = selection.resolve("attention_varlen", "auto", inputs, case.options).name
    assert found == (training if gradients else inference)


@needs_extension
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("longest", ["known", "unknown"])
def test_what_a_ring_saves_is_what_the_forward_pass_saves(name, longest):
    variant = rung(name)
    case = packed([0, 5, 40], [0, 9, 33], 64, 64, is_causal=True, window_size=(7, -1), scale=0.3)
    options = dict(case.options) if longest == "known" else {**case.options, "max_seqlen_q": None, "max_seqlen_k": None}
    with on_absent_gpu(case, torch.bfloat16, gradients=False) as inputs:
        outputs, saved = variant.forward(*inputs, **options)
        found = variant.saved_from(inputs, outputs, options)
    same = [x is y if isinstance(x, torch.Tensor) else x == y for x, y in zip(found, saved, strict=True)]
    assert all(same), same


# ---- on a GPU ------------------------------------------------------------------------------------------------------

BANDS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window_size": (100, 20)},
    "causal-window": {"is_causal": True, "window_size": (40, -1)},
}
#: Lengths around tiles of 64, 80 and 128 rows, none at all, and longer ones; of keys fewer and more.
OFFSETS = {
    "edges": ([0, 1, 65, 193, 193, 322, 400], [0, 129, 193, 194, 260, 389, 389]),
    "borders": ([0, 63, 128, 255, 255, 256, 385, 449], [0, 65, 128, 128, 255, 384, 385, 449]),
    "long": ([0, 700, 701, 1500], [0, 300, 1400, 2000]),
}


@needs_gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize(
    ("d", "d_v", "dtype"),
    [
        (32, 32, torch.bfloat16),
        (64, 64, torch.float16),
        (72, 72, torch.float16),
        (96, 96, torch.bfloat16),
        (128, 128, torch.bfloat16),
        (128, 64, torch.bfloat16),
        (192, 128, torch.bfloat16),
        (40, 136, torch.float16),
        (256, 256, torch.bfloat16),
    ],
    ids=str,
)
def test_both_passes_at_the_edges_of_tiles(name, band, offsets, d, d_v, dtype):
    """Output, log-sum-exp and their gradients, heads that share keys, in both orders of memory."""
    spec, variant = kernel_ladder.spec("attention_varlen"), rung(name)
    of_q, of_k = OFFSETS[offsets]
    for layout in ("contiguous", "bshd"):
        case = packed(of_q, of_k, d, d_v, layout=layout, **BANDS[band])
        inputs = make_inputs(case, dtype, DEVICE)
        skip_unless_it_runs(variant, inputs, case.options)
        rows = of_q[-1]
        grad = torch.randn(rows, 6, d_v, device=DEVICE).to(dtype), torch.randn(6, rows, device=DEVICE)
        run = lambda *x, **o: autograd.run(variant, x, o)  # noqa: E731
        result = agreement(spec, run, inputs, case.options, grad)
        assert result.agrees, f"{layout}: {result}"


@needs_gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gradients_are_those_of_each_sequence_alone(name, is_causal):
    """In every bit, whatever the other sequences hold, NaN included; and in every run."""
    variant = rung(name)
    case = packed([0, 130, 330], [0, 200, 350], 64, 64, is_causal=is_causal, return_lse=False)
    inputs = make_inputs(case, torch.bfloat16, DEVICE)
    skip_unless_it_runs(variant, inputs, case.options)
    grad = torch.randn(330, 6, 64, device=DEVICE).to(torch.bfloat16)
    gradients = lambda *x, g: variant.backward(variant.forward(*x, **case.options)[1], g, (True,) * 3 + (False,) * 2)  # noqa: E731
    first = gradients(*inputs, g=grad)[:3]
    assert all(torch.equal(x, y) for x, y in zip(first, gradients(*inputs, g=grad)[:3], strict=True))
    for x, begin in zip(inputs[:3], (130, 200, 200), strict=True):
        x[begin:] = torch.nan
    grad[130:] = torch.nan
    for before, after, end in zip(first, gradients(*inputs, g=grad)[:3], (130, 200, 200), strict=True):
        torch.testing.assert_close(after[:end], before[:end], rtol=0, atol=0)
    short = [x[:end] for x, end in zip(inputs[:3], (130, 200, 200), strict=True)]
    offsets = [torch.tensor([0, end], dtype=torch.int32, device=DEVICE) for end in (130, 200)]
    alone = gradients(*short, *offsets, g=grad[:130])[:3]
    for one, other, end in zip(alone, first, (130, 200, 200), strict=True):
        torch.testing.assert_close(one, other[:end], rtol=0, atol=0)


@needs_gpu
@pytest.mark.parametrize("name", NAMES)
def test_lengths_of_which_the_host_is_told_nothing(name):
    """Without `max_seqlen` a grid has tiles for all rows; an expanded gradient of the output is read by its strides."""
    variant = rung(name)
    case = packed([0, 3, 200], [0, 90, 170], 64, 64, is_causal=True, return_lse=False)
    inputs = make_inputs(case, torch.bfloat16, DEVICE)
    skip_unless_it_runs(variant, inputs, case.options)
    grad = torch.ones((), device=DEVICE, dtype=torch.bfloat16).expand(200, 6, 64)
    unknown = {**case.options, "max_seqlen_q": None, "max_seqlen_k": None}
    found = [
        variant.backward(variant.forward(*inputs, **options)[1], each, (True,) * 3 + (False,) * 2)[:3]
        for options, each in ((case.options, grad.contiguous()), (unknown, grad))
    ]
    for told, not_told in zip(*found, strict=True):
        torch.testing.assert_close(not_told, told, rtol=0, atol=0)


def gradients(variant: table.Variant, inputs: tuple, options: dict, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return variant.backward(variant.forward(*inputs, **options)[1], grad, (True,) * 3 + (False,) * 2)[:3]


@needs_gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize(("d", "d_v"), [(64, 64), (72, 72), (128, 128), (128, 64)])
def test_other_sequences_leave_a_gradient_alone(name, is_causal, value, d, d_v):
    """Tiles hold rows of the sequences before and after, whose NaN and infinity must not be multiplied by zero."""
    variant = rung(name)
    case = packed([0, 70, 199, 330], [0, 65, 266, 400], d, d_v, is_causal=is_causal, return_lse=False)
    inputs = make_inputs(case, torch.bfloat16, DEVICE)
    skip_unless_it_runs(variant, inputs, case.options)
    grad = torch.randn(330, 6, d_v, device=DEVICE).to(torch.bfloat16)
    own = [slice(70, 199), slice(65, 266), slice(65, 266)]
    before = gradients(variant, inputs, case.options, grad)
    for x, rows in zip((*inputs[:3], grad), (*own, own[0]), strict=True):
        kept = x[rows].clone()
        x.fill_(value)
        x[rows] = kept
    after = gradients(variant, inputs, case.options, grad)
    for x, y, rows in zip(before, after, own, strict=True):
        assert x[rows].isfinite().all()
        torch.testing.assert_close(y[rows], x[rows], rtol=0, atol=0)


@needs_gpu
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gradients_of_many_tiles_repeat_in_every_bit(d, is_causal):
    """More tiles of keys than a GPU has room for at once, which add to one dQ."""
    variant = rung("cuda.pingpong")
    case = packed([0, 3000, 3001, 9000], [0, 2500, 4000, 9500], d, d, is_causal=is_causal, return_lse=False)
    inputs = make_inputs(case, torch.bfloat16, DEVICE)
    skip_unless_it_runs(variant, inputs, case.options)
    grad = torch.randn(9000, 6, d, device=DEVICE).to(torch.bfloat16)
    first = gradients(variant, inputs, case.options, grad)
    for _ in range(20):
        again = gradients(variant, inputs, case.options, grad)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


#: Offsets in 4096 rows that the host does not see. Sequences overlap, so that tiles of two of them share counters.
WRONG = {
    "past": (0, 2000, 2**31 - 1),
    "fall": (0, 4096, 0, 4096),
    "fall-often": (0, 3000, 100, 4000, 200, 4096),
    "below": (-(2**31), 1000, -5, 4096),
    "late": (1000, 2000, 3000),
    "nowhere": (2**31 - 1, -(2**31), 2**31 - 1),
}


@needs_gpu
@pytest.mark.parametrize("places", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("of", ["q", "k", "both"])
def test_gradients_with_wrong_offsets_end(places, of):
    """Blocks wait for each other by offsets: wrong ones must give wrong rows, not a kernel that never ends."""
    variant = rung("cuda.pingpong")
    right = [4096 * i // (len(places) - 1) for i in range(len(places))]
    case = packed(right, right, 128, 128, is_causal=True, return_lse=False)
    inputs = make_inputs(case, torch.bfloat16, DEVICE)
    skip_unless_it_runs(variant, inputs, case.options)
    grad = torch.randn(4096, 6, 128, device=DEVICE).to(torch.bfloat16)
    before = gradients(variant, inputs, case.options, grad)
    wrong = torch.tensor(places, dtype=torch.int32, device=DEVICE)
    of_q, of_k = (inputs[3] if of == "k" else wrong), (inputs[4] if of == "q" else wrong)
    gradients(variant, (*inputs[:3], of_q, of_k), {**case.options, "max_seqlen_q": 4096, "max_seqlen_k": 4096}, grad)
    torch.cuda.synchronize()
    after = gradients(variant, inputs, case.options, grad)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
